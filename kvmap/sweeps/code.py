"""The code and configuration that a process finds on disk, file by file."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import kvmap
from kvmap.config import checkout_root

LENGTH = 16


def source_files() -> dict[str, str]:
    """Hash of every Python file of the package (`kvmap/run.py`) and every option (`conf/pair/tiny.yaml`)."""
    package = _package()
    root = checkout_root()
    conf = root / "conf" if root else package / "conf"
    files = {f"kvmap/{path.relative_to(package).as_posix()}": path for path in package.rglob("*.py")}
    # What a site keeps for itself is no part of the configuration that all share.
    local = conf / "local"
    files |= {
        f"conf/{path.relative_to(conf).as_posix()}": path
        for path in conf.rglob("*.yaml")
        if local not in path.parents
    }
    return {name: _hash(path.read_bytes()) for name, path in sorted(files.items())}


def code_hash(files: Mapping[str, str]) -> str:
    """One hash of all files."""
    return _hash(json.dumps(dict(files), sort_keys=True).encode())


def loaded_files() -> set[str]:
    """Python files that this process has loaded: a change to them reaches it no more."""
    package = _package()
    found = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    paths = (Path(name) for name in found if name)
    return {f"kvmap/{path.relative_to(package).as_posix()}" for path in paths if package in path.parents}


def _package() -> Path:
    return Path(kvmap.__file__).resolve().parent


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:LENGTH]
