"""Prompts of mixed length in the shipped family's own language."""

from __future__ import annotations

import random

from kvmap.models.load import load_tokenizer
from kvmap.models.spec import ModelSpec
from kvmap.zoo.world import documents


def zoo_prompts(
    n: int, lengths: tuple[int, ...] = (40, 70, 128, 200, 300, 420), seed: int = 0
) -> list[list[int]]:
    """Prompts that share no first tokens with one another."""
    tokenizer = load_tokenizer(ModelSpec("zoo:tiny-large"))
    draw = random.Random(seed)
    found = []
    for number in range(n):
        length = draw.choice(lengths)
        text = next(documents(seed * 1000 + number, 1, min_words=max(length, 64)))
        ids = tokenizer(text)["input_ids"][:length]
        found.append([draw.randrange(5, 100), *ids[1:]])
    return found
