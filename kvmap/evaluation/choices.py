"""Multiple choice: which continuation is likeliest, and what greedy decoding says, for every arm."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from kvmap.errors import KvmapError
from kvmap.evaluation.arms import (
    Arms,
    Batch,
    Progress,
    SourcePart,
    available,
    batches_of,
    check_arms,
    check_something_maps,
    pad_id_of,
    placed,
    read_source,
    run_passes,
    target_hand_offs,
    tokenizer_of,
)
from kvmap.evaluation.encoding import EncodedItem, encode_item
from kvmap.evaluation.items import Item
from kvmap.evaluation.limits import context_limit
from kvmap.mappers import Mapper
from kvmap.models.pair import LoadedModel, ModelPair
from kvmap.progress import track
from kvmap.transfer import HandOff, TransferOptions, continue_greedy, score_continuations


@dataclass(frozen=True)
class ItemResult:
    """One item under one arm.

    Attributes:
        task: the item's task.
        id: the item's id; results of different arms and runs are paired by (task, id).
        arm: which arm.
        answer: index of the right choice.
        logliks: per choice, the summed log-likelihood of its tokens, nats.
        predicted: the likeliest choice; −1 where a log-likelihood is not a number.
        correct: whether that is the answer.
        predicted_norm: the likeliest per character, as lm-eval's acc_norm.
        correct_norm: whether that is the answer.
        generated: the greedy continuation up to the item's stop; None where none was asked for.
        generated_correct: whether it starts with the right choice; None where none was asked for.
        n_context: context tokens read.
        n_truncated: context tokens cut off on the left, the same for every arm.
        n_mapped: context tokens that were mapped; 0 where the model read all of them itself, also under an
            arm with a mapper if `native_head` and `hold_back` cover this context.
    """

    task: str
    id: str
    arm: str
    answer: int
    logliks: tuple[float, ...]
    predicted: int
    correct: bool
    predicted_norm: int
    correct_norm: bool
    generated: str | None
    generated_correct: bool | None
    n_context: int
    n_truncated: int
    n_mapped: int = 0

    def row(self) -> dict[str, Any]:
        """The result as one row of a table; log-likelihoods joined by spaces."""
        fields = dict(self.__dict__)
        fields["logliks"] = " ".join(f"{value:.6f}" for value in self.logliks)
        return fields


@dataclass(frozen=True)
class Generation:
    """How greedy answers are made; None in its place makes none.

    Attributes:
        tokenizer: of the pair.
        max_new_tokens: tokens at most.
        stop: texts that end an answer, besides the item's own and the end of text.
    """

    tokenizer: Any
    max_new_tokens: int = 8
    stop: tuple[str, ...] = ()


def evaluate_items(
    pair: ModelPair,
    arms: Arms,
    items: Sequence[Item],
    *,
    options: TransferOptions,
    batch_size: int = 8,
    max_tokens: int | None = None,
    generate: bool = True,
    max_new_tokens: int = 8,
    stop: Sequence[str] = (),
    sequential: bool = False,
    progress: Progress = track,
    on_batch: Callable[[list[ItemResult]], None] | None = None,
) -> list[ItemResult]:
    """Scores every item under every arm.

    A choice's score is the sum of log p(token | context, earlier tokens of the choice), computed in float32
    from one hand-off per arm whose cache never grows. All arms read the same truncated ids.

    Args:
        pair: source and target.
        arms: arm to mapper; see `kvmap.evaluation.arms`. Arms given as an error are left out here:
            report them with `unavailable(arms)`.
        items: the questions.
        options: how a cache is transferred.
        batch_size: contexts at a time.
        max_tokens: room for context and continuation together; None: what both models take.
        generate: also decode greedily.
        max_new_tokens: of a greedy answer.
        stop: where greedy answers end, besides each item's own stops.
        sequential: one model in memory at a time.
        progress: wraps the loop over batches.
        on_batch: called with the results of each batch as they are had, so that none is lost.

    Returns:
        Results by item, then by arm, in the order given.

    Raises:
        KvmapError: an arm without the mapper it needs, a pair without a tokenizer, two items of one task and
            id, an item that cannot be encoded, or contexts so short that no arm would map anything.
    """
    check_arms(arms)
    check_distinct(items)
    usable = available(arms)
    if not items or not usable:
        return []
    limit = context_limit(pair) if max_tokens is None else min(max_tokens, context_limit(pair))
    tokenizer = tokenizer_of(pair)
    generation = Generation(tokenizer, max_new_tokens, tuple(stop)) if generate else None
    reserve = max_new_tokens if generate else 0
    encoded = [encode_item(tokenizer, item, limit, reserve=reserve) for item in items]
    check_something_maps(usable, (len(item.context_ids) for item in encoded), options)
    batches = batches_of([item.context_ids for item in encoded], batch_size, pad_id_of(tokenizer))
    results: dict[tuple[int, str], ItemResult] = {}

    def keep(model: LoadedModel, batch: Batch, hand_offs: Iterable[tuple[str, HandOff]]) -> None:
        found: list[ItemResult] = []
        for arm, hand_off in hand_offs:
            rows = score_batch(model, arm, hand_off, batch, items, encoded, generation)
            results.update({(index, arm): row for index, row in zip(batch.index, rows, strict=True)})
            found += rows
        if on_batch is not None and found:
            on_batch(found)

    def source_pass(batch: Batch) -> SourcePart:
        kv, own = read_source(pair.source, batch, usable, options)
        if own is not None:
            keep(pair.source, batch, [("source", own)])
        return SourcePart(kv)

    @cache
    def on_target() -> dict[str, Mapper | None]:
        return placed(usable, pair.target)

    def target_pass(batch: Batch, part: SourcePart) -> None:
        hand_offs = target_hand_offs(pair.target, tokenizer, batch, on_target(), part.cache, options)
        keep(pair.target, batch, hand_offs)

    run_passes(
        pair,
        batches,
        usable,
        source_pass,
        target_pass,
        sequential=sequential,
        progress=progress,
        description="evaluate items",
    )
    return [results[index, arm] for index in range(len(items)) for arm in usable]


def check_distinct(items: Iterable[Item]) -> None:
    """Refuses two items of one task and id: results are paired by them.

    Raises:
        KvmapError: names the task and the id.
    """
    seen: set[tuple[str, str]] = set()
    for item in items:
        if (item.task, item.id) in seen:
            raise KvmapError(
                f"task {item.task!r} has two items with the id {item.id!r}, so their results could not be "
                "told apart. A file's name is its task: if two question files have one name, rename one"
            )
        seen.add((item.task, item.id))


def score_batch(
    model: LoadedModel,
    arm: str,
    hand_off: HandOff,
    batch: Batch,
    items: Sequence[Item],
    encoded: Sequence[EncodedItem],
    generation: Generation | None,
) -> list[ItemResult]:
    """Scores all choices of a batch of items from one hand-off, and decodes greedily from the same one."""
    questions = [items[index] for index in batch.index]
    ids = [encoded[index] for index in batch.index]
    logliks = score_choices(model, hand_off, [item.choice_ids for item in ids])
    texts: list[str | None] = [None] * len(questions)
    if generation is not None:
        texts = list(generate_texts(model, hand_off, questions, generation))
    return [
        _judge(arm, question, item, tuple(scores), text, n_mapped)
        for question, item, scores, text, n_mapped in zip(
            questions, ids, logliks, texts, hand_off.n_mapped_of_row, strict=True
        )
    ]


def score_choices(
    model: LoadedModel, hand_off: HandOff, choice_ids: Sequence[Sequence[Sequence[int]]]
) -> list[list[float]]:
    """Summed log-likelihood of every choice of every row.

    Args:
        model: the model that continues.
        hand_off: its cache and first logits, one row per item; left as it is.
        choice_ids: per row, per choice, the tokens.
    """
    scores: list[list[float]] = [[] for _ in choice_ids]
    for number in range(max(len(choices) for choices in choice_ids)):
        rows = [row for row, choices in enumerate(choice_ids) if number < len(choices)]
        chosen = hand_off if len(rows) == len(choice_ids) else hand_off.select_rows(rows)
        per_token = score_continuations(model, chosen, [list(choice_ids[row][number]) for row in rows])
        for row, log_probs in zip(rows, per_token, strict=True):
            scores[row].append(float(log_probs.double().sum()))
    return scores


def generate_texts(
    model: LoadedModel, hand_off: HandOff, items: Sequence[Item], generation: Generation
) -> list[str]:
    """Greedy answers, each cut at its own item's stops.

    Decoding stops early only at tokens that end every row's answer; what a row wrote past its own stop is cut
    off afterwards, so that an answer does not depend on the other rows of its batch.
    """
    tokenizer = generation.tokenizer
    stops = [(*item.stop, *generation.stop) for item in items]
    shared = set(stops[0]).intersection(*stops[1:])
    stop_ids = {*end_of_text_ids(model, tokenizer), *_single_tokens(tokenizer, shared)}
    written = continue_greedy(model, hand_off, generation.max_new_tokens, tuple(sorted(stop_ids)))
    return [
        cut_at(tokenizer.decode(ids, skip_special_tokens=True), own)
        for ids, own in zip(written, stops, strict=True)
    ]


def end_of_text_ids(model: LoadedModel, tokenizer: Any) -> set[int]:
    """Every id that ends a text for this model: of its generation config, and of its tokenizer."""
    config = getattr(model.model, "generation_config", None)
    named = getattr(config, "eos_token_id", None)
    ids = set(named if isinstance(named, (list, tuple)) else [named])
    ids.add(tokenizer.eos_token_id)
    return {int(special) for special in ids if special is not None}


def cut_at(text: str, stops: Iterable[str]) -> str:
    """The text up to the first stop in it."""
    ends = [text.find(stop) for stop in stops if stop]
    return text[: min((end for end in ends if end >= 0), default=len(text))]


def starts_with_answer(text: str, choices: Sequence[str], answer: int) -> bool:
    """Whether a generated text starts with the right choice.

    White space counts as single spaces. The choice must end where a word ends, and where the text starts
    with several choices (`two`, `two hours`) the longest of them is meant.
    """
    said = " ".join(text.split())
    plain = [" ".join(choice.split()) for choice in choices]
    begun = [
        number
        for number, choice in enumerate(plain)
        if said.startswith(choice)
        and not (said[len(choice) : len(choice) + 1].isalnum() and choice[-1:].isalnum())
    ]
    return bool(begun) and plain[max(begun, key=lambda number: len(plain[number]))] == plain[answer]


def _single_tokens(tokenizer: Any, stops: Iterable[str]) -> set[int]:
    """Ids of the stops that are one token."""
    encoded = (tokenizer(stop, add_special_tokens=False)["input_ids"] for stop in stops)
    return {ids[0] for ids in encoded if len(ids) == 1 and ids[0] != tokenizer.unk_token_id}


def _judge(
    arm: str,
    item: Item,
    encoded: EncodedItem,
    logliks: tuple[float, ...],
    text: str | None,
    n_mapped: int = 0,
) -> ItemResult:
    predicted = _likeliest(logliks)
    per_character = [
        score / max(1, len(choice.strip())) for score, choice in zip(logliks, item.choices, strict=True)
    ]
    predicted_norm = _likeliest(per_character)
    return ItemResult(
        task=item.task,
        id=item.id,
        arm=arm,
        answer=item.answer,
        logliks=logliks,
        predicted=predicted,
        correct=predicted == item.answer,
        predicted_norm=predicted_norm,
        correct_norm=predicted_norm == item.answer,
        generated=text,
        generated_correct=None if text is None else starts_with_answer(text, item.choices, item.answer),
        n_context=len(encoded.context_ids),
        n_truncated=encoded.n_truncated,
        n_mapped=n_mapped,
    )


def _likeliest(scores: Sequence[float]) -> int:
    """Index of the highest score, the first of equals; −1 where one is not a number."""
    if any(math.isnan(score) for score in scores):
        return -1
    return max(range(len(scores)), key=lambda number: scores[number])
