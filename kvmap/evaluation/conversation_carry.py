"""What the target goes on from at the one hand-off of a conversation, and what that costs.

| carry | the text whose cache is handed over, before turn t |
|---|---|
| `everything` | story, all t − 1 questions and answers, question t |
| `artifacts` | story, the last answer alone, question t |
| `fresh` | story, question t |

The answers before t are the source's. A shorter text is another text: behind what it leaves out, each token
has another position and has read other tokens, so columns of the conversation's cache do not serve for it. Up
to there they do: attention is causal, and the story's columns are the same in all three. So the source reads
the last answer and the question behind its cache of the story, and that is mapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from kvmap.errors import KvmapError
from kvmap.evaluation.conversation_encoding import Ids, joined
from kvmap.mappers import Mapper
from kvmap.models.pair import ModelPair
from kvmap.transfer import HandOff, TransferOptions
from kvmap.transfer.cost import decoder_work, handoff_flops

if TYPE_CHECKING:
    from kvmap.evaluation.conversation import TurnResult

Row: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Carried:
    """The text that is handed over.

    Attributes:
        segments: its pieces; the source reads it so.
        n_known: of its first tokens, those that the source has in the cache of the conversation.
    """

    segments: tuple[Ids, ...]
    n_known: int

    @property
    def ids(self) -> Ids:
        """The text as one."""
        return joined(self.segments)


@dataclass(frozen=True)
class Taken:
    """A hand-off as the target takes it, and what of its text the source had to read for it.

    Attributes:
        hand_off: the target's cache of the text, and the logits after it.
        n_context: tokens of the text.
        n_source_read: of these, the ones that the source has not read before and whose columns are asked of
            it; the held-back tokens are not.
    """

    hand_off: HandOff
    n_context: int
    n_source_read: int


def carried_text(carry: str, segments: Sequence[Ids], opening: Ids, question: Ids, lead: Ids) -> Carried:
    """The text that is handed over at the turn that the last segment asks.

    Args:
        carry: one of `kvmap.evaluation.conversation_settings.CARRIES`.
        segments: of the conversation so far; the first is `opening` and a question, each later one the answer
            before it, as it stands in the text, and a question.
        opening: BOS and story; question: the last one. Segments begin and end with them.
        lead: what stands before an answer in the text.

    Raises:
        KvmapError: another `carry`.
    """
    if carry == "everything" or len(segments) == 1:
        return Carried(tuple(segments), len(joined(segments[:-1])))
    if carry not in ("artifacts", "fresh"):
        raise KvmapError(f"carry={carry!r}: expected everything, artifacts or fresh")
    answer = lead + segments[-1][: -len(question)] if carry == "artifacts" else ()
    return Carried((opening, answer + question), len(opening))


def carry_rows(
    results: Iterable[TurnResult],
    turn: int,
    carry: str,
    flops: Callable[[str, TurnResult], tuple[float, float]] | None = None,
) -> list[Row]:
    """What the hand-off took, by task and arm: means over conversations, at the turn of the hand-off.

    Args:
        results: of `evaluate_conversations`.
        turn: of the hand-off.
        carry: as it was held.
        flops: of an arm and its result at that turn: what the target and the source compute for the hand-off,
            each over what the target would for reading the whole conversation; None: not counted.

    Returns:
        Rows {task, arm, carry, turn, n, f1, f1_after, context_tokens, left_out_tokens, mapped_tokens,
        source_tokens, target_tokens, target_flop_share, source_flop_share} of every arm that is handed
        something. `f1` is of the turn itself, `f1_after` of all later ones (nan without any); the tokens are
        those of the text, of the conversation that it leaves out, of its mapped columns, of those that the
        source and that the target read for it.
    """
    handed: dict[tuple[str, str], list[TurnResult]] = {}
    later: dict[tuple[str, str], list[float]] = {}
    for result in results:
        key = result.task, result.arm
        if result.turn == turn and result.n_handed:
            handed.setdefault(key, []).append(result)
        elif result.turn > turn:
            later.setdefault(key, []).append(result.f1)
    return [
        {"task": task, "arm": arm, "carry": carry, "turn": turn, "n": len(found)}
        | _means(found)
        | {"f1_after": _mean(later.get((task, arm), ()))}
        | _shares([flops(arm, result) for result in found] if flops else [])
        for (task, arm), found in handed.items()
    ]


def flop_shares(
    pair: ModelPair, mapper: Mapper | None, result: TurnResult, options: TransferOptions
) -> tuple[float, float]:
    """FLOPs for one hand-off, the target's and the source's, over the target's for reading all that was said.

    ``target: hand_off(n) / read_t(m)``, ``source: (read_s(a) − read_s(a − r)) / read_t(m)``

    n tokens are handed over and m were said in all; the source is asked for the columns of the first
    a = n − hold_back, and has read all but r of them before. The map's own products are the target's. What
    they count is said at `kvmap.transfer.handoff_flops`.

    Args:
        pair: both models, in memory.
        mapper: of the arm; None: the target reads the text itself.
        result: at the turn of the hand-off.
        options: how the cache is handed over.
    """
    n_said = result.n_handed + result.n_left_out
    work = decoder_work(pair.target)
    whole = work.run(1, n_said) + 2 * work.logits
    if mapper is None:
        return (work.run(1, result.n_handed) + 2 * work.logits) / whole, 0.0
    n_asked = max(0, result.n_handed - options.hold_back)
    read = decoder_work(pair.source).run(n_asked - result.n_source_read + 1, n_asked)
    return handoff_flops(pair.target, mapper, result.n_handed, options).total / whole, read / whole


def _means(found: Sequence[TurnResult]) -> dict[str, float]:
    columns: Mapping[str, Callable[[TurnResult], float]] = {
        "f1": lambda result: result.f1,
        "context_tokens": lambda result: result.n_handed,
        "left_out_tokens": lambda result: result.n_left_out,
        "mapped_tokens": lambda result: result.n_mapped,
        "source_tokens": lambda result: result.n_source_read,
        "target_tokens": lambda result: result.n_handed - result.n_mapped,
    }
    return {name: _mean([value(result) for result in found]) for name, value in columns.items()}


def _shares(found: Sequence[tuple[float, float]]) -> dict[str, float]:
    return {
        f"{side}_flop_share": _mean([shares[place] for shares in found])
        for place, side in enumerate(("target", "source"))
    }


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else float("nan")
