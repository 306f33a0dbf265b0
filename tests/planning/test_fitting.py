"""What fits, and whether what is advised does."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any, cast

import pytest

from kvmap.config import validate
from kvmap.planning.memory import DEVICE, DISK, HOST, MAPPED, Machine, Need, needs, overflow
from kvmap.planning.remedies import advise
from kvmap.planning.run import PlannedRun
from kvmap.stages.context import Context
from kvmap.stages.plan.planned import model_facts, planned_machine, planned_run
from kvmap.tracking import Run
from tests.test_config import with_settings

GIB = 2**30


class Quiet:
    """A record that nothing is written to."""

    def note(self, **facts: Any) -> None: ...


def planned(overrides: str) -> tuple[PlannedRun, Machine, Context]:
    ctx = Context(with_settings(overrides), cast(Run, Quiet()))
    models = model_facts(ctx)
    assert models is not None
    return planned_run(ctx, models), planned_machine(ctx), ctx


def left_over(overrides: str) -> float:
    run, machine, _ = planned(overrides)
    plan = run.chosen_moments(run.settings, machine.host_bytes)
    refused = 0 if plan.fits else plan.peak_bytes
    return overflow(needs(run, run.settings, machine), machine) + refused


BIG = "stages=[plan] pair=llama8b_70b mapper.top_k=20 calibration=fineweb_edu"
CASES = {
    "two models on one device": (
        "stages=[plan] pair=qwen3_14b_32b mapper=head_local mapper.top_k=8 plan.device=a100 "
        "plan.host_memory_gib=256"
    ),
    "moments on the device": (
        "stages=[plan] pair=qwen3_14b_32b mapper.top_k=8 calibration=fineweb_edu plan.device=h200 "
        "plan.host_memory_gib=256"
    ),
    "a target larger than the device": f"{BIG} plan.device=h100 plan.host_memory_gib=512",
    "a target larger than host and device": f"{BIG} plan.device=h100 plan.host_memory_gib=64",
    "no device": "stages=[plan] pair=qwen3_4b_8b mapper.top_k=8 plan.device=cpu plan.host_memory_gib=24",
    "moments beyond their budget": (
        "stages=[plan] pair=qwen3_06b_17b plan.device=cpu plan.host_memory_gib=32 mapper=head_local "
        "calibration.memory_budget_gib=0.1"
    ),
    "a long forward": (
        "stages=[plan] pair=qwen3_17b_4b mapper=head_local mapper.top_k=4 plan.device=l4 "
        "calibration.batch_size=64 calibration.sequence_length=4096 plan.host_memory_gib=64"
    ),
}


def as_settings(overrides: tuple[str, ...]) -> str:
    """What a shell makes of them; spaces within values are taken out, at which the tests part overrides."""
    return " ".join(word.replace(" ", "") for word in shlex.split(" ".join(overrides)))


@pytest.mark.parametrize("name", CASES)
def test_what_is_advised_is_right_and_fits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The overrides, pasted: the configuration is judged right, and its own plan finds that all fits."""
    monkeypatch.setattr("kvmap.stages.context.read_geometry", not_reached)
    monkeypatch.setattr("kvmap.planning.models.load_config", not_reached)
    overrides = CASES[name]
    assert left_over(overrides) > 0
    run, machine, ctx = planned(overrides)
    advice = advise(run, machine, ctx.keys)
    assert advice.left_over == 0
    settings = as_settings(advice.overrides)
    asked = [word for word in f"{overrides} {settings}".split() if not word.startswith("stages=")]
    stages = [word for word in settings.split() if word.startswith("stages=")]
    assert validate(with_settings(" ".join([*asked, *stages]))) == []
    assert left_over(" ".join([*asked, "stages=[plan]"])) == 0


def not_reached(spec: Any) -> Any:
    from kvmap.models.spec import ModelNotFound

    raise ModelNotFound(f"{spec.id}: no hub here")


def test_a_run_that_fits_is_told_nothing() -> None:
    run, machine, ctx = planned("pair=tiny plan.device=cpu plan.host_memory_gib=16")
    assert advise(run, machine, ctx.keys).overrides == ()


def test_nothing_but_another_map_makes_it_fit_only_when_all_else_fails() -> None:
    run, machine, ctx = planned(f"{BIG} plan.device=h100 plan.host_memory_gib=512")
    assert not any(line.startswith("mapper.") for line in advise(run, machine, ctx.keys).overrides)


def test_of_what_can_never_fit_the_plan_says_how_much_is_left() -> None:
    run, machine, ctx = planned(f"{BIG} plan.device=h100 plan.host_memory_gib=1")
    assert advise(run, machine, ctx.keys).left_over > 0


def test_roles_are_named_as_the_configuration_has_them() -> None:
    run, machine, ctx = planned(f"{BIG} direction=down plan.device=h100 plan.host_memory_gib=512")
    lines = advise(run, machine, ctx.keys).overrides
    assert "pair.target.device_map=auto" in lines  # the 70B model, which is the source here
    assert not any(line.startswith("pair.source") for line in lines)


def test_pages_mapped_from_disk_are_counted_and_needed_by_nothing() -> None:
    _, machine, _ = planned("pair=tiny plan.device=cpu plan.host_memory_gib=1")
    need = Need("fit", HOST, {"process": GIB // 2, MAPPED: 10 * GIB})
    assert need.n_bytes > 10 * GIB
    assert need.over(machine) == 0


def test_weights_spread_over_what_is_left_in_order() -> None:
    run, machine, _ = planned(f"{BIG} plan.device=h100 plan.host_memory_gib=64")
    settings = replace(run.settings, tables_on_host=True, placed=frozenset({"target"}))
    found = {need.place: need for need in needs(run, settings, machine) if need.stage == "calibrate"}
    weights = run.models["target"].weights_bytes(fp8=True)
    parts = [found[place].parts.get("target weights", 0) for place in (DEVICE, HOST, DISK)]
    assert sum(parts) == weights
    assert found[DEVICE].n_bytes == pytest.approx(machine.capacity(DEVICE), abs=1)
    assert found[HOST].over(machine) == 0
    assert parts[2] > 0


def test_a_model_that_waits_is_not_in_memory() -> None:
    run, machine, _ = planned("pair=qwen3_14b_32b mapper=head_local stages=[plan] plan.device=h200")
    both, one = (
        next(
            need.n_bytes
            for need in needs(run, replace(run.settings, sequential=sequential), machine)
            if (need.stage, need.place) == ("calibrate", DEVICE)
        )
        for sequential in (False, True)
    )
    assert both - one == run.models["source"].weights_bytes()
