"""Part of stage `evaluate`: recall, perplexity and growth beyond the length that the mapper was fitted at."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

from kvmap.config.schema import LongContextConfig
from kvmap.data import TokenBlocks, check_disjoint, read_texts, token_blocks
from kvmap.errors import KvmapError
from kvmap.evaluation.answers import Answers
from kvmap.evaluation.arms import available, unavailable
from kvmap.evaluation.choices import evaluate_items
from kvmap.evaluation.growth import evaluate_growth
from kvmap.evaluation.judging import ItemResult
from kvmap.evaluation.limits import context_limit
from kvmap.evaluation.long_context import context_lengths, first_tokens
from kvmap.evaluation.long_context_summary import (
    growth_layer_rows,
    growth_rows,
    growth_sequence_rows,
    length_rows,
    long_context_metrics,
    needle_item_rows,
    needle_rows,
)
from kvmap.evaluation.needle import Needle, draw_needles, longest_answer
from kvmap.evaluation.perplexity import PerplexityResult, evaluate_perplexity
from kvmap.figures import long_context as figures
from kvmap.mappers import Mapper
from kvmap.stages.context import Context, text_spec
from kvmap.stages.evaluate.book import answers_for, reuse_noted

PROTOCOL_VERSION = 1
"""Goes up when an answer to the same ids under the same settings becomes another."""

Row: TypeAlias = dict[str, Any]
Arms: TypeAlias = Mapping[str, Mapper | KvmapError | None]

_logger = logging.getLogger(__name__)


def run(ctx: Context, arms: Arms) -> list[Row]:
    """Score every arm at several lengths; tables `needle`, `length` and `growth`, metrics and figures."""
    settings = ctx.cfg.evaluation.long_context
    asked = _LongContext(ctx, arms)
    by_length = settings.n_sequences > 0 and settings.continuation_tokens > 0
    grows = settings.n_sequences > 0 and settings.growth_tokens > 0
    rows: list[Row] = []
    if by_length or grows:
        asked.read_text()  # first, for text that is too short is better known before models have run
    if settings.n_needles:
        rows += asked.needles()
    if by_length:
        rows += asked.lengths()
    if grows:
        rows += asked.growth()
    return rows


class _LongContext:
    """The three questions of one run, and the material that they share."""

    def __init__(self, ctx: Context, arms: Arms) -> None:
        self.ctx, self.arms = ctx, arms
        self.evaluation = ctx.cfg.evaluation
        self.settings: LongContextConfig = ctx.cfg.evaluation.long_context
        self.calibration_tokens = ctx.cfg.calibration.sequence_length
        self.bootstrap = {"n_resamples": self.evaluation.bootstrap_samples, "seed": self.evaluation.seed}

    def read_text(self) -> TokenBlocks:
        """The sequences that lengths and growth share."""
        return self._blocks

    def needles(self) -> list[Row]:
        """Recall of one fact, by length, depth and arm."""
        tokenizer, settings = self.ctx.pair.tokenizer, self.settings
        found: list[tuple[Needle, ItemResult]] = []
        rows: list[Row] = []
        room = longest_answer(tokenizer, settings.kinds)
        for n_tokens in self._lengths("needles", settings.multiples, room):
            drawn = [
                needle
                for depth in settings.depths
                for needle in draw_needles(
                    tokenizer,
                    n_tokens=n_tokens,
                    depth=depth,
                    n=settings.n_needles,
                    kinds=settings.kinds,
                    seed=settings.seed,
                )
            ]
            found += self._answered(drawn, n_tokens)
            table, rows = needle_rows(
                found,
                calibration_tokens=self.calibration_tokens,
                unavailable=unavailable(self.arms),
                **self.bootstrap,
            )
            self._keep("needle", table)
            self.ctx.run.table("needle_items", needle_item_rows(found))
        self.ctx.run.figure("needle", figures.needle_heat_maps(table))
        return rows

    def _answered(self, drawn: Sequence[Needle], n_tokens: int) -> list[tuple[Needle, ItemResult]]:
        batch_size = self._batch_size(n_tokens)
        answers = self._answers({"name": "needle", "batch_size": batch_size})
        with reuse_noted(self.ctx, f"needle_{n_tokens}", answers):
            results = evaluate_items(
                self.ctx.pair,
                self.arms,
                [needle.item for needle in drawn],
                options=self.ctx.options,
                batch_size=batch_size,
                max_tokens=self._limit,
                generate=False,
                sequential=self.evaluation.sequential,
                answers=answers,
            )
        of_id = {needle.item.id: needle for needle in drawn}
        return [(of_id[result.id], result) for result in results]

    def lengths(self) -> list[Row]:
        """Perplexity of what follows a prefix, by its length and arm."""
        found: dict[int, Mapping[str, PerplexityResult]] = {}
        rows: list[Row] = []
        for n_tokens in self._prefix_lengths:
            batch_size = self._batch_size(n_tokens)
            answers = self._answers({"name": "length", "batch_size": batch_size, **self._native})
            with reuse_noted(self.ctx, f"length_{n_tokens}", answers):
                found[n_tokens] = evaluate_perplexity(
                    self.ctx.pair,
                    self.arms,
                    first_tokens(self._blocks, n_tokens + self.settings.continuation_tokens),
                    prefix_tokens=n_tokens,
                    options=self.ctx.options,
                    batch_size=batch_size,
                    sequential=self.evaluation.sequential,
                    answers=answers,
                )
            table, rows = length_rows(found, calibration_tokens=self.calibration_tokens, **self.bootstrap)
            self._keep("length", table)
            self.ctx.run.table(
                "length_sequences",
                [
                    {"prefix_tokens": length, **row}
                    for length, results in found.items()
                    for result in results.values()
                    for row in result.rows()
                ],
            )
        figure = figures.length_lines(table, self.calibration_tokens)
        self.ctx.run.figure("length", figure)
        return rows

    def growth(self) -> list[Row]:
        """What becomes of tokens that the target adds itself, by how many it has added."""
        n_tokens, batch_size = self._growth_prefix, self._batch_size(self._growth_prefix)
        answers = self._answers({"name": "growth", "batch_size": batch_size, **self._native})
        with reuse_noted(self.ctx, "growth", answers):
            found = evaluate_growth(
                self.ctx.pair,
                self.arms,
                first_tokens(self._blocks, n_tokens + self.settings.growth_tokens + 1),
                prefix_tokens=n_tokens,
                n_windows=self.settings.growth_windows,
                options=self.ctx.options,
                batch_size=batch_size,
                sequential=self.evaluation.sequential,
                answers=answers,
            )
        table, rows = growth_rows(found, **self.bootstrap)
        self._keep("growth", table)
        self.ctx.run.table("growth_layers", growth_layer_rows(found))
        self.ctx.run.table("growth_sequences", growth_sequence_rows(found))
        self.ctx.run.figure("growth", figures.growth_lines(table, n_tokens))
        return rows

    def _keep(self, name: str, table: Sequence[Row]) -> None:
        self.ctx.run.table(name, table)
        self.ctx.run.log(long_context_metrics(name, table))

    def _answers(self, protocol: Mapping[str, Any]) -> dict[str, Answers]:
        """What is kept of each arm under a protocol."""
        versioned = {"part": "long_context", "version": PROTOCOL_VERSION, **protocol}
        return {arm: answers_for(self.ctx, arm, versioned) for arm in available(self.arms)}

    @cached_property
    def _native(self) -> dict[str, Any]:
        """What every arm's predictions are compared with."""
        return {"native": self.ctx.conditions("target")}

    @cached_property
    def _limit(self) -> int:
        limit = context_limit(self.ctx.pair)
        return limit if self.evaluation.max_tokens is None else min(limit, self.evaluation.max_tokens)

    def _batch_size(self, n_tokens: int) -> int:
        """As many contexts as hold the tokens of `evaluation.batch_size` ones of the calibration length."""
        fitting = self.evaluation.batch_size * self.calibration_tokens // n_tokens
        return max(1, min(fitting, self.evaluation.batch_size))

    def _lengths(self, what: str, multiples: Sequence[float], room: int) -> tuple[int, ...]:
        """Context lengths that fit; those that do not are said to be shortened."""
        lengths, notes = context_lengths(self.calibration_tokens, multiples, limit=self._limit, room=room)
        for note in notes:
            _logger.warning("%s: %s", what, note)
        self.ctx.run.note(long_context={what: {"lengths": list(lengths), "shortened": list(notes)}})
        return lengths

    @cached_property
    def _prefix_lengths(self) -> tuple[int, ...]:
        # One more token for BOS, which `no_context` is fed before the continuation.
        return self._lengths("length", self.settings.multiples, self.settings.continuation_tokens + 1)

    @cached_property
    def _growth_prefix(self) -> int:
        return self._lengths("growth", [self.settings.growth_multiple], self.settings.growth_tokens + 1)[0]

    @cached_property
    def _blocks(self) -> TokenBlocks:
        """Sequences as long as the longest that is asked for, of text that calibration has not read."""
        settings, calibration = self.settings, self.ctx.cfg.calibration
        needed = []
        if settings.continuation_tokens:
            needed.append(max(self._prefix_lengths) + settings.continuation_tokens)
        if settings.growth_tokens:
            needed.append(self._growth_prefix + settings.growth_tokens + 1)
        length = max(needed)
        spec = text_spec(settings.data, length)
        skip = settings.data.skip
        if skip is None:
            skip = self.ctx.tokens.n_read if spec == text_spec(calibration.data, length) else 0
        blocks = token_blocks(
            read_texts(spec),
            self.ctx.pair.tokenizer,
            n_sequences=settings.n_sequences,
            length=length,
            packing=settings.packing,
            skip=skip,
            source=spec.describe(),
        )
        check_disjoint(self.ctx.tokens, blocks)
        text = {"source": blocks.source, "fingerprint": blocks.fingerprint, "skipped": skip}
        self.ctx.run.note(long_context={"text": text})
        return blocks
