"""What is measured: how a request is served, at which context length and concurrency."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal, TypeAlias

Whom: TypeAlias = Literal["source", "target", "gateway"]

PUBLISH, REPREFILL, WARM, COLD = "publish", "re_prefill", "hand_off_warm", "hand_off_cold"
GATEWAY_PUBLISH, GATEWAY_REPREFILL = "gateway_publish", "gateway_re_prefill"
GATEWAY_COLD, GATEWAY_WARM = "gateway_hand_off_cold", "gateway_hand_off_warm"

#: in the order in which they are run, with the number of their prompts within a round
_MODES = ((REPREFILL, 1), (PUBLISH, 0), (WARM, 0))
_GATEWAY_MODES = (*_MODES, (GATEWAY_REPREFILL, 2), (GATEWAY_COLD, 3), (GATEWAY_PUBLISH, 4), (GATEWAY_WARM, 4))

#: object `kvmap` of a request to an engine
_OF_AN_ENGINE: dict[str, dict[str, object]] = {
    PUBLISH: {"publish": True},
    GATEWAY_PUBLISH: {"publish": True},
    WARM: {"take": True},
}
#: and of one to the gateway; as short as an engine takes it
_OF_THE_GATEWAY: dict[str, dict[str, object]] = {
    GATEWAY_REPREFILL: {"escalate": True, "mode": "reprefill"},
    GATEWAY_COLD: {"escalate": True, "mode": "handoff", "min_tokens": 1},
    GATEWAY_WARM: {"escalate": True, "mode": "handoff", "min_tokens": 1},
}


@dataclass(frozen=True)
class Point:
    """One measurement.

    Attributes:
        mode: `publish` (the source reads and publishes), `re_prefill` (the target reads), `hand_off_warm`
            (the target takes what the source has published); the same asked of the gateway:
            `gateway_re_prefill`, `gateway_hand_off_cold` (the source reads while the target takes),
            `gateway_hand_off_warm` (it has read and published, in `gateway_publish`, and finds that when
            the gateway has it read).
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
    def whom(self) -> Whom:
        """Who is asked."""
        if self.mode in (PUBLISH, GATEWAY_PUBLISH):
            return "source"
        return "gateway" if self.mode in _OF_THE_GATEWAY else "target"

    @property
    def extra(self) -> dict[str, object]:
        """What its requests say of kvmap."""
        if self.whom == "gateway":
            return {"kvmap": _OF_THE_GATEWAY[self.mode]}
        asked = _OF_AN_ENGINE.get(self.mode)
        return {} if asked is None else {"kv_transfer_params": {"kvmap": asked}}


def grid(
    lengths: Sequence[int],
    concurrencies: Sequence[int],
    *,
    n_requests: int,
    n_output: int,
    repeats: int,
    seed: int,
    gateway: bool = False,
) -> Iterator[list[Point]]:
    """For each length, concurrency and repeat the points in the order in which they are run.

    Re-prefill comes first, on prompts of its own: an engine that keeps prefixes must not have seen them, nor
    those of the hand-off that follows. Modes alternate within a repeat, so that a drift of the machine meets
    all of them. The gateway's have prompts of their own too.
    """
    modes = _GATEWAY_MODES if gateway else _MODES
    n_seeds = 1 + max(offset for _, offset in modes)
    for number, (_, n_tokens, concurrency) in enumerate(product(range(repeats), lengths, concurrencies)):
        n, first = max(n_requests, concurrency), seed + n_seeds * number
        points = [Point(mode, n_tokens, concurrency, n, n_output, first + offset) for mode, offset in modes]
        yield [replace(point, n_output=1) if point.whom == "source" else point for point in points]
