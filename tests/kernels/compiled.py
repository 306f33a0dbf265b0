"""Compiling a Triton kernel for a GPU where there is none: what the interpreter does not look at.

Run as a program in a process of its own, since kernels of an interpreting process cannot be compiled:

    python -m tests.kernels.compiled '[{"module": …, "kernel": …, "types": {…}, "constants": {…}, …}]'

Prints one JSON object for each of them: {shared, wgmma}, bytes of shared memory and tensor-core operations.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any


def compile_kernels(wanted: list[dict[str, Any]], cache: Path) -> list[dict[str, int]]:
    """Compile in a process of its own.

    Args:
        wanted: for each kernel `module`, `kernel`, `types` (by argument, "*bf16", "i32"), `constants` (by
            argument), `capability` (90) and `options` (num_warps, num_stages).
        cache: folder for what is compiled.
    """
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "TRITON_INTERPRET": "0"}
    program = [sys.executable, "-W", "ignore", "-m", "tests.kernels.compiled", json.dumps(wanted)]
    done = subprocess.run(program, capture_output=True, text=True, env=environment, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def _compile(wanted: dict[str, Any]) -> dict[str, int]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(import_module(wanted["module"]), wanted["kernel"])
    constants, names = wanted["constants"], kernel.arg_names
    fixed = [parameter.name for parameter in kernel.params if parameter.annotation_type]
    assert not fixed, f"{fixed}: an annotation such as int fixes a type, and a stride needs 64 bits at times"
    source = ASTSource(
        kernel,
        {name: "constexpr" if name in constants else wanted["types"][name] for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name not in constants},
    )
    target = GPUTarget("cuda", wanted["capability"], 32)
    found = triton.compile(source, target=target, options=wanted["options"])
    return {"shared": found.metadata.shared, "wgmma": found.asm["ptx"].count("wgmma.mma")}


if __name__ == "__main__":
    for one in json.loads(sys.argv[1]):
        print(json.dumps(_compile(one)))
