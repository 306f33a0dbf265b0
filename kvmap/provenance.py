"""Where a result came from: code, packages, machine, scheduler."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import kvmap

PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "triton",
    "numpy",
    "nvidia-ml-py",
    "pandas",
    "matplotlib",
    "accelerate",
    "datasets",
    "gguf",
    "hydra-core",
    "hydra-joblib-launcher",
    "hydra-submitit-launcher",
    "lm-eval",
    "omegaconf",
    "submitit",
    "tensorboard",
    "wandb",
)
SECONDS_FOR_GIT = 20.0


def package_versions() -> dict[str, str | None]:
    """Installed version of kvmap and of every package it may use; None where one is absent."""
    versions: dict[str, str | None] = {"kvmap": kvmap.__version__}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return versions


def git_state() -> tuple[dict[str, Any], str]:
    """Commit, whether the checkout differs from it, names of untracked files; and the difference itself.

    Empty where kvmap runs from an installed copy: a repository that happens to lie around the installation is
    not its source.
    """
    root = Path(kvmap.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return {}, ""
    state = _git(root, "status", "--porcelain", "--untracked-files=normal")
    if state is None:
        return {}, ""
    sha = (_git(root, "rev-parse", "--verify", "--quiet", "HEAD") or "").strip() or None
    diff = _git(root, "diff", "HEAD") if sha else None
    untracked = [line[3:] for line in state.splitlines() if line.startswith("??")]
    return {"sha": sha, "dirty": bool(state.strip()), "untracked": untracked}, diff or ""


def _git(root: Path, *arguments: str) -> str | None:
    """What git prints, or None where it is absent, fails or takes too long."""
    command = ["git", "-C", str(root), "--no-optional-locks", *arguments]
    try:
        result = subprocess.run(command, capture_output=True, timeout=SECONDS_FOR_GIT, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.decode(errors="replace") if result.returncode == 0 else None


def host_facts() -> dict[str, Any]:
    """Python, operating system, host, process, the cores it may use and the memory there is."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _memory(),
        "memory_limit_bytes": _memory_limit(),
    }


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def _memory_limit() -> int | None:
    """What the control group (a Slurm job, a container) may use, the least on the way up; None: all."""
    try:
        group = Path("/proc/self/cgroup").read_text().rsplit("::", 1)[1].strip()
    except (OSError, IndexError):
        return None
    place = Path("/sys/fs/cgroup") / group.lstrip("/")
    limits = [_number(folder / "memory.max") for folder in (place, *place.parents)]
    return min((limit for limit in limits if limit is not None), default=None)


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # `max`: no limit
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def thread_facts() -> dict[str, Any]:
    """Thread settings of the environment, and torch's own where torch is loaded."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    facts: dict[str, Any] = {name: os.environ[name] for name in names if name in os.environ}
    if torch := sys.modules.get("torch"):
        facts["torch"] = torch.get_num_threads()
        facts["torch_interop"] = torch.get_num_interop_threads()
    return facts


def device_facts() -> dict[str, Any] | None:
    """The accelerators torch sees, or None as long as torch is not loaded: planning a run needs no torch."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda"):
        return None
    if not torch.cuda.is_available():
        return {"type": "cpu"}
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        "type": "cuda",
        "cuda": torch.version.cuda,
        "driver": _driver(),
        "devices": [
            {
                "name": device.name,
                "memory_bytes": device.total_memory,
                "capability": f"{device.major}.{device.minor}",
                "uuid": str(getattr(device, "uuid", "")) or None,
            }
            for device in devices
        ],
    }


def _driver() -> str | None:
    """Version of NVIDIA's driver."""
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        return None


def slurm_facts() -> dict[str, str]:
    """What identifies the Slurm job; empty outside one."""
    names = (
        "JOB_ID",
        "JOB_NAME",
        "ARRAY_JOB_ID",
        "ARRAY_TASK_ID",
        "RESTART_COUNT",
        "PROCID",
        "NNODES",
        "JOB_NODELIST",
        "JOB_PARTITION",
        "JOB_ACCOUNT",
        "JOB_QOS",
        "JOB_GPUS",
        "CPUS_PER_TASK",
        "MEM_PER_NODE",
        "CLUSTER_NAME",
    )
    return {name.lower(): os.environ[f"SLURM_{name}"] for name in names if f"SLURM_{name}" in os.environ}
