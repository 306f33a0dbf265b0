"""Answers become metrics that Prometheus can read."""

from __future__ import annotations

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client import CollectorRegistry

from kvmap.serving.outcome import Outcome, Published, refused
from kvmap.serving.vllm.metrics import EngineMetrics


def test_answers_are_counted_and_their_seconds_observed() -> None:
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry)
    applied = Outcome(
        "applied", None, "", n_mapped=5, bytes=80, load_seconds=0.5, map_seconds=0.25, wait_seconds=2.0
    )
    for outcome in (applied, applied, refused("partial", ""), refused("layout", "")):
        metrics.take(outcome)
    for published in (Published(12), Published(0, reason="why")):
        metrics.publish(published)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"kvmap_{name}", labels)

    assert value("takes_total", outcome="applied", cause="") == 2
    assert value("takes_total", outcome="fell_back", cause="partial") == 1
    assert value("takes_total", outcome="unsupported", cause="layout") == 1
    assert (value("mapped_tokens_total"), value("read_bytes_total")) == (10, 160)
    assert value("publishes_total", published="yes") == value("publishes_total", published="no") == 1
    assert value("published_tokens_total") == 12
    sums = [value(f"{name}_seconds_sum") for name in ("load", "map", "wait")]
    assert sums == [1.0, 0.5, 4.0]
