"""What the Triton path refuses, how it cuts its work and what it keeps; on a GPU, graphs and true shapes."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from kvmap.kernels.map_cache import (
    KINDS,
    CacheMap,
    Columns,
    Inputs,
    KernelError,
    Product,
    Side,
    Slot,
    map_cache,
    map_cache_reference,
)
from kvmap.kernels.map_cache.spec import Rotations
from kvmap.kernels.map_cache.triton_path import GraphedMap, Plan, map_cache_triton, unsupported_reason
from kvmap.kernels.map_cache.triton_tiles import (
    CANDIDATES,
    TILES,
    Tile,
    features_of_step,
    power_of_two,
    tile_for,
)
from kvmap.kernels.map_cache.triton_weights import prepared
from kvmap.models.rope import Rotation
from tests.kernels.map_cases import CASES, Case
from tests.kernels.placed import moved, place_output

FP8, BFLOAT = torch.float8_e4m3fn, torch.bfloat16


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("case", "said"),
    [
        (Case(), None),
        (Case(weight=FP8, cache=BFLOAT, out=BFLOAT), None),
        (Case(weight=torch.float64), "weights of keys of target layer 0 are torch.float64"),
        (Case(cache=torch.float64), "holds torch.float64"),
        (Case(out=torch.float64), "keys of target layer 0 are written in torch.float64"),
        (Case(widths=(258, 6), rotary=(8, 6)), "has heads of 258 channels"),
        (Case(widths=(8, 7)), "have heads of 7 channels"),
    ],
)
def test_it_says_why_it_cannot_serve(case: Case, said: str | None) -> None:
    cache_map, inputs = case.build()
    reason = unsupported_reason(cache_map, inputs, case.columns(cache_map))
    assert reason is None if said is None else reason is not None and said in reason


@pytest.mark.interpreter
def test_it_says_which_block_tables_and_devices_it_cannot_serve() -> None:
    cache_map, inputs = Case().build()
    pages = Case().pages(cache_map)
    short = replace(pages, block_table=pages.block_table.short())
    assert unsupported_reason(cache_map, inputs, short) == "the block table is torch.int16"
    elsewhere = place_output(Case().columns(cache_map), lambda x: x.to("meta"))
    assert unsupported_reason(cache_map, inputs, elsewhere) == "weights and caches are on cpu, meta"


@pytest.mark.interpreter
def test_tensors_that_do_not_fit_are_errors_before_anything_is_written() -> None:
    case = CASES["native layers and both kinds"]
    cache_map, inputs = case.build()
    output = case.columns(cache_map)
    with pytest.raises(KernelError, match="native"):
        map_cache_triton(cache_map, replace(inputs, native=None), output)
    with pytest.raises(KernelError, match="positions are for 2 rows of 6"):
        map_cache_triton(cache_map, replace(inputs, positions=inputs.positions[:, :6]), shorter(output, 6))
    with pytest.raises(KernelError, match="keys of target layer 2 are"):
        map_cache_triton(cache_map, inputs, shorter(output, 6))
    narrow = Side([x[..., :6] for x in inputs.source.keys], inputs.source.values)
    with pytest.raises(KernelError, match="features, its slots give"):
        map_cache_triton(cache_map, replace(inputs, source=narrow), output)
    with pytest.raises(KernelError, match="strip='later'"):
        map_cache_triton(cache_map, inputs, output, strip="later")
    assert all((x == 7).all() for x in (*output.keys.values(), *output.values.values()))


def shorter(output: Columns, tokens: int) -> Columns:
    return Columns(
        {layer: x[:, :, :tokens] for layer, x in output.keys.items()},
        {layer: x[:, :, :tokens] for layer, x in output.values.items()},
        output.rotations,
    )


@pytest.mark.interpreter
def test_all_layers_alike_are_one_launch() -> None:
    case = Case(carried=False, turned=False, widths=(64, 16), n_target=5, shared=False)
    cache_map, inputs = case.build()
    plan = Plan(cache_map, inputs, case.columns(cache_map))
    assert len(plan.launches) == 1
    turned = Case(widths=(64, 16), rotary=(64, 16), n_target=5)
    cache_map, inputs = turned.build()
    # Keys are undone, keys are mapped, values are mapped.
    assert len(Plan(cache_map, inputs, turned.columns(cache_map), strip="before").launches) == 3
    assert len(Plan(cache_map, inputs, turned.columns(cache_map), strip="fused").launches) == 2


@pytest.mark.interpreter
def test_memory_beside_the_output_is_that_of_one_chunk() -> None:
    case = Case(tokens=64, batch=1, widths=(64, 16), rotary=(64, 16))
    cache_map, inputs = case.build()
    plan = Plan(cache_map, inputs, case.columns(cache_map), strip="before", chunk_tokens=8)
    key = inputs.source.keys[0]
    assert plan.workspace_bytes == 3 * key[:, :, :8].numel() * key.element_size()
    assert Plan(cache_map, inputs, case.columns(cache_map), strip="fused").workspace_bytes == 0


@pytest.mark.interpreter
def test_a_plan_runs_again_on_what_its_tensors_hold_then() -> None:
    case = replace(CASES["by head, as many"], n_target=1, k=1)
    cache_map, inputs = case.build()
    output, expected = case.columns(cache_map), case.columns(cache_map)
    plan = Plan(cache_map, inputs, output)
    plan.run()
    for tensor in (*inputs.source.keys, *inputs.source.values):
        tensor.mul_(2)
    inputs.positions.add_(3)
    plan.run()
    map_cache_reference(cache_map, inputs, expected)
    torch.testing.assert_close(output.keys[0], expected.keys[0], rtol=2e-6, atol=2e-5)


@pytest.mark.interpreter
def test_the_weights_are_not_copied_and_are_forgotten_with_the_map() -> None:
    cache_map, inputs = Case().build()
    map_cache_triton(cache_map, inputs, Case().columns(cache_map), [0])
    kept = prepared(cache_map)
    product = cache_map.products["key"][0]
    assert kept.weights("key", 0, product).weight.data_ptr() == product.weight.data_ptr()
    gone = weakref.ref(kept)
    del kept, cache_map
    gc.collect()
    assert gone() is None


@pytest.mark.interpreter
def test_the_dispatch_reaches_it() -> None:
    case = replace(CASES["by head, as many"], n_target=1, k=1)
    cache_map, inputs = case.build()
    output, expected = case.columns(cache_map), case.columns(cache_map)
    map_cache(cache_map, inputs, output, path="triton")
    map_cache(cache_map, inputs, expected, path="reference")
    torch.testing.assert_close(output.keys[0], expected.keys[0], rtol=2e-6, atol=2e-5)
    wide = replace(case, cache=torch.float64, weight=torch.float64, out=torch.float64)
    cache_map, inputs = wide.build()
    with pytest.raises(KernelError, match="float64"):
        map_cache(cache_map, inputs, wide.columns(cache_map), path="triton")


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("n_tokens", [1, 64, 65, 4096, 10**6])
def test_every_shape_has_a_tile_that_fits(n_tokens: int, fused: bool, shared: bool) -> None:
    tile = tile_for(shared, fused, n_tokens)
    for dim in (64, 80, 96, 112, 128, 256):
        padded = power_of_two(dim)
        heads = tile.heads(8, padded, shared)
        assert heads == 1 or shared
        for itemsize in (2, 4):
            for shared_bytes in (227 * 1024, 163 * 1024, 99 * 1024):
                fitted = tile.fitted(heads * padded, itemsize, shared_bytes)
                step = (fitted.block_tokens + fitted.block_columns) * fitted.block_features * itemsize
                assert fitted.stages * step < shared_bytes
                assert fitted.block_tokens * fitted.block_columns <= 128 * fitted.warps * 32
                assert fitted.block_tokens >= 16
                assert fitted.block_features >= 16


def test_tiles_hold_whole_heads_and_no_more_than_there_are() -> None:
    tile = Tile(64, 256, 64, 4, 2)
    assert [tile.heads(n, 64, True) for n in (1, 2, 3, 4, 8)] == [1, 2, 4, 4, 4]
    assert tile.heads(2, 256, True) == 1
    assert tile.heads(8, 64, False) == 1


def test_steps_end_with_a_run_where_they_can() -> None:
    assert features_of_step([128], 64) == 64
    assert features_of_step([96, 64], 64) == 32
    assert features_of_step([80], 64) == 32
    assert features_of_step([640], 64) == 64


def test_the_tuner_tries_what_the_table_has() -> None:
    assert {entry.tile for entry in TILES if not entry.fused} <= {*CANDIDATES}


def true_shapes(shared: bool, weight: torch.dtype, n_layers: int, tokens: int) -> tuple[CacheMap, Inputs]:
    """Qwen3 14B → 32B but for the number of layers, k = 8."""
    device, k = torch.device("cuda"), 8
    rotation = Rotation(1e6 ** -(torch.arange(64, device=device) / 64), 1.0, "half")

    def cache() -> list[torch.Tensor]:
        return [torch.randn(1, 8, tokens, 128, device=device).to(BFLOAT) for _ in range(k)]

    def product(kind: str) -> Product:
        shape = (k * 1024, 1024) if shared else (8, k * 128, 128)
        weights = (torch.randn(shape, device=device) / shape[-2] ** 0.5).to(weight)
        scale = torch.rand(8, 128, device=device) + 0.5 if weight is FP8 else None
        slots = tuple(Slot("source", kind, layer) for layer in range(k))
        return Product(slots, weights, torch.randn(8, 128, device=device), scale)

    inputs = Inputs(
        Side(cache(), cache(), [rotation] * k), torch.arange(tokens, device=device).unsqueeze(0) + 100_000
    )
    return CacheMap({kind: {layer: product(kind) for layer in range(n_layers)} for kind in KINDS}), inputs


def true_output(n_layers: int, tokens: int) -> Columns:
    device = torch.device("cuda")
    rotation = Rotation(1e6 ** -(torch.arange(64, device=device) / 64), 1.0, "half")
    keys, values = (
        {layer: torch.empty(1, 8, tokens, 128, dtype=BFLOAT, device=device) for layer in range(n_layers)}
        for _ in KINDS
    )
    return Columns(keys, values, [rotation] * n_layers)


@pytest.mark.gpu
@pytest.mark.parametrize("strip", ["before", "fused"])
@pytest.mark.parametrize("weight", [BFLOAT, FP8])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("tokens", [1, 64, 300, 5000])
def test_true_shapes_agree_with_the_reference(
    tokens: int, shared: bool, weight: torch.dtype, strip: str
) -> None:
    cache_map, inputs = true_shapes(shared, weight, 2, tokens)
    output, expected = true_output(2, tokens), true_output(2, tokens)
    counts = map_cache_triton(cache_map, inputs, output, strip=strip)
    assert torch.equal(counts, map_cache_reference(cache_map, inputs, expected))
    for kind in KINDS:
        for layer in range(2):
            got, wanted = output.tensor(kind, layer).float(), expected.tensor(kind, layer).float()
            torch.testing.assert_close(got, wanted, rtol=2**-7, atol=2**-6)


@pytest.mark.gpu
def test_every_candidate_that_compiles_is_right() -> None:
    cache_map, inputs = true_shapes(True, BFLOAT, 1, 500)
    expected = true_output(1, 500)
    map_cache_reference(cache_map, inputs, expected)
    for tile in {replace(tile, group_tokens=1024) for tile in CANDIDATES}:
        output = true_output(1, 500)
        map_cache_triton(cache_map, inputs, output, tile=tile)
        torch.testing.assert_close(output.keys[0].float(), expected.keys[0].float(), rtol=2**-7, atol=2**-6)


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [True, False])
def test_a_graph_replays_on_what_its_tensors_hold_then(shared: bool) -> None:
    cache_map, inputs = true_shapes(shared, BFLOAT, 2, 64)
    output, expected = true_output(2, 64), true_output(2, 64)
    graphed = GraphedMap.capture(Plan(cache_map, inputs, output))
    for key in inputs.source.keys:
        key.mul_(2)
    inputs.positions.add_(7)
    counts = graphed.replay()
    map_cache_reference(cache_map, inputs, expected)
    assert not counts.any()
    for kind in KINDS:
        torch.testing.assert_close(
            output.tensor(kind, 1).float(), expected.tensor(kind, 1).float(), rtol=2**-7, atol=2**-6
        )


@pytest.mark.gpu
def test_it_waits_for_nothing_on_the_device() -> None:
    case = CASES["some columns kept"]
    cache_map, inputs = moved(*case.build(), torch.device("cuda"))

    def there(rotations: Rotations) -> Rotations:
        return [r and Rotation(r.inv_freq.cuda(), r.scaling, r.layout) for r in rotations or ()]

    inputs = replace(inputs, source=replace(inputs.source, rotations=there(inputs.source.rotations)))
    output = place_output(case.columns(cache_map), lambda x: x.cuda())
    output = replace(output, rotations=there(output.rotations))
    map_cache_triton(cache_map, inputs, output)
    torch.cuda.set_sync_debug_mode("error")
    try:
        map_cache_triton(cache_map, inputs, output)
    finally:
        torch.cuda.set_sync_debug_mode("default")
