from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from kvmap.errors import KvmapError
from kvmap.evaluation.encoding import encode_item, left_pad
from kvmap.evaluation.items import Item
from kvmap.zoo.tokenizer import build_tokenizer

TEXT = ["the answer is red", "the answer is blue", "is it red ? yes or no", "Yes it is red . No it is blue"]


@pytest.fixture(scope="module")
def merges():
    """A byte-level BPE, where a space belongs to the word after it."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(vocab_size=330, show_progress=False, initial_alphabet=ByteLevel.alphabet())
    tokenizer.train_from_iterator(TEXT, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def lm_eval_pair(tokenizer, context, continuation):
    """The rule of lm_eval.api.model.TemplateLM._encode_pair, told with one slice."""
    n_spaces = len(context) - len(context.rstrip())
    if n_spaces > 0:
        continuation = context[-n_spaces:] + continuation
        context = context[:-n_spaces]
    whole = tokenizer(context + continuation)["input_ids"]
    alone = tokenizer(context)["input_ids"]
    return alone, whole[len(alone) :]


@pytest.mark.parametrize("context", ["the answer is", "the answer is ", "the answer is \n", "red ?"])
@pytest.mark.parametrize("choices", [(" red", " blue"), ("red", "blue"), ("d", " yes or no")])
def test_ids_are_those_of_lm_evals_joint_encoding(merges, context, choices):
    item = Item("task", "1", context, choices, 0)
    encoded = encode_item(merges, item, max_tokens=100)
    for choice, ids in zip(choices, encoded.choice_ids, strict=True):
        expected_context, expected = lm_eval_pair(merges, context, choice)
        assert list(encoded.context_ids) == expected_context
        assert list(ids) == expected


def test_a_trailing_space_moves_to_the_continuation(merges):
    with_space = encode_item(merges, Item("task", "1", "the answer is ", ("red", "blue"), 0), 100)
    without = encode_item(merges, Item("task", "1", "the answer is", (" red", " blue"), 0), 100)
    assert with_space == without


def test_one_truncation_from_the_left_leaves_room_for_the_longest_choice_and_is_counted():
    tokenizer = build_tokenizer(64)
    item = Item("task", "1", "nobody said a word .", (" nobody", " then it grew"), 0)
    full = encode_item(tokenizer, item, max_tokens=64)
    assert full.n_truncated == 0
    cut = encode_item(tokenizer, item, max_tokens=7)
    assert cut.context_ids == full.context_ids[-4:]
    assert cut.n_truncated == len(full.context_ids) - 4
    assert cut.choice_ids == full.choice_ids


def test_choices_that_leave_no_room_or_have_no_token_are_refused(merges):
    item = Item("task", "line 3", "the answer is", (" red", " yes or no"), 0)
    with pytest.raises(KvmapError, match=r"task, line 3.*max_tokens=3"):
        encode_item(merges, item, max_tokens=3)
    with pytest.raises(KvmapError, match=r"line 3: choice 'd'"):
        encode_item(merges, Item("task", "line 3", "is it re", ("d", " blue"), 0), max_tokens=30)


def test_left_padding_keeps_every_token_and_says_which_are_real():
    ids, mask = left_pad([[5, 6, 7], [8]], pad_id=0)
    assert ids.tolist() == [[5, 6, 7], [0, 0, 8]]
    assert mask.tolist() == [[True, True, True], [False, False, True]]
    assert ids.dtype == torch.int64
