"""The recorded cases: made from finished runs, and judged with each pair left out.

python -m kvmap.preflight table PATH [PATH ...] --csv F      cases of runs with a preflight and questions
python -m kvmap.preflight rates [F ...]                      how often the rule is wrong on them
python -m kvmap.preflight attach RUN MAPPER FOLDER           a run's verdict beside a mapper fitted in full

`docs/preflight.md` says what the numbers mean.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kvmap.errors import KvmapError
from kvmap.files import read_json, write_csv

FAMILIES = ("own", "any")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `python -m kvmap.preflight`."""
    given = _parser().parse_args(arguments)
    try:
        given.run(given)
    except KvmapError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvmap.preflight", description="The recorded cases that preflights are judged by."
    )
    commands = parser.add_subparsers(required=True)
    table = commands.add_parser("table", help="cases of finished runs as a table")
    table.add_argument("paths", type=Path, nargs="+", help="runs, or sweeps with runs in them")
    table.add_argument("--csv", type=Path, required=True, help="where the table goes")
    table.set_defaults(run=_table)
    wrong = commands.add_parser("rates", help="false accepts and false rejects, each pair left out in turn")
    wrong.add_argument("evidence", type=Path, nargs="*", help="further tables, beside the shipped one")
    wrong.add_argument("--alone", action="store_true", help="without the shipped table")
    wrong.add_argument("--min-retention", type=float, default=0.9, help="that must be kept")
    wrong.add_argument("--confidence", type=float, default=0.8, help="of each bound")
    wrong.add_argument("--min-pairs", type=int, default=9, help="that a mapper's cases must come from")
    wrong.add_argument(
        "--family",
        choices=FAMILIES,
        default="own",
        help="whose cases judge a pair: its own's or any",
    )
    wrong.add_argument("--csv", type=Path, help="where every case and its judgement goes")
    wrong.set_defaults(run=_rates)
    attach = commands.add_parser("attach", help="a run's verdict beside another fit of the same mapper")
    attach.add_argument("run_directory", type=Path, metavar="RUN", help="directory of a run with a preflight")
    attach.add_argument("mapper", metavar="MAPPER", help="name of the mapper in the preflight")
    attach.add_argument("folder", type=Path, metavar="FOLDER", help="a saved mapper, outside of the store")
    attach.set_defaults(run=_attach)
    return parser


def _table(given: argparse.Namespace) -> None:
    from kvmap.preflight.evidence import Evidence, cases_of, write_cases
    from kvmap.preflight.text import evidence_text

    cases = cases_of(given.paths)
    write_cases(given.csv, cases)
    true = cases.groupby(["pair", "mapper", "top_k"])["retention"].transform("mean")
    print(evidence_text(Evidence(cases.assign(true=true))))
    print(f"cases: {given.csv}")


def _rates(given: argparse.Namespace) -> None:
    from kvmap.preflight.evidence import read_evidence
    from kvmap.preflight.rates import left_out, rates
    from kvmap.preflight.rules import Rules
    from kvmap.preflight.text import evidence_text, rates_text

    evidence = read_evidence(given.evidence, shipped=not given.alone)
    if not evidence.n_cases:
        raise KvmapError("no cases: give a table of them, which python -m kvmap.preflight table makes")
    rules = Rules(given.min_retention, given.confidence, given.min_pairs)
    judged = left_out(evidence, rules, given.family)
    print(evidence_text(evidence), end="\n\n")
    print(rates_text(rates(judged, rules.min_retention), rules))
    if given.csv is not None:
        write_csv(given.csv, judged.to_dict("records"))
        print(f"judged: {given.csv}")


def _attach(given: argparse.Namespace) -> None:
    from kvmap.mappers import attach_verdict, load_mapper, read_verdict

    kept = given.run_directory / "preflight" / given.mapper
    verdict = read_verdict(kept) if kept.is_dir() else None
    if verdict is None:
        known = sorted(path.name for path in kept.parent.glob("*/")) if kept.parent.is_dir() else []
        raise KvmapError(
            f"{kept}: no verdict; the run's preflight has fitted {', '.join(known) or 'nothing'}"
        )
    if (given.folder / "artifact.json").is_file():
        raise KvmapError(
            f"{given.folder} lies in the store, where nothing is added to what was made: copy the mapper out "
            "and give the copy"
        )
    _check_same(kept, given.folder)
    load_mapper(given.folder)
    reason = "found by a preflight of a smaller calibration, not of these very weights"
    attach_verdict(given.folder, replace(verdict, reasons=(*verdict.reasons, reason)))
    print(json.dumps({"verdict": verdict.verdict, "folder": str(given.folder)}))


def _check_same(kept: Path, folder: Path) -> None:
    """Refuse a mapper of other models, or of another map, than that of the preflight."""
    paths = [path / "manifest.json" for path in (kept, folder)]
    if not paths[1].is_file():
        raise KvmapError(f"{folder} holds no mapper: give a folder that save_mapper has written")
    one, other = (read_json(path) for path in paths)
    for name in ("source", "target", "rope", "kind"):
        if one.get(name) != other.get(name):
            raise KvmapError(
                f"{folder}: {name} is not that of the preflight's mapper {kept.name}; give a mapper of the "
                "same models, rope strategy and kind"
            )


if __name__ == "__main__":
    sys.exit(main())
