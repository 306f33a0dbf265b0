"""What is told of an answer: by whom, why, from whose cache, and what it cost."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

from kvmap.serving.gateway.engine import EngineFailed, Role
from kvmap.serving.gateway.routing import Why
from kvmap.serving.outcome import Outcome, Published

Means: TypeAlias = Literal["source", "handoff", "reprefill"]


@dataclass
class Report:
    """Filled in as a request goes along.

    Attributes:
        answered_by: source or target.
        why, because: it, in a word and in a line.
        mode: `source`: it answered; `handoff`: the target, and it was told to take the source's cache;
            `reprefill`: the target, by itself.
        mode_reason: why the target was not told to take the cache, where it could have been.
        outcome: what the target made of the hand-off; None where none was asked for, or it did not say.
        published: what the source has published for this request; None: it was not asked, or did not say.
        read_seconds: the source read the prompt for the hand-off alone; None: it did not, or still reads.
        overlapped: whether the target was asked while the source read it.
        confidence: of the source's answer, or of the tokens of it that were judged.
        withheld_tokens: of the source's answer, made and not sent.
        turn: of the conversation.
        escalated: whether the session is the target's from here on; None where there is none.
        prompt_tokens, completion_tokens: as the engine counted them.
        cached_tokens: of the prompt, found in the engine's own cache or mapped; None: it does not say.
        sent_at, first_token_at: of the engine that answered, seconds of `time.perf_counter`.
        seconds_saved: by the hand-off against the target reading the prompt by itself, estimated.
        failures: engines that gave no answer, one line each.
        started: when the request came.
    """

    answered_by: Role = "source"
    why: Why = "default"
    because: str = ""
    mode: Means = "source"
    mode_reason: str | None = None
    outcome: Outcome | None = None
    published: Published | None = None
    read_seconds: float | None = None
    overlapped: bool = False
    confidence: float | None = None
    withheld_tokens: int = 0
    turn: int = 1
    escalated: bool | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    sent_at: float | None = None
    first_token_at: float | None = None
    seconds_saved: float | None = None
    failures: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from the request's arrival, hand-off and a withheld answer of the source included."""
        return None if self.first_token_at is None else self.first_token_at - self.started

    @property
    def engine_seconds(self) -> float | None:
        """Seconds to the first token from when the engine that answered was asked."""
        if self.first_token_at is None or self.sent_at is None:
            return None
        return self.first_token_at - self.sent_at

    @property
    def seconds_before(self) -> float:
        """Seconds of the source's read that had passed before the target was asked."""
        return 0.0 if self.overlapped else self.read_seconds or 0.0

    def of_source(self) -> None:
        """The source answers: what was tried with the target is no part of it."""
        self.mode, self.mode_reason, self.outcome, self.overlapped = "source", None, None, False

    def count_usage(self, usage: Any) -> None:
        """Take over what an engine counted."""
        if not isinstance(usage, Mapping):
            return
        self.prompt_tokens = _count(usage.get("prompt_tokens"))
        self.completion_tokens = _count(usage.get("completion_tokens"))
        details = usage.get("prompt_tokens_details")
        self.cached_tokens = _count(details.get("cached_tokens")) if isinstance(details, Mapping) else None

    def failed(self, error: EngineFailed) -> None:
        """An engine gave no answer."""
        self.failures.append(f"{error.role}: {error.reason}")

    def record(self) -> dict[str, Any]:
        """The field `kvmap` of an answer."""
        outcome = self.outcome
        return {
            "answered_by": self.answered_by,
            "why": self.why,
            "because": self.because,
            "mode": self.mode,
            "outcome": outcome.outcome if outcome else None,
            "cause": outcome.cause if outcome else None,
            "reason": outcome.reason if outcome else self.mode_reason,
            "time_to_first_token": _rounded(self.time_to_first_token),
            "seconds": _rounded(time.perf_counter() - self.started),
            "seconds_saved": _rounded(self.seconds_saved),
            "n_prompt": outcome.n_prompt if outcome else self.prompt_tokens,
            "n_mapped": outcome.n_mapped if outcome else 0,
            "n_native_head": outcome.n_native_head if outcome else 0,
            "n_own_prefix": outcome.n_own_prefix if outcome else None,
            "n_held_back": outcome.n_held_back if outcome else 0,
            "bytes": outcome.bytes if outcome else 0,
            "load_seconds": _rounded(outcome.load_seconds) if outcome else None,
            "map_seconds": _rounded(outcome.map_seconds) if outcome else None,
            "wait_seconds": _rounded(outcome.wait_seconds) if outcome else None,
            "read_seconds": _rounded(self.read_seconds),
            "overlapped": self.overlapped,
            "published": asdict(self.published) if self.published else None,
            "confidence": _rounded(self.confidence),
            "withheld_tokens": self.withheld_tokens,
            "turn": self.turn,
            "escalated": self.escalated,
            "failures": list(self.failures),
        }

    def headers(self) -> dict[str, str]:
        """What is known before the answer is: words of our own and numbers, nothing of a client's."""
        known = {"answered-by": self.answered_by, "why": self.why, "mode": self.mode, "turn": str(self.turn)}
        if self.outcome is not None:
            known["outcome"] = self.outcome.outcome
        if self.confidence is not None:
            known["confidence"] = f"{self.confidence:.4f}"
        return {f"x-kvmap-{name}": value for name, value in known.items()}


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
