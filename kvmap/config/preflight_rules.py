"""What a preflight can be asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from kvmap.config.judging import is_integer, unknown_name
from kvmap.config.schema import PREFLIGHT_FAMILIES, PREFLIGHT_MAPPERS, Config


def preflight_mistakes(cfg: Config) -> Iterator[str]:
    """Mistakes of `preflight`."""
    asked, key = cfg.preflight, "preflight"
    if not asked.mappers:
        yield f"{key}.mappers=[]: expected at least one of {', '.join(PREFLIGHT_MAPPERS)}"
    for name in asked.mappers:
        if name not in PREFLIGHT_MAPPERS:
            yield unknown_name(f"{key}.mappers", name, PREFLIGHT_MAPPERS)
    if len(set(asked.mappers)) < len(asked.mappers):
        yield f"{key}.mappers={list(asked.mappers)}: a name stands twice; name each once"
    if not is_integer(asked.n_sequences) or asked.n_sequences < 2:
        yield f"{key}.n_sequences={asked.n_sequences}: expected at least 2, one to fit on and one held out"
    if not 0 < asked.min_retention < math.inf:
        yield (
            f"{key}.min_retention={asked.min_retention}: expected a number above 0; 1 asks for the target's "
            "own accuracy"
        )
    if not 0 <= asked.reach < math.inf:
        yield f"{key}.reach={asked.reach}: expected a finite number of at least 0"
    if asked.family not in PREFLIGHT_FAMILIES:
        yield unknown_name(f"{key}.family", asked.family, PREFLIGHT_FAMILIES)
    yield from _bounds(cfg)
    yield from _prompts(cfg)
    for path in asked.evidence:
        if not Path(path).expanduser().is_file():
            yield (
                f"{key}.evidence: no file {path}; expected a table of cases, which python -m kvmap.preflight "
                "table makes"
            )
    if "preflight" in cfg.stages and cfg.pair.alignment != "refuse":
        yield (
            f"pair.alignment={cfg.pair.alignment} with stages=[preflight]: the recorded cases are of pairs "
            "that share a tokenizer; leave the stage out, or the alignment at refuse"
        )


def _prompts(cfg: Config) -> Iterator[str]:
    asked, key = cfg.preflight.prompts, "preflight.prompts"
    if not is_integer(asked.n) or asked.n < 1:
        yield f"{key}.n={asked.n}: expected a whole number of at least 1"
    elif 0 < asked.n < len(asked.paths):
        yield f"{key}.n={asked.n} of {len(asked.paths)} files: expected one of each or more"
    for path in asked.paths:
        if not Path(path).expanduser().exists():
            yield (
                f"{key}.paths: no file or folder {path}; expected JSON lines that hold a prompt under "
                f"the field {asked.field!r} ({key}.field)"
            )


def _bounds(cfg: Config) -> Iterator[str]:
    """A bound of that confidence is a residual of one of the pairs, so it needs so many of them."""
    asked = cfg.preflight
    if not 0.5 <= asked.confidence < 1:
        yield f"preflight.confidence={asked.confidence}: expected at least 0.5 and less than 1"
        return
    fewest = max(2, math.ceil(1 / (1 - asked.confidence) - 1 - 1e-9))
    if not is_integer(asked.min_pairs) or asked.min_pairs < fewest:
        yield (
            f"preflight.min_pairs={asked.min_pairs}: a bound of preflight.confidence={asked.confidence} "
            f"needs {fewest} pairs or more; raise the one or lower the other"
        )
