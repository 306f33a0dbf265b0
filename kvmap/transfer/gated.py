"""What a gate answers to a request for a hand-off, and how often."""

from __future__ import annotations

import math
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from kvmap.transfer.handoff import HandOff

Status: TypeAlias = Literal["applied", "fell_back", "unsupported"]

#: why nothing mapped was handed on, and which status that is
CAUSES: dict[str, Status] = {
    "mismatch": "unsupported",
    "unknown_origin": "unsupported",
    "verdict": "fell_back",
    "mapper_file": "fell_back",
    "cache_file": "fell_back",
    "empty_layer": "fell_back",
    "not_finite": "fell_back",
    "clamped": "fell_back",
    "canary": "fell_back",
    "failure": "fell_back",
}


@dataclass(frozen=True, eq=False)
class Gated:
    """A context the target is ready to continue, and where it comes from.

    Attributes:
        status: "applied": mapped; "unsupported": these parts do not belong together, or no hand-off between
            them is possible; "fell_back": they do, and what came of it was not to be trusted.
        cause: one of `CAUSES`; None where applied.
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
class GateCounts:
    """What a gate has answered so far; may be shared by threads.

    Attributes:
        applied, fell_back, unsupported: requests by status.
        canaries: requests that were compared.
        by_cause: requests by cause, those applied left out.
        max_kl_nats: the largest finite KL that was measured; None before the first.
        sum_kl_nats: of those that were finite, `n_finite` of them.
    """

    applied: int = 0
    fell_back: int = 0
    unsupported: int = 0
    canaries: int = 0
    by_cause: Counter[str] = field(default_factory=Counter)
    max_kl_nats: float | None = None
    sum_kl_nats: float = 0.0
    n_finite: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, gated: Gated) -> None:
        """Count one answer."""
        with self._lock:
            setattr(self, gated.status, getattr(self, gated.status) + 1)
            if gated.cause is not None:
                self.by_cause[gated.cause] += 1
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

    @property
    def requests(self) -> int:
        """All that were counted."""
        return self.applied + self.fell_back + self.unsupported

    def record(self) -> dict[str, Any]:
        """As JSON can hold it."""
        with self._lock:
            return {
                "requests": self.requests,
                "applied": self.applied,
                "fell_back": self.fell_back,
                "unsupported": self.unsupported,
                "canaries": self.canaries,
                "by_cause": dict(sorted(self.by_cause.items())),
                "mean_kl_nats": self.mean_kl_nats,
                "max_kl_nats": self.max_kl_nats,
            }
