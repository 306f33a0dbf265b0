"""What becomes of outlier tokens in a run: no rows, or a mapper of their own, or rows after all."""

from __future__ import annotations

import torch

from kvmap.fit.pair_moments import SPLITS
from kvmap.mappers import SeparateMapper
from tests.stages.conftest import Finished, Runner

STAGES = "stages=[calibrate,fit,diagnose]"
STRICT = "calibration.outliers.threshold=2 calibration.outliers.share=0.2"


def counts(finished: Finished) -> dict[str, tuple[int, int]]:
    return {row["split"]: (int(row["n_rows"]), int(row["n_flagged"])) for row in finished.table("outliers")}


def test_dropped_outliers_are_no_rows(run: Runner) -> None:
    plain = run(STAGES)
    dropped = run(f"{STAGES} calibration.outliers.policy=drop {STRICT}")
    assert "outliers" not in plain.tables
    for split in SPLITS:
        name = f"calibrate/rows/{split}/n_rows"
        n_rows, n_flagged = counts(dropped)[split]
        assert n_rows == plain.metric(name)
        assert dropped.metric(name) == n_rows - n_flagged
        assert 0 < n_flagged < n_rows / 2
    assert dropped.mapper.kind == "linear"
    assert dropped.table("r2") != plain.table("r2")


def test_separated_outliers_get_a_mapper_of_their_own(run: Runner) -> None:
    dropped = run(f"{STAGES} calibration.outliers.policy=drop {STRICT}")
    separate = run(f"{STAGES} calibration.outliers.policy=separate {STRICT}")
    assert counts(separate) == counts(dropped)
    mapper = separate.mapper
    assert isinstance(mapper, SeparateMapper)
    for name, tensor in dropped.mapper.tensors().items():
        inner = [found for key, found in mapper.tensors().items() if key.endswith(name)]
        assert any(torch.equal(tensor, found) for found in inner), name


def test_too_few_outliers_go_back_to_the_others(run: Runner) -> None:
    lax = "calibration.outliers.threshold=3.5 calibration.outliers.share=0.2"
    kept, back = run(STAGES), run(f"{STAGES} calibration.outliers.policy=separate {lax}")
    assert {row["applied"] for row in back.table("outliers")} == {"keep"}
    assert 0 < counts(back)["fit"][1] < 8
    assert back.mapper.kind == "linear"
    for split in SPLITS:
        name = f"calibrate/rows/{split}/n_rows"
        assert back.metric(name) == kept.metric(name)
    for name, tensor in kept.mapper.tensors().items():
        # the same rows in another order; weights are float32, of systems of condition 1e6
        torch.testing.assert_close(back.mapper.tensors()[name], tensor, rtol=1e-4, atol=1e-5)
