"""When a conversation is handed over, and how its answers are made and shown."""

from __future__ import annotations

from dataclasses import dataclass

from kvmap.demo.answering import CONFIDENCES
from kvmap.errors import KvmapError, UnknownName

AUTO, NEVER = "auto", "never"


@dataclass(frozen=True)
class Rule:
    """When the conversation is handed over.

    Attributes:
        escalate: "auto": where the source's confidence is under the threshold; "never": on request alone; a
            number: at that turn, from 1.
        threshold: of a probability.
        confidence: one of `CONFIDENCES`, see `kvmap.demo.answering.Reply`.
    """

    escalate: str | int = AUTO
    threshold: float = 0.5
    confidence: str = "first"

    def __post_init__(self) -> None:
        """Refuse what is no rule.

        Raises:
            KvmapError: naming the setting, its value and what is expected.
        """
        turn = isinstance(self.escalate, int)
        if (turn and int(self.escalate) < 1) or not (turn or self.escalate in (AUTO, NEVER)):
            raise KvmapError(
                f"escalate={self.escalate}: expected auto, never, or the number of a turn, from 1"
            )
        if not 0 <= self.threshold <= 1:
            raise KvmapError(f"threshold={self.threshold}: expected a probability, 0 to 1")
        if self.confidence not in CONFIDENCES:
            raise UnknownName("confidence", self.confidence, CONFIDENCES)

    def __str__(self) -> str:
        """The rule in words."""
        if isinstance(self.escalate, int):
            return f"at turn {self.escalate}, and on request"
        if self.escalate == NEVER:
            return "on request"
        of = {"first": "its first token", "mean": "its tokens"}[self.confidence]
        return f"where the source gives {of} less than {self.threshold:g}, and on request"


@dataclass(frozen=True)
class Talking:
    """How answers are made and shown.

    Attributes:
        max_new_tokens: of an answer.
        stop: texts that end one, besides those of the conversation's form and the end of text.
        compare: show the target's own answer beside each from a mapped cache.
        max_tokens: of a whole conversation; None: what both models take.
    """

    max_new_tokens: int = 24
    stop: tuple[str, ...] = ()
    compare: bool = False
    max_tokens: int | None = None
