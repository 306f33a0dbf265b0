"""From finished runs to what diagnostics say of their outcomes: text, CSV and figure.

python -m kvmap.prediction PATH [PATH ...] [--outcome NAME ...] [--group COLUMN] [--csv F] [--figure F]

Reads run directories alone; `docs/prediction.md` says what the numbers mean.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvmap.errors import KvmapError
from kvmap.files import replacing, write_csv
from kvmap.prediction.columns import AVERAGES, outcomes_of, with_ratios
from kvmap.prediction.configurations import PAIR
from kvmap.prediction.correlation import N_RESAMPLES, correlate
from kvmap.prediction.figure import forest
from kvmap.prediction.leave_out import default_predictors, leave_one_pair_out
from kvmap.prediction.tables import correlation_text, predictor_text

if TYPE_CHECKING:
    import pandas as pd

FIGURE_DPI = 300


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `python -m kvmap.prediction`."""
    given = _parser().parse_args(arguments)
    try:
        _report(given)
    except KvmapError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvmap.prediction",
        description="Correlate the diagnostics of finished runs with what came of the hand-off.",
    )
    parser.add_argument("paths", type=Path, nargs="+", help="runs, or sweeps with runs in them")
    parser.add_argument(
        "--outcome",
        nargs="+",
        help="metrics of the mapped arm (retention), or tasks and metrics (average/retention)",
    )
    parser.add_argument(
        "--group", default=PAIR, help=f"column that says which pair a run is of (default: {PAIR})"
    )
    parser.add_argument("--resamples", type=int, default=N_RESAMPLES, help="of bootstrap and permutations")
    parser.add_argument("--seed", type=int, default=0, help="of both")
    parser.add_argument(
        "--csv", type=Path, help="where all correlations go; predictors go to <name>_predictors.csv"
    )
    parser.add_argument("--figure", type=Path, help="where a figure of the first outcome goes")
    return parser


def _report(given: argparse.Namespace) -> None:
    from kvmap.studies.runs import runs_table

    table = with_ratios(runs_table(given.paths))
    rows = correlate(
        table,
        outcomes=given.outcome,
        group=given.group,
        n_resamples=given.resamples,
        n_permutations=given.resamples,
        seed=given.seed,
    )
    shown = _shown(table, given.outcome)
    predicted: list[pd.DataFrame] = []
    for task, metric in shown:
        print(correlation_text(rows, task, metric), end="\n\n")
        if default_predictors(table):
            name = f"{task}/{metric}"
            scores = leave_one_pair_out(
                table, name, group=given.group, n_resamples=given.resamples, seed=given.seed
            ).scores
            print(predictor_text(scores, f"{task} {metric}"), end="\n\n")
            predicted.append(scores.assign(outcome=name))
    if given.csv is not None:
        _write(given.csv, [rows])
        print(f"correlations: {given.csv}")
        if predicted:
            file = given.csv.with_name(f"{given.csv.stem}_predictors{given.csv.suffix}")
            _write(file, predicted)
            print(f"predictors: {file}")
    if given.figure is not None:
        with replacing(given.figure) as temporary:
            forest(rows, *shown[0]).savefig(temporary, dpi=FIGURE_DPI)
        print(f"figure: {given.figure}")


def _shown(table: pd.DataFrame, names: Sequence[str] | None) -> list[tuple[str, str]]:
    """Task and metric of what is printed: averages, and what was asked for by its task."""
    found = [(outcome.task, outcome.metric) for outcome in outcomes_of(table, names)]
    named = [pair for pair in found if pair[0] in AVERAGES or "/".join(pair) in (names or ())]
    return named or found


def _write(file: Path, tables: Sequence[pd.DataFrame]) -> None:
    write_csv(file, [row for table in tables for row in table.to_dict("records")])


if __name__ == "__main__":
    sys.exit(main())
