"""What a hand-off still costs the target, beside reading the context again."""

from __future__ import annotations

from kvmap.models.geometry import Geometry
from kvmap.transfer.context import TransferError
from kvmap.transfer.handoff import TransferOptions


def native_share(
    target_geometry: Geometry,
    n_tokens: int,
    native_layers: int = 0,
    native_head: int = 1,
    hold_back: int = 1,
) -> float:
    """The share of a re-prefill's work that a hand-off leaves to the target, in layer-tokens.

    One unit is one decoder layer run for one token. Of T tokens and L layers, re-prefill runs L·T. With m
    native layers the target runs a = max(m − 1, 0) layers for every token (of layer m − 1, counted from 0,
    it needs the projection of keys and values alone, which counts as nothing), and the L − a others for the
    native head and the held-back tokens:

    ``share = min(1, (a·T + (L − a)·(native_head + hold_back)) / (L·T))``

    With m = L nothing is mapped, the hand-off is a native run, and the share is 1.

    It is a model, not a measurement: that attention grows with the square of T, the logits and the map's own
    products are left out, and a native head that is run once in full and once more in the native layers
    counts once.

    Args:
        target_geometry: of the target; L is its `n_layers`.
        n_tokens: T, tokens of the context.
        native_layers: m of the mapper.
        native_head, hold_back: as in `kvmap.transfer.TransferOptions`.

    Raises:
        TransferError: a number out of range.
    """
    TransferOptions(hold_back, native_head)
    n_layers = target_geometry.n_layers
    if n_tokens < 1 or not 0 <= native_layers <= n_layers:
        raise TransferError(
            f"n_tokens={n_tokens}, native_layers={native_layers}: expected at least 1 token, and 0 to "
            f"{n_layers} layers"
        )
    if native_layers == n_layers:
        return 1.0
    run_by_all = max(native_layers - 1, 0)
    units = run_by_all * n_tokens + (n_layers - run_by_all) * (native_head + hold_back)
    return min(1.0, units / (n_layers * n_tokens))
