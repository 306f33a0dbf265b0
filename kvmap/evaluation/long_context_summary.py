"""Results at several lengths, depths and distances to the rows of their tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

import numpy as np

from kvmap.evaluation import statistics
from kvmap.evaluation.judging import ItemResult
from kvmap.evaluation.long_context_windows import KINDS, Growth, Window
from kvmap.evaluation.needle import Needle
from kvmap.evaluation.perplexity import PerplexityResult
from kvmap.evaluation.statistics import Estimate, Floats
from kvmap.evaluation.summary import summarise_items, summarise_perplexity
from kvmap.metrics import Metric

Row: TypeAlias = dict[str, Any]

GROWTH_TASK = "growth"


def needle_rows(
    found: Sequence[tuple[Needle, ItemResult]],
    *,
    calibration_tokens: int,
    unavailable: Mapping[str, str] | None = None,
    n_resamples: int = statistics.N_RESAMPLES,
    seed: int = 0,
) -> tuple[list[Row], list[Row]]:
    """Accuracy by length, depth and arm, and what each length retains of the target's over all depths.

    Args:
        found: each question with an arm's answer to it.
        calibration_tokens: the length that the mapper was fitted at.
        unavailable: arms that could not be run, with the reason.
        n_resamples: bootstrap resamples.
        seed: of the bootstrap.

    Returns:
        Rows of table `needle`, {n_tokens, multiple, depth, arm, metric, value, n, standard_error, low, high,
        note, chance}, without a depth where all of them count; and the latter as rows of table `arms`.
    """
    rows: list[Row] = []
    arms: list[Row] = []
    for n_tokens in sorted({needle.n_tokens for needle, _ in found}):
        here = [(needle, result) for needle, result in found if needle.n_tokens == n_tokens]
        chance = float(np.mean([1 / len(needle.item.choices) for needle, _ in here]))
        where = {"n_tokens": n_tokens, "multiple": n_tokens / calibration_tokens}
        _, pooled = summarise_items(
            [result for _, result in here], unavailable=unavailable, n_resamples=n_resamples, seed=seed
        )
        pooled = [
            row for row in pooled if row["metric"] not in ("accuracy_norm", "n_truncated", "n_unmapped")
        ]
        arms += pooled
        cells = list(_accuracy_by_depth(here))
        for row in [{"depth": None, **row} for row in pooled] + cells:
            row = {key: value for key, value in row.items() if key != "task"}
            rows.append({**where, **row, "chance": chance})
    return rows, arms


def _accuracy_by_depth(found: Iterable[tuple[Needle, ItemResult]]) -> Iterator[Row]:
    cells: dict[tuple[float, str], list[float]] = {}
    for needle, result in found:
        cells.setdefault((needle.depth, result.arm), []).append(float(result.correct))
    for (depth, arm), correct in sorted(cells.items(), key=lambda cell: cell[0][0]):
        yield {"depth": depth, "arm": arm, "metric": "accuracy", **asdict(statistics.mean(correct))}


def needle_item_rows(found: Iterable[tuple[Needle, ItemResult]]) -> list[Row]:
    """Every answer with where its fact stood, so that any later run can be paired with it."""
    return [
        {
            "n_tokens": needle.n_tokens,
            "depth": needle.depth,
            "depth_found": needle.depth_found,
            "kind": needle.kind,
            "fact_start": needle.start,
            "fact_stop": needle.stop,
            **{key: value for key, value in result.row().items() if not key.startswith("generated")},
        }
        for needle, result in found
    ]


def length_rows(
    found: Mapping[int, Mapping[str, PerplexityResult]],
    *,
    calibration_tokens: int,
    n_resamples: int = statistics.N_RESAMPLES,
    seed: int = 0,
) -> tuple[list[Row], list[Row]]:
    """NLL, context carried, KL and agreement by prefix length and arm.

    Args:
        found: prefix length to results by arm.
        calibration_tokens: the length that the mapper was fitted at.
        n_resamples: bootstrap resamples.
        seed: of the bootstrap.

    Returns:
        Rows of table `length`, {n_tokens, multiple, arm, metric, value, n, standard_error, low, high, note},
        and the same as rows of table `arms`.
    """
    rows: list[Row] = []
    arms: list[Row] = []
    for n_tokens, results in sorted(found.items()):
        where = {"n_tokens": n_tokens, "multiple": n_tokens / calibration_tokens}
        _, here = summarise_perplexity(results, task=f"length_{n_tokens}", n_resamples=n_resamples, seed=seed)
        here = [row for row in here if row["metric"] not in ("perplexity", "n_unmapped")]
        arms += here
        rows += [{**where, **{key: row[key] for key in row if key != "task"}} for row in here]
    return rows, arms


def growth_rows(
    found: Mapping[str, Sequence[Growth]],
    *,
    n_resamples: int = statistics.N_RESAMPLES,
    seed: int = 0,
) -> tuple[list[Row], list[Row]]:
    """What each arm loses against native, window by window and over the whole continuation.

    * nll_minus_target_nats: (NLL_arm − NLL_native) a token, over the same tokens
    * key_r2, value_r2: 1 − Σ‖x − x_native‖² / Σ‖x_native − mean‖² of the columns that the target added
      itself, the mean being that of a sequence's window and head, sums over sequences, tokens and heads;
      averaged over layers. Layer 0 is always exact: its keys and values depend on the token alone.
    * key_cosine, value_cosine: of the same columns, averaged over everything

    Args:
        found: arm to one entry a sequence, `target` among them.
        n_resamples: bootstrap resamples, over sequences.
        seed: of the bootstrap.

    Returns:
        Rows of table `growth`, {window, start, stop, arm, metric, value, n, standard_error, low, high, note},
        without a window for the whole; and the latter as rows of table `arms`, task `growth`.
    """
    rows: list[Row] = []
    n_windows = len(found["target"][0].windows)
    for number in [None, *range(n_windows)]:
        taken = {arm: [_windows(growth, number) for growth in sequences] for arm, sequences in found.items()}
        first = taken["target"][0]
        where = {"window": number, "start": first[0].start, "stop": first[-1].stop}
        for arm in taken:
            rows += [
                {**where, "arm": arm, "metric": metric, **asdict(estimate)}
                for metric, estimate in _window_estimates(taken, arm, n_resamples, seed)
            ]
    whole = [
        {
            "task": GROWTH_TASK,
            **{key: row[key] for key in row if key not in ("window", "start", "stop")},
        }
        for row in rows
        if row["window"] is None
    ]
    return rows, whole


def growth_layer_rows(found: Mapping[str, Sequence[Growth]]) -> list[Row]:
    """R² and cosine of what the target added, by layer: {arm, window, start, stop, kind, layer, r2, ...}."""
    rows = []
    for arm, sequences in found.items():
        if arm == "target" or not sequences[0].windows[0].drift:
            continue
        for number, window in enumerate(sequences[0].windows):
            of_window = [[growth.windows[number]] for growth in sequences]
            for kind in KINDS:
                error, spread, cosine = _columns_of(of_window, kind)
                r2 = _r2(error.mean(0), spread.mean(0))
                rows += [
                    {
                        "arm": arm,
                        "window": number,
                        "start": window.start,
                        "stop": window.stop,
                        "kind": kind,
                        "layer": layer,
                        "r2": float(r2[layer]),
                        "cosine": float(cosine[:, layer].mean()),
                        "n": len(sequences),
                    }
                    for layer in range(error.shape[1])
                ]
    return rows


def growth_sequence_rows(found: Mapping[str, Sequence[Growth]]) -> list[Row]:
    """Sums of every sequence and window, so that any later run can be paired with them."""
    return [
        {
            "arm": arm,
            "sequence": number,
            "start": window.start,
            "stop": window.stop,
            "nll_nats": window.nll,
            "n_tokens": window.n_tokens,
            "kl_nats": window.kl,
            "agreement": window.agreement,
            "content": growth.content,
        }
        for arm, sequences in found.items()
        for number, growth in enumerate(sequences)
        for window in growth.windows
    ]


def long_context_metrics(part: str, rows: Iterable[Row]) -> dict[str, Metric]:
    """Rows of a table as metrics by `evaluate/long_context/<arm>/<part>_<metric>[_<where>]`."""
    metrics = {}
    for row in rows:
        name = f"{part}_{row['metric']}"
        if "n_tokens" in row:
            name += f"_at_{row['n_tokens']}"
        if row.get("depth") is not None:
            name += f"_depth_{row['depth']:g}"
        if row.get("window") is not None:
            name += f"_to_{row['stop']}"
        error = row["standard_error"]
        metrics[f"evaluate/long_context/{row['arm']}/{name}"] = Metric(
            row["value"], row["n"], None if math.isnan(error) else error
        )
    return metrics


_Taken: TypeAlias = Sequence[Sequence[Window]]
"""Per sequence, the windows that count together: one, or all."""


def _windows(growth: Growth, number: int | None) -> Sequence[Window]:
    return growth.windows if number is None else growth.windows[number : number + 1]


def _window_estimates(
    taken: Mapping[str, _Taken], arm: str, n_resamples: int, seed: int
) -> Iterator[tuple[str, Estimate]]:
    mine, native = taken[arm], taken["target"]
    n_tokens = _sums(mine, "n_tokens")
    nll, native_nll = _sums(mine, "nll"), _sums(native, "nll")
    yield "nll_nats", statistics.mean(nll / n_tokens)
    yield "kl_nats", statistics.mean(_sums(mine, "kl") / n_tokens)
    yield "top1_agreement", statistics.mean(_sums(mine, "agreement") / n_tokens)
    if arm == "target":
        return
    yield "nll_minus_target_nats", statistics.mean((nll - native_nll) / n_tokens)
    if arm != "no_context" and "no_context" in taken:
        none = _sums(taken["no_context"], "nll")
        yield (
            "context_carried",
            statistics.context_carried(nll, native_nll, none, n_resamples=n_resamples, seed=seed),
        )
    if not mine[0][0].drift:
        return
    for kind in KINDS:
        error, spread, cosine = _columns_of(mine, kind)
        yield f"{kind}_r2", _r2_estimate(error, spread, n_resamples, seed)
        yield f"{kind}_cosine", statistics.mean(cosine.mean(1))


def _sums(taken: _Taken, name: str) -> Floats:
    """(n_sequences,) float64, summed over windows."""
    return np.array([math.fsum(getattr(window, name) for window in windows) for windows in taken])


def _columns_of(taken: _Taken, kind: str) -> tuple[Floats, Floats, Floats]:
    """Error, spread and cosine, (n_sequences, n_layers) float64; windows of unequal length weigh by it."""
    error, spread, cosine = [], [], []
    for windows in taken:
        drifts = [window.drift[kind] for window in windows]
        weights = np.array([window.n_tokens for window in windows], dtype=np.float64)
        error.append(np.sum([drift.error for drift in drifts], axis=0))
        spread.append(np.sum([drift.spread for drift in drifts], axis=0))
        cosine.append(np.average([drift.cosine for drift in drifts], axis=0, weights=weights))
    return np.array(error), np.array(spread), np.array(cosine)


def _r2(error: Floats, spread: Floats) -> Floats:
    """1 − error/spread; nan where native columns do not vary, as in a window of one token."""
    varies = spread > 0
    return np.where(varies, 1 - error / np.where(varies, spread, 1.0), math.nan)


def _r2_estimate(error: Floats, spread: Floats, n_resamples: int, seed: int) -> Estimate:
    """Mean over layers of the R² of sums over sequences, with its bootstrap interval over sequences."""
    n, n_layers = error.shape
    value = float(_r2(error.mean(0), spread.mean(0)).mean())
    if math.isnan(value):
        return Estimate(value, n, note="undefined: native keys or values do not vary within the window")
    if n == 1:
        return Estimate(value, n)
    columns = [*error.T, *spread.T]
    means = statistics.bootstrap_means(columns, n_resamples=n_resamples, seed=seed)
    resampled = _r2(means[:, :n_layers], means[:, n_layers:]).mean(1)
    tail = (1 - statistics.LEVEL) / 2
    low, high = np.nanquantile(resampled, [tail, 1 - tail])
    return Estimate(value, n, float(np.nanstd(resampled, ddof=1)), float(low), float(high))
