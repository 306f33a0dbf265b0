from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from kvmap.data import CorpusTooShort, OverlappingData, check_disjoint, split_sequences, token_blocks
from kvmap.errors import KvmapError, UnknownName
from kvmap.zoo.tokenizer import build_tokenizer

BOS, EOS = 1, 2


@pytest.fixture(scope="module")
def with_bos():
    return build_tokenizer(512)


@pytest.fixture(scope="module")
def letters():
    """One id per letter, no BOS, EOS = 2."""
    words = {"<pad>": 0, "<bos>": BOS, "<eos>": EOS} | {chr(97 + n): 3 + n for n in range(26)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


def spell(text: str) -> list[int]:
    return [3 + ord(letter) - 97 for letter in text]


def test_document_packing_takes_the_first_tokens_of_every_long_enough_document(letters):
    blocks = token_blocks(["a b", "c d e f", "g h i"], letters, n_sequences=2, length=3, packing="document")
    assert blocks.input_ids.tolist() == [spell("cde"), spell("ghi")]
    assert blocks.input_ids.dtype == torch.int64
    assert blocks.n_read == 3
    assert (blocks.n_sequences, blocks.length) == (2, 3)


def test_blocks_are_counted_and_no_document_is_read_after_the_last(letters, caplog):
    texts = iter(["a b c", "d e f", "g h i", "j k l"])
    with caplog.at_level("INFO", "kvmap.progress"):
        blocks = token_blocks(texts, letters, n_sequences=2, length=3, packing="document")
    (line,) = caplog.messages
    assert line.startswith("tokens: sequences: 2 done in")
    assert blocks.n_read == 2
    assert next(texts) == "g h i"


def test_a_block_starts_as_a_prefill_of_that_text_would(with_bos):
    blocks = token_blocks(["nobody said a word ."], with_bos, n_sequences=1, length=5, packing="document")
    assert blocks.input_ids.tolist() == [with_bos("nobody said a word .")["input_ids"][:5]]
    assert blocks.input_ids[0, 0] == BOS


def test_packed_documents_are_parted_by_eos_and_the_tail_that_fills_no_block_is_dropped(letters):
    texts = ["a b", "c d e", "g h i j k l m n o p q"]
    blocks = token_blocks(texts, letters, n_sequences=4, length=4, packing="packed")
    assert blocks.input_ids.tolist() == [
        [*spell("ab"), EOS, *spell("c")],
        spell("ghij"),
        spell("klmn"),
        [*spell("opq"), EOS],
    ]
    first, *rest = blocks.documents
    assert len(first) == 2
    assert len(set(rest)) == 1
    assert not set(first) & set(rest[0])


def test_packed_blocks_each_start_with_the_bos_that_the_tokenizer_adds(with_bos):
    text = "nobody said a word . then it grew dark outside ."
    blocks = token_blocks([text], with_bos, n_sequences=2, length=6, packing="packed")
    ids = with_bos(text)["input_ids"]
    assert blocks.input_ids.tolist() == [ids[:6], [BOS, *ids[6:11]]]


def test_skip_leaves_out_the_documents_that_an_earlier_reader_took(letters):
    texts = [f"{a} {b} c" for a in "abcd" for b in "efgh"]
    early = token_blocks(texts, letters, n_sequences=4, length=3, packing="document")
    late = token_blocks(texts, letters, n_sequences=4, length=3, packing="document", skip=early.n_read)
    check_disjoint(early, late)
    assert late.input_ids.tolist() == [spell(f"{a}{b}c") for a in "b" for b in "efgh"]


def test_a_document_that_occurs_twice_is_used_once(letters):
    blocks = token_blocks(
        ["a b c", "a b c", "  ", "d e f"], letters, n_sequences=2, length=3, packing="document"
    )
    assert blocks.input_ids.tolist() == [spell("abc"), spell("def")]
    assert blocks.n_read == 4


@pytest.mark.parametrize("texts", [[], ["a b c", "d e"]])
def test_a_short_corpus_says_what_was_asked_and_found_and_what_to_do(letters, texts):
    with pytest.raises(
        CorpusTooShort, match=r"mine.*asked for 5 sequences of 3 tokens.*found \d.*Remedy: ask for"
    ):
        token_blocks(texts, letters, n_sequences=5, length=3, packing="document", source="mine")


def test_a_corpus_of_short_documents_is_told_of_packing(letters):
    with pytest.raises(CorpusTooShort, match=r"found 0 .*longest 2.*packing=packed"):
        token_blocks(["a b", "c d"], letters, n_sequences=1, length=4, packing="document")


@pytest.mark.parametrize("wrong", [{"n_sequences": 0}, {"length": 0}, {"skip": -1}])
def test_impossible_sizes_are_refused(letters, wrong):
    with pytest.raises(KvmapError, match="expected at least"):
        token_blocks(["a b"], letters, **({"n_sequences": 1, "length": 1, "packing": "document"} | wrong))


def test_an_unknown_packing_is_refused(letters):
    with pytest.raises(UnknownName, match="Did you mean 'packed'"):
        token_blocks(["a b"], letters, n_sequences=1, length=1, packing="pack")


def test_the_same_text_in_calibration_and_evaluation_is_refused(letters):
    ours = token_blocks(
        ["a b c", "d e f"], letters, n_sequences=2, length=3, packing="document", source="ours"
    )
    theirs = token_blocks(["d e f", "g h i"], letters, n_sequences=2, length=3, packing="document")
    with pytest.raises(
        OverlappingData, match=rf"2 documents or sequences.*sha256 {ours.documents[1][0]}.*skip"
    ):
        check_disjoint(ours, theirs)


def test_documents_that_differ_only_past_the_block_count_as_the_same(letters):
    ours = token_blocks(["a b c d"], letters, n_sequences=1, length=3, packing="document")
    theirs = token_blocks(["a b c e"], letters, n_sequences=1, length=3, packing="document")
    with pytest.raises(OverlappingData):
        check_disjoint(ours, theirs)


@pytest.mark.slow
def test_fingerprints_are_the_same_in_every_process(letters):
    code = (
        "from kvmap.data import token_blocks\n"
        "from kvmap.zoo.tokenizer import build_tokenizer\n"
        "blocks = token_blocks(['nobody said a word .'], build_tokenizer(8), n_sequences=1, length=4,"
        " packing='document')\n"
        "print(blocks.fingerprint, *blocks.text_digests, *blocks.documents[0])"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "7")
    }
    assert len(printed) == 1
    assert len(printed.pop().split()[0]) == 64


def test_the_fingerprint_tells_ids_and_shapes_apart(letters):
    def cut(texts, length):
        count = 6 // length
        return token_blocks(texts, letters, n_sequences=count, length=length, packing="document").fingerprint

    assert len({cut(["a b c d e f"], 6), cut(["a b c", "d e f"], 3), cut(["d e f", "a b c"], 3)}) == 3


def test_a_split_is_by_sequence_disjoint_complete_and_seeded():
    fit, held_out = split_sequences(10, 0.3, seed=1)
    assert sorted(fit + held_out) == list(range(10))
    assert len(held_out) == 3
    assert (fit, held_out) == split_sequences(10, 0.3, seed=1)
    assert held_out != split_sequences(10, 0.3, seed=2)[1]
    assert split_sequences(10, 0, seed=1) == (list(range(10)), [])


@pytest.mark.parametrize(
    ("n", "share", "held_out"), [(2, 0.01, 1), (2, 0.99, 1), (3, 0.5, 2), (100, 0.2, 20)]
)
def test_neither_side_of_a_split_is_empty(n, share, held_out):
    assert len(split_sequences(n, share, seed=0)[1]) == held_out


@pytest.mark.parametrize("seed", range(5))
def test_sequences_of_one_document_stay_on_one_side(seed):
    documents = [("a", "b"), ("b",), ("c",), ("d", "e"), ("e", "f"), ("f",), ("g",), ("h",)]
    fit, held_out = split_sequences(8, 0.4, seed, documents=documents)
    assert sorted(fit + held_out) == list(range(8))
    assert held_out
    assert not {d for i in fit for d in documents[i]} & {d for i in held_out for d in documents[i]}


def test_one_document_alone_cannot_be_split(letters):
    blocks = token_blocks(["a b c d e f"], letters, n_sequences=2, length=3, packing="packed")
    with pytest.raises(OverlappingData, match="one document"):
        blocks.split(0.5, seed=0)


@pytest.mark.parametrize(("n", "share"), [(4, 1.0), (4, -0.1), (1, 0.5)])
def test_an_impossible_split_is_refused(n, share):
    with pytest.raises(KvmapError, match="held_out_share"):
        split_sequences(n, share, seed=0)
