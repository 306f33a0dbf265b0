"""What arms scored of sequences: sums over the scored tokens of each, by arm."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvmap.evaluation.answers import CONTENT_CHARACTERS


@dataclass(frozen=True)
class PerplexityResult:
    """One arm over all sequences; every list has one entry per sequence, in the order of the blocks.

    Attributes:
        arm: which arm.
        nll: summed negative log-likelihood of the scored tokens, nats.
        n_tokens: scored tokens.
        kl: summed KL(native ‖ arm) of the next-token distributions at the scored positions, nats; nan where
            it could not be had.
        agreement: positions whose likeliest token is native's.
        sequence: number of each sequence among the blocks; empty: all of them, in order.
        content: hash of each sequence's prefix and continuation, by which runs know that they scored the
            same; empty where it is not known.
        n_mapped: prefix tokens that were mapped; empty where it is not known.
    """

    arm: str
    nll: tuple[float, ...]
    n_tokens: tuple[int, ...]
    kl: tuple[float, ...]
    agreement: tuple[int, ...]
    sequence: tuple[int, ...] = ()
    content: tuple[str, ...] = ()
    n_mapped: tuple[int, ...] = ()

    @property
    def nll_sum(self) -> float:
        """Over all sequences, nats."""
        return math.fsum(self.nll)

    @property
    def perplexity(self) -> float:
        """exp(Σ NLL / Σ tokens); infinite where that overflows."""
        mean = self.nll_sum / sum(self.n_tokens)
        return math.exp(mean) if mean < 700 else math.inf if not math.isnan(mean) else math.nan

    def rows(self) -> list[dict[str, Any]]:
        """One row per sequence."""
        n = len(self.nll)
        numbers, contents = self.sequence or range(n), self.content or ("",) * n
        mapped = self.n_mapped or (None,) * n
        columns = zip(
            numbers, contents, mapped, self.nll, self.n_tokens, self.kl, self.agreement, strict=True
        )
        return [
            {
                "arm": self.arm,
                "sequence": number,
                "nll_nats": nll,
                "n_tokens": n_tokens,
                "kl_nats": kl,
                "agreement": same,
                "n_mapped": n_mapped,
                "content": content,
            }
            for number, content, n_mapped, nll, n_tokens, kl, same in columns
        ]


@dataclass
class SequenceScore:
    """Sums over the scored tokens of one sequence under one arm, and how many of its prefix were mapped."""

    nll: float = 0.0
    n_tokens: int = 0
    kl: float = 0.0
    agreement: int = 0
    n_mapped: int = 0


def result_of(arm: str, rows: Mapping[int, SequenceScore], keys: Sequence[str]) -> PerplexityResult:
    """An arm's scores by number of the sequence as its result; keys of all sequences say what was asked."""
    numbers = sorted(rows)
    ordered = [rows[number] for number in numbers]
    return PerplexityResult(
        arm=arm,
        nll=tuple(row.nll for row in ordered),
        n_tokens=tuple(row.n_tokens for row in ordered),
        kl=tuple(row.kl for row in ordered),
        agreement=tuple(row.agreement for row in ordered),
        sequence=tuple(numbers),
        n_mapped=tuple(row.n_mapped for row in ordered),
        content=tuple(keys[number][:CONTENT_CHARACTERS] for number in numbers),
    )
