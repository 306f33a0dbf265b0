"""The Triton path against the float64 equation and the reference: interpreted, and the same on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvmap.kernels.map_cache import KINDS, Columns, Inputs, Output, map_cache_reference
from kvmap.kernels.map_cache.triton_path import Tile, map_cache_triton, unsupported_reason
from tests.kernels.map_cases import CASES, Case, by_complex_numbers, read_pages
from tests.kernels.placed import (
    GUARD,
    between,
    clones,
    guards_hold,
    moved,
    place_inputs,
    place_map,
    place_output,
    surrounded,
)

NAN = float("nan")
HALF, BFLOAT, FP8 = torch.float16, torch.bfloat16, torch.float8_e4m3fn
WAYS = ("before", "fused")

SMALL = Case(heads=(1, 2), widths=(8, 8), rotary=(8, 8), k=2, n_source=2, n_target=1, batch=1, tokens=5)


@pytest.fixture(
    params=[pytest.param("cpu", marks=pytest.mark.interpreter), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def same_up_to(got: Output, expected: Output, rtol: float, atol: float) -> None:
    for kind in KINDS:
        for layer in expected.keys:
            torch.testing.assert_close(
                got.tensor(kind, layer).cpu().float(),
                expected.tensor(kind, layer).cpu().float(),
                rtol=rtol,
                atol=atol,
                equal_nan=True,
            )


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_it_computes_the_equation_into_columns_and_pages(case: Case, device: torch.device) -> None:
    if not case.unrotated:  # one mapped layer is what the interpreter has time for
        case = replace(case, n_target=case.native + 1)
    cache_map, inputs = case.build()
    columns, pages = case.columns(cache_map), case.pages(cache_map)
    expected = by_complex_numbers(cache_map, inputs, columns)
    there, given = moved(cache_map, inputs, device)
    for output, way in ((columns, "before"), (pages, "fused")):
        placed = place_output(output, lambda x: x.to(device))
        assert unsupported_reason(there, given, placed) is None
        counts = map_cache_triton(there, given, placed, strip=way)
        assert counts.shape == (len(cache_map.layers), 2, 2)
        assert not counts.any()
        back = place_output(placed, lambda x: x.cpu())
        for (kind, layer), wanted in expected.items():
            # float32 sums of up to 500 terms of size 1/√p.
            got = (
                back.tensor(kind, layer)
                if isinstance(back, Columns)
                else read_pages(back, kind, layer, case.tokens)
            )
            torch.testing.assert_close(got.double(), wanted, rtol=2e-6, atol=2e-5)


def mapped_both_ways(case: Case, device: torch.device, **options: Any) -> tuple[Columns, Columns]:
    """By the kernels on a device, and by the reference."""
    cache_map, inputs = case.build()
    output, expected = case.columns(cache_map), case.columns(cache_map)
    map_cache_reference(cache_map, inputs, expected)
    there = place_output(output, lambda x: x.to(device))
    map_cache_triton(*moved(cache_map, inputs, device), there, **options)
    return there, expected


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dim", [64, 80, 96, 112, 128, 256])
def test_every_head_dim_of_either_model(dim: int, way: str, device: torch.device) -> None:
    case = replace(SMALL, widths=(dim, dim), rotary=(dim, dim), tokens=3, k=1, shared=way == "before")
    there, expected = mapped_both_ways(case, device, strip=way)
    same_up_to(there, expected, 2e-6, 2e-5)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("cache", "weight", "out"),
    [
        (HALF, HALF, HALF),
        (BFLOAT, BFLOAT, BFLOAT),
        (BFLOAT, FP8, BFLOAT),
        (torch.float32, BFLOAT, HALF),
        (HALF, torch.float32, torch.float32),
    ],
)
def test_dtypes_cost_no_more_than_their_own_rounding(
    cache: torch.dtype, weight: torch.dtype, out: torch.dtype, way: str, device: torch.device
) -> None:
    case = replace(SMALL, cache=cache, weight=weight, out=out, shared=way == "before", widths=(16, 16))
    there, expected = mapped_both_ways(case, device, strip=way)
    # Features that rounding makes differ by one step, of 16 to 32 terms, and the output's own step.
    step = max(torch.finfo(out).eps, torch.finfo(torch.bfloat16 if weight is FP8 else weight).eps)
    same_up_to(there, expected, 2 * step, 2 * step)


@pytest.mark.parametrize("paged", [False, True], ids=["columns", "pages"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "by head"])
def test_nothing_outside_the_tensors_is_read_or_written(
    shared: bool, way: str, paged: bool, device: torch.device
) -> None:
    case = Case(
        shared=shared, heads=(3, 3), widths=(16, 10), rotary=(16, 6), native=1, keep=True, tokens=5,
        n_target=2, n_source=2, k=1,
    )  # fmt: skip
    cache_map, inputs = case.build()
    output = case.pages(cache_map) if paged else case.columns(cache_map)
    expected = clones(output)
    map_cache_reference(cache_map, inputs, expected)
    there = place_output(output, lambda x: surrounded(x.to(device), GUARD))
    counts = map_cache_triton(
        place_map(cache_map, lambda x: between(x.to(device))),
        place_inputs(inputs, lambda x: surrounded(x.to(device), NAN)),
        there,
        strip=way,
    )
    assert not counts.any()
    same_up_to(there, expected, 2e-6, 2e-5)  # of pages also the blocks that belong to nobody
    assert all(guards_hold(x) for tensors in (there.keys, there.values) for x in tensors.values())


def test_content_that_needs_no_preparing_is_read_where_it_lies(device: torch.device) -> None:
    case = replace(SMALL, widths=(64, 16), rotary=(64, 16), carried=False, tokens=3)
    cache_map, inputs = case.build()
    output, expected = case.columns(cache_map), case.columns(cache_map)
    map_cache_reference(cache_map, inputs, expected)
    there = place_output(output, lambda x: x.to(device))
    given = place_inputs(inputs, lambda x: surrounded(x.to(device), NAN))
    map_cache_triton(place_map(cache_map, lambda x: x.to(device)), given, there)
    same_up_to(there, expected, 2e-6, 2e-5)


@pytest.mark.parametrize("way", WAYS)
def test_offsets_pass_two_to_the_31(way: str, device: torch.device) -> None:
    """Storage that is mapped and never touched but at its ends."""
    case = replace(SMALL, cache=HALF, weight=HALF, out=HALF, tokens=2, k=1, heads=(1, 1), n_source=1)
    cache_map, inputs = case.build()
    output, expected = case.columns(cache_map), case.columns(cache_map)
    map_cache_reference(cache_map, inputs, expected)

    def far(tensor: torch.Tensor) -> torch.Tensor:
        stride = 2**31 + 8
        try:
            storage = torch.empty(stride + 8, dtype=HALF, device=device)
        except RuntimeError:
            pytest.skip("no 4 GiB of address space")
        return storage.as_strided((1, 1, 2, 8), (stride, stride, stride, 1)).copy_(tensor)

    def placed(tensor: torch.Tensor) -> torch.Tensor:
        return far(tensor) if tensor.ndim == 4 else tensor.to(device)

    there = place_output(output, placed)
    map_cache_triton(
        place_map(cache_map, lambda x: x.to(device)), place_inputs(inputs, placed), there, strip=way
    )
    same_up_to(there, expected, 2e-3, 2e-3)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("way", WAYS)
def test_it_counts_what_is_not_finite_and_what_is_clamped(way: str, device: torch.device) -> None:
    case = replace(SMALL, out=HALF, tokens=6, shared=way == "before", n_source=2)
    cache_map, inputs = case.build()
    keep = torch.tensor([[True, True, True, True, False, False]])
    inputs = Inputs(inputs.source, inputs.positions, None, keep)
    for tensor in (*inputs.source.keys, *inputs.source.values):
        tensor[:, :, 1] *= 1e6
        tensor[:, :, 2, 3] = NAN
        tensor[:, :, 3, 0] = float("inf")
        tensor[:, :, 4] = NAN  # not kept
    output, expected = case.columns(cache_map), case.columns(cache_map)
    wanted = map_cache_reference(cache_map, inputs, expected)
    there = place_output(output, lambda x: x.to(device))
    on_device = moved(cache_map, inputs, device)
    counts = map_cache_triton(*on_device, there, strip=way)
    assert (wanted > 0).all()
    assert torch.equal(counts.cpu(), wanted)
    same_up_to(there, expected, 2e-3, 2e-3)


@pytest.mark.parametrize(("batch", "tokens"), [(0, 4), (3, 0)])
def test_no_rows_and_no_tokens_are_nothing_to_do(batch: int, tokens: int, device: torch.device) -> None:
    case = replace(SMALL, batch=batch, tokens=tokens)
    cache_map, inputs = case.build()
    there = place_output(case.columns(cache_map), lambda x: x.to(device))
    counts = map_cache_triton(*moved(cache_map, inputs, device), there)
    assert counts.shape == (1, 2, 2)
    assert not counts.any()


def test_layers_are_those_asked_for_in_their_order(device: torch.device) -> None:
    case = replace(SMALL, n_target=3)
    cache_map, inputs = case.build()
    inputs.source.keys[0][0, 0, 0, 0] = NAN
    output, expected = case.columns(cache_map), case.columns(cache_map)
    wanted = map_cache_reference(cache_map, inputs, expected, [2, 0])
    there = place_output(output, lambda x: x.to(device))
    on_device = moved(cache_map, inputs, device)
    assert torch.equal(map_cache_triton(*on_device, there, [2, 0]).cpu(), wanted)
    same_up_to(there, expected, 2e-6, 2e-5)
    assert map_cache_triton(*on_device, there, []).shape == (0, 2, 2)


@pytest.mark.parametrize("chunk_tokens", [1, 6])
def test_chunks_change_no_bit(chunk_tokens: int, device: torch.device) -> None:
    case = replace(SMALL, batch=2, tokens=4)
    cache_map, inputs = moved(*case.build(), device)
    outputs = [place_output(case.columns(cache_map), lambda x: x.to(device)) for _ in range(2)]
    map_cache_triton(cache_map, inputs, outputs[0], strip="before")
    map_cache_triton(cache_map, inputs, outputs[1], strip="before", chunk_tokens=chunk_tokens)
    for kind in KINDS:
        assert torch.equal(outputs[0].tensor(kind, 0), outputs[1].tensor(kind, 0))


@pytest.mark.parametrize(
    "tile",
    [
        Tile(16, 16, 16, 4, 2, 16),
        Tile(16, 64, 32, 4, 2, 32),
        Tile(256, 128, 32, 8, 2),
        Tile(64, 1024, 32, 8, 2),
    ],
)
def test_tiles_of_any_size_give_the_same(tile: Tile, device: torch.device) -> None:
    case = replace(SMALL, heads=(2, 5), widths=(16, 16), rotary=(16, 16), tokens=37, native=1, n_target=2)
    there, expected = mapped_both_ways(case, device, tile=tile)
    same_up_to(there, expected, 2e-6, 2e-5)
