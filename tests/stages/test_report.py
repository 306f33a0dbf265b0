"""The stage `report`: pages and figures of the run's own tables, written by the run itself."""

from __future__ import annotations

import pytest

from tests.report.page_reader import PageReader, read_page
from tests.stages.conftest import Finished, Runner

pytestmark = pytest.mark.timeout(300)

STAGES = (
    "stages=[plan,calibrate,fit,diagnose,evaluate,report] evaluation.world.n_per_kind=2 "
    "evaluation.perplexity.n_sequences=2 evaluation.bootstrap_samples=20"
)


@pytest.fixture(scope="module")
def whole(run: Runner) -> Finished:
    return run(STAGES)


@pytest.fixture(scope="module")
def page(whole: Finished) -> PageReader:
    return read_page((whole.directory / "report.html").read_text())


@pytest.mark.slow
def test_draws_what_the_stages_before_left(whole: Finished, page: PageReader) -> None:
    figures = {path.stem for path in (whole.directory / "figures").glob("*.png")}
    assert figures >= {"r2", "probes", "attention", "errors_by_token", "errors_by_position", "spectrum"}
    assert len(page.of("img")) == len(figures)
    assert page.faults == page.open == []


def test_is_not_called_running_by_the_page_that_it_writes(page: PageReader) -> None:
    assert page.said("p")[0].startswith("done after plan")


def test_says_what_was_asked_and_how_it_differs_from_the_defaults(page: PageReader) -> None:
    assert any("zoo:tiny-large goes on from the cache of zoo:tiny-small" in line for line in page.said("li"))
    cells = page.said("td")
    place = cells.index("evaluation.world.n_per_kind")
    assert cells[place : place + 3] == ["evaluation.world.n_per_kind", "2", "60"]


def test_of_a_plan_alone_shows_the_plan(run: Runner) -> None:
    planned = run("stages=[plan,report]")
    page = read_page((planned.directory / "report.html").read_text())
    assert "Plan" in page.said("h3")
    assert page.of("img") == []
