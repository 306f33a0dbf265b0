"""Planned latencies of two models named on a command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvmap.economics.curves import Latencies
from kvmap.economics.errors import EconomicsError
from kvmap.economics.planned import LENGTHS, PlannedMap, planned_latencies
from kvmap.errors import UnknownName
from kvmap.fit.features import SUPPORTS, geometry_shape, n_channels
from kvmap.mappers.linear import linear_weight_count
from kvmap.models.spec import ModelSpec
from kvmap.planning.devices import DEVICES, find_device
from kvmap.planning.models import ITEM_BYTES, read_facts


def latencies_of_models(
    source: str,
    target: str,
    device: str = "h100",
    *,
    support: str = "full_head",
    top_k: int = 8,
    lengths: Sequence[int] | None = None,
    gpus: tuple[int, int] = (1, 1),
    beyond: str = "refuse",
    source_token_ms: float | None = None,
    target_token_ms: float | None = None,
) -> Latencies:
    """The planner's times of a linear map between two models.

    Args:
        source, target: folders, hub ids, or shipped models (`zoo:tiny-small`).
        device: of the planner's table, or "cpu".
        support, top_k: of the map, whose weights have the target's dtype.
        lengths: tokens; None: `LENGTHS`, as far as both models hold them.
        gpus: of the source and of the target.
        beyond: see `Latencies`.
        source_token_ms, target_token_ms: of one more token.

    Raises:
        KvmapError: a model that cannot be had, an unknown device or support, or a number out of range.
    """
    if device not in ("cpu", *DEVICES):
        raise UnknownName("device", device, ("cpu", *DEVICES))
    if support not in SUPPORTS:
        raise UnknownName("support", support, SUPPORTS)
    reads, goes_on = read_facts(ModelSpec(source)), read_facts(ModelSpec(target))
    source_shape, target_shape = geometry_shape(reads.geometry), geometry_shape(goes_on.geometry)
    if not 1 <= top_k <= len(source_shape):
        raise EconomicsError(
            f"top_k={top_k}: the source has {len(source_shape)} layers; expected 1 to so many"
        )
    n_weights = linear_weight_count(source_shape, target_shape, top_k, support)
    n_bytes = n_weights * ITEM_BYTES[goes_on.dtype] + 4 * 2 * n_channels(target_shape)
    most = min(reads.geometry.max_positions, goes_on.geometry.max_positions)
    found = find_device(device)
    assert found is not None  # of the table
    latencies = planned_latencies(
        reads,
        goes_on,
        PlannedMap(n_weights, n_bytes, goes_on.dtype),
        found,
        [length for length in LENGTHS if length <= most] if lengths is None else lengths,
        source_gpus=gpus[0],
        target_gpus=gpus[1],
        source_token_ms=source_token_ms,
        target_token_ms=target_token_ms,
        beyond=beyond,
    )
    said = f"{source} to {target}, {support}, k = {top_k}: {latencies.origin}"
    return replace(latencies, origin=said)
