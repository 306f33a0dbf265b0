"""The report of one run: its verdict first, then tables, figures, settings, and where it came from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvmap.figures.style import number, spoken, texts_of
from kvmap.report.console import ending, run_lines
from kvmap.report.diagnosis import attention_grid, r2_grid, spectrum_grid, token_kinds_grid
from kvmap.report.economics import economics_grids
from kvmap.report.fleet import fleet_grids
from kvmap.report.measures import fraction, mean
from kvmap.report.origin import environment_grid, files_grid, versions_grid
from kvmap.report.page import Card, Grid, Page, Section
from kvmap.report.pictures import OF_THE_MAP, pictures_of
from kvmap.report.preflight import preflight_grid, preflight_lines, preflight_rates_grid
from kvmap.report.reading import Row, read_arms, read_run, read_table
from kvmap.report.results import (
    against_source_grid,
    against_target_grid,
    latency_gains,
    latency_grid,
    measures_grid,
    paper_grids,
    plan_grid,
    plan_memory_grid,
    plan_settings_grid,
    plan_work_grid,
)
from kvmap.report.settings import changed_grid, settings_grid
from kvmap.report.sweep import leaves
from kvmap.report.verdict import cards, verdict_grid, verdict_lines


def run_page(directory: Path, defaults: Mapping[str, Any] | None = None, drawn: Path | None = None) -> Page:
    """What the directory of one run says.

    Args:
        directory: of the run.
        drawn: where else its figures may lie, in `figures/`; None: in its own directory alone.
        defaults: settings to hold the run's own against; None: all are shown, none is held against any.

    Raises:
        KvmapError: The directory holds no run.
    """
    run, arms = read_run(directory), read_arms(directory)
    pictures = pictures_of(directory, *([drawn] if drawn else []))
    of_map = [picture for picture in pictures if picture.name in OF_THE_MAP]
    of_fleet = [picture for picture in pictures if picture.name == "fleet"]
    of_costs = [picture for picture in pictures if picture.name == "economics"]
    timed = [picture for picture in pictures if picture.name.startswith("latency")]
    measured = [picture for picture in pictures if picture not in [*of_map, *of_fleet, *of_costs, *timed]]
    r2 = r2_grid(read_table(directory, "r2"), read_table(directory, "first_token"))
    attention = read_table(directory, "attention_output")
    by_kind = token_kinds_grid(read_table(directory, "errors_by_token"), read_table(directory, "next_token"))
    spectrum = spectrum_grid(read_table(directory, "spectrum_summary"))
    sections = [
        Section("Preflight", preflight_lines(run), _preflight(directory)),
        Section("Against each reference", grids=_there(verdict_grid(arms))),
        Section("Results", [], _results(arms), measured),
        Section("The map", [], _there(r2, attention_grid(attention), by_kind, spectrum), of_map),
        Section("Fleet", [], fleet_grids(directory), of_fleet),
        Section("Latency", [], _there(latency_grid(read_table(directory, "latency"))), timed),
        Section("Economics", [], economics_grids(directory, run.get("facts") or {}), of_costs),
        Section("Plan", [], _plan(directory, folded=bool(arms))),
        Section("What else is known", run_lines(directory, run, arms)),
        Section("Settings", [], _settings(run["config"], defaults)),
        Section("Origin", [], _there(environment_grid(run), versions_grid([run]))),
        Section("Files", [], [files_grid(directory)]),
    ]
    return Page(
        title=f"{run['study']}: {directory.resolve().name}",
        lead=lead(run),
        asked=asked(run["config"]),
        verdict=[*verdict_lines(arms), *([f"It failed: {run['error']}"] if run.get("error") else [])],
        cards=[*cards(arms), *_cards_of_the_map(directory)],
        sections=[section for section in sections if section],
        paper=[*paper_grids(arms), *_there(r2, attention_grid(attention)), *fleet_grids(directory)],
    )


def _plan(directory: Path, *, folded: bool) -> list[Grid]:
    """Sizes, work, memory and settings that fit; all but the last folded where there are results."""
    return _there(
        plan_settings_grid(read_table(directory, "plan_settings")),
        plan_grid(read_table(directory, "plan"), folded=folded),
        plan_work_grid(read_table(directory, "plan_work")),
        plan_memory_grid(read_table(directory, "plan_memory"), folded=folded),
    )


def _preflight(directory: Path) -> list[Grid]:
    return _there(
        preflight_grid(read_table(directory, "preflight")),
        preflight_rates_grid(read_table(directory, "preflight_rates")),
    )


def _there(*grids: Grid | None) -> list[Grid]:
    return [grid for grid in grids if grid is not None]


def _results(arms: list[Row]) -> list[Grid]:
    return _there(measures_grid(arms), against_target_grid(arms), against_source_grid(arms))


def _settings(config: Mapping[str, Any], defaults: Mapping[str, Any] | None) -> list[Grid]:
    flat = dict(leaves(config))
    usual = None if defaults is None else dict(leaves(defaults))
    return _there(changed_grid(flat, usual), settings_grid("All settings", flat))


def lead(run: Row) -> str:
    """How it ended: `done` also where the run itself writes this, as its last stage, and all others are."""
    stages = run["stages"]
    others = {name: entry for name, entry in stages.items() if name != "report"}
    writing = run["status"] == "running" and stages.get("report", {}).get("status") == "running"
    if writing and all(entry["status"] == "done" for entry in others.values()):
        return ending({**run, "status": "done", "stages": others})
    return ending(run)


def asked(config: Mapping[str, Any]) -> list[str]:
    """What was done, in words: which models, which map, what is left to the target."""
    pair, mapper = config.get("pair"), config.get("mapper")
    lines = []
    fleet = _fleet(config)
    if fleet:
        lines.append(f"A fleet, every model from the cache of every other: {', '.join(fleet)}.")
    only_fleet = bool(fleet) and set(config["stages"]) <= {"plan", "fleet", "report"}
    if not only_fleet and isinstance(pair, Mapping) and isinstance(pair.get("source"), Mapping):
        names = [str(pair[role].get("id")) for role in ("source", "target")]
        if config.get("direction") == "down":
            names.reverse()
        lines.append(f"{names[1]} goes on from the cache of {names[0]} (pair {pair.get('name')}).")
    if isinstance(mapper, Mapping) and mapper.get("kind"):
        lines.append(f"Mapper: {_mapper(mapper)}.")
    transfer = config.get("transfer")
    if isinstance(transfer, Mapping):
        left = [
            f"its first {transfer.get('native_head')} and last {transfer.get('hold_back')} context tokens",
            f"{float(transfer['recompute_share']):.0%} of the rest"
            if transfer.get("recompute_share")
            else "",
        ]
        lines.append(f"The target computes itself: {' and '.join(part for part in left if part)}.")
    return lines


def _fleet(config: Mapping[str, Any]) -> list[str]:
    """The ids of the fleet's models, where the run's stages name it."""
    if "fleet" not in (config.get("stages") or ()):
        return []
    return [str(entry["id"] if isinstance(entry, Mapping) else entry) for entry in config.get("fleet") or ()]


def _mapper(mapper: Mapping[str, Any]) -> str:
    parts = [str(mapper["kind"])]
    if mapper["kind"] in ("linear", "mlp"):
        parts += [
            f"{spoken(name)} {mapper[name]}"
            for name in ("support", "regressors", "native_layers", "top_k", "ridge_lambda", "row_weights")
            if mapper.get(name) not in (None, 0, "none")
        ]
    return ", ".join(parts)


def _cards_of_the_map(directory: Path) -> list[Card]:
    """R² on rows held out, attention-output cosine, and how much faster than a re-prefill."""
    dealt = []
    r2 = [row for row in read_table(directory, "r2") if row["split"] == "held_out"]
    if r2:
        means = [
            fraction(mean(number(row["r2"]) for row in r2 if row["kind"] == kind))
            for kind in ("key", "value")
        ]
        dealt.append(Card("held-out R², keys | values", " | ".join(means), "mean over layers and heads"))
    attention = read_table(directory, "attention_output")
    for text in texts_of(attention)[:1]:
        rows = [row for row in attention if str(row.get("text") or "") == text]
        where = f"on {spoken(text)}" if text else "on held-out text"
        dealt.append(
            Card("attention-output cosine", fraction(mean(number(r["cosine"]) for r in rows)), where)
        )
    latency = read_table(directory, "latency")
    if latency:
        longest = max(int(row["length"]) for row in latency)
        found = {row["arm"]: row for row in latency if int(row["length"]) == longest}
        warm, cold = latency_gains(found)
        if warm == warm:
            detail = f"at {longest:,} tokens{f'; {cold:.1f}× cold' if cold == cold else ''}"
            dealt.append(Card("speed over re-prefill", f"{warm:.1f}×", detail))
    return dealt
