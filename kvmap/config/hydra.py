"""What Hydra is given (where `conf/` and `outputs/` are, schema, resolvers), and what it composes to."""

from __future__ import annotations

import os
import secrets
from functools import cache
from pathlib import Path
from typing import Any

from kvmap.config.schema import Config


def checkout_root() -> Path | None:
    """The folder that holds `conf/` and `pyproject.toml`, or None in an installed wheel."""
    root = Path(__file__).resolve().parent.parent.parent
    return root if (root / "conf" / "config.yaml").is_file() and (root / "pyproject.toml").is_file() else None


def config_path() -> str:
    """Where Hydra finds the configuration groups: beside the package, else inside the wheel."""
    root = checkout_root()
    return str(root / "conf") if root else "pkg://kvmap.conf"


def outputs_root() -> str:
    """`$KVMAP_OUTPUTS`, else the checkout's `outputs/`, else `~/kvmap-outputs`; never the cwd."""
    root = checkout_root()
    chosen = os.environ.get("KVMAP_OUTPUTS") or (root / "outputs" if root else Path.home() / "kvmap-outputs")
    return str(Path(chosen).expanduser().resolve())


@cache
def start_token() -> str:
    """Six hexadecimal digits, one draw per process: two starts in one second get two directories."""
    return secrets.token_hex(3)


def register() -> None:
    """Put the schema and the resolvers `${kvmap.outputs:}` and `${kvmap.token:}` where Hydra looks."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    ConfigStore.instance().store(name="kvmap_schema", node=Config)
    OmegaConf.register_new_resolver("kvmap.outputs", outputs_root, replace=True)
    # Kept with the configuration, which travels to the jobs of a sweep: they share one directory.
    OmegaConf.register_new_resolver("kvmap.token", start_token, replace=True, use_cache=True)


@cache
def composed_defaults() -> dict[str, Any]:
    """Every setting of `python -m kvmap.run` without overrides, as plain values; do not change them.

    A Hydra application that is running in this process goes on as it was.
    """
    from hydra import compose, initialize_config_dir, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    register()
    running, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None
    root = checkout_root()
    try:
        with (
            initialize_config_dir(str(root / "conf"), version_base="1.3")
            if root
            else initialize_config_module("kvmap.conf", version_base="1.3")
        ):
            cfg = compose("config")
    finally:
        GlobalHydra.instance().hydra = running
    composed: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    return composed
