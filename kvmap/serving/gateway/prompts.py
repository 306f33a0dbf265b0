"""How long a request's prompt is, and whether both engines read it alike."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from kvmap.serving.gateway.asked import Asked
from kvmap.serving.gateway.counting import Counting
from kvmap.serving.gateway.engine import Engine, EngineFailed, Role
from kvmap.serving.gateway.fields import text_of

#: a conversation with everything a template writes in its own way, and one without a system message
_USER, _OTHER = {"role": "user", "content": "One, two?"}, {"role": "user", "content": " Four.\n"}
_ASSISTANT = {"role": "assistant", "content": "Three."}
PROBES: tuple[list[dict[str, str]], ...] = (
    [{"role": "system", "content": "Count."}, _USER, _ASSISTANT, _OTHER],
    [_USER, _ASSISTANT, _OTHER],
)
#: seconds that a comparison of templates holds, and one that failed
COMPARED_SECONDS, UNKNOWN_SECONDS = 600.0, 10.0
#: bytes that a template adds around a message, at the least
AROUND = 8


class Prompts:
    """Asks the engines' tokenizers."""

    def __init__(self, engines: Mapping[Role, Engine], counting: Counting) -> None:
        """Args: both engines; where it is counted whether they agree."""
        self._engines, self._counting = engines, counting
        self._compared: tuple[float, bool | None] | None = None
        self._failed_at: dict[Role, float] = {}

    async def count(self, asked: Asked) -> int | None:
        """Tokens of a prompt, as either engine counts them; None: neither says."""
        # the one that has not failed of late first: to find out that an engine is gone can take seconds
        for engine in sorted(self._engines.values(), key=lambda each: self._failed_at.get(each.role, 0.0)):
            try:
                return len(await engine.token_ids(asked.kind, self._read(asked)))
            except EngineFailed:
                self._failed_at[engine.role] = time.monotonic()
        return None

    @staticmethod
    def _read(asked: Asked) -> Mapping[str, Any]:
        return asked.body if asked.kind == "chat" else {**asked.body, "prompt": asked.prompt}

    async def agree(self) -> bool | None:
        """Whether both engines read a conversation as the same token ids; None: one does not say."""
        if self._compared is not None:
            since, agreed = self._compared
            held = UNKNOWN_SECONDS if agreed is None else COMPARED_SECONDS
            if time.monotonic() - since < held:
                return agreed
        agreed = await self._compare()
        self._compared = time.monotonic(), agreed
        self._counting.templates_agree.set(-1 if agreed is None else int(agreed))
        return agreed

    async def _compare(self) -> bool | None:
        for messages in PROBES:
            body: dict[str, Any] = {"messages": messages}
            try:
                source, target = [await e.token_ids("chat", body) for e in self._engines.values()]
            except EngineFailed as error:
                if error.kind == "refused":  # a template without a place for this kind of message
                    continue
                return None
            return source == target
        return None


def surely_shorter(asked: Asked, n_tokens: int) -> bool:
    """Whether a prompt has fewer tokens than that, told without a tokenizer: no token is less than a byte.

    False says nothing.
    """
    if asked.body.get("tools") or asked.body.get("chat_template_kwargs"):
        return False
    if asked.kind == "completion":
        return len(asked.prompt if isinstance(asked.prompt, list) else asked.prompt.encode()) < n_tokens
    texts = [text_of(message.get("content")) for message in asked.body["messages"]]
    if any("tool_calls" in message for message in asked.body["messages"]):
        return False
    default_system = 200  # what some templates say of themselves where the client says nothing
    return default_system + sum(len(text.encode()) + 4 * AROUND for text in texts) < n_tokens
