"""What the planner says is held is what the tables hold, and what it chooses fits."""

from __future__ import annotations

import sys
from itertools import product

import pytest

from kvmap.errors import KvmapError
from kvmap.fit.features import REGRESSORS, SUPPORTS, CacheShape, Layout, Recipe, both
from kvmap.fit.pair_moments import (
    MemoryBudgetExceeded,
    TableSpec,
    full_tables,
    head_local_tables,
    selected_tables,
    tables_bytes,
)
from kvmap.fit.planner import (
    MomentsPlan,
    default_budget,
    machine_bytes,
    moments_plans,
    plan_moments,
    row_bytes,
    table_blocks,
)

SOURCE: CacheShape = ((2, 3),) * 4
TARGET: CacheShape = ((2, 5),) * 3
GROUPED: CacheShape = ((4, 5),) * 3
APART = {"key": ((0, 1), (0, 2), (2, 3)), "value": ((0, 3), (1, 2), (1, 3))}
"""No two target layers read the same two source layers."""


def plan(
    layout: Layout, support: str, mode: str, regressors: str = "own_kind", **rest: object
) -> MomentsPlan:
    settings = {"top_k": 2, "batch_tokens": 10, "budget_bytes": sys.maxsize} | rest
    return plan_moments(layout, support=support, regressors=regressors, mode=mode, **settings)  # type: ignore[arg-type]


def held(layout: Layout, support: str, mode: str, regressors: str) -> list[TableSpec]:
    if mode == "full":
        return full_tables(layout, regressors)
    if mode == "head_local":
        return head_local_tables(layout, regressors)
    shapes = layout.source_shape, layout.target_shape
    return selected_tables(Recipe(*shapes, support, APART, regressors))


@pytest.mark.parametrize("target", [TARGET, GROUPED], ids=["matched", "grouped"])
@pytest.mark.parametrize("regressors", REGRESSORS)
@pytest.mark.parametrize(("support", "mode"), [*product(SUPPORTS, ["full", "selected"]), ("head_local",) * 2])
def test_tables_take_what_the_plan_says(support: str, mode: str, regressors: str, target: CacheShape) -> None:
    layout = Layout(SOURCE, target)
    tables = tables_bytes(held(layout, support, mode, regressors))
    planned = plan(layout, support, mode, regressors).table_bytes
    if target == GROUPED and support == "head_local" and mode != "full":
        # neighbouring heads that read one source head share its table, and the plan counts one for each
        assert tables < planned
    else:
        assert tables == planned


@pytest.mark.parametrize("mode", ["full", "head_local"])
@pytest.mark.parametrize("regressors", REGRESSORS)
def test_native_layers_are_features_too(mode: str, regressors: str) -> None:
    layout = Layout(SOURCE, TARGET, 2)
    support = "head_local" if mode == "head_local" else "full_head"
    tables = tables_bytes(held(layout, support, mode, regressors))
    assert plan(layout, support, mode, regressors).table_bytes == tables


def test_layers_that_all_read_everything_share_their_tables() -> None:
    layout, k = Layout(SOURCE, TARGET), len(SOURCE)
    every = both((tuple(range(k)),) * len(TARGET))
    for support in SUPPORTS:
        tables = selected_tables(Recipe(SOURCE, TARGET, support, every))
        assert plan(layout, support, "selected", top_k=k).table_bytes == tables_bytes(tables)


@pytest.mark.parametrize("mode", ["full", "head_local", "selected"])
def test_rows_on_their_way_count_for_each_token_of_a_batch(mode: str) -> None:
    layout = Layout(SOURCE, TARGET)
    support = "head_local" if mode == "head_local" else "full_head"
    none, one, many = (plan(layout, support, mode, batch_tokens=n) for n in (0, 1, 64))
    assert none.peak_bytes == none.table_bytes
    assert many.peak_bytes - many.table_bytes == 64 * (one.peak_bytes - one.table_bytes) > 0
    tables = [(len(spec.features), len(spec.targets)) for spec in held(layout, support, mode, "own_kind")]
    assert one.peak_bytes - one.table_bytes == row_bytes(layout, mode, tables)


def test_a_row_is_its_caches_its_features_and_targets_and_one_table_of_them() -> None:
    layout = Layout(SOURCE, TARGET)
    # 2 · (4 · 2 · 3 + 3 · 2 · 5) channels, all of them features or targets, half of them in one table
    assert row_bytes(layout, "full", [(24, 30)] * 2) == (8 + 4) * 108 + 8 * 54
    assert row_bytes(layout, "head_local", [(12, 15)] * 4) == (8 + 4) * 108 + (8 + 4) * 27
    # a native layer's channels come once in the caches, and are features and targets
    assert row_bytes(Layout(SOURCE, TARGET, 1), "full", [(34, 30)] * 2) == 8 * 108 + 4 * 128 + 8 * 64
    # of tables that are not told the widest there can be is taken
    assert row_bytes(layout) == (8 + 4 + 8) * 108


def test_the_richest_mode_that_fits_in_one_pass_is_taken() -> None:
    layout = Layout(SOURCE, TARGET)
    peaks = [plan(layout, "head_local", mode).peak_bytes for mode in ("full", "head_local")]
    assert peaks[0] > peaks[1]
    for mode, peak in zip(("full", "head_local"), peaks, strict=True):
        found = plan(layout, "head_local", "auto", budget_bytes=peak)
        assert (found.mode, found.n_passes, found.fits) == (mode, 1, True)


def test_layers_that_need_no_first_pass_take_one() -> None:
    layout = Layout(SOURCE, TARGET)
    assert plan(layout, "full_head", "selected").n_passes == 2
    assert plan(layout, "full_head", "selected", two_passes=False).n_passes == 1


def test_tables_over_the_budget_take_more_passes() -> None:
    layout = Layout(SOURCE, TARGET)
    whole = plan(layout, "full_head", "full")
    halves = plan(layout, "full_head", "full", budget_bytes=whole.peak_bytes - 1)
    assert (whole.n_passes, halves.n_passes) == (1, 2)
    assert halves.table_bytes == whole.table_bytes
    assert halves.peak_bytes < whole.peak_bytes


def test_what_no_mode_can_do_is_refused_with_the_bytes_of_each() -> None:
    layout = Layout(SOURCE, TARGET)
    with pytest.raises(MemoryBudgetExceeded, match=r"100 bytes are allowed.*full [\d,]+, selected [\d,]+\)"):
        plan(layout, "full_head", "auto", budget_bytes=100)
    with pytest.raises(KvmapError, match=r"mode=head_local: .*mapper.support=banded reads the others too"):
        plan(layout, "banded", "head_local")
    given = moments_plans(
        layout, support="banded", regressors="own_kind", top_k=1, batch_tokens=1, budget_bytes=100
    )
    assert [(p.mode, p.fits) for p in given] == [("full", False), ("selected", False)]


def test_blocks_keep_the_order_and_the_budget() -> None:
    assert table_blocks([3, 4, 2, 9, 1, 1], 7) == [[0, 1], [2], [3], [4, 5]]
    assert table_blocks([], 7) == []


def test_without_a_budget_a_share_of_the_machine_is_allowed() -> None:
    assert 0 < default_budget() < machine_bytes()
