"""Part of stage `evaluate`: the cache handed back and forth between the two models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvmap.errors import KvmapError
from kvmap.evaluation.relay import evaluate_relay
from kvmap.evaluation.relay_summary import summarise_relay
from kvmap.files import sha256_file
from kvmap.mappers import Mapper, check_identities, load_mapper
from kvmap.mappers.store import MANIFEST_NAME
from kvmap.metrics import Metric
from kvmap.models.pair import ModelPair
from kvmap.stages import plan
from kvmap.stages.context import Context
from kvmap.stages.evaluate import prefix_perplexity
from kvmap.stages.evaluate.book import answers_for, reuse_noted
from kvmap.stages.evaluate.ledger import kept
from kvmap.tracking import Run

PROTOCOL_VERSION = 1
OPPOSITE = {"up": "down", "down": "up"}


def run(ctx: Context, arms: Mapping[str, Mapper | KvmapError | None]) -> list[dict[str, Any]]:
    """Relay the perplexity's sequences: tables `relay` and `relay_sequences`, metrics to the run."""
    evaluation = ctx.cfg.evaluation
    if not evaluation.relay.hops:
        return []
    reverse_mapper, key = _reverse_mapper(ctx)
    ctx.run.note(relay={"reverse_mapper": key})
    answers = {"relay": answers_for(ctx, "relay", _protocol(ctx, key))}
    with kept(ctx, "relay_sequences") as ledger, reuse_noted(ctx, "relay", answers):
        results = evaluate_relay(
            ctx.pair,
            ctx.mapper,
            reverse_mapper,
            prefix_perplexity.blocks_of(ctx),
            prefix_tokens=evaluation.perplexity.prefix_tokens,
            n_hops=evaluation.relay.hops,
            options=ctx.options,
            batch_size=evaluation.batch_size,
            answers=answers["relay"],
            on_batch=lambda found: ledger.add(hop.row() for hop in found),
        )
        ledger.settle(hop.row() for hop in results)
    metrics, rows, table = summarise_relay(
        results, n_resamples=evaluation.bootstrap_samples, seed=evaluation.seed
    )
    ctx.run.table("relay", table)
    ctx.run.log(metrics)
    return rows


def _protocol(ctx: Context, reverse_mapper: str) -> dict[str, Any]:
    return {
        "name": "relay",
        "version": PROTOCOL_VERSION,
        "batch_size": ctx.cfg.evaluation.batch_size,
        "reverse_mapper": reverse_mapper,
    }


def _reverse_mapper(ctx: Context) -> tuple[Mapper, str]:
    """The mapper of the other direction, as given or fitted with the run's own settings; and its name.

    What is fitted is the mapper of a run with the other `direction`, found in the store if there was one.

    Raises:
        KvmapError: a given mapper of other models, or settings that do not fit the other direction.
    """
    given = ctx.cfg.evaluation.relay.reverse_mapper
    if given is not None:
        folder = Path(given).expanduser()
        mapper, manifest = load_mapper(folder)
        check_identities(manifest, ctx.pair.target_identity, ctx.pair.source_identity)
        return mapper, sha256_file(folder / MANIFEST_NAME)
    reverse = Context(replace(ctx.cfg, direction=OPPOSITE[ctx.cfg.direction]), _Unrecorded(ctx.run))
    plan.check(reverse)
    reverse.pair = ModelPair(ctx.pair.target, ctx.pair.source)
    return reverse.mapper, reverse.mapper_artifact.path.name


class _Unrecorded(Run):
    """Takes what a context says of the other direction and writes none of it: the record is of this run."""

    def __init__(self, run: Run) -> None:
        super().__init__(run.directory, run.study, run.config, "none")

    def note(self, **facts: Any) -> None:
        """Nothing is noted."""

    def log(self, metrics: Mapping[str, Metric]) -> None:
        """Nothing is logged."""

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> Path:
        """Nothing is written."""
        return self.directory / "tables" / f"{name}.csv"
