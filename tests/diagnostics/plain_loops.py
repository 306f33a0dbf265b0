"""What the streaming diagnostics say, by loops over every context, head, query and column in float64.

One context at a time, without padding: the target's queries, both caches, and nothing but arithmetic on them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from kvmap.diagnostics.streaming import diagnose_texts
from kvmap.diagnostics.sums import TextSums
from kvmap.diagnostics.texts import Text
from kvmap.diagnostics.token_kinds import TokenKinds
from kvmap.fit.features import CacheShape, geometry_shape
from kvmap.mappers import IdentityMapper, Mapper
from kvmap.models.capture import forward, prefill
from kvmap.models.pair import LoadedModel, ModelPair
from kvmap.models.queries import read_queries
from kvmap.models.rope import strip_rotation
from kvmap.transfer import TransferOptions, transfer
from tests.tiny_random_models import FAMILIES, VOCAB_SIZE, random_ids

CALIBRATION = random_ids(4, 40, seed=9)


class Letters:
    """A tokenizer whose id i stands for a character: every fifth is a full stop, every seventh a newline."""

    def decode(self, ids: Sequence[int]) -> str:
        (number,) = ids
        return "." if number % 5 == 0 else "\n" if number % 7 == 0 else chr(ord("a") + number % 26)


KINDS_OF_TOKENS = TokenKinds(Letters(), CALIBRATION, rare_share=0.2)

ROWS = random_ids(3, 11, seed=4).tolist()
CONTEXTS = [ROWS[0], ROWS[1][:8], ROWS[2][:5]]
QUESTIONS = Text.of_contexts("questions", CONTEXTS)
SEQUENCES = Text.of_sequences("evaluation", torch.tensor(ROWS))
DEFAULT = TransferOptions()


def diagnosed(
    pair: ModelPair,
    mapper: Mapper,
    texts: Sequence[Text] = (QUESTIONS, SEQUENCES),
    options: TransferOptions = DEFAULT,
    **settings: Any,
) -> dict[str, TextSums]:
    """What the streaming pass adds up of both texts."""
    return diagnose_texts(pair, mapper, texts, KINDS_OF_TOKENS, options, **settings)


def pair_of(source: str, target: str, **settings: Any) -> ModelPair:
    """Two random models of the same vocabulary, the source with three layers and the target with two."""
    return ModelPair(
        LoadedModel.from_model(FAMILIES[source](seed=1, n_layers=3), name="source"),
        LoadedModel.from_model(FAMILIES[target](seed=2, **settings), name="target"),
    )


def self_pair(name: str, **settings: Any) -> ModelPair:
    """One model as both."""
    model = LoadedModel.from_model(FAMILIES[name](**settings))
    return ModelPair(model, model)


class Mixed(Mapper):
    """Random sums of all the source's numbers of a token: a map between any shapes, wrong everywhere."""

    kind = "mixed"

    def __init__(self, source_shape: CacheShape, target_shape: CacheShape, native_layers: int = 0) -> None:
        super().__init__(source_shape, target_shape)
        self.native_layers = native_layers
        generator = torch.Generator().manual_seed(7)
        wide = sum(heads * width for heads, width in source_shape)
        self.weights = {
            (kind, layer): torch.randn(wide, heads * width, generator=generator) / wide**0.5
            for kind in range(2)
            for layer, (heads, width) in enumerate(target_shape)
        }

    def map_layer(
        self, layer: int, keys: Sequence[Tensor], values: Sequence[Tensor], *native: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        made = []
        for kind, layers in enumerate((keys, values)):
            features = torch.cat([part.transpose(1, 2).flatten(2) for part in layers], dim=-1)
            mapped = features @ self.weights[kind, layer]
            made.append(mapped.unflatten(2, self.target_shape[layer]).transpose(1, 2))
        return made[0], made[1]

    def settings(self) -> dict[str, Any]:
        return {}

    def tensors(self) -> dict[str, Tensor]:
        return {}

    @classmethod
    def from_state(cls, settings: Any, tensors: Any) -> Self:
        raise NotImplementedError


def mixed(pair: ModelPair, native_layers: int = 0) -> Mixed:
    """Of these two."""
    return Mixed(*(geometry_shape(m.geometry) for m in (pair.source, pair.target)), native_layers)


def identity(pair: ModelPair) -> IdentityMapper:
    """Of a model with itself."""
    return IdentityMapper(geometry_shape(pair.target.geometry))


@dataclass
class Layer:
    """One layer of one context: (heads, tokens, head_dim) float64, and what scores are made with."""

    query: Tensor
    own: tuple[Tensor, Tensor]
    found: tuple[Tensor, Tensor]
    view: dict[str, tuple[Tensor, Tensor]]
    """by kind: error and own vectors as the RoPE strategy maps them"""
    scaling: float
    softcap: float | None

    def weights(self, head: int, u: int, cache: tuple[Tensor, Tensor]) -> list[float]:
        """Softmax over the columns up to u."""
        scores = [self.scaling * float(k @ self.query[head, u]) for k in cache[0][self.shared(head), : u + 1]]
        if self.softcap:
            scores = [self.softcap * math.tanh(s / self.softcap) for s in scores]
        powers = [math.exp(s - max(scores)) for s in scores]
        return [power / sum(powers) for power in powers]

    def output(self, head: int, u: int, cache: tuple[Tensor, Tensor]) -> Tensor:
        """Σ a_i v_i."""
        values = cache[1][self.shared(head)]
        return sum(
            (a * values[i] for i, a in enumerate(self.weights(head, u, cache))), torch.zeros_like(values[0])
        )

    def shared(self, head: int) -> int:
        """The KV head of a query head."""
        return head // (len(self.query) // len(self.own[0]))


@dataclass
class Observed:
    """One context: which of its tokens count, their kinds, and all layers."""

    counted: range
    kinds: list[int]
    layers: list[Layer]


def observe(pair: ModelPair, mapper: Mapper, ids: Sequence[int], options: TransferOptions) -> Observed:
    """One context, read by both models."""
    context, layers = torch.tensor([ids]), []
    source_kv = prefill(pair.source, context)
    settings = asdict(replace(options, hold_back=1))
    handed = transfer(source_kv, mapper, pair.target, context, **settings).kv
    n = len(ids) - 1

    def on_layer(
        layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, softcap: float | None
    ) -> None:
        own = key[:, :, :n].double(), value[:, :, :n].double()
        found = handed.keys[layer][:, :, :n].double(), handed.values[layer][:, :, :n].double()
        positions = torch.arange(n)[None]
        rotation = pair.target.current_rotations()[layer]
        true, mapped = own[0], found[0]
        if options.rope != "coupled":
            true = strip_rotation(true, positions, rotation)
        if options.rope == "strip":
            mapped = strip_rotation(mapped, positions, rotation)
        view = {"key": (mapped - true, true), "value": (found[1] - own[1], own[1])}
        layers.append(
            Layer(
                query[0, :, :n].double(),
                (own[0][0], own[1][0]),
                (found[0][0], found[1][0]),
                {kind: (error[0], y[0]) for kind, (error, y) in view.items()},
                scaling,
                softcap,
            )
        )

    read_queries(pair.target, context, None, on_layer)
    kinds = KINDS_OF_TOKENS.of(context[0], torch.arange(len(ids))).tolist()
    return Observed(range(min(options.native_head, n), n), kinds, layers)


def tokens_of(observed: Sequence[Observed], layer: int) -> Iterator[tuple[Layer, int, int]]:
    """Layer, position and kind of every counted token."""
    for context in observed:
        for u in context.counted:
            yield context.layers[layer], u, context.kinds[u]


def predictions(
    pair: ModelPair, mapper: Mapper, ids: Sequence[int], start: int, options: TransferOptions
) -> list[tuple[float, bool]]:
    """KL in nats and agreement for each token from `start` on, fed one at a time after a hand-off."""
    whole = pair.target.model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
    context = torch.tensor([ids[:start]])
    handed = transfer(prefill(pair.source, context), mapper, pair.target, context, **asdict(options))
    logits, kv, found = handed.logits, handed.kv, []
    for place in range(start, max(len(ids), start + 1)):
        p, q = whole[place - 1], logits[0].double().log_softmax(-1)
        kl = sum(float(p[i].exp() * (p[i] - q[i])) for i in range(VOCAB_SIZE))
        found.append((kl, int(p.argmax()) == int(q.argmax())))
        if place + 1 < len(ids):
            step, kv = forward(pair.target, torch.tensor([[ids[place]]]), kv)
            logits = step[:, -1]
    return found
