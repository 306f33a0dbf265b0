"""What happens in a conversation, one dataclass each: as JSON by its fields, and as lines of text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, TypeAlias

Line: TypeAlias = tuple[str, str]
"""A line of text and its style, one of `STYLES`; the style shows on a terminal alone."""

STYLES = ("answer", "detail", "hand_off", "refusal", "plain")


@dataclass(frozen=True)
class Event:
    """Something that happened.

    Attributes:
        name: what JSON calls it, under `event`.
    """

    name: ClassVar[str] = "event"

    def record(self) -> dict[str, Any]:
        """The event as plain values for JSON."""
        return {"event": self.name, **asdict(self)}

    def lines(self) -> Iterator[Line]:
        """The event as text."""
        raise TypeError(f"{type(self).__name__} has no text")


@dataclass(frozen=True)
class Ready(Event):
    """Models and mapper are there.

    Attributes:
        source, target: names of the models.
        mapper: its kind.
        mapper_bytes: of its weights.
        fitted: whether it was fitted just now; False: it was found in the store.
        seconds: that it took to have both.
        verdict: of a preflight, where the mapper carries one.
        escalation: the rule in words.
    """

    name: ClassVar[str] = "ready"
    source: str
    target: str
    mapper: str
    mapper_bytes: int
    fitted: bool
    seconds: float
    verdict: str | None
    escalation: str

    def lines(self) -> Iterator[Line]:
        """See `Event.lines`."""
        had = "fitted now" if self.fitted else "found in the store"
        yield f"source {self.source}, target {self.target}", "plain"
        judged = f", preflight says {self.verdict}" if self.verdict else ""
        size = f"{self.mapper}, {readable_bytes(self.mapper_bytes)}"
        yield f"mapper {size}, {had} in {readable_seconds(self.seconds)}{judged}", "detail"
        yield f"escalation: {self.escalation}. /help lists the commands", "detail"


@dataclass(frozen=True)
class Told(Event):
    """A story begins a conversation.

    Attributes:
        text: the story.
        n_tokens: it has.
        suggestions: questions that it answers.
    """

    name: ClassVar[str] = "story"
    text: str
    n_tokens: int
    suggestions: tuple[str, ...] = ()

    def lines(self) -> Iterator[Line]:
        """See `Event.lines`."""
        yield f"story ({self.n_tokens} tokens): {self.text}", "plain"
        if self.suggestions:
            yield "it answers: " + "  ".join(self.suggestions), "detail"


@dataclass(frozen=True)
class Answered(Event):
    """A question was answered.

    Attributes:
        turn: of the conversation, from 1.
        question: as it stands in the text.
        answer: what was said, perhaps nothing.
        by: `source` or `target`.
        cache: `own`, or `mapped` where columns of the context are.
        first_token_probability: of the answer's first token.
        mean_probability: geometric mean over its tokens.
        seconds: from the question to the answer's end; a hand-off not counted.
        n_context: tokens that it was made from.
        n_mapped: of these, tokens whose columns are mapped.
        gold: the right answer, where it is known.
        stands: whether the conversation goes on from it; not so of what is only shown beside.
    """

    name: ClassVar[str] = "answer"
    turn: int
    question: str
    answer: str
    by: str
    cache: str
    first_token_probability: float
    mean_probability: float
    seconds: float
    n_context: int
    n_mapped: int
    gold: str | None = None
    stands: bool = True

    def lines(self) -> Iterator[Line]:
        """See `Event.lines`."""
        who = self.by if self.stands else f"{self.by}, beside it"
        whose = "its own cache" if self.cache == "own" else f"a cache with {self.n_mapped} mapped tokens"
        known = "" if self.gold is None else f"; the story says {self.gold}"
        yield f"{who}: {self.answer or '(nothing)'}", "answer" if self.stands else "plain"
        yield (
            f"  first token {self.first_token_probability:.2f}, mean {self.mean_probability:.2f}, "
            f"{readable_seconds(self.seconds)}, from {whose}, {self.n_context} tokens{known}",
            "detail",
        )


@dataclass(frozen=True)
class HandedOver(Event):
    """The conversation goes from the source to the target.

    Attributes:
        turn: whose question the target answers.
        why: what asked for it.
        status: `applied`; `fell_back` or `unsupported`: the target read the context itself.
        cause: of that in one word, see `kvmap.transfer.gate`; None where applied.
        reason: in one line, what the gate says.
        n_context: tokens of the conversation.
        n_mapped: of them, mapped; the others are the target's own, at the start and at the end.
        n_native_layers: first layers of the target that it ran itself over all tokens.
        n_layers: of the target.
        mapped_bytes: keys and values that were mapped, in the target's dtype.
        seconds: from the source's cache to the target's first logits; a canary is not counted.
        prefill_seconds: of the target's own reading of the same context, measured then and there.
        canary_kl_nats: mean KL of the target's own next-token distributions to those on the mapped cache,
            over the last tokens of the context; None where it was not measured.
    """

    name: ClassVar[str] = "hand_off"
    turn: int
    why: str
    status: str
    cause: str | None
    reason: str
    n_context: int
    n_mapped: int
    n_native_layers: int
    n_layers: int
    mapped_bytes: int
    seconds: float
    prefill_seconds: float
    canary_kl_nats: float | None

    def record(self) -> dict[str, Any]:
        """See `Event.record`; with `seconds_saved`."""
        return super().record() | {"seconds_saved": self.seconds_saved}

    @property
    def seconds_saved(self) -> float:
        """Against the re-prefill; negative where mapping took longer. Nothing where it was not applied."""
        return self.prefill_seconds - self.seconds if self.status == "applied" else 0.0

    def lines(self) -> Iterator[Line]:
        """See `Event.lines`."""
        yield f"hand-off ({self.why}): {self.status.replace('_', ' ')}", "hand_off"
        yield f"  gate: {self.reason}", "hand_off" if self.cause else "detail"
        if self.status != "applied":
            took = readable_seconds(self.prefill_seconds)
            yield f"  the target read all {self.n_context} tokens itself, in {took}", "detail"
            return
        layers = f"{self.n_layers - self.n_native_layers} of {self.n_layers} layers"
        yield (
            f"  mapped {self.n_mapped} of {self.n_context} tokens in {layers}, "
            f"{readable_bytes(self.mapped_bytes)}, in {readable_seconds(self.seconds)}",
            "detail",
        )
        outcome = "saved" if self.seconds_saved >= 0 else "lost"
        yield (
            f"  its own prefill takes {readable_seconds(self.prefill_seconds)}: "
            f"{readable_seconds(abs(self.seconds_saved))} {outcome}",
            "detail",
        )


@dataclass(frozen=True)
class WentBack(Event):
    """The source answers again, from its own cache.

    Attributes:
        n_tokens: that it read for it: what was said since the hand-off.
        seconds: that took.
    """

    name: ClassVar[str] = "back"
    n_tokens: int
    seconds: float

    def lines(self) -> Iterator[Line]:
        """See `Event.lines`."""
        read = f"read {self.n_tokens} tokens of what it missed, in {readable_seconds(self.seconds)}"
        yield f"back on the source, which {read}", "hand_off"


@dataclass(frozen=True)
class Note(Event):
    """Something to know.

    Attributes:
        text: its lines.
    """

    name: ClassVar[str] = "note"
    text: str

    def lines(self) -> Iterator[Line]:
        """See `Event.lines`."""
        for line in self.text.splitlines():
            yield line, "detail"


@dataclass(frozen=True)
class Refused(Event):
    """A line that could not be done; nothing has changed.

    Attributes:
        line: as it was read.
        message: what is wrong with it, and what would do.
    """

    name: ClassVar[str] = "refused"
    line: str
    message: str

    def lines(self) -> Iterator[Line]:
        """See `Event.lines`."""
        yield f"not done: {self.message}", "refusal"


@dataclass(frozen=True)
class Ended(Event):
    """The conversation is over; sums over all of it.

    Attributes:
        n_questions: asked.
        n_by_target: of them, whose answer that stands is the target's.
        n_hand_offs: made.
        n_applied: of them, with a mapped cache.
        n_mapped: tokens, over all of these.
        seconds: that mapping took.
        prefill_seconds: that the target's own reading would have taken in its place, as measured.
        n_compared: answers on a mapped cache that the native one was shown beside.
        n_agreed: of them, the same.
    """

    name: ClassVar[str] = "end"
    n_questions: int = 0
    n_by_target: int = 0
    n_hand_offs: int = 0
    n_applied: int = 0
    n_mapped: int = 0
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    n_compared: int = 0
    n_agreed: int = 0
    interrupted: bool = field(default=False)

    def lines(self) -> Iterator[Line]:
        """See `Event.lines`."""
        ended = "interrupted" if self.interrupted else "ended"
        yield f"{ended}: {self.n_questions} questions, {self.n_by_target} answered by the target", "plain"
        if self.n_hand_offs:
            yield f"  {self.n_applied} of {self.n_hand_offs} hand-offs applied", "detail"
        if self.n_applied:
            took, own = readable_seconds(self.seconds), readable_seconds(self.prefill_seconds)
            saved = self.prefill_seconds - self.seconds
            outcome = f"{readable_seconds(abs(saved))} {'saved' if saved >= 0 else 'lost'}"
            yield f"  {self.n_mapped} tokens mapped in {took}, own prefills {own}: {outcome}", "detail"
        if self.n_compared:
            yield f"  {self.n_agreed} of {self.n_compared} answers equal the native ones", "detail"


def readable_bytes(n: int) -> str:
    """`12 B`, `3.4 KiB`, `5.6 MiB`, `7.8 GiB`."""
    size, unit = float(n), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def readable_seconds(seconds: float) -> str:
    """`3.1 ms`, `12.4 s`."""
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"
