"""Documents in, token blocks out: disjoint splits and a fingerprint of what was read."""

from kvmap.data.blocks import CorpusTooShort, TokenBlocks, prompt_prefix, token_blocks
from kvmap.data.splits import OverlappingData, check_disjoint, split_sequences
from kvmap.data.texts import TextSpec, UnreadableCorpus, read_json_lines, read_texts

__all__ = [
    "CorpusTooShort",
    "OverlappingData",
    "TextSpec",
    "TokenBlocks",
    "UnreadableCorpus",
    "check_disjoint",
    "prompt_prefix",
    "read_json_lines",
    "read_texts",
    "split_sequences",
    "token_blocks",
]
