"""What Hydra is given: where `conf/` and `outputs/` are, the schema, and two resolvers."""

from __future__ import annotations

import os
import secrets
from functools import cache
from pathlib import Path

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
    OmegaConf.register_new_resolver("kvmap.token", start_token, replace=True)
