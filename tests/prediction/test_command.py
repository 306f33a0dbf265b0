from __future__ import annotations

import csv

import numpy as np
import pytest

from kvmap.metrics import Metric
from kvmap.prediction import correlate
from kvmap.prediction.__main__ import main
from kvmap.prediction.figure import MOST_ROWS, forest
from kvmap.prediction.tables import correlation_text, predictor_text
from kvmap.tracking import Run
from tests.prediction.run_tables import COSINE, R2, RETENTION, noise, pairs_of, simpson, table_of

CONFIG = {
    "study": "s",
    "outputs": "o",
    "seed": 0,
    "direction": "up",
    "mapper": {"kind": "linear", "top_k": 1, "seed": 0},
}


def write_run(directory, source, top_k, seed, metrics):
    sides = {side: {"id": name} for side, name in (("source", source), ("target", "large"))}
    config = CONFIG | {
        "pair": {"name": f"{source}_large", **sides},
        "mapper": {"kind": "linear", "top_k": top_k, "seed": seed},
    }
    with Run(directory, "s", config, "none") as run:
        run.log({name: Metric(value) for name, value in metrics.items()})


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Six pairs, three settings, two seeds: the cosine says what is retained, R² says nothing."""
    root = tmp_path_factory.mktemp("sweep")
    random = np.random.default_rng(0)
    for pair in range(6):
        level = random.normal()
        for top_k in range(1, 4):
            for seed in range(2):
                value = 0.7 + 0.05 * level + 0.05 * top_k + 0.005 * random.normal()
                metrics = {
                    COSINE: value + 0.01 * random.normal(),
                    R2: random.random(),
                    "plan/model/calibration/rows_per_feature": 10.0,
                    RETENTION: value,
                    "evaluate/world_where/mapped/retention": value + 0.05 * random.normal(),
                    "evaluate/perplexity/mapped/perplexity": 10 + 1 / value,
                    "evaluate/perplexity/target/perplexity": 10.0,
                }
                write_run(root / f"{pair}-{top_k}-{seed}", f"zoo:m{pair}", top_k, seed, metrics)
    return root


@pytest.mark.slow
def test_from_runs_to_text_csv_and_figure(sweep, tmp_path, capsys):
    csv_file, figure = tmp_path / "out" / "c.csv", tmp_path / "out" / "f.png"
    asked = ["--resamples", "200", "--csv", str(csv_file), "--figure", str(figure)]
    assert main([str(sweep), *asked]) == 0
    text = capsys.readouterr().out
    assert "average retention: 18 configurations, 36 runs, 6 pairs" in text
    assert "perplexity perplexity_ratio: 18 configurations" in text
    assert "world_where" not in text, "tasks one by one are in the CSV"
    assert "average retention of pairs left out: 18 configurations, 6 pairs" in text
    cosine = next(line for line in text.splitlines() if line.startswith("questions attention_cosine"))
    assert " 0.9" in cosine
    assert next(line for line in text.splitlines() if line.startswith("calibration rows")).endswith(
        "constant"
    )
    with csv_file.open() as stream:
        rows = list(csv.DictReader(stream))
    assert {row["task"] for row in rows} == {"average", "world_where", "perplexity"}
    assert len(rows) == 3 * 3 * 6
    with (tmp_path / "out" / "c_predictors.csv").open() as stream:
        predictors = list(csv.DictReader(stream))
    assert {row["outcome"] for row in predictors} == {"average/retention", "perplexity/perplexity_ratio"}
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_one_outcome_by_another_group(sweep, capsys):
    asked = ["--outcome", "world_where/retention", "--group", "mapper.top_k", "--resamples", "100"]
    assert main([str(sweep), *asked]) == 0
    text = capsys.readouterr().out
    assert "world_where retention: 18 configurations, 36 runs, 3 pairs; too few pairs" in text
    assert "average retention" not in text
    assert "too few pairs (3)" in text


def test_mistakes_are_one_line(sweep, tmp_path, capsys):
    assert main([str(sweep), "--outcome", "retentoin"]) == 1
    assert capsys.readouterr().err.startswith("error: unknown outcome 'retentoin'. Did you mean 'retention'?")
    assert main([str(tmp_path)]) == 1
    assert "no run.json" in capsys.readouterr().err


class TestText:
    def test_the_largest_come_first_with_intervals_and_what_chance_gives(self):
        x = noise(0, 6, 4)
        table = table_of(pairs_of(6, 4), r2=noise(9, 6, 4), cosine=x, retention=x)
        text = correlation_text(correlate(table, n_resamples=100, n_permutations=100), "average", "retention")
        lines = text.splitlines()
        assert lines[2].split()[:5] == ["questions", "attention_cosine", "1.00", "[1.00,", "1.00]"]
        assert lines[3].startswith("held_out r2_key ")
        assert lines[-1].startswith(
            "Of 2 diagnostics 1 have p ≤ 0.05 (pooled ρ), where chance alone would give 0.1"
        )

    def test_few_pairs(self):
        x = noise(0, 2, 5)
        rows = correlate(table_of(pairs_of(2, 5), cosine=x, retention=x), n_resamples=50, n_permutations=50)
        text = correlation_text(rows, "average", "retention")
        assert "2 pairs; too few pairs: no interval over them below 4" in text
        assert text.endswith("Nothing is tested.")

    def test_predictors_of_too_few_pairs(self):
        from kvmap.prediction import leave_one_pair_out

        table = table_of(pairs_of(2, 5), cosine=noise(0, 2, 5), retention=noise(1, 2, 5))
        text = predictor_text(leave_one_pair_out(table).scores, "average retention")
        assert text == "average retention of pairs left out: 10 configurations, 2 pairs\ntoo few pairs (2)"


class TestForest:
    def test_pooled_and_within_of_each_diagnostic(self):
        rows = correlate(simpson(), n_resamples=100, n_permutations=50)
        figure = forest(rows, "average", "retention")
        (axis,) = figure.axes
        assert [label.get_text() for label in axis.get_yticklabels()] == ["questions attention cosine"]
        points = {line.get_label(): line for line in axis.get_lines() if line.get_marker() in "os"}
        pooled, within = points["all configurations"], points["within pairs"]
        assert pooled.get_xdata()[0] < 0 < within.get_xdata()[0]
        assert pooled.get_ydata()[0] != within.get_ydata()[0]
        assert figure.get_figwidth() < 3.5, "one column of print"

    def test_the_largest_alone_and_none_that_is_undefined(self):
        names = {f"diagnose/d{n}/mapped/m": noise(n, 5, 3) for n in range(30)}
        table = table_of(pairs_of(5, 3), cosine=1.0, retention=noise(99, 5, 3)).assign(**names)
        rows = correlate(table, n_resamples=20, n_permutations=20)
        labels = forest(rows, "average", "retention").axes[0].get_yticklabels()
        assert len(labels) == MOST_ROWS
        assert "questions attention cosine" not in [label.get_text() for label in labels]

    @pytest.mark.parametrize("n_pairs", [1, 6])
    def test_nothing_to_draw_is_still_a_figure(self, n_pairs, tmp_path):
        table = table_of(pairs_of(n_pairs, 4), cosine=1.0, retention=noise(0, n_pairs, 4))
        rows = correlate(table, n_resamples=20, n_permutations=20)
        figure = forest(rows, "average", "retention")
        figure.savefig(tmp_path / "f.png")
        assert "no correlation is defined" in figure.get_suptitle()
