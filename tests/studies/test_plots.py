"""What a study's picture shows: every line at the same places, whatever order its runs come in."""

from __future__ import annotations

import pandas as pd
import pytest

from kvmap.studies.plots import in_order, panels
from kvmap.studies.runs import PAIR
from kvmap.studies.summary import CARRIED, RETENTION


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["all", 2, 1, 2], ["1", "2", "all"]),
        ([1e-4, 100.0, 0.01], ["0.0001", "0.01", "100.0"]),
        (["world", "shuffled"], ["world", "shuffled"]),
    ],
)
def test_numbers_ascend_and_names_stand_as_they_come(values, expected):
    assert in_order(values) == expected


def test_lines_meet_at_the_values_of_the_setting(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    drawn = {}
    plain = Axes.errorbar

    def remember(self, x, y, **options):
        drawn.setdefault(options["label"], []).append(dict(zip([round(v) for v in x], y, strict=True)))
        return plain(self, x, y, **options)

    monkeypatch.setattr(Axes, "errorbar", remember)
    worth = {"1": 0.1, "2": 0.2, "all": 0.3}
    rows = [
        {PAIR: pair, "rule": rule, "k": k, RETENTION: worth[k], CARRIED: 1 - worth[k]}
        for pair in ("a → b", "b → a")
        for rule, order in (("r2", ("all", "2", "1")), ("cosine", ("1", "all", "2")))
        for k in order
    ]
    panels(
        pd.DataFrame(rows),
        "k",
        (RETENTION, CARRIED),
        tmp_path / "f.png",
        label="layers",
        by="rule",
        names={"r2": "R²"},
        references={CARRIED: 1.0},
    )
    assert drawn.keys() == {"R²", "cosine"}
    for retained, carried in drawn.values():
        assert retained == pytest.approx({0: 0.1, 1: 0.2, 2: 0.3})
        assert carried == pytest.approx({0: 0.9, 1: 0.8, 2: 0.7})
    assert (tmp_path / "f.png").stat().st_size > 0
