"""How a conversation is held: who answers which turn, from what, and what stands in the text."""

from __future__ import annotations

from dataclasses import dataclass

from kvmap.errors import KvmapError

MODES = ("every_turn", "at_turn")
"""`every_turn`: at each turn the source reads the whole conversation so far, its cache is mapped, the target
answers. `at_turn`: the source answers the turns before the chosen one; there its cache is mapped, once, and
the target goes on from it with its own tokens on top ever after."""
FEEDS = ("generated", "gold")
CARRIES = ("everything", "artifacts", "fresh")
"""What the target goes on from at the one hand-off, see `kvmap.evaluation.conversation_carry`."""
RE_PREFILL = "re_prefill"
"""The arm that reads itself, at the hand-off, the text that the mapped arms are handed the cache of."""


@dataclass(frozen=True)
class ConversationSettings:
    """How conversations are held.

    Attributes:
        mode: one of `MODES`.
        turn: of the hand-off, from 1, under `at_turn`.
        carry: one of `CARRIES`; all but `everything` are of `at_turn` and of turns after the first.
        re_prefill: hold the conversations under `RE_PREFILL` too, under `at_turn`.
        feed: whether what an arm has `generated` or `gold` answers stand in the text of later turns.
        max_new_tokens: of an answer.
        stop: texts that end an answer, besides those of the conversation's form and the end of text.
    """

    mode: str = "every_turn"
    turn: int = 1
    feed: str = "generated"
    max_new_tokens: int = 24
    stop: tuple[str, ...] = ()
    carry: str = "everything"
    re_prefill: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be held.

        Raises:
            KvmapError: naming the setting, its value and what is expected.
        """
        choices = (("mode", self.mode, MODES), ("feed", self.feed, FEEDS), ("carry", self.carry, CARRIES))
        for name, value, known in choices:
            if value not in known:
                raise KvmapError(f"{name}={value!r}: expected one of {', '.join(known)}")
        for name, number in (("turn", self.turn), ("max_new_tokens", self.max_new_tokens)):
            if number < 1:
                raise KvmapError(f"{name}={number}: expected at least 1")
        if self.carry != "everything" and (self.mode != "at_turn" or self.turn == 1):
            raise KvmapError(
                f"carry={self.carry!r} leaves earlier turns out at one hand-off: expected mode='at_turn' and "
                f"a turn after the first, got mode={self.mode!r}, turn={self.turn}"
            )
        if self.re_prefill and self.mode != "at_turn":
            raise KvmapError(
                f"re_prefill=True: at every turn (mode={self.mode!r}) that is the target arm; expected "
                "mode='at_turn'"
            )

    @property
    def hand_off(self) -> int | None:
        """The turn of the one hand-off; None: there is one at every turn."""
        return self.turn if self.mode == "at_turn" else None

    @property
    def first_turn(self) -> int:
        """The first turn that is answered from a mapped cache."""
        return self.hand_off or 1
