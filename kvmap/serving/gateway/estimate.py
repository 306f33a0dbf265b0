"""How long the target takes to read a prompt by itself, learnt from prompts that it has so read."""

from __future__ import annotations

import statistics
from collections import deque

#: prompts that are remembered, the latest
REMEMBERED = 64
#: prompts, and the ratio of the longest to the shortest, from which on a line is drawn through them
LEAST, SPREAD = 4, 1.5
#: within this share of a length, prompts count as of that length
NEAR = 0.25


class PrefillEstimate:
    """Seconds to the first token over prompt tokens: ``t = a + b n``, a and b ≥ 0, by least squares.

    Only what the target read itself counts, caches of its own left out: the rest would say that reading is
    cheap. Before there are `LEAST` prompts of different lengths, a length near those seen gets their median,
    and any other none.
    """

    def __init__(self) -> None:
        """Nothing learnt yet."""
        self._seen: deque[tuple[int, float]] = deque(maxlen=REMEMBERED)

    def add(self, n_tokens: int, seconds: float) -> None:
        """A prompt the target has read by itself: tokens not in its cache, seconds to the first token."""
        if n_tokens > 0 and seconds > 0:
            self._seen.append((n_tokens, seconds))

    def seconds(self, n_tokens: int) -> float | None:
        """For a prompt of that many tokens; None where nothing is known."""
        lengths = [n for n, _ in self._seen]
        if len(lengths) >= LEAST and max(lengths) >= SPREAD * min(lengths):
            slope, intercept = statistics.linear_regression(lengths, [t for _, t in self._seen])
            if slope > 0:
                if intercept < 0:
                    slope, intercept = _through_zero(self._seen), 0.0
                return intercept + slope * n_tokens
        near = [t for n, t in self._seen if abs(n - n_tokens) <= NEAR * n_tokens]
        return statistics.median(near) if near else None


def _through_zero(seen: deque[tuple[int, float]]) -> float:
    """Slope of the line of least squares through the origin."""
    return sum(n * t for n, t in seen) / sum(n * n for n, _ in seen)
