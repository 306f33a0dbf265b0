"""Who is asked first, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from kvmap.serving.gateway.asked import Asked
from kvmap.serving.gateway.engine import Role
from kvmap.serving.gateway.rules import rule_that_holds
from kvmap.serving.gateway.sessions import Session
from kvmap.serving.gateway.settings import Settings

Why: TypeAlias = Literal[
    "default", "request", "session", "rule", "confidence", "source_failed", "target_failed"
]


@dataclass(frozen=True)
class Route:
    """Who is asked first.

    Attributes:
        by: source or target.
        why: in a word.
        because: in a line.
        judged: whether the source's answer stands only where it is confident.
    """

    by: Role
    why: Why
    because: str
    judged: bool = False


def route(
    settings: Settings,
    asked: Asked,
    session: Session,
    named: Role | None,
    turn: int,
    n_tokens: int | None,
) -> Route:
    """What holds, the first of: the request's own word, its model, its session, a rule, the source.

    Args:
        settings: all of them.
        asked: the request.
        session: as it is now; given back to the source where the request says so.
        named: whose model it names; None: the cascade's, or none.
        turn: number of the request in its conversation, 1 the first.
        n_tokens: of its prompt, where a rule asks for it.
    """
    wanted = asked.wish.escalate
    if wanted is None and named is not None:
        wanted = named == "target"
    if wanted is not None:
        word = "kvmap.escalate" if asked.wish.escalate is not None else "its model"
        if not wanted:
            session.back()
        return Route("target" if wanted else "source", "request", f"asked for by {word}")
    if session.escalated and settings.sessions.stay_turns != 0:
        return Route("target", "session", "the target has the conversation")
    rule = rule_that_holds(settings.rules, asked, turn, n_tokens)
    if rule is not None:
        return Route("target", "rule", rule)
    judged = settings.confidence.measure != "off" and asked.n == 1 and not asked.body.get("echo")
    return Route("source", "default", "nothing speaks for the target", judged)
