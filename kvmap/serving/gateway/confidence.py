"""How sure the source is of an answer, from the probabilities that the engine gives along."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvmap.serving.gateway.fields import Kind
from kvmap.serving.gateway.settings import ConfidenceSettings, Measure


@dataclass(frozen=True)
class TokenOdds:
    """Of one token of an answer: log p of the token taken, and of the likeliest ones, in nats."""

    taken: float
    top: tuple[float, ...] = ()

    @property
    def entropy(self) -> float:
        """-Σ p log p over the likeliest tokens and one more for all others together, in nats.

        A lower bound of the entropy over the vocabulary: the others are told apart by nothing.
        """
        chances = [math.exp(min(0.0, log_p)) for log_p in self.top]
        rest = max(0.0, 1.0 - sum(chances))
        return -sum(p * math.log(p) for p in (*chances, rest) if p > 0)


def confidence(measure: Measure, odds: Sequence[TokenOdds]) -> float | None:
    """A number from 0 to 1; None of no token, which says nothing.

    ``first = p(a_1)``, ``mean = exp(1/n Σ_i log p(a_i))`` over the n tokens, as `kvmap.demo` has them;
    ``entropy = exp(-1/n Σ_i H_i)``, see `TokenOdds.entropy`.
    """
    if not odds or measure == "off":
        return None
    if measure == "first":
        return math.exp(odds[0].taken)
    each = [-token.entropy for token in odds] if measure == "entropy" else [token.taken for token in odds]
    return math.exp(sum(each) / len(each))


def odds_of(kind: Kind, choice: Mapping[str, Any]) -> list[TokenOdds]:
    """Of the tokens of a choice, or of a chunk of one; none where the engine gave none."""
    logprobs = choice.get("logprobs") or {}
    if kind == "chat":
        return [
            TokenOdds(_number(token.get("logprob")), _numbers(top.get("logprob") for top in _tops(token)))
            for token in logprobs.get("content") or ()
        ]
    tops = logprobs.get("top_logprobs") or ()
    taken = logprobs.get("token_logprobs") or ()
    return [
        TokenOdds(_number(log_p), _numbers((tops[i] or {}).values()) if i < len(tops) else ())
        for i, log_p in enumerate(taken)
    ]


def _tops(token: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return token.get("top_logprobs") or ()


#: what an engine writes for a probability of zero
_LEAST = -9999.0


def _number(value: Any) -> float:
    return max(_LEAST, min(0.0, float(value))) if isinstance(value, int | float) else _LEAST


def _numbers(values: Any) -> tuple[float, ...]:
    return tuple(_number(value) for value in values)


def asks_for_odds(kind: Kind, body: dict[str, Any], settings: ConfidenceSettings) -> None:
    """Ask the source for what its confidence is computed from, beside what the client wants."""
    top = settings.top if settings.measure == "entropy" else 0
    if kind == "chat":
        body["logprobs"] = True
        body["top_logprobs"] = max(top, int(body.get("top_logprobs") or 0))
    else:
        body["logprobs"] = max(top, int(body.get("logprobs") or 0))


def without_odds(kind: Kind, choice: dict[str, Any], wanted: Mapping[str, Any]) -> None:
    """Take out of a choice what `asks_for_odds` put in and the client did not want.

    Args:
        kind: of the request.
        choice: of an answer or a chunk; it is changed.
        wanted: the client's own fields.
    """
    if "logprobs" not in choice:
        return
    asked_for = wanted.get("logprobs")
    if not asked_for and not (kind == "completion" and asked_for == 0 and asked_for is not False):
        choice["logprobs"] = None
        return
    logprobs = choice["logprobs"] or {}
    if kind == "chat":
        top = int(wanted.get("top_logprobs") or 0)
        for token in logprobs.get("content") or ():
            token["top_logprobs"] = list(_tops(token))[:top]
    elif logprobs.get("top_logprobs"):
        logprobs["top_logprobs"] = [
            dict(list((each or {}).items())[: int(asked_for) + 1]) for each in logprobs["top_logprobs"]
        ]


@dataclass
class Window:
    """The first tokens of a stream, judged before any of them is sent.

    Attributes:
        settings: what is measured, and how many tokens.
        odds: of the tokens so far.
    """

    settings: ConfidenceSettings
    odds: list[TokenOdds] = field(default_factory=list)

    @property
    def full(self) -> bool:
        """Whether there are enough to judge by."""
        needed = 1 if self.settings.measure == "first" else self.settings.first_tokens
        return len(self.odds) >= needed

    @property
    def confidence(self) -> float | None:
        """Of the tokens so far."""
        return confidence(self.settings.measure, self.odds)
