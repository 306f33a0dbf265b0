"""Settings that make a run fit, the least costly first, as overrides to paste."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from kvmap.fit.planner import best_plan
from kvmap.planning.memory import DEVICE, HOST, Machine, Need, needs, offloaded_reads, overflow
from kvmap.planning.run import ROLES, PlannedRun, Settings

GIB = 2**30

STAGES = ("calibrate", "fit", "diagnose", "evaluate")
"""That a run of one model at a time can have."""

Change = Callable[[Settings], Settings]


@dataclass(frozen=True)
class Remedy:
    """One change of settings.

    Attributes:
        name: what it changes; of one name the last counts.
        why: what it does, and what it costs.
        change: the settings with it.
        same_map: whether the map that is fitted stays the same.
    """

    name: str
    why: str
    change: Change
    same_map: bool = True


@dataclass(frozen=True)
class Advice:
    """How to make a run fit.

    Attributes:
        overrides: to paste.
        reasons: of each, in the same order.
        settings: with them.
        left_over: bytes that still do not fit; 0 where all do.
    """

    overrides: tuple[str, ...]
    reasons: tuple[str, ...]
    settings: Settings
    left_over: float


def advise(run: PlannedRun, machine: Machine, keys: dict[str, str]) -> Advice:
    """The fewest remedies that make a run fit, tried in the order of what they cost.

    Args:
        run: planned, which may fit already.
        machine: to fit.
        keys: where in the configuration each role's model stands: {"source": "pair.source", ...}.
    """
    chosen: list[Remedy] = []
    for remedy in remedies(run, machine):
        if _cost(run, machine, chosen)[0] == 0:
            break
        trial = _with(chosen, remedy)
        if _cost(run, machine, trial)[0] < _cost(run, machine, chosen)[0]:
            chosen = trial
    for remedy in chosen[::-1]:  # what came first may have made what came later needless, or the reverse
        without = [each for each in chosen if each is not remedy]
        if _cost(run, machine, without) <= _cost(run, machine, chosen):
            chosen = without
    trial = _with(chosen, _more_at_a_time(run, machine))
    if _cost(run, machine, trial) < _cost(run, machine, chosen):
        chosen = trial
    settings = _applied(run.settings, chosen)
    reasons = {remedy.name: remedy.why for remedy in chosen}
    lines = list(_overrides(run, settings, machine, keys))
    return Advice(
        tuple(line for _, line in lines),
        tuple(reasons[name] for name, _ in lines),
        settings,
        overflow(needs(run, settings, machine), machine),
    )


def remedies(run: PlannedRun, machine: Machine) -> Iterator[Remedy]:
    """All of them, the least costly first."""
    if not machine.on_host:
        yield Remedy("tables", "moments grow in host memory", lambda s: replace(s, tables_on_host=True))
    yield _fewer_at_a_time(run, machine)
    yield Remedy(
        "sequential",
        "one model in memory at a time, and no benchmark, which holds both",
        lambda s: replace(s, sequential=True, evaluation_sequential=True),
    )
    for name, why in (
        ("batch", "fewer sequences at a time while calibrating"),
        ("evaluation_batch", "fewer sequences at a time while evaluating"),
    ):
        size = run.settings.batch_size if name == "batch" else run.settings.evaluation_batch_size
        while size > 1:
            size //= 2
            yield Remedy(name, why, _batch(name, size))
    for role in sorted(ROLES, key=lambda role: -run.models[role].parameters):
        why = f"the {role}'s weights rest where there is room, host memory and then disk, and are brought in"
        yield Remedy(role, why, _placed(role))
    # once more, with the room that the others have left
    yield _fewer_at_a_time(run, machine)
    yield Remedy(
        "mode",
        "only moments of chosen layers; another k needs them again",
        lambda s: replace(s, mode="selected"),
    )
    yield Remedy(
        "support",
        "each head reads its own head of each source layer: another map, a fraction of the size",
        lambda s: replace(s, support="head_local"),
        same_map=False,
    )
    k = run.settings.top_k
    while k > 1:
        k //= 2
        yield Remedy("top_k", "fewer source layers: another map", _top_k(k), same_map=False)


def _fewer_at_a_time(run: PlannedRun, machine: Machine) -> Remedy:
    return _budget_remedy(run, machine, "fewer moments at a time, in more passes over the text")


def _more_at_a_time(run: PlannedRun, machine: Machine) -> Remedy:
    return _budget_remedy(run, machine, "more moments at a time, in fewer passes over the text")


def _budget_remedy(run: PlannedRun, machine: Machine, why: str) -> Remedy:
    return Remedy("budget", why, lambda s: replace(s, budget_bytes=_budget(run, s, machine)))


def _with(chosen: Sequence[Remedy], remedy: Remedy) -> list[Remedy]:
    """Of one name the last counts; a budget is taken of the room that all others leave."""
    others = [each for each in chosen if each.name != remedy.name]
    found = [*others, remedy]
    return sorted(found, key=lambda each: each.name == "budget")


def _batch(name: str, size: int) -> Change:
    if name == "batch":
        return lambda s: replace(s, batch_size=size)
    return lambda s: replace(s, evaluation_batch_size=size)


def _placed(role: str) -> Change:
    return lambda s: replace(s, placed=s.placed | {role})


def _top_k(k: int) -> Change:
    return lambda s: replace(s, top_k=k)


def _budget(run: PlannedRun, settings: Settings, machine: Machine) -> int | None:
    """What moments and rows may take of the room that is left; as it was where they would not fit that.

    Whole tenths of a GiB, since the setting is written so.
    """
    place = HOST if settings.tables_on_host or machine.on_host else DEVICE
    of_stage = [need for need in needs(run, settings, machine) if need.stage == "calibrate"]
    ours = ("moments", "rows", "rows or forward")
    other = sum(
        size
        for need in of_stage
        if need.place == place
        for what, size in need.parts.items()
        if what not in ours
    )
    room = int((machine.capacity(place) - other) / (GIB / 10)) * GIB // 10
    if room <= 0:
        return settings.budget_bytes
    trial = replace(settings, budget_bytes=room)
    return room if best_plan(run.moments(trial, machine.host_bytes)) else settings.budget_bytes


def _applied(settings: Settings, chosen: Sequence[Remedy]) -> Settings:
    for remedy in chosen:
        settings = remedy.change(settings)
    return settings


def _cost(run: PlannedRun, machine: Machine, chosen: Sequence[Remedy]) -> tuple[float, float, int]:
    """Bytes that do not fit, bytes of weights that are brought in over a run, and passes over the text."""
    settings = _applied(run.settings, chosen)
    found = needs(run, settings, machine)
    plan = run.chosen_moments(settings, machine.host_bytes)
    refused = 0 if plan.fits or not run.calibrates else plan.peak_bytes
    brought_in = offloaded_reads(run, settings, found, machine)
    return overflow(found, machine) + refused, brought_in, plan.n_passes


def _overrides(
    run: PlannedRun, settings: Settings, machine: Machine, keys: dict[str, str]
) -> Iterator[tuple[str, str]]:
    """Name of the remedy and override, for all that differs from the run's own settings."""
    own = run.settings
    if settings.tables_on_host != own.tables_on_host:
        yield "tables", "calibration.device=cpu"
    if settings.sequential != own.sequential:
        yield "sequential", "calibration.sequential=true"
        stages = [stage for stage in STAGES if run.asks(stage)]
        if run.asks("benchmark"):
            yield "sequential", f"stages=[{','.join(['plan', *stages, 'report'])}]"
    if settings.evaluation_sequential != own.evaluation_sequential:
        yield "sequential", "evaluation.sequential=true"
    if settings.batch_size != own.batch_size:
        yield "batch", f"calibration.batch_size={settings.batch_size}"
    if settings.evaluation_batch_size != own.evaluation_batch_size:
        yield "evaluation_batch", f"evaluation.batch_size={settings.evaluation_batch_size}"
    for role in sorted(settings.placed - own.placed):
        yield role, f"{keys[role]}.device_map=auto"
        yield role, f"'{keys[role]}.max_memory={_shares(run, settings, machine, role)}'"
    if settings.budget_bytes is not None and settings.budget_bytes != own.budget_bytes:
        yield "budget", f"calibration.memory_budget_gib={settings.budget_bytes / GIB:.1f}"
    if settings.mode != own.mode:
        yield "mode", f"calibration.mode={settings.mode}"
    if settings.support != own.support:
        yield "support", f"mapper.support={settings.support}"
    if settings.top_k != own.top_k:
        yield "top_k", f"mapper.top_k={settings.top_k}"


def _shares(run: PlannedRun, settings: Settings, machine: Machine, role: str) -> str:
    """What accelerate may use: the least that any stage leaves for this model's weights."""
    found = needs(run, settings, machine)
    places = [HOST] if machine.on_host else [DEVICE, HOST]
    names = {DEVICE: "0", HOST: "cpu"}
    shares = [f"{names[place]}: {_least(found, place, role, machine) // 2**20}MiB" for place in places]
    return "{" + ", ".join(shares) + "}"


def _least(found: Sequence[Need], place: str, role: str, machine: Machine) -> int:
    what = f"{role} weights"
    stages = {need.stage for need in found if what in need.parts}
    rooms = [
        machine.capacity(place) - need.held_bytes + need.parts.get(what, 0)
        for need in found
        if need.place == place and need.stage in stages
    ]
    return max(0, int(min(rooms, default=machine.capacity(place))))
