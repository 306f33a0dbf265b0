"""What calibration leaves for every later stage: captured caches, moments, and the layers they chose."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvmap.artifacts import Artifact, ArtifactMissing
from kvmap.errors import KvmapError
from kvmap.files import load_tensors, read_json, save_tensors, write_json
from kvmap.fit.calibrate import CalibrationOptions, Stream, accumulate_moments, live_stream
from kvmap.fit.captures import Captures, SensitivityOptions, capture
from kvmap.fit.features import KINDS, Layout, Recipe, Selection, geometry_shape
from kvmap.fit.outliers import OutlierRows, OutlierRule, sample_sequences
from kvmap.fit.pair_moments import (
    PairMoments,
    TableSpec,
    full_tables,
    head_local_tables,
    probe_tables,
    selected_tables,
)
from kvmap.fit.planner import MomentsPlan, default_budget, plan_moments, row_bytes, table_blocks
from kvmap.fit.probes import ProbeResult, probe
from kvmap.fit.selection import needs, rank_layers
from kvmap.fit.tuning import recipe_for
from kvmap.fit.view import cache_view
from kvmap.fit.weighting import AttentionWeights
from kvmap.models.cache import KVCache
from kvmap.models.capture import prefill

if TYPE_CHECKING:
    from kvmap.stages.context import Context

CAPTURES, MOMENTS, PART = "captures", "moments", "moments_part"
REACH = {"own_kind": 0, "both_kinds": 1}


class Calibrated:
    """Captures, moments and selection of one run, each found in the store or made when first asked for."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.cfg = ctx.cfg.calibration

    @cached_property
    def layout(self) -> Layout:
        """The numbering of features, with the native layers that calibration or mapper ask for."""
        pair, mapper = self.ctx.pair, self.ctx.cfg.mapper
        return Layout(
            geometry_shape(pair.source_geometry),
            geometry_shape(pair.target_geometry),
            max(self.cfg.native_layers, mapper.native_layers),
        )

    @property
    def regressors(self) -> str:
        """What the moments hold: both kinds as soon as calibration or mapper ask for them."""
        return max(self.cfg.regressors, self.ctx.cfg.mapper.regressors, key=REACH.__getitem__)

    @cached_property
    def plan(self) -> MomentsPlan:
        """The mode of the moments, and its memory."""
        mapper, budget = self.ctx.cfg.mapper, self.cfg.memory_budget_gib
        return plan_moments(
            self.layout,
            support=mapper.support,
            regressors=self.regressors,
            top_k=self.largest_k,
            batch_tokens=self.cfg.batch_size * self.cfg.sequence_length,
            mode=self.cfg.mode,
            two_passes=needs(self.ctx.cfg.selection.rule) != "nothing",
            budget_bytes=None if budget is None else int(budget * 2**30),
        )

    @property
    def largest_k(self) -> int:
        """The most source layers that a target layer can come to read."""
        mapper, n_layers = self.ctx.cfg.mapper, len(self.layout.source_shape)
        if self.ctx.cfg.selection.rule == "all" or mapper.top_k == "all":
            return n_layers
        return max(self.top_k_grid) if mapper.top_k == "auto" else int(mapper.top_k)

    @property
    def top_k_grid(self) -> tuple[int, ...]:
        """Numbers of source layers that `mapper.top_k=auto` tries: those named, or powers of two and all."""
        n_layers, named = len(self.layout.source_shape), self.ctx.cfg.mapper.tuning.top_k
        if named is not None:
            return tuple(sorted({min(k, n_layers) for k in named}))
        return tuple(sorted({2**i for i in range(n_layers.bit_length()) if 2**i < n_layers} | {n_layers}))

    @property
    def native_head(self) -> int:
        """First tokens of a sequence that are no rows: those that the target will compute itself."""
        own = self.cfg.native_head
        return self.ctx.cfg.transfer.native_head if own is None else own

    @cached_property
    def splits(self) -> dict[str, list[int]]:
        """Sequence numbers of the fit and the held-out split; of this shard alone, if the run is one."""
        fit, held_out = self.ctx.tokens.split(self.cfg.held_out_share, self.cfg.seed)
        splits = {"fit": list(fit), "held_out": list(held_out)}
        return splits if self.cfg.shard is None else _share(splits, self.cfg.shard)

    @property
    def options(self) -> CalibrationOptions:
        """Which tokens become rows, and how they are added up."""
        return CalibrationOptions(
            native_head=self.native_head,
            token_stride=self.cfg.token_stride,
            rope=self.ctx.cfg.rope.strategy,
            product_dtype=self.cfg.product_dtype,
            device=_device(self.cfg.device),
        )

    @property
    def content(self) -> dict[str, Any]:
        """What determines the rows: both models and the tokens."""
        return {
            "source": self.ctx.content("source"),
            "target": self.ctx.content("target"),
            "tokens": self.ctx.tokens.fingerprint,
        }

    @property
    def rows_spec(self) -> dict[str, Any]:
        """What determines which rows count, on which split, and how they are added."""
        strategy, outliers = self.ctx.cfg.rope.strategy, self.cfg.outliers
        policy = {} if outliers.policy == "keep" else {"outliers": asdict(outliers)}
        return (
            self.content
            | policy
            | {
                "held_out_share": self.cfg.held_out_share,
                "split_seed": self.cfg.seed,
                "token_stride": self.cfg.token_stride,
                "native_head": self.native_head,
                "rope": "coupled" if strategy == "coupled" else "strip",
                "product_dtype": self.cfg.product_dtype,
            }
        )

    # captured caches

    @property
    def weighted(self) -> bool:
        """Whether the run's mapper weighs rows by the target's attention."""
        return self.ctx.cfg.mapper.row_weights == "sensitivity"

    @property
    def captures_spec(self) -> dict[str, Any]:
        """What determines the captures; their key in the store is its hash."""
        if not self.weighted:
            return self.content
        return self.content | {
            "sensitivity_boundaries": self.cfg.sensitivity_boundaries,
            "token_stride": self.cfg.token_stride,
            "native_head": self.native_head,
        }

    @cached_property
    def captures(self) -> Captures | None:
        """The captured caches: made if they are to be kept, used if a run has kept them."""
        keep = self.cfg.keep_captures
        rows = self.ctx.cfg.mapper.kind == "mlp" or self.weighted
        if self.cfg.shard is None and (keep is True or (keep == "auto" and rows)):
            return Captures.open(self.captures_artifact.path)
        try:
            return Captures.open(self.ctx.store.load(CAPTURES, self.captures_spec).path)
        except ArtifactMissing:
            return None

    @cached_property
    def captures_artifact(self) -> Artifact:
        """The captures in the store, made now if no run has done so before."""
        return self.ctx.store.get_or_build(CAPTURES, self.captures_spec, self._capture)

    def kept_captures(self) -> Captures:
        """The captured caches, for what cannot do without rows.

        Raises:
            KvmapError: they were not to be kept.
        """
        if self.captures is None:
            raise KvmapError(
                "calibration.keep_captures=false: this mapper reads rows, which only captured caches hold; "
                "set calibration.keep_captures=auto"
            )
        return self.captures

    def _capture(self, folder: Path) -> None:
        sensitivity = None
        if self.weighted:
            sensitivity = SensitivityOptions(
                self.cfg.sensitivity_boundaries, self.native_head, self.cfg.token_stride
            )
        capture(
            self.ctx.pair,
            self.ctx.tokens.input_ids,
            folder,
            batch_size=self.cfg.batch_size,
            sequential=self.cfg.sequential,
            sensitivity=sensitivity,
        )

    # outlier tokens

    @cached_property
    def outlier_rule(self) -> OutlierRule | None:
        """What flags outlier tokens, fitted on a sample of the fit split; None where all rows are kept.

        The sample is that of the whole calibration, also in a shard: every part must follow one rule.
        """
        outliers = self.cfg.outliers
        if outliers.policy == "keep":
            return None
        spec = self.rows_spec | {"sample": "outliers"}

        def build(folder: Path) -> None:
            rule = OutlierRule.fit(self._sample(), threshold=outliers.threshold, share=outliers.share)
            settings, tensors = rule.to_state()
            write_json(folder / "rule.json", settings)
            save_tensors(folder / "rule.safetensors", tensors)

        path = self.ctx.store.get_or_build("outlier_rule", spec, build).path
        return OutlierRule.from_state(read_json(path / "rule.json"), load_tensors(path / "rule.safetensors"))

    def _sample(self) -> Iterator[KVCache]:
        fit, _ = self.ctx.tokens.split(self.cfg.held_out_share, self.cfg.seed)
        numbers = sample_sequences(fit, self.cfg.sequence_length)
        for start in range(0, len(numbers), self.cfg.batch_size):
            ids = self.ctx.tokens.input_ids[numbers[start : start + self.cfg.batch_size]]
            yield cache_view(prefill(self.ctx.pair.source, ids).to("cpu"), self.ctx.cfg.rope.strategy)

    def outlier_rows(self) -> OutlierRows | None:
        """What became of outlier tokens in the main moments; None where all rows are kept."""
        return None if self.outlier_rule is None else read_outliers(self.moments_artifact.path)

    @property
    def counting_rule(self) -> OutlierRule | None:
        """What flags tokens that are no rows of the moments; None where all are, also by a fall back."""
        rows = self.outlier_rows()
        return None if rows is None or rows.applied == "keep" else self.outlier_rule

    # moments

    @cached_property
    def moments_artifact(self) -> Artifact:
        """The main moments in the store, of the planned mode; made now if no run has done so before."""
        if self.plan.mode == "selected":
            tables = selected_tables(self._widest_recipe())
        elif self.plan.mode == "head_local":
            tables = head_local_tables(self.layout, self.regressors)
        else:
            tables = full_tables(self.layout, self.regressors)
        return self._artifact(self.moments_spec, tables)

    @property
    def moments_spec(self) -> dict[str, Any]:
        """Exactly what determines the main moments; their key in the store is its hash."""
        spec = self.rows_spec | {"mode": self.plan.mode, "regressors": self.regressors}
        spec["native_layers"] = self.layout.native_layers
        if self.plan.mode == "selected":
            spec["recipe"] = self._widest_recipe().to_json()
        return spec

    @cached_property
    def moments(self) -> PairMoments:
        """Moments of both kinds on both splits."""
        return read_moments(self.moments_artifact.path)

    @cached_property
    def first_pass(self) -> PairMoments | None:
        """The moments that layers are chosen from: the main ones, or those of a pass before them."""
        if self.plan.mode != "selected":
            return self.moments
        wanted = needs(self.ctx.cfg.selection.rule)
        if wanted == "nothing":
            return None
        layout = Layout(self.layout.source_shape, self.layout.target_shape)
        tables = probe_tables(layout) if wanted == "matched" else head_local_tables(layout)
        spec = self.rows_spec | {"mode": "probes" if wanted == "matched" else "head_local"}
        spec |= {"regressors": "own_kind", "native_layers": 0}
        return read_moments(self._artifact(spec, tables, layout).path)

    def weighted_moments(self, recipe: Recipe) -> PairMoments:
        """Moments of one recipe with each head's rows weighted by the target's attention ([C])."""
        spec = self.rows_spec | {
            "mode": "weighted",
            "recipe": recipe.to_json(),
            "sensitivity_boundaries": self.cfg.sensitivity_boundaries,
        }
        weights = self.attention_weights(recipe)
        artifact = self._artifact(spec, selected_tables(recipe, weighted=True), recipe.layout, weights)
        return read_moments(artifact.path)

    def attention_weights(self, recipe: Recipe) -> AttentionWeights:
        """Row weights of one recipe's heads, from the captures."""
        captures = self.kept_captures()
        return AttentionWeights(captures, recipe, self.splits, self.options, self.counting_rule)

    def build_part(self) -> Artifact:
        """This shard's part of the moments.

        Raises:
            KvmapError: moments of a selection, which the whole text has to choose.
        """
        shard, plan = self.cfg.shard, self.plan
        if plan.mode == "selected":
            raise KvmapError(
                f"calibration.shard={shard}: calibration.mode=selected needs all sequences to choose its "
                f"layers; give calibration.memory_budget_gib={plan.peak_bytes / 2**30:.1f} or more, or take "
                f"mapper=head_local"
            )
        tables = (head_local_tables if plan.mode == "head_local" else full_tables)(
            self.layout, self.regressors
        )
        return self._artifact(self.moments_spec | {"shard": shard}, tables, kind=PART)

    def merge_parts(self, n_shards: int) -> Artifact:
        """The main moments, from the parts of all shards; each is read once, and one at a time.

        Raises:
            KvmapError: parts that are missing, naming them.
        """
        specs = [self.moments_spec | {"shard": f"{i}/{n_shards}"} for i in range(n_shards)]
        missing = [spec["shard"] for spec in specs if not self.ctx.store.path(PART, spec).is_dir()]
        if missing:
            raise KvmapError(
                f"calibration.n_shards={n_shards}: the parts {', '.join(missing)} are missing; run "
                f"stages=[calibrate] calibration.shard={missing[0]} with the same settings"
            )

        def merge(folder: Path) -> None:
            paths = [self.ctx.store.load(PART, spec).path for spec in specs]
            total = read_moments(paths[0])
            outliers = None if self.outlier_rule is None else read_outliers(paths[0])
            for path in paths[1:]:
                total.merge(read_moments(path))
                if outliers is not None:
                    outliers.merge(read_outliers(path))
            if outliers is not None:
                outliers.settle(total)
                write_outliers(outliers, folder)
            write_moments(total, folder)

        return self.ctx.store.get_or_build(MOMENTS, self.moments_spec, merge)

    def _artifact(
        self,
        spec: dict[str, Any],
        tables: list[TableSpec],
        layout: Layout | None = None,
        weights: AttentionWeights | None = None,
        kind: str = MOMENTS,
    ) -> Artifact:
        weigh = None if weights is None else weights.weigh
        numbering, rule = layout or self.layout, self.outlier_rule

        def build(folder: Path) -> None:
            for number, block in enumerate(self._blocks(tables)):
                outliers = None if rule is None else OutlierRows(rule, self.cfg.outliers.policy, numbering)
                moments = accumulate_moments(
                    self._stream(folder / "spill"),
                    numbering,
                    block,
                    self.options,
                    weigh,
                    outliers,
                    is_shard=kind == PART,
                )
                write_moments(moments, folder, number)
                if outliers is not None and number == 0:  # every pass finds the same
                    write_outliers(outliers, folder)

        return self.ctx.store.get_or_build(kind, spec, build)

    def _blocks(self, tables: list[TableSpec]) -> list[list[TableSpec]]:
        """Tables that may grow together, within the budget; one pass for each block."""
        budget = self.cfg.memory_budget_gib
        allowed = default_budget() if budget is None else int(budget * 2**30)
        sizes = [(len(table.features), len(table.targets)) for table in tables]
        rows = self.cfg.batch_size * self.cfg.sequence_length * row_bytes(self.layout, self.plan.mode, sizes)
        blocks = table_blocks([table.nbytes for table in tables], allowed - rows)
        return [[tables[position] for position in block] for block in blocks]

    def _stream(self, spill_folder: Path) -> Stream:
        """Batches of captured caches, from the store or straight from the models."""
        if self.captures is not None:
            return self.captures.stream(self.splits)
        return live_stream(
            self.ctx.pair,
            self.ctx.tokens.input_ids,
            self.splits,
            batch_size=self.cfg.batch_size,
            sequential=self.cfg.sequential,
            spill_folder=spill_folder,
        )

    # selection

    @cached_property
    def probes(self) -> ProbeResult | None:
        """Head-matched probes of every source layer for every target layer; None where no pass held them."""
        native = self.ctx.cfg.mapper.native_layers
        return None if self.first_pass is None else probe(self.first_pass, native_layers=native)

    @cached_property
    def ranked(self) -> dict[str, Selection]:
        """By target kind, each target layer's source layers, the best first, as many as can be read."""
        selection = self.ctx.cfg.selection
        scores = self.probes.r2 if selection.rule == "r2" and self.probes is not None else None
        return rank_layers(
            self.layout if self.first_pass is None else self.first_pass,
            selection.rule,
            self.largest_k,
            apart=selection.apart,
            scores=scores,
            native_layers=self.ctx.cfg.mapper.native_layers,
        )

    def base_recipe(self) -> Recipe:
        """Support, regressors and native layers of the run's mapper, with no source layer chosen yet."""
        mapper = self.ctx.cfg.mapper
        nothing: Selection = ((),) * len(self.layout.target_shape)
        return Recipe(
            self.layout.source_shape,
            self.layout.target_shape,
            mapper.support,
            dict.fromkeys(KINDS, nothing),
            mapper.regressors,
            mapper.native_layers,
        )

    def _widest_recipe(self) -> Recipe:
        """What a run of these settings may come to read; all that "selected" moments hold."""
        return recipe_for(self.base_recipe(), self.ranked, self.largest_k)


def read_moments(folder: Path) -> PairMoments:
    """Moments that `write_moments` wrote, all blocks of them. Tensors are mapped: the disk backs them."""
    parts = [
        PairMoments.from_tensors(load_tensors(path.with_suffix(".safetensors")), read_json(path))
        for path in sorted(folder.glob("moments.*.json"), key=lambda path: int(path.stem.split(".")[1]))
    ]
    tables = [table for part in parts for table in part.tables]
    return PairMoments(parts[0].layout, tables, parts[0].product_dtype)


def write_moments(moments: PairMoments, folder: Path, block: int = 0) -> None:
    """Moments, or one block of their tables, as a tensor file and its settings."""
    tensors, settings = moments.to_tensors()
    save_tensors(folder / f"moments.{block}.safetensors", tensors)
    write_json(folder / f"moments.{block}.json", settings)


def read_outliers(folder: Path) -> OutlierRows:
    """Outlier rows that `write_outliers` wrote."""
    return OutlierRows.from_state(
        read_json(folder / "outliers.json"), load_tensors(folder / "outliers.safetensors")
    )


def write_outliers(outliers: OutlierRows, folder: Path) -> None:
    """Outlier rows beside the moments they were taken with."""
    settings, tensors = outliers.to_state()
    write_json(folder / "outliers.json", settings)
    save_tensors(folder / "outliers.safetensors", tensors)


def _share(splits: dict[str, list[int]], shard: str) -> dict[str, list[int]]:
    """The sequences of shard i of n: every n-th, so that both splits fall to all shards alike."""
    number, total = (int(part) for part in shard.split("/"))
    shares = {split: members[number::total] for split, members in splits.items()}
    if not all(shares.values()):
        empty = [split for split, members in shares.items() if not members]
        raise KvmapError(
            f"calibration.shard={shard}: no sequence of the splits {empty} falls to it; take fewer shards or "
            f"raise calibration.n_sequences"
        )
    return shares


def _device(name: str) -> str:
    """Where tables grow: as asked for, or a GPU if there is one."""
    import torch

    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"
