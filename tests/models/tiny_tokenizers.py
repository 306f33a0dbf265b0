"""Small byte-level BPE tokenizers built in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

SPECIALS = ("<pad>", "<s>", "</s>")
MERGES = (("t", "h"), ("th", "e"), ("i", "n"), ("q", "x"), ("x", "z"), ("Ġ", "t"))


def byte_level_tokenizer(
    merges: Sequence[tuple[str, str]] = MERGES,
    *,
    words: Sequence[str] | None = None,
    add_bos: bool = False,
    **settings: Any,
) -> PreTrainedTokenizerFast:
    """A tokenizer of 3 specials, 256 bytes and one token per merge of `MERGES` (or `words`)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    products = words if words is not None else ["".join(merge) for merge in MERGES]
    vocab = {token: index for index, token in enumerate([*SPECIALS, *alphabet, *products])}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", vocab["<s>"])]
        )
    named = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", **settings}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)
