"""A run as a plan sees it: shapes, counts, and the settings that can be changed to make it fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvmap.fit.features import Layout, n_channels
from kvmap.fit.planner import DEFAULT_SHARE, MomentsPlan, best_plan, moments_plans
from kvmap.mappers.linear import linear_feature_count, linear_weight_count
from kvmap.planning.models import ITEM_BYTES, ModelFacts

ROLES = ("source", "target")


@dataclass(frozen=True)
class Settings:
    """What can be changed of a run to make it fit.

    Attributes:
        sequential: one model in memory at a time while calibrating and diagnosing.
        evaluation_sequential: the same while evaluating.
        placed: models that accelerate places over devices, host memory and disk.
        batch_size: sequences of a calibration's forward; evaluation_batch_size: of an evaluation's.
        tables_on_host: moments grow in host memory.
        budget_bytes: that moments may take at one time; None: a share of the host's memory.
        mode: of the moments, or "auto"; support, top_k: of the map.
    """

    sequential: bool = False
    evaluation_sequential: bool = False
    placed: frozenset[str] = frozenset()
    batch_size: int = 8
    evaluation_batch_size: int = 8
    tables_on_host: bool = True
    budget_bytes: int | None = None
    mode: str = "auto"
    support: str = "full_head"
    top_k: int = 1


@dataclass(frozen=True)
class ScoredText:
    """Texts of an evaluation: so many, each a prefix that is handed over and what is scored after it."""

    n: int
    prefix: int
    scored: int


@dataclass(frozen=True)
class PlannedRun:
    """What a run will do.

    Attributes:
        stages: that are asked for.
        models: by role.
        layout: of features and targets.
        kind: of the mapper.
        regressors, native_layers: of the mapper; moments_regressors: what the moments hold.
        two_passes: whether moments of chosen layers need a pass that chooses them.
        n_sequences, sequence_length: of the calibration, all splits; n_rows: tokens that count.
        product_dtype: of the moments' products.
        keeps_captures: whether both caches of the calibration text stay on disk.
        spill_bytes: the most disk that caches may take while one model reads after the other; None: no bound.
        mapper_weights: of a map that is not linear; None: counted here.
        mapper_dtype: of the stored weights.
        texts: that are scored; n_arms: arms that are compared.
        diagnosed: texts that are read and of what length; (0, 0): none.
        lengths: of the benchmark; benchmark_batch, benchmark_turns: contexts, and calls of each arm.
        settings: as configured.
    """

    stages: frozenset[str]
    models: Mapping[str, ModelFacts]
    layout: Layout
    kind: str
    regressors: str
    native_layers: int
    moments_regressors: str
    two_passes: bool
    n_sequences: int
    sequence_length: int
    n_rows: int
    product_dtype: str
    keeps_captures: bool
    spill_bytes: int | None
    mapper_weights: int | None
    mapper_dtype: str
    texts: tuple[ScoredText, ...] = ()
    n_arms: int = 2
    diagnosed: tuple[int, int] = (0, 0)
    lengths: tuple[int, ...] = ()
    benchmark_batch: int = 1
    benchmark_turns: int = 1
    settings: Settings = field(default_factory=Settings)

    @property
    def calibrates(self) -> bool:
        """Whether moments are made, or the plan is of a whole run (no stage is named that needs none)."""
        return bool(self.stages & {"calibrate", "fit", "diagnose", "evaluate"}) or not self.loads

    @property
    def loads(self) -> bool:
        """Whether any stage beside the plan is asked for."""
        return bool(self.stages - {"plan", "economics", "report"})

    def asks(self, stage: str) -> bool:
        """Whether a stage is planned: those asked for, or all of them where the plan alone is."""
        return stage in self.stages or not self.loads

    def n_features(self, settings: Settings) -> int:
        """Features p of the linear map."""
        return linear_feature_count(
            self.layout.source_shape,
            self.layout.target_shape,
            settings.top_k,
            settings.support,
            self.regressors,
            self.native_layers,
        )

    def n_weights(self, settings: Settings) -> int:
        """Weights of the map."""
        if self.mapper_weights is not None:
            return self.mapper_weights
        return linear_weight_count(
            self.layout.source_shape,
            self.layout.target_shape,
            settings.top_k,
            settings.support,
            self.regressors,
            self.native_layers,
        )

    def mapper_bytes(self, settings: Settings, dtype: str | None = None) -> int:
        """Bytes of the map's weights and biases, as a file or in memory; biases are float32."""
        width = 1 if dtype == "fp8" else ITEM_BYTES[dtype or self.mapper_dtype]
        return self.n_weights(settings) * width + self.n_biases * 4

    @property
    def n_biases(self) -> int:
        """Biases of the map's outputs."""
        return 2 * n_channels(self.layout.target_shape)

    def moments(self, settings: Settings, host_bytes: int) -> list[MomentsPlan]:
        """The modes that serve the map, the richest first."""
        budget = settings.budget_bytes
        return moments_plans(
            self.layout,
            support=settings.support,
            regressors=self.moments_regressors,
            top_k=settings.top_k,
            batch_tokens=settings.batch_size * self.sequence_length,
            mode=settings.mode,
            two_passes=self.two_passes,
            budget_bytes=int(DEFAULT_SHARE * host_bytes) if budget is None else budget,
        )

    def chosen_moments(self, settings: Settings, host_bytes: int) -> MomentsPlan:
        """The mode that a run takes; of those that fit no budget the smallest."""
        plans = self.moments(settings, host_bytes)
        return best_plan(plans) or min(plans, key=lambda plan: plan.peak_bytes)
