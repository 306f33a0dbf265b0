"""A compressed mapper takes the place of the fitted one only where it passes its gate."""

from __future__ import annotations

import logging

import pytest

from tests.stages.conftest import Runner

STAGES = "stages=[fit,diagnose]"
METHODS = [
    "fp8",
    "low_rank_bfloat16",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("bfloat16", "low_rank", "low_rank_fp8")),
]


@pytest.mark.parametrize("method", METHODS)
def test_a_method_that_passes_replaces_the_map(run: Runner, method: str) -> None:
    gate = "mapper.compression.max_r2_loss=1 mapper.compression.max_kl_nats=1"
    # a penalty that keeps weights of one size
    common = f"{STAGES} mapper=head_local mapper.ridge_lambda=10"
    finished = run(f"{common} mapper.compression.method={method} mapper.compression.tolerance=0.1 {gate}")
    plain = run(common)
    assert finished.mapper.kind == "compressed_linear"
    assert plain.mapper.kind == "linear"
    whole, smaller = finished.table("compression")
    assert (whole["variant"], smaller["variant"]) == ("uncompressed", method)
    assert (smaller["passes"], smaller["reason"]) == ("True", "")
    assert int(smaller["nbytes"]) == finished.metric("fit/mapper/all/weights_bytes")
    assert int(whole["nbytes"]) == plain.metric("fit/mapper/all/weights_bytes")
    assert int(smaller["nbytes"]) < int(whole["nbytes"])
    for row in (whole, smaller):
        mean = {kind: float(row[f"r2_{kind}"]) for kind in ("key", "value")}
        table = (plain if row is whole else finished).table("r2")
        for kind, expected in mean.items():
            found = [float(r["r2"]) for r in table if r["kind"] == kind and r["split"] == "held_out"]
            assert sum(found) / len(found) == pytest.approx(expected, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bound", "other", "reason"),
    [("max_r2_loss", "max_kl_nats", "held-out R²"), ("max_kl_nats", "max_r2_loss", "next-token KL")],
)
def test_a_method_that_costs_too_much_is_not_used(
    run: Runner, caplog: pytest.LogCaptureFixture, bound: str, other: str, reason: str
) -> None:
    gate = f"mapper.compression.{bound}=0 mapper.compression.{other}=10"
    with caplog.at_level(logging.WARNING):
        finished = run(f"{STAGES} mapper=head_local mapper.compression.method=fp8 {gate}")
    assert f"mapper.compression.method=fp8 is not used: {reason}" in caplog.text
    assert "The mapper stays as it was fitted" in caplog.text
    assert finished.mapper.kind == "linear"
    row = finished.table("compression")[-1]
    assert row["passes"] == "False"
    assert reason in row["reason"]
    assert f"more than {bound}=0" in row["reason"]
    plain = run(f"{STAGES} mapper=head_local")
    assert finished.table("r2") == plain.table("r2")
    # the verdict is found again with the mapper, without being passed anew
    again = run(f"{STAGES} mapper=head_local mapper.compression.method=fp8 {gate}", again=True)
    assert again.metric("fit/mapper/all/reused") == 1
    assert again.table("compression") == finished.table("compression")


def test_native_layers_and_outliers_are_left_as_they_are(run: Runner) -> None:
    outliers = "calibration.outliers.policy=separate calibration.outliers.threshold=2"
    settings = "mapper.native_layers=1 mapper.compression.method=bfloat16 mapper.compression.max_r2_loss=1"
    finished = run(
        f"{STAGES} mapper=head_local calibration.outliers.share=0.2 {outliers} {settings} "
        "mapper.compression.max_kl_nats=1"
    )
    assert finished.mapper.kind == "separate"
    assert finished.mapper.native_layers == 1
    assert finished.table("compression")[-1]["passes"] == "True"
    assert {row["layer"] for row in finished.table("r2")} == {"1", "2", "3", "4", "5"}
