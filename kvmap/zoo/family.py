"""The four models of the family: their geometry and how each is trained."""

from __future__ import annotations

import math
from dataclasses import dataclass

from transformers import LlamaConfig, PreTrainedTokenizerFast

from kvmap.errors import UnknownName

MAX_POSITIONS = 2048
ROPE_THETA = 10_000.0


@dataclass(frozen=True)
class Stage:
    """One leg of the curriculum: how long the rows are and how much there is to remember in them.

    Attributes:
        length: tokens a row.
        size: `kvmap.zoo.world.sample_document`'s bound on what a story holds, in (0, 1].
        at_most: the part of all steps after which the stage ends in any case, in (0, 1].
        until: the stage ends as soon as this share of the training answers is right.
        plain: stories only introduce, see `kvmap.zoo.world.Story`.
    """

    length: int
    size: float
    at_most: float
    until: float = 1.0
    plain: bool = False


CURRICULUM = (
    Stage(64, 0.25, at_most=0.1, until=0.8, plain=True),
    Stage(128, 0.5, at_most=0.1, until=0.85, plain=True),
    Stage(128, 0.5, at_most=0.15, until=0.8),
    Stage(256, 1.0, at_most=0.5),
    Stage(512, 1.0, at_most=0.15),
)


@dataclass(frozen=True)
class Recipe:
    """A model's geometry and training.

    Attributes:
        hidden_size, n_layers, n_heads, n_kv_heads, head_dim, mlp_size: the geometry, of Llama's kind.
        steps: optimiser steps.
        learning_rate: its peak, reached after `warm_up` steps, then a cosine to a tenth of it.
        tokens_per_step: tokens a step, whatever the row's length.
        answer_weight: loss weight of an answer's token; every other token has 1.
    """

    hidden_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    mlp_size: int
    steps: int
    learning_rate: float
    warm_up: int = 20
    tokens_per_step: int = 2048
    answer_weight: float = 10.0
    weight_decay: float = 0.05
    curriculum: tuple[Stage, ...] = CURRICULUM


RECIPES: dict[str, Recipe] = {
    "tiny-small": Recipe(96, 3, 4, 2, 32, 448, steps=150, learning_rate=1e-3),
    "tiny-medium": Recipe(128, 4, 4, 2, 32, 384, steps=350, learning_rate=1e-3),
    "tiny-large": Recipe(160, 6, 4, 2, 32, 448, steps=1000, learning_rate=1e-3),
    "tiny-wide": Recipe(128, 5, 8, 4, 24, 384, steps=700, learning_rate=1e-3),
}


def recipe_of(name: str) -> Recipe:
    """The recipe of a shipped model.

    Raises:
        UnknownName: no model of the family is called so.
    """
    if name not in RECIPES:
        raise UnknownName("model of the tiny family", name, RECIPES)
    return RECIPES[name]


def model_config(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """The transformers configuration of a recipe's model."""
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.mlp_size,
        num_hidden_layers=recipe.n_layers,
        num_attention_heads=recipe.n_heads,
        num_key_value_heads=recipe.n_kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.9 / math.sqrt(recipe.hidden_size),
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
