"""What calibration leaves for every later stage: captured caches, moments, and the layers they chose."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from kvmap.artifacts import Artifact
from kvmap.fit.features import KINDS, Layout, Recipe, Selection, geometry_shape
from kvmap.fit.outliers import OutlierRows, OutlierRule
from kvmap.fit.pair_moments import (
    PairMoments,
    full_tables,
    head_local_tables,
    probe_tables,
    selected_tables,
)
from kvmap.fit.planner import MomentsPlan, plan_moments
from kvmap.fit.probes import ProbeResult, probe
from kvmap.fit.selection import needs, rank_layers
from kvmap.fit.tuning import recipe_for
from kvmap.fit.weighting import AttentionWeights
from kvmap.stages.calibrated.moments import AccumulatedRows, Wanted, read_moments, write_moments
from kvmap.stages.calibrated.outliers import read_outliers, write_outliers

__all__ = ["Calibrated", "read_moments", "read_outliers", "write_moments", "write_outliers"]

REACH = {"own_kind": 0, "both_kinds": 1}


class Calibrated(AccumulatedRows):
    """Captures, moments and selection of one run, each found in the store or made when first asked for."""

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

    # outlier tokens

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
        return self.make_moments(self.moments_spec, Wanted(tables, self.layout, self.plan.mode))

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
        return read_moments(self.make_moments(spec, Wanted(tables, layout, self.plan.mode)).path)

    def weighted_moments(self, recipe: Recipe) -> PairMoments:
        """Moments of one recipe with each head's rows weighted by the target's attention ([C])."""
        spec = self.rows_spec | {
            "mode": "weighted",
            "recipe": recipe.to_json(),
            "sensitivity_boundaries": self.cfg.sensitivity_boundaries,
        }
        weights = self.attention_weights(recipe)
        tables = selected_tables(recipe, weighted=True)
        artifact = self.make_moments(spec, Wanted(tables, recipe.layout, self.plan.mode, weights))
        return read_moments(artifact.path)

    def attention_weights(self, recipe: Recipe) -> AttentionWeights:
        """Row weights of one recipe's heads, from the captures."""
        captures = self.kept_captures()
        return AttentionWeights(captures, recipe, self.splits, self.options, self.counting_rule)

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
