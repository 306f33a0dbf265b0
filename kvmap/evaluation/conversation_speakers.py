"""Who answers the turns of a conversation: a model on its own growing cache, or a target on a mapped one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from kvmap.evaluation.choices import cut_at, end_of_text_ids
from kvmap.evaluation.conversation_carry import Taken
from kvmap.evaluation.conversation_encoding import Ids, joined
from kvmap.models.capture import forward
from kvmap.models.pair import LoadedModel
from kvmap.transfer import HandOff, native


class Reader:
    """One model and its own cache of a conversation that grows by segments.

    What was read before is used again as far as the segments are the same, and only what follows is run:
    causal attention leaves earlier columns as they are. Models whose frequencies depend on the length of the
    context (dynamic, longrope) have other keys in a longer one, and read it anew each time.
    """

    def __init__(self, model: LoadedModel) -> None:
        """Args: the model. `anew` says whether it reads all each time."""
        self.model = model
        self.anew = any(layer.rope_type in ("dynamic", "longrope") for layer in model.geometry.layers)
        self._segments: list[Ids] = []
        self._logits: list[Tensor] = []
        self._last: HandOff | None = None

    def read(self, segments: Sequence[Ids]) -> HandOff:
        """The model's own cache of the segments, each with at least one token, and the logits after them."""
        if self.anew:
            return native(self.model, as_batch(joined(segments)))
        n_same = 0
        while n_same < min(len(segments), len(self._segments)) and segments[n_same] == self._segments[n_same]:
            n_same += 1
        known = self._after(n_same)
        if n_same < len(segments):
            del self._segments[n_same:], self._logits[n_same:]
        for segment in segments[n_same:]:
            known = (
                native(self.model, as_batch(segment)) if known is None else go_on(self.model, known, segment)
            )
            self._segments.append(segment)
            self._logits.append(known.logits)
            self._last = known
        assert known is not None, "there is at least one segment"
        return known

    def _after(self, n: int) -> HandOff | None:
        """What was known after the first n segments of those read; None before the first."""
        if self._last is None or n == 0:
            return None
        kv = self._last.kv.slice_tokens(0, len(joined(self._segments[:n])))
        return replace(self._last, kv=kv, logits=self._logits[n - 1])


def as_batch(ids: Ids) -> Tensor:
    """Ids as (1, tokens) int64."""
    return torch.tensor([list(ids)], dtype=torch.int64)


def go_on(model: LoadedModel, hand_off: HandOff, ids: Ids) -> HandOff:
    """The hand-off after more tokens, run by the model itself; the one given stays as it is."""
    logits, kv = forward(model, as_batch(ids), hand_off.kv)
    return replace(hand_off, kv=kv, logits=logits[:, -1], n_hold_back=hand_off.n_hold_back + len(ids))


@dataclass(frozen=True)
class Replying:
    """How an answer is made from a hand-off: greedily, up to a stop.

    Attributes:
        tokenizer: of the pair.
        max_new_tokens: at most.
        stop: texts that end it.
    """

    tokenizer: Any
    max_new_tokens: int
    stop: tuple[str, ...]

    def reply(self, model: LoadedModel, hand_off: HandOff) -> str:
        """The likeliest tokens up to the first stop or end of text, as text without white space around it.

        White space before the answer is no part of it, so a stop that is white space cannot end it there.
        """
        ends = end_of_text_ids(model, self.tokenizer)
        written: list[int] = []
        text = ""
        while len(written) < self.max_new_tokens:
            token = int(hand_off.logits[0].argmax())
            if token in ends:
                break
            written.append(token)
            text = self.tokenizer.decode(written, skip_special_tokens=True).lstrip()
            if cut_at(text, self.stop) != text:
                break
            if len(written) < self.max_new_tokens:
                hand_off = go_on(model, hand_off, (token,))
        return cut_at(text, self.stop).strip()


@dataclass(frozen=True)
class Said:
    """An answer, whose it is, and from how many tokens, of which how many mapped, it was made.

    Attributes:
        answer, answered_by, n_context, n_mapped, n_handed, n_left_out, n_source_read: see
            `kvmap.evaluation.conversation.TurnResult`.
    """

    answer: str
    answered_by: str
    n_context: int
    n_mapped: int
    n_handed: int = 0
    n_left_out: int = 0
    n_source_read: int = 0


class Speaker(Protocol):
    """What answers the turns of one arm."""

    def say(self, segments: Sequence[Ids]) -> Said:
        """The answer to the last of the segments. There is one for each turn so far."""


class OwnSpeaker:
    """A model that answers from its own cache; an answer to the same text is not made twice."""

    def __init__(self, role: str, reader: Reader, replying: Replying) -> None:
        """Args: `source` or `target`; its cache; how answers are made."""
        self.role, self.reader, self.replying = role, reader, replying
        self._said: dict[tuple[Ids, ...], Said] = {}

    def say(self, segments: Sequence[Ids]) -> Said:
        """See `Speaker.say`."""
        key = tuple(segments)
        if key not in self._said:
            answer = self.replying.reply(self.reader.model, self.reader.read(segments))
            self._said[key] = Said(answer, self.role, len(joined(segments)), 0)
        return self._said[key]


class HandedOver:
    """The target on a cache that it is handed: anew at every turn, or from one turn on."""

    def __init__(
        self,
        source: OwnSpeaker,
        target: LoadedModel,
        take: Callable[[Sequence[Ids]], Taken],
        replying: Replying,
        turn: int | None,
    ) -> None:
        """Args: who speaks before `turn`, and after it, and what it goes on from; None: at every turn."""
        self.source, self.target, self.take = source, target, take
        self.replying, self.turn = replying, turn
        self._held: Taken | None = None

    def say(self, segments: Sequence[Ids]) -> Said:
        """See `Speaker.say`."""
        if self.turn is not None and len(segments) < self.turn:
            return self.source.say(segments)
        if self.turn is None or self._held is None:
            self._held = self.take(segments)
            n_handed, n_source_read = self._held.n_context, self._held.n_source_read
        else:
            n_handed = n_source_read = 0
            self._held = replace(
                self._held,
                hand_off=go_on(self.target, self._held.hand_off, segments[-1]),
                n_context=self._held.n_context + len(segments[-1]),
            )
        held = self._held
        return Said(
            answer=self.replying.reply(self.target, held.hand_off),
            answered_by="target",
            n_context=held.n_context,
            n_mapped=held.hand_off.n_mapped,
            n_handed=n_handed,
            n_left_out=len(joined(segments)) - held.n_context,
            n_source_read=n_source_read,
        )
