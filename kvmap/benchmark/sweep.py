"""The sweep over k, λ and supports from moments, against what it is to be compared with.

That is the calibration pass that made the moments, and scikit-learn's fits of the same points from rows; all
in one process, with one number of threads.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from kvmap.benchmark.latency import time_interleaved
from kvmap.errors import KvmapError
from kvmap.fit.calibrate import CalibrationOptions, accumulate_moments
from kvmap.fit.captures import ROLES, CapturedBatch, Captures
from kvmap.fit.features import CROSS, SUPPORTS, Layout, Recipe, Selection, both, cache_shape
from kvmap.fit.linear import fit_linear, systems
from kvmap.fit.pair_moments import SPLITS, PairMoments, full_tables
from kvmap.fit.rows import layer_rows
from kvmap.fit.selection import rank_layers
from kvmap.fit.tuning import Choice, Grid, recipe_for, tune
from kvmap.models.capture import prefill
from kvmap.models.pair import ModelPair
from kvmap.models.storage import load_kv
from kvmap.progress import track

Row: TypeAlias = dict[str, Any]
Splits: TypeAlias = Mapping[str, Sequence[int]]

LAMBDAS = (1e-4, 1e-2, 1.0, 1e2, 1e3, 1e4)
CROSS_RATIO = 10.0

_REPEATS, _LONG_SECONDS = 3, 1.0  # of a fit, the fastest counts; one that takes long is timed once
_WIDER = 4  # times the outputs, to tell what a fit costs for each of them from what it costs once


@dataclass(frozen=True)
class SweepSettings:
    """The points that are fitted and judged: every k, λ and support.

    Attributes:
        top_k: numbers of source layers, ascending.
        lambdas: λ, absolute.
        cross_ratio: λ_cross over λ_own of banded support.
        rule: that ranks the source layers, see `kvmap.fit.selection.RULES`.
    """

    top_k: tuple[int, ...]
    lambdas: tuple[float, ...] = LAMBDAS
    cross_ratio: float = CROSS_RATIO
    rule: str = "r2"

    def ratio(self, support: str) -> float:
        """λ_cross over λ_own with a support."""
        return self.cross_ratio if support == "banded" else 1.0

    def grid(self, support: str, top_k: int) -> Grid:
        """The points of one support and k."""
        return Grid((top_k,), self.lambdas, cross=(self.ratio(support),))


@dataclass(frozen=True, eq=False)
class Pass:
    """A calibration pass over captured caches.

    Attributes:
        moments: of every source layer and head, both splits.
        n_tokens: read by both models.
        seconds: of the pass without the models and without reading files: strip, centre, multiply, add.
    """

    moments: PairMoments
    n_tokens: int
    seconds: float


def calibrate(captures: Captures, splits: Splits, options: CalibrationOptions) -> Pass:
    """Accumulate the moments of captured caches, and time it."""
    reading = 0.0
    n_tokens = 0

    def timed() -> Generator[CapturedBatch, None, None]:
        nonlocal reading, n_tokens
        stream = captures.stream(splits)
        while True:
            start = time.perf_counter()
            batch = next(stream, None)
            reading += time.perf_counter() - start
            if batch is None:
                return
            n_tokens += batch.source.mask.numel()
            yield batch

    layout = layout_of(captures)
    start = time.perf_counter()
    moments = accumulate_moments(timed(), layout, full_tables(layout), options)
    for table, split in product(moments.tables, SPLITS):
        _ = table.splits[split].s_xx  # mirrored when it is first read
    return Pass(moments, n_tokens, time.perf_counter() - start - reading)


def sweep_rows(moments: PairMoments, settings: SweepSettings) -> tuple[list[Row], list[Row]]:
    """Choose layers, judge every point, and fit the best one of each support, all from moments.

    Returns:
        Rows {step, support, top_k, n_points, seconds, n_rows, threads, dtype}: `rank` (source layers),
        `points` (held-out and fit errors of all λ of one support and k) and `weights` (of the support's best
        point), which no ratio counts as sweep; and the points, rows {support, top_k, ridge_lambda,
        held_out_r2}.
    """
    about = {"n_rows": moments.n_rows("fit"), "threads": torch.get_num_threads(), "dtype": "float64"}
    ranked, seconds = _timed(partial(rank_layers, moments, settings.rule, "all"))
    rows: list[Row] = [_step("rank", None, None, 0, seconds) | about]
    points: list[Row] = []
    for support in SUPPORTS:
        base = empty_recipe(moments.layout, support)
        scores: dict[Choice, float] = {}
        for top_k in settings.top_k:
            tuned, seconds = _timed(partial(tune, moments, base, ranked, settings.grid(support, top_k)))
            scores |= tuned.r2
            rows.append(_step("points", support, top_k, len(tuned.r2), seconds) | about)
        best = max(scores, key=scores.__getitem__)
        recipe, penalty = recipe_for(base, ranked, best.top_k), best.penalty("absolute")
        _, seconds = _timed(partial(fit_linear, moments, recipe, penalty, allow_few_rows=True))
        rows.append(_step("weights", support, best.top_k, 1, seconds) | about)
        points += [
            {"support": support, "top_k": c.top_k, "ridge_lambda": c.ridge_lambda, "held_out_r2": r2}
            for c, r2 in scores.items()
        ]
    return rows, points


def refit_rows(
    captures: Captures,
    splits: Splits,
    moments: PairMoments,
    settings: SweepSettings,
    options: CalibrationOptions,
) -> list[Row]:
    """What scikit-learn's Ridge would take to fit the same points from rows, by a sample.

    Of each support and k one fit is timed, that of values of the middle target layer (all its heads with
    full-head support, its first head otherwise) at one λ, float64, rows in memory: neither reading them nor
    judging the fit is counted. `seconds` multiplies it by all layers, heads, kinds and λ. `shared_seconds`
    lets scikit-learn share what kvmap shares: heads that read the same features are fitted together, a fit of
    m outputs taken to cost `a + b m`, by a second fit of four times the outputs.

    Returns:
        Rows {support, top_k, n_rows, n_features, n_outputs, fit_seconds, n_fits, seconds, n_shared_fits,
        shared_seconds, threads, dtype}.

    Raises:
        KvmapError: scikit-learn is not installed.
    """
    ranked = rank_layers(moments, settings.rule, "all")
    cases = list(product(SUPPORTS, settings.top_k))
    return [
        _refit_row(captures, splits, moments, settings, options, recipe_for(base, ranked, top_k), top_k)
        for support, top_k in track(cases, len(cases), "benchmark: scikit-learn fits")
        for base in [empty_recipe(moments.layout, support)]
    ]


def forward_seconds(pair: ModelPair, batch_size: int, length: int, n_batches: int = 2) -> float:
    """Seconds that both models together take for one token of a batch: median over batches of random ids."""
    vocabulary = min(pair.source_geometry.vocab_size, pair.target_geometry.vocab_size)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (batch_size, length), generator=generator)
    models = {"source": pair.source, "target": pair.target}
    calls: dict[str, Callable[[], object]] = {
        side: partial(prefill, model, ids) for side, model in models.items()
    }
    found = time_interleaved(calls, n_batches, 1, [model.device for model in models.values()])
    return sum(float(np.median(seconds)) for seconds in found.values()) / ids.numel()


def ratio_rows(
    sweep: Sequence[Row], made: Pass, seconds_per_token: float | None, refits: Sequence[Row]
) -> list[Row]:
    """The sweep against the pass and against scikit-learn.

    Args:
        sweep: of `sweep_rows`; refits: of `refit_rows`, or none.
        made: the calibration pass.
        seconds_per_token: of both models' forward; None: not known, the pass without the models is compared.

    Returns:
        Rows {compared, seconds, sweep_seconds, sweep_share, times_sweep, how}.
    """
    spent = sum(row["seconds"] for row in sweep if row["step"] != "weights")
    weights = sum(row["seconds"] for row in sweep if row["step"] == "weights")
    compared = [("accumulation", made.seconds, "measured")]
    if seconds_per_token is not None:
        forward = seconds_per_token * made.n_tokens
        how = f"{seconds_per_token:.3g} s a token of both models x {made.n_tokens} tokens, and accumulation"
        compared.append(("calibration pass", forward + made.seconds, how))
    if refits:
        compared += [
            ("scikit-learn, each layer", sum(row["seconds"] for row in refits), "a sample, see refits"),
            ("scikit-learn, shared", sum(row["shared_seconds"] for row in refits), "a sample, see refits"),
        ]
    compared.append(("best points' weights", weights, "measured"))
    return [
        {
            "compared": name,
            "seconds": seconds,
            "sweep_seconds": spent,
            "sweep_share": spent / seconds,
            "times_sweep": seconds / spent,
            "how": how,
            "threads": torch.get_num_threads(),
        }
        for name, seconds, how in compared
    ]


def layout_of(captures: Captures) -> Layout:
    """The numbering of what was captured."""
    start, _ = captures.batches[0]
    source, target = (cache_shape(load_kv(captures.path(start, role))) for role in ROLES)
    return Layout(source, target)


def empty_recipe(layout: Layout, support: str) -> Recipe:
    """A recipe of one support that reads no layer as yet."""
    nothing: Selection = ((),) * len(layout.target_shape)
    return Recipe(layout.source_shape, layout.target_shape, support, both(nothing))


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    found = call()
    return found, time.perf_counter() - start


def _step(step: str, support: str | None, top_k: int | None, n_points: int, seconds: float) -> Row:
    return {"step": step, "support": support, "top_k": top_k, "n_points": n_points, "seconds": seconds}


def _refit_row(
    captures: Captures,
    splits: Splits,
    moments: PairMoments,
    settings: SweepSettings,
    options: CalibrationOptions,
    recipe: Recipe,
    top_k: int,
) -> Row:
    layer = len(recipe.target_shape) // 2
    rows = layer_rows(captures, recipe, {"fit": splits["fit"]}, "value", layer, options)
    every = torch.arange(rows.n_rows("fit"))
    x, y = rows.features("fit", every)[0].double(), rows.targets("fit", every).double()
    y = y.transpose(0, 1).flatten(1) if recipe.support == "full_head" else y[0]
    if recipe.support == "banded":
        x[:, recipe.bands("value", layer, 0) == CROSS] /= math.sqrt(settings.cross_ratio)
    served = _outputs_served(moments, recipe, settings.ratio(recipe.support))
    one = _ridge_seconds(x, y)
    n_fits = sum(served) // y.shape[1] * len(settings.lambdas)
    slope = 0.0
    if max(served) > y.shape[1]:
        slope = max(_ridge_seconds(x, y.repeat(1, _WIDER)) - one, 0.0) / (_WIDER - 1) / y.shape[1]
    shared = sum(one + slope * (m - y.shape[1]) for m in served) * len(settings.lambdas)
    return {
        "support": recipe.support,
        "top_k": top_k,
        "n_rows": x.shape[0],
        "n_features": x.shape[1],
        "n_outputs": y.shape[1],
        "fit_seconds": one,
        "n_fits": n_fits,
        "seconds": one * n_fits,
        "n_shared_fits": len(served) * len(settings.lambdas),
        "shared_seconds": shared,
        "threads": torch.get_num_threads(),
        "dtype": "float64",
    }


def _outputs_served(moments: PairMoments, recipe: Recipe, ratio: float) -> list[int]:
    """Outputs of each system that kvmap solves, over all layers, heads and kinds."""
    unit = Choice(1, 1.0, ratio).penalty("absolute")
    return [len(system.targets) for system in systems(moments, recipe, unit)]


def _ridge_seconds(x: Tensor, y: Tensor) -> float:
    """Of one fit by scikit-learn, its default solver."""
    try:
        from sklearn.linear_model import Ridge
    except ImportError as error:
        raise KvmapError(
            "scikit-learn is not installed: pip install scikit-learn, or leave it out with --no-sklearn"
        ) from error
    times: list[float] = []
    while len(times) < _REPEATS and sum(times) < _LONG_SECONDS:
        times.append(_timed(partial(Ridge(alpha=1.0).fit, x.numpy(), y.numpy()))[1])
    return min(times)
