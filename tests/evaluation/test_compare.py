from __future__ import annotations

import csv
import subprocess
import sys

import numpy as np
import pytest
from scipy import stats

from kvmap.errors import KvmapError
from kvmap.evaluation.compare import compare_runs, main, what_differs
from kvmap.evaluation.run_tables import ItemMeasure
from tests.evaluation.finished_runs import answers, item_rows, sequence_rows, write_run

A, B = answers(0.8, 200, 1), answers(0.6, 200, 2)
HARD_A, HARD_B = answers(0.5, 90, 3), answers(0.4, 90, 4)
NLL_A, NLL_B = np.random.default_rng(5).normal(20, 3, (2, 12))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs over the same questions and texts, in different orders; B has more of each."""
    folder = tmp_path_factory.mktemp("runs")
    first = write_run(
        folder / "a",
        [*item_rows("easy", "mapped", A), *item_rows("hard", "mapped", HARD_A)],
        sequence_rows("mapped", NLL_A),
    )
    more = item_rows("easy", "mapped", [True] * 5, first=200)
    second = write_run(
        folder / "b",
        [*more, *item_rows("hard", "mapped", HARD_B)[::-1], *item_rows("easy", "mapped", B)[::-1]],
        sequence_rows("mapped", [*NLL_B, 99.0]),
        mapper={"top_k": 8},
    )
    return first, second


@pytest.fixture(scope="module")
def rows(runs):
    return {(row["measure"], row["task"]): row for row in compare_runs(*runs, n_resamples=4000)}


def test_accuracies_differences_and_counts_are_those_of_the_pairs(rows):
    row = rows["accuracy", "easy"]
    assert (row["a"], row["b"]) == pytest.approx((A.mean(), B.mean()))
    assert row["difference"] == pytest.approx(A.mean() - B.mean())
    assert (row["n_pairs"], row["n_only_a"], row["n_only_b"]) == (200, 0, 5)
    assert (row["only_a_right"], row["only_b_right"]) == ((A & ~B).sum(), (~A & B).sum())


def test_the_interval_is_scipys_paired_bootstrap(rows):
    gaps = A.astype(float) - B
    oracle = stats.bootstrap((gaps,), np.mean, n_resamples=4000, method="percentile", rng=1)
    row = rows["accuracy", "easy"]
    # Both are Monte Carlo: at 4,000 resamples the ends wander by about 3 % of the interval's width.
    width = oracle.confidence_interval.high - oracle.confidence_interval.low
    assert row["low"] == pytest.approx(oracle.confidence_interval.low, abs=0.1 * width)
    assert row["high"] == pytest.approx(oracle.confidence_interval.high, abs=0.1 * width)
    # In closed form: the standard error of a mean.
    assert row["standard_error"] == pytest.approx(gaps.std(ddof=1) / np.sqrt(200), rel=0.05)


def test_mcnemar_is_the_binomial_test_of_the_discordant_pairs(rows):
    only_a, only_b = int((A & ~B).sum()), int((~A & B).sum())
    expected = stats.binomtest(only_a, only_a + only_b, 0.5).pvalue
    assert rows["accuracy", "easy"]["mcnemar_p"] == pytest.approx(expected, rel=1e-9)
    only_a, only_b = (
        sum(int((x & ~y).sum()) for x, y in pairs)
        for pairs in ([(A, B), (HARD_A, HARD_B)], [(B, A), (HARD_B, HARD_A)])
    )
    expected = stats.binomtest(only_a, only_a + only_b, 0.5).pvalue
    assert rows["accuracy", "average"]["mcnemar_p"] == pytest.approx(expected, rel=1e-9)


def test_on_average_tasks_weigh_the_same_and_errors_add_in_squares(rows):
    row = rows["accuracy", "average"]
    gaps = [A.astype(float) - B, HARD_A.astype(float) - HARD_B]
    assert row["difference"] == pytest.approx(np.mean([gap.mean() for gap in gaps]))
    errors = [gap.std(ddof=1) / np.sqrt(len(gap)) for gap in gaps]
    assert row["standard_error"] == pytest.approx(np.hypot(*errors) / 2, rel=0.05)
    assert row["n_pairs"] == 290


def test_sequences_are_compared_in_nats_a_token(rows):
    row = rows["nll_nats", "perplexity"]
    gaps = (NLL_A - NLL_B) / 10
    assert row["difference"] == pytest.approx(gaps.mean())
    assert row["low"] < row["difference"] < row["high"]
    assert row["mcnemar_p"] is None
    assert (row["n_pairs"], row["n_only_b"]) == (12, 1)


def test_a_measure_that_nobody_has_is_left_out(rows):
    assert {measure for measure, _ in rows} == {"accuracy", "accuracy_norm", "nll_nats"}


def test_a_run_equals_itself(runs):
    for row in compare_runs(runs[0], runs[0]):
        assert (row["difference"], row["low"], row["high"]) == (0, 0, 0)
        assert row["mcnemar_p"] in (1.0, None)


def test_two_arms_of_one_run_are_paired(tmp_path):
    items = [*item_rows("easy", "mapped", A), *item_rows("easy", "source", B)]
    run = write_run(tmp_path / "run", items)
    (row, _) = compare_runs(run, run, arm="mapped", arm_b="source")
    assert row["difference"] == pytest.approx(A.mean() - B.mean())


def test_a_task_that_only_one_has_is_a_row_without_pairs(tmp_path, runs):
    third = write_run(tmp_path / "c", [*item_rows("easy", "mapped", A), *item_rows("other", "mapped", B)])
    rows = {row["task"]: row for row in compare_runs(runs[0], third) if row["measure"] == "accuracy"}
    assert (rows["other"]["n_pairs"], rows["other"]["n_only_b"]) == (0, 200)
    assert (rows["hard"]["n_pairs"], rows["hard"]["n_only_a"]) == (0, 90)
    assert np.isnan(rows["hard"]["difference"])
    assert "average" not in rows


def test_contexts_cut_to_other_lengths_are_counted(tmp_path, runs, capsys):
    third = write_run(tmp_path / "c", item_rows("easy", "mapped", A, n_truncated=7))
    assert compare_runs(runs[0], third)[0]["n_cut_differently"] == 200
    assert main([str(runs[0]), str(third)]) == 0
    assert "of 200 pairs the contexts were cut to different lengths" in capsys.readouterr().out


class TestRefusals:
    def test_items_that_ask_different_things(self, tmp_path, runs):
        contents = [f"easy-{number}" if number != 3 else "other" for number in range(200)]
        other = write_run(tmp_path / "c", item_rows("easy", "mapped", A, contents=contents))
        with pytest.raises(KvmapError, match=r"1 of 200 items .*task 'easy', id 'line 3'.*nothing to pair"):
            compare_runs(runs[0], other)

    def test_sequences_of_other_texts(self, tmp_path, runs):
        other = write_run(
            tmp_path / "c", sequences=sequence_rows("mapped", NLL_A, contents=[f"t{n}" for n in range(12)])
        )
        with pytest.raises(KvmapError, match="12 of 12 items"):
            compare_runs(runs[0], other)

    def test_runs_of_a_version_that_kept_no_content(self, tmp_path, runs):
        old = [{k: v for k, v in row.items() if k != "content"} for row in item_rows("easy", "mapped", A)]
        with pytest.raises(KvmapError, match=r"table items has no content.*evaluate again"):
            compare_runs(runs[0], write_run(tmp_path / "c", old))

    def test_an_item_that_stands_there_twice(self, tmp_path, runs):
        twice = write_run(tmp_path / "c", item_rows("easy", "mapped", A) * 2)
        with pytest.raises(KvmapError, match="twice under arm 'mapped'"):
            compare_runs(runs[0], twice)

    def test_an_arm_that_is_not_there(self, runs):
        with pytest.raises(KvmapError, match="no arm 'raw' in its answers; it has mapped"):
            compare_runs(*runs, arm="raw")

    def test_runs_with_nothing_in_common(self, tmp_path, runs):
        other = write_run(tmp_path / "c", item_rows("other", "mapped", A))
        with pytest.raises(
            KvmapError, match=r"no item in common in items\.csv, tasks_items\.csv, sequences\.csv"
        ):
            compare_runs(runs[0], other)
        with pytest.raises(KvmapError, match="no item in common"):
            compare_runs(runs[0], write_run(tmp_path / "d"))


def test_settings_that_differ_are_named(runs):
    assert what_differs(*runs) == [("mapper.top_k", 4, 8)]


def test_any_table_with_items_and_contents_can_be_paired(tmp_path):
    def turns(values):
        return [
            {"arm": "mapped", "conversation": 1, "turn": n, "f1": value, "content": f"c{n}"}
            for n, value in enumerate(values)
        ]

    first = write_run(tmp_path / "a", tables={"turns": turns([0.5, 1.0, 0.25])})
    second = write_run(tmp_path / "b", tables={"turns": turns([0.25, 1.0, 0.0])})
    measure = ItemMeasure("turns", "f1", "f1", ids=("conversation", "turn"))
    (row,) = compare_runs(first, second, measures=[measure])
    assert (row["task"], row["difference"], row["n_pairs"]) == ("turns", pytest.approx(1 / 6), 3)
    assert row["mcnemar_p"] is None, "an F1 between 0 and 1 is neither right nor wrong"
    by_turn = ItemMeasure("turns", "f1", "f1", ids=("conversation",), task="turn")
    rows = compare_runs(first, second, measures=[by_turn])
    assert [row["task"] for row in rows] == ["turn=0", "turn=1", "turn=2", "average"]


def task_rows(task, correct):
    """Rows of the table `tasks_items`."""
    kept = ("task", "id", "arm", "logliks", "content")
    rows = item_rows(task, "mapped", correct)
    return [
        {key: row[key] for key in kept} | {"accuracy": float(right)}
        for row, right in zip(rows, correct, strict=True)
    ]


def test_right_and_wrong_of_lm_evals_tasks_are_tested_too(tmp_path):
    runs = [
        write_run(tmp_path / name, tables={"tasks_items": [*task_rows("arc", easy), *task_rows("gsm", hard)]})
        for name, easy, hard in (("a", A, HARD_A), ("b", B, HARD_B))
    ]
    rows = {row["task"]: row for row in compare_runs(*runs)}
    only_a, only_b = int((A & ~B).sum()), int((~A & B).sum())
    expected = stats.binomtest(only_a, only_a + only_b, 0.5).pvalue
    assert rows["arc"]["mcnemar_p"] == pytest.approx(expected, rel=1e-9)
    assert rows["arc"]["measure"] == "tasks_accuracy"
    assert set(rows) == {"arc", "gsm", "tasks_average"}, "the average is called as in the run's metrics"


class TestCommand:
    def test_prints_the_table_and_writes_it(self, runs, tmp_path, capsys):
        file = tmp_path / "rows.csv"
        assert main([*map(str, runs), "--csv", str(file)]) == 0
        out = capsys.readouterr().out
        assert "mapper.top_k: 4 | 8" in out
        assert f"A: {runs[0]}, arm mapped, done" in out
        line = next(line for line in out.splitlines() if line.startswith("accuracy  ") and "easy" in line)
        assert f"{A.mean():.3f}" in line
        assert "0, 5" in line
        with file.open() as stream:
            assert len(list(csv.DictReader(stream))) == 7

    def test_takes_another_table(self, runs, capsys):
        asked = ["--table", "sequences", "--column", "nll_nats", "--id", "sequence", "--numbers"]
        assert main([*map(str, runs), *asked]) == 0
        assert f"{NLL_A.mean():.3f}" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [(["nowhere"], "holds no run.json"), (["--table", "items"], "--table and --column go together")],
    )
    def test_a_mistake_is_one_message(self, runs, capsys, arguments, message):
        given = (
            [str(runs[0]), str(runs[1]), *arguments]
            if arguments[0] != "nowhere"
            else [str(runs[0]), "nowhere"]
        )
        assert main(given) == 1
        assert message in capsys.readouterr().err

    def test_it_needs_no_model_and_no_torch(self, runs):
        program = (
            "import sys; sys.modules['torch'] = None; from kvmap.evaluation.compare import main; "
            f"main([{str(runs[0])!r}, {str(runs[1])!r}])"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert "A − B" in done.stdout, done.stderr
