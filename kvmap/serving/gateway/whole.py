"""An answer that is not streamed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from kvmap.serving.gateway.case import Case
from kvmap.serving.gateway.confidence import asks_for_odds, confidence, odds_of, without_odds
from kvmap.serving.gateway.engine import Engine
from kvmap.serving.gateway.outcomes import TRANSFER, note_outcome
from kvmap.serving.gateway.settings import ConfidenceSettings


@dataclass
class WholeReply:
    """What an engine answered.

    Attributes:
        content: its answer, as the client gets it.
        confidence: None where it was not judged, or the engine gave no probabilities.
        n_judged: tokens that it was judged by.
        sent_at: when the engine was asked.
        first_token_seconds: from then to the first token, as the engine says; None: it does not.
    """

    content: dict[str, Any]
    confidence: float | None
    n_judged: int
    sent_at: float
    first_token_seconds: float | None

    def note(self, case: Case) -> None:
        """Put down what is known of it, where it is the one that stands."""
        report, seconds = case.report, self.first_token_seconds
        report.count_usage(self.content.get("usage"))
        report.sent_at = self.sent_at
        report.first_token_at = None if seconds is None else self.sent_at + seconds

    async def withhold(self) -> WholeReply | None:
        """Itself: it can still be sent where the target fails."""
        return self


async def ask_whole(
    engine: Engine, case: Case, body: dict[str, Any], judged: ConfidenceSettings | None
) -> WholeReply:
    """Ask an engine and wait for all of its answer.

    Args:
        engine: which.
        case: of the request.
        body: what it is asked.
        judged: how confidence is measured; None: it is not.

    Raises:
        EngineFailed: it gave none.
    """
    kind = case.asked.kind
    if judged is not None:
        asks_for_odds(kind, body, judged)
    sent_at = time.perf_counter()
    content = await engine.answer(kind, body, case.request_id)
    note_outcome(content, case)
    content.pop(TRANSFER, None)
    odds = [] if judged is None else odds_of(kind, content["choices"][0])
    if judged is not None:
        for choice in content["choices"]:
            without_odds(kind, choice, case.asked.body)
    sure = None if judged is None else confidence(judged.measure, odds)
    return WholeReply(content, sure, len(odds), sent_at, _first_token_seconds(content))


def _first_token_seconds(content: dict[str, Any]) -> float | None:
    """What vLLM calls by this name begins when a request is scheduled: after a cache has been waited for."""
    metrics = content.get("metrics")
    if not isinstance(metrics, dict):
        return None
    parts = [metrics.get("time_to_first_token_ms"), metrics.get("queue_time_ms", 0.0)]
    return sum(parts) / 1000 if all(isinstance(part, int | float) for part in parts) else None
