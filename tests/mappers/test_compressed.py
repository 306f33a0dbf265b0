from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import r2_score
from torch import Tensor

from kvmap.errors import UnknownName
from kvmap.fit.features import KINDS, Layout, Recipe
from kvmap.fit.linear import LinearWeights, Penalty, fit_linear, r2_of
from kvmap.fit.low_rank import LowRankError
from kvmap.fit.moments import MomentsError
from kvmap.fit.pair_moments import PairMoments, selected_tables
from kvmap.fit.quantise import FLOAT8, QuantiseError
from kvmap.mappers import FittedFor, LinearMapper, get_mapper, load_mapper, save_mapper
from kvmap.mappers.compressed import METHODS, CompressedLinearMapper, CompressionError
from kvmap.models.cache import KVCache
from kvmap.models.identity import ModelIdentity
from tests.fit.caches import kind_layers, random_cache, stripped

SOURCE = ((2, 6), (2, 6), (2, 6))
TARGET = ((2, 5), (4, 5), (2, 5))  # layer 1 has twice the source's heads
SELECTION = {"key": ((0, 2), (1, 0), (2,)), "value": ((1,), (2, 1), (0, 1))}
RECIPES = {
    "full_head": Recipe(SOURCE, TARGET, "full_head", SELECTION),
    "head_local": Recipe(SOURCE, TARGET, "head_local", SELECTION),
    "full_head, native": Recipe(SOURCE, TARGET, "full_head", SELECTION, "both_kinds", 1),
    "head_local, native": Recipe(SOURCE, TARGET, "head_local", SELECTION, "both_kinds", 1),
}


def low_rank_image(source: KVCache, seed: int) -> KVCache:
    """A target whose head h is of rank h + 1 in the features of all source layers; little noise."""
    law, noise = torch.Generator().manual_seed(5), torch.Generator().manual_seed(seed)

    def image(layers: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> list[Tensor]:
        x = torch.cat([layer.transpose(1, 2).flatten(2) for layer in (*layers, *other)], -1)
        out = []
        for heads, width in TARGET:
            y = []
            for head in range(heads):
                rank = min(head + 1, width)
                left = torch.randn(x.shape[-1], rank, generator=law, dtype=torch.float64)
                right = torch.randn(rank, width, generator=law, dtype=torch.float64)
                y.append(x @ left @ right + 3)
            stacked = torch.stack(y, dim=1)
            out.append(stacked + 0.05 * torch.randn(stacked.shape, generator=noise, dtype=torch.float64))
        return out

    keys = image(source.keys, source.values)
    return stripped(keys, image(source.values, source.keys), source.mask)


@dataclass
class Task:
    recipe: Recipe
    caches: dict[str, tuple[KVCache, KVCache]]
    moments: PairMoments
    weights: LinearWeights

    def compressed(self, method: str, tolerance: float = 0.02) -> CompressedLinearMapper:
        mapper = LinearMapper(self.weights)
        return CompressedLinearMapper.from_linear(mapper, method, self.moments, tolerance=tolerance)

    def native(self, split: str) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        target, n = self.caches[split][1], self.recipe.native_layers
        return target.keys[:n], target.values[:n]

    def rows(self, split: str, kind: str, layer: int) -> Tensor:
        source = self.caches[split][0]
        return self.recipe.gather(kind, layer, source.keys, source.values, *self.native(split))

    def mapped(
        self, mapper: LinearMapper | CompressedLinearMapper, split: str
    ) -> dict[tuple[str, int], Tensor]:
        """By kind and layer, (batch, H, tokens, d)."""
        source = self.caches[split][0]
        found = {}
        for layer in self.recipe.mapped_layers:
            key, value = mapper.map_layer(layer, source.keys, source.values, *self.native(split))
            found |= {("key", layer): key, ("value", layer): value}
        return found


def make_task(recipe: Recipe, dtype: torch.dtype = torch.float64, weighted: bool = False) -> Task:
    layout = Layout(SOURCE, TARGET, recipe.native_layers)
    moments = PairMoments.zeros(layout, selected_tables(recipe, weighted=weighted))
    generator = torch.Generator().manual_seed(0)
    caches = {}
    for number, (split, batch) in enumerate((("fit", 8), ("held_out", 4))):
        source = random_cache(SOURCE, batch, 25, generator)
        source = stripped([k + number for k in source.keys], list(source.values))
        caches[split] = source, low_rank_image(source, seed=number)
        row_weights = {
            (kind, layer): torch.rand(batch, heads, 25, generator=generator)
            for kind in KINDS
            for layer, (heads, _) in enumerate(TARGET)
        }
        moments.update(split, *caches[split], weights=row_weights if weighted else None)
    weights = fit_linear(moments, recipe, Penalty(1e-6), dtype=dtype)
    return Task(recipe, caches, moments, weights)


@pytest.fixture(scope="module", params=list(RECIPES))
def task(request: pytest.FixtureRequest) -> Task:
    return make_task(RECIPES[request.param])


@pytest.fixture(scope="module")
def whole() -> Task:
    """A map that reads all there is: head h of its law has rank h + 1, and its features are independent."""
    every = dict.fromkeys(KINDS, ((0, 1, 2),) * 3)
    return make_task(Recipe(SOURCE, TARGET, "full_head", every, "both_kinds"))


@pytest.mark.parametrize("method", METHODS)
def test_it_maps_rows_by_the_weights_it_says_it_stands_for(task: Task, method: str) -> None:
    mapper = task.compressed(method)
    weights = mapper.linear_weights()
    # float64 sums in another order; else features, products and what lies between them in eight bits
    tolerance = 1e-12 if method == "low_rank" else 4 * 2**-8
    for (kind, layer), found in task.mapped(mapper, "held_out").items():
        rows = task.rows("held_out", kind, layer)
        weight, bias = weights.weight[kind][layer].double(), weights.bias[kind][layer].double()
        expected = (rows @ weight + bias.unsqueeze(1)).unflatten(1, (4, 25)).transpose(0, 1)
        size = (rows.abs() @ weight.abs()).unflatten(1, (4, 25)).transpose(0, 1) + bias.abs().max()
        assert found.dtype == task.weights.bias[kind][layer].dtype
        assert found.shape == (4, TARGET[layer][0], 25, TARGET[layer][1])
        if method.startswith("low_rank"):  # the inner sum rounds at the size of the map it goes through
            size = size.amax()
        assert bool(((found - expected).abs() <= tolerance * size).all())


def test_an_exact_reduction_is_the_product_of_its_factors(task: Task) -> None:
    """The low-rank path against matrices built from the tensors on disk, head by head."""
    mapper = task.compressed("low_rank")
    tensors = mapper.tensors()
    for kind in KINDS:
        for layer in task.recipe.mapped_layers:
            weight, up = tensors[f"{kind}.{layer}.weight"], tensors.get(f"{kind}.{layer}.up")
            column = row = 0
            for head, rank in enumerate(mapper.ranks[kind][layer]):
                width = TARGET[layer][1] if rank is None else rank
                expected = weight[:, column : column + width]
                column += width
                if rank is not None:
                    expected = expected @ up[row : row + rank]
                    row += rank
                found = mapper.linear_weights().weight[kind][layer][head]
                torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
            assert (column, row) == (weight.shape[1], 0 if up is None else len(up))


def test_heads_take_the_ranks_their_held_out_error_asks_for(task: Task) -> None:
    """A rank is the smallest within the tolerance: one less is over it, on rows mapped one by one."""
    tolerance = 0.02
    mapper = task.compressed("low_rank", tolerance)
    found = set()
    for kind in KINDS:
        for layer in task.recipe.mapped_layers:
            p, width = task.recipe.n_features(kind, layer), TARGET[layer][1]
            fit, held = task.rows("fit", kind, layer), task.rows("held_out", kind, layer)
            for head, rank in enumerate(mapper.ranks[kind][layer]):
                found.add(rank)
                x, test = fit[head % len(fit)], held[head % len(held)]
                y, truth = (
                    kind_layers(task.caches[s][1], kind)[layer][:, head].flatten(0, 1) for s in task.caches
                )
                weight = task.weights.weight[kind][layer][head].double()

                def error(r: int, w: Tensor = weight, x=x, test=test, y=y, truth=truth) -> float:
                    basis = torch.linalg.svd((x - x.mean(0)) @ w, full_matrices=False).Vh[:r].T
                    reduced = w @ basis @ basis.T
                    bias = y.mean(0) - x.mean(0) @ reduced
                    return float((truth - test @ reduced - bias).square().sum())

                allowed = (1 + tolerance) * error(width)
                saving = [r for r in range(width) if r * (p + width) < p * width]
                within = [r for r in saving if error(r) <= allowed]
                assert rank == (within[0] if within else None)
    assert len(found) > 1


def test_full_head_ranks_are_those_of_the_law(whole: Task) -> None:
    for method in ("low_rank", "low_rank+bfloat16", "low_rank+fp8"):
        ranks = whole.compressed(method).ranks["value"]
        assert ranks == ((1, 2), (1, 2, 3, 4), (1, 2))


@pytest.mark.parametrize("method", METHODS)
def test_bytes_and_weights_are_counted_from_what_is_stored(task: Task, method: str) -> None:
    mapper = task.compressed(method)
    n_bytes = n_weights = 0
    each = {"bfloat16": 2, "fp8": 1}.get(method.removeprefix("low_rank").removeprefix("+"), 8)
    for kind in KINDS:
        for layer in task.recipe.mapped_layers:
            p = task.recipe.n_features(kind, layer)
            heads, width = TARGET[layer]
            n_bytes += heads * width * 8  # biases: float64 beside float64 weights
            for rank in mapper.ranks[kind][layer]:
                columns = width if rank is None else rank
                n_bytes += p * columns * each + (4 * columns if "fp8" in method else 0)
                n_weights += p * columns
                if rank is not None:
                    n_bytes += rank * width * max(each, 2)
                    n_weights += rank * width
    assert (mapper.nbytes, mapper.n_weights) == (n_bytes, n_weights)
    original = LinearMapper(task.weights)
    assert mapper.nbytes < original.nbytes
    assert mapper.n_weights <= original.n_weights
    assert (mapper.n_weights < original.n_weights) == method.startswith("low_rank")


@pytest.mark.parametrize("method", METHODS)
def test_r2_from_moments_is_sklearns_on_rows_mapped_by_the_effective_weights(task: Task, method: str) -> None:
    mapper = task.compressed(method)
    found = r2_of(mapper, task.moments, "held_out")
    weights = mapper.linear_weights()
    for kind, layer in product(KINDS, task.recipe.mapped_layers):
        rows = task.rows("held_out", kind, layer)
        mapped = rows @ weights.weight[kind][layer].double() + weights.bias[kind][layer].unsqueeze(1)
        for head in range(TARGET[layer][0]):
            true = kind_layers(task.caches["held_out"][1], kind)[layer][:, head].flatten(0, 1).numpy()
            expected = r2_score(true, mapped[head].numpy(), multioutput="variance_weighted")
            assert float(found[kind][layer, head]) == pytest.approx(expected, abs=1e-9)


def r2_loss(task: Task, method: str) -> Tensor:
    """Held-out R² lost, of every head that is mapped."""
    before, after = (
        r2_of(mapper, task.moments, "held_out")
        for mapper in (LinearMapper(task.weights), task.compressed(method))
    )
    loss = torch.stack([before[kind] - after[kind] for kind in KINDS])
    return loss[~loss.isnan()]


@pytest.mark.parametrize(("method", "largest"), [("bfloat16", 2**-8), ("fp8", 2**-4)])
def test_fewer_bits_cost_little_r2_where_features_are_independent(
    whole: Task, method: str, largest: float
) -> None:
    """Weights off by shares of themselves up to ε lose at most ε² of what they explain, here nearly all; of
    uniform shares the mean square is a third of that.
    """
    loss = r2_loss(whole, method)
    assert len(loss) == 2 * (2 + 4 + 2)
    noise = 1e-4  # an error of weights may by chance lie along what the map leaves
    assert float(loss.abs().max()) < largest**2 + noise
    assert 0 < float(loss.mean()) < largest**2 / 3 + noise


def test_features_that_say_the_same_make_small_errors_of_weights_large() -> None:
    """Native layers that the source nearly determines: large weights that cancel, and a case for the gate."""
    task = make_task(RECIPES["full_head, native"])
    assert float(r2_loss(task, "fp8").max()) > 0.1


@pytest.mark.parametrize("method", METHODS)
def test_every_method_comes_back_from_disk_bit_by_bit(task: Task, method: str, tmp_path: Path) -> None:
    mapper = task.compressed(method)
    save_mapper(mapper, tmp_path, {"note": "compressed"})
    back, _ = load_mapper(tmp_path)
    assert isinstance(back, CompressedLinearMapper)
    assert back.settings() == mapper.settings()
    assert (back.method, back.ranks, back.nbytes) == (method, mapper.ranks, mapper.nbytes)
    assert back.native_layers == task.recipe.native_layers
    for name, tensor in mapper.tensors().items():
        found = back.tensors()[name]
        assert found.dtype == tensor.dtype
        assert torch.equal(found.contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8))
    found = task.mapped(back, "fit")
    assert all(torch.equal(found[place], value) for place, value in task.mapped(mapper, "fit").items())


@pytest.mark.parametrize("method", METHODS)
def test_no_compression_moves_the_mean_of_an_output(task: Task, method: str) -> None:
    weights = task.compressed(method, tolerance=0.5).linear_weights()
    for kind, layer in product(KINDS, task.recipe.mapped_layers):
        rows = task.rows("fit", kind, layer)
        mapped = rows @ weights.weight[kind][layer].double() + weights.bias[kind][layer].unsqueeze(1)
        true = kind_layers(task.caches["fit"][1], kind)[layer].transpose(0, 1).flatten(1, 2)
        torch.testing.assert_close(mapped.mean(1), true.mean(1), rtol=1e-10, atol=1e-10)  # float64 means


@pytest.mark.parametrize("method", ["bfloat16", "fp8"])
def test_without_moments_biases_stay_and_a_rank_is_refused(task: Task, method: str) -> None:
    mapper = CompressedLinearMapper.from_linear(LinearMapper(task.weights), method)
    for kind, layer in product(KINDS, task.recipe.mapped_layers):
        assert torch.equal(mapper.linear_weights().bias[kind][layer], task.weights.bias[kind][layer])
    with pytest.raises(CompressionError, match=r"'low_rank\+.*' chooses ranks on held-out moments"):
        CompressedLinearMapper.from_linear(LinearMapper(task.weights), f"low_rank+{method}")


def test_dtypes_are_the_methods_and_stay(task: Task) -> None:
    expected = {"bfloat16": torch.bfloat16, "fp8": FLOAT8, "low_rank": torch.float64}
    for method, dtype in expected.items():
        mapper = task.compressed(method).to("cpu", torch.float16)
        tensors = mapper.tensors()
        assert {t.dtype for name, t in tensors.items() if name.endswith("weight")} == {dtype}
        assert {t.dtype for name, t in tensors.items() if name.endswith("scale")} <= {torch.float32}
        assert {t.dtype for name, t in tensors.items() if name.endswith("bias")} == {torch.float64}


@pytest.mark.parametrize("method", ["low_rank", "low_rank+bfloat16", "low_rank+fp8"])
def test_heads_of_no_rank_at_all_give_the_mean_and_come_back(task: Task, method: str, tmp_path: Path) -> None:
    mapper = task.compressed(method, tolerance=1e9)
    assert {rank for layers in mapper.ranks.values() for ranks in layers for rank in ranks} == {0}
    assert mapper.n_weights == 0
    save_mapper(mapper, tmp_path, {})
    back, _ = load_mapper(tmp_path)
    for (kind, layer), found in task.mapped(back, "held_out").items():
        true = kind_layers(task.caches["fit"][1], kind)[layer].mean((0, 2))
        torch.testing.assert_close(found, true[None, :, None].expand_as(found), rtol=1e-10, atol=1e-10)


def test_rows_that_carry_each_heads_own_weights_are_reduced_head_by_head() -> None:
    task = make_task(RECIPES["full_head"], weighted=True)
    mapper = task.compressed("low_rank")
    before, after = (r2_of(m, task.moments, "held_out") for m in (LinearMapper(task.weights), mapper))
    for kind in KINDS:
        lost = (1 - after[kind]) / (1 - before[kind])
        assert bool((lost[~lost.isnan()] <= 1.02 + 1e-9).all())  # the tolerance, on the weighted rows
    assert mapper.n_weights < LinearMapper(task.weights).n_weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_any_dtype_are_compressed(dtype: torch.dtype) -> None:
    task = make_task(RECIPES["full_head"], dtype)
    for method in METHODS:
        mapper = task.compressed(method)
        assert {t.dtype for name, t in mapper.tensors().items() if name.endswith("bias")} == {torch.float32}
        r2 = r2_of(mapper, task.moments, "held_out")
        assert all(np.isfinite(table[~table.isnan()].numpy()).all() for table in r2.values())


def test_it_knows_what_the_mapper_was_fitted_for(task: Task) -> None:
    model = ModelIdentity("model", "w", "c", "t", "r", "float32")
    mapper = LinearMapper(task.weights)
    mapper.fitted_for = FittedFor(model, model, "strip")
    made = CompressedLinearMapper.from_linear(mapper, "fp8")
    assert made.fitted_for == made.to("cpu").fitted_for == mapper.fitted_for
    assert made.fallbacks == mapper.fallbacks
    assert get_mapper("compressed_linear") is CompressedLinearMapper


def test_mistakes_are_named(task: Task) -> None:
    mapper = LinearMapper(task.weights)
    with pytest.raises(
        UnknownName, match=r"unknown compression method 'bf16'\..*Known: bfloat16, fp8, low_rank"
    ):
        CompressedLinearMapper.from_linear(mapper, "bf16", task.moments)
    with pytest.raises(LowRankError, match="tolerance=-1"):
        CompressedLinearMapper.from_linear(mapper, "low_rank", task.moments, tolerance=-1)
    other = PairMoments.zeros(Layout(SOURCE, TARGET[:2]))
    with pytest.raises(MomentsError, match="the moments are of"):
        CompressedLinearMapper.from_linear(mapper, "fp8", other)
    layer = task.recipe.mapped_layers[0]
    weight = task.weights.weight["key"][layer].clone()
    weight[0, 0, 0] = float("inf")
    bad = list(task.weights.weight["key"])
    bad[layer] = weight
    damaged = LinearWeights(
        task.recipe, {**task.weights.weight, "key": tuple(bad)}, task.weights.bias, task.weights.fallbacks
    )
    for method in ("bfloat16", "fp8"):
        with pytest.raises(QuantiseError):
            CompressedLinearMapper.from_linear(LinearMapper(damaged), method)
