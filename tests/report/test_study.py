"""The report of a sweep and of a study: seeds taken together, as by hand; runs that failed are named."""

from __future__ import annotations

import csv
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvmap import report
from kvmap.errors import KvmapError
from kvmap.report.reading import runs_below
from kvmap.report.study import Study
from kvmap.report.study_page import configurations_grid, study_page, study_verdict, tasks_grid
from kvmap.tracking import Metric, Run
from tests.evaluation.finished_runs import answers, item_rows, sequence_rows
from tests.report.page_reader import read_page

N_ITEMS = 40
TASKS = ("where", "who")
ACCURACY = {1: 0.3, 8: 0.7}


def config(top_k: int, seed: int, **more: Any) -> dict[str, Any]:
    return {
        "study": "k",
        "outputs": "o",
        "seed": 0,
        "direction": "up",
        "pair": {"name": "tiny", "source": {"id": "zoo:tiny-small"}, "target": {"id": "zoo:tiny-large"}},
        "mapper": {"kind": "linear", "top_k": top_k},
        "calibration": {"data": {"seed": seed, "path": None}, **more},
    }


def write_job(directory: Path, top_k: int, seed: int, *, failing: bool = False, **more: Any) -> Path:
    items, nll = [], {"target": 10.0, "mapped": 20.0 - top_k, "no_context": 20.0}
    for place, task in enumerate(TASKS):
        shares = {"target": 0.9, "source": 0.5, "mapped": ACCURACY[top_k] + 0.2 * place}
        for number, (arm, share) in enumerate(shares.items()):
            items += item_rows(task, arm, answers(share, N_ITEMS, 100 * seed + 10 * place + number + top_k))
    sequences = [row for arm, value in nll.items() for row in sequence_rows(arm, [value, value + 1.0])]
    try:
        with Run(directory, "k", config(top_k, seed, **more), "none") as run:
            run.note(artifacts={"mapper": f"{top_k}-{seed}"})
            if failing:
                raise KvmapError("the disk is <full>")
            run.table("items", items)
            run.table("sequences", sequences)
            run.log({"diagnose/held_out/mapped/r2_key": Metric(0.5 + 0.1 * seed)})
            run.log({"evaluate/perplexity/mapped/context_carried": Metric(0.1 * top_k, 2, 0.01)})
    except KvmapError:
        pass
    return directory


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study: a sweep of four jobs, one more run beside it, one that failed."""
    root = tmp_path_factory.mktemp("study")
    for number, (top_k, seed) in enumerate([(1, 0), (1, 1), (8, 0), (8, 1)]):
        write_job(root / "sweep" / str(number), top_k, seed)
    write_job(root / "single", 8, 2)
    write_job(root / "broken", 8, 3, failing=True)
    (root / "notes").mkdir()
    return root


@pytest.fixture(scope="module")
def study(root: Path) -> Study:
    return Study.read(root)


def test_runs_are_found_at_both_depths_and_earlier_attempts_are_none(root: Path, tmp_path: Path) -> None:
    assert [run.relative_to(root).as_posix() for run in runs_below(root)] == [
        "broken",
        "single",
        *(f"sweep/{number}" for number in range(4)),
    ]
    write_job(tmp_path / "again", 1, 0, failing=True)
    write_job(tmp_path / "again", 1, 0)
    assert (tmp_path / "again" / "attempt-1" / "run.json").is_file()
    assert runs_below(tmp_path) == [tmp_path / "again"]


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KvmapError, match="holds no run"):
        runs_below(tmp_path)


def test_seeds_are_taken_together_as_by_hand(study: Study) -> None:
    grid = configurations_grid(study)
    assert grid is not None
    assert [row[:3] for row in grid.rows] == [["#1", "8", "80 × 3"], ["#2", "1", "80 × 2"]]
    for line, runs in (
        (grid.rows[0], ("single", "sweep/2", "sweep/3")),
        (grid.rows[1], ("sweep/0", "sweep/1")),
    ):
        cells = dict(zip(grid.columns, line, strict=True))
        by_arm = {
            arm: np.mean([accuracy(study.root / run, arm) for run in runs]) for arm in ("mapped", "target")
        }
        assert cells["accuracy, mapped"].startswith(f"{by_arm['mapped']:.3f} [")
        assert cells["accuracy kept"].startswith(f"{by_arm['mapped'] / by_arm['target']:.3f} [")
    assert dict(zip(grid.columns, grid.rows[0], strict=True))["R² keys"] == "0.600"


def accuracy(run: Path, arm: str) -> float:
    """Mean over tasks of the share of right answers, from the table itself."""
    with open(run / "tables" / "items.csv", newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if row["arm"] == arm]
    return float(
        np.mean(
            [np.mean([row["correct"] == "True" for row in rows if row["task"] == task]) for task in TASKS]
        )
    )


def test_an_interval_holds_its_value(study: Study) -> None:
    grid = configurations_grid(study)
    assert grid is not None
    for line in grid.rows:
        for cell in line:
            if found := re.fullmatch(r"(\S+) \[(\S+), (\S+)\]", str(cell)):
                value, low, high = map(float, found.groups())
                assert low <= value <= high


def test_every_task_has_its_line(study: Study) -> None:
    grid = tasks_grid(study)
    assert grid is not None
    assert [row[:2] for row in grid.rows] == [
        ["#1 top_k=8", "where"],
        ["#1 top_k=8", "who"],
        ["#2 top_k=1", "where"],
        ["#2 top_k=1", "who"],
    ]


def test_the_verdict_names_lowest_and_highest_and_what_did_not_end(study: Study) -> None:
    kept, carried, unfinished = study_verdict(study)
    assert re.search(r"Accuracy kept: lowest .* \(#2 top_k=1\), highest .* \(#1 top_k=8\)", kept)
    assert carried.startswith("Context carried: lowest 0.1")
    assert unfinished == "Not finished: 1 of 6 runs."


def test_what_differs_between_runs_is_told_apart_from_what_all_share(study: Study) -> None:
    page = study_page(study, study.root)
    grids = {grid.title: grid for part in page.sections for grid in part.grids}
    assert grids["Settings that differ between the runs"].rows == [
        ["mapper.top_k", "8, 1"],
        ["calibration.data.seed", "3, 2, 0, 1"],
    ]
    shared = {row[0]: row[1] for row in grids["Settings that all runs share"].rows}
    assert shared["mapper.kind"] == "linear"
    assert "mapper.top_k" not in shared


def test_configurations_of_one_name_are_told_apart(tmp_path: Path) -> None:
    write_job(tmp_path / "a", 1, 0, batch_size=4)
    write_job(tmp_path / "b", 1, 1, batch_size=8)
    labels = [each.settings for each in Study.read(tmp_path).configurations]
    assert labels == [{"calibration.batch_size": "4"}, {"calibration.batch_size": "8"}]


def test_runs_without_answers_still_have_metrics_of_their_map(tmp_path: Path) -> None:
    for top_k in (1, 8):
        with Run(tmp_path / str(top_k), "k", config(top_k, 0), "none") as run:
            run.log({"diagnose/held_out/mapped/r2_key": Metric(0.1 * top_k)})
    grid = configurations_grid(Study.read(tmp_path))
    assert grid is not None
    assert list(grid.columns) == ["#", "mapper.top_k", "items × runs", "R² keys"]
    assert [list(row) for row in grid.rows] == [["#1", "1", "– × 1", "0.100"], ["#2", "8", "– × 1", "0.800"]]


def test_runs_whose_items_cannot_be_paired_show_their_means_and_why(tmp_path: Path) -> None:
    directory = write_job(tmp_path / "old", 1, 0)
    for name in ("items", "sequences"):
        table = directory / "tables" / f"{name}.csv"
        table.write_text(table.read_text().replace("content", "other", 1))
    (directory / "tables" / "arms.csv").write_text("task,arm,metric,value\n")
    (configuration,) = Study.read(tmp_path).configurations
    assert "has no content" in configuration.note
    assert not configuration.note.startswith(str(directory))
    carried = next(column for column in Study.read(tmp_path).columns if column.metric == "context_carried")
    assert configuration.cell(carried) == "0.100"


def test_a_study_in_which_nothing_ended_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_job(tmp_path / "broken", 1, 0, failing=True)
    assert report.main([str(tmp_path)]) == 0
    assert "1 runs, 0 of them finished" in capsys.readouterr().out
    assert "KvmapError: the disk is &lt;full&gt;" in (tmp_path / "report.html").read_text()


def test_the_command_writes_page_table_and_figure(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report.main([str(root), "--output", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == f"study: {root}"
    assert "mapper.top_k" in out
    assert (tmp_path / "figures" / "study.png").is_file()
    assert not (root / "report.html").exists()
    page = read_page((tmp_path / "report.html").read_text())
    assert page.faults == page.open == []
    assert len(page.ids) == len(set(page.ids))
    links = [given["href"] for given in page.of("a") if not given["href"].startswith("#")]
    assert len(links) == 6
    assert all((tmp_path / link).is_file() for link in links)
    assert len(page.of("img")) == 1
    markdown = (tmp_path / "report.md").read_text()
    (header,) = (line for line in markdown.splitlines() if line.startswith("| # | mapper.top_k"))
    assert "| accuracy kept |" in header
    assert sum(line.startswith("| #") for line in markdown.splitlines()) == 3 + 4


def test_means_of_what_is_not_there_are_no_numbers(study: Study) -> None:
    assert all(math.isfinite(value) for each in study.configurations for value in each.metrics.values())
