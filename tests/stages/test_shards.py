"""Calibration in parts: what several jobs make together is what one pass makes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from kvmap.artifacts import ArtifactStore
from kvmap.errors import KvmapError
from kvmap.files import read_json
from kvmap.fit.pair_moments import SPLITS, PairMoments
from kvmap.stages import run_stages
from kvmap.stages.calibrated import read_moments, read_outliers
from kvmap.stages.calibrated.parts import Parts, share_of, shared_splits
from tests.fit.oracles import assert_same
from tests.stages.conftest import Runner, configured

MADE = "calibrate/moments/all/n_parts_made"


def assert_same_moments(found: PairMoments, expected: PairMoments) -> None:
    assert found.layout == expected.layout
    assert len(found.tables) == len(expected.tables)
    for mine, theirs in zip(found.tables, expected.tables, strict=True):
        for split in SPLITS:
            # the same float64 products, added in another order
            assert_same(mine.splits[split], theirs.splits[split], rtol=1e-11)


def assert_same_captures(found: Path, expected: Path) -> None:
    assert found.name == expected.name
    assert read_json(found / "captures.json") == read_json(expected / "captures.json")
    files = {file.name: file.read_bytes() for file in expected.glob("*.safetensors")}
    assert len(files) > 3
    assert {file.name: file.read_bytes() for file in found.glob("*.safetensors")} == files


class TestOneJob:
    @pytest.mark.parametrize(
        "settings",
        [
            "mapper=head_local calibration.mode=head_local calibration.batch_size=3",
            "calibration.keep_captures=true calibration.regressors=both_kinds calibration.native_layers=1 "
            "calibration.batch_size=2",
            pytest.param("calibration.token_stride=3 calibration.sequential=true", marks=pytest.mark.slow),
        ],
    )
    def test_the_sum_of_the_parts_is_one_pass_under_the_same_key(
        self, run: Runner, tmp_path: Path, settings: str
    ) -> None:
        whole = run(f"stages=[calibrate] {settings}", tmp_path / "whole")
        parted = run(f"stages=[calibrate] calibration.shards=3 {settings}", tmp_path / "parts")
        assert parted.metric(MADE) == 3
        assert parted.artifact("moments").name == whole.artifact("moments").name
        mine, theirs = (read_moments(finished.artifact("moments")) for finished in (parted, whole))
        assert_same_moments(mine, theirs)
        for split in SPLITS:
            name = f"calibrate/rows/{split}/n_rows"
            assert parted.metric(name) == whole.metric(name)
        assert list((tmp_path / "parts" / "artifacts").glob("*_part/*")) == []

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "settings",
        [
            "calibration.mode=selected mapper.top_k=1",
            "mapper=weighted mapper.top_k=1 calibration.batch_size=2",
        ],
    )
    def test_a_map_of_chosen_layers_is_the_same(self, run: Runner, tmp_path: Path, settings: str) -> None:
        """Each pass of such a calibration is made in parts: also the first, which chooses."""
        whole = run(f"stages=[calibrate,fit] {settings}", tmp_path / "whole")
        parted = run(f"stages=[calibrate,fit] calibration.shards=2 {settings}", tmp_path / "parts")
        kept = {path.parent.name for path in (tmp_path / "whole/artifacts/moments").glob("*/artifact.json")}
        assert {path.name for path in (tmp_path / "parts/artifacts/moments").iterdir()} == kept
        assert len(kept) == 2
        for key in kept:
            mine, theirs = (tmp_path / side / "artifacts/moments" / key for side in ("parts", "whole"))
            assert_same_moments(read_moments(mine), read_moments(theirs))
        assert parted.table("selection") == whole.table("selection")
        if "weighted" in settings:
            assert_same_captures(parted.artifact("captures"), whole.artifact("captures"))

    def test_later_runs_find_it_sharded_or_not(self, run: Runner, tmp_path: Path) -> None:
        first = run("stages=[calibrate] calibration.shards=2", tmp_path)
        assert first.metric("calibrate/moments/all/reused") == 0
        for settings in ("", "calibration.shards=3", "calibration.shards=2"):
            later = run(f"stages=[calibrate] {settings}", tmp_path)
            assert later.artifact("moments") == first.artifact("moments")
            assert later.metric("calibrate/moments/all/reused") == 1
            assert settings == "" or later.metric(MADE) == 0

    def test_parts_that_an_earlier_attempt_finished_are_not_made_again(
        self, run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from kvmap.stages.calibrated import moments

        accumulate, made = moments.accumulate_moments, []

        def interrupted(*args: object, **options: object) -> object:
            if len(made) == 2:
                raise KeyboardInterrupt
            made.append(1)
            return accumulate(*args, **options)

        monkeypatch.setattr(moments, "accumulate_moments", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run("stages=[calibrate] calibration.shards=3", tmp_path)
        monkeypatch.setattr(moments, "accumulate_moments", accumulate)
        assert run("stages=[calibrate] calibration.shards=3", tmp_path).metric(MADE) == 1

    # Thresholds that flag enough tokens in all parts together though not in each, and too few in all.
    @pytest.mark.parametrize(("threshold", "applied"), [(3.3, "separate"), (3.5, "keep")])
    def test_outliers_are_settled_once_all_parts_are_there(
        self, run: Runner, tmp_path: Path, threshold: float, applied: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        undecided = []
        discard = ArtifactStore.discard

        def look(store: ArtifactStore, kind: str, spec: dict) -> None:
            undecided.append(read_outliers(store.path(kind, spec)).undecided)
            discard(store, kind, spec)

        monkeypatch.setattr(ArtifactStore, "discard", look)
        policy = "calibration.outliers.policy=separate calibration.outliers.share=0.2"
        settings = f"stages=[calibrate] {policy} calibration.outliers.threshold={threshold}"
        whole = run(settings, tmp_path / "whole")
        parted = run(f"{settings} calibration.shards=3", tmp_path / "parts")
        assert undecided == [True, True, True]
        mine, theirs = (read_moments(finished.artifact("moments")) for finished in (parted, whole))
        assert_same_moments(mine, theirs)
        mine, theirs = (read_outliers(finished.artifact("moments")) for finished in (parted, whole))
        assert mine.counts() == theirs.counts()
        assert mine.applied == theirs.applied == applied

    def test_more_parts_than_sequences_are_refused(self) -> None:
        """The settings' rule counts sequences as if each were a document; this one knows the real splits."""
        with pytest.raises(KvmapError, match=r"calibration\.shards=3: the held_out split has 2 sequences"):
            shared_splits({"fit": [0, 1, 2, 3], "held_out": [4, 5]}, 0, 3)


@pytest.mark.parametrize(("n", "n_shares"), [(7, 3), (8, 8), (15, 4), (3, 1)])
def test_shares_hold_everything_once_and_alike(n: int, n_shares: int) -> None:
    shares = [share_of(range(n), number, n_shares) for number in range(n_shares)]
    assert [member for share in shares for member in share] == list(range(n))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


class Sum:
    """Parts of a plain sum, slow enough to be shared; every start and end is a line of a log."""

    def __init__(self, root: Path, n_parts: int, seconds: float = 0.0, stuck_at: int | None = None) -> None:
        self.root, self.n_parts, self.seconds, self.stuck_at = root, n_parts, seconds, stuck_at
        self.log = root / "log"

    def say(self, what: str) -> None:
        with open(self.log, "a") as stream:
            stream.write(f"{what} {os.getpid()}\n")

    def said(self, what: str) -> list[str]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line for line in lines if line.startswith(what)]

    def build(self, number: int, folder: Path) -> None:
        self.say(f"begin {number}")
        if number == self.stuck_at:
            time.sleep(600)
        time.sleep(self.seconds)
        (folder / "number").write_text(str(number + 1))
        self.say(f"end {number}")

    def merge(self, folders: list[Path], folder: Path) -> None:
        self.say("merge")
        (folder / "number").write_text(str(sum(int((each / "number").read_text()) for each in folders)))

    @property
    def parts(self) -> Parts:
        store = ArtifactStore(self.root / "artifacts", stale_seconds=2.0)
        settings = [{"part": f"{i}/{self.n_parts}"} for i in range(self.n_parts)]
        return Parts(store, "sum", {"of": 1}, "sum_part", settings, self.build, self.merge)

    def total(self) -> int:
        whole, made = self.parts.get_or_build()
        self.say(f"made {len(made)}")
        return int((whole.path / "number").read_text())


def start(work: Sum) -> multiprocessing.Process:
    # forked: a start of torch in each would be all that this measures
    process = multiprocessing.get_context("fork").Process(target=work.total)
    process.start()
    return process


def wait_for(condition: object, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
class TestSeveralProcesses:
    def test_each_part_is_made_once_and_added_once(self, tmp_path: Path) -> None:
        work = Sum(tmp_path, 8, seconds=0.3)
        processes = [start(work) for _ in range(4)]
        for process in processes:
            process.join(60)
            assert process.exitcode == 0
        assert sorted(int(line.split()[1]) for line in work.said("end")) == list(range(8))
        assert len(work.said("begin")) == 8
        assert len(work.said("merge")) == 1
        assert len({line.split()[-1] for line in work.said("end")}) > 1  # they did share
        assert work.total() == 36
        assert list((tmp_path / "artifacts" / "sum_part").iterdir()) == []

    def test_the_part_of_a_killed_process_is_made_by_another(self, tmp_path: Path) -> None:
        victim = start(Sum(tmp_path, 3, stuck_at=1))
        work = Sum(tmp_path, 3)
        wait_for(lambda: work.said("begin 1"))
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        assert work.total() == 6  # not reaped: a zombie is dead
        victim.join()
        assert len(work.said("begin 1")) == 2
        assert len(work.said("end 1")) == 1

    @pytest.mark.slow
    def test_the_part_of_a_stopped_process_is_made_by_another_and_not_spoilt(self, tmp_path: Path) -> None:
        victim = start(Sum(tmp_path, 2, seconds=0.5))
        work = Sum(tmp_path, 2)
        wait_for(lambda: work.said("begin"))
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGSTOP)
        stopped_at = work.said("begin")[0].split()[1]
        assert not work.said(f"end {stopped_at}")
        assert work.total() == 3
        os.kill(victim.pid, signal.SIGCONT)
        victim.join(30)
        assert victim.exitcode == 0
        assert work.total() == 3
        assert len(work.said(f"end {stopped_at}")) == 2
        assert len(work.said("merge")) == 1

    def test_a_damaged_part_is_made_again(self, tmp_path: Path) -> None:
        work = Sum(tmp_path, 3)
        parts, store = work.parts, work.parts.store
        broken = store.get_or_build(
            "sum_part", parts.spec | parts.settings[1], lambda folder: work.build(1, folder)
        )
        (broken.path / "number").write_text("9")
        assert work.total() == 6
        assert len(work.said("end 1")) == 2

    def test_no_part_is_begun_once_another_has_the_whole(self, tmp_path: Path) -> None:
        work = Sum(tmp_path, 2, seconds=0.3)
        other = threading.Thread(target=Sum(tmp_path, 2).total)
        parts = work.parts
        lock = parts.store.lock("sum_part", parts.spec | parts.settings[0])
        parts.store.path("sum_part", {}).parent.mkdir(parents=True)
        assert lock.acquire()
        with lock:  # the other finds part 0 held, makes part 1 and waits
            other.start()
            wait_for(lambda: work.said("end 1"))
            parts.store.get_or_build("sum", parts.spec, lambda folder: work.merge([], folder))
            other.join(30)
        assert not other.is_alive()
        assert not work.said("begin 0")


def test_a_job_of_another_worker_begins_with_its_own_part(tmp_path: Path) -> None:
    work = Sum(tmp_path, 4)
    work.parts.get_or_build(first=2)
    assert [line.split()[1] for line in work.said("begin")] == ["2", "3", "0", "1"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_three_workers_calibrate_together(run: Runner, tmp_path: Path) -> None:
    """Real calibrations in three processes: together they make three parts and one whole."""

    def work(worker: int) -> None:
        settings = f"stages=[calibrate] calibration.shards=3 calibration.worker={worker}"
        run_stages(configured(settings, tmp_path / "parts"), tmp_path / f"run-{worker}")

    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=work, args=(worker,)) for worker in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(200)
        assert process.exitcode == 0
    metrics = [read_json(tmp_path / f"run-{worker}" / "metrics.json") for worker in range(3)]
    assert sum(each[MADE]["value"] for each in metrics) == 3
    assert sum(each["calibrate/moments/all/reused"]["value"] == 0 for each in metrics) == 1
    whole = run("stages=[calibrate]", tmp_path / "whole").artifact("moments")
    (found,) = (tmp_path / "parts" / "artifacts" / "moments").glob("*/artifact.json")
    assert found.parent.name == whole.name
    assert_same_moments(read_moments(found.parent), read_moments(whole))
