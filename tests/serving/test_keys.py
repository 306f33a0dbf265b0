"""Content keys: equal exactly where the tokens before are, and the model, and the salt."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvmap.models.identity import ModelIdentity
from kvmap.serving.keys import BLOCK_TOKENS, block_keys, common_length, namespace, whole_key

SOURCE = ModelIdentity("a", "w" * 64, "c" * 64, "t" * 64, "r" * 64, "bfloat16")
NAME = namespace(SOURCE)
IDS = random.Random(0).choices(range(50_000), k=5 * BLOCK_TOKENS + 7)


def test_a_prompt_has_a_key_for_each_full_block() -> None:
    keys = block_keys(NAME, IDS)
    assert len(keys) == 5
    assert len(set(keys)) == 5
    assert all(len(key) == 32 and set(key) <= set("0123456789abcdef") for key in keys)
    assert block_keys(NAME, IDS[: BLOCK_TOKENS - 1]) == []


@pytest.mark.parametrize("changed", [0, BLOCK_TOKENS - 1, BLOCK_TOKENS, 3 * BLOCK_TOKENS + 5])
def test_keys_agree_up_to_the_block_of_the_first_other_token(changed: int) -> None:
    other = list(IDS)
    other[changed] += 1
    mine, theirs = block_keys(NAME, IDS), block_keys(NAME, other)
    n_same = changed // BLOCK_TOKENS
    assert mine[:n_same] == theirs[:n_same]
    assert not set(mine[n_same:]) & set(theirs[n_same:])


def test_moved_tokens_make_other_keys() -> None:
    assert not set(block_keys(NAME, IDS)) & set(block_keys(NAME, IDS[1:]))


@pytest.mark.parametrize("part", ["weights", "config", "tokenizer", "rope", "dtype"])
def test_another_model_makes_other_keys_and_its_name_does_not(part: str) -> None:
    assert namespace(replace(SOURCE, **{part: "other"})) != NAME
    assert namespace(replace(SOURCE, name="b")) == NAME


def test_a_salt_keeps_requests_apart() -> None:
    names = {
        namespace(SOURCE),
        namespace(SOURCE, "tenant"),
        namespace(SOURCE, "other"),
        namespace(SOURCE, ""),
    }
    assert len(names) == 4


def test_a_whole_prompt_has_one_key_whatever_its_length() -> None:
    assert whole_key(NAME, IDS) != whole_key(NAME, IDS[:-1])
    assert whole_key(NAME, IDS[: 2 * BLOCK_TOKENS]) not in block_keys(NAME, IDS)


@pytest.mark.parametrize("length", [0, 1, 31, 32, 100])
def test_common_length_counts_first_tokens(length: int) -> None:
    other = [*IDS[:length], -1, *IDS[length + 1 :]]
    assert common_length(tuple(IDS), tuple(other)) == length
    assert common_length(tuple(IDS), tuple(IDS)) == len(IDS)
