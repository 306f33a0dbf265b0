"""What a gate answers to a request for a hand-off, and how often."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kvmap.causes import Status, Tally
from kvmap.transfer.handoff import HandOff


@dataclass(frozen=True, eq=False)
class Gated:
    """A context the target is ready to continue, and where it comes from.

    Attributes:
        status: "applied": mapped; "unsupported": these parts do not belong together, or no hand-off between
            them is possible; "fell_back": they do, and what came of it was not to be trusted.
        cause: one of `kvmap.causes.CAUSES`; None where applied.
        reason: the same in one line for people.
        hand_off: mapped where applied, else what `native` gives, bit for bit.
        canary_kl_nats: largest mean KL over the rows, see `kvmap.transfer.canary.canary_kl`; None where
            nothing was compared.
        n_compared: tokens a row that were compared.
        transfer_seconds: checks, map and the held-back tokens, as far as they went.
        native_seconds: what the target read itself, for the canary or to fall back on; None: nothing.
        canary_seconds: the comparison, beside that; None where nothing was compared.
    """

    status: Status
    cause: str | None
    reason: str
    hand_off: HandOff
    canary_kl_nats: float | None
    n_compared: int
    transfer_seconds: float
    native_seconds: float | None
    canary_seconds: float | None


@dataclass
class GateCounts(Tally):
    """What a gate has answered so far; may be shared by threads.

    Attributes:
        canaries: requests that were compared.
        max_kl_nats: the largest finite KL that was measured; None before the first.
        sum_kl_nats: of those that were finite, `n_finite` of them.
    """

    canaries: int = 0
    max_kl_nats: float | None = None
    sum_kl_nats: float = 0.0
    n_finite: int = 0

    def add(self, gated: Gated) -> None:
        """Count one answer."""
        with self._lock:
            self._count(gated.status, gated.cause)
            if (kl := gated.canary_kl_nats) is not None:
                self.canaries += 1
                if math.isfinite(kl):
                    self.n_finite += 1
                    self.sum_kl_nats += kl
                    self.max_kl_nats = kl if self.max_kl_nats is None else max(kl, self.max_kl_nats)

    @property
    def mean_kl_nats(self) -> float | None:
        """Over the requests whose KL was finite; None before the first.

        One request's KL over a few tokens scatters by an order of magnitude. The mean over many shows a
        damage that no single one does.
        """
        return self.sum_kl_nats / self.n_finite if self.n_finite else None

    def record(self) -> dict[str, Any]:
        """As JSON can hold it."""
        with self._lock:
            return {
                **self._counted(),
                "canaries": self.canaries,
                "mean_kl_nats": self.mean_kl_nats,
                "max_kl_nats": self.max_kl_nats,
            }
