"""Tokenizers are compared by the ids they give."""

from __future__ import annotations

import pytest

from kvmap.models.loaded import LoadedModel
from kvmap.models.pair import ModelPair
from kvmap.models.tokenization import PROBES, TokenizerMismatch, check_tokenizers
from tests.models.tiny_tokenizers import MERGES, byte_level_tokenizer
from tests.tiny_random_models import FAMILIES


def test_equal_tokenizers_pass_also_with_other_padding():
    one = byte_level_tokenizer()
    other = byte_level_tokenizer(pad_token="</s>", padding_side="left", model_max_length=7)
    check_tokenizers(one, one)
    check_tokenizers(one, other)


def test_two_merges_in_another_order_are_refused_with_a_text_that_shows_it():
    swapped = (*MERGES[:3], MERGES[4], MERGES[3], MERGES[5])
    with pytest.raises(
        TokenizerMismatch, match=r"merge 3 is 'q' \+ 'x' and 'x' \+ 'z'; 'qxz' with special"
    ) as caught:
        check_tokenizers(byte_level_tokenizer(), byte_level_tokenizer(swapped))
    vocab = byte_level_tokenizer().get_vocab()
    assert f"[{vocab['qx']}, {vocab['z']}] for the source and [{vocab['q']}, {vocab['xz']}]" in str(
        caught.value
    )


def test_a_missing_merge_is_refused():
    with pytest.raises(TokenizerMismatch, match="'qx' with special"):
        check_tokenizers(byte_level_tokenizer(), byte_level_tokenizer([m for m in MERGES if m != ("q", "x")]))


def test_a_merge_that_a_probe_reaches_is_shown_by_that_probe():
    with pytest.raises(TokenizerMismatch, match="The quick brown fox"):
        check_tokenizers(byte_level_tokenizer(), byte_level_tokenizer(MERGES[:1] + MERGES[2:]))


def test_a_difference_in_bos_alone_is_refused():
    with pytest.raises(TokenizerMismatch, match=r"with special tokens is \[1\] for the source and \[\]"):
        check_tokenizers(byte_level_tokenizer(add_bos=True), byte_level_tokenizer())


def test_another_token_at_an_id_is_refused_naming_the_token():
    words = ["".join(merge) for merge in MERGES]
    swapped = byte_level_tokenizer(words=[words[1], words[0], *words[2:]])
    with pytest.raises(
        TokenizerMismatch, match=r"2 tokens have different ids, the first is 'th': 259 .*, 260"
    ):
        check_tokenizers(byte_level_tokenizer(), swapped)


def test_an_additional_token_is_refused():
    larger = byte_level_tokenizer()
    larger.add_tokens(["<new>"])
    with pytest.raises(TokenizerMismatch, match="'<new>': absent for the source, 265 for the target"):
        check_tokenizers(byte_level_tokenizer(), larger)


def test_another_eos_is_refused():
    with pytest.raises(TokenizerMismatch, match="eos_token_id is 2 for the source and 0 for the target"):
        check_tokenizers(byte_level_tokenizer(), byte_level_tokenizer(eos_token="<pad>"))


def test_another_normalisation_is_found_by_the_probes():
    from tokenizers import normalizers

    composed = byte_level_tokenizer()
    composed.backend_tokenizer.normalizer = normalizers.NFC()
    with pytest.raises(TokenizerMismatch):
        check_tokenizers(byte_level_tokenizer(), composed)


def test_models_of_different_padded_vocabulary_share_a_tokenizer():
    small, large = (
        LoadedModel.from_model(FAMILIES["qwen2"](vocab_size=size), byte_level_tokenizer())
        for size in (272, 320)
    )
    ModelPair(small, large).check()


def test_probes_cover_what_tokenizers_differ_in():
    text = "".join(PROBES)
    for sample in ("ё", "敏", "ب", "त", "0", "\t", "\n", "def ", "👩", "<|endoftext|>", "e\u0301"):
        assert sample in text
