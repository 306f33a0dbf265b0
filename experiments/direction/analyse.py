"""Gather the sweep of run.sh into CSV files and a figure. Reads run directories only.

python experiments/direction/analyse.py SWEEP_DIRECTORY [SWEEP_DIRECTORY ...]
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from kvmap.studies.directions import MODELS, differences, direction_table
from kvmap.studies.effects import effect, pooled
from kvmap.studies.one_setting import directories
from kvmap.studies.plots import COLOURS, COLUMN_WIDTH_INCHES, STYLE
from kvmap.studies.summary import freeze

HERE = Path(__file__).resolve().parent
CARRY = "evaluation.conversation.carry"
CARRIES = ("everything", "artifacts", "fresh")
MEANS = (
    "target",
    "source",
    "mapped",
    "re_prefill",
    "no_context",
    "retention",
    "carried",
    "mapped_tokens",
    "source_tokens",
    "target_tokens",
    "target_flop_share",
    "source_flop_share",
)
COLOUR = dict(zip(("up", "down"), COLOURS, strict=False))


def means(table: pd.DataFrame, settings: list[str]) -> pd.DataFrame:
    """Mean over ordered pairs of every number, by task, settings and direction."""
    rows = []
    for task, part in table.groupby("task", sort=False):
        told = [name for name in MEANS if part[name].notna().any()]
        named = [name for name in settings if part[name].notna().any()]
        found = pooled(part, [*named, "direction"], told)
        rows.append(found.assign(task=task, n_seeds=part["n_seeds"].max()))
    first = ["task", *settings, "direction"]
    found = pd.concat(rows, ignore_index=True)
    return found[[*first, *(name for name in found if name not in first)]]


def carrying(talk: pd.DataFrame, settings: list[str]) -> pd.DataFrame:
    """F1 of the target, handed a shorter text, less F1 with everything; mapped, and having read it itself."""
    others = [name for name in settings if name != CARRY]
    rows = []
    for values, part in talk.groupby([*others, "direction"], sort=False, dropna=False):
        named = dict(zip([*others, "direction"], values, strict=True))
        for carry in CARRIES[1:]:
            for arm in ("mapped", "re_prefill"):
                both = part[part[CARRY].isin((carry, CARRIES[0]))]
                if both[CARRY].nunique() < 2:
                    continue
                found = effect(both, arm, {CARRY: carry}, {CARRY: CARRIES[0]})
                rows.append({**named, "carry": carry, "arm": arm, **found})
    return pd.DataFrame(rows)


def draw(table: pd.DataFrame) -> None:
    """Retention down against up, each pair a point; F1 by what is carried, each ordered pair a thin line."""
    with plt.rc_context(STYLE):
        size = COLUMN_WIDTH_INCHES, 5.4
        figure, axes = plt.subplots(3, 1, figsize=size, layout="constrained")
        for axis, task, measure, label in (
            (axes[0], "average", "retention", "accuracy retained"),
            (axes[1], "perplexity", "carried", "context carried"),
        ):
            against(axis, table[table["task"] == task], measure, label)
        carried(axes[2], table[table["measure"] == "f1"])
        figure.savefig(HERE / "figure.png", dpi=300)
        plt.close(figure)


def against(axis: Axes, part: pd.DataFrame, measure: str, label: str) -> None:
    """One point a pair and map: up along x, down along y."""
    for place, (mapper, of_mapper) in enumerate(part.groupby("mapper", sort=False)):
        both = of_mapper.pivot_table(index=MODELS, columns="direction", values=measure).dropna()
        name = str(mapper).replace("_", " ")
        axis.plot(both["up"], both["down"], "os"[place % 2], color=COLOURS[place], markersize=3, label=name)
    ends = [*axis.get_xlim(), *axis.get_ylim()]
    axis.axline((min(ends), min(ends)), slope=1, color="0.6", linewidth=0.7, linestyle=":")
    axis.set(xlim=(min(ends), max(ends)), ylim=(min(ends), max(ends)))
    axis.set_xlabel(f"{label}, up")
    axis.set_ylabel(f"{label}, down")
    axis.legend(frameon=False)


def carried(axis: Axes, talk: pd.DataFrame) -> None:
    """F1 of the mapped cache, and of the target that reads the same text, by what is carried."""
    for direction, part in talk.groupby("direction", sort=False):
        for arm, line in (("mapped", "-"), ("re_prefill", "--")):
            found = pooled(part, [CARRY], [arm]).set_index(CARRY).reindex(CARRIES)
            errors = [found["value"] - found["low"], found["high"] - found["value"]]
            shift = -0.04 if direction == "up" else 0.04
            axis.errorbar(
                [place + shift for place in range(len(CARRIES))],
                found["value"],
                errors,
                fmt=f"o{line}",
                color=COLOUR[direction],
                markersize=3,
                capsize=2,
                linewidth=1,
                label=f"{direction}, {arm.replace('_', '-')}",
            )
    axis.set_xticks(range(len(CARRIES)), CARRIES)
    axis.set_ylim(0, 1.02)
    axis.set_ylabel("F1 from the hand-off on")
    axis.legend(frameon=False, ncols=2)


def main() -> None:
    """Entry point."""
    table, settings = direction_table(directories(__doc__))
    talk = table[table["measure"] == "f1"]
    freeze(
        HERE,
        pairs=table,
        results=means(table, settings),
        effects=differences(table, settings),
        carry=carrying(talk, settings),
    )
    draw(table)


if __name__ == "__main__":
    main()
