"""FLOPs and seconds of every stage on a named device, at a stated share of its peak."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvmap.fit.features import n_channels
from kvmap.fit.planner import table_sizes
from kvmap.planning.devices import DISK_BYTES_PER_S, Device, host_device
from kvmap.planning.memory import Machine
from kvmap.planning.models import ModelFacts
from kvmap.planning.run import PlannedRun, Settings

_BLOCK_FEATURES = 512  # of the Gram matrix, those on and above the diagonal are multiplied


@dataclass(frozen=True)
class Work:
    """A part of a stage.

    Attributes:
        stage, what: of the run.
        flops: floating-point operations; a multiply-add counts as two.
        n_bytes: that are moved at least: weights once for each forward, or what is read of the disk.
        seconds: about.
    """

    stage: str
    what: str
    flops: float
    n_bytes: float
    seconds: float


def run_work(run: PlannedRun, settings: Settings, machine: Machine, threads: int | None = None) -> list[Work]:
    """The work of all planned stages.

    It counts products and what they have to read. Python, tokenizing, kernels too small for the device and
    statistics over items come on top, and are most of a run of small models.

    Args:
        run: planned.
        settings: to plan with.
        machine: to plan for.
        threads: of the host's processor, which solves the fit's systems.
    """
    planner = _Planner(run, settings, machine, threads)
    found: list[Work] = []
    if run.calibrates or run.asks("benchmark"):
        found += planner.load()
    if run.calibrates:
        found += planner.calibrate()
    for stage in ("fit", "diagnose", "evaluate", "benchmark"):
        if run.asks(stage):
            found += getattr(planner, stage)()
    return found


class _Planner:
    def __init__(self, run: PlannedRun, settings: Settings, machine: Machine, threads: int | None) -> None:
        self.run, self.settings, self.machine = run, settings, machine
        self.host = machine.device if machine.on_host else host_device(threads)
        self.plan = run.chosen_moments(settings, machine.host_bytes)

    def load(self) -> Iterator[Work]:
        size = sum(model.weights_bytes(fp8=True) for model in self.run.models.values())
        yield Work("load", "weights, read and hashed", 0.0, size, size / DISK_BYTES_PER_S)

    def calibrate(self) -> Iterator[Work]:
        run, settings, n_passes = self.run, self.settings, self.plan.n_passes
        # captures that are kept are read again instead of the models
        reads = 1 if run.keeps_captures else n_passes
        n_batches = -(-run.n_sequences // settings.batch_size)
        for role, model in run.models.items():
            flops = reads * run.n_sequences * model.work.run(1, run.sequence_length)
            yield self._forward("calibrate", f"{role} reads", model, flops, reads * n_batches)
        flops = run.n_rows * _moments_flops(run, settings, self.plan.mode)
        device = self.host if settings.tables_on_host else self.machine.device
        seconds = device.seconds(flops, run.product_dtype)
        yield Work("calibrate", "moments", flops, 0.0, seconds)

    def fit(self) -> Iterator[Work]:
        run, settings = self.run, self.settings
        p = run.n_features(settings)
        heads = max(n for n, _ in run.layout.target_shape) if settings.support == "head_local" else 1
        shared = settings.top_k >= len(run.layout.source_shape)
        n_mapped = len(run.layout.target_shape) - run.native_layers
        n_systems = 2 * heads * (1 if shared else n_mapped)
        # a factor for each system, and two triangular solves for each target channel of each kind
        solves = 4.0 * p * p * n_channels(run.layout.target_shape[run.native_layers :])
        flops = n_systems * p**3 / 3 + solves
        yield Work("fit", "systems", flops, 0.0, self.host.seconds(flops, "float64"))

    def diagnose(self) -> Iterator[Work]:
        n, length = self.run.diagnosed
        for role, model in self.run.models.items():
            flops = n * model.work.run(1, length)
            yield self._forward("diagnose", f"{role} reads", model, flops, -(-n // self.settings.batch_size))
        yield self._map("diagnose", n * length)

    def evaluate(self) -> Iterator[Work]:
        run, size = self.run, self.settings.evaluation_batch_size
        source, target = run.models["source"], run.models["target"]
        for text in run.texts:
            batches = -(-text.n // size)
            total = text.prefix + text.scored
            reads = text.n * source.work.run(1, total)
            yield self._forward("evaluate", "source reads and scores", source, reads, 2 * batches)
            once = target.work.run(text.prefix + 1, total) + 2 * text.scored * target.work.logits
            flops = text.n * (target.work.run(1, text.prefix) + (run.n_arms - 1) * once)
            yield self._forward("evaluate", "target reads and scores", target, flops, run.n_arms * batches)
            yield self._map("evaluate", text.n * text.prefix)

    def benchmark(self) -> Iterator[Work]:
        run, turns = self.run, self.run.benchmark_turns
        for length in run.lengths:
            n = turns * run.benchmark_batch
            # of the target: a re-prefill, and once more up to the first token
            for role, times in (("source", 1), ("target", 2)):
                model = run.models[role]
                flops = n * times * model.work.run(1, length)
                yield self._forward("benchmark", f"{role} reads {length}", model, flops, times * turns)
            yield self._map("benchmark", 2 * n * length)

    def _forward(self, stage: str, what: str, model: ModelFacts, flops: float, n_runs: int) -> Work:
        n_bytes = float(n_runs * model.weights_bytes(fp8=self.machine.device.fp8))
        return Work(stage, what, flops, n_bytes, self.machine.device.seconds(flops, model.dtype, n_bytes))

    def _map(self, stage: str, n_tokens: int) -> Work:
        flops = 2.0 * n_tokens * self.run.n_weights(self.settings)
        n_bytes = float(self.run.mapper_bytes(self.settings))
        device: Device = self.machine.device
        return Work(stage, "map", flops, n_bytes, device.seconds(flops, self.run.mapper_dtype, n_bytes))


def _moments_flops(run: PlannedRun, settings: Settings, mode: str) -> float:
    """Of one row: its products with itself and with its targets, over all tables."""
    sizes = table_sizes(run.layout, mode, settings.support, run.moments_regressors, settings.top_k)
    return sum(p * (p + min(p, _BLOCK_FEATURES)) + 2.0 * p * q for p, q in sizes)
