"""Escalation beside downshift: what hand-offs up and down the same pair are worth, from finished runs.

python -m kvmap.studies.directions PATH [PATH ...] [--csv F] [--effects F]

Reads run directories alone; `docs/direction.md` says what the numbers mean.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pandas as pd

from kvmap.errors import KvmapError
from kvmap.evaluation.run_groups import group_runs
from kvmap.evaluation.run_tables import interval, text_table, written
from kvmap.evaluation.statistics import N_RESAMPLES
from kvmap.files import write_csv
from kvmap.studies.direction_scores import conversation_rows, question_rows
from kvmap.studies.effects import effect
from kvmap.studies.runs import PAIR, runs_table, varied

MODELS = "models"
"""Column of `source ↔ target` as the pair file has them: the same of both directions."""
DIRECTIONS = ("up", "down")
WORDS = {"up": "escalation", "down": "downshift"}
HAND_OFF = (
    "mapped_tokens",
    "source_tokens",
    "target_tokens",
    "target_flop_share",
    "source_flop_share",
)
"""What the one hand-off of conversations takes, of stage `evaluate`'s metrics."""
DIFFERENCES = ("retention", "carried", "minus_source")
TALK = "evaluation.conversation."
"""Settings on which nothing but conversations depends."""
Rows: TypeAlias = Callable[[Sequence[Path]], list[dict[str, Any]]]


def direction_table(
    paths: Iterable[Path], *, n_resamples: int = N_RESAMPLES, seed: int = 0
) -> tuple[pd.DataFrame, list[str]]:
    """Both directions of every pair, one row a direction and task.

    Runs that agree in everything but seeds are taken together. A pair of which one direction has run stands
    there too.

    Args:
        paths: directories of runs, or of sweeps with runs in them.
        n_resamples, seed: of the bootstrap.

    Returns:
        The table, and the settings in which its runs differ besides pair and direction. Columns: `models`
        (both, whatever the direction), those settings (`TALK` of conversations alone, nan elsewhere),
        `direction`, `ordered_pair`, then those of `kvmap.studies.direction_scores.question_rows`, and of
        conversations with one hand-off the means of `HAND_OFF`. Down stands right below up.

    Raises:
        KvmapError: a directory without runs, none that is finished, or none that evaluated anything.
    """
    table = runs_table(paths)
    table[MODELS] = [_models(row) for row in table.to_dict("records")]
    settings = [name for name in varied(table) if name not in ("pair", "direction", MODELS)]
    settings.sort(key=lambda name: name.startswith(TALK))
    plain = [name for name in settings if not name.startswith(TALK)]
    rows = [
        *_rows(table, plain, partial(question_rows, n_resamples=n_resamples, seed=seed)),
        *_rows(table, settings, partial(conversation_rows, n_resamples=n_resamples, seed=seed)),
    ]
    if not rows:
        raise KvmapError(
            f"{len(table)} finished runs without tables items, tasks_items, sequences or conversations: they "
            "evaluated nothing that a direction is judged by; run them with stage evaluate"
        )
    found = pd.DataFrame(rows).reindex(columns=_columns(rows, settings))
    seen = {name: list(dict.fromkeys(table[name])) for name in (MODELS, *settings)} | {
        "direction": list(DIRECTIONS),
        "task": list(dict.fromkeys(found["task"])),
    }
    order = found[["task", MODELS, *settings, "direction"]].apply(
        lambda column: column.map({value: place for place, value in enumerate(seen[column.name])})
    )
    return found.loc[order.sort_values(list(order)).index].reset_index(drop=True), settings


def _rows(table: pd.DataFrame, settings: Sequence[str], rows_of: Rows) -> Iterator[dict[str, Any]]:
    """What `rows_of` makes of the runs of each pair, setting and direction."""
    keys = [MODELS, *settings, "direction"]
    for values, part in table.groupby(keys, sort=False, dropna=False):
        named = dict(zip(keys, values, strict=True)) | {PAIR: part[PAIR].iloc[0]}
        for row in rows_of(_draws(part)):
            prefix = f"evaluate/{row['task']}/mapped/hand_off_"
            costs = {name: part[prefix + name].mean() for name in HAND_OFF if prefix + name in part}
            yield named | row | costs


def _draws(part: pd.DataFrame) -> list[Path]:
    """Runs of one setting, each draw once; those that differ in conversations alone are one for questions."""
    by_rest: dict[str, tuple[Path, ...]] = {}
    for group in group_runs([Path(run) for run in part["run"]]):
        rest = {name: value for name, value in group.settings.items() if not name.startswith(TALK)}
        by_rest[str(rest)] = max(by_rest.get(str(rest), ()), group.runs, key=len)
    return [run for runs in by_rest.values() for run in runs]


def _columns(rows: Sequence[dict[str, Any]], settings: Sequence[str]) -> list[str]:
    """Those of all rows, the settings of either kind first."""
    return list(dict.fromkeys([MODELS, *settings, *(name for row in rows for name in row)]))


def differences(table: pd.DataFrame, settings: Sequence[str]) -> pd.DataFrame:
    """Up less down on the same pair, by settings and task: means over pairs.

    The unit is the pair of models; intervals are 95 % of resamples of pairs. A pair counts where both
    directions have the number: of one that is undefined there is no difference.

    Args:
        table: of `direction_table`.
        settings: as given there.

    Returns:
        Columns: the settings, `task`, `metric` (of `DIFFERENCES`), then those of
        `kvmap.studies.effects.effect`. Empty where no pair has both.
    """
    rows = []
    by_models = table.assign(**{PAIR: table[MODELS]})
    for values, part in by_models.groupby([*settings, "task"], sort=False, dropna=False):
        for metric in DIFFERENCES:
            defined = part[part[metric].notna()]
            both = defined.groupby(PAIR)["direction"].transform("nunique") == len(DIRECTIONS)
            if not both.any():
                continue
            found = effect(defined[both], metric, {"direction": "up"}, {"direction": "down"})
            rows.append(dict(zip([*settings, "task"], values, strict=True)) | {"metric": metric} | found)
    return pd.DataFrame(rows)


def direction_text(table: pd.DataFrame, settings: Sequence[str]) -> str:
    """The table for people: one block a task, its lines a pair's escalation and downshift."""
    blocks = []
    for (task, measure), part in table.groupby(["task", "measure"], sort=False):
        told = [name for name in settings if part[name].notna().any()]
        columns = ["hand-off", "from → to", *(name.rsplit(".", 1)[-1] for name in told)]
        columns += ["target", "source", "mapped"]
        shown = [name for name in ("re_prefill", "no_context") if part[name].notna().any()]
        columns += [name.replace("_", " ") for name in shown]
        if measure == "nll_nats":
            columns += ["context carried", "95 % interval"]
        else:
            columns += ["retention", "95 % interval", "gain recovered", "mapped − source", "95 % interval"]
        lines = [_cells(row, told, shown) for row in part.to_dict("records")]
        blocks.append(f"{task}, {measure} ({_counted(part)})\n{text_table(columns, lines)}")
    return "\n\n".join(blocks)


def difference_text(found: pd.DataFrame, settings: Sequence[str]) -> str:
    """What escalation has over downshift, for people; empty where no pair has both."""
    if found.empty:
        return ""
    columns = [*(name.rsplit(".", 1)[-1] for name in settings), "task", "metric", "up − down"]
    lines = [
        [
            *("–" if pd.isna(row[name]) else str(row[name]) for name in (*settings, "task", "metric")),
            written(row["value"]),
            interval(row["low"], row["high"]),
            f"{row['n_pairs_above']} of {row['n_pairs']}",
        ]
        for row in found.to_dict("records")
    ]
    title = "escalation less downshift on the same pair, means over pairs"
    return f"{title}\n{text_table([*columns, '95 % interval', 'pairs above 0'], lines)}"


def _models(row: dict[str, Any]) -> str:
    names = str(row[PAIR]).split(" → ")
    return " ↔ ".join(names if row["direction"] == "up" else names[::-1])


def _cells(row: dict[str, Any], settings: Sequence[str], shown: Sequence[str]) -> list[str]:
    cells = [WORDS[row["direction"]], row[PAIR], *(str(row[name]) for name in settings)]
    cells += [written(row[name]) for name in ("target", "source", "mapped", *shown)]

    def told(name: str) -> list[str]:
        return [written(row[name]), interval(row[f"{name}_low"], row[f"{name}_high"])]

    if row["measure"] == "nll_nats":
        return cells + told("carried")
    return cells + told("retention") + [written(row["gain_recovered"])] + told("minus_source")


def _counted(part: pd.DataFrame) -> str:
    counts = {name: sorted({int(n) for n in part[f"n_{name}"]}) for name in ("seeds", "items")}
    return ", ".join(
        f"{name}: {'–'.join(str(n) for n in dict.fromkeys((found[0], found[-1])))}"
        for name, found in counts.items()
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `python -m kvmap.studies.directions`."""
    parser = argparse.ArgumentParser(
        prog="python -m kvmap.studies.directions",
        description="Put what hand-offs up and down the same pair are worth beside each other.",
    )
    parser.add_argument("paths", type=Path, nargs="+", help="runs, or sweeps with runs in them")
    parser.add_argument("--resamples", type=int, default=N_RESAMPLES, help="of the bootstrap")
    parser.add_argument("--seed", type=int, default=0, help="of the bootstrap")
    parser.add_argument("--csv", type=Path, help="where the table goes, one row a direction and task")
    parser.add_argument("--effects", type=Path, help="where the differences of the two directions go")
    given = parser.parse_args(arguments)
    try:
        table, settings = direction_table(given.paths, n_resamples=given.resamples, seed=given.seed)
        found = differences(table, settings)
        print(direction_text(table, settings))
        if text := difference_text(found, settings):
            print(f"\n{text}")
        if missing := _one_way(table):
            print(f"\none direction alone: {', '.join(missing)}")
        for file, frame in ((given.csv, table), (given.effects, found)):
            if file is not None:
                write_csv(file, frame.to_dict("records"))
                print(f"rows: {file}")
    except KvmapError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _one_way(table: pd.DataFrame) -> list[str]:
    """Pairs of which one direction has run."""
    n_directions = table.groupby(MODELS, sort=False)["direction"].nunique()
    return [str(models) for models in n_directions.index[n_directions < len(DIRECTIONS)]]


if __name__ == "__main__":
    sys.exit(main())
