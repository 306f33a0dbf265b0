from __future__ import annotations

import re
from pathlib import Path

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient

from kvmap.metrics import Metric
from kvmap.tracking import Run
from tests.economics.cases import benchmark_rows
from tests.economics.test_curves import write
from tests.evaluation.finished_runs import answers, item_rows

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
# Two threads of a busy machine may make half a minute a whole one.
pytestmark = pytest.mark.timeout(300)


def read(name):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=nbformat.NO_CONVERT)


def execute(name, tmp_path, monkeypatch, **environment):
    """The notebook's code cells once it has run, in a folder that has nothing to do with the checkout."""
    # The kernel chooses the notebook's own way to draw, and leaves nothing in the home folder.
    monkeypatch.delenv("MPLBACKEND", raising=False)
    monkeypatch.delenv("KVMAP_STUDY", raising=False)
    settings = {
        "IPYTHONDIR": tmp_path / "ipython",
        "JUPYTER_RUNTIME_DIR": tmp_path / "jupyter",
        **environment,
    }
    for key, value in settings.items():
        monkeypatch.setenv(key, str(value))
    (tmp_path / "elsewhere").mkdir()
    resources = {"metadata": {"path": str(tmp_path / "elsewhere")}}
    notebook = read(name)
    NotebookClient(notebook, timeout=240, kernel_name="python3", resources=resources).execute()
    return {cell.id: cell for cell in notebook.cells if cell.cell_type == "code"}


def text_of(cell):
    """What a cell printed, and what its last line was."""
    printed = [
        output.text for output in cell.outputs if output.output_type == "stream" and output.name == "stdout"
    ]
    shown = [output.data.get("text/plain", "") for output in cell.outputs if "data" in output]
    return "".join(printed + shown)


def n_images(cells):
    return sum("image/png" in output.get("data", {}) for cell in cells.values() for output in cell.outputs)


def test_there_are_three():
    assert [path.stem for path in NOTEBOOKS] == ["analyse_a_sweep", "economics", "transfer_step_by_step"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
class TestStored:
    def test_valid_with_stable_ids(self, path):
        notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
        nbformat.validate(notebook)
        assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
        ids = [cell.id for cell in notebook.cells]
        assert len(set(ids)) == len(ids)
        assert all(re.fullmatch(r"[a-z0-9-]+", name) and len(name) < 24 for name in ids), "named, not drawn"

    def test_without_outputs(self, path):
        notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                assert cell.outputs == []
                assert cell.execution_count is None
            assert cell.metadata == {}

    def test_no_magic_and_no_network(self, path):
        notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
        code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
        assert not re.search(r"^\s*[!%]", code, re.MULTILINE)
        assert not re.search(r"https?://|pip install|from_pretrained", code)

    def test_links_lead_somewhere(self, path):
        notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
        prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
        for link in re.findall(r"\]\(([^)]+)\)", prose):
            assert (FOLDER / link).exists(), link


@pytest.mark.slow
def test_a_transfer_step_by_step(tmp_path, monkeypatch):
    cells = execute("transfer_step_by_step", tmp_path, monkeypatch)
    assert n_images(cells) == 5
    assert "differ by" in text_of(cells["fit"])
    answered = dict(line.split("→") for line in text_of(cells["continue"]).splitlines() if "→" in line)
    answered = {name.strip(): answer.strip() for name, answer in answered.items()}
    assert answered["target, read it all itself"] == answered["right"] == "yellow"
    assert answered["target, without the story"] != "yellow"
    assert re.search(r"mapped\s+1\.000", text_of(cells["help"])), "three native layers answer everything"


@pytest.mark.slow
def test_economics_of_planned_times(tmp_path, monkeypatch):
    monkeypatch.delenv("KVMAP_RUN", raising=False)
    cells = execute("economics", tmp_path, monkeypatch)
    assert "planned for h100" in text_of(cells["times"])
    assert "note: planned, not measured" in text_of(cells["assume"])
    assert "cost/correct" in text_of(cells["assume"])
    assert "cached_share" in text_of(cells["break-even"])
    assert re.search(r"is the cheaper: (0\.\d\d|none)", text_of(cells["ask"]))
    assert n_images(cells) == 3


@pytest.mark.slow
def test_economics_of_a_run_that_is_named(tmp_path, monkeypatch):
    write(tmp_path / "run" / "tables" / "latency.csv", benchmark_rows())
    cells = execute("economics", tmp_path, monkeypatch, KVMAP_RUN=tmp_path / "run")
    assert str(tmp_path / "run") in text_of(cells["times"])
    assert "log-normal, median 1,024 tokens" in text_of(cells["assume"])


@pytest.mark.slow
def test_without_a_study_it_makes_one(tmp_path, monkeypatch):
    cells = execute("analyse_a_sweep", tmp_path, monkeypatch, KVMAP_OUTPUTS=tmp_path / "outputs")
    assert "small: 3 finished runs" in text_of(cells["find"])
    assert "3 configurations, 3 runs, 1 pair; too few pairs" in text_of(cells["correlate"])
    assert "too few pairs (1)" in text_of(cells["leave-out"])
    assert n_images(cells) == 4
    assert len(list((tmp_path / "outputs" / "small").glob("*/*/run.json"))) == 3


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Six pairs, three settings, two seeds, as their runs would have left them."""
    root = tmp_path_factory.mktemp("outputs") / "planted"
    random = np.random.default_rng(0)
    target, source = answers(0.95, 60, 1), answers(0.3, 60, 2)
    for number in range(36):
        pair, top_k, seed = number // 6, number // 2 % 3 + 1, number % 2
        write_run(root / str(number), random, pair, top_k, seed, target, source)
    return root


def write_run(folder, random, pair, top_k, seed, target, source):
    share = 0.4 + 0.05 * pair + 0.1 * top_k
    mapped = random.random(60) < share
    config = {
        "study": "planted",
        "outputs": "o",
        "seed": 0,
        "direction": "up",
        "pair": {"name": f"p{pair}", "source": {"id": f"m{pair}"}, "target": {"id": "large"}},
        "mapper": {"kind": "linear", "top_k": top_k, "seed": seed},
    }
    metrics = {
        "evaluate/average/mapped/retention": Metric(mapped.mean() / target.mean(), 60, 0.05),
        "evaluate/average/mapped/accuracy": Metric(mapped.mean(), 60, 0.05),
        "diagnose/questions/mapped/attention_cosine": Metric(share + 0.01 * random.normal()),
        "diagnose/held_out/mapped/r2_key": Metric(random.random()),
        "diagnose/held_out/mapped/r2_value": Metric(random.random()),
    }
    r2 = [
        {"layer": layer, "head": head, "kind": kind, "split": "held_out", "r2": random.random()}
        for layer in range(4)
        for head in range(2)
        for kind in ("key", "value")
    ]
    arms = {"target": target, "source": source, "mapped": mapped}
    with Run(folder, "planted", config, "none") as run:
        run.log(metrics)
        run.table("r2", r2)
        run.table("items", [row for arm, right in arms.items() for row in item_rows("task", arm, right)])


@pytest.mark.slow
def test_a_study_that_is_named(study, tmp_path, monkeypatch):
    cells = execute(
        "analyse_a_sweep", tmp_path, monkeypatch, KVMAP_OUTPUTS=study.parent, KVMAP_STUDY=study.name
    )
    assert "planted: 36 finished runs" in text_of(cells["find"])
    found = text_of(cells["correlate"])
    assert "18 configurations, 36 runs, 6 pairs" in found
    assert found.splitlines()[2].startswith("questions attention_cosine")
    assert re.search(r"^ridge +0\.[4-9]", text_of(cells["leave-out"]), re.MULTILINE)
    assert n_images(cells) == 4
