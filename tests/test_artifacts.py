from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from kvmap.artifacts import (
    ArtifactCorrupt,
    ArtifactMissing,
    ArtifactStore,
    StorageError,
    content_key,
    load_tensors,
    read_json,
    save_tensors,
    write_json,
)
from kvmap.errors import KvmapError
from kvmap.files import load_metadata, replacing
from kvmap.locks import BuildLock, machine

SPEC = {"pair": {"source": "a", "target": "b"}, "split": "fit", "strides": [4], "seed": 0, "share": 0.1}


def build(folder: Path) -> None:
    (folder / "numbers.txt").write_text("1 2 3")
    (folder / "part").mkdir()
    (folder / "part" / "more.txt").write_text("4 5 6")


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "artifacts", stale_seconds=1.2)


class TestContentKey:
    def test_is_the_same_in_every_process_and_key_order(self) -> None:
        shuffled = dict(reversed(SPEC.items()))
        program = f"from kvmap.artifacts import content_key; print(content_key('moments', {shuffled!r}))"
        keys = {content_key("moments", SPEC)}
        for seed in ("1", "2"):
            environment = {**os.environ, "PYTHONHASHSEED": seed}
            run = subprocess.run(
                [sys.executable, "-c", program], env=environment, capture_output=True, text=True
            )
            keys.add(run.stdout.strip())
        assert len(keys) == 1

    @pytest.mark.parametrize("change", [{"seed": 1}, {"share": 0.2}, {"strides": [4, 4]}, {"more": None}])
    def test_differs_with_every_setting(self, change: dict[str, object]) -> None:
        assert content_key("moments", SPEC) != content_key("moments", {**SPEC, **change})
        assert content_key("moments", SPEC) != content_key("mapper", SPEC)

    @pytest.mark.parametrize(
        "value",
        [{1, 2}, Path("a"), torch.zeros(1), np.float64(1), np.int64(1), torch.float32, object(), b"x"],
    )
    def test_refuses_what_has_no_one_text(self, value: object) -> None:
        with pytest.raises(TypeError, match=r"spec\.data\[1\]\.value"):
            content_key("moments", {"data": [0, {"value": value}]})

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_refuses_numbers_that_equal_nothing(self, value: float) -> None:
        with pytest.raises(ValueError, match="finite"):
            content_key("moments", {"x": value})

    def test_refuses_keys_that_json_would_turn_into_text(self) -> None:
        with pytest.raises(TypeError, match="string keys"):
            content_key("moments", {"layers": {0: 1}})

    def test_refuses_a_kind_that_leaves_the_store(self) -> None:
        with pytest.raises(ValueError, match="plain name"):
            content_key("../elsewhere", SPEC)


class TestBuilding:
    def test_builds_once_and_finds_it_again(self, store: ArtifactStore) -> None:
        first = store.get_or_build("moments", SPEC, build)
        again = store.get_or_build("moments", SPEC, pytest.fail)
        other_process = ArtifactStore(store.root).load("moments", SPEC)
        assert first.built
        assert not again.built
        assert first.path == again.path == other_process.path == store.path("moments", SPEC)
        assert (first.path / "part" / "more.txt").read_text() == "4 5 6"
        assert names(first.path.parent) == [first.path.name]

    def test_manifest_names_what_it_is_and_every_file(self, store: ArtifactStore) -> None:
        manifest = store.get_or_build("moments", SPEC, build).manifest
        assert manifest["kind"] == "moments"
        assert manifest["spec"] == SPEC
        assert manifest["key"] == content_key("moments", SPEC)
        assert set(manifest["files"]) == {"numbers.txt", "part/more.txt"}
        assert manifest["files"]["numbers.txt"]["bytes"] == 5

    @pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
    def test_a_build_that_fails_leaves_nothing(self, store: ArtifactStore, error: BaseException) -> None:
        def fail(folder: Path) -> None:
            build(folder)
            raise error

        with pytest.raises(type(error)):
            store.get_or_build("moments", SPEC, fail)
        assert names(store.root / "moments") == []
        assert store.get_or_build("moments", SPEC, build).built

    def test_of_two_processes_one_builds(self, store: ArtifactStore, tmp_path: Path) -> None:
        program = f"""
import os, time
from pathlib import Path
from kvmap.artifacts import ArtifactStore

def build(folder):
    with open({str(tmp_path / "builds")!r}, "a") as log:
        log.write("built\\n")
    time.sleep(0.5)
    (folder / "pid").write_text(str(os.getpid()))

artifact = ArtifactStore(Path({str(store.root)!r})).get_or_build("moments", {SPEC!r}, build)
print((artifact.path / "pid").read_text(), artifact.built)
"""
        jobs = [
            subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
            for _ in range(3)
        ]
        outputs = [job.communicate(timeout=60)[0].split() for job in jobs]
        assert (tmp_path / "builds").read_text() == "built\n"
        assert len({pid for pid, _ in outputs}) == 1
        assert sorted(built for _, built in outputs) == ["False", "False", "True"]

    def test_what_a_killed_builder_left_is_taken_away(self, store: ArtifactStore) -> None:
        path = store.path("moments", SPEC)
        leftover = path.with_name(f"{path.name}.tmp-{machine()}-{dead_pid()}-00ff")
        leftover.mkdir(parents=True)
        store.get_or_build("moments", SPEC, build)
        assert names(path.parent) == [path.name]


class TestDamage:
    def truncate(self, path: Path) -> None:
        os.truncate(path / "numbers.txt", 2)

    def alter(self, path: Path) -> None:
        (path / "numbers.txt").write_text("1 2 4")

    def remove(self, path: Path) -> None:
        (path / "numbers.txt").unlink()

    def add(self, path: Path) -> None:
        (path / "foreign.txt").write_text("")

    def break_manifest(self, path: Path) -> None:
        (path / "artifact.json").write_text("{")

    def remove_manifest(self, path: Path) -> None:
        (path / "artifact.json").unlink()

    def swap_spec(self, path: Path) -> None:
        manifest = read_json(path / "artifact.json")
        write_json(path / "artifact.json", {**manifest, "spec": {**SPEC, "seed": 1}})

    damages = pytest.mark.parametrize(
        ("damage", "named"),
        [
            ("truncate", "numbers.txt"),
            ("alter", "numbers.txt"),
            ("remove", "numbers.txt"),
            ("add", "foreign.txt"),
            ("break_manifest", "artifact.json"),
            ("remove_manifest", "artifact.json"),
            ("swap_spec", "spec"),
        ],
    )

    @damages
    def test_load_refuses_by_name(self, store: ArtifactStore, damage: str, named: str) -> None:
        path = store.get_or_build("moments", SPEC, build).path
        getattr(self, damage)(path)
        with pytest.raises(ArtifactCorrupt, match=named):
            store.load("moments", SPEC)

    @damages
    def test_get_or_build_sets_aside_and_builds_again(
        self, store: ArtifactStore, damage: str, named: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        for number in (1, 2):
            path = store.get_or_build("moments", SPEC, build).path
            getattr(self, damage)(path)
            again = store.get_or_build("moments", SPEC, build)
            assert again.built
            assert (path / "numbers.txt").read_text() == "1 2 3"
            assert f"{path.name}.corrupt-{number}" in names(path.parent)
        assert named in caplog.text

    def test_load_of_nothing_names_the_place(self, store: ArtifactStore) -> None:
        with pytest.raises(ArtifactMissing, match=content_key("moments", SPEC)):
            store.load("moments", SPEC)


def dead_pid() -> int:
    job = subprocess.Popen([sys.executable, "-c", ""])
    job.wait()
    return job.pid


class TestLock:
    def hold(self, store: ArtifactStore, **holder: object) -> Path:
        path = store.path("moments", SPEC)
        lock = path.with_name(path.name + ".lock")
        lock.parent.mkdir(parents=True)
        lock.write_text(json.dumps({"token": "other", **holder}))
        return lock

    def test_of_a_dead_process_is_taken_over_at_once(self, store: ArtifactStore) -> None:
        lock = self.hold(store, machine=machine(), pid=dead_pid(), process_start="1")
        began = time.monotonic()
        assert store.get_or_build("moments", SPEC, build).built
        assert time.monotonic() - began < store.stale_seconds
        assert not lock.exists()

    def test_of_a_process_id_in_new_hands_is_taken_over(self, store: ArtifactStore) -> None:
        self.hold(store, machine=machine(), pid=os.getpid(), process_start="1")
        assert store.get_or_build("moments", SPEC, build).built

    def test_of_a_silent_machine_is_taken_over_after_a_while(self, store: ArtifactStore) -> None:
        self.hold(store, machine="elsewhere.1", pid=1, process_start="1")
        began = time.monotonic()
        assert store.get_or_build("moments", SPEC, build).built
        assert time.monotonic() - began >= store.stale_seconds

    @pytest.mark.slow
    def test_of_a_distant_machine_with_a_heartbeat_is_respected(self, store: ArtifactStore) -> None:
        lock = self.hold(store, machine="elsewhere.1", pid=1, process_start="1")

        def live_and_let_go() -> None:
            for _ in range(20):
                time.sleep(0.1)
                os.utime(lock)
            lock.unlink()

        holder = threading.Thread(target=live_and_let_go)
        holder.start()
        began = time.monotonic()
        store.get_or_build("moments", SPEC, build)
        holder.join()
        assert time.monotonic() - began >= 2.0

    def test_release_leaves_a_lock_that_another_took_over(self, tmp_path: Path) -> None:
        lock = BuildLock(tmp_path / "a.lock", stale_seconds=60)
        assert lock.acquire()
        with lock:
            lock.path.write_text('{"token": "other"}')
        assert lock.path.exists()


class TestStorage:
    def test_full_disk_names_place_meaning_and_remedy(self, store: ArtifactStore) -> None:
        def fill(folder: Path) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / "big"))

        with pytest.raises(StorageError, match=r"moments/.*No space left on device \(ENOSPC\).*outputs="):
            store.get_or_build("moments", SPEC, fill)
        assert names(store.root / "moments") == []

    def test_full_disk_under_safetensors(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import safetensors.torch

        def fill(*_: object) -> None:
            raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")

        monkeypatch.setattr(safetensors.torch, "save_file", fill)
        with pytest.raises(StorageError, match="ENOSPC"):
            save_tensors(tmp_path / "x.safetensors", {})

    def test_root_that_cannot_be_made(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        for root in (tmp_path / "file", tmp_path / "file" / "below"):
            with pytest.raises(StorageError, match=r"cannot write .*outputs="):
                ArtifactStore(root).get_or_build("moments", SPEC, build)

    def test_an_unreadable_input_is_no_storage_error(self, store: ArtifactStore) -> None:
        def read(_: Path) -> None:
            raise PermissionError(errno.EACCES, "denied", "/elsewhere/corpus.txt")

        with pytest.raises(PermissionError):
            store.get_or_build("moments", SPEC, read)

    def test_errors_are_the_users_to_mend(self) -> None:
        for error in (ArtifactCorrupt, ArtifactMissing, StorageError):
            assert issubclass(error, KvmapError)


class TestFiles:
    def test_tensors_of_any_stride_and_sharing_come_back_equal(self, tmp_path: Path) -> None:
        base = torch.randn(6, 4, dtype=torch.float64)
        tensors = {
            "base": base,
            "same": base,
            "transposed": base.T,
            "slice": base[1:3],
            "expanded": base[:1].expand(3, 4),
            "half": base.bfloat16(),
            "mask": base > 0,
            "empty": torch.zeros(0, 3),
            "parameter": torch.nn.Parameter(torch.ones(2)),
        }
        save_tensors(tmp_path / "x.safetensors", tensors, {"what": "a test"})
        loaded = load_tensors(tmp_path / "x.safetensors")
        assert loaded.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert loaded[name].dtype == tensor.dtype
            assert torch.equal(loaded[name], tensor)
        assert load_metadata(tmp_path / "x.safetensors") == {"what": "a test"}
        assert names(tmp_path) == ["x.safetensors"]

    def test_broken_or_absent_tensors_are_named(self, tmp_path: Path) -> None:
        save_tensors(tmp_path / "x.safetensors", {"a": torch.ones(9)})
        os.truncate(tmp_path / "x.safetensors", 60)
        with pytest.raises(ArtifactCorrupt, match=r"x\.safetensors"):
            load_tensors(tmp_path / "x.safetensors")
        with pytest.raises(ArtifactMissing, match=r"y\.safetensors"):
            load_tensors(tmp_path / "y.safetensors")

    def test_some_tensors_alone_are_those_of_the_whole_file(self, tmp_path: Path) -> None:
        tensors = {"a": torch.randn(3, 2), "b": torch.randn(4).bfloat16(), "c": torch.zeros(0, 3)}
        path = tmp_path / "x.safetensors"
        save_tensors(path, tensors)
        for wanted in (["b"], ["c", "a"], [], ["a", "a"]):
            loaded = load_tensors(path, iter(wanted))
            assert loaded.keys() == set(wanted)
            for name in wanted:
                assert loaded[name].dtype == tensors[name].dtype
                assert torch.equal(loaded[name], tensors[name])

    def test_named_tensors_of_a_broken_or_absent_file_are_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "x.safetensors"
        save_tensors(path, {"a": torch.ones(9)})
        with pytest.raises(ArtifactCorrupt, match=r"x\.safetensors.*other"):
            load_tensors(path, ["a", "other"])
        os.truncate(path, 60)
        with pytest.raises(ArtifactCorrupt, match=r"x\.safetensors"):
            load_tensors(path, ["a"])
        with pytest.raises(ArtifactMissing, match=r"y\.safetensors"):
            load_tensors(tmp_path / "y.safetensors", ["a"])

    def test_json_is_strict(self, tmp_path: Path) -> None:
        content = {
            "a": float("nan"),
            "b": [np.float32(0.5), np.inf],
            "c": Path("x"),
            "d": (np.int64(2), True),
        }
        write_json(tmp_path / "x.json", content)
        assert read_json(tmp_path / "x.json") == {"a": None, "b": [0.5, None], "c": "x", "d": [2, True]}
        assert "NaN" not in (tmp_path / "x.json").read_text()

    def test_a_write_that_fails_keeps_the_old_file(self, tmp_path: Path) -> None:
        file = tmp_path / "x.json"
        write_json(file, 1)
        with pytest.raises(FileNotFoundError), replacing(file):
            (tmp_path / "absent").read_text()
        assert read_json(file) == 1
        assert names(tmp_path) == ["x.json"]
