"""Which rule sends a request to the target before the source has answered."""

from __future__ import annotations

import re

from kvmap.serving.gateway.asked import Asked
from kvmap.serving.gateway.settings import RuleSettings

#: characters of a text, its last ones, that a pattern is looked for in: a bound on what a pattern can cost
SEARCHED = 20_000


def rule_that_holds(rules: RuleSettings, asked: Asked, turn: int, n_tokens: int | None) -> str | None:
    """The first that does, in words; None: none does.

    In this order: turn, tools, system pattern, pattern, length.

    Args:
        rules: the settings.
        asked: the request.
        turn: its number in the conversation, 1 the first.
        n_tokens: of the prompt; None: not known, and no rule asks for it or it could not be counted.
    """
    if rules.from_turn is not None and turn >= rules.from_turn:
        return f"turn {turn}, from {rules.from_turn} on"
    if rules.tools and asked.body.get("tools"):
        return "it brings tools"
    if rules.system_pattern and any(_found(rules.system_pattern, text) for text in asked.system_texts):
        return "the system message matches"
    if rules.pattern and _found(rules.pattern, asked.last_text):
        return "the last message matches"
    if rules.prompt_tokens is not None and n_tokens is not None and n_tokens >= rules.prompt_tokens:
        return f"{n_tokens} tokens, from {rules.prompt_tokens} on"
    return None


def _found(pattern: str, text: str) -> bool:
    return re.search(pattern, text[-SEARCHED:]) is not None
