"""Where an arm's answers are kept: under the models, the mapper and the options that determine them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from kvmap import __version__
from kvmap.evaluation.answers import Answers
from kvmap.evaluation.stopwatch import Stopwatch
from kvmap.stages.context import Context, plain
from kvmap.transfer import TransferOptions

FOLDER = "answers"

_logger = logging.getLogger(__name__)

CONDITIONS_VERSION = 2
"""Of what a model reads, how a cache is transferred and mapped. It goes up when any of these changes what an
arm answers, so that answers from before are not taken for those after."""


def answers_for(
    ctx: Context, arm: str, protocol: Mapping[str, Any], *, options: TransferOptions | None = None
) -> Answers:
    """What is kept of an arm's answers, by item; new answers are added to it.

    Two runs share an arm's answers if they agree in all that determines them: the models the arm uses
    (weights, config, tokenizer, rope, dtype, and the conditions of `kvmap.evaluation.conditions`), the
    content of its mapper, the transfer options, the protocol and kvmap's version. `target` and `no_context`
    do not depend on source or mapper, so a sweep over mappers asks them once.

    Args:
        ctx: of the run.
        arm: one of `kvmap.evaluation.arms.ARMS`; any other name stands for an arm of its own that uses both
            models and the run's mapper.
        protocol: what is asked and how it is scored, with a version number. It names the batch size: the
            last digits of a score depend on it, and whoever compares batch sizes must not be given one
            and the same answer twice.
        options: how the arm's caches are transferred; None: as the run's are.
    """
    if not ctx.cfg.evaluation.reuse_answers:
        return Answers.in_memory()
    conditions = {
        "version": CONDITIONS_VERSION,
        "kvmap": __version__,
        **_arm_conditions(ctx, arm, ctx.options if options is None else options),
        "protocol": dict(protocol),
    }
    return Answers.open(ctx.store.root / FOLDER, plain(conditions))


@contextmanager
def reuse_noted(ctx: Context, part: str, answers: Mapping[str, Answers]) -> Iterator[None]:
    """Notes in run.json, however the block ends, how many answers of a part were kept from before, by arm."""
    try:
        yield
    finally:
        n_reused = {arm: kept.n_reused for arm, kept in answers.items()}
        ctx.run.note(n_reused={part: n_reused})
        if any(n_reused.values()):
            _logger.info("%s: answers kept from before, by arm: %s", part, n_reused)


@contextmanager
def time_noted(ctx: Context, part: str) -> Iterator[Stopwatch]:
    """A stopwatch, what it took noted in run.json however the block ends: the seconds of a part, by arm."""
    watch = Stopwatch()
    try:
        yield watch
    finally:
        ctx.run.note(seconds_by_arm={part: watch.record()})


def _arm_conditions(ctx: Context, arm: str, options: TransferOptions) -> dict[str, Any]:
    if arm == "source":
        return {"source": ctx.conditions("source"), "hold_back": options.hold_back}
    if arm in ("target", "no_context"):
        return {"arm": arm, "target": ctx.conditions("target"), "hold_back": options.hold_back}
    return {
        "source": ctx.conditions("source"),
        "target": ctx.conditions("target"),
        "mapper": _mapper(ctx, arm),
        "transfer": asdict(options),
    }


def _mapper(ctx: Context, arm: str) -> dict[str, Any]:
    """What determines the mapper of an arm, controls included."""
    native_layers = ctx.cfg.mapper.native_layers
    if arm == "raw":
        return {"kind": arm, "native_layers": native_layers}
    if arm == "bias_only":
        return {"kind": arm, "native_layers": native_layers, "rows": ctx.calibrated.rows_spec}
    own = {"kind": arm, "artifact": ctx.mapper_artifact.path.name}
    if arm != "random":
        return own
    # It imitates the scale of the fitted map, which the settings determine also where that is not the run's.
    return own | {
        "rows": ctx.calibrated.rows_spec,
        "settings": asdict(ctx.cfg.mapper),
        "selection": asdict(ctx.cfg.selection),
        "sensitivity_boundaries": ctx.cfg.calibration.sensitivity_boundaries,
    }
