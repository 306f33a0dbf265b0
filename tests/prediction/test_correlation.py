from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from kvmap.errors import KvmapError, UnknownName
from kvmap.prediction import correlate
from kvmap.prediction import correlation as module
from tests.prediction.run_tables import COSINE, R2, noise, pairs_of, simpson, table_of

FEW = {"n_resamples": 400, "n_permutations": 400}


def by_cell(rows, diagnostic=COSINE):
    """(scope, method) to row."""
    own = rows[(rows["diagnostic"] == diagnostic) & (rows["task"] == "average")]
    return {(row["scope"], row["method"]): row for row in own.to_dict("records")}


@pytest.fixture(scope="module")
def table():
    cosine, r2, rest = (noise(seed, 5, 7) for seed in range(3))
    return table_of(pairs_of(5, 7), cosine=cosine, r2=r2, retention=0.6 * cosine + 0.5 * rest)


@pytest.fixture(scope="module")
def rows(table):
    return correlate(table, **FEW)


class TestValues:
    @pytest.mark.parametrize("diagnostic", [COSINE, R2])
    @pytest.mark.parametrize(
        ("method", "of_scipy"), [("pearson", stats.pearsonr), ("spearman", stats.spearmanr)]
    )
    def test_equal_scipys(self, table, rows, diagnostic, method, of_scipy):
        found = by_cell(rows, diagnostic)
        x, y = table[diagnostic], table["evaluate/average/mapped/retention"]
        # float64: 35 terms
        assert found["pooled", method]["value"] == pytest.approx(of_scipy(x, y).statistic, abs=1e-12)
        pairs = table["ordered_pair"]
        means = [values.groupby(pairs).mean() for values in (x, y)]
        assert found["between", method]["value"] == pytest.approx(of_scipy(*means).statistic, abs=1e-12)
        if method == "pearson":
            residuals = [values - values.groupby(pairs).transform("mean") for values in (x, y)]
            within = of_scipy(*residuals).statistic
        else:
            within = np.mean([of_scipy(x[pairs == p], y[pairs == p]).statistic for p in pairs.unique()])
        assert found["within", method]["value"] == pytest.approx(within, abs=1e-12)

    def test_counts(self, rows):
        row = by_cell(rows)["pooled", "pearson"]
        assert (row["n_configurations"], row["n_runs"], row["n_pairs"]) == (35, 35, 5)

    def test_chunks_change_nothing_but_the_memory(self, table, rows, monkeypatch):
        monkeypatch.setattr(module, "CHUNK_ELEMENTS", 1000)
        pd.testing.assert_frame_equal(correlate(table, **FEW), rows, rtol=1e-12)


class TestPlanted:
    def test_a_relation_is_found_in_every_scope(self):
        x = noise(0, 12, 6)
        table = table_of(
            pairs_of(12, 6), cosine=x, r2=noise(1, 12, 6), retention=np.exp(x + 0.2 * noise(2, 12, 6))
        )
        rows = correlate(table, **FEW)
        for (scope, method), row in by_cell(rows).items():
            assert row["low"] > (0.8 if (scope, method) == ("pooled", "spearman") else 0), (scope, method)
            assert row["low"] <= row["value"] <= row["high"] <= 1
            assert row["p"] < 0.02
            assert row["note"] == ""
        for row in by_cell(rows, R2).values():
            assert row["low"] < 0 < row["high"]
            assert row["p"] > 0.05
            assert row["note"] == "not told from zero"

    def test_simpson(self):
        found = by_cell(correlate(simpson(), **FEW))
        assert found["pooled", "pearson"]["value"] < -0.4
        assert found["between", "pearson"]["high"] < -0.5
        for method in ("pearson", "spearman"):
            assert found["within", method]["low"] > 0.8
            assert found["within", method]["p"] < 0.01

    def test_seeds_of_one_configuration_are_one_point(self):
        x, y = noise(0, 6, 4), noise(1, 6, 4)
        once = table_of(pairs_of(6, 4), cosine=x, retention=y).assign(
            **{"mapper.top_k": np.tile(np.arange(4), 6), "mapper.seed": 0}
        )
        shifts = np.random.default_rng(0).normal(size=24)
        seeds = [
            once.assign(
                **{"mapper.seed": seed, "evaluate/average/mapped/retention": y + sign * shifts, COSINE: x}
            )
            for seed, sign in enumerate((-1, 0, 1))
        ]
        one, three = (by_cell(correlate(t, **FEW)) for t in (once, pd.concat(seeds, ignore_index=True)))
        for cell, row in one.items():
            assert three[cell]["value"] == pytest.approx(row["value"])
            assert three[cell]["low"] == pytest.approx(row["low"])
            assert (three[cell]["n_configurations"], three[cell]["n_runs"]) == (24, 72)

    def test_q_is_that_of_benjamini_and_hochberg(self):
        table = table_of(pairs_of(6, 5), retention=noise(0, 6, 5)).assign(
            **{f"diagnose/d{n}/mapped/m": noise(n, 6, 5) + noise(0, 6, 5) * (n == 3) for n in range(1, 9)}
        )
        rows = correlate(table, **FEW)
        for scope in ("pooled", "within", "between"):
            own = rows[(rows["scope"] == scope) & (rows["method"] == "spearman")]
            assert own["q"].to_numpy() == pytest.approx(stats.false_discovery_control(own["p"]))


class TestNothingPlanted:
    """Rates over simulations in which nothing depends on anything but which pair it is of."""

    @pytest.mark.slow
    @pytest.mark.parametrize(("n_pairs", "n_runs"), [(6, 5), (12, 1), (10, 4)])
    def test_intervals_cover_zero_and_p_is_uniform(self, n_pairs, n_runs):
        n = 200
        columns = {f"diagnose/d{i}/mapped/m": noise(2 * i, n_pairs, n_runs) for i in range(n)}
        outcomes = [noise(2 * i + 1, n_pairs, n_runs) for i in range(n)]
        covered: dict[tuple[str, str], list[bool]] = {}
        p: dict[tuple[str, str], list[float]] = {}
        for (name, x), y in zip(columns.items(), outcomes, strict=True):
            table = table_of(pairs_of(n_pairs, n_runs), retention=y).assign(**{name: x})
            for cell, row in by_cell(correlate(table, n_resamples=200, n_permutations=99), name).items():
                if math.isfinite(row["low"]):
                    covered.setdefault(cell, []).append(row["low"] <= 0 <= row["high"])
                    p.setdefault(cell, []).append(row["p"])
        for cell, hits in covered.items():
            # Standard error of a rate of 0.95 over 200: 0.015. Drawing twice is a little too careful.
            assert len(hits) == n
            assert 0.90 <= np.mean(hits) <= 1, cell
            assert np.mean(np.array(p[cell]) <= 0.05) < 0.05 + 4 * 0.0155, cell
            assert np.mean(p[cell]) == pytest.approx(0.5, abs=4 * 0.0205), cell


class TestTooFew:
    @pytest.mark.parametrize("n_pairs", [1, 2, 3])
    def test_few_pairs_have_no_interval_between_them(self, n_pairs):
        x = noise(0, n_pairs, 8)
        table = table_of(pairs_of(n_pairs, 8), cosine=x, retention=x + 0.3 * noise(1, n_pairs, 8))
        found = by_cell(correlate(table, **FEW))
        pooled = found["pooled", "pearson"]
        assert math.isfinite(pooled["value"])
        assert all(math.isnan(pooled[name]) for name in ("low", "high", "p", "q"))
        assert pooled["note"] == f"too few pairs ({n_pairs})"
        assert math.isnan(found["between", "pearson"]["value"])
        assert found["between", "pearson"]["note"] == f"too few pairs ({n_pairs})"
        within = found["within", "pearson"]
        assert within["low"] > 0
        assert within["note"] == f"too few pairs ({n_pairs}): the interval is of these alone"

    @pytest.mark.parametrize(("n_pairs", "n_runs"), [(1, 3), (4, 2)])
    def test_few_configurations_within_have_a_p_and_no_interval(self, n_pairs, n_runs):
        """Resamples of three points on a line are points on that line."""
        x = noise(0, n_pairs, n_runs)
        table = table_of(pairs_of(n_pairs, n_runs), cosine=x, retention=x)
        row = by_cell(correlate(table, **FEW))["within", "pearson"]
        assert row["value"] == pytest.approx(1)
        assert math.isnan(row["low"])
        assert row["p"] > 0.05
        n = n_pairs * n_runs
        assert row["note"] == f"too few configurations for an interval ({n} of {n_pairs} pairs)"

    def test_one_run_a_pair_says_nothing_within(self):
        x = noise(0, 9, 1)
        found = by_cell(correlate(table_of(range(9), cosine=x, retention=-x), **FEW))
        assert found["pooled", "pearson"]["high"] < -0.9
        assert math.isnan(found["within", "pearson"]["value"])
        assert "nothing varies within" in found["within", "pearson"]["note"]

    @pytest.mark.parametrize("n", [1, 2])
    def test_two_runs(self, n):
        found = by_cell(correlate(table_of(range(n), cosine=np.arange(n), retention=np.arange(n)), **FEW))
        assert {row["note"] for row in found.values()} == {f"too few configurations ({n})"}
        assert all(math.isnan(row["value"]) for row in found.values())


class TestUndefined:
    def test_constants_say_so(self):
        x = noise(0, 5, 4)
        table = table_of(pairs_of(5, 4), cosine=0.7, r2=pairs_of(5, 4) * 1.0, retention=x)
        rows = correlate(table, **FEW)
        for row in by_cell(rows).values():
            assert math.isnan(row["value"])
            assert math.isnan(row["p"])
            assert row["note"] == "constant"
        varied = by_cell(rows, R2)
        assert varied["within", "pearson"]["note"] == "constant within pairs"
        assert math.isfinite(varied["pooled", "pearson"]["value"])

    def test_what_a_run_lacks_is_left_out_by_name(self):
        x, y = noise(0, 6, 4), noise(1, 6, 4)
        gaps, undefined = x.copy(), y.copy()
        gaps[[0, 5]] = np.nan
        undefined[7] = np.inf
        table = table_of(pairs_of(6, 4), cosine=gaps, r2=x, retention=undefined)
        rows = correlate(table, **FEW)
        whole = np.isfinite(gaps) & np.isfinite(undefined)
        row = by_cell(rows)["pooled", "pearson"]
        assert row["value"] == pytest.approx(stats.pearsonr(x[whole], y[whole]).statistic)
        assert row["n_configurations"] == 21
        assert row["note"].endswith(
            "no questions attention_cosine in 2 of 24 configurations; "
            "no average retention in 1 of 24 configurations"
        )
        assert by_cell(rows, R2)["pooled", "pearson"]["n_configurations"] == 23

    def test_nothing_there_at_all(self):
        table = table_of(pairs_of(5, 4), cosine=np.nan, r2=noise(0, 5, 4), retention=noise(1, 5, 4))
        row = by_cell(correlate(table, **FEW))["pooled", "pearson"]
        assert math.isnan(row["value"])
        assert row["note"].startswith("too few configurations (0); no questions attention_cosine in 20 of 20")

    def test_names_that_are_not_there(self):
        table = table_of(range(5), retention=np.arange(5.0))
        with pytest.raises(KvmapError, match="stage diagnose"):
            correlate(table)
        with pytest.raises(UnknownName, match="attention_cosine"):
            correlate(table.assign(**{COSINE: 1.0}), diagnostics=["attention_cosine"])
        with pytest.raises(KvmapError, match="0 resamples"):
            correlate(table, n_resamples=0)


def test_order_is_that_of_outcomes_then_diagnostics():
    table = table_of(
        pairs_of(5, 3), r2=noise(1, 5, 3), cosine=noise(0, 5, 3), retention=noise(2, 5, 3)
    ).assign(**{"evaluate/average/mapped/accuracy": noise(3, 5, 3)})
    rows = correlate(table, outcomes=["accuracy", "retention"], diagnostics=[COSINE, R2], **FEW)
    assert list(dict.fromkeys(rows["outcome"])) == ["accuracy", "retention"]
    assert list(rows["diagnostic"][:12:6]) == [COSINE, R2]
    assert len(rows) == 2 * 2 * 6
