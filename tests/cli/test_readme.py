"""What the documents show runs as shown."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Answer
from tests.cli.test_chain import run_directory

ROOT = Path(__file__).resolve().parents[2]


def python_block(document: str) -> str:
    """The first Python example of a document."""
    found = re.search(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
    assert found is not None
    return found[1]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("outputs")


def test_the_library_example(
    call: Callable[..., Answer], outputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = call(f"outputs={outputs}", "stages=[fit]", "calibration.n_sequences=60")
    assert status == 0, err
    key = json.loads((run_directory(out) / "run.json").read_text())["facts"]["artifacts"]["mapper"]
    code = python_block("README.md").replace(
        "outputs/artifacts/mapper/<key>", f"{outputs}/artifacts/mapper/{key}"
    )
    exec(code, {})
    (answer,) = re.findall(r"\['(\w+)'\]", capsys.readouterr().out)
    assert answer.isalpha()


@pytest.mark.slow
def test_the_notebook_example(call: Callable[..., Answer], outputs: Path) -> None:
    status, out, err = call(f"outputs={outputs}", "stages=[diagnose,evaluate]")
    assert status == 0, err
    exec(python_block("notebooks/README.md").replace("outputs/tiny/<job>", str(run_directory(out))), {})
