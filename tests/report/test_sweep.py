"""The runs of a sweep as rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvmap import report
from kvmap.tracking import Metric, Run


def test_runs_are_set_side_by_side_by_what_differs(tmp_path: Path) -> None:
    for job, top_k in enumerate((1, 2, 4)):
        config = {"mapper": {"kind": "linear", "top_k": top_k}}
        with Run(tmp_path / str(job), "sweep", config, "none") as run:
            run.log({"evaluate/lookup/mapped/accuracy": Metric(0.1 * top_k)})
    runs = [({"job": str(job)}, tmp_path / str(job)) for job in range(3)]
    rows = report.summary_rows([*runs, ({"job": "missing"}, None)])
    assert [row.get("mapper.top_k") for row in rows] == [1, 2, 4, None]
    found = [row["evaluate/lookup/mapped/accuracy"] for row in rows[:3]]
    assert found == pytest.approx([0.1, 0.2, 0.4])
    assert "mapper.kind" not in rows[0]
    assert rows[3] == {"job": "missing", "mapper.top_k": None}
