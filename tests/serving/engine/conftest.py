"""Engines are real ones: without vLLM these tests are skipped."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

# Before vLLM is imported, which looks once.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test of this folder needs an engine, and time for one to start."""
    here = Path(__file__).parent
    missing = importlib.util.find_spec("vllm") is None
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.serving)
            if item.config.pluginmanager.hasplugin("timeout"):
                item.add_marker(pytest.mark.timeout(900))
            if missing:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed beside this Python"))
