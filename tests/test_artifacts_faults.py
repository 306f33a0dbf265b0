"""The store among processes that are killed or stopped, and on file systems that are full or closed."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kvmap.artifacts import ArtifactStore, StorageError, content_key, load_tensors, read_json, save_tensors
from kvmap.artifacts import _set_aside as set_aside
from kvmap.files import ArtifactCorrupt, link_or_copy, write_json
from kvmap.locks import machine
from kvmap.metrics import Metric
from kvmap.tracking import Run, read_metrics
from tests.lock_processes import pid_of_a_dead_process, until

STALE = 1.2

BUILDER = """
import sys, time
from pathlib import Path
from kvmap.artifacts import ArtifactStore

root, seconds, keys = Path(sys.argv[1]), float(sys.argv[2]), [int(key) for key in sys.argv[3].split(",")]

def say(what):
    with open(root / "log", "a") as stream:
        stream.write(f"{what}\\n")

for key in keys:
    def build(folder):
        say(f"begin {key}")
        (folder / "half").write_text("x" * 1000)
        time.sleep(seconds)
        (folder / "whole").write_text(str(key))
        say(f"end {key}")

    artifact = ArtifactStore(root / "artifacts", stale_seconds=float(sys.argv[4])).get_or_build(
        "thing", {"key": key}, build
    )
    assert (artifact.path / "whole").read_text() == str(key)
    say(f"{'made' if artifact.built else 'found'} {key}")
"""


class Builders:
    """Processes that want artifacts of one store, and the log they share."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, seconds: float, *keys: int) -> subprocess.Popen[bytes]:
        """A process that wants these, and takes so long to make one."""
        settings = [str(self.root), str(seconds), ",".join(map(str, keys)), str(STALE)]
        self.processes.append(subprocess.Popen([sys.executable, "-c", BUILDER, *settings]))
        return self.processes[-1]

    def said(self, what: str = "") -> list[str]:
        """Lines of the log that begin so."""
        log = self.root / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        return [line for line in lines if line.startswith(what)]

    def names(self) -> list[str]:
        """What lies in the store's folder."""
        return sorted(entry.name for entry in (self.root / "artifacts" / "thing").iterdir())

    def end(self) -> None:
        """Kills what still runs."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()


@pytest.fixture
def builders(tmp_path: Path) -> Iterator[Builders]:
    processes = Builders(tmp_path)
    yield processes
    processes.end()


def keys(*numbers: int) -> list[str]:
    return sorted(content_key("thing", {"key": number}) for number in numbers)


class TestProcesses:
    def test_many_that_want_the_same_make_each_once(self, builders: Builders) -> None:
        orders = [(1, 2, 3), (3, 2, 1), (2, 3, 1), (1, 3, 2), (3, 1, 2), (2, 1, 3)]
        processes = [builders.start(0.1, *order) for order in orders]
        assert [process.wait(60) for process in processes] == [0] * 6
        assert sorted(builders.said("begin")) == ["begin 1", "begin 2", "begin 3"]
        assert sorted(builders.said("made")) == ["made 1", "made 2", "made 3"]
        assert len(builders.said("found")) == 15
        assert builders.names() == keys(1, 2, 3)

    def test_a_killed_builder_is_replaced_and_its_half_removed(self, builders: Builders) -> None:
        killed = builders.start(60, 1)
        until(lambda: builders.said("begin"))
        waiting = [builders.start(0.1, 1) for _ in range(3)]
        time.sleep(0.2)
        os.kill(killed.pid, signal.SIGKILL)
        assert any(".tmp-" in name for name in builders.names())
        assert [process.wait(60) for process in waiting] == [0] * 3
        assert len(builders.said("begin")) == 2
        assert len(builders.said("made")) == 1
        assert builders.names() == keys(1)

    @pytest.mark.slow
    def test_of_a_stopped_builder_and_its_successor_the_last_changes_nothing(
        self, builders: Builders
    ) -> None:
        stopped = builders.start(0.5, 1)
        until(lambda: builders.said("begin"))
        stopped.send_signal(signal.SIGSTOP)
        assert not builders.said("end")
        other = builders.start(0.1, 1)
        assert other.wait(60) == 0
        before = os.stat(builders.root / "artifacts" / "thing" / keys(1)[0]).st_ino
        stopped.send_signal(signal.SIGCONT)
        assert stopped.wait(60) == 0
        assert builders.said()[-2:] == ["end 1", "found 1"]
        assert builders.names() == keys(1)
        assert os.stat(builders.root / "artifacts" / "thing" / keys(1)[0]).st_ino == before

    @pytest.mark.slow
    def test_of_a_stopped_builder_and_its_successor_the_first_to_finish_serves_both(
        self, builders: Builders
    ) -> None:
        stopped = builders.start(0.5, 1)
        until(lambda: builders.said("begin"))
        stopped.send_signal(signal.SIGSTOP)
        other = builders.start(1.5, 1)
        until(lambda: len(builders.said("begin")) == 2)
        stopped.send_signal(signal.SIGCONT)
        assert stopped.wait(60) == other.wait(60) == 0
        assert builders.said()[2:] == ["end 1", "made 1", "end 1", "found 1"]
        assert builders.names() == keys(1)


class TestLeftovers:
    def build(self, folder: Path) -> None:
        (folder / "whole").write_text("1")

    def test_of_another_machine_go_after_a_day_without_a_write(self, tmp_path: Path) -> None:
        store = ArtifactStore(tmp_path)
        path = store.path("thing", {})
        ages = {"old": 30 * 3600, "busy": 30 * 3600, "young": 3600}
        for name, age in ages.items():
            folder = path.with_name(f"{path.name}.tmp-{name}.1.2-77-00ff")
            folder.mkdir(parents=True)
            (folder / "file").write_text("")
            for entry in (folder / "file", folder):
                os.utime(entry, (time.time() - age,) * 2)
        os.utime(path.with_name(f"{path.name}.tmp-busy.1.2-77-00ff") / "file")
        store.get_or_build("thing", {}, self.build)
        left = {
            entry.name.split(".tmp-")[1].split(".")[0] for entry in path.parent.iterdir() if entry != path
        }
        assert left == {"busy", "young"}

    def test_of_this_machine_go_with_their_process(self, tmp_path: Path) -> None:
        store = ArtifactStore(tmp_path)
        path = store.path("thing", {})
        for pid in (os.getpid(), pid_of_a_dead_process()):
            path.with_name(f"{path.name}.tmp-{machine()}-{pid}-00ff").mkdir(parents=True)
        store.get_or_build("thing", {}, self.build)
        assert [name.split("-")[-2] for name in os.listdir(path.parent) if "tmp" in name] == [
            str(os.getpid())
        ]

    def test_a_sound_artifact_that_took_the_place_of_a_corrupt_one_is_not_set_aside(
        self, tmp_path: Path
    ) -> None:
        """As by a builder that was stopped between its look and its rename, and lost the lock meanwhile."""
        store = ArtifactStore(tmp_path)
        path = store.get_or_build("thing", {}, self.build).path
        judged = path.stat().st_ino
        shutil.copytree(path, tmp_path / "copy")
        shutil.rmtree(path)
        (tmp_path / "copy").rename(path)
        assert path.stat().st_ino != judged
        set_aside(path, ArtifactCorrupt("earlier"), judged)
        assert not store.get_or_build("thing", {}, self.build).built
        assert os.listdir(path.parent) == [path.name]

    def test_what_is_discarded_is_gone_and_can_be_made_again(self, tmp_path: Path) -> None:
        store = ArtifactStore(tmp_path)
        path = store.get_or_build("thing", {}, self.build).path
        store.discard("thing", {})
        store.discard("thing", {})
        assert os.listdir(path.parent) == []
        assert store.get_or_build("thing", {}, self.build).built

    @pytest.mark.parametrize("links", [True, False])
    def test_a_second_name_is_a_link_or_a_copy(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
    ) -> None:
        def refuse(*_: object) -> None:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))

        (tmp_path / "a").write_text("content")
        if not links:
            monkeypatch.setattr(os, "link", refuse)
        link_or_copy(tmp_path / "a", tmp_path / "b")
        assert (tmp_path / "b").read_text() == "content"
        assert (tmp_path / "b").samefile(tmp_path / "a") is links
        if links:
            with pytest.raises(StorageError, match="EEXIST"):
                link_or_copy(tmp_path / "a", tmp_path / "b")


class Disk:
    """A small file system of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def mount(self, options: str) -> None:
        """Mounts or mounts again with other options.

        Raises:
            OSError: not permitted.
        """
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.folder)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            raise OSError("mounting is not permitted")

    def use_up_names(self) -> None:
        """Makes empty files until no more can be made."""
        try:
            for number in range(1000):
                (self.folder / f"{number}").touch()
        except OSError as error:
            if error.errno == errno.ENOSPC:
                return
            raise
        raise AssertionError("the file system takes more files than it was to take")

    def unmount(self) -> None:
        """Unmounts it."""
        subprocess.run(["umount", str(self.folder)], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """A file system of 1 MiB."""
    small = Disk(tmp_path / "disk")
    small.folder.mkdir()
    try:
        small.mount("size=1m,nr_inodes=64")
    except OSError:
        pytest.skip("only root may mount the small file system that this test fills")
    yield small
    small.unmount()


def build_of(n_bytes: int) -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        save_tensors(folder / "x.safetensors", {"x": torch.zeros(n_bytes, dtype=torch.uint8)})

    return build


class TestDisk:
    def test_full_is_said_by_name_and_leaves_nothing(self, disk: Disk) -> None:
        store = ArtifactStore(disk.folder / "artifacts")
        first = store.get_or_build("thing", {"n": 1}, build_of(500_000))
        with pytest.raises(StorageError, match=r"No space left on device \(ENOSPC\).*outputs="):
            store.get_or_build("thing", {"n": 2}, build_of(900_000))
        assert os.listdir(first.path.parent) == [first.path.name]
        assert ArtifactStore(store.root).load("thing", {"n": 1}).path == first.path
        store.discard("thing", {"n": 1})
        again = store.get_or_build("thing", {"n": 2}, build_of(900_000))
        assert again.built
        assert len(load_tensors(again.path / "x.safetensors")["x"]) == 900_000

    def test_full_of_files_refuses_the_lock_and_does_not_wait(self, disk: Disk) -> None:
        store = ArtifactStore(disk.folder / "artifacts")
        store.path("thing", {}).parent.mkdir(parents=True)
        disk.use_up_names()
        with pytest.raises(StorageError, match="ENOSPC"):
            store.get_or_build("thing", {}, build_of(10))
        assert os.listdir(store.root / "thing") == []

    def test_full_keeps_the_results_that_were_there(self, disk: Disk) -> None:
        run = Run(disk.folder / "run", "study", {}, "none")
        many = {f"a/b/c/{number}": Metric(number) for number in range(20_000)}

        def work() -> None:
            with run:
                run.log({"a/b/c/d": Metric(1.0)})
                run.log(many)

        with pytest.raises(StorageError, match=r"metrics\.json.*ENOSPC"):
            work()
        assert read_metrics(run.directory) == {"a/b/c/d": Metric(1.0)}
        record = read_json(run.directory / "run.json")
        assert record["status"] == "failed"
        assert "ENOSPC" in record["error"]
        assert not [name for name in os.listdir(run.directory) if name.startswith(".")]

    def test_read_only_serves_what_is_there_and_names_what_it_refuses(self, disk: Disk) -> None:
        path = ArtifactStore(disk.folder).get_or_build("thing", {"n": 1}, build_of(10)).path
        disk.mount("remount,ro")
        store = ArtifactStore(disk.folder)
        assert store.get_or_build("thing", {"n": 1}, build_of(10)).path == path
        for kind in ("thing", "other"):
            with pytest.raises(StorageError, match=rf"{kind}/.*\(EROFS\).*outputs="):
                store.get_or_build(kind, {"n": 2}, build_of(10))
        with pytest.raises(StorageError, match="EROFS"):
            write_json(disk.folder / "run.json", {})
