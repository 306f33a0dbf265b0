"""Tables of how well a map rebuilds the cache, and where it errs; None where a run has no such data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvmap.figures.style import number, spoken, texts_of
from kvmap.report.measures import NOTHING, fraction, mean, mean_and_worst, three_digits
from kvmap.report.page import Grid
from kvmap.report.reading import Row, read_table


def r2_grid(rows: Sequence[Row], first_token: Sequence[Row]) -> Grid | None:
    """Mean R² over layers and heads of rows fitted, held out, and of other texts; the first token apart."""
    if not rows:
        return None
    present = list(dict.fromkeys(str(row["split"]) for row in rows))
    splits: list[str] = [split for split in ("fit", "held_out") if split in present]
    splits += [split for split in present if split not in splits]
    columns = ["", *(f"R² {spoken(split)}" for split in splits)]
    columns += ["error at the first token"] if first_token else []
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        cells = []
        for split in splits:
            values = [number(row["r2"]) for row in rows if (row["kind"], row["split"]) == (kind, split)]
            cells.append(mean_and_worst(values, min))
        if first_token:
            values = [number(row["relative_error"]) for row in first_token if row["kind"] == kind]
            cells.append(mean_and_worst(values, max))
        lines.append([f"{kind}s", *cells])
    return Grid("The map, mean over layers and heads (worst)", columns, lines)


def attention_grid(rows: Sequence[Row]) -> Grid | None:
    """What the target's attention makes of the mapped cache, by text: mean over layers and heads (worst)."""
    if not rows:
        return None
    columns = ["text", "cosine"]
    wanted = [
        ("concentration_key", "C of keys", max),
        ("concentration_value", "C of values", max),
        ("sink_mass", "mass on the first token, native", max),
        ("sink_mass_mapped", "mapped", max),
    ]
    present = [entry for entry in wanted if any(row.get(entry[0]) is not None for row in rows)]
    columns += [title for _, title, _ in present]
    lines = []
    for text in texts_of(rows):
        of_text = [row for row in rows if str(row.get("text") or "") == text]
        cells = [mean_and_worst((number(row["cosine"]) for row in of_text), min)]
        cells += [mean_and_worst((number(row.get(name)) for row in of_text), w) for name, _, w in present]
        lines.append([spoken(text) or "held-out", *cells])
    note = (
        "C, concentration: the error weighted by what attention reads, over the plain error; "
        "above 1 the error sits where attention reads."
        if any(name.startswith("concentration") for name, _, _ in present)
        else ""
    )
    return Grid(
        "Attention on the mapped cache, mean over layers and heads (worst)", columns, lines, note=note
    )


def token_kinds_grid(rows: Sequence[Row], next_token: Sequence[Row]) -> Grid | None:
    """Errors by kind of token, mean over layers; next-token measures by kind of the token predicted."""
    kinds = [row for row in next_token if row.get("token_kind")]
    if not rows and not kinds:
        return None
    lines: list[list[str]] = []
    breaks = []
    for text in texts_of([*rows, *kinds]):
        breaks.append(len(lines))
        mine = [row for row in rows if str(row.get("text") or "") == text]
        next_mine = [row for row in kinds if str(row.get("text") or "") == text]
        for kind in dict.fromkeys(str(row["token_kind"]) for row in [*mine, *next_mine]):
            of_kind = [row for row in mine if row["token_kind"] == kind]
            predicted = next((row for row in next_mine if row["token_kind"] == kind), {})
            names = ("key_error", "value_error", "cosine")
            cells = [_written(mean(number(row.get(name)) for row in of_kind)) for name in names]
            cells += [_written(number(predicted.get(name))) for name in ("kl_nats", "top1_agreement")]
            count = str(int(number(of_kind[0]["n"]))) if of_kind else NOTHING
            lines.append([spoken(text), _kind(kind), count, *cells])
    columns = ["text", "tokens", "n", "key error", "value error", "cosine", "KL, nats", "top-1 same"]
    return Grid(
        "By kind of token, mean over layers",
        columns,
        lines,
        n_left=2,
        breaks=breaks[1:],
        note="Errors are relative: Σ‖ŷ − y‖² / Σ‖y − ȳ‖². KL and top-1 are of the tokens predicted.",
    )


def _kind(name: str) -> str:
    return {"newline_punctuation": "newline, punctuation"}.get(name, spoken(name))


def _written(value: float) -> str:
    return fraction(value) if math.isfinite(value) else NOTHING


def spectrum_grid(rows: Sequence[Row]) -> Grid | None:
    """Over how many directions error and target spread: mean over layers and heads (least)."""
    if not rows:
        return None
    wanted = [
        ("effective_rank", "rank of the error"),
        ("effective_rank_target", "rank of the target"),
        ("share_top8", "of the error in 8"),
        ("share_top8_target", "of the target in 8"),
    ]
    present = [(name, title) for name, title in wanted if name in rows[0]]
    lines = []
    for text in texts_of(rows):
        for kind in dict.fromkeys(row["kind"] for row in rows):
            mine = [r for r in rows if r["kind"] == kind and str(r.get("text") or "") == text]
            cells = [three_digits(mean(number(row.get(name)) for row in mine)) for name, _ in present]
            lines.append([spoken(text), f"{kind}s", *cells])
    return Grid(
        "Spectrum of the error, mean over layers and heads",
        ["text", "", *(title for _, title in present)],
        lines,
        n_left=2,
        note="Rank: the participation ratio (Σλ)² / Σλ² of the covariance; in 8: share of its 8 largest λ.",
    )


def map_lines(directory: Path) -> Iterator[str]:
    """What the tables of the fit and of its diagnosis come to, one line each."""
    attention = read_table(directory, "attention_output")
    for text in texts_of(attention):
        cosines = [number(row["cosine"]) for row in attention if str(row.get("text") or "") == text]
        where = f" on {spoken(text)}" if text else ""
        said = mean_and_worst(cosines, min)
        yield f"attention-output cosine{where}: {said}, mean over layers and heads (worst)"
    systems = read_table(directory, "conditioning")
    if systems:
        worst = max(number(row["condition_number"]) for row in systems)
        freedom = [number(row["degrees_of_freedom"]) for row in systems]
        yield (
            f"{len(systems)} systems: worst condition number {worst:.1e}, effective degrees of freedom "
            f"{min(freedom):,.0f} to {max(freedom):,.0f} of {max(row['n_features'] for row in systems):,}"
        )
    for row in read_table(directory, "compression")[1:]:
        verdict = "used" if row["passes"] in (True, "True") else f"not used: {row['reason']}"
        yield (
            f"compression {row['variant']}: {number(row['bytes_ratio']):.2f} of the bytes, KL "
            f"{number(row['kl_nats']):.4f} nats; {verdict}"
        )
    chosen = read_table(directory, "tuning_heads")
    if chosen:
        layers = sorted({row["top_k"] for row in chosen})
        lambdas = sorted({number(row["ridge_lambda"]) for row in chosen})
        yield f"chosen on held-out sequences: top_k {layers}, ridge_lambda {lambdas}, see the table tuning"
