from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from sklearn.linear_model import Ridge
from sklearn.model_selection import GridSearchCV, LeaveOneGroupOut
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from kvmap.errors import KvmapError, UnknownName
from kvmap.prediction import default_predictors, leave_one_pair_out
from kvmap.prediction.leave_out import PENALTIES, pair_weights, ridge_guesses
from tests.prediction.run_tables import COSINE, R2, RETENTION, noise, pairs_of, table_of

FEW = {"n_resamples": 200}


def planted(n_pairs=8, n_runs=4, spread=0.2):
    cosine, r2 = noise(0, n_pairs, n_runs), noise(1, n_pairs, n_runs)
    rest = noise(2, n_pairs, n_runs)
    return table_of(
        pairs_of(n_pairs, n_runs), cosine=cosine, r2=r2, retention=2 + cosine - 0.5 * r2 + spread * rest
    )


def by_name(scores):
    return {row["predictor"]: row for row in scores.to_dict("records")}


class TestAgainstScikitLearn:
    """Equally many runs a pair, so that weights are equal and scikit-learn's plain tools say the same."""

    def test_predictions(self):
        table = planted()
        found = leave_one_pair_out(table, predictors=[COSINE, R2], **FEW).predictions
        x, y = table[[COSINE, R2]].to_numpy(), table[RETENTION].to_numpy()
        groups = table["ordered_pair"].to_numpy()
        for train, test in LeaveOneGroupOut().split(x, y, groups):
            # Ridge adds up squares over n rows where kvmap takes their mean
            grid = {"ridge__alpha": PENALTIES * (len(train) - 4)}
            search = GridSearchCV(
                make_pipeline(StandardScaler(), Ridge()),
                grid,
                cv=LeaveOneGroupOut(),
                scoring="neg_mean_squared_error",
            )
            search.fit(x[train], y[train], groups=groups[train])
            best = PENALTIES[search.best_index_]
            model = make_pipeline(StandardScaler(), Ridge(alpha=best * len(train))).fit(x[train], y[train])
            # float64, 28 rows
            assert found["ridge"].to_numpy()[test] == pytest.approx(model.predict(x[test]), rel=1e-9)
            assert found["mean of other pairs"].to_numpy()[test] == pytest.approx(y[train].mean())

    @pytest.mark.parametrize("place", [0, 5, 10])
    def test_weighted_rows(self, place):
        random = np.random.default_rng(0)
        labels = np.repeat([0, 1, 2], [2, 5, 9])
        x, y, new = random.normal(size=(16, 3)), random.normal(size=16), random.normal(size=(4, 3))
        weights = pair_weights(labels)
        assert np.bincount(labels, weights=weights) == pytest.approx(1 / 3)
        mean = weights @ x
        scale = np.sqrt(weights @ (x - mean) ** 2)
        model = Ridge(alpha=PENALTIES[place]).fit((x - mean) / scale, y, sample_weight=weights)
        expected = model.predict((new - mean) / scale)
        assert ridge_guesses(x, y, weights, new)[place] == pytest.approx(expected, rel=1e-9)


class TestScores:
    @pytest.fixture
    def found(self):
        return leave_one_pair_out(planted(), predictors=[COSINE, R2], **FEW)

    def test_are_what_they_say(self, found):
        said, true = found.predictions, found.predictions["true"]
        base = ((said["mean of other pairs"] - true) ** 2).sum()
        pairs = said["ordered_pair"]
        for name, row in by_name(found.scores).items():
            guess = said[name]
            assert row["r2"] == pytest.approx(1 - ((guess - true) ** 2).sum() / base)
            assert row["mean_absolute_error"] == pytest.approx((guess - true).abs().mean())
            if name != "mean of other pairs":
                within = [stats.spearmanr(guess[pairs == p], true[pairs == p])[0] for p in pairs.unique()]
                assert row["rank_correlation"] == pytest.approx(stats.spearmanr(guess, true)[0])
                assert row["rank_within_pairs"] == pytest.approx(np.mean(within))

    def test_planted_relations_are_recovered(self, found):
        scores = by_name(found.scores)
        assert scores["ridge"]["r2"] > 0.9
        assert scores["ridge"]["r2_low"] > 0.7
        assert 0 < scores["held_out r2_key"]["r2"] < scores["questions attention_cosine"]["r2"] < 0.9
        assert scores["mean of other pairs"]["r2"] == 0
        assert math.isnan(scores["mean of other pairs"]["rank_within_pairs"])
        assert (found.scores["n_pairs"] == 8).all()
        assert (found.scores["n_configurations"] == 32).all()

    def test_the_mean_of_others_ranks_pairs_the_wrong_way_round(self, found):
        """Which is why a rank correlation of predictions alone proves nothing."""
        assert by_name(found.scores)["mean of other pairs"]["rank_correlation"] < -0.3

    def test_nothing_planted_nothing_found(self):
        r2 = []
        for seed in range(12):
            table = table_of(pairs_of(7, 3), cosine=noise(seed, 7, 3), retention=noise(100 + seed, 7, 3))
            r2.append(by_name(leave_one_pair_out(table, **FEW).scores)["ridge"]["r2"])
        assert np.median(r2) < 0.1

    def test_every_pair_weighs_the_same(self):
        """A pair with a hundred runs says no more of other pairs than one with two."""
        table = planted()
        often = table[table["ordered_pair"] == "pair 0"]
        grown = pd.concat([table, *[often] * 9], ignore_index=True)
        one, ten = (leave_one_pair_out(t, predictors=[COSINE, R2], **FEW).scores for t in (table, grown))
        assert ten["r2"].to_numpy() == pytest.approx(one["r2"].to_numpy())
        assert ten["mean_absolute_error"].to_numpy() == pytest.approx(one["mean_absolute_error"].to_numpy())


class TestUndefined:
    @pytest.mark.parametrize("n_pairs", [1, 4])
    def test_too_few_pairs(self, n_pairs):
        found = leave_one_pair_out(planted(n_pairs), **FEW)
        assert set(found.scores["note"]) == {f"too few pairs ({n_pairs})"}
        assert found.scores[["r2", "r2_low", "mean_absolute_error", "rank_correlation"]].isna().all(axis=None)
        assert list(found.scores["predictor"])[:2] == ["ridge", "mean of other pairs"]

    def test_a_constant_predictor_is_the_mean(self):
        table = planted().assign(**{R2: 0.3})
        found = leave_one_pair_out(table, predictors=[R2], **FEW).predictions
        assert found["ridge"].to_numpy() == pytest.approx(found["mean of other pairs"].to_numpy())

    def test_a_constant_outcome_has_no_r2(self):
        scores = by_name(leave_one_pair_out(planted().assign(**{RETENTION: 0.5}), **FEW).scores)
        assert math.isnan(scores["ridge"]["r2"])
        assert scores["ridge"]["mean_absolute_error"] == pytest.approx(0, abs=1e-12)

    def test_what_a_run_lacks_leaves_it_out_by_name(self):
        table = planted()
        table.loc[3, COSINE] = np.nan
        table.loc[[3, 9], RETENTION] = np.nan
        scores = leave_one_pair_out(table, predictors=[COSINE], **FEW).scores
        assert (scores["n_configurations"] == 30).all()
        assert set(scores["note"]) == {
            f"no {COSINE} in 1 of 32 configurations; no {RETENTION} in 2 of 32 configurations"
        }

    def test_names(self):
        table = planted()
        assert default_predictors(table) == [R2, COSINE]
        held_out = COSINE.replace("questions", "held_out")
        assert default_predictors(table.assign(**{held_out: 1.0})) == [R2, COSINE], "one text each"
        with pytest.raises(UnknownName, match="cosine"):
            leave_one_pair_out(table, predictors=["cosine"])
        with pytest.raises(KvmapError, match="stage diagnose"):
            leave_one_pair_out(table[["ordered_pair", RETENTION]])
        two = table.assign(**{"evaluate/other/mapped/retention": 1.0})
        with pytest.raises(KvmapError, match="average/retention, other/retention"):
            leave_one_pair_out(two, "retention")
