"""Documents to token blocks: equal lengths, no padding, and a fingerprint of exactly what was read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from kvmap.data.splits import split_sequences
from kvmap.errors import KvmapError, UnknownName
from kvmap.progress import track

PACKINGS = ("document", "packed")


class CorpusTooShort(KvmapError):
    """A corpus that does not hold as many sequences of that length as were asked for."""


@dataclass(frozen=True, eq=False)
class TokenBlocks:
    """Token sequences of equal length, without padding.

    Attributes:
        input_ids: (n_sequences, length) int64.
        source: one line that says which corpus this was.
        fingerprint: SHA-256 of shape and ids; the same in every process.
        text_digests: one SHA-256 per sequence, of its ids.
        documents: per sequence, the SHA-256 of each document that it holds tokens of.
        n_read: documents taken from the corpus, the skipped ones included. A later reader of the same
            corpus that skips this many shares no document with this one.
    """

    input_ids: Tensor
    source: str
    fingerprint: str
    text_digests: tuple[str, ...]
    documents: tuple[tuple[str, ...], ...]
    n_read: int = 0

    @property
    def n_sequences(self) -> int:
        """Number of sequences."""
        return self.input_ids.shape[0]

    @property
    def length(self) -> int:
        """Tokens per sequence."""
        return self.input_ids.shape[1]

    def split(self, held_out_share: float, seed: int) -> tuple[list[int], list[int]]:
        """Indices of the fit and of the held-out sequences; no document has tokens in both."""
        return split_sequences(self.n_sequences, held_out_share, seed, documents=self.documents)


def token_blocks(
    texts: Iterable[str],
    tokenizer: Any,
    *,
    n_sequences: int,
    length: int,
    packing: str,
    skip: int = 0,
    source: str = "",
) -> TokenBlocks:
    """Cuts documents into `n_sequences` sequences of `length` tokens.

    Tokens are those the tokenizer gives by default, its BOS included where it adds one, so that a block is
    what a prefill of that text would read. A document that occurs twice is used once.

    Args:
        texts: the documents; read no further than needed.
        tokenizer: a transformers tokenizer.
        n_sequences: sequences to make.
        length: tokens in each.
        packing: `document`: the first `length` tokens of every document that has so many. `packed`: documents
            joined, with the tokenizer's EOS (else BOS) between them, and cut. There a document's tail is
            dropped where it would not fill a block, so that two blocks share a document only if both hold
            nothing else after it.
        skip: documents to leave out first.
        source: what to call the corpus.

    Raises:
        CorpusTooShort: names how many sequences of what length were asked for and found, and the remedy.
        UnknownName: no such packing.
    """
    if packing not in PACKINGS:
        raise UnknownName("packing", packing, PACKINGS)
    if n_sequences < 1 or length < 1 or skip < 0:
        raise KvmapError(
            f"n_sequences={n_sequences}, length={length}, skip={skip}: expected at least 1, 1 and 0"
        )
    reader = _Reader(texts, skip)
    cut = _one_per_document if packing == "document" else _packed
    rows: list[list[int]] = []
    documents: list[tuple[str, ...]] = []
    wanted = islice(cut(reader, tokenizer, length), n_sequences)
    for ids, digests in track(wanted, n_sequences, "tokens: sequences"):
        rows.append(ids)
        documents.append(digests)
    if len(rows) < n_sequences:
        raise _too_short(reader, packing, source, asked=n_sequences, found=len(rows), length=length)
    input_ids = torch.tensor(rows, dtype=torch.int64)
    return TokenBlocks(
        input_ids=input_ids,
        source=source,
        fingerprint=digest_ids(input_ids),
        text_digests=tuple(digest_ids(row) for row in input_ids),
        documents=tuple(documents),
        n_read=reader.n_read,
    )


def digest_ids(ids: Tensor) -> str:
    """SHA-256 of the shape and the ids as little-endian int64; does not depend on the process or machine."""
    digest = hashlib.sha256(repr(tuple(ids.shape)).encode())
    digest.update(ids.to("cpu", torch.int64).contiguous().numpy().astype("<i8").tobytes())
    return digest.hexdigest()


class _Reader:
    """Documents that are not blank and occur for the first time, with their digests, counted as read."""

    def __init__(self, texts: Iterable[str], skip: int) -> None:
        self.texts = iter(texts)
        self.skip = skip
        self.n_read = 0
        self.n_tokens = 0
        self.longest = 0

    def __iter__(self) -> Iterator[tuple[str, str]]:
        seen: set[str] = set()
        for text in self.texts:
            self.n_read += 1
            digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
            if self.n_read <= self.skip or digest in seen or not text.strip():
                continue
            seen.add(digest)
            yield text, digest

    def count(self, ids: list[int]) -> None:
        self.n_tokens += len(ids)
        self.longest = max(self.longest, len(ids))


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, verbose=False)["input_ids"])


def _one_per_document(
    reader: _Reader, tokenizer: Any, length: int
) -> Iterator[tuple[list[int], tuple[str, ...]]]:
    for text, digest in reader:
        ids = _encode(tokenizer, text)
        reader.count(ids)
        if len(ids) >= length:
            yield ids[:length], (digest,)


def _packed(reader: _Reader, tokenizer: Any, length: int) -> Iterator[tuple[list[int], tuple[str, ...]]]:
    prefix = prompt_prefix(tokenizer)
    separator = _separator(tokenizer, prefix)
    block: list[int] = []
    held: list[str] = []
    for text, digest in reader:
        ids = _encode(tokenizer, text)
        reader.count(ids)
        if separator and ids[-1:] != separator:
            ids += separator
        start = 0
        while start < len(ids):
            if not block and start:
                if len(ids) - start + len(prefix) < length:
                    break
                block = list(prefix)
            stop = start + length - len(block)
            block += ids[start:stop]
            held.append(digest)
            start = stop
            if len(block) == length:
                yield block, tuple(held)
                block, held = [], []


def prompt_prefix(tokenizer: Any) -> list[int]:
    """The tokens that this tokenizer puts before any text by default: [BOS], or nothing."""
    bos = tokenizer.bos_token_id
    ids = _encode(tokenizer, "a")
    return [bos] if bos is not None and ids[:1] == [bos] else []


def _separator(tokenizer: Any, prefix: list[int]) -> list[int]:
    """What goes between packed documents where the tokenizer's own BOS does not part them already."""
    if prefix:
        return []
    for special in (tokenizer.eos_token_id, tokenizer.bos_token_id):
        if special is not None:
            return [special]
    return []


def _too_short(
    reader: _Reader, packing: str, source: str, *, asked: int, found: int, length: int
) -> CorpusTooShort:
    n_used = max(0, reader.n_read - reader.skip)
    if n_used == 0:
        holds = f"it has {reader.n_read} documents and skip={reader.skip} leaves none"
    else:
        holds = f"{n_used} documents, {reader.n_tokens} tokens, the longest {reader.longest}"
    remedy = "ask for fewer or shorter sequences, lower `skip`, or give a larger corpus"
    if packing == "document" and reader.n_tokens >= length:
        remedy += "; packing=packed joins short documents"
    return CorpusTooShort(
        f"corpus {source or '(unnamed)'} is too short: asked for {asked} sequences of {length} tokens "
        f"({packing}), found {found} ({holds}). Remedy: {remedy}"
    )
