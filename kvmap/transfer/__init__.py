"""From a source's cache to a target's, and on: what a model does with a context another model has read.

The columns of a hand-off come from three places. The first real tokens of each row are the target's own
(`native_head`, or a prefix it has cached already), the last `hold_back` are run through the target on top of
everything else and give the first logits, and what lies between is mapped. A mapper with `native_layers`
maps the layers above those: the target runs its first layers over all columns itself, and their keys and
values are exact. Some of the mapped tokens may then be recomputed by the target over all of that
(`recompute_share`). `prefill_and_transfer` maps layers while the source still reads; `gated_transfer` uses
a hand-off only where it passes a gate, and the target's own prefill elsewhere.
"""

from __future__ import annotations

from kvmap.causes import CAUSES
from kvmap.fit.view import ROPE_STRATEGIES, calibration_view
from kvmap.transfer.canary import canary_kl, is_sampled, request_key
from kvmap.transfer.context import TransferError
from kvmap.transfer.continuation import continue_greedy, score_continuations
from kvmap.transfer.cost import HandOffFlops, handoff_flops, native_share
from kvmap.transfer.gate import Gate, gated_transfer
from kvmap.transfer.gated import GateCounts, Gated
from kvmap.transfer.handoff import HandOff, TransferOptions, native, transfer
from kvmap.transfer.oracle import OwnKind
from kvmap.transfer.recompute import RECOMPUTE_RULES
from kvmap.transfer.streaming import prefill_and_transfer

__all__ = [
    "CAUSES",
    "RECOMPUTE_RULES",
    "ROPE_STRATEGIES",
    "Gate",
    "GateCounts",
    "Gated",
    "HandOff",
    "HandOffFlops",
    "OwnKind",
    "TransferError",
    "TransferOptions",
    "calibration_view",
    "canary_kl",
    "continue_greedy",
    "gated_transfer",
    "handoff_flops",
    "is_sampled",
    "native",
    "native_share",
    "prefill_and_transfer",
    "request_key",
    "score_continuations",
    "transfer",
]
