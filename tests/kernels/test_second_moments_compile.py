"""The kernels of second moments compile for a GPU: the interpreter knows neither types nor shared memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvmap.kernels.second_moments.triton_products import PRECISIONS, _tile
from tests.kernels.compiled import compile_kernels

MODULE = "kvmap.kernels.second_moments.triton_products"
LEAST_SHARED = 99 * 1024  # bytes a program may have on the smallest of the devices served

TYPES = {
    **dict.fromkeys(("n_rows", "n_columns", "n_left", "n_right"), "i32"),
    **dict.fromkeys(("stride_row", "stride_left_row", "stride_right_row"), "i32"),
    "stride_table_row": "i64",
    **dict.fromkeys(("weights", "mean", "mean_left", "mean_right", "sums", "table"), "*fp64"),
    "root": "*fp32",
    "tiles": "*i32",
}


def wanted(capability: int, dtype: str, size: int, precision: str, *, weighted: bool) -> list[dict[str, Any]]:
    tile, stages = _tile(1000, size)
    about = {
        "module": MODULE,
        "types": TYPES | dict.fromkeys(("rows", "left", "right"), f"*{dtype}"),
        "capability": capability,
    }
    products = {
        **dict.fromkeys(("stride_left_column", "stride_right_column", "stride_table_column"), 1),
        **{"WEIGHTED": weighted, "PRECISION": precision, "RUN": 1024, "BLOCK_ROWS": 32, "TILE": tile},
        **({} if weighted else {"root": None}),
    }
    columns = {
        **{"stride_column": 1, "WEIGHTED": weighted, "SQUARED": weighted, "RUN": 1024},
        **{"BLOCK_ROWS": 64, "BLOCK_COLUMNS": 32},
        **({} if weighted else {"weights": None, "mean": None}),
    }
    options = {"num_warps": 8 if tile == 128 else 4, "num_stages": stages}
    return [
        about | {"kernel": "_products_kernel", "constants": products, "options": options},
        about | {"kernel": "_column_sums_kernel", "constants": columns, "options": {}},
    ]


@pytest.mark.slow
def test_kernels_compile_for_two_generations_and_fit_their_shared_memory(tmp_path: Path) -> None:
    kernels = [
        *wanted(80, "bf16", 2, PRECISIONS[0], weighted=False),
        *wanted(90, "fp32", 4, PRECISIONS[0], weighted=True),
        *wanted(90, "fp64", 8, PRECISIONS[1], weighted=False),
    ]
    found = compile_kernels(kernels, tmp_path)
    assert len(found) == len(kernels)
    assert max(one["shared"] for one in found) <= LEAST_SHARED
    assert found[2]["wgmma"] > 0  # the tensor cores serve float32 rows
