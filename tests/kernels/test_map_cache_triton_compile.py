"""The kernels compile for a GPU that is not there, into what they are meant to be.

Kernels of an interpreting process cannot be compiled, so a process of its own does it:

    TRITON_INTERPRET=0 python -m tests.kernels.test_map_cache_triton_compile

It prints one JSON object for each kernel.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

POINTERS = dict.fromkeys(("products", "steps", "keep", "table", "first", "counts", "tensors"), "*i64")
HOPPER, AMPERE = 90, 80
SHARED = {HOPPER: 227 * 1024, AMPERE: 163 * 1024}


@pytest.mark.slow
def test_products_compile_to_tensor_cores_fed_by_asynchronous_copies(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    program = [sys.executable, "-W", "ignore", "-m", "tests.kernels.test_map_cache_triton_compile"]
    done = subprocess.run(program, capture_output=True, text=True, env=environment, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    found = {one.pop("name"): one for one in map(json.loads, done.stdout.splitlines())}
    assert set(found) == {"full-head", "head-local", "fused", "undone before", "full-head on sm_80"}
    for name, one in found.items():
        assert one["wide_stores"] > 0, name
        assert one["narrow_stores"] == 0, name
        assert one["shared"] <= SHARED[AMPERE if "sm_80" in name else HOPPER], name
        if name != "undone before":
            assert one["wgmma" if "sm_80" not in name else "mma"] > 0, name
            assert one["wide_copies"] > 0, name
    # All stages of the table are under way: as many tiles of features and of weights in shared memory.
    assert found["full-head"]["shared"] >= 4 * (128 + 256) * 64 * 2
    assert found["head-local"]["shared"] >= 4 * (256 + 128) * 64 * 2


def _compiled() -> None:
    from kvmap.kernels.map_cache.triton_kernels import product_kernel
    from kvmap.kernels.map_cache.triton_launch import Vectors, num_stages, product_constants, strip_constants
    from kvmap.kernels.map_cache.triton_strip import strip_kernel

    for name, shared, tokens, capability in (
        ("full-head", True, 4096, HOPPER),
        ("head-local", False, 4096, HOPPER),
        ("fused", False, 64, HOPPER),
        ("full-head on sm_80", True, 4096, AMPERE),
    ):
        plan = _plan(shared, tokens)
        group = plan.layout.launches[0].group  # of keys
        tile = group.tile.fitted(group.tile.block_columns, 2, SHARED[capability])
        constants = product_constants(
            group._replace(tile=tile), Vectors(8, 8, 8), keep=False, first=False, upcast=False
        )
        _print(name, product_kernel, constants, capability, tile.warps, num_stages(tile))
        if name == "full-head":
            strip = next(iter(plan.strips))
            _print("undone before", strip_kernel, strip_constants(strip, 32), capability, 4, 3)


def _plan(shared: bool, tokens: int) -> Any:
    """One layer of Qwen3 14B → 32B, k = 4."""
    from kvmap.kernels.map_cache import KINDS, CacheMap, Columns, Inputs, Product, Side, Slot
    from kvmap.kernels.map_cache.triton_path import Plan
    from kvmap.models.rope import Rotation

    cache = torch.zeros(1, 8, tokens, 128, dtype=torch.bfloat16)
    rotations = [Rotation(torch.ones(64), 1.0, "half")]
    weight = torch.zeros((4096, 1024) if shared else (8, 512, 128), dtype=torch.bfloat16)
    products = {k: {0: Product((Slot("source", k, 0),) * 4, weight, torch.zeros(8, 128))} for k in KINDS}
    inputs = Inputs(Side([cache], [cache], rotations), torch.zeros(1, tokens, dtype=torch.long))
    return Plan(CacheMap(products), inputs, Columns({0: cache}, {0: cache}, rotations))


def _print(
    name: str, kernel: Any, constants: dict[str, Any], capability: int, warps: int, stages: int
) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    source = ASTSource(
        kernel,
        {n: "constexpr" if n in constants else POINTERS.get(n, "i32") for n in names},
        {(names.index(n),): value for n, value in constants.items()},
        {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in POINTERS},
    )
    options = {"num_warps": warps, "num_stages": stages}
    found = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = found.asm["ptx"]
    about = {
        "name": name,
        "shared": found.metadata.shared,
        "wgmma": ptx.count("wgmma.mma_async"),
        "mma": ptx.count("mma.sync"),
        "wide_copies": len(re.findall(r"cp\.async\.cg\.shared\.global.* 0x10", ptx)),
        "wide_stores": ptx.count("st.global.v4"),
        "narrow_stores": len(re.findall(r"st\.global\.b(?:8|16)\b", ptx)),
    }
    print(json.dumps(about))


if __name__ == "__main__":
    _compiled()
