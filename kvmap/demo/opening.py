"""Configuration, models and mapper of a conversation, had as a run has them; what is written is the store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from kvmap.config import Config, checkout_root, register

if TYPE_CHECKING:
    from kvmap.stages.context import Context

STAGES = "stages=[calibrate,fit]"


def composed(overrides: Sequence[str]) -> Config:
    """What `python -m kvmap.run <overrides>` composes to, judged; its stages are those that make a mapper.

    Raises:
        ConfigError: naming every mistake in it.
        HydraException: overrides that Hydra cannot read, or an option that does not exist.
    """
    from hydra import compose, initialize_config_dir, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    from kvmap.run import judged

    register()
    GlobalHydra.instance().clear()
    root = checkout_root()
    with (
        initialize_config_dir(str(root / "conf"), version_base="1.3")
        if root
        else initialize_config_module("kvmap.conf", version_base="1.3")
    ):
        cfg = compose("config", overrides=[*overrides, STAGES])
    return judged(cfg)


@contextmanager
def opened(cfg: Config) -> Iterator[Context]:
    """A run's context without a run directory: its record is given up, what it adds to the store stays.

    Raises:
        KvmapError: what the two models' configs tell to be wrong.
    """
    from kvmap.kernels.settings import KernelSettings, use
    from kvmap.stages import plan, prepare_process
    from kvmap.stages.context import Context
    from kvmap.tracking import Run

    prepare_process(cfg)
    with (
        TemporaryDirectory(prefix="kvmap-demo-") as folder,
        Run(Path(folder), cfg.study, asdict(cfg), "none") as run,
        use(KernelSettings(**asdict(cfg.kernels))),
    ):
        ctx = Context(cfg, run)
        plan.check(ctx)
        yield ctx
