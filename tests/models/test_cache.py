"""The KV cache value: its order of axes, its immutability, its conversions."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvmap.models.cache import (
    InvalidCache,
    KVCache,
    cache_argument,
    first_layers_cache,
    from_transformers,
    to_transformers,
)
from kvmap.models.capture import forward, prefill
from kvmap.models.loaded import LoadedModel
from tests.tiny_random_models import FAMILIES, random_ids


def encoded(n_layers=3, batch=2, heads=4, tokens=4, head_dim=2, rotations=None):
    """A cache whose every entry tells its layer, head and position: 100·layer + 10·head + position."""
    layer_values = [
        (100.0 * layer + 10.0 * torch.arange(heads)[:, None] + torch.arange(tokens))[None, :, :, None]
        .expand(batch, -1, -1, head_dim)
        .contiguous()
        for layer in range(n_layers)
    ]
    return KVCache(
        keys=tuple(layer_values),
        values=tuple(-value for value in layer_values),
        positions=torch.arange(tokens).expand(batch, -1),
        mask=torch.ones(batch, tokens, dtype=torch.bool),
        rotations=rotations,
    )


@pytest.mark.parametrize(
    "tokens", [4, 7]
)  # as many as heads, where swapped axes would fit, and another number
def test_layers_heads_and_positions_keep_their_places_in_transformers_cache(tokens):
    kv = encoded(tokens=tokens, rotations=(None,) * 3)
    cache = to_transformers(kv)
    assert cache.get_seq_length() == tokens
    for layer in range(3):
        assert cache.layers[layer].keys[0, 2, 1, 0] == 100 * layer + 21
    back = from_transformers(cache, kv.positions, kv.mask, kv.rotations)
    for mine, theirs in zip((*kv.keys, *kv.values), (*back.keys, *back.values), strict=True):
        assert torch.equal(mine, theirs)


def test_kv_heads_come_out_in_the_order_of_the_projection():
    loaded = LoadedModel.from_model(FAMILIES["llama_wide_heads"]())
    for index, layer in enumerate(loaded.body.layers):
        layer.self_attn.v_proj.weight.zero_()
        layer.self_attn.v_proj.bias.copy_(10.0 * index + torch.arange(2).repeat_interleave(12))
    kv = prefill(loaded, random_ids(1, 2))  # two tokens, two KV heads
    for index, values in enumerate(kv.values):
        for head in range(2):
            assert (values[:, head] == 10 * index + head).all()


def test_growth_in_transformers_leaves_our_cache_alone():
    kv = encoded(rotations=(None,) * 3)
    before = [tensor.clone() for tensor in (*kv.keys, *kv.values)]
    cache = to_transformers(kv)
    assert cache.layers[0].keys.data_ptr() == kv.keys[0].data_ptr()
    for layer in range(3):
        cache.update(torch.ones(2, 4, 1, 2), torch.ones(2, 4, 1, 2), layer)
    assert cache.get_seq_length() == 5
    assert kv.n_tokens == 4
    for mine, old in zip((*kv.keys, *kv.values), before, strict=True):
        assert torch.equal(mine, old)


@pytest.mark.parametrize("name", ["llama", "gemma3", "cohere2"])
def test_three_continuations_of_one_cache_score_alike_in_any_order(name):
    loaded = LoadedModel.from_model(FAMILIES[name]())
    kv = prefill(loaded, random_ids(1, 20))
    before = [tensor.clone() for tensor in (*kv.keys, *kv.values)]
    continuations = [random_ids(1, length, seed=length) for length in (1, 3, 6)]
    scores = {i: forward(loaded, continuations[i], kv)[0] for i in (0, 1, 2)}
    for i in (2, 0, 1):
        assert torch.equal(forward(loaded, continuations[i], kv)[0], scores[i])
    assert kv.n_tokens == 20
    for mine, old in zip((*kv.keys, *kv.values), before, strict=True):
        assert torch.equal(mine, old)


def test_a_cache_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        encoded().keys = ()


def test_slices_rows_and_sizes():
    kv = encoded()
    middle = kv.slice_tokens(1, 3)
    assert middle.positions.tolist() == [[1, 2], [1, 2]]
    assert middle.keys[1][0, 3].flatten().tolist() == [131.0, 131.0, 132.0, 132.0]
    assert kv.select_rows([1, 1, 0]).batch_size == 3
    assert (kv.n_layers, kv.n_tokens, kv.batch_size) == (3, 4, 2)
    assert kv.nbytes == 2 * 3 * 2 * 4 * 4 * 2 * 4


def test_strip_and_rotate_guard_each_other():
    content = encoded()
    assert content.strip() is content
    rotated = content.rotate((None,) * 3, dtype=torch.bfloat16)
    assert rotated.keys[0].dtype == rotated.values[0].dtype == torch.bfloat16
    assert not rotated.stripped
    with pytest.raises(InvalidCache, match="strip"):
        rotated.rotate((None,) * 3)
    with pytest.raises(InvalidCache, match="2 rotations for 3 layers"):
        content.rotate((None,) * 2)
    assert rotated.strip().keys[0].dtype == torch.float32


def test_an_entry_that_float16_cannot_hold_is_refused_by_name():
    kv = encoded()
    kv.values[1][0, 0, 0, 0] = 70_000.0
    with pytest.raises(InvalidCache, match=r"values of layer 1: 70000 does not fit torch.float16"):
        kv.to(dtype=torch.float16)
    assert kv.to(dtype=torch.bfloat16).values[1].isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": ()}, "as many values as keys"),
        ({"rotations": (None,)}, "1 rotations for 3 layers"),
        ({"positions": torch.zeros(2, 5).long()}, "bool mask"),
        ({"mask": torch.ones(2, 4)}, "bool mask"),
        ({"keys": (torch.zeros(2, 4, 4, 2), torch.zeros(2, 4, 3, 2), torch.zeros(2, 4, 4, 2))}, "layer 1"),
    ],
)
def test_parts_that_do_not_fit_are_refused(change, message):
    with pytest.raises(InvalidCache, match=message):
        dataclasses.replace(encoded(), **change)


def test_a_layer_without_keys_is_refused():
    cache = to_transformers(encoded(rotations=(None,) * 3))
    cache.layers[1].keys = None
    with pytest.raises(InvalidCache, match="layer 1"):
        from_transformers(cache, torch.arange(4).expand(2, -1), torch.ones(2, 4), (None,) * 3)


def test_the_name_of_the_cache_argument_follows_the_signature():
    class Older:
        def forward(self, input_ids, past_key_values=None): ...

    class Newer:
        def forward(self, input_ids, cache=None): ...

    class Neither:
        def forward(self, input_ids): ...

    assert (cache_argument(Older()), cache_argument(Newer())) == ("past_key_values", "cache")
    with pytest.raises(InvalidCache, match="Neither"):
        cache_argument(Neither())


def test_a_cache_of_first_layers_leaves_its_context_with_the_last_of_them():
    entry = torch.ones(1, 2, 3, 4)
    with first_layers_cache(2) as cache:
        cache.update(entry, 2 * entry, 0)
        cache.update(3 * entry, 4 * entry, 1)
        pytest.fail("the second layer must end it")
    assert [float(layer.keys.mean()) for layer in cache.layers] == [1, 3]
    assert [float(layer.values.mean()) for layer in cache.layers] == [2, 4]
