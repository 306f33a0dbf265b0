"""A pair of tiny random models with the shipped tokenizer, mappers between them, and questions."""

from __future__ import annotations

import pytest
import torch

from kvmap.data import read_texts, token_blocks
from kvmap.data.texts import TextSpec
from kvmap.evaluation.items import Item, world_items
from kvmap.fit.calibrate import CalibrationOptions, accumulate_moments, live_stream
from kvmap.fit.features import Layout, Recipe, both, geometry_shape
from kvmap.fit.linear import Penalty, fit_linear
from kvmap.fit.pair_moments import full_tables
from kvmap.mappers import BiasOnlyMapper, IdentityMapper, LinearMapper, RandomMapper, RawMapper
from kvmap.models.pair import LoadedModel, ModelPair
from kvmap.zoo.tokenizer import build_tokenizer
from tests.tiny_random_models import FAMILIES

MAX_POSITIONS = 320


@pytest.fixture(scope="session")
def tokenizer():
    return build_tokenizer(MAX_POSITIONS)


@pytest.fixture(scope="session")
def models(tokenizer):
    settings = {"vocab_size": len(tokenizer), "max_position_embeddings": MAX_POSITIONS}
    return {
        "source": FAMILIES["llama"](seed=1, n_layers=2, **settings),
        "target": FAMILIES["qwen3"](seed=2, n_layers=3, head_dim=8, **settings),
    }


@pytest.fixture(scope="session")
def pair(models, tokenizer):
    sides = {side: LoadedModel.from_model(model, tokenizer, name=side) for side, model in models.items()}
    return ModelPair(sides["source"], sides["target"])


@pytest.fixture(scope="session")
def identity_pair(models, tokenizer):
    model = LoadedModel.from_model(models["target"], tokenizer, name="both")
    return ModelPair(model, model)


@pytest.fixture(scope="session")
def blocks(tokenizer):
    texts = read_texts(TextSpec("world", split="evaluation", min_words=64))
    return token_blocks(texts, tokenizer, n_sequences=5, length=48, packing="document")


@pytest.fixture(scope="session")
def moments(pair, tokenizer, tmp_path_factory):
    texts = read_texts(TextSpec("world", split="calibration", min_words=64))
    ids = token_blocks(texts, tokenizer, n_sequences=8, length=64, packing="document").input_ids
    stream = live_stream(
        pair,
        ids,
        {"fit": list(range(6)), "held_out": [6, 7]},
        batch_size=8,
        sequential=False,
        spill_folder=tmp_path_factory.mktemp("spill"),
    )
    layout = Layout(geometry_shape(pair.source_geometry), geometry_shape(pair.target_geometry))
    return accumulate_moments(stream, layout, full_tables(layout), CalibrationOptions())


@pytest.fixture(scope="session")
def arms(moments):
    recipe = Recipe(moments.source_shape, moments.target_shape, "full_head", both(((0, 1),) * 3))
    fitted = fit_linear(moments, recipe, Penalty(0.01))
    return {
        "target": None,
        "source": None,
        "mapped": LinearMapper(fitted),
        "bias_only": BiasOnlyMapper.from_moments(moments),
        "raw": RawMapper(moments.source_shape, moments.target_shape),
        "random": RandomMapper.from_fitted(fitted, moments, seed=0),
        "own_keys": LinearMapper(fitted),
        "own_values": LinearMapper(fitted),
        "no_context": None,
    }


@pytest.fixture(scope="session")
def identity_arms(identity_pair):
    shape = tuple((layer.n_kv_heads, layer.head_dim) for layer in identity_pair.target_geometry.layers)
    return {"target": None, "source": None, "mapped": IdentityMapper(shape), "no_context": None}


@pytest.fixture(scope="session")
def items():
    """Questions of different lengths, stops, numbers of choices and tokens in a choice."""
    asked = world_items(seed=5, n_per_kind=1, kinds=["where", "colour", "count"])
    short = "anna is in the kitchen . question : where is anna ? answer :"
    return [
        *asked,
        Item(
            "phrases", "1", short, (" in the kitchen", " the garden .", " bob has the ball"), 0, ("\n", " .")
        ),
        Item("phrases", "2", f"{short} kitchen . {short}", (" kitchen", " in the garden"), 0),
    ]


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield
