"""The figures of a run: which its tables allow, and what each shows, in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kvmap.figures import diagnostics, errors, run
from kvmap.figures.fleet import fleet_heat_maps
from kvmap.figures.style import number, spoken
from kvmap.files import replacing
from kvmap.report.page import Picture
from kvmap.report.reading import Row, read_arms, read_table
from kvmap.tracking import FIGURE_DPI

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CAPTIONS = {
    "accuracy": "Accuracy of every arm by task, ± 1 standard error; dotted: chance.",
    "perplexity": "Perplexity per token of every arm, ± 1 standard error; lower is better.",
    "conversations": "F1 by turn, and by how many points the mapped cache falls behind, 95 % interval.",
    "needle": "Accuracy of recall by length of the context and depth of the fact.",
    "length": "Context carried by the tokens handed over, 95 % intervals.",
    "growth": "What is lost to native as the target adds tokens of its own, 95 % intervals.",
    "r2": "R² of the map by target layer and KV head: keys and values, on rows fitted and held out.",
    "probes": "R² of one source layer alone for one target layer: keys and values; the best is marked.",
    "attention": "Attention-output cosine and concentration of the error by target layer and query head.",
    "errors_by_token": "Relative error of keys and values by kind of token, mean and range over layers.",
    "errors_by_position": "Error and attention-output cosine by position; next-token KL after the context.",
    "spectrum": "Cumulated share of the error, and of the target, in the largest components.",
    "fleet": "Context carried by source and target of a fleet: direct, and the best way round.",
    "latency": "Time against context length: median, 20th to 80th percentile, ms.",
    "latency_cost": "Re-prefill over map, warm and cold hand-off; and each arm's share of the roofline.",
    "economics": "Time to take over by length and link; cost by escalation rate and price. Black: even.",
    "study": "Context carried and accuracy kept by configuration, 95 % intervals.",
}
"""By the name of the figure's file, in reading order."""
OF_THE_MAP = ("r2", "probes", "attention", "errors_by_token", "errors_by_position", "spectrum")


def draw_figures(directory: Path) -> dict[str, Figure]:
    """Every figure the run's tables allow, by name."""
    arms = read_arms(directory)
    metrics = {row["metric"] for row in arms if math.isfinite(number(row["value"]))}
    drawn: dict[str, Figure] = {}
    for name, draw in _of_tables(directory):
        drawn[name] = draw()
    if "accuracy" in metrics:
        drawn["accuracy"] = run.accuracy_bars(arms)
    if "perplexity" in metrics:
        drawn["perplexity"] = run.perplexity_bars(arms)
    if latency := read_table(directory, "latency"):
        drawn["latency"] = run.latency_lines(latency)
    return drawn


def _of_tables(directory: Path) -> Iterator[tuple[str, Callable[[], Figure]]]:
    """Figures of the map: each where its table has anything to draw."""
    r2 = read_table(directory, "r2")
    if any(row["split"] in ("fit", "held_out") for row in r2):
        yield "r2", lambda: run.r2_heat_map(r2)
    probes = read_table(directory, "probes")
    if _has(probes, "r2"):
        yield "probes", lambda: diagnostics.probe_heat_maps(probes)
    attention = read_table(directory, "attention_output")
    if _has(attention, "cosine"):
        yield "attention", lambda: diagnostics.attention_heat_maps(attention)
    by_token = read_table(directory, "errors_by_token")
    if _has(by_token, "key_error") or _has(by_token, "value_error"):
        yield "errors_by_token", lambda: errors.token_kind_dots(by_token)
    by_position = read_table(directory, "errors_by_position")
    next_token = read_table(directory, "next_token")
    if _has(by_position, "key_error") or _has(by_position, "cosine"):
        yield "errors_by_position", lambda: errors.position_lines(by_position, next_token)
    spectrum = read_table(directory, "spectrum")
    if _has(spectrum, "error_share"):
        summary = read_table(directory, "spectrum_summary")
        yield "spectrum", lambda: errors.spectrum_lines(spectrum, summary)
    routes = read_table(directory, "fleet_routes")
    if _has(routes, "context_carried"):
        relays = read_table(directory, "fleet_best_relays")
        yield "fleet", lambda: fleet_heat_maps(routes, relays)


def _has(rows: Iterable[Row], column: str) -> bool:
    return any(math.isfinite(number(row.get(column))) for row in rows)


def save_figures(directory: Path, into: Path | None = None) -> list[Path]:
    """Draws them to figures/<name>.png again, in the run's own directory where no other is named."""
    folder = Path(directory if into is None else into)
    return [save(figure, folder, name) for name, figure in draw_figures(directory).items()]


def save(figure: Figure, directory: Path, name: str) -> Path:
    """Writes one figure to <directory>/figures/<name>.png, in one step."""
    path = directory / "figures" / f"{name}.png"
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=FIGURE_DPI)
    return path


def pictures_of(*directories: Path) -> list[Picture]:
    """The pictures in figures/ of these: those that have a caption in its order, then all others by name.

    Of two of one name, the later directory's counts.
    """
    found = {path.stem: path for folder in directories for path in sorted(Path(folder).glob("figures/*.png"))}
    order = [name for name in CAPTIONS if name in found]
    order += [name for name in sorted(found) if name not in CAPTIONS]
    return [Picture(name, found[name], CAPTIONS.get(name, f"{spoken(name).capitalize()}.")) for name in order]
