"""Where a map errs: by kind of token, by position, by direction."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvmap.figures.style import (
    COLUMN_INCHES,
    KINDS,
    STYLE,
    Rows,
    finite,
    number,
    records,
    short_count,
    spoken,
    subplots,
    texts_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

THIN: dict[str, Any] = {"linewidth": 1, "markersize": 3, "markeredgewidth": 0.7}
LINES = ("-", "--", ":", "-.")
TOKEN_KINDS = {
    "first": "first",
    "newline_punctuation": "newline,\npunctuation",
    "rare": "rare",
    "rest": "rest",
}


def token_kind_dots(rows: Rows) -> Figure:
    """Relative error of keys and values by kind of token: mean over layers, and the range of layers.

    Args:
        rows: `{text, token_kind, layer, key_error, value_error, n}` of table `errors_by_token`.
    """
    import matplotlib as mpl

    table = records(rows)
    texts = texts_of(table)
    present = list(dict.fromkeys(str(row["token_kind"]) for row in table))
    names = [name for name in TOKEN_KINDS if name in present]
    names += [name for name in present if name not in names]
    errors = finite(number(row.get(f"{kind}_error")) for row in table for kind in KINDS)
    top = 1.25 * max([0.8, *errors])
    with mpl.rc_context(STYLE):
        size = (COLUMN_INCHES, 1.35 * len(texts) + 0.75)
        figure, axes = subplots(len(texts), 1, size, sharex=True, sharey=True)
        for axis, text in zip(axes, texts, strict=True):
            of_text = [row for row in table if str(row.get("text") or "") == text]
            for shift, (kind, (colour, marker, label)) in zip((-0.12, 0.12), KINDS.items(), strict=True):
                for place, name in enumerate(names):
                    of_kind = [row for row in of_text if row["token_kind"] == name]
                    values = finite(number(row.get(f"{kind}_error")) for row in of_kind)
                    if not values:
                        continue
                    x = place + shift
                    axis.plot([x, x], [min(values), max(values)], color=colour, linewidth=0.9)
                    middle = sum(values) / len(values)
                    axis.plot(
                        x, middle, marker, color=colour, markersize=4, label=label if not place else None
                    )
            axis.axhline(1, color="black", linewidth=0.6, linestyle=":")
            axis.set_yscale("symlog", linthresh=1, linscale=1.5)
            axis.set_ylim(0, top)
            _plain_ticks(axis)
            axis.set_title(f"{spoken(text)}: {_counts(of_text, names)}", fontsize=6.5)
        axes[-1].set_xticks(range(len(names)), [TOKEN_KINDS.get(name, spoken(name)) for name in names])
        axes[-1].set_xlim(-0.5, len(names) - 0.5)
        figure.supylabel("relative error", fontsize=7)
        _legend(figure, axes, "mean over layers, and their range; dotted: as far off as the mean")
    return figure


def _counts(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """`n = 4, 60, 25, 411`: tokens of each kind, in the order drawn."""
    counts = [
        next((f"{int(number(row['n'])):,}" for row in rows if row["token_kind"] == name), "0")
        for name in names
    ]
    return f"n = {' | '.join(counts)} tokens"


def position_lines(rows: Rows, next_token: Rows = ()) -> Figure:
    """Error and attention-output cosine against position, next-token KL against tokens after the context.

    Args:
        rows: `{text, low, high (tokens, from 0), layer, key_error, value_error, cosine, n}` of table
            `errors_by_position`: mean over layers, and a band from the 10th to the 90th percentile of layers.
        next_token: `{text, low, high (tokens after the context, from 1), kl_nats, n}` of table `next_token`;
            rows without places are left out.
    """
    import matplotlib as mpl

    table = records(rows)
    predicted = [row for row in records(next_token) if math.isfinite(number(row.get("low")))]
    texts = texts_of([*table, *predicted])
    measures = [
        ("relative error", table, [("key_error", *KINDS["key"]), ("value_error", *KINDS["value"])]),
        ("attention-output\ncosine", table, [("cosine", "#009E73", "^", "cosine")]),
        ("next-token KL\n(nats)", predicted, [("kl_nats", "#CC79A7", "D", "KL")]),
    ]
    panels = [
        panel for panel in measures if any(math.isfinite(number(r.get(panel[2][0][0]))) for r in panel[1])
    ]
    with mpl.rc_context(STYLE):
        figure, axes = subplots(len(panels), 1, (COLUMN_INCHES, 1.3 * len(panels) + 0.9))
        for axis, (label, source, lines) in zip(axes, panels, strict=True):
            first = 1 if source is predicted else 0
            for text, linestyle in zip(texts, LINES * len(texts), strict=False):
                of_text = [row for row in source if str(row.get("text") or "") == text]
                for name, colour, marker, title in lines:
                    said = f"{title}, {spoken(text)}" if len(texts) > 1 else title
                    _by_place(axis, of_text, name, first, (colour, marker, linestyle), said)
            axis.set_ylabel(label)
            axis.set_xscale("log", base=2)
            n = _span(row.get("n") for row in source)
            if source is predicted:
                axis.set_title(f"n = {n} predictions a point")
                axis.set_xlabel("token after what was handed over")
            else:
                axis.set_title(f"n = {n} tokens a point; band: 10–90 % of layers")
                axis.set_xlabel("position in the context (tokens, from 1)")
            _powers_of_two(axis)
        _legend(figure, axes)
    return figure


def _powers_of_two(axis: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    low, high = (max(0, round(math.log2(end))) for end in axis.get_xlim())
    step = max(1, (high - low) // 5)
    axis.set_xticks([2**power for power in range(low, high + 1, step)])
    axis.xaxis.set_major_formatter(FuncFormatter(short_count))
    axis.xaxis.set_minor_formatter(NullFormatter())


def _by_place(
    axis: Axes,
    rows: Sequence[Mapping[str, Any]],
    name: str,
    first: int,
    look: tuple[str, str, str],
    label: str,
) -> None:
    """A line over the middles of bins (counted from 1, whatever `first` is), with a band over layers."""
    bins: dict[float, list[float]] = {}
    for row in rows:
        value = number(row.get(name))
        if math.isfinite(value):
            low, high = (1 - first + number(row[end]) for end in ("low", "high"))
            bins.setdefault(math.sqrt(low * high), []).append(value)
    places = sorted(bins)
    if not places:
        return
    means = [sum(bins[place]) / len(bins[place]) for place in places]
    colour, marker, linestyle = look
    axis.plot(
        places,
        means,
        color=colour,
        marker=marker,
        markersize=2.5,
        linewidth=1,
        linestyle=linestyle,
        label=label,
    )
    if any(len(values) > 2 for values in bins.values()):
        low_end, high_end = ([_quantile(bins[place], share) for place in places] for share in (0.1, 0.9))
        axis.fill_between(places, low_end, high_end, color=colour, alpha=0.12, linewidth=0)


def spectrum_lines(rows: Rows, summary: Rows = ()) -> Figure:
    """Share of the error, and of the target, that lies in the largest components: keys beside values.

    Args:
        rows: `{text, kind, layer, head, component (1: the largest), error_share, target_share}` of table
            `spectrum`; drawn cumulated, mean over layers and heads, with a band from the 10th to the 90th
            percentile.
        summary: of table `spectrum_summary`; effective ranks are written into the titles.
    """
    import matplotlib as mpl

    table = records(rows)
    texts = texts_of(table)
    kinds = [kind for kind in KINDS if any(row["kind"] == kind for row in table)]
    n_components = max(int(row["component"]) for row in table)
    with mpl.rc_context(STYLE):
        figure, axes = subplots(1, len(kinds), (COLUMN_INCHES, 2.15), sharey=True)
        for axis, kind in zip(axes, kinds, strict=True):
            for text, linestyle in zip(texts, LINES * len(texts), strict=False):
                mine = [r for r in table if r["kind"] == kind and str(r.get("text") or "") == text]
                for name, colour, label in (
                    ("error_share", "#D55E00", "error"),
                    ("target_share", "#0072B2", "target"),
                ):
                    said = f"{label}, {spoken(text)}" if len(texts) > 1 else label
                    _cumulated(axis, mine, name, colour, linestyle, said)
            axis.set_xscale("log", base=2)
            axis.set_ylim(0, 1.02)
            axis.set_xlabel("components")
            axis.set_xticks([4**power for power in range(6) if 4**power <= n_components])
            axis.xaxis.set_major_formatter(short_count)
            axis.minorticks_off()
            axis.set_title(f"{KINDS[kind][2]}{_ranks(records(summary), kind)}", fontsize=6.5)
        axes[0].set_ylabel("cumulated share\n(band: 10–90 % of heads)")
        _legend(figure, axes[:1])
    return figure


def _cumulated(
    axis: Axes, rows: Sequence[Mapping[str, Any]], name: str, colour: str, linestyle: str, label: str
) -> None:
    import numpy as np

    heads: dict[tuple[int, int], dict[int, float]] = {}
    for row in rows:
        share = number(row.get(name))
        if math.isfinite(share):
            heads.setdefault((int(row["layer"]), int(row["head"])), {})[int(row["component"])] = share
    if not heads:
        return
    components = sorted({component for shares in heads.values() for component in shares})
    sums = np.array([np.cumsum([shares.get(c, 0.0) for c in components]) for shares in heads.values()])
    axis.plot(components, sums.mean(axis=0), color=colour, linewidth=1, linestyle=linestyle, label=label)
    low, high = np.quantile(sums, (0.1, 0.9), axis=0)
    axis.fill_between(components, low, high, color=colour, alpha=0.15, linewidth=0)


def _ranks(rows: Sequence[Mapping[str, Any]], kind: str) -> str:
    """Mean effective ranks over layers, heads and texts, where the summary has them."""
    mine = [row for row in rows if row["kind"] == kind]
    said = []
    for name, what in (("effective_rank", "error"), ("effective_rank_target", "target")):
        values = finite(number(row.get(name)) for row in mine)
        if values:
            said.append(f"{what} {sum(values) / len(values):.1f}")
    return f"\neffective rank:\n{', '.join(said)}" if said else ""


def _plain_ticks(axis: Axes) -> None:
    """0, 0.5, 1 and from there powers of ten: what a scale that is linear below 1 needs."""
    top = axis.get_ylim()[1]
    powers = [10.0**power for power in range(1, 9) if 10.0**power <= top]
    ticks = [0, 0.25, 0.5, 0.75, 1.0, *powers] if not powers else [0, 0.5, 1.0, *powers]
    axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()


def _legend(figure: Figure, axes: Sequence[Any], title: str | None = None) -> None:
    found: dict[str, Any] = {}
    for axis in axes:
        handles, labels = axis.get_legend_handles_labels()
        found.update(zip(labels, handles, strict=True))
    figure.legend(
        list(found.values()),
        list(found),
        loc="outside lower center",
        ncols=2 if len(found) > 2 else len(found),
        frameon=False,
        columnspacing=1.0,
        title=title,
        title_fontsize=6.5,
    )


def _quantile(values: Sequence[float], share: float) -> float:
    import numpy as np

    return float(np.quantile(values, share))


def _span(counts: Iterable[Any]) -> str:
    whole = sorted({int(count) for count in finite(number(count) for count in counts)})
    return "–".join(f"{count:,}" for count in dict.fromkeys([whole[0], whole[-1]])) if whole else "?"
