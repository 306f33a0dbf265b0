"""Layers that see a window of the last tokens, on contexts of two and a half windows, for every family.

transformers' own run of the whole context, its own cache (which drops what is past a window) and its own
generation are what all else is held to.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from kvmap.diagnostics.attention import attention_sums
from kvmap.evaluation.limits import context_limit
from kvmap.fit.features import Layout, Recipe, geometry_shape
from kvmap.fit.linear import Penalty, fit_linear
from kvmap.fit.pair_moments import PairMoments, calibration_rows
from kvmap.fit.selection import rank_layers
from kvmap.fit.sensitivity import layer_sensitivity, read_sensitivity
from kvmap.fit.view import calibration_view
from kvmap.mappers import IdentityMapper, LinearMapper, Mapper
from kvmap.models.cache import KVCache, cache_argument
from kvmap.models.capture import forward, positions_from_mask, prefill
from kvmap.models.families import FAMILIES as SUPPORTED
from kvmap.models.geometry import UnsupportedModel
from kvmap.models.loaded import LoadedModel
from kvmap.models.pair import ModelPair
from kvmap.models.queries import (
    attention_outputs,
    attention_scores,
    attention_weights,
    read_queries,
    visible_columns,
)
from kvmap.transfer import TransferOptions, continue_greedy, handoff_flops, native, transfer
from kvmap.transfer.cost import decoder_work, mapped_tokens, pairs_seen
from kvmap.transfer.recompute import RULES, Handed
from kvmap.transfer.streaming import prefill_and_transfer
from tests.diagnostics.plain_loops import CONTEXTS, QUESTIONS, diagnosed
from tests.models.test_queries import projection_inputs
from tests.tiny_random_models import build, left_padding, random_ids
from tests.transfer.noisy_map import NoisyMap
from tests.transfer.noisy_map import source_model as small_source

W, N_TOKENS, N_SUFFIX, N_NEW = 12, 30, 5, 6
# float32 logits of size 1 to 15 (METHOD asks for 1e-4)
SAME = {"rtol": 0, "atol": 1e-4}

_SLIDING = {"sliding_window": W}
_MARKED = {**_SLIDING, "use_sliding_window": True}
#: name -> (tiny family, settings), every model type that may have windowed layers
WINDOWED = {
    "cohere2": ("cohere2", _SLIDING),
    "exaone4": ("exaone4", _SLIDING),
    "gemma2": ("gemma2", _SLIDING),
    "gemma3": ("gemma3", _SLIDING),
    "ministral": ("ministral", _SLIDING),
    "ministral3": ("ministral3", _SLIDING),
    "mistral": ("mistral_sliding", _SLIDING),
    "mixtral": ("mixtral", _SLIDING),
    "olmo3": ("olmo3", _SLIDING),
    "phi3": ("phi3_partial", _SLIDING),
    "phi3_longrope": ("phi3_longrope", _SLIDING),
    "qwen2": ("qwen2_sliding", _SLIDING),
    "qwen3": ("qwen3", {**_MARKED, "max_window_layers": 1}),
    "qwen3_moe": ("qwen3_moe", _MARKED),
    "smollm3": ("smollm3", _MARKED),
    "starcoder2": ("starcoder2", _SLIDING),
}
every_family = pytest.mark.parametrize("name", WINDOWED)
some_families = pytest.mark.parametrize("name", ["cohere2", "gemma2", "gemma3", "mistral", "qwen2"])
batch_sizes = pytest.mark.parametrize("batch", [1, 3])


@cache
def loaded(name: str, seed: int = 3) -> LoadedModel:
    family, settings = WINDOWED[name]
    return LoadedModel.from_model(build(family, seed=seed, n_layers=3, **settings), name=name)


def read(batch: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    return random_ids(batch, N_TOKENS, seed=seed), left_padding(batch, N_TOKENS)


@cache
def native_logits(name: str, batch: int) -> Tensor:
    """The model's own run of the whole context, no cache involved: (batch, tokens, vocab)."""
    ids, mask = read(batch)
    with torch.no_grad():
        return (
            loaded(name)
            .model(ids, attention_mask=mask, position_ids=positions_from_mask(mask), use_cache=False)
            .logits
        )


def native_generation(name: str, batch: int) -> list[list[int]]:
    """Greedy generation by transformers, with the cache that its config asks for."""
    ids, mask = read(batch)
    with torch.no_grad():
        made = loaded(name).model.generate(
            ids, attention_mask=mask, max_new_tokens=N_NEW, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    return made[:, ids.shape[1] :].tolist()


def windowed_layers(model: LoadedModel) -> list[int]:
    return [number for number, layer in enumerate(model.geometry.layers) if layer.window is not None]


def test_every_model_type_with_windows_is_here() -> None:
    built = {loaded(name).geometry.model_type for name in WINDOWED}
    assert built == {name for name, family in SUPPORTED.items() if family.windows != "none"}
    assert all(loaded(name).geometry.windows == (W,) for name in WINDOWED)


@every_family
@batch_sizes
def test_prefill_and_forward_are_the_models_own_run(name: str, batch: int) -> None:
    model, (ids, mask) = loaded(name), read(batch)
    expected = native_logits(name, batch)[:, -N_SUFFIX:]
    kv = prefill(model, ids[:, :-N_SUFFIX], mask[:, :-N_SUFFIX], length=N_TOKENS)
    at_once, grown = forward(model, ids[:, -N_SUFFIX:], kv, length=N_TOKENS)
    torch.testing.assert_close(at_once, expected, **SAME)
    assert grown.n_tokens == N_TOKENS  # every token is kept
    steps = []
    for column in range(N_TOKENS - N_SUFFIX, N_TOKENS):
        logits, kv = forward(model, ids[:, column : column + 1], kv, length=N_TOKENS)
        steps.append(logits)
    torch.testing.assert_close(torch.cat(steps, 1), expected, **SAME)


@every_family
@batch_sizes
def test_the_cache_that_the_config_asks_for_says_the_same(name: str, batch: int) -> None:
    """It keeps window − 1 columns of a windowed layer; ours keeps all, and the model masks them."""
    model, (ids, mask) = loaded(name), read(batch)
    positions, n = positions_from_mask(mask), N_TOKENS - N_SUFFIX
    cache = DynamicCache(config=model.model.config)
    given = {cache_argument(model.model): cache, "use_cache": True}
    with torch.no_grad():
        model.model(ids[:, :n], attention_mask=mask[:, :n], position_ids=positions[:, :n], **given)
        kept = [layer.keys.shape[2] for layer in cache.layers]
        logits = model.model(ids[:, n:], attention_mask=mask, position_ids=positions[:, n:], **given).logits
    assert kept == list(model.geometry.seen_tokens(n))
    kv = prefill(model, ids[:, :n], mask[:, :n])
    torch.testing.assert_close(forward(model, ids[:, n:], kv)[0], logits, **SAME)


@every_family
def test_a_windowed_layer_reads_the_columns_that_the_geometry_says(name: str) -> None:
    model, (ids, mask) = loaded(name), read(2)
    kv = prefill(model, ids[:, :-1], mask[:, :-1])
    expected, _ = forward(model, ids[:, -1:], kv)
    first = N_TOKENS - 1 - model.geometry.layers[windowed_layers(model)[0]].seen_of(N_TOKENS - 1)

    def with_noise(columns: slice) -> KVCache:
        keys, values = list(kv.keys), list(kv.values)
        for layer in windowed_layers(model):
            for parts in (keys, values):
                parts[layer] = parts[layer].clone()
                parts[layer][:, :, columns] += 3.0
        return replace(kv, keys=tuple(keys), values=tuple(values))

    unseen, _ = forward(model, ids[:, -1:], with_noise(slice(0, first)))
    torch.testing.assert_close(unseen, expected, rtol=0, atol=1e-5)
    seen, _ = forward(model, ids[:, -1:], with_noise(slice(first, first + 1)))
    assert (seen - expected).abs().max() > 1e-3


@every_family
def test_attention_over_visible_columns_is_the_models_own(name: str) -> None:
    model, (ids, mask) = loaded(name, seed=4), read(3)
    expected = projection_inputs(model)
    shown = {}

    def on_layer(layer, query, key, value, scaling, softcap):
        window = model.geometry.layers[layer].window
        visible = visible_columns(mask.bool(), torch.arange(N_TOKENS), window)
        weights = attention_weights(attention_scores(query, key, scaling, softcap), visible)
        shown[layer] = attention_outputs(weights, value).flatten(1, 2).transpose(1, 2).flatten(2)

    read_queries(model, ids, mask, on_layer)
    for layer, output in shown.items():
        torch.testing.assert_close(
            output[mask.bool()], expected[layer][mask.bool()], rtol=1e-4, atol=1e-5, msg=f"layer {layer}"
        )


def test_padding_between_tokens_of_a_long_row_is_refused_with_the_reason() -> None:
    model, (ids, _) = loaded("mistral"), read(2)
    kv = prefill(model, ids[:, : W - 4])
    _, grown = forward(model, ids[:, :4], kv, torch.tensor([[1, 0, 0, 0], [1, 1, 1, 0]]))
    forward(model, ids[:1, :1], grown.select_rows([0]).slice_tokens(0, W - 3))  # padding cut off: no gap
    with pytest.raises(UnsupportedModel, match=r"window of 12 tokens, and row 0 has 3 columns of padding"):
        forward(model, ids[:, :1], grown)


def test_padding_behind_a_continuation_is_no_past() -> None:
    model, (ids, mask) = loaded("gemma3"), read(2)
    kv = prefill(model, ids, mask)
    suffix = random_ids(2, 4, seed=5)
    logits, _ = forward(model, suffix, kv, torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]))
    alone, _ = forward(model, suffix[:1, :2], kv.select_rows([0]))
    torch.testing.assert_close(logits[:1, :2], alone, **SAME)


def test_windows_do_not_shorten_what_a_pair_takes() -> None:
    model = loaded("mistral")
    assert context_limit(ModelPair(model, model)) == model.geometry.max_positions > W


@every_family
@batch_sizes
def test_identity_reproduces_native_logits_and_generations(name: str, batch: int) -> None:
    model, (ids, mask) = loaded(name), read(batch)
    expected = native_logits(name, batch)[:, -1]
    generation = native_generation(name, batch)
    identity = IdentityMapper(geometry_shape(model.geometry))
    source = prefill(model, ids, mask)
    for options in (TransferOptions(), TransferOptions(hold_back=4, native_head=0)):
        for every_column in (False, True):
            handed = transfer(
                source,
                identity,
                model,
                ids,
                mask,
                hold_back=options.hold_back,
                native_head=options.native_head,
                every_column=every_column,
            )
            torch.testing.assert_close(handed.logits, expected, **SAME)
            if name != "phi3_longrope":  # generate() crosses its 32 positions, and reads all again there
                assert continue_greedy(model, handed, N_NEW) == generation
    own = native(model, ids, mask)
    torch.testing.assert_close(own.logits, expected, **SAME)


@cache
def fitted(name: str, native_layers: int = 0) -> LinearMapper:
    """A map from a small model without windows, fitted on sequences of two and a half windows."""
    source, target = small_source(), loaded(name)
    layout = Layout(geometry_shape(source.geometry), geometry_shape(target.geometry), native_layers)
    sums = PairMoments.zeros(layout)
    for seed, split in ((10, "fit"), (11, "held_out")):
        ids = random_ids(12, N_TOKENS, seed=seed)
        views = calibration_view(prefill(source, ids), prefill(target, ids), "strip")
        sums.update(split, *views, calibration_rows(torch.ones_like(ids).bool(), native_head=1))
    selection = rank_layers(sums, "r2", 1)
    recipe = Recipe(sums.source_shape, sums.target_shape, "full_head", selection, "own_kind", native_layers)
    return LinearMapper(fit_linear(sums, recipe, Penalty(0.01)))


@pytest.mark.parametrize("tables", [True, False])
@pytest.mark.parametrize("native_layers", [0, 1])
@some_families
def test_only_what_a_window_holds_is_mapped(name: str, native_layers: int, tables: bool) -> None:
    target, (ids, mask) = loaded(name), read(3)
    mapper: Mapper = fitted(name, native_layers) if tables else NoisyMap(target, native_layers)
    source, hold_back = prefill(small_source(), ids, mask), 2
    some, every = (
        transfer(source, mapper, target, ids, mask, hold_back=hold_back, every_column=every_column)
        for every_column in (False, True)
    )
    torch.testing.assert_close(some.logits, every.logits, **SAME)
    assert continue_greedy(target, some, N_NEW) == continue_greedy(target, every, N_NEW)
    first = N_TOKENS - hold_back - (W - 1)
    own = some.kv.mask & (some.kv.positions < 1)
    for layer, geometry in enumerate(target.geometry.layers):
        mapped = layer >= native_layers
        whole = geometry.window is None or not mapped
        start = 0 if whole else first
        for mine, theirs in zip(
            (some.kv.keys[layer], some.kv.values[layer]),
            (every.kv.keys[layer], every.kv.values[layer]),
            strict=True,
        ):
            torch.testing.assert_close(mine[:, :, start:], theirs[:, :, start:], rtol=1e-4, atol=1e-5)
            left_out = mine.transpose(1, 2)[:, :start][~own[:, :start]]
            assert not bool(left_out.any())
        n_rows = 3 * (W - 1) if not whole else some.n_mapped
        assert some.n_mapped_of_layer[layer] == (n_rows if mapped else 0)
        assert every.n_mapped_of_layer[layer] == (every.n_mapped if mapped else 0)
    assert some.n_mapped == every.n_mapped


@some_families
def test_mapped_while_the_source_reads_it_is_the_same(name: str) -> None:
    target, (ids, mask) = loaded(name), read(2)
    plain = transfer(prefill(small_source(), ids, mask), fitted(name), target, ids, mask)
    streamed, _ = prefill_and_transfer(small_source(), fitted(name), target, ids, mask)
    assert torch.equal(streamed.logits, plain.logits)
    assert streamed.n_mapped_of_layer == plain.n_mapped_of_layer
    for one, other in zip(streamed.kv.keys, plain.kv.keys, strict=True):
        assert torch.equal(one, other)


@every_family
def test_all_tokens_recomputed_are_the_models_own_cache(name: str) -> None:
    target, (ids, mask) = loaded(name), read(2)
    source = prefill(small_source(), ids, mask)
    handed = transfer(source, NoisyMap(target), target, ids, mask, recompute_share=1.0)
    own = native(target, ids, mask)
    torch.testing.assert_close(handed.logits, own.logits, **SAME)
    real = own.kv.mask
    for layer in range(3):
        for mine, theirs in zip(
            (handed.kv.keys[layer], handed.kv.values[layer]),
            (own.kv.keys[layer], own.kv.values[layer]),
            strict=True,
        ):
            torch.testing.assert_close(mine.transpose(1, 2)[real], theirs.transpose(1, 2)[real], **SAME)


def test_held_back_tokens_pay_no_attention_beyond_their_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every layer has a window; a layer without one sees all."""
    seen: dict[str, Tensor] = {}

    def scores(handed: Handed) -> Tensor:
        seen[handed.target.identity.name] = RULES["attention"](handed)
        return seen[handed.target.identity.name]

    monkeypatch.setattr("kvmap.transfer.recompute.RULES", {**RULES, "random": scores})
    ids, _ = read(1)
    for name in ("mistral", "gemma3"):
        target = loaded(name)
        source = prefill(small_source(), ids)
        transfer(source, NoisyMap(target), target, ids, recompute_share=0.2, recompute_rule="random")
    beyond = slice(0, N_TOKENS - 1 - (W - 1))
    assert not bool(seen["mistral"][:, beyond].any())
    assert bool((seen["gemma3"][:, beyond] > 0).all())


@pytest.mark.parametrize("window", [None, 1, 3, 12, 40])
@pytest.mark.parametrize(("first", "last"), [(1, 30), (5, 5), (13, 30), (29, 30), (3, 2)])
def test_pairs_are_those_counted_one_by_one(first: int, last: int, window: int | None) -> None:
    counted = sum(place if window is None else min(place, window) for place in range(first, last + 1))
    assert pairs_seen(first, last, window) == counted


def test_a_windowed_layer_costs_what_it_sees_and_maps() -> None:
    target, options = loaded("gemma3"), TransferOptions(hold_back=3, native_head=2)
    mapper, work = fitted("gemma3"), decoder_work(target)
    flops = handoff_flops(target, mapper, N_TOKENS, options)
    n_cut = N_TOKENS - 3
    assert work.windows == (W, None, W)
    assert mapped_tokens(target.geometry, n_cut, n_cut - 2) == (W - 1, n_cut - 2, W - 1)
    mapped = mapped_tokens(target.geometry, n_cut, n_cut - 2, every_column=True)
    assert mapped == (n_cut - 2,) * 3
    handed = transfer(
        prefill(small_source(), read(1)[0]), mapper, target, read(1)[0], hold_back=3, native_head=2
    )
    per_layer = mapper.n_weights / 3  # layers alike
    assert flops.map == pytest.approx(2 * per_layer * sum(handed.n_mapped_of_layer))
    pairs = [sum(min(i, w) for i in range(1, N_TOKENS + 1)) for w in (W, N_TOKENS, W)]
    attention = sum(4 * n * channels for n, channels in zip(pairs, work.channels, strict=True))
    weights = 2 * N_TOKENS * sum(work.weights)
    assert flops.re_prefill == pytest.approx(weights + attention + 2 * work.logits)


def test_row_weights_come_from_the_queries_whose_window_holds_the_row() -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, N_TOKENS, 8, generator=generator)
    key, value = (torch.randn(1, 2, N_TOKENS, 8, generator=generator) for _ in range(2))
    mask, last = torch.ones(1, N_TOKENS, dtype=torch.bool), 20
    found = layer_sensitivity(query, key, value, 0.3, mask, boundaries=[last], window=W)
    seen = slice(last - W, last)
    alone = layer_sensitivity(
        query[:, :, seen], key[:, :, seen], value[:, :, seen], 0.3, mask[:, seen], boundaries=[W]
    )
    for kind, weights in found.items():
        # of mean 1 over all rows, and over those of the window
        torch.testing.assert_close(weights[:, :, seen] * W / N_TOKENS, alone[kind], rtol=1e-4, atol=1e-6)
        assert float(weights.sum()) == pytest.approx(2 * N_TOKENS, rel=1e-4)


def test_a_windowed_models_row_weights_are_those_of_its_layers_windows() -> None:
    model, (ids, _) = loaded("gemma3"), read(1)
    _, weights = read_sensitivity(model, ids, boundaries=[N_TOKENS])
    for layer, geometry in enumerate(model.geometry.layers):
        unseen = weights["value", layer][0, :, : N_TOKENS - W]
        assert bool((unseen == 0).all()) == (geometry.window is not None)


def test_diagnosed_attention_is_the_models_own_past_a_window() -> None:
    """The mass on the first token: what transformers' eager attention puts there, layer by layer."""
    settings = {"sliding_window": 5, "attn_implementation": "eager"}
    target = LoadedModel.from_model(build("gemma3", seed=3, n_layers=3, **settings), name="gemma3")
    identity = IdentityMapper(geometry_shape(target.geometry))
    sums = diagnosed(ModelPair(target, target), identity, [QUESTIONS])["questions"]
    expected = [torch.zeros(4, dtype=torch.float64) for _ in range(3)]
    for context in CONTEXTS:
        with torch.no_grad():
            output = target.model(torch.tensor([context]), use_cache=False, output_attentions=True)
        for layer, weights in enumerate(output.attentions):
            # mapped tokens: all but the target's own first one and the held-back last one
            expected[layer] += weights[0, :, 1:-1, 0].double().sum(1)
    for layer, sink in enumerate(expected):
        torch.testing.assert_close(sums.layers[layer]["sink_mass"], sink, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(sums.layers[layer]["sink_mass_mapped"], sink, rtol=1e-4, atol=1e-5)


def test_diagnosed_attention_is_that_of_the_window() -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 2, N_TOKENS, 8, generator=generator)
    own, found = (
        tuple(torch.randn(2, 1, N_TOKENS, 8, generator=generator) for _ in range(2)) for _ in range(2)
    )
    mask = left_padding(2, N_TOKENS).bool()
    groups = torch.ones(int(mask.sum()), 1, dtype=torch.float64)
    sums, squares = attention_sums(
        query, (own[0], own[1]), (found[0], found[1]), mask, mask, groups, 0.4, None, query_block=7, window=W
    )
    cosine, sink = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    expected = torch.zeros_like(squares)
    for row in range(2):
        start = int((~mask[row]).sum())
        for u in range(start, N_TOKENS):
            seen = slice(max(start, u - W + 1), u + 1)
            for head in range(2):
                outputs = []
                for key, value in (own, found):
                    a = (0.4 * key[row, 0, seen] @ query[row, head, u]).softmax(0)
                    outputs.append(a @ value[row, 0, seen])
                    if key is own[0]:
                        expected[row, head, seen] += a.square()
                        sink[head] += float(a[0]) if seen.start == start else 0.0
                cosine[head] += torch.cosine_similarity(outputs[0].double(), outputs[1].double(), dim=0)
    torch.testing.assert_close(sums["cosine"][0], cosine, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums["sink_mass"], sink, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(squares, expected, rtol=1e-4, atol=1e-6)
