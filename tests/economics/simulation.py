"""A discrete-event simulation of one request: the slow oracle of what policies take.

It knows nothing of `kvmap.economics.policies`: events on a clock, seconds added up as devices are held.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

Arm = Callable[[str], float]
"""Milliseconds, or bytes, of a quantity at the request's length."""


@dataclass
class Request:
    """One request on its way, and what it has held so far.

    Attributes:
        policy: of `POLICIES`.
        escalates: whether the source's answer does not stand.
        at: times of the pair at this context's length; saved: what the target's cached prefix saves.
    """

    policy: str
    escalates: bool
    at: Arm
    saved: float
    output_tokens: int
    judged_after: int
    gbit_per_s: float | None
    link_ms: float
    sent: str
    discount: float
    shown_at: float | None = None
    source_ms: float = 0.0
    target_ms: float = 0.0
    gbytes: float = 0.0
    events: list[tuple[float, int, str]] = field(default_factory=list)

    def run(self) -> Request:
        """Until nothing is left to happen."""
        self.then(0.0, "arrive")
        while self.events:
            now, _, name = heapq.heappop(self.events)
            getattr(self, name)(now)
        return self

    def then(self, when: float, name: str) -> None:
        heapq.heappush(self.events, (when, len(self.events), name))

    def arrive(self, now: float) -> None:
        if self.policy == "always_large":
            self.hold_target(self.at("re_prefill"))
            self.then(now + self.at("re_prefill"), "target_first")
            return
        self.hold_source(self.at("source_prefill"))
        self.then(now + self.at("source_prefill"), "source_first")

    def source_first(self, now: float) -> None:
        self.written, self.judged = 1, self.policy == "always_small"
        if self.judged:
            self.shown_at = now
        self.then(now, "source_next")

    def source_next(self, now: float) -> None:
        if not self.judged and self.written == self.judged_after:
            self.judged = True
            if self.escalates:
                self.then(now, "escalate")
                return
            self.shown_at = now
        if self.written == self.output_tokens:
            return
        self.written += 1
        self.hold_source(self.at("source_token"))
        self.then(now + self.at("source_token"), "source_next")

    def escalate(self, now: float) -> None:
        if self.policy == "hand_off_cold":
            self.hold_source(self.at("source_prefill"))
            self.then(now + self.at("source_prefill"), "send")
        elif self.policy == "hand_off_warm":
            self.then(now, "send")
        else:
            took = self.at("re_prefill")
            cached = self.saved if self.policy == "cached_re_prefill" else 0.0
            self.hold_target(took - self.discount * cached)
            self.then(now + took - cached, "target_first")

    def send(self, now: float) -> None:
        if self.gbit_per_s is not None:
            bits = 8 * self.at(f"{self.sent}_bytes")
            now += 1000 * bits / (self.gbit_per_s * 1e9) + self.link_ms
            self.gbytes += bits / 8e9
        self.then(now, "take_over")

    def take_over(self, now: float) -> None:
        self.hold_target(self.at("hand_off"))
        self.then(now + self.at("hand_off"), "target_first")

    def target_first(self, now: float) -> None:
        self.shown_at = now
        self.remaining = self.output_tokens - 1
        self.then(now, "target_next")

    def target_next(self, now: float) -> None:
        if self.remaining:
            self.remaining -= 1
            self.hold_target(self.at("target_token"))
            self.then(now + self.at("target_token"), "target_next")

    def hold_source(self, ms: float) -> None:
        self.source_ms += ms

    def hold_target(self, ms: float) -> None:
        self.target_ms += ms
