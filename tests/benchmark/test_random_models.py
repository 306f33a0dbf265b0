from __future__ import annotations

import pytest
import torch

from kvmap.benchmark.random_models import Depth, random_mapper, random_model, random_pair
from kvmap.errors import KvmapError
from kvmap.models.capture import prefill
from kvmap.models.geometry import geometry_from_config
from kvmap.models.shapes import SHAPES, shape_config, shape_geometry
from kvmap.models.spec import ModelNotFound, ModelSpec
from kvmap.models.verify import check_rotation
from tests.test_config import GROUPS, composed

SMALL = ModelSpec("HuggingFaceTB/SmolLM2-135M-Instruct", dtype="float32", device="cpu")


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_makes_a_config_that_says_it(name):
    shape, geometry = SHAPES[name], shape_geometry(ModelSpec(name))
    assert (geometry.n_layers, geometry.n_kv_heads, geometry.head_dim) == (
        shape.n_layers,
        shape.n_kv_heads,
        shape.head_dim,
    )
    assert (geometry.n_heads, geometry.hidden_size, geometry.vocab_size) == (
        shape.n_heads,
        shape.hidden,
        shape.vocab,
    )
    assert geometry.max_positions == shape.max_positions
    assert shape_geometry(ModelSpec(name), n_positions=10**6, max_layers=2).max_positions == 10**6
    assert shape_geometry(ModelSpec(name), max_layers=2).n_layers == 2


@pytest.mark.slow
def test_pair_files_and_shapes_agree():
    for name in GROUPS["pair"]:
        if name == "custom":
            continue
        pair = composed(f"pair={name}").pair
        for model in (pair.source, pair.target):
            if model.id.startswith("zoo:"):
                continue
            geometry = shape_geometry(ModelSpec(model.id))
            facts = model.geometry
            assert (facts.n_layers, facts.n_kv_heads, facts.head_dim) == (
                geometry.n_layers,
                geometry.n_kv_heads,
                geometry.head_dim,
            ), name


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("Qwen/Qwen3-14B", 14768),
        ("Qwen/Qwen3-32B", 32762),
        ("meta-llama/Llama-3.1-8B", 8030),
        ("Qwen/Qwen2.5-7B", 7616),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 135),
    ],
)
def test_shapes_have_the_published_number_of_parameters(name, millions):
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape_config(ModelSpec(name)))
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == pytest.approx(millions, rel=1e-3)


def test_a_random_model_runs_and_rotates_as_its_family_does():
    model = random_model(SMALL, max_layers=2)
    assert max(check_rotation(model)) < 1e-3
    kv = prefill(model, torch.arange(12)[None])
    assert all(bool(torch.isfinite(tensor).all()) for tensor in (*kv.keys, *kv.values))
    assert kv.keys[1].std() > 0.1
    assert model.model.lm_head.weight is model.model.get_input_embeddings().weight


def test_the_same_seed_gives_the_same_model():
    a, b, c = (random_model(SMALL, max_layers=1, seed=seed) for seed in (1, 1, 2))
    assert not a.identity.mismatches(b.identity)
    assert a.identity.mismatches(c.identity)


def test_a_pair_says_how_deep_it_is():
    pair, depths = random_pair(SMALL, SMALL, n_positions=9000, max_layers=3)
    assert depths == {"source": Depth(3, 30), "target": Depth(3, 30)}
    assert depths["source"].scale == 10
    assert pair.target.geometry.max_positions == 9000


def test_a_model_of_the_shipped_family_has_a_config_of_its_own():
    config = shape_config(ModelSpec("zoo:tiny-small"), max_layers=1)
    assert geometry_from_config(config).n_layers == 1
    with pytest.raises(ModelNotFound):
        shape_config(ModelSpec("./no/such/folder"))


def test_a_device_map_is_refused():
    with pytest.raises(KvmapError, match="built on one device"):
        random_model(ModelSpec(SMALL.id, device_map="auto"))


def test_neighbouring_layers_are_read():
    mapper = random_mapper(((2, 8),) * 4, ((2, 8),) * 8, 2)
    chosen = [sorted(layers) for layers in mapper.recipe.selection["key"]]
    assert chosen[0] == [0, 1]
    assert chosen[-1] == [2, 3]
    assert all(right - left == 1 for left, right in chosen)
    every = random_mapper(((2, 8),) * 3, ((2, 8),) * 2, "all")
    assert [sorted(layers) for layers in every.recipe.selection["value"]] == [[0, 1, 2], [0, 1, 2]]


def test_a_random_map_keeps_the_scale_of_what_it_reads():
    mapper = random_mapper(((2, 8),) * 4, ((3, 16),) * 5, 2, "head_local", dtype=torch.bfloat16)
    assert mapper.n_weights == 2 * 5 * 3 * (2 * 8) * 16
    source = [torch.randn(1, 2, 500, 8) for _ in range(4)]
    for mapped in mapper.map_layer(3, source, source):
        assert mapped.std() == pytest.approx(1, abs=0.15)


@pytest.mark.parametrize("top_k", [0, 5])
def test_k_out_of_range_is_refused(top_k):
    with pytest.raises(KvmapError, match="expected an integer from 1 to 4"):
        random_mapper(((2, 8),) * 4, ((2, 8),) * 4, top_k)
