"""Kinds and groups of tokens, and the texts they stand in."""

from __future__ import annotations

import pytest
import torch

from kvmap.diagnostics.texts import Text, evenly
from kvmap.diagnostics.token_groups import N_KINDS, bin_bounds, membership, n_bins, position_bins
from kvmap.diagnostics.token_kinds import TOKEN_KINDS, TokenKinds, is_newline_or_punctuation
from kvmap.errors import KvmapError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\n", True),
        ("\r\n\n", True),
        ("  \n", True),
        (" ", False),
        ("", False),
        (".", True),
        (" ,", True),
        ("...", True),
        (").\n", True),
        ("{}", True),
        ("+", True),
        ("€", True),
        ("。", True),
        ("a.", False),
        ("7", False),
        ("Ω", False),
        ("\ufffd", False),
        ("<|endoftext|>", False),
    ],
)
def test_newlines_and_punctuation_go_by_what_a_token_decodes_to(text, expected):
    assert is_newline_or_punctuation(text) is expected


class Words:
    """Decodes ids to the words of a list, and counts how often it is asked."""

    def __init__(self, *words):
        self.words, self.asked = words, 0

    def decode(self, ids):
        self.asked += 1
        return self.words[ids[0]]


def kinds_of(kinds, ids, start=0):
    ids = torch.tensor([ids])
    return [TOKEN_KINDS[kind] for kind in kinds.of(ids, torch.arange(start, start + ids.shape[1])[None])[0]]


def test_the_first_of_the_kinds_that_a_token_is_counts():
    text = torch.tensor([[0] * 50 + [1] * 45 + [2] * 3 + [3] * 2])
    kinds = TokenKinds(Words("the", ".", "newt", "!", "owl"), text, rare_share=0.05)
    assert kinds_of(kinds, [1, 0, 1, 2, 3, 4, 0]) == [
        "first",
        "rest",
        "newline_punctuation",
        "rare",
        "newline_punctuation",
        "rare",
        "rest",
    ]
    assert kinds_of(kinds, [4, 0], start=3) == ["rare", "rest"]


@pytest.mark.parametrize(
    ("rare_share", "rare"),
    [(0.0, set()), (0.02, {3}), (0.049, {3}), (0.05, {2, 3}), (0.5, {1, 2, 3}), (0.99, {1, 2, 3})],
)
def test_rare_ids_together_make_up_no_more_than_their_share(rare_share, rare):
    text = torch.tensor([0] * 50 + [1] * 45 + [2] * 3 + [3] * 2)
    kinds = TokenKinds(None, text, rare_share)
    found = {number for number, kind in enumerate(kinds_of(kinds, [0, 1, 2, 3], start=1)) if kind == "rare"}
    assert found == rare


def test_ids_as_frequent_as_each_other_are_rare_together_or_not_at_all():
    text = torch.tensor([0] * 90 + [1] * 5 + [2] * 5)
    assert kinds_of(TokenKinds(None, text, 0.07), [0, 1, 2], start=1) == ["rest"] * 3
    assert kinds_of(TokenKinds(None, text, 0.10), [0, 1, 2], start=1) == ["rest", "rare", "rare"]


def test_an_id_is_decoded_once():
    words = Words("a", "b", "c")
    kinds = TokenKinds(words, torch.tensor([0, 1, 2]), 0.0)
    for _ in range(2):
        kinds_of(kinds, [0, 1, 1, 2, 2, 2])
    assert words.asked == 3


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(KvmapError, match="expected a share of the calibration tokens"):
        TokenKinds(None, torch.tensor([0]), share)


def test_positions_fall_into_bins_that_double():
    for position in range(70):
        (number,) = position_bins(torch.tensor([position])).tolist()
        low, high = bin_bounds(number)
        assert low <= position <= high
        assert number == (0 if position == 0 else position.bit_length())
    assert [bin_bounds(number) for number in range(5)] == [(0, 0), (1, 1), (2, 3), (4, 7), (8, 15)]
    assert [n_bins(n) for n in (1, 2, 3, 4, 5, 512, 513)] == [1, 2, 3, 3, 4, 10, 11]


def test_each_token_is_of_one_kind_and_in_one_bin():
    kinds, positions = torch.tensor([0, 3, 2, 3]), torch.tensor([0, 1, 5, 6])
    found = membership(kinds, positions, n_bins(7))
    assert found.shape == (4, N_KINDS + 4)
    assert found[:, :N_KINDS].argmax(1).tolist() == kinds.tolist()
    assert found[:, N_KINDS:].argmax(1).tolist() == [0, 1, 3, 3]
    assert found.sum(1).tolist() == [2.0] * 4


def test_a_text_is_batched_by_length_and_padded_on_the_left():
    text = Text.of_contexts("questions", [[5], [6, 7, 8], [9, 10]])
    first, second = text.batches(2)
    assert first.ids.tolist() == [[6, 7, 8], [0, 9, 10]]
    assert first.mask.tolist() == [[True] * 3, [False, True, True]]
    assert second.ids.tolist() == [[5]]
    assert text.longest == 3
    sequences = Text.of_sequences("evaluation", torch.arange(12).reshape(3, 4))
    assert [batch.ids[:, 0].tolist() for batch in sequences.batches(2)] == [[0, 4], [8]]
    assert sequences.batches(3)[0].half == 2


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (Text("questions", ()), "0 contexts"),
        (Text("questions", ((3, 4, 5), ())), "2 contexts, the shortest of 0 tokens"),
        (Text("questions", ((3, 4),)), "contexts of 2 tokens leave nothing to map"),
        (
            Text("evaluation", ((3, 4, 5), (3, 4, 5, 6)), halved=True),
            "sequences of 3 to 4 tokens: expected equal",
        ),
    ],
)
def test_a_text_that_cannot_be_diagnosed_is_refused(text, problem):
    with pytest.raises(KvmapError, match=problem):
        text.check(n_own=1)


@pytest.mark.parametrize(
    ("n", "wanted", "expected"), [(6, 3, [0, 2, 4]), (3, 8, [0, 1, 2]), (7, 2, [0, 3]), (0, 4, [])]
)
def test_some_are_taken_evenly(n, wanted, expected):
    assert evenly(n, wanted) == expected
