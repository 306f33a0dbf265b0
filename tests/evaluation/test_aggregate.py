from __future__ import annotations

import csv
import math

import numpy as np
import pytest

from kvmap.errors import KvmapError
from kvmap.evaluation import statistics
from kvmap.evaluation.aggregate import aggregate, main
from kvmap.evaluation.run_groups import find_runs, finished, group_runs
from tests.evaluation.finished_runs import answers, item_rows, sequence_rows, write_run

N_SEEDS, N_ITEMS = 4, 150
MAPPED = [answers(0.5 + 0.1 * seed, N_ITEMS, seed) for seed in range(N_SEEDS)]
TARGET, SOURCE = answers(0.95, N_ITEMS, 50), answers(0.3, N_ITEMS, 51)
HARD = [answers(0.4, 60, 80 + seed) for seed in range(N_SEEDS)]
NLL = np.random.default_rng(7).normal(20, 3, (N_SEEDS, 8))
NATIVE = np.random.default_rng(8).normal(12, 1, 8)


def slow_hierarchical(tables, n_resamples, shared, seed=0):
    """Resamples of runs, then items, one after the other."""
    random = np.random.default_rng(seed)
    means = []
    for _ in range(n_resamples):
        runs = random.integers(0, len(tables), len(tables))
        common = random.integers(0, len(tables[0]), len(tables[0]))
        taken = []
        for run in runs:
            own = random.integers(0, len(tables[run]), len(tables[run]))
            taken.append(tables[run][common if shared else own].mean(axis=0))
        means.append(np.mean(taken, axis=0))
    return np.array(means)


def fast_hierarchical(tables, n_resamples, shared, seed=1):
    random = np.random.default_rng(seed)
    drawn = random.integers(0, len(tables), size=(n_resamples, len(tables)))
    return statistics.hierarchical_means(tables, drawn, random, shared=shared)


class TestHierarchicalMeans:
    @pytest.mark.parametrize("shared", [True, False])
    def test_they_are_distributed_as_those_of_plain_loops(self, shared):
        random = np.random.default_rng(3)
        difficulty = random.normal(size=(40, 1))
        tables = [run + difficulty + random.normal(size=(40, 2)) for run in (0.0, 0.5, 2.0)]
        fast, slow = (draw(tables, 4000, shared) for draw in (fast_hierarchical, slow_hierarchical))
        # Monte Carlo: a standard error of 4,000 resamples is known to 1/√8000, about 1 %; four times that.
        assert fast.mean(axis=0) == pytest.approx(
            slow.mean(axis=0), abs=4 * slow.std() / math.sqrt(4000) * 1.5
        )
        assert fast.std(axis=0) == pytest.approx(slow.std(axis=0), rel=0.05)
        assert np.corrcoef(fast.T)[0, 1] == pytest.approx(np.corrcoef(slow.T)[0, 1], abs=0.05)

    def test_runs_with_items_of_their_own_may_have_different_numbers_of_them(self):
        tables = [np.full((n, 1), value) for n, value in ((5, 0.0), (50, 1.0))]
        means = fast_hierarchical(tables, 2000, shared=False)
        assert sorted(set(means[:, 0])) == [0.0, 0.5, 1.0]
        assert means.mean() == pytest.approx(0.5, abs=0.03), "each run counts the same"

    @pytest.mark.parametrize("shared", [True, False])
    def test_without_spread_between_items_only_runs_are_drawn(self, shared):
        values = np.array([0.2, 0.5, 0.6])
        tables = [np.full((30, 1), value) for value in values]
        means = fast_hierarchical(tables, 20_000, shared)
        # The variance of a mean of n draws with replacement, σ²/n with the divisor n in σ².
        assert means.std() == pytest.approx(values.std() / math.sqrt(3), rel=0.03)

    def test_runs_that_answer_alike_leave_the_spread_of_items(self):
        column = answers(0.7, 200, 1).astype(float)[:, None]
        error = column.std() / math.sqrt(200)
        alike = fast_hierarchical([column] * 5, 8000, shared=True)
        assert alike.std() == pytest.approx(error, rel=0.05)
        # Taken for other items each time, luck would average out that in truth is one and the same.
        assert fast_hierarchical([column] * 5, 8000, shared=False).std() == pytest.approx(
            error / math.sqrt(5), rel=0.05
        )

    @pytest.mark.parametrize("shared", [True, False])
    def test_chunks_change_nothing_but_the_memory(self, monkeypatch, shared):
        tables = [np.random.default_rng(n).random((20, 2)) for n in range(3)]
        whole = fast_hierarchical(tables, 50, shared)
        monkeypatch.setattr(statistics, "CHUNK_ELEMENTS", 7 * 20)
        assert np.array_equal(fast_hierarchical(tables, 50, shared), whole)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Four seeds of one configuration over the same items, two of another, and a job that failed."""
    root = tmp_path_factory.mktemp("sweep")
    for seed in range(N_SEEDS):
        items = [
            *item_rows("easy", "target", TARGET),
            *item_rows("easy", "source", SOURCE),
            *item_rows("easy", "mapped", MAPPED[seed]),
            *(row for arm in ("target", "source", "mapped") for row in item_rows("hard", arm, HARD[seed])),
        ]
        if seed == 2:
            items.reverse()
        texts = [
            *sequence_rows("target", NATIVE),
            *sequence_rows("mapped", NLL[seed]),
            *sequence_rows("no_context", NATIVE + 30),
        ]
        write_run(root / str(seed), items, texts, seed=seed, mapper={"seed": seed})
    for seed in range(2):
        items = item_rows(
            "easy", "mapped", answers(0.5, 40 + seed, seed), contents=[f"{seed}-{n}" for n in range(41)]
        )
        write_run(root / f"other-{seed}", items, mapper={"top_k": 8, "seed": seed})
    write_run(
        root / "failed", item_rows("easy", "mapped", TARGET), mapper={"top_k": 8, "seed": 5}, fails=True
    )
    return root


@pytest.fixture(scope="module")
def groups(sweep):
    return group_runs(finished(find_runs([sweep])))


@pytest.fixture(scope="module")
def rows(groups):
    found = aggregate(groups[0].runs, n_resamples=4000)
    return {(row["task"], row["arm"], row["metric"]): row for row in found}


class TestGroups:
    def test_runs_that_differ_in_seeds_alone_are_one(self, groups):
        assert [group.settings for group in groups] == [{"mapper.top_k": 4}, {"mapper.top_k": 8}]
        assert [[run.name for run in group.runs] for group in groups] == [
            ["0", "1", "2", "3"],
            ["other-0", "other-1"],
        ]
        assert groups[0].describe() == "mapper.top_k=4: 4 runs (mapper.seed=0,1,2,3)"

    def test_only_the_named_settings_are_taken_together(self, sweep):
        runs = finished(find_runs([sweep]))
        assert len(group_runs(runs, ["mapper.seed"])) == 2
        assert len(group_runs(runs, ["mapper.top_k"])) == 4
        assert len(group_runs(runs, ["mapper.seed", "mapper.top_k"])) == 1

    def test_what_changes_no_answer_parts_no_group(self, tmp_path, sweep):
        again = write_run(
            tmp_path / "a", item_rows("easy", "mapped", TARGET), mapper={"seed": 9}, outputs="elsewhere"
        )
        groups = group_runs([sweep / "0", again], ["seed"])
        assert [len(group.runs) for group in groups] == [2]

    @pytest.mark.parametrize(
        "changed",
        [
            {"seed": 9},
            {"evaluation": {"seed": 9}},
            {"benchmark": {"seed": 9}},
            {"evaluation": {"cost": {"seed": 9}}},
        ],
    )
    def test_seeds_that_change_no_result_are_no_draws(self, tmp_path, sweep, changed):
        again = write_run(tmp_path / "a", item_rows("easy", "mapped", TARGET), **changed)
        (group,) = group_runs([sweep / "0", again])
        assert group.runs == (again,)
        (group,) = group_runs([sweep / "0", again], ["mapper.top_k"])
        assert group.runs == (again,)

    @pytest.mark.parametrize(
        "changed", [{"transfer": {"recompute_seed": 9}}, {"evaluation": {"fewshot_seed": 9}}]
    )
    def test_seeds_of_other_names_are_draws(self, tmp_path, sweep, changed):
        again = write_run(tmp_path / "a", item_rows("easy", "mapped", TARGET), **changed)
        (group,) = group_runs([sweep / "0", again])
        assert len(group.runs) == 2

    @pytest.mark.parametrize(
        ("mapper", "contents", "settings", "n_draws"),
        [
            ("key", None, {}, 1),
            ("other", None, {}, 2),
            ("key", [f"new-{n}" for n in range(N_ITEMS)], {}, 2),
            ("key", None, {"recompute_share": 0.5, "recompute_rule": "attention", "recompute_seed": 1}, 1),
            ("key", None, {"recompute_share": 0.5, "recompute_rule": "random", "recompute_seed": 1}, 2),
        ],
    )
    def test_seeds_that_came_to_nothing_else_are_one_draw(
        self, tmp_path, mapper, contents, settings, n_draws
    ):
        given = [("key", None, settings and settings | {"recompute_seed": 0}), (mapper, contents, settings)]
        runs = [
            write_run(
                tmp_path / str(number),
                item_rows("easy", "mapped", TARGET, contents=asked),
                facts={"artifacts": {"mapper": key}},
                mapper={"seed": number},
                transfer=transfer,
            )
            for number, (key, asked, transfer) in enumerate(given)
        ]
        (group,) = group_runs(runs)
        assert len(group.runs) == n_draws
        assert runs[1] in group.runs

    def test_a_run_that_was_done_twice_is_one_draw(self, tmp_path, sweep):
        again = write_run(tmp_path / "a", item_rows("easy", "mapped", TARGET))
        (group,) = group_runs([sweep / "0", sweep / "1", again])
        assert len(group.runs) == 2
        assert again in group.runs

    def test_what_holds_no_runs_is_refused(self, tmp_path):
        with pytest.raises(KvmapError, match="give runs or a sweep"):
            find_runs([tmp_path])
        failed = write_run(tmp_path / "f", fails=True)
        with pytest.raises(KvmapError, match="none of 1 runs is finished"):
            finished(find_runs([failed]))


class TestAggregate:
    def test_the_mean_and_the_spread_of_seeds(self, rows):
        row = rows["easy", "mapped", "accuracy"]
        means = [column.mean() for column in MAPPED]
        assert row["value"] == pytest.approx(np.mean(means))
        assert row["seed_sd"] == pytest.approx(np.std(means, ddof=1))
        assert (row["n_seeds"], row["n_items"], row["items_shared"]) == (N_SEEDS, N_ITEMS, True)

    def test_the_interval_is_that_of_plain_loops(self, rows):
        slow = slow_hierarchical([column[:, None].astype(float) for column in MAPPED], 4000, shared=True)
        low, high = np.quantile(slow, (0.025, 0.975))
        row = rows["easy", "mapped", "accuracy"]
        # Monte Carlo: ends of 4,000 resamples wander by about 3 % of the width.
        assert row["low"] == pytest.approx(low, abs=0.1 * (high - low))
        assert row["high"] == pytest.approx(high, abs=0.1 * (high - low))

    def test_a_seed_that_matters_widens_the_interval(self, rows):
        row = rows["easy", "mapped", "accuracy"]
        of_items = statistics.mean(np.mean(MAPPED, axis=0)).standard_error
        assert row["standard_error"] > 1.5 * of_items

    def test_an_arm_that_no_seed_touches_has_no_spread_of_seeds(self, rows):
        row = rows["easy", "target", "accuracy"]
        assert row["seed_sd"] == 0
        assert row["standard_error"] == pytest.approx(TARGET.std() / math.sqrt(N_ITEMS), rel=0.1)

    def test_ratios_and_differences_are_of_the_means(self, rows):
        mapped = np.mean([column.mean() for column in MAPPED])
        expected = {
            "retention": mapped / TARGET.mean(),
            "floor_retention": (mapped - 0.25) / (TARGET.mean() - 0.25),
            "gain_recovered": (mapped - SOURCE.mean()) / (TARGET.mean() - SOURCE.mean()),
            "accuracy_minus_source": mapped - SOURCE.mean(),
            "accuracy_minus_target": mapped - TARGET.mean(),
        }
        for metric, value in expected.items():
            row = rows["easy", "mapped", metric]
            assert row["value"] == pytest.approx(value), metric
            assert row["low"] < value < row["high"], metric
        spread = np.std([column.mean() / TARGET.mean() for column in MAPPED], ddof=1)
        assert rows["easy", "mapped", "retention"]["seed_sd"] == pytest.approx(spread)

    def test_an_undefined_ratio_says_why(self, rows):
        row = rows["hard", "mapped", "gain_recovered"]
        assert math.isnan(row["value"])
        assert "lead over the source" in row["note"]

    def test_on_average_tasks_weigh_the_same(self, rows):
        row = rows["average", "mapped", "accuracy"]
        easy, hard = (np.mean([column.mean() for column in task]) for task in (MAPPED, HARD))
        assert row["value"] == pytest.approx((easy + hard) / 2)
        of_seeds = [(one.mean() + other.mean()) / 2 for one, other in zip(MAPPED, HARD, strict=True)]
        assert row["seed_sd"] == pytest.approx(np.std(of_seeds, ddof=1))
        assert row["n_items"] == N_ITEMS + 60

    def test_perplexity_and_the_context_carried(self, rows):
        row = rows["perplexity", "mapped", "nll_nats"]
        assert row["value"] == pytest.approx(NLL.mean() / 10)
        carried = rows["perplexity", "mapped", "context_carried"]
        none = (NATIVE + 30).mean()
        assert carried["value"] == pytest.approx((none - NLL.mean()) / (none - NATIVE.mean()))
        assert carried["low"] < carried["value"] < carried["high"]

    def test_items_of_their_own_are_drawn_apart(self, groups):
        (row,) = (row for row in aggregate(groups[1].runs) if row["metric"] == "accuracy")
        assert row["items_shared"] is False
        assert (row["n_seeds"], row["n_items"]) == (2, 40)

    def test_one_run_has_no_spread_of_seeds_and_the_interval_of_its_items(self, sweep):
        found = aggregate([sweep / "0"], n_resamples=4000)
        row = next(r for r in found if (r["task"], r["arm"], r["metric"]) == ("easy", "mapped", "accuracy"))
        assert math.isnan(row["seed_sd"])
        assert row["standard_error"] == pytest.approx(MAPPED[0].std() / math.sqrt(N_ITEMS), rel=0.05)

    def test_tasks_of_lm_eval_have_ratios_and_an_average_of_their_own(self, tmp_path):
        def rows(task, arm, correct):
            return [row | {"accuracy": float(row["correct"])} for row in item_rows(task, arm, correct)]

        runs = [
            write_run(
                tmp_path / str(seed),
                tables={
                    "tasks_items": [
                        row
                        for task in ("arc", "gsm")
                        for arm, column in (("target", TARGET), ("source", SOURCE), ("mapped", MAPPED[seed]))
                        for row in rows(task, arm, column)
                    ]
                },
                mapper={"seed": seed},
            )
            for seed in range(2)
        ]
        found = {(r["task"], r["arm"], r["metric"]): r for r in aggregate(runs, n_resamples=200)}
        mapped = np.mean([column.mean() for column in MAPPED[:2]])
        for task in ("arc", "tasks_average"):
            assert found[task, "mapped", "tasks_accuracy"]["value"] == pytest.approx(mapped)
            assert found[task, "mapped", "retention"]["value"] == pytest.approx(mapped / TARGET.mean())
            gain = (mapped - SOURCE.mean()) / (TARGET.mean() - SOURCE.mean())
            assert found[task, "mapped", "gain_recovered"]["value"] == pytest.approx(gain)
        assert not any(task == "average" for task, _, _ in found)

    def test_runs_without_answers_are_refused(self, tmp_path):
        with pytest.raises(KvmapError, match="no answers in tables/items"):
            aggregate([write_run(tmp_path / "empty")])


class TestCommand:
    def test_a_sweep_gets_its_table(self, sweep, capsys):
        assert main([str(sweep)]) == 0
        out = capsys.readouterr().out
        assert "left out: 1 runs that are not finished" in out
        assert "mapper.top_k=4: 4 runs (mapper.seed=0,1,2,3)" in out
        assert "mapper.top_k=8: 2 runs (mapper.seed=0,1)" in out
        with (sweep / "aggregate.csv").open() as stream:
            found = list(csv.DictReader(stream))
        assert {row["mapper.top_k"] for row in found} == {"4", "8"}
        assert {row["n_seeds"] for row in found} == {"4", "2"}

    def test_named_runs_are_printed_alone(self, sweep, capsys, tmp_path):
        assert main([str(sweep / "0"), str(sweep / "1"), "--csv", str(tmp_path / "rows.csv")]) == 0
        assert "one configuration: 2 runs (mapper.seed=0,1)" in capsys.readouterr().out
        assert (tmp_path / "rows.csv").is_file()

    def test_takes_another_table(self, tmp_path, capsys):
        f1 = {seed: np.random.default_rng(seed).random(6) for seed in range(3)}
        for seed, values in f1.items():
            turns = [
                {"arm": arm, "id": "1", "turn": n, "f1": value, "content": f"c{n}"}
                for arm, column in (("target", np.full(6, 0.8)), ("mapped", values))
                for n, value in enumerate(column)
            ]
            write_run(tmp_path / str(seed), tables={"conversations": turns}, mapper={"seed": seed})
        asked = ["--table", "conversations", "--column", "f1", "--id", "id,turn"]
        assert main([str(tmp_path), *asked, "--resamples", "100"]) == 0
        with (tmp_path / "aggregate.csv").open() as stream:
            rows = {(row["arm"], row["metric"]): row for row in csv.DictReader(stream)}
        mean = np.mean([values.mean() for values in f1.values()])
        assert float(rows["mapped", "f1"]["value"]) == pytest.approx(mean)
        assert float(rows["mapped", "retention"]["value"]) == pytest.approx(mean / 0.8)
        assert rows["mapped", "f1"]["n_seeds"] == "3"
        assert main([str(tmp_path), *asked, "--resamples", "100", "--numbers"]) == 0
        assert "retention" not in (tmp_path / "aggregate.csv").read_text()
        assert main([str(tmp_path), "--table", "conversations"]) == 1
        assert "--table and --column go together" in capsys.readouterr().err

    def test_says_what_it_left_out(self, sweep, tmp_path, capsys):
        again = write_run(tmp_path / "a", item_rows("easy", "mapped", TARGET), seed=7)
        assert main([str(sweep / "0"), str(again)]) == 0
        assert "left out: 1 runs that are no draw of their own" in capsys.readouterr().out

    def test_a_mistake_is_one_message(self, tmp_path, capsys):
        assert main([str(tmp_path)]) == 1
        assert "give runs or a sweep" in capsys.readouterr().err
