"""Which moments to hold: the mode that serves a map within a memory budget, and what it will take."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from kvmap.errors import KvmapError
from kvmap.fit.features import Layout, n_channels
from kvmap.fit.moments import moments_bytes
from kvmap.fit.pair_moments import SPLITS, MemoryBudgetExceeded

MODES = ("full", "head_local", "selected")
DEFAULT_SHARE = 0.6
"""Of the machine's memory, what tables and rows may take where no budget is given."""


@dataclass(frozen=True)
class MomentsPlan:
    """What a calibration pass will hold.

    Attributes:
        mode: "full": every feature against every target; serves all supports, k, λ and selections.
            "head_local": the matched heads alone; serves head-local support with any k, λ and selection.
            "selected": what one selection reads, for which a first pass has to choose it.
        table_bytes: of the moments, both splits.
        peak_bytes: the tables that grow at one time, and the rows of one batch on their way into them.
        n_passes: over the calibration text (or its captured caches): one for each block of tables that fits
            the budget, and one before them where layers have to be chosen.
        fits: whether every table does, by itself.
    """

    mode: str
    table_bytes: int
    peak_bytes: int
    n_passes: int
    fits: bool


def plan_moments(
    layout: Layout,
    *,
    support: str,
    regressors: str,
    top_k: int,
    batch_tokens: int,
    mode: str = "auto",
    two_passes: bool = True,
    budget_bytes: int | None = None,
) -> MomentsPlan:
    """The richest mode that serves the map and fits the budget in one pass, else that of the fewest passes.

    Args:
        layout: of the pair.
        support, regressors, top_k: of the map; "selected" holds top_k source layers for each target layer.
        batch_tokens: rows of one batch.
        mode: "auto", or one of `MODES`.
        two_passes: whether "selected" needs a first pass to choose layers.
        budget_bytes: None: `DEFAULT_SHARE` of the machine's memory.

    Raises:
        MemoryBudgetExceeded: naming what each mode would take.
        KvmapError: a mode that does not serve the support.
    """
    budget = default_budget() if budget_bytes is None else budget_bytes
    plans = moments_plans(
        layout,
        support=support,
        regressors=regressors,
        top_k=top_k,
        batch_tokens=batch_tokens,
        mode=mode,
        two_passes=two_passes,
        budget_bytes=budget,
    )
    chosen = best_plan(plans)
    if chosen is not None:
        return chosen
    needed = ", ".join(f"{plan.mode} {plan.peak_bytes:,}" for plan in plans)
    raise MemoryBudgetExceeded(
        f"calibration.memory_budget_gib: {budget:,} bytes are allowed, and the moments would take at least "
        f"({needed}) at one time. Raise it, lower mapper.top_k or calibration.batch_size, or take "
        f"mapper=head_local"
    )


def best_plan(plans: Sequence[MomentsPlan]) -> MomentsPlan | None:
    """The first plan, of those that fit, of the fewest blocks; None if none fits."""
    return min((plan for plan in plans if plan.fits), key=lambda plan: plan.n_passes, default=None)


def moments_plans(
    layout: Layout,
    *,
    support: str,
    regressors: str,
    top_k: int,
    batch_tokens: int,
    mode: str = "auto",
    two_passes: bool = True,
    budget_bytes: int,
) -> list[MomentsPlan]:
    """Every mode that serves the map, the richest first; or the one asked for. See `plan_moments`.

    Raises:
        KvmapError: a mode that does not serve the support.
    """
    plans = []
    for name in MODES:
        if name != "head_local" or support == "head_local":
            tables = table_sizes(layout, name, support, regressors, top_k)
            rows = batch_tokens * row_bytes(layout, name, tables)
            plans.append(_plan(name, tables, rows, budget_bytes, two_passes))
    if mode == "auto":
        return plans
    plans = [plan for plan in plans if plan.mode == mode]
    if not plans:
        raise KvmapError(
            f"calibration.mode={mode}: it holds the matched heads alone, and mapper.support={support} reads "
            f"the others too; take mapper=head_local, or calibration.mode=auto"
        )
    return plans


def default_budget() -> int:
    """What moments may take where nothing else is said, bytes."""
    return int(DEFAULT_SHARE * machine_bytes())


def machine_bytes() -> int:
    """The machine's memory, bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def row_bytes(layout: Layout, mode: str = "full", tables: Sequence[tuple[int, int]] = ()) -> int:
    """Bytes that one row takes on its way into tables of so many (features, targets).

    Both caches in 16 bits, as they come and those of one split, and as content in float32; features and
    targets joined in float32; and of one table at a time, the largest (where none are told, of everything),
    the columns in float32 (unless they are all there are of a kind) and centred in float64.
    """
    channels = 2 * (n_channels(layout.source_shape) + n_channels(layout.target_shape))
    joined = layout.n_features + layout.n_targets
    columns = max((p + q for p, q in tables), default=joined)
    return (2 + 2 + 4) * channels + 4 * joined + (8 if mode == "full" else 12) * columns


def table_blocks(sizes: Sequence[int], budget_bytes: int) -> list[list[int]]:
    """Positions of tables, in order, in the fewest blocks of no more bytes than the budget.

    A table that is larger by itself makes a block of its own.
    """
    blocks: list[list[int]] = []
    room = -1
    for position, size in enumerate(sizes):
        if not blocks or size > room:
            blocks.append([])
            room = budget_bytes
        blocks[-1].append(position)
        room -= size
    return blocks


def _plan(
    mode: str, tables: list[tuple[int, int]], rows: int, budget_bytes: int, two_passes: bool
) -> MomentsPlan:
    sizes = [len(SPLITS) * moments_bytes(p, q) for p, q in tables]
    blocks = table_blocks(sizes, budget_bytes - rows)
    largest = max(sum(sizes[position] for position in block) for block in blocks)
    n_passes = len(blocks) + (mode == "selected" and two_passes)
    return MomentsPlan(mode, sum(sizes), largest + rows, n_passes, largest + rows <= budget_bytes)


def table_sizes(
    layout: Layout, mode: str, support: str, regressors: str, top_k: int
) -> list[tuple[int, int]]:
    """(p, q) of each table of a mode.

    For heads of one width and number, as the supported families have them; of layers that differ the widest
    are counted.
    """
    both_kinds = regressors == "both_kinds"
    targets = n_channels(layout.target_shape)
    source, native = n_channels(layout.source_shape), n_channels(layout.native_shape)
    if mode == "full":
        features = source + native
        return [(2 * features, 2 * targets)] if both_kinds else [(features, targets)] * 2
    heads = max(n for n, _ in layout.target_shape)
    if mode == "head_local":
        features = _own(layout, len(layout.source_shape)) * (2 if both_kinds else 1)
        return [(features, targets * (2 if both_kinds else 1) // heads)] * heads * (1 if both_kinds else 2)
    if top_k == len(layout.source_shape):  # all target layers read the same, and share their tables
        richer = "head_local" if support == "head_local" else "full"
        return table_sizes(layout, richer, support, regressors, top_k)
    if support == "head_local":
        features = _own(layout, top_k) * (2 if both_kinds else 1)
        return [(features, width) for n, width in layout.target_shape for _ in range(2 * n)]
    widest = sum(sorted(n * width for n, width in layout.source_shape)[-top_k:])
    features = (widest + native) * (2 if both_kinds else 1)
    return [(features, n * width) for n, width in layout.target_shape for _ in range(2)]


def _own(layout: Layout, top_k: int) -> int:
    """Features of one head in `top_k` source layers and the native ones."""
    widest = sum(sorted(width for _, width in layout.source_shape)[-top_k:])
    return widest + sum(width for _, width in layout.native_shape)
