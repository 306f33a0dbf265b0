from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from kvmap.errors import KvmapError, UnknownName
from kvmap.prediction.columns import Outcome, diagnostics_of, outcomes_of, short_name, with_ratios
from kvmap.prediction.configurations import configurations
from tests.prediction.run_tables import COSINE, RETENTION, table_of

TABLE = with_ratios(
    pd.DataFrame(
        {
            "mapper": ["linear", "mlp"],
            COSINE: [0.5, 0.6],
            f"{COSINE}:n": [8, 8],
            "diagnose/held_out/source/r2_key": [1.0, 1.0],
            "plan/model/calibration/rows_per_feature": [5.0, 6.0],
            "plan/model/moments/size_bytes": [1.0, 2.0],
            RETENTION: [0.8, 0.9],
            f"{RETENTION}:standard_error": [0.1, 0.1],
            "evaluate/world_where/mapped/retention": [0.7, 0.8],
            "evaluate/world_where/mapped/mcnemar_p": [0.7, 0.8],
            "evaluate/world_where/source/retention": [0.7, 0.8],
            "evaluate/perplexity/mapped/perplexity": [12.0, 11.0],
            "evaluate/perplexity/target/perplexity": [10.0, 10.0],
        }
    )
)


def test_diagnostics_are_of_the_mapped_cache_and_of_the_fit():
    assert diagnostics_of(TABLE) == [COSINE, "plan/model/calibration/rows_per_feature"]
    assert short_name(COSINE) == "questions attention_cosine"
    assert short_name("plan/model/calibration/rows_per_feature") == "calibration rows_per_feature"


def test_the_usual_outcomes_by_metric_and_task():
    assert [(o.task, o.metric) for o in outcomes_of(TABLE)] == [
        ("average", "retention"),
        ("world_where", "retention"),
        ("perplexity", "perplexity_ratio"),
    ]
    ratio = TABLE["evaluate/perplexity/mapped/perplexity_ratio"]
    assert list(ratio) == pytest.approx([1.2, 1.1])


def test_outcomes_by_name():
    assert outcomes_of(TABLE, ["average/retention"]) == [Outcome("average", "retention", RETENTION)]
    assert [o.task for o in outcomes_of(TABLE, ["mcnemar_p", "retention"])] == [
        "world_where",
        "average",
        "world_where",
    ]
    with pytest.raises(UnknownName, match="Did you mean 'retention'"):
        outcomes_of(TABLE, ["retentoin"])
    with pytest.raises(KvmapError, match="stage evaluate"):
        outcomes_of(TABLE[[COSINE]])


class TestConfigurations:
    TABLE = pd.DataFrame(
        {
            "run": ["a", "b", "c", "d", "e"],
            "study": ["s", "t", "s", "s", "s"],
            "ordered_pair": ["p", "p", "p", "p", "q"],
            "mapper.top_k": [1, 1, 2, "all", 1],
            "mapper.seed": [0, 1, 0, 0, 0],
            "evaluation.world_seed": [0, 1, 0, 0, 0],
            "outputs": ["x", "y", "x", "x", "x"],
            "calibration.shard": [None, np.nan, None, None, None],
            "mapper.tuning": [[1], [1], [1], [1], [2]],
            "benchmark.repeats": [1, 2, 1, 1, 1],
            RETENTION: [0.5, 0.7, 0.9, np.nan, 0.1],
            COSINE: [0.1, np.nan, 0.3, 0.4, 0.5],
        }
    )

    def test_runs_that_differ_in_seeds_are_averaged(self):
        found = configurations(self.TABLE)
        assert list(found["run"]) == ["a", "c", "d", "e"]
        assert list(found["n_runs"]) == [2, 1, 1, 1]
        assert list(found[RETENTION])[:2] == pytest.approx([0.6, 0.9])
        assert found[RETENTION].isna().tolist() == [False, False, True, False]
        assert list(found[COSINE]) == pytest.approx([0.1, 0.3, 0.4, 0.5]), (
            "what one lacks is the others' mean"
        )

    def test_without_seeds_every_row_counts(self):
        table = table_of([0, 0, 1], retention=[1.0, 2.0, 3.0])
        assert list(configurations(table)["n_runs"]) == [1, 1, 1]

    def test_another_column_may_say_what_a_pair_is(self):
        assert len(configurations(self.TABLE, "study")) == 5
        with pytest.raises(
            KvmapError, match="group='pare': the runs have no such setting; they have run, study"
        ):
            configurations(self.TABLE, "pare")
        with pytest.raises(KvmapError, match="1 runs have none"):
            configurations(table_of([0], retention=[1.0]).assign(pair=None), "pair")
