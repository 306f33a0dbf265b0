"""The ordered stages. Each asks `Context` for artifacts, and writes metrics, tables and figures.

Artifacts are made when first asked for: `stages=[evaluate]` alone calibrates and fits if no run has, and a
run whose stage fails keeps what the stages before it finished.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from kvmap.config import STAGES, Config
from kvmap.tracking import Run

if TYPE_CHECKING:
    from kvmap.stages.context import Context


def prepare_process(cfg: Config) -> None:
    """What a configuration asks of the whole process: threads, the seed, warnings and bars in their place."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    logging.captureWarnings(True)
    if not sys.stderr.isatty():
        disable_progress_bar()
    if cfg.threads is not None:
        torch.set_num_threads(cfg.threads)
    torch.manual_seed(cfg.seed)


def run_stages(cfg: Config, directory: str | Path, *, identity: str | None = None) -> None:
    """Run the stages that `cfg.stages` names, in their fixed order, into one run directory.

    Prints the table of results and, last, `run: <directory>`, also where a stage fails.

    Args:
        cfg: the configuration, judged.
        directory: of the run.
        identity: of the configuration, for the record.

    Raises:
        KvmapError: the first thing that cannot be; what was finished before it is kept.
    """
    from kvmap.kernels.settings import KernelSettings, use
    from kvmap.report import print_summary
    from kvmap.stages import plan
    from kvmap.stages.context import Context

    prepare_process(cfg)
    run = Run(
        Path(directory),
        cfg.study,
        asdict(cfg),
        cfg.tracking.backend,
        seeds=_seeds(cfg),
        wandb_project=cfg.tracking.project,
        wandb_entity=cfg.tracking.entity,
        wandb_group=cfg.tracking.group,
        seconds=cfg.tracking.finish_timeout_s,
    )
    try:
        with run, use(KernelSettings(**asdict(cfg.kernels))):
            if identity is not None:
                run.note(identity=identity)
            ctx = Context(cfg, run)
            plan.check(ctx)
            for name in STAGES:
                if name in cfg.stages:
                    with run.stage(name):
                        _stage(name)(ctx)
    finally:
        if (run.directory / "run.json").is_file():
            print_summary(run.directory)
        print(f"run: {run.directory}", flush=True)


def _stage(name: str) -> Callable[[Context], None]:
    """The stage's function; imported now, so that `stages=[plan]` does not wait for what evaluation needs."""
    from importlib import import_module

    stage: Callable[[Context], None] = import_module(f"kvmap.stages.{name}").run
    return stage


def _seeds(cfg: Config) -> dict[str, int]:
    return {
        "run": cfg.seed,
        "mapper": cfg.mapper.seed,
        "calibration_text": cfg.calibration.data.seed,
        "calibration_split": cfg.calibration.seed,
        "world_items": cfg.evaluation.world.seed,
        "jsonl_items": cfg.evaluation.jsonl.seed,
        "fewshot": cfg.evaluation.fewshot_seed,
        "perplexity_text": cfg.evaluation.perplexity.data.seed,
        "conversations": cfg.evaluation.conversation.seed,
        "needles": cfg.evaluation.long_context.seed,
        "long_context_text": cfg.evaluation.long_context.data.seed,
        "recompute": cfg.transfer.recompute_seed,
        "cost": cfg.evaluation.cost.seed,
        "bootstrap": cfg.evaluation.seed,
        "benchmark": cfg.benchmark.seed,
    }
