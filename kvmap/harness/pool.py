"""Two models and all their arms: whatever one arm is asked, every arm answers in the same pass."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

from kvmap import __version__
from kvmap.errors import KvmapError
from kvmap.evaluation.answers import Answers, canonical_hash, lacking
from kvmap.evaluation.arms import (
    MAPPERLESS,
    Arms,
    Batch,
    Progress,
    SourcePart,
    available,
    batches_of,
    check_arms,
    pad_id_of,
    placed,
    read_source,
    run_passes,
    target_hand_offs,
    tokenizer_of,
    without_context,
)
from kvmap.evaluation.conditions import loaded_conditions
from kvmap.evaluation.limits import context_limit
from kvmap.harness.generation import generate
from kvmap.harness.requests import Generate, Request, Score
from kvmap.harness.scoring import score
from kvmap.mappers import Mapper
from kvmap.models.identity import fingerprint_state
from kvmap.models.pair import LoadedModel, ModelPair, Side
from kvmap.progress import track
from kvmap.transfer import HandOff, TransferOptions

PROTOCOL = {"name": "lm-eval requests", "version": 1}
"""Of how a request is answered. The version goes up when an answer to the same ids may change."""

Row: TypeAlias = dict[str, Any]
RequestT = TypeVar("RequestT", bound=Request)
Work: TypeAlias = Callable[[LoadedModel, HandOff, list[list[RequestT]], list[list[int]]], list[list[Row]]]
"""Of a model, its hand-off, the requests of each row and the ids each row has read: an answer to each."""


@dataclass
class Reading:
    """What was read so far.

    Attributes:
        n_contexts: contexts that some arm was asked about and had no answer kept for.
        n_source: contexts that the source read; each is read once, whatever the arms and requests.
    """

    n_contexts: int = 0
    n_source: int = 0


class Pool:
    """Loaded models shared by one lm-eval model per arm.

    lm-eval asks one arm after another. The first to be asked has the source read each context once and all
    arms answer from that; the others find their answers when they are asked the same.

    Attributes:
        pair: the two models, loaded on first use.
        arms: the arms that can be run, with their mappers.
        options: how a cache is transferred.
        tokenizer: a copy of the pair's, which lm-eval may give a padding token.
        limit: tokens of context and continuation together that both models take.
        batch_size: contexts at a time.
        reading: what was read so far.
    """

    def __init__(
        self,
        pair: ModelPair,
        arms: Arms,
        options: TransferOptions,
        *,
        batch_size: int = 1,
        max_tokens: int | None = None,
        sequential: bool = False,
        answers: Mapping[str, Answers] | None = None,
        model_conditions: Mapping[Side, Mapping[str, Any]] | None = None,
        progress: Progress = track,
    ) -> None:
        """Args:
            pair: source and target.
            arms: arm to mapper; see `kvmap.evaluation.arms`. Arms given as an error are left out.
            options: how a cache is transferred.
            batch_size: contexts at a time.
            max_tokens: a limit below what both models take; None: what they take.
            sequential: one model in memory at a time.
            answers: what is kept of each arm's answers; an arm not named here keeps them in memory.
            model_conditions: what each model answers by besides its identity, as `spec_conditions` knows it
                without reading weights; None: the models are loaded when `conditions` is asked for.
            progress: wraps the loop over batches.

        Raises:
            KvmapError: an arm without the mapper it needs, a pair without a tokenizer, or a limit of less
                than two tokens.
        """
        check_arms(arms)
        self.pair = pair
        self.arms = available(arms)
        self.options = options
        self.batch_size = batch_size
        self.tokenizer = copy.deepcopy(tokenizer_of(pair))
        self.limit = context_limit(pair) if max_tokens is None else min(max_tokens, context_limit(pair))
        if self.limit < 2:
            raise KvmapError(f"max_length={self.limit}: expected at least 2 tokens, one read and one scored")
        self.reading = Reading()
        self._sequential = sequential
        self._model_conditions = model_conditions
        self._progress = progress
        self._answers = {arm: (answers or {}).get(arm) or Answers.in_memory() for arm in self.arms}

    def scores(self, arm: str, requests: Sequence[Score]) -> list[Row]:
        """One row {loglikelihood, greedy, n_mapped} a request, in their order."""
        return self._answered(arm, requests, _score)

    def generations(self, arm: str, requests: Sequence[Generate]) -> list[Row]:
        """One row {ids, n_mapped} a request, in their order."""
        return self._answered(arm, requests, self._generate)

    def conditions(self, arm: str) -> dict[str, Any]:
        """All that determines an arm's answer to given ids, as JSON has it."""
        return {
            "kvmap": __version__,
            "protocol": PROTOCOL | {"batch_size": self.batch_size},
            "arm": arm,
            "source": self._content("source"),
            "target": self._content("target"),
            "mapper": _mapper_content(self.arms[arm]),
            "transfer": None if arm in MAPPERLESS else asdict(self.options),
            "hold_back": self.options.hold_back,
        }

    def _content(self, side: Side) -> dict[str, Any]:
        """A model without its name (the same weights under another path answer the same), and what it
        answers by: attention, device, ends of text, repetition penalty, versions.
        """
        identity = self.pair.source_identity if side == "source" else self.pair.target_identity
        own = {key: value for key, value in asdict(identity).items() if key != "name"}
        if self._model_conditions is not None:
            return own | dict(self._model_conditions[side])
        return own | loaded_conditions(self.pair.source if side == "source" else self.pair.target)

    def keep_answers(self, arm: str, answers: Answers) -> None:
        """Where this arm's answers are kept from now on."""
        self._answers[arm] = answers

    def _answered(self, arm: str, requests: Sequence[RequestT], work: Work[RequestT]) -> list[Row]:
        if arm not in self.arms:
            raise KvmapError(f"arm {arm!r} cannot be run here; these can: {', '.join(self.arms)}")
        distinct = list({request.key: request for request in requests}.values())
        for arms, numbers in lacking(self._answers, [request.key for request in distinct]).items():
            self._ask({name: self.arms[name] for name in arms}, [distinct[n] for n in numbers], work)
        rows = (self._answers[arm].get(request.key) for request in requests)
        return [row for row in rows if row is not None]

    def _ask(
        self, arms: Mapping[str, Mapper | None], requests: Sequence[RequestT], work: Work[RequestT]
    ) -> None:
        """Reads each context once and keeps what every one of these arms answers, batch by batch."""
        contexts: dict[tuple[int, ...], list[RequestT]] = {}
        for request in requests:
            contexts.setdefault(request.context, []).append(request)
        asked = list(contexts.values())
        self.reading.n_contexts += len(asked)

        def keep(model: LoadedModel, batch: Batch, arm: str, hand_off: HandOff) -> None:
            rows = [asked[index] for index in batch.index]
            read = self._read(arm, batch)
            answers = work(model, hand_off, rows, read)
            kept = {}
            for of_row, said, n_mapped in zip(rows, answers, hand_off.n_mapped_of_row, strict=True):
                for request, answer in zip(of_row, said, strict=True):
                    kept[request.key] = answer | {"n_mapped": n_mapped}
            self._answers[arm].add(kept)

        def source_pass(batch: Batch) -> SourcePart:
            self.reading.n_source += len(batch.index)
            kv, own = read_source(self.pair.source, batch, arms, self.options)
            if own is not None:
                keep(self.pair.source, batch, "source", own)
            return SourcePart(kv)

        def target_pass(batch: Batch, part: SourcePart) -> None:
            ours = {arm: self._placed[arm] for arm in arms}
            target = self.pair.target
            for arm, hand_off in target_hand_offs(
                target, self.tokenizer, batch, ours, part.cache, self.options
            ):
                keep(target, batch, arm, hand_off)

        run_passes(
            self.pair,
            batches_of(list(contexts), self.batch_size, pad_id_of(self.tokenizer)),
            arms,
            source_pass,
            target_pass,
            sequential=self._sequential,
            progress=self._progress,
            description="lm-eval requests",
        )

    def _read(self, arm: str, batch: Batch) -> list[list[int]]:
        if arm != "no_context":
            return batch.rows()
        return without_context(batch, self.tokenizer, self.options.hold_back).rows()

    @cached_property
    def _placed(self) -> dict[str, Mapper | None]:
        return placed(self.arms, self.pair.target)

    def _generate(
        self, model: LoadedModel, hand_off: HandOff, asked: list[list[Generate]], read: list[list[int]]
    ) -> list[list[Row]]:
        """Every context's first request together, then every context's second."""
        answers: list[list[Row]] = [[] for _ in asked]
        for number in range(max(len(requests) for requests in asked)):
            rows = [row for row, requests in enumerate(asked) if number < len(requests)]
            chosen = hand_off if len(rows) == len(asked) else hand_off.select_rows(rows)
            requests = [asked[row][number] for row in rows]
            written = generate(model, self.tokenizer, chosen, requests, [read[row] for row in rows])
            for row, ids in zip(rows, written, strict=True):
                answers[row].append({"ids": ids})
        return answers


def _score(
    model: LoadedModel, hand_off: HandOff, asked: list[list[Score]], read: list[list[int]]
) -> list[list[Row]]:
    scored = score(model, hand_off, [[request.continuation for request in row] for row in asked])
    return [[asdict(answer) for answer in row] for row in scored]


def _mapper_content(mapper: Mapper | None) -> dict[str, str] | None:
    if mapper is None:
        return None
    return {
        "kind": mapper.kind,
        "settings": canonical_hash(mapper.settings()),
        "tensors": fingerprint_state(mapper.tensors()),
    }
