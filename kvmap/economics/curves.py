"""Times by context length: exact where they were measured, a power of the length in between."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvmap.economics.errors import EconomicsError

Array: TypeAlias = npt.NDArray[np.float64]

BEYOND = ("refuse", "extend")
"""What becomes of a length outside of the measured ones."""
ARMS = ("source_prefill", "re_prefill", "hand_off", "source_token", "target_token")
SIZES = ("source_bytes", "mapped_bytes")


@dataclass(frozen=True)
class Latencies:
    """What the two models and the hand-off between them take, by context length T.

    Between two lengths T₁ < T₂ that are known, a quantity y is taken to be a power of the length:

        y(T) = y₁ · (T / T₁)^a,   a = log(y₂ / y₁) / log(T₂ / T₁)

    which is exact for y ∝ T and for y ∝ T². For a sum of these and a fixed cost, as prefills have, it is
    never too little, and the less too much the nearer the lengths lie: in the example of the tests 3 % at
    most where each is twice the one before, 11 % where it is four times that.

    Attributes:
        lengths: T, tokens of the context, rising.
        ms: by arm, the milliseconds of one batch at each length: `source_prefill` and `re_prefill` (token ids
            → a model's own cache), `hand_off` (the source's cache → the target's first logits, the map with
            it), `source_token` and `target_token` (one more token over a context of that length).
        n_bytes: by cache, `source_bytes` and `mapped_bytes` of one batch at each length.
        batch_size: contexts in a batch.
        origin: where these come from, in words.
        notes: what of it was assumed, in words.
        beyond: "refuse" lengths outside of the known ones, or "extend" the power of the nearest two to them.
    """

    lengths: Array
    ms: Mapping[str, Array]
    n_bytes: Mapping[str, Array]
    batch_size: int = 1
    origin: str = ""
    notes: tuple[str, ...] = ()
    beyond: str = "refuse"

    def __post_init__(self) -> None:
        """Refuse what no curve goes through.

        Raises:
            EconomicsError: no lengths, lengths that do not rise, a missing arm, or times not above 0.
        """
        lengths = self.lengths
        if lengths.ndim != 1 or not len(lengths) or not (lengths > 0).all() or (np.diff(lengths) <= 0).any():
            raise EconomicsError(f"lengths={lengths.tolist()}: expected rising numbers of tokens above 0")
        if self.batch_size < 1:
            raise EconomicsError(f"batch_size={self.batch_size}: expected at least 1")
        if self.beyond not in BEYOND:
            raise EconomicsError(f"beyond={self.beyond!r}: expected one of {', '.join(BEYOND)}")
        for names, values in ((ARMS, self.ms), (SIZES, self.n_bytes)):
            for name in names:
                if name not in values:
                    raise EconomicsError(
                        f"{self.origin or 'latencies'}: no {name}; expected {', '.join(names)}"
                    )
                _check_curve(name, values[name], lengths)

    def at(self, name: str, lengths: Array) -> Array:
        """Milliseconds of an arm, or bytes of a cache, for one batch of contexts of these lengths.

        Raises:
            EconomicsError: lengths outside of the known ones, where `beyond` is "refuse".
        """
        self._check_inside(lengths)
        return self._power(name, lengths)

    def saved_ms(self, lengths: Array) -> Array:
        """What a prefix of so many tokens saves the target that holds its cache: r(T), and r(0) = 0.

        Below the shortest known length it is that length's time in proportion to the tokens: a prefix that
        short is a part of a longer context, so no length is refused here.
        """
        shortest = self.lengths[0]
        inside = self._power("re_prefill", np.maximum(lengths, shortest))
        return np.where(lengths < shortest, inside * lengths / shortest, inside)

    def outside(self, lengths: Array) -> npt.NDArray[np.bool_]:
        """Which lengths are outside of the known ones."""
        return (lengths < self.lengths[0] * (1 - 1e-9)) | (lengths > self.lengths[-1] * (1 + 1e-9))

    def _check_inside(self, lengths: Array) -> None:
        outside = self.outside(lengths)
        if self.beyond == "refuse" and outside.any():
            low, high = lengths.min(), lengths.max()
            raise EconomicsError(
                f"contexts of {low:,.0f} to {high:,.0f} tokens: times are known from {self.lengths[0]:,.0f} "
                f"to {self.lengths[-1]:,.0f} alone. Measure longer and shorter ones, cut the contexts to "
                f"these lengths, or extend the curves (beyond=extend), as the results then say"
            )

    def _power(self, name: str, lengths: Array) -> Array:
        values = self.ms[name] if name in self.ms else self.n_bytes[name]
        if len(self.lengths) == 1:
            return values[0] * lengths / self.lengths[0]
        x, y = np.log(self.lengths), np.log(values)
        place = np.clip(np.searchsorted(self.lengths, lengths, side="right") - 1, 0, len(x) - 2)
        slope = np.diff(y) / np.diff(x)
        return np.exp(y[place] + slope[place] * (np.log(lengths) - x[place]))


def _check_curve(name: str, values: Array, lengths: Array) -> None:
    if values.shape != lengths.shape or not (np.isfinite(values) & (values > 0)).all():
        raise EconomicsError(
            f"{name}={values.tolist()}: expected {len(lengths)} finite numbers above 0, one for each length"
        )
