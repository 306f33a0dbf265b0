"""Pairs whose caches do not match: other head counts, widths and rotations, from calibration to hand-off.

All of it once more in float64 by numpy and transformers alone: rotations from their formulas, ridge from
explicit rows, one context at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from kvmap.fit.calibrate import CalibrationOptions, accumulate_moments, live_stream
from kvmap.fit.features import Layout, Recipe, both, geometry_shape
from kvmap.fit.linear import Penalty, fit_linear
from kvmap.fit.pair_moments import full_tables
from kvmap.mappers import LinearMapper
from kvmap.models.cache import cache_argument
from kvmap.models.capture import prefill
from kvmap.models.loaded import LoadedModel
from kvmap.models.pair import ModelPair
from kvmap.transfer import continue_greedy, transfer
from tests.tiny_random_models import LLAMA3, build, left_padding, random_ids, rope

N_SEQUENCES, N_TOKENS, LAMBDA = 24, 24, 0.01
SELECTION = ((0, 1), (2, 0), (1, 2))
"""Source layers of each target layer; every model here has three."""

Frequencies = Callable[[int], np.ndarray]


def plain(theta: float, factor: float = 1.0) -> Frequencies:
    """θ^(−2i/d), all slowed down by `factor`."""
    return lambda width: theta ** (-np.arange(0, width, 2) / width) / factor


def llama3(width: int) -> np.ndarray:
    """Slow channels slowed down by 4, fast ones kept, between them by how often they turn in 32 positions."""
    slow = plain(100.0)(width)
    turns = 32 * slow / (2 * math.pi)
    kept = np.clip((turns - 1) / (4 - 1), 0, 1)
    return slow * kept + slow / 4 * (1 - kept)


@dataclass(frozen=True, eq=False)
class Side:
    """A tiny model, and how its keys turn.

    Attributes:
        family: of `tests.tiny_random_models`.
        settings: over the family's own.
        frequencies: of each pair of channels, by head width; interleaved: pairs (2i, 2i + 1).
    """

    family: str
    settings: tuple[tuple[str, Any], ...]
    frequencies: Frequencies
    interleaved: bool = False


def side(family: str, frequencies: Frequencies, *, interleaved: bool = False, **settings: Any) -> Side:
    return Side(family, tuple(settings.items()), frequencies, interleaved)


MHA = side("llama", plain(100.0), num_attention_heads=4, num_key_value_heads=4, hidden_size=32)
GQA = side("qwen3", plain(1000.0), num_key_value_heads=2, rope_parameters=rope(theta=1000.0))
MQA = side("llama_linear", plain(100.0, 4.0), num_key_value_heads=1, head_dim=12)
SIX = side("llama_llama3", llama3, hidden_size=48, num_attention_heads=6, num_key_value_heads=6, head_dim=4)
THREE = side("mistral", plain(100.0), hidden_size=48, num_attention_heads=6, num_key_value_heads=3)
TWO = side("cohere", plain(50.0), interleaved=True, rope_parameters=rope(theta=50.0))

#: what differs, by name; each in both directions
PAIRS = {
    "MHA and GQA, head_dim 8 and 16, two thetas": (MHA, GQA),
    "GQA and MQA, head_dim 16 and 12, linear scaling": (GQA, MQA),
    "MQA and MHA": (MQA, MHA),
    "6 and 3 heads in groups, llama3 scaling": (SIX, THREE),
    "3 and 2 heads, no groups, halves and interleaved": (THREE, TWO),
}
every_pair = pytest.mark.parametrize("name", PAIRS)
directions = pytest.mark.parametrize("direction", ["up", "down"])
supports = pytest.mark.parametrize("support", ["full_head", "head_local"])


def sides(name: str, direction: str) -> tuple[Side, Side]:
    one, other = PAIRS[name]
    return (one, other) if direction == "up" else (other, one)


@cache
def model(which: Side, seed: int) -> LoadedModel:
    built = build(which.family, seed=seed, n_layers=3, **dict(which.settings))
    return LoadedModel.from_model(built.double(), name=which.family)


def turned(x: np.ndarray, which: Side, sign: int) -> np.ndarray:
    """Keys (heads, tokens, width) turned by their positions, forward (1) or back (−1)."""
    angle = sign * np.arange(x.shape[1])[:, None] * which.frequencies(x.shape[2])
    cos, sin = np.cos(angle), np.sin(angle)
    out = np.empty_like(x)
    half = x.shape[2] // 2
    first, second = (
        (slice(0, None, 2), slice(1, None, 2)) if which.interleaved else (slice(0, half), slice(half, None))
    )
    a, b = x[..., first], x[..., second]
    out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
    return out


@torch.no_grad()
def own_cache(loaded: LoadedModel, ids: Tensor) -> list[tuple[np.ndarray, np.ndarray]]:
    """Keys and values (heads, tokens, width) of each layer, from transformers' own run of one context."""
    held = DynamicCache()
    loaded.model(ids[None], use_cache=True, **{cache_argument(loaded.model): held})
    return [(layer.keys[0].numpy(), layer.values[0].numpy()) for layer in held.layers]


def content(loaded: LoadedModel, which: Side, ids: Tensor) -> dict[str, list[np.ndarray]]:
    """Unturned keys, and values, of each layer."""
    read = own_cache(loaded, ids)
    return {"key": [turned(key, which, -1) for key, _ in read], "value": [value for _, value in read]}


def features(read: dict[str, list[np.ndarray]], kind: str, layer: int, head: int | None) -> np.ndarray:
    """(tokens, p) of a target head, or of all heads of a layer where `head` is None; see `own_head`."""
    parts = []
    for number in SELECTION[layer]:
        heads = read[kind][number]
        parts += [heads[a] for a in (range(len(heads)) if head is None else [head])]
    return np.concatenate(parts, axis=1)


def own_head(n_source: int, n_target: int, head: int) -> int:
    return math.floor(head * n_source / n_target)


class ByHand:
    """The map of one pair, from explicit rows."""

    def __init__(self, source: Side, target: Side, support: str, ids: Tensor) -> None:
        self.sides, self.support = (source, target), support
        self.models = model(source, 1), model(target, 2)
        read = [[content(m, s, row) for row in ids] for m, s in zip(self.models, self.sides, strict=True)]
        self.weights: dict[tuple[str, int, int], tuple[np.ndarray, np.ndarray]] = {}
        n_source, self.n_target = (len(one[0]["key"][0]) for one in read)
        self.reads = [
            None if support == "full_head" else own_head(n_source, self.n_target, h)
            for h in range(self.n_target)
        ]
        for kind in ("key", "value"):
            for layer in range(3):
                for head, a in enumerate(self.reads):
                    # the first token of each sequence is the target's own
                    x = np.concatenate([features(row, kind, layer, a)[1:] for row in read[0]])
                    y = np.concatenate([row[kind][layer][head][1:] for row in read[1]])
                    mean_x, mean_y = x.mean(0), y.mean(0)
                    gram = (x - mean_x).T @ (x - mean_x) + LAMBDA * np.eye(x.shape[1])
                    w = np.linalg.solve(gram, (x - mean_x).T @ (y - mean_y))
                    self.weights[kind, layer, head] = w, mean_y - mean_x @ w

    def mapped(self, ids: Tensor) -> list[tuple[np.ndarray, np.ndarray]]:
        """The target's cache of a context: its own first token, the others mapped and turned."""
        read = content(self.models[0], self.sides[0], ids)
        own = own_cache(self.models[1], ids[:1])
        found = []
        for layer in range(3):
            parts = []
            for kind in ("key", "value"):
                heads = []
                for head, a in enumerate(self.reads):
                    w, b = self.weights[kind, layer, head]
                    heads.append(features(read, kind, layer, a) @ w + b)
                parts.append(np.stack(heads))
            parts[0] = turned(parts[0], self.sides[1], 1)
            for part, first in zip(parts, own[layer], strict=True):
                part[:, :1] = first
            found.append((parts[0], parts[1]))
        return found

    @torch.no_grad()
    def logits(self, ids: Tensor) -> Tensor:
        """After the context: its last token is run on the mapped cache of the others."""
        held = DynamicCache()
        for layer, (key, value) in enumerate(self.mapped(ids)):
            held.update(torch.from_numpy(key[None, :, :-1]), torch.from_numpy(value[None, :, :-1]), layer)
        target = self.models[1].model
        return target(
            ids[None, -1:],
            position_ids=torch.tensor([[len(ids) - 1]]),
            use_cache=True,
            **{cache_argument(target): held},
        ).logits[0, -1]


CALIBRATION = random_ids(N_SEQUENCES, N_TOKENS, seed=20)
FIT = range(N_SEQUENCES - 4)


@cache
def by_hand(name: str, direction: str, support: str) -> ByHand:
    return ByHand(*sides(name, direction), support, CALIBRATION[list(FIT)])


@cache
def fitted(name: str, direction: str, support: str) -> LinearMapper:
    source, target = (model(s, seed) for s, seed in zip(sides(name, direction), (1, 2), strict=True))
    layout = Layout(geometry_shape(source.geometry), geometry_shape(target.geometry))
    splits = {"fit": list(FIT), "held_out": list(range(len(FIT), N_SEQUENCES))}
    stream = live_stream(
        ModelPair(source, target),
        CALIBRATION,
        splits,
        batch_size=5,
        sequential=False,
        spill_folder=Path("unused"),
    )
    moments = accumulate_moments(stream, layout, full_tables(layout), CalibrationOptions(native_head=1))
    recipe = Recipe(layout.source_shape, layout.target_shape, support, both(SELECTION))
    return LinearMapper(fit_linear(moments, recipe, Penalty(LAMBDA), dtype=torch.float64))


def test_the_pairs_differ_as_they_say() -> None:
    shapes = {s: geometry_shape(model(s, 1).geometry)[0] for pair in PAIRS.values() for s in pair}
    assert [shapes[s] for s in (MHA, GQA, MQA, SIX, THREE, TWO)] == [
        (4, 8),
        (2, 16),
        (1, 12),
        (6, 4),
        (3, 8),
        (2, 8),
    ]


@every_pair
@directions
def test_keys_turned_back_by_formula_are_those_stripped(name: str, direction: str) -> None:
    which, _ = sides(name, direction)
    loaded, ids = model(which, 1), random_ids(1, 40, seed=5)
    kv = prefill(loaded, ids).strip()
    for layer, key in enumerate(content(loaded, which, ids[0])["key"]):
        # transformers takes angles, cos and sin in float32
        np.testing.assert_allclose(kv.keys[layer][0].numpy(), key, rtol=0, atol=2e-5)


@every_pair
@directions
@supports
def test_the_chain_is_what_the_method_says(name: str, direction: str, support: str) -> None:
    oracle, mapper = by_hand(name, direction, support), fitted(name, direction, support)
    source, target = oracle.models
    ids, mask = random_ids(3, 17, seed=30), left_padding(3, 17)
    handed = transfer(prefill(source, ids, mask), mapper, target, ids, mask)
    generated = continue_greedy(target, handed, 1)
    for row in range(3):
        context = ids[row, mask[row].bool()]
        start = 17 - len(context)
        for layer, parts in enumerate(oracle.mapped(context)):
            got = handed.kv.keys[layer][row], handed.kv.values[layer][row]
            for mine, theirs in zip(got, parts, strict=True):
                scale = max(1.0, float(np.abs(theirs).max()))
                # float32 angles, and a map and rotation in at least float32
                np.testing.assert_allclose(
                    mine[:, start:-1].numpy(), theirs[:, :-1], rtol=0, atol=2e-4 * scale
                )
        logits = oracle.logits(context)
        torch.testing.assert_close(handed.logits[row].double(), logits, rtol=0, atol=1e-3)
        assert generated[row] == [int(logits.argmax())]
    assert handed.n_mapped == int(mask.sum()) - 3 * 2


@every_pair
@directions
def test_a_map_of_own_heads_is_another_than_one_of_all(name: str, direction: str) -> None:
    """Unless one head is all there is: what is read follows the support."""
    wide, narrow = (fitted(name, direction, support) for support in ("full_head", "head_local"))
    n_source = wide.source_shape[0][0]
    n_target = wide.target_shape[0][0]
    assert wide.n_weights == n_source * narrow.n_weights
    assert [own_head(n_source, n_target, h) for h in range(n_target)] == sorted(
        own_head(n_source, n_target, h) for h in range(n_target)
    )


def test_scaled_frequencies_are_those_of_the_config() -> None:
    assert dict(LLAMA3)["factor"] == 4.0
    np.testing.assert_allclose(model(SIX, 1).rotations(10)[0].inv_freq, llama3(4), rtol=1e-6)  # type: ignore[union-attr]
