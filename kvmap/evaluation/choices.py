"""Multiple choice: which continuation is likeliest, and what greedy decoding says, for every arm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from kvmap.errors import KvmapError
from kvmap.evaluation.answers import Answers, item_key, lacking
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
from kvmap.evaluation.judging import ItemResult, judge
from kvmap.evaluation.limits import context_limit
from kvmap.evaluation.stopwatch import Stopwatch
from kvmap.mappers import Mapper
from kvmap.models.pair import LoadedModel, ModelPair
from kvmap.progress import track
from kvmap.transfer import HandOff, TransferOptions, continue_greedy, score_continuations


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
    answers: Mapping[str, Answers] | None = None,
    watch: Stopwatch | None = None,
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
        answers: what is kept of each arm's answers under these very settings: an arm is asked only what it
            has not answered yet, and what it answers is added before `on_batch` is called. An arm that is
            not named here is asked everything.
        watch: takes each arm's time: its hand-off made, and continued to every choice and answer.
        progress: wraps the loop over batches.
        on_batch: called with results as they are had, so that none is lost; first with those kept.

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
    keys = [question_key(item, ids, generation) for item, ids in zip(items, encoded, strict=True)]
    watch = watch or Stopwatch()
    books = {arm: (answers or {}).get(arm) or Answers.in_memory() for arm in usable}
    asked = _open_batches(books, keys, encoded, batch_size, pad_id_of(tokenizer))
    results = {
        (index, arm): judge(arm, items[index], encoded[index], *_said(row))
        for index, key in enumerate(keys)
        for arm, book in books.items()
        if (row := book.get(key)) is not None
    }
    if on_batch is not None and results:
        on_batch(list(results.values()))

    def keep(model: LoadedModel, batch: Batch, hand_offs: Iterable[tuple[str, HandOff]]) -> None:
        found: list[ItemResult] = []
        for arm, hand_off in watch.hand_offs(model, batch.index, hand_offs):
            rows = score_batch(model, arm, hand_off, batch, items, encoded, generation)
            books[arm].add({keys[index]: _kept(row) for index, row in zip(batch.index, rows, strict=True)})
            results.update({(index, arm): row for index, row in zip(batch.index, rows, strict=True)})
            found += rows
        if on_batch is not None and found:
            on_batch(found)

    def source_pass(batch: Batch) -> SourcePart:
        wanted = {arm: usable[arm] for arm in asked[batch]}
        if "source" not in wanted and all(mapper is None for mapper in wanted.values()):
            return SourcePart(None)
        kv, own = read_source(pair.source, batch, wanted, options, watch)
        if own is not None:
            keep(pair.source, batch, [("source", own)])
        return SourcePart(kv)

    @cache
    def on_target() -> dict[str, Mapper | None]:
        return placed(open_arms, pair.target)

    def target_pass(batch: Batch, part: SourcePart) -> None:
        wanted = {arm: on_target()[arm] for arm in asked[batch]}
        keep(pair.target, batch, target_hand_offs(pair.target, tokenizer, batch, wanted, part.cache, options))

    open_arms = {arm: mapper for arm, mapper in usable.items() if any(arm in arms for arms in asked.values())}
    if asked:
        run_passes(
            pair,
            list(asked),
            open_arms,
            source_pass,
            target_pass,
            sequential=sequential,
            progress=progress,
            description="evaluate items",
        )
    return [results[index, arm] for index in range(len(items)) for arm in usable]


def question_key(item: Item, encoded: EncodedItem, generation: Generation | None) -> str:
    """Hash of all that an arm is given of an item: the ids it reads and scores, and where an answer ends."""
    stops = None if generation is None else [*item.stop, *generation.stop]
    return item_key(encoded.context_ids, encoded.choice_ids, stops)


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
        judge(arm, question, item, tuple(scores), text, n_mapped)
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


def _single_tokens(tokenizer: Any, stops: Iterable[str]) -> set[int]:
    """Ids of the stops that are one token."""
    encoded = (tokenizer(stop, add_special_tokens=False)["input_ids"] for stop in stops)
    return {ids[0] for ids in encoded if len(ids) == 1 and ids[0] != tokenizer.unk_token_id}


def _open_batches(
    books: Mapping[str, Answers],
    keys: Sequence[str],
    encoded: Sequence[EncodedItem],
    batch_size: int,
    pad_id: int,
) -> dict[Batch, tuple[str, ...]]:
    """Batches of what some arm has not answered, the longest first, each with the arms that have not."""
    asked: dict[Batch, tuple[str, ...]] = {}
    for arms, numbers in lacking(books, keys).items():
        for batch in batches_of([encoded[number].context_ids for number in numbers], batch_size, pad_id):
            asked[replace(batch, index=tuple(numbers[row] for row in batch.index))] = arms
    return dict(sorted(asked.items(), key=lambda entry: -entry[0].input_ids.shape[1]))


def _kept(result: ItemResult) -> dict[str, Any]:
    """What an arm said, without what is made of it: the judgement is made anew each time."""
    return {"logliks": list(result.logliks), "generated": result.generated, "n_mapped": result.n_mapped}


def _said(row: Mapping[str, Any]) -> tuple[tuple[float, ...], str | None, int]:
    """Inverse of `_kept`."""
    return tuple(row["logliks"]), row["generated"], row["n_mapped"]
