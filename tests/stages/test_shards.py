"""Calibration in parts: what shards leave and `merge` adds up is what one pass makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvmap.errors import KvmapError
from kvmap.fit.pair_moments import SPLITS, PairMoments
from kvmap.stages.calibrated import read_moments, read_outliers
from tests.fit.oracles import assert_same
from tests.stages.conftest import Finished, Runner


def shards(run: Runner, into: Path, n: int, settings: str = "", order: list[int] | None = None) -> Finished:
    for i in order or range(n):
        run(f"stages=[calibrate] calibration.shard={i}/{n} {settings}", into)
    return run(f"stages=[merge] calibration.n_shards={n} {settings}", into)


def assert_same_moments(found: PairMoments, expected: PairMoments) -> None:
    assert found.layout == expected.layout
    assert len(found.tables) == len(expected.tables)
    for mine, theirs in zip(found.tables, expected.tables, strict=True):
        for split in SPLITS:
            # the same float64 products, added in another order
            assert_same(mine.splits[split], theirs.splits[split], rtol=1e-11)


@pytest.mark.parametrize(
    "settings",
    [
        "mapper=head_local calibration.mode=head_local calibration.batch_size=3",
        "calibration.keep_captures=true calibration.regressors=both_kinds calibration.native_layers=1",
        pytest.param("calibration.token_stride=3 calibration.sequential=true", marks=pytest.mark.slow),
    ],
)
def test_merged_shards_are_the_moments_of_one_pass(run: Runner, tmp_path: Path, settings: str) -> None:
    whole = run(f"stages=[calibrate] {settings}", tmp_path / "whole")
    merged = shards(run, tmp_path / "parts", 3, settings, order=[2, 0, 1])
    assert_same_moments(read_moments(merged.artifact("moments")), read_moments(whole.artifact("moments")))
    for split in SPLITS:
        name = f"calibrate/rows/{split}/n_rows"
        assert merged.metric(name) == whole.metric(name)


def test_later_runs_find_what_was_merged(run: Runner, tmp_path: Path) -> None:
    merged = shards(run, tmp_path, 2)
    assert merged.metric("calibrate/moments/all/reused") == 0
    later = run("stages=[calibrate,fit,diagnose]", tmp_path)
    assert later.artifact("moments") == merged.artifact("moments")
    assert later.metric("calibrate/moments/all/reused") == 1
    again = run("stages=[merge,fit] calibration.n_shards=2", tmp_path)
    assert again.metric("calibrate/moments/all/reused") == 1
    assert again.metric("fit/mapper/all/reused") == 1


def test_a_part_is_made_once_and_is_no_whole(run: Runner, tmp_path: Path) -> None:
    part = "stages=[calibrate] calibration.shard=1/2"
    assert run(part, tmp_path).metric("calibrate/moments/all/reused") == 0
    assert run(part, tmp_path).metric("calibrate/moments/all/reused") == 1
    assert not (tmp_path / "artifacts" / "moments").exists()


def test_missing_parts_are_named(run: Runner, tmp_path: Path) -> None:
    run("stages=[calibrate] calibration.shard=1/3", tmp_path)
    # a part of other rows is none of these
    run("stages=[calibrate] calibration.shard=0/3 calibration.token_stride=2", tmp_path)
    with pytest.raises(KvmapError, match=r"the parts 0/3, 2/3 are missing; run .*calibration\.shard=0/3"):
        run("stages=[merge] calibration.n_shards=3", tmp_path)


def test_more_shards_than_sequences_are_refused(run: Runner, tmp_path: Path) -> None:
    with pytest.raises(KvmapError, match=r"calibration\.shard=3/4: no sequence of the splits \['held_out'\]"):
        run("stages=[calibrate] calibration.shard=3/4", tmp_path)


def test_a_part_of_selected_layers_is_refused(run: Runner, tmp_path: Path) -> None:
    with pytest.raises(KvmapError, match=r"calibration\.shard=0/2: calibration\.mode=selected needs all"):
        run("stages=[calibrate] calibration.shard=0/2 calibration.mode=selected mapper.top_k=1", tmp_path)


# Thresholds that flag enough tokens in each part, enough in all parts alone, and too few in all of them.
@pytest.mark.parametrize(
    ("threshold", "applied"),
    [pytest.param(2, "separate", marks=pytest.mark.slow), (3.3, "separate"), (3.5, "keep")],
)
def test_outliers_are_settled_once_all_parts_are_there(
    run: Runner, tmp_path: Path, threshold: float, applied: str
) -> None:
    policy = "calibration.outliers.policy=separate calibration.outliers.share=0.2"
    settings = f"{policy} calibration.outliers.threshold={threshold}"
    whole = run(f"stages=[calibrate] {settings}", tmp_path / "whole")
    merged = shards(run, tmp_path / "parts", 3, settings)
    parts = [read_outliers(path) for path in (tmp_path / "parts" / "artifacts" / "moments_part").glob("*/")]
    assert all(part.undecided for part in parts) is (threshold > 2)
    assert sum(part.flagged["fit"].n_rows for part in parts) > 0
    assert_same_moments(read_moments(merged.artifact("moments")), read_moments(whole.artifact("moments")))
    mine, theirs = (read_outliers(finished.artifact("moments")) for finished in (merged, whole))
    assert mine.counts() == theirs.counts()
    assert mine.applied == theirs.applied == applied
