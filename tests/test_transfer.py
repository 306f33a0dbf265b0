from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from kvmap.errors import KvmapError, UnknownName
from kvmap.fit.features import Layout, Recipe, geometry_shape
from kvmap.fit.linear import LinearWeights, Penalty, fit_linear, r2_of
from kvmap.fit.pair_moments import PairMoments, calibration_rows
from kvmap.fit.selection import rank_layers
from kvmap.mappers import (
    BiasOnlyMapper,
    IdentityMapper,
    LinearMapper,
    Mapper,
    MapperMismatch,
    RandomMapper,
    identity_record,
    load_mapper,
    save_mapper,
)
from kvmap.models.cache import KVCache, cache_argument
from kvmap.models.capture import prefill
from kvmap.models.pair import LoadedModel
from kvmap.models.rope import Rotation
from kvmap.transfer import (
    HandOff,
    TransferError,
    TransferOptions,
    calibration_view,
    continue_greedy,
    native,
    score_continuations,
    transfer,
)
from tests.tiny_random_models import FAMILIES, ORIGINAL_MAX, YARN, build, left_padding, random_ids

# float32 logits of size 1 to 15, computed with other batch shapes
SAME = {"rtol": 0, "atol": 1e-4}


@cache
def source_model() -> LoadedModel:
    return LoadedModel.from_model(build("llama_llama3", seed=1, n_layers=3), name="source")


@cache
def target_model() -> LoadedModel:
    """Other depth, other head count and width, other rotation: nothing about the two caches matches."""
    model = build("qwen3", seed=2, n_layers=2, num_key_value_heads=4, head_dim=6)
    return LoadedModel.from_model(model, name="target")


@cache
def scaled_source() -> LoadedModel:
    """A rotation that stretches keys by another factor than any target's."""
    model = build("llama_yarn", seed=1, n_layers=3, rope_parameters={**YARN, "attention_factor": 0.8})
    return LoadedModel.from_model(model, name="scaled source")


@cache
def scaled_target(family: str) -> LoadedModel:
    model = build(family, seed=2, n_layers=2, num_key_value_heads=4, head_dim=6)
    return LoadedModel.from_model(model, name=family)


def moments_between(source: LoadedModel, target: LoadedModel, rope: str) -> PairMoments:
    result = PairMoments.zeros(Layout(geometry_shape(source.geometry), geometry_shape(target.geometry)))
    for seed, split in ((10, "fit"), (11, "held_out")):
        ids = random_ids(8, 24, seed=seed)
        views = calibration_view(prefill(source, ids), prefill(target, ids), rope)
        result.update(split, *views, calibration_rows(torch.ones_like(ids).bool(), native_head=1))
    return result


@cache
def moments(rope: str = "strip") -> PairMoments:
    return moments_between(source_model(), target_model(), rope)


def fitted(sums: PairMoments, support: str, top_k: int, ridge_lambda: float) -> LinearWeights:
    selection = rank_layers(sums, "r2", top_k)
    recipe = Recipe(sums.source_shape, sums.target_shape, support, selection)
    return fit_linear(sums, recipe, Penalty(ridge_lambda))


def linear_mapper(sums: PairMoments, support: str) -> LinearMapper:
    return LinearMapper(fitted(sums, support, 2, 0.01))


@cache
def mapper(support: str = "full_head", rope: str = "strip") -> LinearMapper:
    return linear_mapper(moments(rope), support)


def handed_over(ids: Tensor, mask: Tensor | None = None, **options: Any) -> HandOff:
    return transfer(prefill(source_model(), ids, mask), mapper(), target_model(), ids, mask, **options)


def rotors(rotation: Rotation | None, n_tokens: int) -> Tensor:
    """(tokens, pairs) complex: each pair of channels (i, i + d/2) is one number times this."""
    assert rotation is not None
    assert rotation.layout == "half"
    angle = torch.arange(n_tokens)[:, None] * rotation.inv_freq
    return torch.polar(torch.full_like(angle, rotation.scaling), angle)


def paired(x: Tensor) -> Tensor:
    return torch.complex(*x.chunk(2, -1))


def by_hand(
    ids: Tensor,
    native_head: int,
    hold_back: int,
    rope: str = "strip",
    models: tuple[LoadedModel, LoadedModel] | None = None,
    mapping: LinearMapper | None = None,
) -> tuple[Tensor, DynamicCache]:
    """One row, no padding: the hand-off of METHOD, spelled out with transformers' own cache."""
    source, target = models or (source_model(), target_model())
    n_tokens, n_cut = ids.shape[1], ids.shape[1] - hold_back
    read = prefill(source, ids)
    content = read.keys
    if rope != "coupled":
        plain = [
            paired(key) / rotors(rotation, n_tokens)
            for key, rotation in zip(read.keys, source.rotations(n_tokens), strict=True)
        ]
        content = tuple(torch.cat((key.real, key.imag), -1) for key in plain)
    mapped = (mapping or mapper(rope=rope)).map(replace(read, keys=content, rotations=None))
    own = prefill(target, ids[:, :native_head]) if native_head else None
    cache = DynamicCache()
    for layer, key in enumerate(mapped.keys):
        if rope == "strip":
            turned = paired(key) * rotors(target.rotations(n_tokens)[layer], n_tokens)
            key = torch.cat((turned.real, turned.imag), -1)
        value = mapped.values[layer]
        if own is not None:
            key = torch.cat((own.keys[layer], key[:, :, native_head:]), 2)
            value = torch.cat((own.values[layer], value[:, :, native_head:]), 2)
        cache.update(key[:, :, :n_cut], value[:, :, :n_cut], layer)
    with torch.no_grad():
        output = target.model(
            input_ids=ids[:, n_cut:],
            position_ids=torch.arange(n_cut, n_tokens)[None],
            use_cache=True,
            **{cache_argument(target.model): cache},
        )
    return output.logits[:, -1], cache


@pytest.mark.parametrize("hold_back", [1, 4])
@pytest.mark.parametrize("native_head", [0, 1, 3])
@pytest.mark.parametrize("rope", ["strip", "coupled", "no_rerotate"])
def test_a_hand_off_is_what_the_method_says(native_head: int, hold_back: int, rope: str) -> None:
    ids = random_ids(1, 15, seed=3)
    source = prefill(source_model(), ids)
    handoff = transfer(
        source,
        mapper(rope=rope),
        target_model(),
        ids,
        native_head=native_head,
        hold_back=hold_back,
        rope=rope,
    )
    logits, expected = by_hand(ids, native_head, hold_back, rope)
    torch.testing.assert_close(handoff.logits, logits, **SAME)
    for layer in range(2):
        torch.testing.assert_close(handoff.kv.keys[layer], expected.layers[layer].keys, **SAME)
        torch.testing.assert_close(handoff.kv.values[layer], expected.layers[layer].values, **SAME)
    assert (handoff.n_mapped, handoff.n_native_head, handoff.n_hold_back) == (
        15 - native_head - hold_back,
        native_head,
        hold_back,
    )
    assert handoff.n_clamped == 0
    assert not handoff.kv.exact


@pytest.mark.parametrize("native_head", [0, 3])
@pytest.mark.parametrize("rope", ["strip", "coupled", "no_rerotate"])
@pytest.mark.parametrize("family", ["qwen3_yarn", "ministral3"])
def test_models_scaled_differently_hand_over_beyond_the_length_they_were_trained_on(
    family: str, rope: str, native_head: int
) -> None:
    source, target = scaled_source(), scaled_target(family)
    ids = random_ids(1, 60, seed=3)
    assert ids.shape[1] > ORIGINAL_MAX
    factors = [model.rotations(60)[0].scaling for model in (source, target)]
    assert len({1.0, *factors}) == 3
    mapping = linear_mapper(moments_between(source, target, rope), "full_head")
    handoff = transfer(
        prefill(source, ids), mapping, target, ids, native_head=native_head, hold_back=4, rope=rope
    )
    logits, expected = by_hand(ids, native_head, 4, rope, (source, target), mapping)
    torch.testing.assert_close(handoff.logits, logits, **SAME)
    for layer in range(2):
        torch.testing.assert_close(handoff.kv.keys[layer], expected.layers[layer].keys, **SAME)
        torch.testing.assert_close(handoff.kv.values[layer], expected.layers[layer].values, **SAME)


@pytest.mark.parametrize("support", ["full_head", "head_local"])
@pytest.mark.parametrize("hold_back", [1, 4])
@pytest.mark.parametrize("native_head", [0, 1, 6])
def test_every_row_of_a_padded_batch_equals_its_own_hand_off(
    native_head: int, hold_back: int, support: str
) -> None:
    lengths = [12, 9, 5, 4, 2, 1]  # shorter than native_head, than hold_back, and a single token
    ids = random_ids(len(lengths), 12, seed=4)
    mask = (torch.arange(12) >= 12 - torch.tensor(lengths)[:, None]).long()
    options = {"native_head": native_head, "hold_back": hold_back}
    source, target = source_model(), target_model()
    batch = transfer(prefill(source, ids, mask), mapper(support), target, ids, mask, **options)
    counts = [0, 0, 0]
    for row, length in enumerate(lengths):
        own = ids[row : row + 1, 12 - length :]
        one = transfer(prefill(source, own), mapper(support), target, own, **options)
        torch.testing.assert_close(batch.logits[row], one.logits[0], **SAME)
        for layer in range(2):
            torch.testing.assert_close(
                batch.kv.keys[layer][row, :, 12 - length :], one.kv.keys[layer][0], **SAME
            )
            torch.testing.assert_close(
                batch.kv.values[layer][row, :, 12 - length :], one.kv.values[layer][0], **SAME
            )
        counts = [
            a + b for a, b in zip(counts, (one.n_mapped, one.n_native_head, one.n_hold_back), strict=True)
        ]
        assert one.kv.exact == (one.n_mapped == 0)
        assert one.n_mapped_of_row == (one.n_mapped,) == (batch.n_mapped_of_row[row],)
    assert counts == [batch.n_mapped, batch.n_native_head, batch.n_hold_back]
    assert sum(counts) == sum(lengths)


@pytest.mark.parametrize(
    ("n_tokens", "options"),
    [
        (1, {}),
        (1, {"native_head": 0}),
        (4, {"hold_back": 4, "native_head": 0}),
        (4, {"hold_back": 9}),
        (6, {"native_head": 5}),
        (6, {"native_head": 99}),
    ],
)
def test_a_context_with_nothing_to_map_is_a_native_run(n_tokens: int, options: dict[str, int]) -> None:
    ids = random_ids(2, n_tokens)
    handoff = handed_over(ids, **options)
    own = prefill(target_model(), ids)
    with torch.no_grad():
        expected = target_model().model(input_ids=ids).logits[:, -1]
    torch.testing.assert_close(handoff.logits, expected, **SAME)
    assert handoff.kv.exact
    assert handoff.kv.owner == target_model().identity
    assert handoff.n_mapped == 0
    assert handoff.n_native_head + handoff.n_hold_back == 2 * n_tokens
    torch.testing.assert_close(handoff.kv.keys[1], own.keys[1], **SAME)


@pytest.mark.parametrize("q", [1, 4, 7])
def test_a_prefix_the_target_has_cached_is_used_as_it_is(q: int) -> None:
    ids = random_ids(2, 11, seed=5)
    prefix = prefill(target_model(), ids[:, :q])
    expected = handed_over(ids, native_head=q)
    handoff = handed_over(ids, native_head=1, native_prefix=prefix)
    torch.testing.assert_close(handoff.logits, expected.logits, **SAME)
    assert (handoff.n_mapped, handoff.n_native_head) == (expected.n_mapped, expected.n_native_head)
    for layer in range(2):
        assert torch.equal(handoff.kv.keys[layer][:, :, :q], prefix.keys[layer])
        assert torch.equal(handoff.kv.values[layer][:, :, :q], prefix.values[layer])


def test_a_prefix_shorter_than_the_native_head_is_completed_by_the_target() -> None:
    ids, mask = random_ids(3, 14, seed=6), left_padding(3, 14)
    shared = ids.clone()
    for row in range(3):  # all rows begin with the same two tokens, behind their padding
        shared[row, 3 * row : 3 * row + 2] = torch.tensor([7, 8])
    expected = handed_over(shared, mask, native_head=4)
    prefix = prefill(target_model(), torch.tensor([[7, 8]]))
    handoff = handed_over(shared, mask, native_head=4, native_prefix=prefix)
    torch.testing.assert_close(handoff.logits, expected.logits, **SAME)
    assert (handoff.n_mapped, handoff.n_native_head) == (expected.n_mapped, expected.n_native_head)


def test_prefixes_of_different_length_in_one_batch_serve_each_its_row() -> None:
    ids, mask = random_ids(2, 12, seed=7), left_padding(2, 12)
    first = torch.stack([ids[0, :5], torch.cat([torch.zeros(3).long(), ids[1, 3:5]])])
    prefix_mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 0, 1, 1]])
    prefix = prefill(target_model(), first, prefix_mask)
    handoff = handed_over(ids, mask, native_prefix=prefix)
    for row, q in ((0, 5), (1, 2)):
        own = ids[row : row + 1, 3 * row :]
        torch.testing.assert_close(handoff.logits[row], handed_over(own, native_head=q).logits[0], **SAME)


def test_a_whole_context_that_is_cached_already_still_gives_logits() -> None:
    ids = random_ids(1, 9, seed=8)
    handoff = handed_over(ids, native_prefix=prefill(target_model(), ids))
    with torch.no_grad():
        expected = target_model().model(input_ids=ids).logits[:, -1]
    torch.testing.assert_close(handoff.logits, expected, **SAME)
    assert (handoff.n_mapped, handoff.n_native_head, handoff.n_hold_back) == (0, 8, 1)
    assert handoff.kv.exact


def test_prefixes_that_cannot_be_this_contexts_are_refused() -> None:
    ids = random_ids(3, 9, seed=8)
    with pytest.raises(TransferError, match="2 rows; the context has 3"):
        handed_over(ids, native_prefix=prefill(target_model(), ids[:2, :3]))
    with pytest.raises(MapperMismatch, match="native_prefix"):
        handed_over(ids, native_prefix=prefill(source_model(), ids[:, :3]))
    with pytest.raises(TransferError, match="position 0"):
        handed_over(ids, native_prefix=prefill(target_model(), ids).slice_tokens(2, 5))
    twin = build("qwen3", seed=3, n_layers=2, num_key_value_heads=4, head_dim=6)
    prefix = prefill(LoadedModel.from_model(twin, name="twin"), ids[:, :3])
    with pytest.raises(TransferError, match="another model's cache: weights"):
        handed_over(ids, native_prefix=prefix)


def log_probabilities(ids: Tensor, continuation: list[int]) -> Tensor:
    """The target's own, from one forward over context and continuation."""
    whole = torch.cat((ids, torch.tensor([continuation])), 1)
    with torch.no_grad():
        logits = target_model().model(input_ids=whole).logits[0, ids.shape[1] - 1 : -1]
    return logits.log_softmax(-1)[torch.arange(len(continuation)), torch.tensor(continuation)]


def test_scores_are_the_models_own_for_long_short_and_empty_continuations() -> None:
    ids = random_ids(4, 9, seed=9)
    continuations = [[5, 9, 11, 4], [8], [], [3, 3]]
    scores = score_continuations(target_model(), native(target_model(), ids), continuations)
    for row, continuation in enumerate(continuations):
        assert scores[row].dtype == torch.float32
        if continuation:
            torch.testing.assert_close(
                scores[row], log_probabilities(ids[row : row + 1], continuation), **SAME
            )
    assert scores[2].shape == (0,)
    one = native(target_model(), ids[:1])
    assert [s.tolist() for s in score_continuations(target_model(), one, [[]])] == [[]]


def test_three_continuations_of_one_hand_off_score_the_same_in_any_order_and_leave_it_alone() -> None:
    ids, mask = random_ids(2, 12, seed=9), left_padding(2, 12)
    handoff = handed_over(ids, mask)
    before = [t.clone() for t in (*handoff.kv.keys, *handoff.kv.values, handoff.logits)]
    continuations = [[[5, 6, 7], [8]], [[9, 10], [11, 12, 13, 14]], [[4], [4, 4]]]

    def scored(order: list[int]) -> dict[int, list[list[float]]]:
        return {
            i: [s.tolist() for s in score_continuations(target_model(), handoff, continuations[i])]
            for i in order
        }

    first = scored([0, 1, 2])
    continue_greedy(target_model(), handoff, 5)
    assert scored([2, 0, 1]) == first
    assert handoff.kv.n_tokens == 12
    after = (*handoff.kv.keys, *handoff.kv.values, handoff.logits)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_rows_can_be_repeated_so_that_choices_are_scored_in_one_batch() -> None:
    ids, mask = random_ids(2, 12, seed=9), left_padding(2, 12)
    handoff = handed_over(ids, mask)
    assert handoff.select_rows([1, 0, 1]).n_mapped_of_row == (7, 10, 7)
    choices = [[5, 6, 7], [8], [9, 10]]
    together = score_continuations(target_model(), handoff.select_rows([1, 1, 1]), choices)
    for choice, scores in zip(choices, together, strict=True):
        alone = score_continuations(target_model(), handoff.select_rows([1]), [choice])[0]
        torch.testing.assert_close(scores, alone, **SAME)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_suffix_at_once_and_token_by_token_give_the_same_logits(attention: str) -> None:
    model = build("qwen3", seed=2, attn_implementation=attention)
    loaded = LoadedModel.from_model(model)
    ids = random_ids(2, 14, seed=2)
    identity = IdentityMapper(geometry_shape(loaded.geometry))
    source = prefill(loaded, ids)
    at_once = transfer(source, identity, loaded, ids, hold_back=4)
    for_one = transfer(source.slice_tokens(0, 11), identity, loaded, ids[:, :11], hold_back=1)
    scores = score_continuations(loaded, for_one, ids[:, 11:].tolist())
    with torch.no_grad():
        expected = model(input_ids=ids).logits
    torch.testing.assert_close(at_once.logits, expected[:, -1], **SAME)
    for row in range(2):
        wanted = expected[row, 10:13].log_softmax(-1).gather(-1, ids[row, 11:, None]).squeeze(-1)
        torch.testing.assert_close(scores[row], wanted, **SAME)


def test_greedy_continuation_of_a_batch_equals_each_row_alone() -> None:
    ids, mask = random_ids(3, 12, seed=9), left_padding(3, 12)
    together = continue_greedy(target_model(), handed_over(ids, mask), 6)
    for row in range(3):
        own = ids[row : row + 1, 3 * row :]
        assert continue_greedy(target_model(), handed_over(own), 6) == [together[row]]
    assert all(len(tokens) == 6 for tokens in together)
    assert continue_greedy(target_model(), handed_over(ids, mask), 0) == [[], [], []]
    with pytest.raises(TransferError, match="max_new_tokens=-1"):
        continue_greedy(target_model(), handed_over(ids, mask), -1)


def test_a_row_that_stops_does_not_stop_the_others() -> None:
    ids, mask = random_ids(3, 12, seed=9), left_padding(3, 12)
    handoff = handed_over(ids, mask)
    free = continue_greedy(target_model(), handoff, 8)
    stop = free[1][2]
    stopped = continue_greedy(target_model(), handoff, 8, stop_ids=[stop])
    for row in range(3):
        end = free[row].index(stop) if stop in free[row] else 8
        assert stopped[row] == free[row][:end]
    assert {len(tokens) for tokens in stopped} != {len(stopped[1])}


@pytest.mark.parametrize("family", ["phi3_longrope", "llama_dynamic"])
def test_crossing_a_length_threshold_continues_from_the_cache_and_reads_nothing_again(family: str) -> None:
    loaded = LoadedModel.from_model(FAMILIES[family]())
    model = loaded.model
    ids = random_ids(1, ORIGINAL_MAX - 2, seed=1)
    identity = IdentityMapper(geometry_shape(loaded.geometry))
    tokens = continue_greedy(loaded, transfer(prefill(loaded, ids), identity, loaded, ids), 6)[0]
    # transformers' model step by step on its own cache; its `generate` drops the cache of a longrope model
    cache = DynamicCache()
    expected = []
    with torch.no_grad():
        step = ids
        for _ in range(6):
            start = cache.get_seq_length()
            positions = torch.arange(start, start + step.shape[1])[None]
            arguments = {cache_argument(model): cache}
            logits = model(input_ids=step, position_ids=positions, use_cache=True, **arguments).logits
            step = logits[:, -1:].argmax(-1)
            expected.append(int(step))
    assert tokens == expected


def test_a_fitted_map_carries_the_context_and_a_random_one_does_not() -> None:
    """Source = target: the map exists, and ridge must find it from calibration rows alone."""
    loaded = LoadedModel.from_model(build("llama", seed=5), name="both")
    shape = geometry_shape(loaded.geometry)
    sums = PairMoments.zeros(Layout(shape, shape))
    for seed in range(6):
        ids = random_ids(4, 20, seed=seed)
        kv = prefill(loaded, ids)
        sums.update("fit" if seed < 4 else "held_out", *calibration_view(kv, kv))
    ids, mask = random_ids(3, 20, seed=99), left_padding(3, 20)
    source, expected = prefill(loaded, ids, mask), native(loaded, ids, mask).logits
    errors = {}
    for support in ("full_head", "head_local"):
        fit = fitted(sums, support, 1, 1e-6)
        assert float(r2_of(fit, sums, "held_out")["key"].min()) > 1 - 1e-6
        mappers: dict[str, Mapper] = {
            "linear": LinearMapper(fit),
            "random": RandomMapper.from_fitted(fit, sums, 0),
            "bias_only": BiasOnlyMapper.from_moments(sums),
        }
        for name, one in mappers.items():
            logits = transfer(source, one, loaded, ids, mask).logits
            errors[name] = float((logits - expected).abs().max())
        # λ = 1e-6 against Gram eigenvalues above 0.1
        assert errors["linear"] < 1e-3
        assert errors["random"] > 0.1
        assert errors["bias_only"] > 0.1


def test_the_context_given_and_the_source_cache_are_left_as_they_were() -> None:
    ids = random_ids(2, 10)
    source = prefill(source_model(), ids)
    before = [t.clone() for t in (*source.keys, *source.values)]
    prefix = prefill(target_model(), ids[:, :3])
    prefix_before = [t.clone() for t in (*prefix.keys, *prefix.values)]
    transfer(source, mapper(), target_model(), ids, native_prefix=prefix)
    assert all(torch.equal(a, b) for a, b in zip(before, (*source.keys, *source.values), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(prefix_before, (*prefix.keys, *prefix.values), strict=True))


def test_a_stripped_source_cache_gives_the_same_hand_off() -> None:
    ids = random_ids(2, 10)
    source = prefill(source_model(), ids)
    a, b = (transfer(kv, mapper(), target_model(), ids) for kv in (source, source.strip()))
    assert torch.equal(a.logits, b.logits)


def loud_mapper(kind: str, factor: float) -> BiasOnlyMapper:
    """Means of which one channel of layer 1, head 2 is set to `factor`."""
    quiet = BiasOnlyMapper.from_moments(moments())
    tensors = {name: tensor.clone() for name, tensor in quiet.tensors().items()}
    tensors[f"{kind}.1.bias"][2, 3] = factor
    return BiasOnlyMapper.from_state(quiet.settings(), tensors)


@pytest.mark.parametrize("kind", ["key", "value"])
def test_what_does_not_fit_float16_is_clamped_and_counted(kind: str) -> None:
    model = build("qwen3", seed=2, n_layers=2, num_key_value_heads=4, head_dim=6).half()
    target = LoadedModel.from_model(model)
    ids, mask = random_ids(2, 10), left_padding(2, 10)
    source = prefill(source_model(), ids, mask)
    quiet = transfer(source, BiasOnlyMapper.from_moments(moments()), target, ids, mask, rope="no_rerotate")
    assert quiet.n_clamped == 0
    handoff = transfer(source, loud_mapper(kind, -1e6), target, ids, mask, rope="no_rerotate")
    assert handoff.n_clamped == handoff.n_mapped == (10 - 2) + (7 - 2)
    layer = (handoff.kv.keys if kind == "key" else handoff.kv.values)[1]
    assert layer.dtype == torch.float16
    assert float(layer[0, 2, 4, 3]) == -65504
    assert all(bool(torch.isfinite(t[:, :, :-1]).all()) for t in (*handoff.kv.keys, *handoff.kv.values))


@pytest.mark.parametrize("kind", ["key", "value"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_mapped_numbers_that_are_not_finite_are_an_error_that_names_the_layer(kind: str, bad: float) -> None:
    ids = random_ids(1, 10)
    with pytest.raises(TransferError, match=rf"8 mapped {kind}s of target layer 1"):
        transfer(
            prefill(source_model(), ids), loud_mapper(kind, bad), target_model(), ids, rope="no_rerotate"
        )


def test_garbage_at_pads_does_no_harm() -> None:
    ids, mask = random_ids(2, 10), left_padding(2, 10)
    source = prefill(source_model(), ids, mask)
    expected = transfer(source, mapper(), target_model(), ids, mask).logits
    pads = ~source.mask[:, None, :, None]
    dirty = KVCache(
        tuple(k.masked_fill(pads, float("nan")) for k in source.keys),
        tuple(v.masked_fill(pads, float("inf")) for v in source.values),
        source.positions,
        source.mask,
        source.rotations,
    )
    torch.testing.assert_close(transfer(dirty, mapper(), target_model(), ids, mask).logits, expected)


def test_bfloat16_transfer_costs_no_more_than_the_dtype() -> None:
    loaded = LoadedModel.from_model(build("llama", seed=5).bfloat16())
    ids = random_ids(1, 20)
    source = prefill(loaded, ids)
    handoff = transfer(source, IdentityMapper(geometry_shape(loaded.geometry)), loaded, ids, native_head=0)
    for a, b in zip(handoff.kv.keys, source.keys, strict=True):
        assert a.dtype == torch.bfloat16
        # a key is rounded to 8 bits once more after its rotation
        assert float((a - b)[:, :, :-1].abs().max()) <= 2**-7 * float(b.abs().max())
    assert torch.equal(handoff.kv.values[1][:, :, :-1], source.values[1][:, :, :-1])


def test_parts_that_do_not_belong_together_are_refused() -> None:
    ids, mask = random_ids(2, 10), left_padding(2, 10)
    source, target = prefill(source_model(), ids, mask), target_model()
    with pytest.raises(TransferError, match="2 rows of 9 columns"):
        transfer(source.slice_tokens(0, 9), mapper(), target, ids, mask)
    with pytest.raises(TransferError, match="pads elsewhere"):
        transfer(source, mapper(), target, ids)
    with pytest.raises(MapperMismatch, match="source cache has 2 layers; the mapper was fitted for 3"):
        transfer(prefill(target, ids, mask), mapper(), target, ids, mask)
    with pytest.raises(MapperMismatch, match="target model has 3 layers"):
        transfer(source, mapper(), source_model(), ids, mask)
    with pytest.raises(TransferError, match="left padding"):
        transfer(source, mapper(), target, ids, mask.flip(1))
    with pytest.raises(TransferError, match="attention_mask has shape"):
        transfer(source, mapper(), target, ids, mask[:, 1:])
    with pytest.raises(TransferError, match="tokens >= 1"):
        native(target, ids[:, :0])
    with pytest.raises(TransferError, match="captured"):
        transfer(source.strip(), mapper(), target, ids, mask, rope="coupled")
    with pytest.raises(TransferError, match="1 continuations for a hand-off of 2 rows"):
        score_continuations(target, native(target, ids), [[1]])


def saved_and_loaded(folder: Path, rope: str) -> Mapper:
    manifest = {
        "source": identity_record(source_model().identity),
        "target": identity_record(target_model().identity),
        "rope": rope,
    }
    save_mapper(mapper(rope=rope), folder, manifest)
    return load_mapper(folder)[0]


@pytest.mark.parametrize("fit", ["strip", "coupled", "no_rerotate"])
def test_a_loaded_mapper_serves_its_own_strategies_alone(fit: str, tmp_path: Path) -> None:
    ids = random_ids(1, 10)
    source, loaded = prefill(source_model(), ids), saved_and_loaded(tmp_path, fit)
    for rope in ("strip", "coupled", "no_rerotate"):
        if (fit == "coupled") == (rope == "coupled"):
            handoff = transfer(source, loaded.to("cpu"), target_model(), ids, rope=rope)
            expected = transfer(source, mapper(rope=fit), target_model(), ids, rope=rope)
            assert torch.equal(handoff.logits, expected.logits)
        else:
            with pytest.raises(MapperMismatch, match=f"rope: '{fit}' of the fit is not '{rope}'"):
                transfer(source, loaded, target_model(), ids, rope=rope)


def test_a_loaded_mapper_refuses_other_models_of_the_same_shapes(tmp_path: Path) -> None:
    ids = random_ids(1, 10)
    loaded = saved_and_loaded(tmp_path, "strip")
    seeded = LoadedModel.from_model(build("llama_llama3", seed=7, n_layers=3), name="another seed")
    other = prefill(seeded, ids)
    with pytest.raises(MapperMismatch, match=r"source weights: .* of source is not .* of another seed"):
        transfer(other, loaded, target_model(), ids)
    with pytest.raises(MapperMismatch, match="source weights"):
        transfer(other.strip(), loaded, target_model(), ids)
    twin = build("qwen3", seed=3, n_layers=2, num_key_value_heads=4, head_dim=6)
    target = LoadedModel.from_model(twin, name="twin")
    with pytest.raises(MapperMismatch, match=r"source weights.*target weights.*rope: 'strip'"):
        transfer(other, loaded, target, ids, rope="coupled")
    transfer(replace(other, owner=None), loaded, target_model(), ids)  # nobody knows whose it is


def test_a_native_run_takes_the_models_own_cache_and_reads_nothing_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids, mask = random_ids(2, 10), left_padding(2, 10)
    target = target_model()
    expected = native(target, ids, mask, 3)
    cache = prefill(target, ids, mask)
    before = [t.clone() for t in (*cache.keys, *cache.values)]
    monkeypatch.setattr("kvmap.transfer.handoff.prefill", None)
    handoff = native(target, ids, mask, 3, cache=cache)
    assert torch.equal(handoff.logits, expected.logits)
    assert handoff.kv.exact
    assert handoff.n_mapped_of_row == (0, 0)
    assert all(torch.equal(a, b) for a, b in zip(before, (*cache.keys, *cache.values), strict=True))
    for wrong, message in (
        (cache.slice_tokens(0, 9), "2 rows of 9 columns"),
        (prefill(target, ids), "pads elsewhere"),
        (prefill(source_model(), ids, mask), "another model's: weights"),
        (cache.strip(), "stripped or mapped"),
        (replace(cache, exact=False), "stripped or mapped"),
    ):
        with pytest.raises(TransferError, match=message):
            native(target, ids, mask, cache=wrong)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"hold_back": 0}, "hold_back=0: expected at least 1"), ({"native_head": -1}, "native_head=-1")],
)
def test_options_no_hand_off_can_follow_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(TransferError, match=message):
        TransferOptions(**options)
    with pytest.raises(TransferError, match=message):
        handed_over(random_ids(1, 5), **options)


def test_an_unknown_rope_strategy_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match="'no_rerotate'"):
        TransferOptions(rope="no-rerotate")
    kv = prefill(source_model(), random_ids(1, 5))
    with pytest.raises(UnknownName, match="rope strategy"):
        calibration_view(kv, kv, "rotate")
    with pytest.raises(KvmapError, match="as captured"):
        calibration_view(kv.strip(), kv, "coupled")


def test_calibration_views_are_what_each_strategy_fits() -> None:
    ids = random_ids(1, 7)
    kv = prefill(source_model(), ids)
    for rope in ("strip", "no_rerotate"):
        view, _ = calibration_view(kv, kv, rope)
        assert view.stripped
        assert torch.equal(view.keys[1], kv.strip().keys[1])
    view, _ = calibration_view(kv, kv, "coupled")
    assert view.stripped
    assert torch.equal(view.keys[1], kv.keys[1])
