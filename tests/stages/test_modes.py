"""The mode of the moments changes memory and passes, not the map."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvmap.errors import KvmapError
from kvmap.stages.calibrated import read_moments
from tests.stages.conftest import Runner

STAGES = "stages=[plan,calibrate,fit,diagnose]"
MAPS = {
    "mapper.top_k=2 selection=forward selection.apart=true": "full",
    "mapper.top_k=1 selection=cosine mapper.native_layers=1 mapper.regressors=both_kinds": "full",
    "mapper=head_local mapper.top_k=2": "head_local",
    "mapper=tuned mapper.native_layers=1": "head_local",
    "mapper.top_k=1 selection=proportional": "full",
}


@pytest.mark.slow
@pytest.mark.parametrize("overrides", MAPS)
def test_moments_of_the_selected_layers_give_the_map_of_all(
    run: Runner, tmp_path: Path, overrides: str
) -> None:
    richer = run(f"{STAGES} {overrides} calibration.mode={MAPS[overrides]}")
    selected = run(f"{STAGES} {overrides} calibration.mode=selected", tmp_path)
    assert selected.json("run")["facts"]["moments_mode"] == "selected"
    assert selected.table("selection") == richer.table("selection")
    mine, theirs = selected.mapper.tensors(), richer.mapper.tensors()
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        # the same rows in tables of other columns; weights are float32, of systems of condition 1e6
        torch.testing.assert_close(mine[name], tensor, rtol=1e-4, atol=1e-5)
    reads_nothing = "proportional" in overrides
    assert selected.metric("calibrate/moments/all/n_passes") == (1 if reads_nothing else 2)
    assert richer.metric("calibrate/moments/all/n_passes") == 1


@pytest.mark.parametrize("mode", ["full", "head_local", "selected"])
def test_the_moments_take_the_bytes_that_were_planned(run: Runner, tmp_path: Path, mode: str) -> None:
    finished = run(f"{STAGES} mapper=head_local mapper.top_k=2 calibration.mode={mode}", tmp_path)
    held = read_moments(finished.artifact("moments")).nbytes
    planned = finished.metric("calibrate/moments/all/size_bytes")
    table = {(row["part"], row["quantity"]): float(row["value"]) for row in finished.table("plan")}
    assert table[f"moments_{mode}", "size_bytes"] == planned
    if mode == "selected":  # target layers that choose alike share a table
        assert planned / 3 < held <= planned
    else:
        assert held == planned


def test_a_budget_that_nothing_fits_is_refused(run: Runner, tmp_path: Path) -> None:
    with pytest.raises(KvmapError, match=r"calibration\.memory_budget_gib"):
        run("stages=[calibrate] calibration.memory_budget_gib=0.0001", tmp_path)


def test_a_mode_that_lacks_what_the_map_reads_is_refused(run: Runner, tmp_path: Path) -> None:
    with pytest.raises(KvmapError, match=r"calibration\.mode=head_local: it holds the matched heads alone"):
        run("stages=[calibrate] calibration.mode=head_local", tmp_path)
