"""What a run is known by beside other runs: its headline numbers, its tags, its name."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvmap.metrics import Metric

TAG_CHARACTERS = 64  # W&B takes no longer ones

HEADLINE = {
    "accuracy": ("evaluate", "accuracy"),
    "retention": ("evaluate", "retention"),
    "floor_retention": ("evaluate", "floor_retention"),
    "gain_recovered": ("evaluate", "gain_recovered"),
    "context_carried": ("evaluate", "context_carried"),
    "perplexity": ("evaluate", "perplexity"),
    "kl_nats": ("evaluate", "kl_nats"),
    "attention_cosine": ("diagnose", "attention_cosine"),
    "r2_key": ("diagnose", "r2_key"),
    "r2_value": ("diagnose", "r2_value"),
}
"""Numbers of the mapped arm by which runs are compared, with the stage and the metric each comes from."""
CHOSEN_TASKS = {"evaluate": ("average", "tasks_average"), "diagnose": ("held_out", "questions", "evaluation")}
"""Of several tasks or texts that have the metric, the first of these; else the one that there is."""


def headline(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """The numbers that stand for a run, under `headline/<name>`; what it did not measure is left out."""
    return {f"headline/{name}": value for name, value in _headline(metrics)}


def _headline(metrics: Mapping[str, Metric]) -> Iterator[tuple[str, float]]:
    for name, (stage, metric) in HEADLINE.items():
        found = {
            key.split("/")[1]: entry.value
            for key, entry in metrics.items()
            if re.fullmatch(f"{stage}/[^/]+/mapped/{metric}", key) and math.isfinite(entry.value)
        }
        task = next((task for task in CHOSEN_TASKS[stage] if task in found), None)
        if task is None and len(found) == 1:
            task = next(iter(found))
        if task is not None:
            yield name, found[task]


def tags_of(config: Mapping[str, Any]) -> list[str]:
    """Pair, kind of the mapper, its support and the direction: what runs are filtered by."""
    pair, mapper = config.get("pair"), config.get("mapper")
    given = [
        pair.get("name") if isinstance(pair, Mapping) else pair,
        *([mapper.get("kind"), mapper.get("support")] if isinstance(mapper, Mapping) else [mapper]),
        config.get("direction"),
    ]
    return list(dict.fromkeys(str(tag)[:TAG_CHARACTERS] for tag in given if tag))


def name_of(study: str, directory: Path) -> str:
    """`<study>/<run>`, or `<study>/<sweep>/<job>`: the way from the study's folder to the run's."""
    parts = directory.absolute().parts
    if study not in parts:
        return f"{study}/{parts[-1]}"
    last = len(parts) - 1 - parts[::-1].index(study)
    return "/".join([study, *(parts[last + 1 :] or parts[-1:])])
