"""Runs whose models do not fit: offloaded, one at a time, in little disk, killed; results stay the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvmap.errors import KvmapError
from kvmap.stages import run_stages
from kvmap.zoo import weights_folder
from tests.killed_writes import ends
from tests.stages.conftest import Finished, Runner, configured

CALIBRATE = "stages=[calibrate] calibration.batch_size=4"
SEQUENTIAL = "calibration.sequential=true"
ON_DISK = "pair.source.device_map=disk pair.target.device_map=auto pair.target.max_memory={cpu:300KB}"


def moments(finished: Finished) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in finished.artifact("moments").glob("moments.*")}


@pytest.fixture(scope="module")
def plain(run: Runner) -> Finished:
    return run(CALIBRATE)


@pytest.mark.parametrize(
    "settings",
    [
        SEQUENTIAL,
        pytest.param(f"{SEQUENTIAL} calibration.max_spill_gib=0.008", marks=pytest.mark.slow),
        pytest.param(
            f"{SEQUENTIAL} calibration.layerwise=true calibration.max_spill_gib=0.012", marks=pytest.mark.slow
        ),
        pytest.param(f"{SEQUENTIAL} {ON_DISK}", marks=pytest.mark.slow),
        ON_DISK,
    ],
)
def test_the_moments_are_the_same_file_under_the_same_key(plain, run, tmp_path, settings) -> None:
    found = run(f"{CALIBRATE} {settings}", tmp_path)
    assert found.artifact("moments").name == plain.artifact("moments").name
    assert moments(found) == moments(plain)
    assert list((tmp_path / "artifacts").glob("spill/*")) == []


@pytest.mark.slow
def test_captures_of_offloaded_models_are_the_same_files(run, tmp_path) -> None:
    settings = f"{CALIBRATE} calibration.keep_captures=true"
    whole = run(settings, tmp_path / "whole")
    for number, more in enumerate(("calibration.layerwise=auto", "calibration.layerwise=false")):
        found = run(f"{settings} {SEQUENTIAL} {ON_DISK} {more}", tmp_path / str(number))
        caches = [
            {path.name: path.read_bytes() for path in each.artifact("captures").glob("*.safetensors")}
            for each in (found, whole)
        ]
        assert caches[0] == caches[1]
        assert len(caches[0]) == 2 * 4
        assert moments(found) == moments(whole)


@pytest.mark.slow
def test_parts_are_made_one_model_at_a_time_too(run, tmp_path) -> None:
    settings = f"{CALIBRATE} calibration.shards=2"
    whole = run(settings, tmp_path / "whole")
    found = run(f"{settings} {SEQUENTIAL} calibration.max_spill_gib=0.008", tmp_path / "sequential")
    assert moments(found) == moments(whole)
    assert list((tmp_path / "sequential/artifacts").glob("spill/*")) == []


@pytest.mark.slow
def test_every_stage_works_on_offloaded_models(run, tmp_path) -> None:
    settings = "stages=[calibrate,fit,diagnose,evaluate] mapper.native_layers=1 mapper.top_k=1"
    settings += " evaluation.relay.hops=2 calibration.native_layers=1"
    whole, found = (
        run(f"{settings} {more}", tmp_path / name) for name, more in (("whole", ""), ("offloaded", ON_DISK))
    )
    expected, got = whole.json("metrics"), found.json("metrics")
    assert got.keys() == expected.keys()
    measured = ("seconds", "bytes", "per_second", "reused", "flops")
    compared = [name for name in expected if not any(part in name for part in measured)]
    assert len(compared) > 30
    for name in compared:
        assert got[name] == expected[name], name


def killed(settings: str, outputs: Path, directory: Path, write: int) -> bool:
    """Whether a run comes to its end that is killed before one of its tensor files is there."""
    return ends(lambda: run_stages(configured(settings, outputs), directory), write, suffix=".safetensors")


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        f"{SEQUENTIAL} calibration.max_spill_gib=0.008",
        pytest.param("calibration.keep_captures=true", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_was_killed_is_gone_on_with_by_the_next(plain, run, tmp_path, settings) -> None:
    settings, kills = f"{CALIBRATE} {settings}", 0
    while not killed(settings, tmp_path / "outputs", tmp_path / f"run-{kills}", 5):
        kills += 1
        assert kills < 20
    assert kills >= 2
    found = run(settings, tmp_path / "outputs")
    assert found.metric("calibrate/moments/all/reused") == 1
    # captures hold sequences in their own order, which float32 sums show
    expected = plain if "keep" not in settings else run(settings, tmp_path / "whole")
    assert moments(found) == moments(expected)
    assert list((tmp_path / "outputs/artifacts").glob("spill/*")) == []


def test_captures_that_are_kept_and_take_more_disk_than_allowed_are_refused(run, tmp_path) -> None:
    settings = f"{CALIBRATE} calibration.keep_captures=true calibration.max_spill_gib=0.001"
    with pytest.raises(KvmapError, match=r"max_spill_gib=0\.001: the captured caches.*keep_captures=True"):
        run(settings, tmp_path)


def test_the_shipped_models_are_larger_than_what_these_tests_allow() -> None:
    assert (Path(weights_folder("tiny-large")) / "model.safetensors").stat().st_size > 300_000
