"""What the gateway counts, for Prometheus. No label has a value that a client chooses."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from kvmap.serving.gateway.engine import EngineFailed
from kvmap.serving.gateway.report import Report
from kvmap.serving.outcome import CAUSES

MEDIA_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKENS = tuple(2**power for power in range(5, 18))
_BYTES = tuple(4**power for power in range(7, 18))


class Counting:
    """All metrics of one gateway, in a registry of its own."""

    def __init__(self) -> None:
        """All at zero."""
        self.registry = CollectorRegistry()
        counter, histogram, gauge = self._counter, self._histogram, self._gauge
        self.answers = counter("answers", "requests that were answered", "answered_by", "why", "mode")
        self.unanswered = counter("unanswered", "requests without a whole answer", "why")
        self.handoffs = counter("handoffs", "hand-offs asked of the target", "outcome", "cause")
        self.reads = counter("source_reads", "prompts the source read for a hand-off alone", "outcome")
        self.tokens = counter("tokens", "tokens of answers and their prompts", "engine", "kind")
        self.mapped_tokens = counter("mapped_tokens", "prompt tokens whose cache was mapped")
        self.mapped_bytes = counter("mapped_bytes", "bytes of the source's caches that were mapped")
        self.published_bytes = counter("published_bytes", "bytes of caches that the source published")
        self.seconds_saved = counter("seconds_saved", "estimated, by hand-offs that were quicker")
        self.seconds_lost = counter("seconds_lost", "estimated, by hand-offs that were slower")
        self.withheld_tokens = counter("withheld_tokens", "tokens of the source's answers that were not sent")
        self.engine_errors = counter("engine_errors", "answers an engine did not give", "engine", "kind")
        self.sessions_forgotten = counter("sessions_forgotten", "sessions given up", "why")
        self.first_token = histogram("time_to_first_token_seconds", "from arrival", _SECONDS, "mode")
        self.answer_seconds = histogram("answer_seconds", "from arrival to the end", _SECONDS, "mode")
        self.mapped_of_one = histogram("mapped_tokens_of_a_handoff", "where applied", _TOKENS)
        self.bytes_of_one = histogram("mapped_bytes_of_a_handoff", "where applied", _BYTES)
        shares = tuple(step / 10 for step in range(1, 11))
        self.confidence = histogram("confidence", "of the source's answers", shares)
        self.in_flight = gauge("in_flight", "requests under way")
        self.sessions = gauge("sessions", "sessions remembered")
        self.templates_agree = gauge(
            "templates_agree", "1: both engines read a chat alike; 0: not; -1: unknown"
        )
        self.templates_agree.set(-1)

    def text(self) -> bytes:
        """In Prometheus' format."""
        return generate_latest(self.registry)

    def answered(self, report: Report) -> None:
        """An answer went out whole."""
        self.answers.labels(report.answered_by, report.why, report.mode).inc()
        self._spent(report)
        for kind, number in (("prompt", report.prompt_tokens), ("completion", report.completion_tokens)):
            self.tokens.labels(report.answered_by, kind).inc(number or 0)

    def not_answered(self, why: str, report: Report | None = None) -> None:
        """A request got no answer, or not all of one; why is a word of this program."""
        self.unanswered.labels(why).inc()
        if report is not None:
            self._spent(report)

    def engine_failed(self, error: EngineFailed) -> None:
        """An engine gave no answer."""
        self.engine_errors.labels(error.role, error.kind).inc()

    def _spent(self, report: Report) -> None:
        """What came of it and what it took, whether or not the answer was whole."""
        record = report.record()
        self.answer_seconds.labels(report.mode).observe(record["seconds"])
        if (seconds := report.time_to_first_token) is not None:
            self.first_token.labels(report.mode).observe(seconds)
        if report.confidence is not None:
            self.confidence.observe(report.confidence)
        self.withheld_tokens.inc(report.withheld_tokens)
        if report.published is not None:
            self.published_bytes.inc(max(0, report.published.bytes))
        if report.mode == "handoff":
            self._handed_over(report)

    def _handed_over(self, report: Report) -> None:
        outcome = report.outcome
        if outcome is None:
            self.handoffs.labels("unknown", "none").inc()
            return
        known = outcome.cause is None or outcome.cause in CAUSES
        self.handoffs.labels(outcome.outcome, (outcome.cause or "none") if known else "other").inc()
        if outcome.outcome != "applied":
            return
        n_tokens, n_bytes = max(0, outcome.n_mapped), max(0, outcome.bytes)
        self.mapped_tokens.inc(n_tokens)
        self.mapped_of_one.observe(n_tokens)
        self.mapped_bytes.inc(n_bytes)
        self.bytes_of_one.observe(n_bytes)
        if (saved := report.seconds_saved) is not None:
            (self.seconds_saved if saved >= 0 else self.seconds_lost).inc(abs(saved))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"kvmap_gateway_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"kvmap_gateway_{name}", text, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"kvmap_gateway_{name}", text, labels, registry=self.registry, buckets=buckets)

    def watch(self, sessions: Callable[[], int], in_flight: Callable[[], int]) -> None:
        """Read how many there are when it is asked for."""
        self.sessions.set_function(sessions)
        self.in_flight.set_function(in_flight)
