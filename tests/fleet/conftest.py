"""Three tiny random models of one tokenizer and unlike shapes, and linear maps between all of them."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch

from kvmap.data import TokenBlocks, read_texts, token_blocks
from kvmap.data.texts import TextSpec
from kvmap.fit.calibrate import CalibrationOptions, accumulate_moments, live_stream
from kvmap.fit.features import Layout, Recipe, both, geometry_shape
from kvmap.fit.linear import Penalty, fit_linear
from kvmap.fit.pair_moments import PairMoments, full_tables
from kvmap.mappers import LinearMapper
from kvmap.models.pair import LoadedModel, ModelPair
from kvmap.zoo.tokenizer import build_tokenizer
from tests.tiny_random_models import FAMILIES

MAX_POSITIONS = 128
LENGTH = 40
SPLITS = {"fit": [0, 1, 2, 3, 4, 5], "held_out": [6, 7]}


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(scope="session")
def models() -> dict[str, LoadedModel]:
    tokenizer = build_tokenizer(MAX_POSITIONS)
    settings = {"vocab_size": len(tokenizer), "max_position_embeddings": MAX_POSITIONS}
    built = {
        "a": FAMILIES["llama"](seed=1, n_layers=2, **settings),
        "b": FAMILIES["qwen3"](seed=2, n_layers=3, head_dim=8, **settings),
        "c": FAMILIES["phi3_partial"](seed=3, n_layers=2, **settings),
    }
    return {name: LoadedModel.from_model(model, tokenizer, name=name) for name, model in built.items()}


@pytest.fixture(scope="session")
def tokenizer(models):
    return models["a"].tokenizer


@pytest.fixture(scope="session")
def blocks(tokenizer) -> TokenBlocks:
    texts = read_texts(TextSpec("world", split="calibration", min_words=64))
    return token_blocks(texts, tokenizer, n_sequences=8, length=LENGTH, packing="document")


@pytest.fixture(scope="session")
def moments(models, blocks) -> dict[tuple[str, str], PairMoments]:
    found = {}
    for source, target in permutations(models, 2):
        pair = ModelPair(models[source], models[target])
        layout = Layout(geometry_shape(pair.source_geometry), geometry_shape(pair.target_geometry))
        stream = live_stream(pair, blocks.input_ids, SPLITS, batch_size=8)
        found[source, target] = accumulate_moments(stream, layout, full_tables(layout), CalibrationOptions())
    return found


@pytest.fixture(scope="session")
def mappers(moments) -> dict[tuple[str, str], LinearMapper]:
    """Of all source layers and heads, float64 so that a difference is no rounding."""
    found = {}
    for pair, held in moments.items():
        layers = tuple(range(len(held.source_shape)))
        recipe = Recipe(
            held.source_shape, held.target_shape, "full_head", both((layers,) * len(held.target_shape))
        )
        weights = fit_linear(held, recipe, Penalty(1.0), dtype=torch.float64)
        found[pair] = LinearMapper(weights)
    return found
