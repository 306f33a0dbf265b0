"""Bytes of a run by stage and place, and whether they fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvmap.fit.spill import cache_file_bytes
from kvmap.planning.devices import Device
from kvmap.planning.run import ROLES, PlannedRun, Settings

PROCESS_BYTES = {"cpu": 510_000_000, "cuda": 3_000_000_000}
"""Resident memory of a process in which torch and transformers have built a model, beside its weights,
about; with CUDA its libraries too."""
HOST_SHARE = 0.95
"""Of a host's memory, what a run can take."""

DEVICE, HOST, DISK = "device", "host", "disk"
MAPPED = "moments, mapped from disk"
"""In memory as far as there is room: counted in a peak, but nothing fails for want of it."""


@dataclass(frozen=True)
class Machine:
    """What a run is planned for.

    Attributes:
        device: where models compute.
        host_bytes: memory of the host.
    """

    device: Device
    host_bytes: int

    @property
    def on_host(self) -> bool:
        """Whether the device has no memory of its own."""
        return self.device.memory_bytes is None

    def capacity(self, place: str) -> float:
        """Bytes that a place has for a run; of the disk nothing is known."""
        if place == DISK:
            return float("inf")
        usable = self.device.usable_bytes
        return HOST_SHARE * self.host_bytes if place == HOST or usable is None else usable


@dataclass(frozen=True)
class Need:
    """Bytes of one stage in one place, by what they hold."""

    stage: str
    place: str
    parts: Mapping[str, int]

    @property
    def n_bytes(self) -> int:
        """All of them."""
        return sum(self.parts.values())

    @property
    def held_bytes(self) -> int:
        """All but what is mapped from disk and goes where there is no room."""
        return self.n_bytes - self.parts.get(MAPPED, 0)

    def over(self, machine: Machine) -> float:
        """Bytes that do not fit; 0 where all do."""
        return max(0.0, self.held_bytes - machine.capacity(self.place))


class _Places:
    """Parts by place, of one stage; a device without memory of its own has the host's."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        process = PROCESS_BYTES["cpu" if machine.on_host else "cuda"]
        self.parts: dict[str, dict[str, int]] = {HOST: {"process": process}, DEVICE: {}, DISK: {}}

    def add(self, place: str, what: str, n_bytes: int) -> None:
        place = HOST if place == DEVICE and self.machine.on_host else place
        if n_bytes > 0:
            self.parts[place][what] = self.parts[place].get(what, 0) + n_bytes

    def room(self, place: str) -> int:
        return max(0, int(self.machine.capacity(place) - sum(self.parts[place].values())))

    def place_weights(self, role: str, n_bytes: int, *, spread: bool) -> None:
        """All on the device; spread, where there is room: device, host, then disk."""
        what = f"{role} weights"
        if not spread:
            return self.add(DEVICE, what, n_bytes)
        for place in (HOST,) if self.machine.on_host else (DEVICE, HOST):
            taken = min(n_bytes, self.room(place))
            self.add(place, what, taken)
            n_bytes -= taken
        return self.add(DISK, what, n_bytes)

    def needs(self, stage: str) -> Iterator[Need]:
        for place, parts in self.parts.items():
            if parts:
                yield Need(stage, place, parts)


def needs(run: PlannedRun, settings: Settings, machine: Machine) -> list[Need]:
    """What every stage will hold at its peak.

    Args:
        run: planned.
        settings: to plan with, which may be others than the run's.
        machine: to plan for.
    """
    found: list[Need] = []
    if run.calibrates:
        found += _calibrate(run, settings, machine)
    for stage, of_stage in (("fit", _fit), ("diagnose", _diagnose), ("evaluate", _evaluate)):
        if run.asks(stage):
            found += of_stage(run, settings, machine)
    # which holds both models, and is left out of a run that never does
    if run.asks("benchmark") and run.lengths and not (settings.sequential or settings.evaluation_sequential):
        found += _benchmark(run, settings, machine)
    return found


def overflow(found: list[Need], machine: Machine) -> float:
    """Bytes that do not fit, over all stages and places."""
    return sum(need.over(machine) for need in found)


def offloaded_reads(run: PlannedRun, settings: Settings, found: list[Need], machine: Machine) -> float:
    """Bytes of weights that are brought in, over all forwards: those that rest elsewhere than they compute.

    A calibration of one model at a time reads layer by layer: each weight once for all batches.
    """
    away = (DISK,) if machine.on_host else (HOST, DISK)
    per_batch = max(1, -(-run.n_sequences // settings.batch_size))
    scored = sum(-(-text.n // settings.evaluation_batch_size) for text in run.texts)
    reads = {
        "calibrate": 1 if settings.sequential else per_batch,
        "diagnose": -(-run.diagnosed[0] // settings.batch_size),
        "evaluate": run.n_arms * scored,
        "benchmark": 2 * run.benchmark_turns * len(run.lengths),
    }
    total = 0.0
    for need in found:
        if need.place in away:
            resting = sum(size for what, size in need.parts.items() if what.endswith("weights"))
            total += resting * reads.get(need.stage, 0)
    return total


def cache_bytes(run: PlannedRun, role: str, n_tokens: int) -> int:
    """Of one model's cache."""
    model = run.models[role]
    return model.geometry.kv_bytes(n_tokens, model.item_bytes)


def captures_bytes(run: PlannedRun) -> int:
    """Of both models' caches of the calibration text on disk."""
    n_tokens = run.n_sequences * run.sequence_length
    return sum(cache_file_bytes(model.geometry, n_tokens, model.item_bytes) for model in run.models.values())


def _weights(
    places: _Places, run: PlannedRun, settings: Settings, *, one_at_a_time: bool, logits: bool = True
) -> None:
    """Both models' weights, or the larger's alone; those that are spread come last, where room is left.

    On the host weights are mapped from their files: an output head of its own that no logits ask for is
    never read.
    """
    sizes = {role: run.models[role].weights_bytes(fp8=places.machine.device.fp8) for role in ROLES}
    if places.machine.on_host and not logits:
        sizes = {role: size - run.models[role].head_bytes for role, size in sizes.items()}
    if one_at_a_time:
        larger = max(sizes, key=sizes.__getitem__)
        sizes = {larger: sizes[larger]}
    for role in sorted(sizes, key=lambda role: role in settings.placed):
        places.place_weights(role, sizes[role], spread=role in settings.placed)


def _reading(run: PlannedRun, n_tokens: int) -> int:
    """Both caches of some tokens, and the widest forward on the way to them."""
    caches = sum(cache_bytes(run, role, n_tokens) for role in ROLES)
    return caches + max(model.prefill_bytes(n_tokens) for model in run.models.values())


def _calibrate(run: PlannedRun, settings: Settings, machine: Machine) -> Iterator[Need]:
    places = _Places(machine)
    tokens = settings.batch_size * run.sequence_length
    plan = run.chosen_moments(settings, machine.host_bytes)
    # the plan counts caches in 16 bits, as they come and once more those of a split
    wider = sum(2 * (m.item_bytes - 2) * m.geometry.kv_bytes(tokens, 1) for m in run.models.values())
    tables = min(plan.peak_bytes, plan.table_bytes)
    rows = plan.peak_bytes - tables + wider
    where = HOST if settings.tables_on_host else DEVICE
    places.add(where, "moments", tables)
    reading = _reading(run, tokens)
    if where == HOST and not machine.on_host:
        places.add(HOST, "rows", rows)
        places.add(DEVICE, "caches and forward", reading)
    else:  # of the two the larger: rows are made once both models have read
        places.add(where, "rows or forward", max(rows, reading))
    if run.keeps_captures or settings.sequential:
        bound = run.spill_bytes if run.spill_bytes is not None and not run.keeps_captures else None
        waiting = captures_bytes(run)
        places.add(DISK, "captured caches", waiting if bound is None else min(waiting, bound))
    places.add(DISK, "moments", plan.table_bytes)
    _weights(places, run, settings, one_at_a_time=settings.sequential, logits=False)
    yield from places.needs("calibrate")


def fit_bytes(run: PlannedRun, settings: Settings, machine: Machine) -> dict[str, int]:
    """What a linear fit holds beside the process: half of the moments, one system, and the map.

    Of a system of p features and m targets in float64: Gram matrix and factor, right-hand side and solution.
    m is a layer's channels where target layers select other source layers, else those of all layers.
    """
    plan = run.chosen_moments(settings, machine.host_bytes)
    p, shared = run.n_features(settings), settings.top_k >= len(run.layout.source_shape)
    local = settings.support == "head_local"
    of_layer = [heads * width // (heads if local else 1) for heads, width in run.layout.target_shape]
    m = sum(of_layer) if shared else max(of_layer)
    weights = run.mapper_bytes(settings)
    system = 8 * (2 * p * p + 2 * p * m)
    return {MAPPED: plan.table_bytes // 2, "system": max(system, weights), "map": weights}


def _fit(run: PlannedRun, settings: Settings, machine: Machine) -> Iterator[Need]:
    after_calibration = run.asks("calibrate")
    places = _Places(machine)
    for what, n_bytes in fit_bytes(run, settings, machine).items():
        places.add(HOST, what, n_bytes)
    places.add(DISK, "map", run.mapper_bytes(settings))
    if after_calibration and not settings.sequential:  # which leaves its models loaded
        _weights(places, run, settings, one_at_a_time=False, logits=False)
    yield from places.needs("fit")


def _diagnose(run: PlannedRun, settings: Settings, machine: Machine) -> Iterator[Need]:
    n, length = run.diagnosed
    places = _Places(machine)
    tokens = min(settings.batch_size, max(n, 1)) * length
    mapped = cache_bytes(run, "target", tokens)
    places.add(HOST, MAPPED, run.chosen_moments(settings, machine.host_bytes).table_bytes)
    places.add(DEVICE, "map", run.mapper_bytes(settings))
    # keys and values of one layer, true and mapped, in float32 beside the caches
    places.add(DEVICE, "caches and forward", _reading(run, tokens) + 2 * mapped)
    _weights(places, run, settings, one_at_a_time=settings.sequential)
    yield from places.needs("diagnose")


def _evaluate(run: PlannedRun, settings: Settings, machine: Machine) -> Iterator[Need]:
    if not run.texts:
        return
    places, size = _Places(machine), settings.evaluation_batch_size
    places.add(DEVICE, "maps", 2 * run.mapper_bytes(settings))
    most = 0
    for text in run.texts:
        tokens = min(size, text.n) * (text.prefix + text.scored)
        # logits as they come and as log-probabilities in float32, twice
        vocabulary = run.models["target"].geometry.vocab_size
        logits = min(size, text.n) * text.scored * vocabulary * (run.models["target"].item_bytes + 8)
        most = max(most, _reading(run, tokens) + 2 * cache_bytes(run, "target", tokens) + logits)
    places.add(DEVICE, "caches, forward and logits", most)
    _weights(places, run, settings, one_at_a_time=settings.evaluation_sequential)
    yield from places.needs("evaluate")


def _benchmark(run: PlannedRun, settings: Settings, machine: Machine) -> Iterator[Need]:
    places = _Places(machine)
    tokens = run.benchmark_batch * max(run.lengths)
    places.add(DEVICE, "map", run.mapper_bytes(settings))
    places.add(DEVICE, "caches and forward", _reading(run, tokens) + 2 * cache_bytes(run, "target", tokens))
    _weights(places, run, settings, one_at_a_time=False)
    yield from places.needs("benchmark")
