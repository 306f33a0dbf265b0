"""The batched path against the reference and the float64 equation, and the choice between paths."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from kvmap.errors import UnknownName
from kvmap.kernels import map_cache as package
from kvmap.kernels.map_cache import (
    KINDS,
    PATHS,
    CacheMap,
    Inputs,
    KernelError,
    Side,
    choose_path,
    map_cache,
    map_cache_batched,
    map_cache_reference,
)
from kvmap.kernels.map_cache.batched import mapped_layer
from kvmap.kernels.settings import KernelSettings, SettingsError, current, use
from tests.kernels.map_cases import CASES, Case, assert_computes_the_equation, by_complex_numbers

FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("chunk_tokens", [1, 6, 2048])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_it_computes_the_equation_in_chunks_of_any_size(case: Case, chunk_tokens: int) -> None:
    assert_computes_the_equation(case, partial(map_cache_batched, chunk_tokens=chunk_tokens))


@pytest.mark.parametrize("weight", [torch.bfloat16, torch.float16, FP8])
@pytest.mark.parametrize("name", ["plain", "by head, three to five", "native layers and both kinds"])
def test_half_precision_weights_cost_one_rounding_of_the_product(name: str, weight: torch.dtype) -> None:
    case = replace(CASES[name], cache=torch.bfloat16, weight=weight, out=torch.float32)
    cache_map, inputs = case.build()
    got, expected = case.columns(cache_map), case.columns(cache_map)
    map_cache_batched(cache_map, inputs, got)
    map_cache_reference(cache_map, inputs, expected)
    # products of size 1 to 4, rounded to 8 bits before the bias; float16 ones are not
    near = {"rtol": 0.0, "atol": 2e-5 if weight == torch.float16 else 3e-2}
    for kind in KINDS:
        for layer in cache_map.layers:
            torch.testing.assert_close(got.tensor(kind, layer), expected.tensor(kind, layer), **near)


def test_what_is_not_finite_or_does_not_fit_is_counted_as_the_reference_counts_it() -> None:
    case = Case(out=torch.float16, keep=True, tokens=16)
    cache_map, inputs = case.build()
    keys = cache_map.products["key"]
    loud = {**keys, 1: replace(keys[1], bias=keys[1].bias * 1e5)}
    broken = {**cache_map.products["value"]}
    bias = broken[2].bias.clone()
    bias[0, 0], bias[1, 1] = float("nan"), float("inf")
    broken[2] = replace(broken[2], bias=bias)
    cache_map = CacheMap({"key": loud, "value": broken})
    got, expected = case.columns(cache_map), case.columns(cache_map)
    assert torch.equal(
        map_cache_batched(cache_map, inputs, got, chunk_tokens=6),
        counts := map_cache_reference(cache_map, inputs, expected),
    )
    assert inputs.keep is not None
    assert counts[2, 1].tolist() == [2 * int(inputs.keep.sum()), 0]
    assert counts[1, 0, 1] > 0
    torch.testing.assert_close(got.keys[1], expected.keys[1])


def test_a_product_that_leaves_float16_comes_back_with_the_bias() -> None:
    case = Case(weight=torch.float16, cache=torch.float16, out=torch.float16, batch=1, tokens=3)
    cache_map, inputs = case.build()
    product = cache_map.products["value"][0]
    far = replace(product, weight=torch.full_like(product.weight, 100.0), bias=product.bias - 1e5)
    ones = Side(inputs.source.keys, [torch.full_like(v, 40.0) for v in inputs.source.values])
    cache_map = CacheMap({kind: {0: far} for kind in KINDS})
    output = case.columns(cache_map)
    counts = map_cache_batched(cache_map, Inputs(ones, inputs.positions), output, [0])
    assert not counts[:, 1].any()
    assert float(output.values[0].float().mean()) == pytest.approx(
        100.0 * 40.0 * far.n_features - 1e5, abs=64
    )


@pytest.mark.parametrize("shape", [{"tokens": 0}, {"batch": 0}])
@pytest.mark.parametrize("path", ["reference", "batched"])
def test_nothing_to_map_is_mapped(shape: dict[str, int], path: str) -> None:
    case = replace(Case(), **shape)
    cache_map, inputs = case.build()
    counts = map_cache(cache_map, inputs, case.columns(cache_map), path=path)
    assert counts.tolist() == [[[0, 0], [0, 0]]] * 3
    assert map_cache(cache_map, inputs, case.columns(cache_map), [], path=path).shape == (0, 2, 2)


@pytest.mark.parametrize("name", ["plain", "by head, eight to two", "partly rotary, interleaved"])
def test_columns_past_those_given_are_neither_read_nor_written(name: str) -> None:
    """Inputs are the middle of storage full of NaN, outputs the middle of storage full of 7."""
    case = CASES[name]
    cache_map, inputs = case.build()

    def amid(x: torch.Tensor, fill: float) -> torch.Tensor:
        wide = torch.full([n + 2 for n in x.shape], fill, dtype=x.dtype)
        inner = wide[tuple(slice(1, -1) for _ in x.shape)]
        inner.copy_(x)
        return inner

    nan = float("nan")
    source = inputs.source
    guarded = Side(
        [amid(x, nan) for x in source.keys], [amid(x, nan) for x in source.values], source.rotations
    )
    products = {
        kind: {
            layer: replace(product, weight=amid(product.weight, nan), bias=amid(product.bias, nan))
            for layer, product in layers.items()
        }
        for kind, layers in cache_map.products.items()
    }
    plain, output = case.columns(cache_map), case.columns(cache_map)
    output = replace(
        output,
        keys={i: amid(x, 7.0) for i, x in output.keys.items()},
        values={i: amid(x, 7.0) for i, x in output.values.items()},
    )
    map_cache_batched(cache_map, inputs, plain)
    counts = map_cache_batched(CacheMap(products), replace(inputs, source=guarded), output, chunk_tokens=6)
    assert not counts.any()
    for kind in KINDS:
        for layer in cache_map.layers:
            got = output.tensor(kind, layer)
            torch.testing.assert_close(got, plain.tensor(kind, layer))
            assert got._base is not None
            outside = got._base.clone()
            outside[tuple(slice(1, -1) for _ in range(4))] = 7.0
            assert bool((outside == 7.0).all())


@pytest.mark.parametrize("name", ["partly rotary, interleaved", "by head, native, both kinds, kept"])
def test_its_core_compiles_whole_and_computes_the_same(name: str) -> None:
    case = CASES[name]
    cache_map, inputs = case.build()
    compiled = torch.compile(mapped_layer, fullgraph=True, backend="aot_eager", dynamic=False)
    plain, output = case.columns(cache_map), case.columns(cache_map)
    counts = map_cache_batched(cache_map, inputs, plain)
    assert torch.equal(map_cache_batched(cache_map, inputs, output, core=compiled), counts)
    for kind in KINDS:
        for layer in cache_map.layers:
            torch.testing.assert_close(output.tensor(kind, layer), plain.tensor(kind, layer))


def test_each_layer_is_stripped_once_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvmap.kernels.map_cache import batched

    case = Case(k=3, n_target=5, tokens=8, batch=1, turned=False)
    cache_map, inputs = case.build()
    seen = []
    turned = batched.turned
    monkeypatch.setattr(batched, "turned", lambda x, turn: seen.append(x.shape[2]) or turned(x, turn))
    map_cache_batched(cache_map, inputs, case.columns(cache_map), chunk_tokens=5)
    assert seen == [5] * 3 + [3] * 3


class TestChoice:
    def test_a_cpu_is_served_by_the_batched_path(self, caplog: pytest.LogCaptureFixture) -> None:
        cache_map, inputs = Case().build()
        package._log_path.cache_clear()
        with caplog.at_level(logging.INFO, logger="kvmap.kernels.map_cache"):
            for _ in range(3):
                map_cache(cache_map, inputs, Case().columns(cache_map))
        assert choose_path(cache_map, inputs, Case().columns(cache_map)) == "batched"
        assert len(caplog.messages) == 1
        for part in (
            "batched",
            "not on a CUDA device",
            "cpu",
            "torch.float32",
            "heads share features",
            "256",
        ):
            assert part in caplog.messages[0]

    def test_an_unknown_path_is_answered_with_the_nearest(self) -> None:
        cache_map, inputs = Case().build()
        with pytest.raises(UnknownName, match="Did you mean 'batched'"):
            map_cache(cache_map, inputs, Case().columns(cache_map), path="batch")

    def test_a_machine_without_triton_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(package, "_triton_path", lambda: "triton cannot be imported (none)")
        cache_map, inputs = Case().build()
        with pytest.raises(KernelError, match=r"triton cannot be imported .* use 'auto' or 'batched'"):
            map_cache(cache_map, inputs, Case().columns(cache_map), path="triton")

    @pytest.mark.parametrize("path", [path for path in PATHS if path != "triton"])
    def test_a_path_asked_for_is_taken(self, path: str) -> None:
        case = CASES["plain"]
        cache_map, inputs = case.build()
        output = case.columns(cache_map)
        map_cache(cache_map, inputs, output, path=path, chunk_tokens=3)
        for (kind, layer), wanted in by_complex_numbers(cache_map, inputs, output).items():
            torch.testing.assert_close(output.tensor(kind, layer).double(), wanted, rtol=2e-6, atol=2e-5)


class TestSettings:
    def test_they_hold_within_their_block_and_decide_the_chunks(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert current() == KernelSettings()
        asked = []
        batched = package.map_cache_batched

        def watched(*args: Any, chunk_tokens: int) -> torch.Tensor:
            asked.append(chunk_tokens)
            return batched(*args, chunk_tokens=chunk_tokens)

        monkeypatch.setattr(package, "map_cache_batched", watched)
        cache_map, inputs = Case().build()
        with use(KernelSettings(chunk_tokens=5)):
            map_cache(cache_map, inputs, Case().columns(cache_map))
            with pytest.raises(RuntimeError), use(KernelSettings(chunk_tokens=3)):
                raise RuntimeError
            map_cache(cache_map, inputs, Case().columns(cache_map), chunk_tokens=4)
        assert asked == [5, 4]
        assert current() == KernelSettings()

    def test_mistakes_are_refused(self) -> None:
        with pytest.raises(UnknownName, match="Did you mean 'triton'"):
            KernelSettings(map_cache="tritn")
        with pytest.raises(UnknownName, match="moments"):
            KernelSettings(moments="cublas")
        with pytest.raises(SettingsError, match="chunk_tokens=0"):
            KernelSettings(chunk_tokens=0)

    def test_the_configuration_knows_the_same_names_and_says_all_mistakes_at_once(self) -> None:
        from kvmap.config import schema
        from kvmap.config.validation import validate
        from kvmap.kernels import settings

        assert schema.MAP_CACHE_PATHS == settings.MAP_CACHE_PATHS
        assert schema.MOMENTS_PATHS == settings.MOMENTS_PATHS
        assert KernelSettings(**vars(schema.KernelsConfig())) == KernelSettings()
        cfg = schema.Config()
        cfg.kernels = schema.KernelsConfig("tritn", 0, "cublas")
        found = [line for line in validate(cfg) if line.startswith("kernels.") or "kernels." in line]
        assert len(found) == 3

    def test_a_job_is_the_same_job_on_every_path(self) -> None:
        from kvmap.sweeps.identity import job_identity

        plain = {"seed": 0, "kernels": {"map_cache": "auto"}}
        assert job_identity(plain) == job_identity({"seed": 0, "kernels": {"map_cache": "triton"}})


def test_a_machine_without_triton_maps_all_the_same() -> None:
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "from tests.kernels.map_cases import Case\n"
        "from kvmap.kernels.map_cache import map_cache, why_not_triton\n"
        "cache_map, inputs = Case().build()\n"
        "output = Case().columns(cache_map)\n"
        "print(int(map_cache(cache_map, inputs, output).sum()), why_not_triton(cache_map, inputs, output))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout.startswith("0 triton cannot be imported"), done.stderr
