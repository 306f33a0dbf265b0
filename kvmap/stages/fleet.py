"""Stage `fleet`: one trace of each model, the mapper of every ordered pair, and what each way round is worth.

The run's own pair has no part in it, but that its source's settings hold for what `fleet` leaves unsaid.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import permutations
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias

import torch
from torch import Tensor

from kvmap.artifacts import content_key
from kvmap.config import ConfigError
from kvmap.config.fleet_rules import fleet_models
from kvmap.config.schema import Config, ModelConfig, PairConfig
from kvmap.diagnostics.reconstruction import r2_rows
from kvmap.fit.features import KINDS, Recipe
from kvmap.fleet.fold import folded_recipe
from kvmap.fleet.judge import Judged, judge, relayed
from kvmap.fleet.routes import Route, best_relays, hubs, route_row, routes_into
from kvmap.fleet.traces import PairedTraces, Trace, read_trace
from kvmap.mappers import LinearMapper, Mapper
from kvmap.metrics import Metric
from kvmap.models.cache import KVCache
from kvmap.models.load import load_tokenizer
from kvmap.models.pair import ModelPair
from kvmap.models.spec import ModelSpec
from kvmap.models.tokenization import TokenizerMismatch, check_tokenizers
from kvmap.progress import track
from kvmap.stages.calibrate import peak_bytes
from kvmap.stages.context import Context
from kvmap.stages.plan.mistakes import geometry_mistakes, length_mistakes, memory_mistakes, row_mistakes

Pair: TypeAlias = tuple[str, str]
Parts: TypeAlias = list[tuple[int, list[int]]]
Row: TypeAlias = dict[str, Any]

TRACES, WAITING = "traces", "trace"
PAIR_STAGES = ["calibrate", "fit"]
MEASURES = ("kl_nats", "top1_agreement", "context_carried", "key_r2", "value_r2")


def run(ctx: Context) -> None:
    """Trace, fit, judge; tables `fleet_models`, `fleet_mappers`, `fleet_routes`, `fleet_best_relays`,
    `fleet_hubs`; their headline numbers as metrics.

    Raises:
        ConfigError: every setting that the models' geometries contradict.
        TokenizerMismatch: naming the two models of the fleet that do not read the same ids.
    """
    fleet = Fleet(ctx)
    fleet.check()
    models = fleet.trace()
    mappers = [fleet.mapper_row(*pair) for pair in track(list(fleet.pairs), len(fleet.pairs), "fleet: fit")]
    sizes = {(row["source"], row["target"]): int(row["weights_bytes"]) for row in mappers}
    routes = fleet.route_rows()
    relays, by_hub = best_relays(routes, sizes), hubs(fleet.names, routes, sizes)
    for name, rows in (
        ("models", models),
        ("mappers", mappers),
        ("routes", routes),
        ("best_relays", relays),
        ("hubs", by_hub),
    ):
        if rows:
            ctx.run.table(f"fleet_{name}", rows)
    ctx.run.log(_metrics(mappers, routes, relays, by_hub))


@dataclass(frozen=True)
class Member:
    """One model of the fleet: its name in tables, its settings, and where it stands in the configuration."""

    name: str
    settings: ModelConfig
    key: str


class Fleet:
    """The models of a run's fleet, their traces, and a context for each ordered pair of them."""

    def __init__(self, ctx: Context) -> None:
        """Args: the context of the run, whose store, record and settings are those of all pairs."""
        self.ctx = ctx
        settings = fleet_models(ctx.cfg)
        names = names_of([model.id for model in settings])
        self.members = {
            name: Member(name, model, f"fleet[{number}]")
            for number, (name, model) in enumerate(zip(names, settings, strict=True))
        }
        self._traces: dict[str, Trace] = {}
        self._recipes: dict[Pair, Recipe] = {}

    @property
    def names(self) -> list[str]:
        """Of all models, in the order of the configuration."""
        return list(self.members)

    @cached_property
    def pairs(self) -> dict[Pair, Context]:
        """A context for each ordered pair: what a run of that pair alone would have, and the same keys."""
        return {
            (source, target): _pair_context(self.ctx, self.members[source], self.members[target])
            for source, target in permutations(self.names, 2)
        }

    @cached_property
    def first(self) -> Context:
        """Of any pair: text, splits and tokenizer are those of all."""
        return next(iter(self.pairs.values()))

    def check(self) -> None:
        """Refuse what cannot work before any weights load.

        Raises:
            ConfigError: every mistake of every pair, once.
            TokenizerMismatch: naming both models.
        """
        judges = (geometry_mistakes, length_mistakes, row_mistakes, memory_mistakes)
        mistakes = [line for judged in judges for pair in self.pairs.values() for line in judged(pair)]
        if mistakes:
            raise ConfigError(dict.fromkeys(mistakes))
        first, *others = self.members.values()
        own = load_tokenizer(self.first.specs["source"])
        for other in others:
            try:
                check_tokenizers(own, load_tokenizer(self.pairs[first.name, other.name].specs["target"]))
            except TokenizerMismatch as error:
                raise TokenizerMismatch(
                    f"{first.key}={first.settings.id} and {other.key}={other.settings.id} do not read the "
                    f"same ids: {error} A fleet shares one tokenizer; leave one of them out"
                ) from error

    def trace(self) -> list[Row]:
        """Every model reads the calibration text, alone in memory, unless a run has kept its trace.

        Returns:
            Rows {model, id, n_layers, trace_bytes, reused}.
        """
        rows = []
        tokens = self.first.tokens
        for pair in self.pairs.values():
            pair.tokens = tokens
        for member in track(list(self.members.values()), len(self.members), "fleet: trace"):
            ctx, role = self._as_part(member.name)
            spec = {"model": ctx.content(role), "tokens": tokens.fingerprint}
            waiting = ctx.store.root / "spill" / content_key(WAITING, {"batch": self._batch} | spec)
            read = partial(self._read, ctx.specs[role], tokens.input_ids, waiting)
            artifact = ctx.store.get_or_build(TRACES, spec, read)
            shutil.rmtree(waiting, ignore_errors=True)
            self._traces[member.name] = trace = Trace.open(artifact.path)
            geometry = ctx.geometries[role]
            n_layers = None if geometry is None else geometry.n_layers
            rows.append(
                {
                    "model": member.name,
                    "id": member.settings.id,
                    "n_layers": n_layers,
                    "trace_bytes": sum(trace.path(start).stat().st_size for start, _ in trace.batches),
                    "reused": float(not artifact.built),
                }
            )
        for (source, target), ctx in self.pairs.items():
            ctx.calibrated.captures = PairedTraces.of(self._traces[source], self._traces[target])
        return rows

    def _read(self, spec: ModelSpec, input_ids: Tensor, waiting: Path, folder: Path) -> None:
        layerwise = self.ctx.cfg.calibration.layerwise
        wanted = None if layerwise == "auto" else bool(layerwise)
        read_trace(spec, input_ids, folder, waiting, batch_size=self._batch, layerwise=wanted)

    def mapper_row(self, source: str, target: str) -> Row:
        """Fit or find one mapper: its size, and its R² over the whole held-out split where moments tell."""
        ctx = self.pairs[source, target]
        mapper = ctx.mapper
        row: Row = {"source": source, "target": target, "n_weights": mapper.n_weights}
        row |= {"weights_bytes": mapper.nbytes, "reused": float(not ctx.mapper_artifact.built)}
        if type(mapper) is LinearMapper:
            self._recipes[source, target] = mapper.recipe
        if hasattr(mapper, "linear_weights"):
            found = r2_rows(mapper, ctx.moments, ("held_out",))
            for kind in KINDS:
                row[f"held_out_{kind}_r2"] = fmean(r["r2"] for r in found if r["kind"] == kind)
        self._forget(ctx)
        return row

    def judged(self) -> Iterator[tuple[Route, list[Judged]]]:
        """Every route, on held-out sequences; one model in memory at a time, and two mappers."""
        numbers = self.first.calibrated.splits["held_out"][: self.ctx.cfg.diagnostics.n_sequences]
        for target in track(self.names, len(self.names), "fleet: judge"):
            ctx, role = self._as_part(target)
            models = ModelPair(ctx.specs[role], ctx.specs[role])
            for last in self.names:
                if last != target:
                    yield from self._judged_by(models, last, target, numbers).items()
            models.release("source")
            models.release("target")

    def _judged_by(
        self, models: ModelPair, last: str, target: str, numbers: list[int]
    ) -> dict[Route, list[Judged]]:
        """All routes whose last step is last -> target."""
        mapper = self._mapper(last, target).to(models.target.device)
        routes = routes_into(self.names, last, target)
        found: dict[Route, list[Judged]] = {route: [] for route in routes}
        parts = self._traces[target].parts(sorted(numbers))
        sources = {route: self._sources(route, parts) for route in routes}
        for number, (start, members) in enumerate(parts):
            judged = judge(
                models.target,
                models.tokenizer,
                mapper,
                {route: caches[number] for route, caches in sources.items()},
                self._traces[target].load(start, members),
                self.first.tokens.input_ids[members],
                prefix_tokens=self._prefix_tokens,
                options=self.ctx.options,
            )
            for route, results in judged.items():
                found[route] += results
        return found

    def _sources(self, route: Route, parts: Parts) -> list[KVCache]:
        """What the last mapper of a route reads, of each part's sequences: the prefix alone."""
        last = route.via or route.source
        own = [self._prefix(last, *part) for part in parts]
        if route.via is None:
            return own
        mapper, rope = self._mapper(route.source, route.via), self.ctx.cfg.rope.strategy
        given = (self._prefix(route.source, *part) for part in parts)
        return [relayed(kv, mapper, middle, rope) for kv, middle in zip(given, own, strict=True)]

    def _prefix(self, name: str, start: int, members: list[int]) -> KVCache:
        return self._traces[name].load(start, members).slice_tokens(0, self._prefix_tokens)

    @property
    def _prefix_tokens(self) -> int:
        return self.ctx.cfg.calibration.sequence_length // 2

    def route_rows(self) -> list[Row]:
        """The measures of all routes, by source, target and way, in the order of the configuration; and the
        bytes of one map in place of two where both are linear.
        """
        settings = self.ctx.cfg.evaluation
        rows = {
            route: route_row(route, judged, n_resamples=settings.bootstrap_samples, seed=settings.seed)
            | {"folded_bytes": self._folded_bytes(route)}
            for route, judged in self.judged()
        }
        place = {name: number for number, name in enumerate(["", *self.names])}
        order = sorted(
            rows, key=lambda route: [place[n or ""] for n in (route.source, route.target, route.via)]
        )
        return [rows[route] for route in order]

    def _folded_bytes(self, route: Route) -> int | None:
        if route.via is None or not all(step in self._recipes for step in route.steps):
            return None
        first, second = (self._recipes[step] for step in route.steps)
        recipe = folded_recipe(first, second)
        n_weights = sum(
            recipe.n_features(kind, layer) * n_heads * head_dim
            for kind in KINDS
            for layer, (n_heads, head_dim) in enumerate(recipe.target_shape)
        )
        return n_weights * getattr(torch, self.ctx.cfg.mapper.dtype).itemsize

    def _mapper(self, source: str, target: str) -> Mapper:
        """Read from the store each time, so that few are held at once."""
        ctx = self.pairs[source, target]
        mapper = ctx.mapper
        self._forget(ctx)
        return mapper

    @staticmethod
    def _forget(ctx: Context) -> None:
        ctx.__dict__.pop("mapper", None)
        for name in ("moments", "first_pass", "probes"):
            ctx.calibrated.__dict__.pop(name, None)

    @property
    def _batch(self) -> int:
        return self.ctx.cfg.calibration.batch_size

    def _as_part(self, name: str) -> tuple[Context, str]:
        """A context that a model is part of, and which part."""
        return next(
            (ctx, "source" if name == source else "target")
            for (source, target), ctx in self.pairs.items()
            if name in (source, target)
        )


def names_of(ids: list[str]) -> list[str]:
    """Short names: what follows the last slash or colon of an id, numbered where two would be alike."""
    short = [model.rstrip("/").replace(":", "/").rsplit("/", 1)[-1] for model in ids]
    return [
        name if short.count(name) == 1 else f"{name}-{short[: number + 1].count(name)}"
        for number, name in enumerate(short)
    ]


def _pair_context(ctx: Context, source: Member, target: Member) -> Context:
    cfg: Config = replace(
        ctx.cfg,
        direction="up",
        stages=list(PAIR_STAGES),
        pair=PairConfig(f"{source.name}_{target.name}", source.settings, target.settings),
    )
    found = Context(cfg, ctx.run)
    found.keys = {"source": source.key, "target": target.key}
    return found


def _metrics(
    mappers: list[Row], routes: list[Row], relays: list[Row], by_hub: list[Row]
) -> dict[str, Metric]:
    total = sum(row["weights_bytes"] for row in mappers)
    found = {
        "fleet/mappers/all/n_mappers": Metric(len(mappers)),
        "fleet/mappers/all/weights_bytes": Metric(total),
        "fleet/process/all/peak_bytes": Metric(peak_bytes()),
    }
    for row in mappers:
        found[f"fleet/{_task(row)}/direct/weights_bytes"] = Metric(row["weights_bytes"])
    for row in (row for row in routes if not row["via"]):
        for name in MEASURES:
            found[f"fleet/{_task(row)}/direct/{name}"] = Metric(row[name], row["n"])
    for row in relays:
        for name in ("kl_nats", "context_carried"):
            found[f"fleet/{_task(row)}/best_relay/{name}"] = Metric(row[f"relay_{name}"], row["n"])
    for row in by_hub:
        arm = f"hub_{row['hub']}" if row["hub"] else "direct"
        for name in ("weights_bytes", "kl_nats", "context_carried"):
            found[f"fleet/all_pairs/{arm}/{name}"] = Metric(row[name])
    return {name: metric for name, metric in found.items() if math.isfinite(metric.value)}


def _task(row: Row) -> str:
    return f"{row['source']}_to_{row['target']}"
