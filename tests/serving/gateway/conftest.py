"""Two engines that speak vLLM's protocol without a model, and gateways before them, all on real sockets.

Where what a gateway is made of is not installed, every test is skipped and says so.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path

import pytest

NEEDED = ("fastapi", "uvicorn", "httpx", "prometheus_client", "openai", "hypothesis")
MISSING = [package for package in NEEDED if importlib.util.find_spec(package) is None]

if not MISSING:
    # pytest finds fixtures by their names in this file; nothing here calls them
    from tests.serving.gateway.fixtures import engines, gateway, source, started_engines, target  # noqa: F401


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of this folder is marked: it needs packages that only a gateway needs."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.serving)


class _Skipped(pytest.Module):
    """A module that is not imported."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        missing = ", ".join(MISSING)
        pytest.skip(f"{missing} not installed: make test-serving", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return _Skipped.from_parent(parent, path=module_path) if MISSING else None
