"""The file lock among real processes: contention, death, standstill, wrong clocks, poor file systems."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmap.locks import BuildLock, machine, process_lives, process_start
from tests.lock_processes import (
    STANDING_CLOCK,
    WITHOUT_LINKS,
    WRONG_CLOCK,
    Holders,
    pid_of_a_dead_process,
    until,
)

STALE = 1.2


@pytest.fixture
def holders(tmp_path: Path) -> Iterator[Holders]:
    processes = Holders(tmp_path, STALE)
    yield processes
    processes.end()


def assert_one_at_a_time(
    said: list[tuple[str, int]], killed: set[int] | frozenset[int] = frozenset()
) -> None:
    inside: int | None = None
    for what, pid in said:
        if what == "in":
            assert inside is None or inside in killed, f"{pid} went in while {inside} was inside"
            inside = pid
        else:
            assert (what, inside) == ("out", pid)
            inside = None


class TestContention:
    @pytest.mark.parametrize("before", ["", WITHOUT_LINKS], ids=["links", "no links"])
    def test_of_many_processes_one_is_inside(self, holders: Holders, before: str) -> None:
        processes = [holders.start(0.01, times=4, before=before) for _ in range(8)]
        assert [process.wait(60) for process in processes] == [0] * 8
        said = holders.said()
        assert len(said) == 2 * 4 * 8
        assert_one_at_a_time(said)
        assert sorted(path.name for path in holders.path.parent.iterdir()) == ["log"]

    @pytest.mark.slow
    @pytest.mark.parametrize("before", ["", WITHOUT_LINKS], ids=["links", "no links"])
    def test_killed_holders_are_replaced_at_once(self, holders: Holders, before: str) -> None:
        """Most are killed inside, as the log shows; the last come through. Zombies: nobody reaps them."""
        processes = [holders.start(0.4, before=before) for _ in range(7)]
        rng, killed = random.Random(0), set[int]()
        while len(killed) < 4:
            until(lambda: [pid for what, pid in holders.said() if what == "in" and pid not in killed])
            what, pid = holders.said()[-1]
            if what == "in" and pid not in killed:
                time.sleep(rng.random() * 0.1)
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        ends = {process.pid: process.wait(60) for process in processes}
        assert sorted(ends.values()) == [-signal.SIGKILL] * 4 + [0] * 3
        said = holders.said()
        assert_one_at_a_time(said, killed)
        assert {pid for what, pid in said if what == "in"} == set(ends)
        assert not killed & {pid for what, pid in said if what == "out"}


class TestStoppedHolder:
    @pytest.mark.slow
    def test_is_replaced_and_notices(self, holders: Holders) -> None:
        stopped = holders.start(0.8)
        until(holders.said)
        stopped.send_signal(signal.SIGSTOP)
        other = holders.start(3.0)
        began = time.monotonic()
        until(lambda: ("in", other.pid) in holders.said())
        assert time.monotonic() - began > STALE  # the process lives: only its silence tells
        stopped.send_signal(signal.SIGCONT)
        assert stopped.wait(30) == 0
        assert ("lost", stopped.pid) in holders.said()
        assert holders.path.exists()  # its release left the other's lock alone
        assert other.wait(30) == 0
        assert holders.said()[-1] == ("out", other.pid)
        assert not holders.path.exists()

    def test_stopped_for_less_keeps_it(self, holders: Holders) -> None:
        stopped = holders.start(1.0)
        until(holders.said)
        other = holders.start(0.0)
        stopped.send_signal(signal.SIGSTOP)
        time.sleep(STALE / 3)
        stopped.send_signal(signal.SIGCONT)
        assert stopped.wait(30) == other.wait(30) == 0
        assert_one_at_a_time(holders.said())

    @pytest.mark.slow
    def test_a_watcher_that_was_stopped_too_does_not_blame_the_holder(self, tmp_path: Path) -> None:
        """As when a whole machine is suspended: all that the watcher saw are two looks, far apart."""
        lock = foreign_lock(tmp_path)
        watcher = BuildLock(lock, STALE)
        assert not watcher.try_acquire()
        time.sleep(STALE + 0.2)
        assert not watcher.try_acquire()
        until(watcher.try_acquire)
        watcher.release()


class TestClocks:
    @pytest.mark.slow
    def test_that_differ_change_nothing(self, holders: Holders) -> None:
        holder = holders.start(STALE * 1.6, before=WRONG_CLOCK.format(ahead=-1e6))
        until(holders.said)
        other = holders.start(0.0, before=WRONG_CLOCK.format(ahead=1e6))
        assert holder.wait(30) == other.wait(30) == 0
        assert_one_at_a_time(holders.said())

    @pytest.mark.slow
    def test_times_that_stand_still_hide_no_heartbeat(self, holders: Holders) -> None:
        holder = holders.start(STALE * 1.8, before=STANDING_CLOCK)
        until(lambda: holders.path.exists() and holders.path.stat().st_mtime == 0)
        other = holders.start(0.0)
        assert holder.wait(30) == other.wait(30) == 0
        assert_one_at_a_time(holders.said())
        assert holders.said()[0] == ("in", holder.pid)

    def test_a_heartbeat_on_a_full_disk_shows_in_the_time(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        refused = []

        def full(handle: int, content: bytes) -> int:
            refused.append(content)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        lock = BuildLock(tmp_path / "a.lock", stale_seconds=0.6)
        assert lock.acquire()
        with lock:
            before = lock.path.stat()
            monkeypatch.setattr(os, "write", full)
            until(lambda: len(refused) > 2)
            after = lock.path.stat()
            monkeypatch.undo()
        assert after.st_size == before.st_size
        assert after.st_mtime_ns > before.st_mtime_ns
        assert not lock.lost


def foreign_lock(folder: Path, **holder: object) -> Path:
    """The lock of a process of another machine that gives no sign of life."""
    path = folder / "a.lock"
    path.write_text(json.dumps({"token": "other", "machine": "elsewhere", "pid": 1, **holder}))
    return path


class TestTakingOver:
    @pytest.mark.slow
    def test_of_many_who_wait_for_a_dead_one_each_gets_its_turn(self, holders: Holders) -> None:
        foreign_lock(holders.path.parent)
        processes = [holders.start(0.05) for _ in range(5)]
        assert [process.wait(60) for process in processes] == [0] * 5
        assert_one_at_a_time(holders.said())

    @pytest.mark.parametrize("links", [True, False])
    def test_a_lock_that_changed_hands_meanwhile_is_given_back(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
    ) -> None:
        path = foreign_lock(tmp_path, token="living")
        if not links:
            monkeypatch.setattr(os, "link", refuse_links)
        BuildLock(path, STALE)._take_over({"token": "dead"})
        assert json.loads(path.read_text())["token"] == "living"
        assert [entry.name for entry in tmp_path.iterdir()] == [path.name]

    @pytest.mark.parametrize("content", ["", "{", "[1]", '{"token": 1}', '{"pid": "x"}'])
    def test_a_file_that_names_no_process_is_waited_for_and_replaced(
        self, tmp_path: Path, content: str
    ) -> None:
        (tmp_path / "a.lock").write_text(content)
        lock = BuildLock(tmp_path / "a.lock", stale_seconds=0.3, poll_seconds=0.02)
        began = time.monotonic()
        assert lock.acquire()
        assert time.monotonic() - began > 0.3
        lock.release()

    def test_a_link_whose_answer_was_lost_is_known_as_ones_own(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """NFS: the server links, its answer is lost, the client tries again: the name exists."""
        link = os.link

        def twice(source: Path, target: Path) -> None:
            link(source, target)
            link(source, target)

        monkeypatch.setattr(os, "link", twice)
        lock = BuildLock(tmp_path / "a.lock", STALE)
        assert lock.try_acquire()
        lock.release()
        assert list(tmp_path.iterdir()) == []

    def test_acquire_gives_up_where_it_is_told_to(self, tmp_path: Path) -> None:
        assert not BuildLock(foreign_lock(tmp_path), stale_seconds=60).acquire(unless=lambda: True)

    def test_a_lock_can_be_had_again_by_the_same_object(self, tmp_path: Path) -> None:
        lock = BuildLock(tmp_path / "a.lock", STALE)
        for _ in range(2):
            assert lock.acquire()
            assert not BuildLock(lock.path, STALE).try_acquire()
            assert f"process {os.getpid()}" in lock.holder_name()
            lock.release()
            assert lock.holder_name() == "nobody"

    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EROFS])
    def test_a_folder_that_takes_no_file_is_an_error_and_no_wait(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
    ) -> None:
        def refuse(self: Path, text: str) -> None:
            raise OSError(code, os.strerror(code), str(self))

        monkeypatch.setattr(Path, "write_text", refuse)
        with pytest.raises(OSError) as caught:
            BuildLock(tmp_path / "a.lock", STALE).acquire()
        assert caught.value.errno == code


def refuse_links(*_: object) -> None:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


class TestProcesses:
    def test_one_that_ended_and_was_not_reaped_is_dead(self) -> None:
        process = subprocess.Popen([sys.executable, "-c", ""])
        until(lambda: Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z")
        assert not process_lives(process.pid)
        process.wait()
        assert not process_lives(process.pid)

    def test_a_stopped_one_lives(self) -> None:
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        process.send_signal(signal.SIGSTOP)
        assert process_lives(process.pid)
        assert process_start(process.pid) is not None
        process.kill()
        process.wait()

    def test_without_a_proc_file_system_the_id_alone_decides(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def absent(self: Path) -> str:
            raise FileNotFoundError(errno.ENOENT, "none", str(self))

        dead = pid_of_a_dead_process()
        monkeypatch.setattr(Path, "read_text", absent)
        assert process_lives(os.getpid())
        assert not process_lives(dead)
        assert process_start(os.getpid()) is None
        assert machine().endswith(".0.0")

    def test_machines_of_one_name_differ_by_their_boot(self, monkeypatch: pytest.MonkeyPatch) -> None:
        here, read = machine(), Path.read_text
        other = lambda self: "0123abcd-" if self.name == "boot_id" else read(self)  # noqa: E731
        monkeypatch.setattr(Path, "read_text", other)
        assert machine() != here
        assert machine().split(".")[:-1] == here.split(".")[:-1]
