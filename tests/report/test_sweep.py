"""The summary of a sweep's jobs in one file."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from kvmap import report
from kvmap.tracking import Metric, Run


def test_a_sweep_is_summed_up_by_what_differs(tmp_path: Path) -> None:
    for job, top_k in enumerate((1, 2, 4)):
        config = {"mapper": {"kind": "linear", "top_k": top_k}}
        with Run(tmp_path / str(job), "sweep", config, "none") as run:
            run.log({"evaluate/lookup/mapped/accuracy": Metric(0.1 * top_k)})
    with open(report.write_sweep_summary(tmp_path), newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["mapper.top_k"] for row in rows] == ["1", "2", "4"]
    assert [float(row["evaluate/lookup/mapped/accuracy"]) for row in rows] == pytest.approx([0.1, 0.2, 0.4])
    assert "mapper.kind" not in rows[0]
    assert {row["status"] for row in rows} == {"done"}
