"""The models room is a library: it works without the packages that only the stages need."""

from __future__ import annotations

import subprocess
import sys


def test_no_stage_package_is_imported():
    script = (
        "import sys, pkgutil, importlib, kvmap.models as room\n"
        "for module in pkgutil.iter_modules(room.__path__):\n"
        "    importlib.import_module('kvmap.models.' + module.name)\n"
        "heavy = set('hydra omegaconf wandb lm_eval datasets gguf jaxtyping transformers'.split())\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
