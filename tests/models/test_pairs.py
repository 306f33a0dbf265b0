"""Every pair that ships, both ways: its file, its models on no device, and the chain on a shrunken pair."""

from __future__ import annotations

import sys
from functools import cache
from math import ceil, gcd
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from kvmap.config import validate
from kvmap.config.schema import PairConfig
from kvmap.fit.calibrate import CalibrationOptions, accumulate_moments, live_stream
from kvmap.fit.features import Layout, Recipe, both, geometry_shape
from kvmap.fit.linear import Penalty, fit_linear
from kvmap.fit.pair_moments import full_tables
from kvmap.mappers import LinearMapper
from kvmap.mappers.linear import linear_weight_count
from kvmap.models.cache import cache_argument
from kvmap.models.capture import prefill
from kvmap.models.geometry import geometry_from_config
from kvmap.models.loaded import LoadedModel
from kvmap.models.pair import ModelPair
from kvmap.models.shapes import SHAPES, DecoderShape, shape_config
from kvmap.models.spec import ModelSpec
from kvmap.stages.context import Context
from kvmap.tracking import Run
from kvmap.transfer import transfer
from tests.models.recorded_keys import pre_rotation_keys
from tests.test_config import GROUPS, composed, with_settings
from tests.tiny_random_models import VOCAB_SIZE, random_ids, randomise

PUBLISHED = ("qwen3_14b_32b", "qwen3_8b_32b", "llama8b_70b", "ministral3b_8b", "ministral3b_14b")
PUBLISHED += ("ministral8b_14b",)
LAPTOP = ("qwen3_06b_17b", "qwen3_17b_4b", "qwen3_4b_8b", "llama3b_8b", "qwen25_15b_7b")
PAIRS = (*PUBLISHED, *LAPTOP, "qwen25coder_05b_15b", "smollm2_self")

every_pair = pytest.mark.parametrize("name", PAIRS)
directions = pytest.mark.parametrize("direction", ["up", "down"])

N_LAYERS = {"source": 2, "target": 3}
N_SEQUENCES, N_TOKENS, LAMBDA = 16, 20, 0.01
CALIBRATION = random_ids(N_SEQUENCES, N_TOKENS, seed=20)
SELECTION = ((0, 1), (1,), (1, 0))


@cache
def pair_of(name: str) -> PairConfig:
    return composed(f"pair={name}").pair


def ids_of(name: str, direction: str) -> dict[str, str]:
    """Model ids by the part they play."""
    pair = pair_of(name)
    places = (pair.source.id, pair.target.id)
    return dict(zip(("source", "target"), places if direction == "up" else places[::-1], strict=True))


def test_every_pair_of_the_papers_and_for_laptops_ships() -> None:
    shipped = {name for name in GROUPS["pair"] if not name.startswith("tiny") and name != "custom"}
    assert shipped == set(PAIRS)


@every_pair
@directions
def test_a_pair_composes_both_ways(name: str, direction: str) -> None:
    cfg = with_settings(f"pair={name} direction={direction}")
    assert validate(cfg) == []
    ctx = Context(cfg, cast(Run, None))
    assert {role: spec.id for role, spec in ctx.specs.items()} == ids_of(name, direction)


def test_a_pinned_revision_is_the_hubs_and_not_that_of_a_folder(tmp_path: Path) -> None:
    cfg = with_settings(f"pair=qwen3_06b_17b pair.source.id={tmp_path}")
    specs = Context(cfg, cast(Run, None)).specs
    assert cfg.pair.source.revision is not None
    assert specs["source"].revision is None
    assert specs["target"].revision == cfg.pair.target.revision


@every_pair
def test_a_pair_file_says_what_its_models_are(name: str) -> None:
    pair = pair_of(name)
    assert pair.name == name
    for model in (pair.source, pair.target):
        shape = SHAPES[model.id]
        facts = model.geometry
        assert (facts.n_layers, facts.n_kv_heads, facts.head_dim) == (
            shape.n_layers,
            shape.n_kv_heads,
            shape.head_dim,
        )
        assert model.revision is None or (len(model.revision) == 40 and int(model.revision, 16))


@every_pair
@directions
def test_models_of_that_shape_have_the_geometry_that_kvmap_reads(name: str, direction: str) -> None:
    for model_id in ids_of(name, direction).values():
        shape, config = SHAPES[model_id], shape_config(ModelSpec(model_id))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        geometry = geometry_from_config(config)
        weights = dict(model.named_parameters())
        for layer, own in zip(model.get_decoder().layers, geometry.layers, strict=True):
            assert layer.self_attn.k_proj.weight.shape == (own.n_kv_heads * own.head_dim, shape.hidden)
            assert layer.self_attn.q_proj.weight.shape[0] == geometry.n_heads * own.head_dim
            assert own.rope_type == shape.rope["rope_type"]
            assert own.window is None
        assert model.get_input_embeddings().weight.shape == (shape.vocab, shape.hidden)
        assert ("lm_head.weight" not in weights) == shape.tied
        assert len(geometry.layers) == shape.n_layers
        assert geometry.max_positions == shape.max_positions
        assert config.rope_parameters["rope_theta"] == shape.rope["rope_theta"]


@pytest.mark.parametrize(
    ("name", "top_k", "billions"),
    [
        ("qwen3_14b_32b", 8, 1.07),
        ("qwen3_8b_32b", 12, 1.61),
        ("llama8b_70b", 20, 3.36),
        ("ministral3b_8b", 26, 1.85),
        ("ministral3b_14b", 20, 1.68),
        ("ministral8b_14b", 12, 1.01),
    ],
)
def test_maps_have_the_published_number_of_weights(name: str, top_k: int, billions: float) -> None:
    shapes = [SHAPES[model_id] for model_id in ids_of(name, "up").values()]
    source, target = ([(s.n_kv_heads, s.head_dim)] * s.n_layers for s in shapes)
    assert linear_weight_count(tuple(source), tuple(target), top_k, "full_head") / 1e9 == pytest.approx(
        billions, abs=0.005
    )


def shrunken(name: str, direction: str) -> dict[str, DecoderShape]:
    """Both shapes with few heads: their number of KV heads in its ratio to the other's, of each its ratio to
    queries, and head_dim an eighth.
    """
    shapes = {role: SHAPES[model_id] for role, model_id in ids_of(name, direction).items()}
    common = gcd(*(shape.n_kv_heads for shape in shapes.values()))
    kv_heads = {role: shape.n_kv_heads // common for role, shape in shapes.items()}
    more = 2 if max(kv_heads.values()) == 1 else 1
    n_heads = {role: more * kv_heads[role] * s.n_heads // s.n_kv_heads for role, s in shapes.items()}
    return {
        role: DecoderShape(
            shape.family,
            N_LAYERS[role],
            ceil(24 / n_heads[role]) * n_heads[role],
            n_heads[role],
            more * kv_heads[role],
            shape.head_dim // 8,
            32,
            VOCAB_SIZE,
            shape.max_positions,
            shape.rope,
            shape.tied,
        )
        for role, shape in shapes.items()
    }


def config_of(shape: DecoderShape, monkeypatch: pytest.MonkeyPatch) -> Any:
    with monkeypatch.context() as patch:
        # the table is constant but here
        patch.setitem(SHAPES, "shrunken", shape)  # type: ignore[misc]
        return shape_config(ModelSpec("shrunken"))


def models_of(name: str, direction: str, monkeypatch: pytest.MonkeyPatch) -> tuple[LoadedModel, LoadedModel]:
    loaded = []
    for seed, (role, shape) in enumerate(shrunken(name, direction).items()):
        config = config_of(shape, monkeypatch)
        assert type(config).__name__ == f"{shape.family}Config"
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        randomise(model, seed)
        loaded.append(LoadedModel.from_model(model.double().eval(), name=role))
    return loaded[0], loaded[1]


class ByHand:
    """The map from explicit rows, keys taken where the model's own code is about to rotate them."""

    def __init__(self, source: LoadedModel, target: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.source, self.target, self.patch = source, target, monkeypatch
        x, y = self.content(source, CALIBRATION[:-2]), self.content(target, CALIBRATION[:-2])
        self.weights = {
            (kind, layer): self._ridge(
                np.concatenate([rows(x[kind][number]) for number in sorted(SELECTION[layer])], 1),
                rows(y[kind][layer]),
            )
            for kind in ("key", "value")
            for layer in range(3)
        }

    def content(self, loaded: LoadedModel, ids: Tensor) -> dict[str, list[Tensor]]:
        positions = torch.arange(ids.shape[1]).expand(ids.shape)
        keys = pre_rotation_keys(self.patch, loaded, ids, torch.ones_like(ids), positions)
        return {"key": keys, "value": [layer.values for layer in native_cache(loaded, ids).layers]}

    def _ridge(self, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        mean_x, mean_y = x.mean(0), y.mean(0)
        centred = x - mean_x
        gram = centred.T @ centred + LAMBDA * np.eye(x.shape[1])
        w = np.linalg.solve(gram, centred.T @ (y - mean_y))
        return w, mean_y - mean_x @ w

    @torch.no_grad()
    def mapped(self, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of every layer, the target's first token its own."""
        read, own = self.content(self.source, ids), native_cache(self.target, ids[:, :1])
        body: Any = self.target.body
        module = sys.modules[type(body).__module__]
        positions = torch.arange(ids.shape[1])[None]
        found = []
        for layer, shape in enumerate(self.target.geometry.layers):
            parts = {}
            for kind in ("key", "value"):
                w, b = self.weights[kind, layer]
                x = [flat(read[kind][number]) for number in sorted(SELECTION[layer])]
                y = torch.from_numpy(np.concatenate(x, -1) @ w + b)
                parts[kind] = y.unflatten(-1, (shape.n_kv_heads, shape.head_dim)).transpose(1, 2)
            cos, sin = body.rotary_emb(parts["value"], positions)
            _, parts["key"] = module.apply_rotary_pos_emb(parts["key"], parts["key"], cos, sin)
            parts["key"][:, :, :1] = own.layers[layer].keys
            parts["value"][:, :, :1] = own.layers[layer].values
            found.append((parts["key"], parts["value"]))
        return found


def flat(x: Tensor) -> np.ndarray:
    """(batch, heads, tokens, width) as (batch, tokens, heads · width)."""
    return x.transpose(1, 2).flatten(2).numpy()


def rows(x: Tensor) -> np.ndarray:
    """One row for each token but the first of each sequence, which is the target's own."""
    return flat(x)[:, 1:].reshape(-1, x.shape[1] * x.shape[3])


@torch.no_grad()
def native_cache(loaded: LoadedModel, ids: Tensor) -> DynamicCache:
    held = DynamicCache()
    loaded.model(ids, use_cache=True, **{cache_argument(loaded.model): held})
    return held


@cache
def splits() -> dict[str, list[int]]:
    return {"fit": list(range(N_SEQUENCES - 2)), "held_out": [N_SEQUENCES - 2, N_SEQUENCES - 1]}


def fitted(source: LoadedModel, target: LoadedModel) -> LinearMapper:
    layout = Layout(geometry_shape(source.geometry), geometry_shape(target.geometry))
    stream = live_stream(ModelPair(source, target), CALIBRATION, splits(), batch_size=8)
    moments = accumulate_moments(stream, layout, full_tables(layout), CalibrationOptions(native_head=1))
    selection = tuple(tuple(sorted(layers)) for layers in SELECTION)
    recipe = Recipe(layout.source_shape, layout.target_shape, "full_head", both(selection))
    return LinearMapper(fit_linear(moments, recipe, Penalty(LAMBDA), dtype=torch.float64))


@every_pair
@directions
@torch.no_grad()
def test_the_chain_runs_on_a_shrunken_pair_as_the_method_says(
    name: str, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calibrate, fit, hand over, go on: against explicit float64 rows and the models' own rotations."""
    source, target = models_of(name, direction, monkeypatch)
    shapes = shrunken(name, direction)
    for role, loaded in (("source", source), ("target", target)):
        layer = loaded.geometry.layers[0]
        assert (layer.n_kv_heads, layer.head_dim) == (shapes[role].n_kv_heads, shapes[role].head_dim)
        assert layer.rope_type == shapes[role].rope["rope_type"]
    mapper = fitted(source, target)
    oracle = ByHand(source, target, monkeypatch)
    ids = random_ids(2, 14, seed=30)
    handed = transfer(prefill(source, ids), mapper, target, ids)
    expected = oracle.mapped(ids)
    held = DynamicCache()
    for layer, (key, value) in enumerate(expected):
        for mine, theirs in ((handed.kv.keys[layer], key), (handed.kv.values[layer], value)):
            # float32 angles and rotation; widths of some units
            scale = max(1.0, float(theirs.abs().max()))
            torch.testing.assert_close(mine[:, :, :-1].double(), theirs[:, :, :-1], rtol=0, atol=2e-4 * scale)
        held.update(key[:, :, :-1], value[:, :, :-1], layer)
    logits = target.model(
        ids[:, -1:],
        position_ids=torch.full((2, 1), ids.shape[1] - 1),
        use_cache=True,
        **{cache_argument(target.model): held},
    ).logits[:, -1]
    torch.testing.assert_close(handed.logits.double(), logits, rtol=0, atol=2e-3)
