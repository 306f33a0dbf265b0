"""A request as the gateway takes it: what goes to the engines, and what it says of the cascade."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvmap.serving.gateway.fields import Kind, checked, texts_of
from kvmap.serving.gateway.refusals import mistaken
from kvmap.serving.gateway.settings import LimitSettings, Mode

Mark: TypeAlias = tuple[int, str]

HEADERS = {"escalate": "x-kvmap-escalate", "mode": "x-kvmap-mode", "session": "x-kvmap-session"}
_TRUTHS = {"true": True, "1": True, "false": False, "0": False}


class Wish(BaseModel):
    """The field `kvmap` of a request.

    Attributes:
        escalate: true: the target answers; false: the source, and its confidence is not asked; None: judge.
        mode: how the target comes by the context; None: as set.
        session: names the conversation, for this client.
        min_tokens: the shortest context that is worth a hand-off; None: as set.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    escalate: bool | None = None
    mode: Mode | None = None
    session: str | None = Field(default=None, min_length=1, max_length=256)
    min_tokens: int | None = Field(default=None, ge=1, le=1 << 30)


@dataclass(frozen=True)
class Asked:
    """One request.

    Attributes:
        kind: chat or completion.
        body: the fields that an engine is given, as they came.
        wish: what it says of the cascade.
        session: key of its session, of one length whatever the client sent; None: it names none.
        stream: whether the answer is wanted as it is made.
        include_usage: whether a stream is to end with its usage.
    """

    kind: Kind
    body: Mapping[str, Any]
    wish: Wish
    session: str | None
    stream: bool
    include_usage: bool

    @property
    def n(self) -> int:
        """Answers wanted."""
        return int(self.body.get("n") or 1)

    def mark(self, length: int | None = None) -> Mark:
        """By which a prompt that begins with this one is known: a length, and a digest of so much of it.

        Args:
            length: messages of a chat, characters or token ids of a completion; None: all of it.
        """
        prompt = self.body["messages"] if self.kind == "chat" else self.prompt
        part = prompt[:length]
        text = json.dumps(part, sort_keys=True, separators=(",", ":"))
        return len(part), hashlib.sha256(text.encode()).hexdigest()

    @property
    def prompt(self) -> str | list[int]:
        """Of a completion: its text, or its token ids."""
        prompt: Any = self.body["prompt"]
        wrapped = isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int)
        only: str | list[int] = prompt[0] if wrapped else prompt
        return only

    @property
    def turn(self) -> int | None:
        """Number of the user's message in the conversation, 1 the first; None of a completion."""
        if self.kind == "completion":
            return None
        return sum(message["role"] == "user" for message in self.body["messages"])

    @property
    def last_text(self) -> str:
        """The user's last message, or the prompt where that is text."""
        if self.kind == "completion":
            return self.prompt if isinstance(self.prompt, str) else ""
        texts = texts_of(self.body["messages"], "user")
        return texts[-1] if texts else ""

    @property
    def system_texts(self) -> list[str]:
        """What system and developer messages say."""
        return [] if self.kind == "completion" else texts_of(self.body["messages"], "system", "developer")


def asked(kind: Kind, body: Any, headers: Mapping[str, str], limits: LimitSettings) -> Asked:
    """A request, checked.

    Raises:
        Refusal: 400, naming the field.
    """
    taken = checked(kind, body, limits)
    wish = _wish(body.get("kvmap"), headers)
    user = body.get("user")
    if not isinstance(user, str | None):
        raise mistaken("user", "expected a text")
    named = ("session", wish.session) if wish.session else ("user", user) if user else None
    options = taken.get("stream_options") or {}
    return Asked(
        kind=kind,
        body=taken,
        wish=wish,
        session=None if named is None else hashlib.sha256("\0".join(named).encode()).hexdigest(),
        stream=bool(taken.get("stream")),
        include_usage=bool(options.get("include_usage")),
    )


def _wish(field: Any, headers: Mapping[str, str]) -> Wish:
    if not isinstance(field, dict | None):
        raise mistaken("kvmap", "expected an object")
    values = dict(field or {})
    for name, header in HEADERS.items():
        text = headers.get(header)
        if text is None:
            continue
        value: Any = text
        if name == "escalate":
            value = _TRUTHS.get(text.strip().lower())
            if value is None:
                raise mistaken(header, "expected true or false")
        if values.setdefault(name, value) != value:
            raise mistaken(f"kvmap.{name}", f"the header {header} says otherwise; send one of them")
    try:
        return Wish.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(["kvmap", *(str(part) for part in first["loc"])])
        raise mistaken(place[:80], str(first["msg"])) from None
