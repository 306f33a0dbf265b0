"""What is measured: how a request is served, at which context length and concurrency."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

PUBLISH, REPREFILL, WARM, COLD = "publish", "re_prefill", "hand_off_warm", "hand_off_cold"


@dataclass(frozen=True)
class Point:
    """One measurement.

    Attributes:
        mode: `publish` (the source reads and publishes), `re_prefill` (the target reads), `hand_off_warm`
            (the target takes what the source has published).
        n_tokens: of each prompt.
        concurrency: requests at a time.
        n_requests: in all.
        n_output: tokens that are generated of each.
        seed: of the prompts; the same seed and size are the same prompts.
    """

    mode: str
    n_tokens: int
    concurrency: int
    n_requests: int
    n_output: int
    seed: int

    @property
    def asked(self) -> dict[str, object] | None:
        """The object `kvmap` of its requests; None of plain ones."""
        if self.mode == PUBLISH:
            return {"publish": True}
        return {"take": True} if self.mode == WARM else None


def grid(
    lengths: Sequence[int],
    concurrencies: Sequence[int],
    *,
    n_requests: int,
    n_output: int,
    repeats: int,
    seed: int,
) -> Iterator[list[Point]]:
    """For each length, concurrency and repeat the points in the order in which they are run.

    Re-prefill comes first, on prompts of its own: an engine that keeps prefixes must not have seen them, nor
    those of the hand-off that follows. Modes alternate within a repeat, so that a drift of the machine meets
    all of them.
    """
    for number, (_, n_tokens, concurrency) in enumerate(product(range(repeats), lengths, concurrencies)):
        n = max(n_requests, concurrency)
        first = seed + 2 * number
        yield [
            Point(REPREFILL, n_tokens, concurrency, n, n_output, first + 1),
            Point(PUBLISH, n_tokens, concurrency, n, 1, first),
            Point(WARM, n_tokens, concurrency, n, n_output, first),
        ]
