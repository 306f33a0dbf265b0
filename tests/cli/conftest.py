"""How the command line is called in these tests, and one outputs folder per file of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvmap import run as cli
from kvmap.config import start_token

Answer = tuple[int, str, str]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Answer]:
    """Runs `python -m kvmap.run experiment=debug ...` in this process: exit status, stdout, stderr."""

    def run(*overrides: str) -> Answer:
        from hydra.core.global_hydra import GlobalHydra

        GlobalHydra.instance().clear()
        start_token.cache_clear()  # each call stands for a process of its own
        monkeypatch.setattr(sys, "argv", ["kvmap.run", "experiment=debug", *overrides])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        captured = capsys.readouterr()
        return int(stop.value.code or 0), captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def shared_outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One outputs folder for the module, so that its artifacts are made once."""
    return tmp_path_factory.mktemp("outputs")
