"""The one tokenizer of the family: a word is a token, and every text starts with BOS."""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from kvmap.zoo.words import vocabulary

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")


def build_tokenizer(max_positions: int) -> PreTrainedTokenizerFast:
    """Words split at white space, ids in a fixed order; decoding joins with single spaces.

    Args:
        max_positions: longest sequence the models take.
    """
    words = {word: number for number, word in enumerate((*SPECIAL, *vocabulary()))}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", words["<bos>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
    )
