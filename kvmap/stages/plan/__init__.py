"""Stage `plan`: what the run will hold and cost, from the two configurations alone, and what it cannot do.

It loads no weights. Everything that configs can already tell to be wrong is said here, all at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from kvmap.config import ConfigError
from kvmap.metrics import Metric
from kvmap.planning.memory import DISK, Machine, Need, needs
from kvmap.planning.models import ModelFacts
from kvmap.planning.remedies import advise
from kvmap.planning.run import PlannedRun
from kvmap.planning.work import Work, run_work
from kvmap.stages.context import Context
from kvmap.stages.plan.mistakes import (
    geometry_mistakes,
    length_mistakes,
    memory_mistakes,
    row_mistakes,
)
from kvmap.stages.plan.planned import model_facts, not_counted, planned_machine, planned_run
from kvmap.stages.plan.tables import advice_rows, memory_rows, quantity_rows, work_rows


def check(ctx: Context) -> None:
    """Refuse what cannot work before any weights load.

    Raises:
        ConfigError: every setting that the two models' geometry contradicts.
        KvmapError: a model that is missing or unsupported, or tokenizers that differ.
    """
    if set(ctx.cfg.stages) <= {"fleet", "report"}:
        return  # a fleet has models of its own, and judges them itself
    mistakes = [*geometry_mistakes(ctx), *length_mistakes(ctx), *row_mistakes(ctx)]
    mistakes = mistakes or [*memory_mistakes(ctx)]  # which counts on a geometry that is right
    if mistakes:
        raise ConfigError(mistakes)
    if _reads_models(ctx):
        ctx.pair.check()
        identities = {"source": ctx.pair.source_identity, "target": ctx.pair.target_identity}
        ctx.run.note(
            models={
                role: {**asdict(identity), "revision": ctx.specs[role].revision}
                for role, identity in identities.items()
            }
        )


def run(ctx: Context) -> None:
    """Tables: `plan` (sizes), `plan_work` (FLOPs and seconds), `plan_memory` (bytes by stage and place) and,
    where something does not fit, `plan_settings` (overrides that make it fit). Sizes, seconds and peaks are
    metrics too.

    Of a model of which a pair file's geometry is all that is known, sizes of caches and maps alone.
    """
    machine, models = planned_machine(ctx), model_facts(ctx)
    planned = None if models is None else planned_run(ctx, models)
    rows = quantity_rows(ctx, models, planned, machine)
    ctx.run.table("plan", rows)
    ctx.run.log({f"plan/model/{row['part']}/{row['quantity']}": Metric(row["value"]) for row in rows})
    if planned is None or models is None:
        return
    work = run_work(planned, planned.settings, machine, ctx.cfg.threads)
    held = needs(planned, planned.settings, machine)
    ctx.run.table("plan_work", work_rows(work))
    ctx.run.table("plan_memory", memory_rows(held, machine))
    ctx.run.log(_metrics(work, held))
    ctx.run.note(planned_for=_described(ctx, machine, models))
    _advise(ctx, planned, machine)


def _advise(ctx: Context, planned: PlannedRun, machine: Machine) -> None:
    advice = advise(planned, machine, ctx.keys)
    if advice.overrides:
        ctx.run.table("plan_settings", advice_rows(advice))
    if advice.left_over:
        ctx.run.note(plan_left_over_bytes=int(advice.left_over))


def _metrics(work: Sequence[Work], held: Sequence[Need]) -> dict[str, Metric]:
    seconds: dict[str, float] = {}
    for each in work:
        seconds[each.stage] = seconds.get(each.stage, 0.0) + each.seconds
    found = {f"plan/stage/{stage}/seconds": Metric(value) for stage, value in seconds.items()}
    for need in held:
        if need.place != DISK:
            found[f"plan/stage/{need.stage}/{need.place}_bytes"] = Metric(need.n_bytes)
    return found


def _described(ctx: Context, machine: Machine, models: dict[str, ModelFacts]) -> dict[str, object]:
    device = machine.device
    return {
        "device": device.name,
        "device_bytes": device.memory_bytes,
        "host_bytes": machine.host_bytes,
        "efficiency": device.efficiency,
        "models": {
            role: {"dtype": model.dtype, "quantisation": model.quantisation, "known_from": model.origin}
            for role, model in models.items()
        },
        "not_counted": not_counted(ctx),
    }


def _reads_models(ctx: Context) -> bool:
    """Whether a stage loads the two models."""
    return bool(set(ctx.cfg.stages) - {"plan", "economics", "report"}) and not ctx.random_weights
