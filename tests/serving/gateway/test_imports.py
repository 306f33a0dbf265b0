"""A gateway starts at once: it loads nothing that only models need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import kvmap.serving.gateway


def test_no_module_of_the_gateway_loads_torch() -> None:
    folder = Path(kvmap.serving.gateway.__file__).parent
    names = sorted(f"{folder.name}.{file.stem}" for file in folder.glob("*.py"))
    assert len(names) > 20
    code = "import sys\n" + "".join(f"import kvmap.serving.{name}\n" for name in names)
    code += "print([m for m in ('torch', 'transformers', 'numpy', 'vllm') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
