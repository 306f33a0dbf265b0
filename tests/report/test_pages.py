"""The pages of a run: self-contained, escaped, true to the tables."""

from __future__ import annotations

import base64
import io
import os
import re
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest
from PIL import Image

from kvmap import report
from kvmap.files import read_json, write_json
from kvmap.report.page import Grid, Link, Page, Picture, Section
from kvmap.report.render import markdown_table, to_html, to_markdown
from kvmap.report.run_page import run_page
from kvmap.report.settings import changed_grid
from kvmap.report.verdict import verdict_grid, verdict_lines
from tests.report.page_reader import PageReader, read_page
from tests.report.rows import TEXTS, write_run

HOSTILE = '<script>alert("x")</script>&"\'`|[a](b)'


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with its figures and its report; tests read it and leave it as it is."""
    directory = write_run(tmp_path_factory.mktemp("written") / "run", diagnosed=True)
    report.save_figures(directory)
    report.write_report(directory)
    return directory


@pytest.fixture(scope="module")
def page(written: Path) -> PageReader:
    return read_page((written / "report.html").read_text(encoding="utf-8"))


class TestHtml:
    def test_is_well_formed_and_ids_are_unique(self, page: PageReader) -> None:
        assert page.faults == []
        assert page.open == []
        assert len(page.ids) == len(set(page.ids)) > 10

    def test_needs_nothing_from_elsewhere(self, written: Path, page: PageReader) -> None:
        assert page.of("script") == page.of("link") == page.of("iframe") == []
        assert all(image["src"].startswith("data:image/png;base64,") for image in page.of("img"))
        style = " ".join(page.said("style"))
        assert "url(" not in style
        assert "@import" not in style
        assert not re.search(r"(src|href)=\"(https?:)?//", (written / "report.html").read_text())

    def test_every_picture_is_whole_sized_and_described(self, written: Path, page: PageReader) -> None:
        images = page.of("img")
        assert len(images) == len(list((written / "figures").glob("*.png"))) == 9
        for image in images:
            content = base64.b64decode(image["src"].partition(",")[2], validate=True)
            width, height = Image.open(io.BytesIO(content)).size
            assert (int(image["width"]), int(image["height"])) == (width // 2, height // 2)
            assert len(image["alt"]) > 20
        assert len({image["alt"] for image in images}) == len(images)

    def test_links_are_relative_and_lead_to_files_or_parts_of_the_page(
        self, written: Path, page: PageReader
    ) -> None:
        links = [given["href"] for given in page.of("a")]
        files = {unquote(link) for link in links if not link.startswith("#")}
        assert {"run.json", "metrics.json", "run.log", "tables/arms.csv", "tables/spectrum.csv"} <= files
        assert all((written / name).is_file() for name in files)
        assert {link[1:] for link in links if link.startswith("#")} <= set(page.ids)

    def test_every_wide_table_scrolls_inside_its_own_box(self, page: PageReader) -> None:
        places = [place for place, (tag, _) in enumerate(page.elements) if tag == "table"]
        assert places
        for place in places:
            tag, given = page.elements[place - 1]
            assert (tag, given["class"], given["tabindex"]) == ("div", "scroll", "0")

    def test_says_the_answer_before_any_table(self, page: PageReader) -> None:
        tags = [tag for tag, _ in page.elements]
        first = page.said("p")[1]
        assert "source alone" in first
        assert tags.index("p") < tags.index("dl") < tags.index("table")

    def test_holds_the_numbers_of_the_tables(self, page: PageReader) -> None:
        cells = page.said("td")
        for cell in ("0.520 ±.045", "28.7", "0.712 [0.610, 0.815]", "5.0×", "newline, punctuation"):
            assert cell in cells
        assert {"evaluation", "questions"} <= set(cells)

    def test_has_two_schemes_of_colours_and_fits_a_phone(self, page: PageReader) -> None:
        style = " ".join(page.said("style"))
        assert "prefers-color-scheme: dark" in style
        assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.of("meta")

    def test_is_the_same_when_written_again(self, written: Path) -> None:
        before = [(written / name).read_bytes() for name in ("report.html", "report.md")]
        report.write_report(written)
        assert [(written / name).read_bytes() for name in ("report.html", "report.md")] == before

    def test_a_hostile_name_stays_text(self, run_directory: Path) -> None:
        record = read_json(run_directory / "run.json")
        record["study"] = HOSTILE
        record["argv"] = [HOSTILE]
        record["error"] = HOSTILE
        record["config"]["pair"] = {"name": HOSTILE, "source": {"id": HOSTILE}, "target": {"id": "b"}}
        write_json(run_directory / "run.json", record)
        table = run_directory / "tables" / "arms.csv"
        table.write_text(table.read_text().replace("lookup", "<b onclick=x>&amp;"))
        report.write_report(run_directory)
        page = read_page((run_directory / "report.html").read_text())
        assert page.of("script") == page.of("b") == []
        assert page.faults == page.open == []
        assert not any("onclick" in given for _, given in page.elements)
        texts = " ".join(text for _, text in page.texts)
        assert HOSTILE in texts
        assert "<b onclick=x>&amp;" in texts


class TestMarkdown:
    def test_has_a_table_by_task_and_arm(self, written: Path) -> None:
        text = (written / "report.md").read_text()
        assert "| task | arm | n | accuracy | retention |" in text
        assert "| lookup | mapped | 120 | 0.520 ±.045 | 0.712 [0.610, 0.815] |" in text
        assert "| world | mapped | 4096 | 28.7 |" in text

    def test_every_row_has_as_many_cells_as_its_header(self, written: Path) -> None:
        tables = re.split(r"\n\n", (written / "report.md").read_text())
        tables = [part.splitlines() for part in tables if part.startswith("| ")]
        assert tables
        for lines in tables:
            counts = {len(re.findall(r"(?<!\\)\|", line)) for line in lines}
            assert len(counts) == 1

    def test_a_hostile_name_breaks_no_table_and_opens_no_link(self, tmp_path: Path) -> None:
        grid = Grid(
            HOSTILE, ["a", "b"], [[HOSTILE, "line\nbreak"], [Link("x|y", tmp_path / "a b.csv"), "*1*"]]
        )
        lines = markdown_table(grid, tmp_path)
        assert all(len(re.findall(r"(?<!\\)\|", line)) == 3 for line in lines[2:])
        text = "\n".join(lines)
        assert "\\<script\\>" in text
        assert not re.search(r"(?<!\\)\]\(b", text)
        assert "[x\\|y](a%20b.csv)" in text
        assert "\\*1\\*" in text

    def test_names_with_underscores_stay_readable(self, tmp_path: Path) -> None:
        lines = markdown_table(Grid("t", ["world_where"], [["_a_"]]), tmp_path)
        assert lines[2] == "| world_where |"
        assert lines[4] == "| \\_a\\_ |"


class TestVerdict:
    @staticmethod
    def rows(low: float, high: float, nll: tuple[float, float] = (-0.2, -0.1)) -> list[dict[str, object]]:
        return [
            {
                "task": "t",
                "arm": "mapped",
                "metric": "accuracy",
                "value": 0.5,
                "low": 0.4,
                "high": 0.6,
                "n": 9,
            },
            {
                "task": "t",
                "arm": "source",
                "metric": "accuracy",
                "value": 0.4,
                "low": 0.3,
                "high": 0.5,
                "n": 9,
            },
            {"task": "t", "arm": "no_context", "metric": "accuracy", "value": 0.1, "low": 0.0, "high": 0.2},
            {
                "task": "t",
                "arm": "mapped",
                "metric": "accuracy_minus_source",
                "value": (low + high) / 2,
                "low": low,
                "high": high,
            },
            {"task": "perplexity", "arm": "mapped", "metric": "nll_nats", "value": 2.0, "n": 6},
            {
                "task": "perplexity",
                "arm": "mapped",
                "metric": "nll_minus_source_nats",
                "value": sum(nll) / 2,
                "low": nll[0],
                "high": nll[1],
            },
        ]

    @pytest.mark.parametrize(
        ("low", "high", "said"),
        [
            (0.01, 0.2, "better than the source alone"),
            (-0.2, -0.01, "worse than the source alone"),
            (-0.1, 0.1, "not told apart from the source alone"),
        ],
    )
    def test_follows_the_interval_of_the_difference(self, low: float, high: float, said: str) -> None:
        short = verdict_lines(self.rows(low, high))[0]
        assert f"answers questions {said}" in short
        assert "better than no context" in short  # the intervals of both accuracies lie apart

    @pytest.mark.parametrize(("nll", "said"), [((-0.2, -0.1), "better"), ((0.1, 0.2), "worse")])
    def test_less_nll_is_better(self, nll: tuple[float, float], said: str) -> None:
        assert f"predicts text {said} than the source alone" in verdict_lines(self.rows(0.1, 0.2, nll))[0]

    def test_an_average_stands_for_its_tasks(self) -> None:
        rows = self.rows(-0.1, 0.1)
        average = [{**row, "task": "average"} for row in self.rows(0.1, 0.2) if row["task"] == "t"]
        assert "answers questions better than the source alone" in verdict_lines([*rows, *average])[0]
        grid = verdict_grid([*rows, *average])
        assert grid is not None
        assert "average over tasks and perplexity" in grid.title

    def test_of_nothing_says_nothing(self) -> None:
        assert verdict_lines([]) == []
        assert verdict_grid([]) is None


class TestSettings:
    def test_only_differences_stand_there(self) -> None:
        grid = changed_grid(
            {"mapper.top_k": 8, "seed": 0, "study": "a", "gone": 1, "ratio": None},
            {"mapper.top_k": "all", "seed": 0, "study": "b", "added": True, "ratio": float("inf")},
        )
        assert grid is not None
        assert grid.rows == [
            ["mapper.top_k", "8", "all"],
            ["gone", "1", "(none)"],
            ["added", "(none)", "true"],
        ]

    def test_without_defaults_there_is_no_table_of_differences(self, run_directory: Path) -> None:
        titles = [grid.title for part in run_page(run_directory).sections for grid in part.grids]
        assert "All settings" in titles
        assert not any(title.startswith("Settings that differ") for title in titles)

    def test_a_run_of_defaults_differs_in_nothing(self) -> None:
        from kvmap.config import composed_defaults
        from kvmap.report.sweep import leaves

        flat = dict(leaves(composed_defaults()))
        assert flat["mapper.kind"] == "linear"
        grid = changed_grid(flat, flat)
        assert grid is not None
        assert grid.rows == []

    def test_composing_leaves_a_running_hydra_application_alone(self) -> None:
        from hydra.core.global_hydra import GlobalHydra

        from kvmap.config import composed_defaults

        composed_defaults.cache_clear()
        running = object()
        GlobalHydra.instance().hydra = running  # type: ignore[assignment]
        try:
            assert composed_defaults()["study"] == "tiny"
            assert GlobalHydra.instance().hydra is running
        finally:
            GlobalHydra.instance().clear()

    def test_without_hydra_the_report_is_written_all_the_same(
        self, run_directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from kvmap.config import composed_defaults

        composed_defaults.cache_clear()
        monkeypatch.setitem(sys.modules, "hydra", None)
        assert all(path.is_file() for path in report.write_report(run_directory))


class TestMissing:
    @pytest.mark.parametrize(
        "table",
        ["arms", "r2", "latency", "probes", "attention_output", "errors_by_token", "spectrum_summary"],
    )
    def test_a_table_that_is_not_there_is_no_error(self, diagnosed: Path, table: str) -> None:
        (diagnosed / "tables" / f"{table}.csv").unlink()
        report.draw_figures(diagnosed)
        report.write_report(diagnosed)
        assert read_page((diagnosed / "report.html").read_text()).faults == []

    @pytest.mark.parametrize("table", ["attention_output", "errors_by_token", "next_token", "spectrum", "r2"])
    def test_an_empty_table_is_no_error(self, diagnosed: Path, table: str) -> None:
        path = diagnosed / "tables" / f"{table}.csv"
        path.write_text(path.read_text().splitlines()[0] + "\n")
        report.draw_figures(diagnosed)
        report.write_report(diagnosed)

    def test_texts_have_their_own_lines(self, diagnosed: Path) -> None:
        grids = {grid.title: grid for part in run_page(diagnosed).sections for grid in part.grids}
        attention = grids["Attention on the mapped cache, mean over layers and heads (worst)"]
        assert [row[0] for row in attention.rows] == list(TEXTS)
        assert attention.rows[0][1] == "0.867 (0.833)"

    def test_an_older_table_without_texts_serves(self, run_directory: Path) -> None:
        (run_directory / "tables" / "attention_output.csv").write_text(
            "layer,head,cosine,n\n0,0,0.9,8\n0,1,0.8,8\n"
        )
        assert "attention" in report.draw_figures(run_directory)
        report.write_report(run_directory)
        assert "0.850 (0.800)" in (run_directory / "report.html").read_text()


def test_a_picture_of_the_stages_before_is_shown_too(run_directory: Path) -> None:
    (run_directory / "figures").mkdir()
    Image.new("RGB", (8, 6)).save(run_directory / "figures" / "some_new-thing.png")
    report.write_report(run_directory)
    page = read_page((run_directory / "report.html").read_text())
    assert [image["alt"] for image in page.of("img")] == ["Figure: Some new-thing."]


def test_two_sections_of_one_title_have_two_ids(tmp_path: Path) -> None:
    sections = [Section("Same", ["line"]), Section("Same", ["line"])]
    ids = read_page(to_html(Page("t", "l", sections=sections), tmp_path)).ids
    assert ids == ["same", "same-2"]


def test_a_page_elsewhere_links_back(tmp_path: Path) -> None:
    run, output = tmp_path / "a run", tmp_path / "out" / "deep"
    run.mkdir()
    output.mkdir(parents=True)
    picture = run / "x.png"
    Image.new("RGB", (4, 4)).save(picture)
    grid = Grid("Files", ["file"], [[Link("run.json", run / "run.json")]])
    page = Page(
        "t", "l", sections=[Section("S", [], [grid], [Picture("x", picture, "A figure.")])], paper=[grid]
    )
    href = read_page(to_html(page, output)).of("a")[-1]["href"]
    assert href == "../../a%20run/run.json"
    assert os.path.normpath(output / unquote(href)) == str(run / "run.json")
    assert "(../../a%20run/run.json)" in to_markdown(page, output)
