"""The canary of a hand-off: which requests are compared, and how far the map leads from the target."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from kvmap.models.cache import KVCache
from kvmap.models.capture import forward
from kvmap.models.pair import LoadedModel
from kvmap.transfer.context import Context
from kvmap.transfer.handoff import HandOff

_DRAW_BYTES = 8


def request_key(context: Context) -> str:
    """The sha256, in hex, of a context's token ids row by row; pads do not count.

    The same in every process and on every device, so that whoever holds the ids can tell which requests were
    compared.
    """
    content = hashlib.sha256()
    for ids, mask in zip(context.ids.cpu(), context.mask.cpu(), strict=True):
        row = ids[mask].tolist()
        content.update(f"{len(row)}:{row}".encode())
    return content.hexdigest()


def is_sampled(key: str, share: float, seed: int = 0) -> bool:
    """Whether a request is compared: `u(seed, key) < share`, u uniform in [0, 1) by sha256.

    A request that is drawn at one share is drawn at every larger one.

    Args:
        key: of the request.
        share: of all requests, 0 to 1: 0 draws none, 1 all.
        seed: other seeds draw other requests.
    """
    digest = hashlib.sha256(f"{seed}:{key}".encode()).digest()[:_DRAW_BYTES]
    return int.from_bytes(digest, "big") < share * 2 ** (8 * _DRAW_BYTES)


def n_compared(hand_off: HandOff, hold_back: int, n_tokens: int) -> int:
    """How many last tokens can be compared: m, or as many as leave every row something mapped before them.

    `min(m, min over rows of n_mapped + hold_back − 1)`, rows of which nothing was mapped aside; 0 where that
    is so of all rows.
    """
    mapped = [n for n in hand_off.n_mapped_of_row if n]
    return min(n_tokens, min(mapped) + hold_back - 1) if mapped else 0


@torch.no_grad()
def canary_kl(
    target: LoadedModel, context: Context, hand_off: HandOff, own: KVCache, n_tokens: int
) -> Tensor:
    """How far the target's next-token distributions are from its own, over the last m tokens of a context.

    `D(native ‖ mapped) = Σ_v p_v (ln p_v − ln q_v)`, in nats, averaged over the last m tokens of each row. p
    comes of the m tokens run on the target's own prefill of what lies before them; q of the same tokens run
    on the very columns that were handed over, the last m of them cut off. So both runs start at the same
    column, and of a hand-off that held back h < m tokens the m − h mapped columns nearest to the end are
    judged by nothing: m stays small. Where m ≤ h the columns between are the target's own over the mapped
    ones, as served.

    Args:
        target: the model.
        context: of the hand-off.
        hand_off: mapped with `every_column` where the target has windows: the first of the m tokens see
            further back than the last ones.
        own: the target's own prefill of the whole context.
        n_tokens: m, see `n_compared`.

    Returns:
        (batch,) float64, of each row the mean over those of its last m columns that are no pads.
    """
    tail = slice(context.mask.shape[1] - n_tokens, None)
    ids, mask = context.ids[:, tail], context.mask[:, tail]
    logits = [
        forward(target, ids, kv.slice_tokens(0, tail.start), mask)[0].double() for kv in (own, hand_off.kv)
    ]
    p, q = (part.log_softmax(-1) for part in logits)
    kl = (p.exp() * (p - q)).sum(-1)
    real = mask.to(kl.device)
    return torch.where(real, kl, 0.0).sum(-1) / real.sum(-1)
