"""The target's first layers, computed by itself over the whole context, beside a map for those above."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, Self

import pytest
import torch
from torch import Tensor

from kvmap.fit.features import Layout, Recipe, geometry_shape
from kvmap.fit.linear import Penalty, fit_linear
from kvmap.fit.pair_moments import PairMoments, calibration_rows, full_tables
from kvmap.fit.selection import rank_layers
from kvmap.fit.view import cache_view, calibration_view
from kvmap.mappers import LinearMapper, Mapper, MapperMismatch
from kvmap.models.cache import KVCache
from kvmap.models.capture import prefill
from kvmap.models.loaded import LoadedModel
from kvmap.transfer import TransferError, continue_greedy, native, native_share, transfer
from tests.tiny_random_models import FAMILIES, ORIGINAL_MAX, WINDOW, build, left_padding, random_ids

# float32 logits of size 1 to 15, computed with other batch shapes; a rotation off and on costs some 1e-6
SAME = {"rtol": 0, "atol": 1e-4}
N_LAYERS = 3
# Caches, masks, positions, biases and rotations that are made in different ways.
some_families = pytest.mark.parametrize(
    "family",
    ["llama_llama3", "qwen3", "ministral3", "gemma3", "gpt_neox", "cohere2", "smollm3", "phi3_longrope"],
)


@cache
def source_model() -> LoadedModel:
    return LoadedModel.from_model(build("llama", seed=1, n_layers=2), name="source")


@cache
def target_model(family: str = "qwen3") -> LoadedModel:
    return LoadedModel.from_model(build(family, seed=2, n_layers=N_LAYERS), name=family)


class TestMapper(Mapper):
    """A mapper between these two models; what it gives for a layer is the subclass's."""

    __test__ = False

    def __init__(self, target: LoadedModel, native_layers: int) -> None:
        super().__init__(geometry_shape(source_model().geometry), geometry_shape(target.geometry))
        self.native_layers = native_layers

    def settings(self) -> dict[str, Any]:
        return {}

    def tensors(self) -> dict[str, Tensor]:
        return {}

    @classmethod
    def from_state(cls, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        raise AssertionError("nothing here is saved")


class Oracle(TestMapper):
    """Gives what the target itself caches for the context, and wants its native layers to be just that."""

    def __init__(
        self, target: LoadedModel, native_layers: int, truth: KVCache, hold_back: int, rope: str = "strip"
    ) -> None:
        super().__init__(target, native_layers)
        self.truth = cache_view(truth, rope)
        self.stop = truth.n_tokens - hold_back

    def map_layer(
        self,
        layer: int,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        native_keys: Sequence[Tensor] = (),
        native_values: Sequence[Tensor] = (),
    ) -> tuple[Tensor, Tensor]:
        assert layer >= self.native_layers == len(native_keys) == len(native_values)
        columns = slice(self.stop - keys[0].shape[2], self.stop)
        real = self.truth.mask[:, columns]
        for i in range(self.native_layers):
            for own, true in ((native_keys[i], self.truth.keys[i]), (native_values[i], self.truth.values[i])):
                assert own.dtype == torch.float32
                torch.testing.assert_close(
                    own.transpose(1, 2)[real], true[:, :, columns].transpose(1, 2)[real], rtol=0, atol=1e-4
                )
        return self.truth.keys[layer][:, :, columns], self.truth.values[layer][:, :, columns]


class Zero(TestMapper):
    """Nothing of the context arrives through the map."""

    def map_layer(
        self,
        layer: int,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        native_keys: Sequence[Tensor] = (),
        native_values: Sequence[Tensor] = (),
    ) -> tuple[Tensor, Tensor]:
        heads, width = self.target_shape[layer]
        batch, _, tokens, _ = keys[0].shape
        return torch.zeros(batch, heads, tokens, width), torch.zeros(batch, heads, tokens, width)


class Never(TestMapper):
    """A map that must not be called."""

    def map_layer(self, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        raise AssertionError("there is nothing to map")


def native_logits(target: LoadedModel, ids: Tensor, mask: Tensor) -> Tensor:
    """The model's own forward over the whole context, no cache involved."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = target.model(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False
        ).logits
    return logits[:, -1].float()


def assert_same_columns(got: KVCache, expected: KVCache, layers: range) -> None:
    real = expected.mask
    for layer in layers:
        for mine, theirs in (
            (got.keys[layer], expected.keys[layer]),
            (got.values[layer], expected.values[layer]),
        ):
            torch.testing.assert_close(mine.transpose(1, 2)[real], theirs.transpose(1, 2)[real], **SAME)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("rope", ["strip", "coupled"])
@some_families
def test_a_perfect_map_above_any_number_of_native_layers_is_a_native_run(
    family: str, rope: str, batch: int
) -> None:
    target = target_model(family)
    ids, mask = random_ids(batch, 16), left_padding(batch, 16)
    expected, truth = native_logits(target, ids, mask), prefill(target, ids, mask)
    source = prefill(source_model(), ids, mask)
    for m in range(N_LAYERS + 1):
        for native_head, hold_back in ((0, 1), (1, 4)):
            oracle = Oracle(target, m, truth, hold_back, rope)
            handoff = transfer(
                source, oracle, target, ids, mask, native_head=native_head, hold_back=hold_back, rope=rope
            )
            torch.testing.assert_close(handoff.logits, expected, **SAME)
            assert_same_columns(handoff.kv, truth, range(N_LAYERS))
            assert handoff.n_native_layers == m
            assert handoff.kv.exact == (m == N_LAYERS)
            counts = (handoff.n_mapped, handoff.n_native_head, handoff.n_hold_back)
            assert sum(counts) == int(mask.sum())
            if m < N_LAYERS:
                assert counts[1:] == (batch * native_head, batch * hold_back)
    assert continue_greedy(target, handoff, 3) == continue_greedy(target, native(target, ids, mask), 3)


@pytest.mark.parametrize("hold_back", [1, 4])
@pytest.mark.parametrize("n_tokens", [ORIGINAL_MAX + 2, ORIGINAL_MAX + 9])
@pytest.mark.parametrize("family", ["llama_dynamic", "phi3_longrope"])
def test_native_layers_turn_by_the_frequencies_of_the_whole_context(
    family: str, n_tokens: int, hold_back: int
) -> None:
    """With 34 tokens and 4 held back the native layers see 30, fewer than the model was trained on."""
    target = target_model(family)
    ids, mask = random_ids(3, n_tokens, seed=1), left_padding(3, n_tokens)
    expected, truth = native_logits(target, ids, mask), prefill(target, ids, mask)
    source = prefill(source_model(), ids, mask)
    for m in (1, 2):
        prefill(target, random_ids(1, 5))  # frequencies of another length must not stick
        handoff = transfer(
            source, Oracle(target, m, truth, hold_back), target, ids, mask, hold_back=hold_back
        )
        torch.testing.assert_close(handoff.logits, expected, **SAME)
        assert not handoff.kv.mixed


def test_keys_left_unrotated_leave_the_native_layers_as_the_target_caches_them() -> None:
    target = target_model()
    ids, mask = random_ids(3, 16), left_padding(3, 16)
    truth = prefill(target, ids, mask)
    oracle = Oracle(target, 2, truth, 1, "no_rerotate")
    handoff = transfer(prefill(source_model(), ids, mask), oracle, target, ids, mask, rope="no_rerotate")
    before = slice(1, 15)
    own, content = truth.slice_tokens(1, 15), truth.strip().slice_tokens(1, 15)
    assert_same_columns(handoff.kv.slice_tokens(1, 15), own, range(2))
    mapped = handoff.kv.keys[2][0, :, before]
    torch.testing.assert_close(mapped[:, 1:], content.keys[2][0, :, 1:], **SAME)
    assert float((mapped - own.keys[2][0]).abs().max()) > 0.1
    assert handoff.kv.mixed


def test_keys_left_unrotated_are_a_native_run_where_the_layers_above_rotate_none() -> None:
    target = LoadedModel.from_model(build("smollm3", seed=2, n_layers=2))
    assert [layer.rope_type is None for layer in target.geometry.layers] == [False, True]
    ids = random_ids(2, 12)
    oracle = Oracle(target, 1, prefill(target, ids), 1, "no_rerotate")
    handoff = transfer(prefill(source_model(), ids), oracle, target, ids, rope="no_rerotate")
    torch.testing.assert_close(handoff.logits, native_logits(target, ids, torch.ones_like(ids)), **SAME)


@pytest.mark.parametrize("rope", ["strip", "coupled", "no_rerotate"])
@pytest.mark.parametrize("m", [0, 1, 2])
def test_a_map_changes_only_the_layers_above(m: int, rope: str) -> None:
    target = target_model()
    ids, mask = random_ids(3, 16), left_padding(3, 16)
    truth = prefill(target, ids, mask)
    handoff = transfer(
        prefill(source_model(), ids, mask), Zero(target, m), target, ids, mask, hold_back=2, rope=rope
    )
    # one column less than the context: held-back columns have read what was zeroed
    assert_same_columns(handoff.kv.slice_tokens(0, 14), truth.slice_tokens(0, 14), range(m))
    for layer in range(m, N_LAYERS):
        for part in (handoff.kv.keys[layer], handoff.kv.values[layer]):
            assert not part[0, :, 1:14].any()
            assert part[0, :, 0].any()
    difference = (handoff.logits - native_logits(target, ids, mask)).abs().max()
    assert float(difference) > 100 * SAME["atol"]


@pytest.mark.parametrize("m", [1, 2])
def test_native_layers_are_the_targets_own_numbers(m: int) -> None:
    target = target_model()
    ids, mask = random_ids(3, 16), left_padding(3, 16)
    own = prefill(target, ids[:, :15], mask[:, :15], n_layers=m)
    handoff = transfer(prefill(source_model(), ids, mask), Zero(target, m), target, ids, mask, native_head=0)
    for layer in range(m):
        for got, expected in (
            (handoff.kv.keys[layer], own.keys[layer]),
            (handoff.kv.values[layer], own.values[layer]),
        ):
            real = own.mask
            assert torch.equal(got[:, :, :15].transpose(1, 2)[real], expected.transpose(1, 2)[real])


@pytest.mark.parametrize("hold_back", [1, 4])
@pytest.mark.parametrize("native_head", [0, 1, 6])
def test_rows_of_any_length_are_handed_over_each_by_itself(native_head: int, hold_back: int) -> None:
    target = target_model()
    lengths = [12, 9, 5, 4, 2, 1]  # shorter than native_head, than hold_back, and a single token
    ids = random_ids(len(lengths), 12, seed=4)
    mask = (torch.arange(12) >= 12 - torch.tensor(lengths)[:, None]).long()
    options = {"native_head": native_head, "hold_back": hold_back}
    batch = transfer(prefill(source_model(), ids, mask), Zero(target, 2), target, ids, mask, **options)
    for row, length in enumerate(lengths):
        own = ids[row : row + 1, 12 - length :]
        one = transfer(prefill(source_model(), own), Zero(target, 2), target, own, **options)
        torch.testing.assert_close(batch.logits[row], one.logits[0], **SAME)
        assert one.n_mapped_of_row[0] == batch.n_mapped_of_row[row]
        assert one.n_native_layers == (2 if one.n_mapped else N_LAYERS)


def test_columns_that_are_pads_in_every_row_do_not_count_towards_a_window() -> None:
    target = target_model("mistral_sliding")
    ids = random_ids(2, WINDOW + 8)
    # of the second row nothing is left before the held-back tokens
    mask = (torch.arange(WINDOW + 8) >= torch.tensor([[8], [WINDOW + 6]])).long()
    oracle = Oracle(target, 2, prefill(target, ids, mask), 4)
    source = prefill(source_model(), ids, mask)
    handoff = transfer(source, oracle, target, ids, mask, hold_back=4)
    torch.testing.assert_close(handoff.logits, native_logits(target, ids, mask), **SAME)


@pytest.mark.parametrize("q", [1, 4, 15])
@pytest.mark.parametrize("m", [1, N_LAYERS])
def test_a_prefix_the_target_has_cached_is_used_as_it_is(m: int, q: int) -> None:
    target = target_model()
    ids = random_ids(2, 16, seed=5)
    prefix, truth = prefill(target, ids[:, :q]), prefill(target, ids)
    oracle = Oracle(target, m, truth, 1) if m < N_LAYERS else Never(target, m)
    handoff = transfer(prefill(source_model(), ids), oracle, target, ids, native_prefix=prefix)
    expected = native_logits(target, ids, torch.ones_like(ids))
    torch.testing.assert_close(handoff.logits, expected, **SAME)
    nothing_mapped = m == N_LAYERS or q == 15
    assert handoff.kv.exact == nothing_mapped
    assert handoff.n_native_layers == (N_LAYERS if nothing_mapped else m)
    for layer in range(N_LAYERS):
        assert torch.equal(handoff.kv.keys[layer][:, :, :q], prefix.keys[layer])
        assert torch.equal(handoff.kv.values[layer][:, :, :q], prefix.values[layer])


def test_a_mapper_of_native_layers_alone_maps_nothing() -> None:
    target = target_model()
    ids, mask = random_ids(3, 16), left_padding(3, 16)
    handoff = transfer(
        prefill(source_model(), ids, mask), Never(target, N_LAYERS), target, ids, mask, native_head=0
    )
    expected = native(target, ids, mask)
    assert torch.equal(handoff.logits, expected.logits)
    assert handoff.kv.exact
    assert handoff.kv.owner == target.identity
    assert (handoff.n_mapped, handoff.n_native_layers) == (0, N_LAYERS)
    assert expected.n_native_layers == N_LAYERS


def test_a_bfloat16_target_keeps_its_own_bits_and_feeds_the_map_in_float32() -> None:
    target = LoadedModel.from_model(build("qwen3", seed=2, n_layers=N_LAYERS).bfloat16())
    ids = random_ids(2, 12)

    class Reads(Zero):
        def map_layer(self, layer: int, keys: Any, values: Any, *native: Any) -> tuple[Tensor, Tensor]:
            assert {part.dtype for parts in native for part in parts} == {torch.float32}
            assert [part.shape[2] for parts in native for part in parts] == [keys[0].shape[2]] * 4
            return super().map_layer(layer, keys, values)

    handoff = transfer(prefill(source_model(), ids), Reads(target, 2), target, ids)
    own = prefill(target, ids[:, :11], n_layers=2)
    for layer in range(2):
        assert handoff.kv.keys[layer].dtype == torch.bfloat16
        assert torch.equal(handoff.kv.keys[layer][:, :, 1:11], own.keys[layer][:, :, 1:])
        assert torch.equal(handoff.kv.values[layer][:, :, 1:11], own.values[layer][:, :, 1:])


@cache
def moments(rope: str, regressors: str, native_layers: int) -> PairMoments:
    source, target = source_model(), target_model()
    shapes = geometry_shape(source.geometry), geometry_shape(target.geometry)
    layout = Layout(*shapes, native_layers)
    sums = PairMoments.zeros(layout, full_tables(layout, regressors))
    for seed, split in ((10, "fit"), (11, "held_out")):
        ids = random_ids(16, 24, seed=seed)
        views = calibration_view(prefill(source, ids), prefill(target, ids), rope)
        sums.update(split, *views, calibration_rows(torch.ones_like(ids).bool(), native_head=1))
    return sums


@pytest.mark.parametrize("regressors", ["own_kind", "both_kinds"])
@pytest.mark.parametrize("support", ["full_head", "head_local"])
@pytest.mark.parametrize("rope", ["strip", "coupled"])
def test_a_fitted_map_reads_the_native_layers_in_a_hand_off_as_it_does_in_a_whole_cache(
    rope: str, support: str, regressors: str
) -> None:
    source, target, m = source_model(), target_model(), 2
    sums = moments(rope, regressors, m)
    recipe = Recipe(sums.source_shape, sums.target_shape, support, rank_layers(sums, "r2", 1), regressors, m)
    mapper = LinearMapper(fit_linear(sums, recipe, Penalty(0.01)))
    ids, mask = random_ids(3, 16), left_padding(3, 16)
    read, own = prefill(source, ids, mask), prefill(target, ids, mask, n_layers=m)
    expected = mapper.map(cache_view(read, rope), cache_view(own, rope))
    if rope == "strip":
        expected = expected.rotate(target.rotations(16))
    handoff = transfer(read, mapper, target, ids, mask, rope=rope, native_head=0)
    assert_same_columns(handoff.kv.slice_tokens(0, 15), expected.slice_tokens(0, 15), range(N_LAYERS))


@contextmanager
def layers_run(target: LoadedModel) -> Iterator[list[tuple[int, int]]]:
    """(layer, tokens) of each decoder layer that was run to its end."""
    finished: list[tuple[int, int]] = []
    hooks = [
        layer.mlp.register_forward_hook(lambda _, inputs, __, i=i: finished.append((i, inputs[0].shape[1])))
        for i, layer in enumerate(target.body.layers)
    ]
    yield finished
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("native_head", [0, 2])
@pytest.mark.parametrize("m", [0, 1, 2])
def test_the_target_runs_no_more_than_the_layers_its_share_counts(m: int, native_head: int) -> None:
    target, ids, hold_back = target_model(), random_ids(1, 16), 3
    source = prefill(source_model(), ids)
    with layers_run(target) as finished:
        transfer(source, Zero(target, m), target, ids, native_head=native_head, hold_back=hold_back)
    above = max(m - 1, 0)
    whole = [*range(N_LAYERS)]
    expected = [(layer, 16 - hold_back) for layer in range(above)]
    expected += [(layer, hold_back) for layer in whole]
    expected += [(layer, native_head) for layer in whole if native_head]
    assert sorted(finished) == sorted(expected)
    share = native_share(target.geometry, 16, m, native_head, hold_back)
    # the native head, run by itself and with the native layers, counts once
    run_twice = above * native_head
    assert share == pytest.approx((sum(n for _, n in finished) - run_twice) / (N_LAYERS * 16))


@pytest.mark.parametrize(
    ("n_tokens", "settings", "expected"),
    [
        (100, {"native_head": 0, "hold_back": 1}, 1 / 100),
        (100, {}, 2 / 100),
        (100, {"native_layers": 1}, 2 / 100),  # layer 0 costs a projection
        (100, {"native_layers": 2}, (1 * 100 + 2 * 2) / 300),
        (100, {"native_layers": 3}, 1.0),
        (2, {}, 1.0),
        (1, {"native_head": 9}, 1.0),
    ],
)
def test_the_share_of_a_re_prefill(n_tokens: int, settings: dict[str, int], expected: float) -> None:
    assert native_share(target_model().geometry, n_tokens, **settings) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("n_tokens", "settings", "message"),
    [
        (0, {}, "n_tokens=0"),
        (9, {"native_layers": 4}, "native_layers=4: expected at least 1 token, and 0 to 3 layers"),
        (9, {"native_layers": -1}, "native_layers=-1"),
        (9, {"hold_back": 0}, "hold_back=0"),
        (9, {"native_head": -1}, "native_head=-1"),
    ],
)
def test_shares_that_cannot_be_are_refused(n_tokens: int, settings: dict[str, int], message: str) -> None:
    with pytest.raises(TransferError, match=message):
        native_share(target_model().geometry, n_tokens, **settings)


@pytest.mark.parametrize("m", [-1, 4])
def test_a_number_of_native_layers_the_target_does_not_have_is_refused(m: int) -> None:
    ids = random_ids(1, 8)
    with pytest.raises(MapperMismatch, match=f"native_layers={m}: the target has 3 layers; expected 0 to 3"):
        transfer(prefill(source_model(), ids), Zero(target_model(), m), target_model(), ids)


@pytest.mark.parametrize("m", range(N_LAYERS + 1))
def test_a_whole_cache_is_mapped_above_the_native_layers(m: int) -> None:
    target = target_model()
    ids, mask = random_ids(3, 10), left_padding(3, 10)
    truth = prefill(target, ids, mask)
    own = prefill(target, ids, mask, n_layers=m).strip() if m else None
    mapped = Oracle(target, m, truth, 0).map(prefill(source_model(), ids, mask).strip(), own)
    assert mapped.stripped
    assert not mapped.exact
    assert mapped.n_layers == N_LAYERS
    for layer, (key, value) in enumerate(zip(mapped.keys, mapped.values, strict=True)):
        assert torch.equal(key, truth.strip().keys[layer])
        assert torch.equal(value, truth.values[layer])
        assert own is None or layer >= m or key is own.keys[layer]


def test_native_layers_a_mapper_does_not_read_are_refused() -> None:
    target = target_model()
    ids, mask = random_ids(2, 10), left_padding(2, 10)
    source = prefill(source_model(), ids, mask).strip()
    mapper, own = Zero(target, 2), prefill(target, ids, mask, n_layers=2).strip()
    mapper.map(source, own)
    other = prefill(LoadedModel.from_model(FAMILIES["llama"]()), ids, mask).strip()
    for wrong, message in (
        (None, "reads the target's first 2 layers, and none were given"),
        (prefill(target, ids, mask, n_layers=1).strip(), "1 native layers were given; .* reads 2"),
        (prefill(target, ids, mask, n_layers=2), "native layers carry rotated keys"),
        (other, "layer 0 of the native layers has 2 KV heads of width 8"),
        (own.slice_tokens(0, 9), "2 rows of 9 columns, the source cache 2 of 10"),
        (own.select_rows([0]), "1 rows of 10 columns"),
        (replace(own, mask=torch.ones_like(own.mask)), "pads lie elsewhere"),
    ):
        with pytest.raises(MapperMismatch, match=message):
            mapper.map(source, wrong)
    with pytest.raises(MapperMismatch, match=r"2 native layers were given; .* leave native out"):
        Zero(target, 0).map(source, own)
