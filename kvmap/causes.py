"""What came of requests for a hand-off, and why; without torch, for what only sends them on."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

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


@dataclass
class Tally:
    """Requests by status and cause; may be shared by threads.

    Attributes:
        applied, fell_back, unsupported: requests by status.
        by_cause: requests by cause, those applied left out.
    """

    applied: int = 0
    fell_back: int = 0
    unsupported: int = 0
    by_cause: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @property
    def requests(self) -> int:
        """All that were counted."""
        return self.applied + self.fell_back + self.unsupported

    def _count(self, status: Status, cause: str | None) -> None:
        """Count one; whoever calls it holds the lock."""
        setattr(self, status, getattr(self, status) + 1)
        if cause is not None:
            self.by_cause[cause] += 1

    def _counted(self) -> dict[str, Any]:
        """As JSON can hold it; whoever calls it holds the lock."""
        return {
            "requests": self.requests,
            "applied": self.applied,
            "fell_back": self.fell_back,
            "unsupported": self.unsupported,
            "by_cause": dict(sorted(self.by_cause.items())),
        }
