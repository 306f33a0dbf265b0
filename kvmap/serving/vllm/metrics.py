"""Prometheus metrics of hand-offs, beside vLLM's own at the engine's `/metrics`."""

from __future__ import annotations

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram

from kvmap.serving.outcome import Outcome, Published

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class EngineMetrics:
    """Counted when a request ends."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        """Args: where they are kept; vLLM shows those of prometheus_client's own."""

        def counter(name: str, words: str, *labels: str) -> Counter:
            return Counter(f"kvmap_{name}", words, labels, registry=registry)

        def seconds(name: str, words: str) -> Histogram:
            return Histogram(f"kvmap_{name}_seconds", words, buckets=_SECONDS, registry=registry)

        self._takes = counter("takes", "requests that asked for a cache", "outcome", "cause")
        self._mapped = counter("mapped_tokens", "prompt tokens whose cache was mapped")
        self._read = counter("read_bytes", "of sources' caches that were read")
        self._publishes = counter(
            "publishes", "requests that asked for their prompt to be published", "published"
        )
        self._published = counter("published_tokens", "prompt tokens whose cache was published")
        self._load = seconds("load", "reading and checking a cache that was applied")
        self._map = seconds("map", "native tokens and layers, map and pages of a cache that was applied")
        self._wait = seconds("wait", "for parts of an applied cache that were not written yet")

    def take(self, outcome: Outcome) -> None:
        """One answer of a target."""
        self._takes.labels(outcome.outcome, outcome.cause or "").inc()
        if outcome.outcome == "applied":
            self._mapped.inc(outcome.n_mapped)
            self._read.inc(outcome.bytes)
            self._load.observe(outcome.load_seconds)
            self._map.observe(outcome.map_seconds)
            self._wait.observe(outcome.wait_seconds)

    def publish(self, published: Published) -> None:
        """One answer of a source."""
        self._publishes.labels("yes" if published.published else "no").inc()
        self._published.inc(published.published)
