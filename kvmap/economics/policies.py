"""The ways to serve a request, and what each takes: milliseconds to the first token, seconds of each model.

Symbols, for a context of T tokens and an answer of n (`output_tokens`):

| symbol | meaning |
|---|---|
| s, r | the source's and the target's prefill |
| h | the hand-off: the source's cache → the target's first logits |
| t | the cache's way over the link, `8 · bytes / bandwidth + link_ms` |
| e_s, e_t | one more token of the source and of the target |
| k | tokens the source writes before it is judged (`judged_after`) |
| ρ | share of requests that are escalated |
| c, δ | share of the context that the target holds cached, and the part of its price that is remitted |

Every escalating policy begins alike: the source reads the context and writes k tokens, `j = s + (k − 1) e_s`.
With 1 − ρ it writes on; with ρ the target takes over and answers, which takes x to its first token:

| policy | x, ms to the target's first token | billed of the source | of the target |
|---|---|---|---|
| `re_prefill` | r(T) | – | r(T) |
| `cached_re_prefill` | r(T) − r(c·T) | – | r(T) − δ · r(c·T) |
| `hand_off_warm` | t + h | – | h |
| `hand_off_cold` | s + t + h | s | h |

Warm, the source's cache is there when it is asked for; cold, it is gone, and the source reads once more. The
time to the first token shown is j where the source's answer stands, and j + x where it does not. Requests do
not wait for each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvmap.economics.curves import Array, Latencies
from kvmap.economics.errors import EconomicsError, check_ranges

ESCALATING = ("re_prefill", "cached_re_prefill", "hand_off_warm", "hand_off_cold")
POLICIES = ("always_small", "always_large", *ESCALATING)
HAND_OFFS = ("hand_off_warm", "hand_off_cold")
SENT = ("source", "mapped")


@dataclass(frozen=True)
class Workload:
    """What is asked, and where the models stand.

    Attributes:
        escalation_rate: ρ.
        output_tokens: n, of an answer.
        judged_after: k, tokens of the source's answer before it is known whether it stands.
        decode_batch: requests that share each step in which tokens are written, and its price; None: as many
            as the latencies' batch. A step is taken to last as long as was measured, whatever this says.
        gbit_per_s: of the link between the models, 10⁹ bits a second; None: they share their memory, t = 0.
        link_ms: of the link besides, each time.
        sent: the cache that goes over it: the "source"'s (mapped where it arrives) or the "mapped" one.
        cached_share: c.
    """

    escalation_rate: float = 0.2
    output_tokens: int = 256
    judged_after: int = 1
    decode_batch: int | None = None
    gbit_per_s: float | None = 100.0
    link_ms: float = 0.0
    sent: str = "source"
    cached_share: float = 0.5

    def __post_init__(self) -> None:
        """Refuse what cannot be.

        Raises:
            EconomicsError: naming each number.
        """
        check_ranges(
            {
                "escalation_rate": (self.escalation_rate, 0, 1),
                "output_tokens": (self.output_tokens, 1, math.inf),
                "judged_after": (self.judged_after, 1, math.inf),
                "decode_batch": (self.decode_batch, 1, math.inf),
                "gbit_per_s": (self.gbit_per_s, 1e-6, math.inf),
                "link_ms": (self.link_ms, 0, math.inf),
                "cached_share": (self.cached_share, 0, 1),
            }
        )
        if self.judged_after > self.output_tokens:
            raise EconomicsError(
                f"judged_after={self.judged_after}: the answer has output_tokens={self.output_tokens}; "
                f"expected at most so many"
            )
        if self.sent not in SENT:
            raise EconomicsError(f"sent={self.sent!r}: expected one of {', '.join(SENT)}")


@dataclass(frozen=True)
class Prices:
    """What a second costs, in any one currency; all 1: costs come out as GPU seconds.

    Attributes:
        source: of one of the source's GPUs; target: of one of the target's.
        source_gpus, target_gpus: that its times were had on.
        gbyte: of 10⁹ bytes over the link.
        cached_discount: δ; 1 where a cached token costs nothing, 0.9 where a tenth of its price is billed.
    """

    source: float = 1.0
    target: float = 1.0
    source_gpus: int = 1
    target_gpus: int = 1
    gbyte: float = 0.0
    cached_discount: float = 0.9

    def __post_init__(self) -> None:
        """Refuse what cannot be.

        Raises:
            EconomicsError: naming each number.
        """
        check_ranges(
            {
                "source price": (self.source, 0, math.inf),
                "target price": (self.target, 0, math.inf),
                "source gpus": (self.source_gpus, 1, math.inf),
                "target gpus": (self.target_gpus, 1, math.inf),
                "price of a GB": (self.gbyte, 0, math.inf),
                "cached_discount": (self.cached_discount, 0, 1),
            }
        )

    @property
    def source_second(self) -> float:
        """P_s, of the whole model."""
        return self.source * self.source_gpus

    @property
    def target_second(self) -> float:
        """P_t, of the whole model."""
        return self.target * self.target_gpus


@dataclass(frozen=True)
class Billed:
    """What one request takes of each model and of the link, by length.

    Attributes:
        source, target: seconds of the model.
        gbytes: 10⁹ bytes sent.
    """

    source: Array
    target: Array
    gbytes: Array

    def __add__(self, other: Billed) -> Billed:
        """Both together."""
        return Billed(self.source + other.source, self.target + other.target, self.gbytes + other.gbytes)

    def scaled(self, factor: float | Array) -> Billed:
        """So many times this."""
        return Billed(self.source * factor, self.target * factor, self.gbytes * factor)

    def cost(self, prices: Prices) -> Array:
        """`P_s · source + P_t · target + gbytes · price`."""
        return (
            prices.source_second * self.source
            + prices.target_second * self.target
            + prices.gbyte * self.gbytes
        )


@dataclass(frozen=True)
class Served:
    """A policy's request, by length: where the source's answer stands, and where it is escalated.

    The two are the same for a policy that does not escalate.

    Attributes:
        kept_ms, escalated_ms: to the first token shown.
        takeover_ms: x, from the escalation to the target's first token; NaN where nothing is escalated.
        kept, escalated: what is billed.
    """

    kept_ms: Array
    escalated_ms: Array
    takeover_ms: Array
    kept: Billed
    escalated: Billed

    def mixed(self, escalation_rate: float) -> Billed:
        """`(1 − ρ) kept + ρ escalated`."""
        return self.kept.scaled(1 - escalation_rate) + self.escalated.scaled(escalation_rate)


def serve(
    latencies: Latencies, lengths: Array, workload: Workload, cached_discount: float = 1.0
) -> Mapping[str, Served]:
    """What every policy takes for contexts of these lengths, by the module's table.

    Times are those of a whole batch; what is billed is a batch's share of one request.

    Args:
        latencies: of the pair.
        lengths: T, tokens.
        workload: what is asked.
        cached_discount: δ.

    Raises:
        EconomicsError: lengths of which nothing is known.
    """
    at = {name: latencies.at(name, lengths) for name in (*latencies.ms, *latencies.n_bytes)}
    s, r, h = at["source_prefill"], at["re_prefill"], at["hand_off"]
    e_s, e_t = at["source_token"], at["target_token"]
    held = latencies.saved_ms(workload.cached_share * lengths)
    t, gbytes = transport(at, workload)
    none, nothing = np.zeros_like(s), np.full_like(s, math.nan)
    batch, together = latencies.batch_size, workload.decode_batch or latencies.batch_size
    first, more = workload.judged_after - 1, workload.output_tokens - 1

    def billed(read: tuple[Array, Array], written: tuple[Array, Array], sent: Array) -> Billed:
        source, target = (ms / batch + token / together for ms, token in zip(read, written, strict=True))
        return Billed(source / 1e3, target / 1e3, sent / batch)

    small = billed((s, none), (more * e_s, none), none)
    large = billed((none, r), (none, more * e_t), none)
    found = {
        "always_small": Served(s, s, nothing, small, small),
        "always_large": Served(r, r, nothing, large, large),
    }
    judged = s + first * e_s
    takeovers = {
        "re_prefill": (r, none, r, none),
        "cached_re_prefill": (r - held, none, r - cached_discount * held, none),
        "hand_off_warm": (t + h, none, h, gbytes),
        "hand_off_cold": (s + t + h, s, h, gbytes),
    }
    for name, (x, of_source, of_target, sent) in takeovers.items():
        escalated = billed((s + of_source, of_target), (first * e_s, more * e_t), sent)
        found[name] = Served(judged, judged + x, x, small, escalated)
    return found


def transport(at: Mapping[str, Array], workload: Workload) -> tuple[Array, Array]:
    """T in ms, and what is sent in 10⁹ bytes, of one batch."""
    n_bytes = at[f"{workload.sent}_bytes"]
    if workload.gbit_per_s is None:
        return np.zeros_like(n_bytes), np.zeros_like(n_bytes)
    return n_bytes * 8 / (workload.gbit_per_s * 1e9) * 1e3 + workload.link_ms, n_bytes / 1e9
