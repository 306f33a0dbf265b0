"""The queries shown are those the model used: from them its attention's output is made again."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from kvmap.errors import KvmapError
from kvmap.models.capture import prefill
from kvmap.models.geometry import UnsupportedModel
from kvmap.models.loaded import LoadedModel
from kvmap.models.queries import (
    attention_outputs,
    attention_scores,
    attention_weights,
    observe_attention,
    read_queries,
)
from tests.tiny_random_models import FAMILIES, left_padding, random_ids

# What each family calls the projection after its attention.
OUTPUT_PROJECTIONS = ("o_proj", "dense")


def load(name="llama", **settings):
    return LoadedModel.from_model(FAMILIES[name](**settings), name=name)


def attention_of(layer):
    return getattr(layer, "self_attn", None) or layer.attention


def projection_inputs(loaded):
    """A list that fills with what each layer's output projection is given, (batch, tokens, n_heads · d)."""
    found = []
    for layer in loaded.body.layers:
        attention = attention_of(layer)
        projection = next(getattr(attention, n) for n in OUTPUT_PROJECTIONS if hasattr(attention, n))
        projection.register_forward_pre_hook(lambda module, inputs: found.append(inputs[0].clone()))
    return found


def causal(mask):
    n = mask.shape[1]
    return mask.bool()[:, None] & torch.ones(n, n, dtype=torch.bool).tril()


@pytest.mark.parametrize("name", FAMILIES)
def test_attention_made_again_from_what_is_shown_is_the_models_own(name):
    loaded = load(name, n_layers=3)
    ids, mask = random_ids(3, 12), left_padding(3, 12)
    expected = projection_inputs(loaded)
    shown = []

    def on_layer(layer, query, key, value, scaling, softcap):
        weights = attention_weights(attention_scores(query, key, scaling, softcap), causal(mask))
        output = attention_outputs(weights, value).flatten(1, 2)
        shown.append((layer, output.transpose(1, 2).flatten(2), query.shape, key, value))

    plain = prefill(loaded, ids, mask)
    expected.clear()
    kv = read_queries(loaded, ids, mask, on_layer)
    n_heads, width = loaded.geometry.n_heads, loaded.geometry.head_dim
    assert [layer for layer, *_ in shown] == [0, 1, 2]
    for layer, output, shape, key, value in shown:
        assert shape == (3, n_heads, 12, width)
        real = mask.bool()
        # float32 attention in another order of sums
        torch.testing.assert_close(output[real], expected[layer][real], rtol=1e-4, atol=1e-5)
        assert torch.equal(key, kv.keys[layer])
        assert torch.equal(value, kv.values[layer])
        assert torch.equal(key, plain.keys[layer])  # being looked at changes nothing
        assert torch.equal(value, plain.values[layer])


@pytest.mark.parametrize(
    ("name", "attention"),
    [("llama", "eager"), ("gemma3", "eager"), ("cohere2", "eager"), ("gpt_neox", "eager"), ("llama", "sdpa")],
)
def test_the_models_own_attention_is_run_and_comes_back(name, attention):
    loaded = load(name, attn_implementation=attention)
    ids, mask = random_ids(2, 9), left_padding(2, 9)
    expected = prefill(loaded, ids, mask)
    kv = read_queries(loaded, ids, mask, lambda *given: None)
    assert all(map(torch.equal, (*kv.keys, *kv.values), (*expected.keys, *expected.values)))
    assert loaded.model.config._attn_implementation == attention
    assert attention_of(loaded.body.layers[0]).config._attn_implementation == attention


def test_scores_are_scaled_and_capped_as_the_family_does_it():
    seen = {}
    for name in ("llama", "gemma2", "granite"):
        read_queries(load(name), random_ids(1, 4), None, lambda *given, n=name: seen.update({n: given[4:]}))
    assert seen["llama"] == (8**-0.5, None)
    assert seen["gemma2"] == (256**-0.5, 50.0)  # query_pre_attn_scalar, attn_logit_softcapping
    assert seen["granite"] == (0.3, None)


@pytest.mark.parametrize("softcap", [None, 0.7])
def test_grouped_attention_equals_a_loop_over_heads_in_float64(softcap):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 6, 3, 5, generator=generator)
    k, v = (torch.randn(2, 2, 7, 5, generator=generator) for _ in range(2))
    visible = torch.rand(2, 3, 7, generator=generator) > 0.4
    visible[:, :, 0] = True
    got = attention_outputs(attention_weights(attention_scores(q, k, 0.9, softcap), visible), v)
    for row in range(2):
        for head in range(6):
            for u in range(3):
                s = 0.9 * (k[row, head // 3].double() @ q[row, head, u].double())
                s = s if softcap is None else softcap * torch.tanh(s / softcap)
                s = s[visible[row, u]]
                o = s.softmax(0) @ v[row, head // 3][visible[row, u]].double()
                # float32 against float64
                torch.testing.assert_close(got[row, head // 3, head % 3, u].double(), o, rtol=1e-5, atol=1e-6)


def test_an_error_while_looking_leaves_the_model_as_it_was():
    def too_much(*given):
        raise RuntimeError("enough")

    loaded = load()
    with pytest.raises(RuntimeError, match="enough"):
        read_queries(loaded, random_ids(1, 4), None, too_much)
    assert loaded.model.config._attn_implementation == "sdpa"
    calls = []
    prefill(loaded, random_ids(1, 4))
    read_queries(loaded, random_ids(1, 4), None, lambda layer, *given: calls.append(layer))
    prefill(loaded, random_ids(1, 4))
    assert calls == [0, 1]


def test_other_models_are_not_looked_at():
    loaded, other = load(), load("qwen3")
    calls = []
    with observe_attention(loaded, lambda layer, *given: calls.append(layer)):
        prefill(other, random_ids(1, 4))
        assert calls == []
        prefill(loaded, random_ids(1, 4))
    assert calls == [0, 1]


@pytest.mark.slow
def test_no_query_outlives_its_layer():
    loaded = load(n_layers=4)
    living = []

    def on_layer(layer, query, *given):
        gc.collect()
        assert not any(reference() is not None for reference in living)
        living.append(weakref.ref(query))

    read_queries(loaded, random_ids(1, 4), None, on_layer)
    assert len(living) == 4
    gc.collect()
    assert not any(reference() is not None for reference in living)


def test_a_model_within_a_multimodal_wrapper_is_looked_at_too():
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration
    from transformers.models.siglip import SiglipVisionConfig

    from tests.tiny_random_models import build_config

    vision = SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28
    )
    config = Gemma3Config(text_config=build_config("gemma3"), vision_config=vision, mm_tokens_per_image=4)
    loaded = LoadedModel.from_model(Gemma3ForConditionalGeneration(config).eval())
    before = loaded.model.config._attn_implementation, vision._attn_implementation
    calls = []
    read_queries(loaded, random_ids(1, 5), None, lambda layer, *given: calls.append(layer))
    assert calls == [0, 1]
    assert before == (loaded.model.config._attn_implementation, vision._attn_implementation)


def test_attention_beside_the_interface_is_refused_by_layer():
    loaded = load(n_layers=3)
    kind = type(loaded.body.layers[1].self_attn)

    class Apart(kind):
        def forward(self, hidden_states, *args, **kwargs):
            return hidden_states, None

    loaded.body.layers[1].self_attn.__class__ = Apart
    with (
        pytest.raises(UnsupportedModel, match=r"llama: the attention of layer 1 did not go through"),
        observe_attention(loaded, lambda *given: None),
    ):
        loaded.body(random_ids(1, 4), use_cache=False)
    assert loaded.model.config._attn_implementation == "sdpa"


def test_terms_that_q_and_k_do_not_give_are_refused():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    loaded = load()
    with observe_attention(loaded, lambda *given: None):
        function = ALL_ATTENTION_FUNCTIONS[loaded.body.config._attn_implementation]
        q = torch.zeros(1, 4, 1, 8)
        with pytest.raises(UnsupportedModel, match="layer 1 adds s_aux"):
            function(loaded.body.layers[1].self_attn, q, q[:, :2], q[:, :2], None, s_aux=torch.zeros(4))
        prefill(loaded, random_ids(1, 3))


def test_looking_twice_at_once_is_refused():
    loaded = load("mistral_sliding")
    with (
        pytest.raises(KvmapError, match="observed already"),
        observe_attention(loaded, lambda *given: None),
        observe_attention(loaded, lambda *given: None),
    ):
        pass
    assert loaded.model.config._attn_implementation == "sdpa"
