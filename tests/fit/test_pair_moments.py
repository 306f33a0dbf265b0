"""The moments of a pair: which tables hold what, and that every way there gives those of the rows."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvmap.errors import KvmapError, UnknownName
from kvmap.fit.features import KINDS, REGRESSORS, SUPPORTS, Block, CacheShape, Layout, Recipe, both
from kvmap.fit.moments import MomentsError, moments_bytes
from kvmap.fit.pair_moments import (
    SPLITS,
    MemoryBudgetExceeded,
    PairMoments,
    TableSpec,
    calibration_rows,
    check_memory,
    full_tables,
    head_local_tables,
    probe_tables,
    selected_tables,
    tables_bytes,
    tables_for,
)
from kvmap.models.cache import KVCache
from tests.fit.caches import (
    GROUPED_TARGET_SHAPE,
    SOURCE_SHAPE,
    TARGET_SHAPE,
    UNEVEN_SOURCE_SHAPE,
    UNEVEN_TARGET_SHAPE,
    kind_layers,
    moments_of,
    pair_of_caches,
    random_cache,
    rows_of,
    stripped,
)
from tests.fit.oracles import FIELDS, assert_matches, assert_same, from_rows, head_rows, regressors

LAYOUT = Layout(SOURCE_SHAPE, TARGET_SHAPE)
RECIPE = Recipe(SOURCE_SHAPE, TARGET_SHAPE, "full_head", both(((0, 2), (1,))))
SHAPES = [
    (SOURCE_SHAPE, TARGET_SHAPE),
    (SOURCE_SHAPE, GROUPED_TARGET_SHAPE),
    (UNEVEN_SOURCE_SHAPE, UNEVEN_TARGET_SHAPE),
]
Tables = Callable[[Layout], list[TableSpec]]


def pair_moments() -> PairMoments:
    return PairMoments.zeros(LAYOUT)


def own_kind(moments: PairMoments, kind: str, split: str):
    """All features and targets of one kind."""
    return moments.cut(split, moments.layout.kind_features(kind), moments.layout.targets(kind))


def all_features(layout: Layout, source: KVCache, target: KVCache, rows: Tensor | None = None) -> np.ndarray:
    """(n, n_features) in the order of a layout, by explicit loops."""
    native = layout.native_layers
    parts = [source.keys, source.values, target.keys[:native], target.values[:native]]
    return np.concatenate([rows_of(part, rows) for part in parts if len(part)], axis=1)


def all_targets(target: KVCache, rows: Tensor | None = None) -> np.ndarray:
    return np.concatenate([rows_of(target.keys, rows), rows_of(target.values, rows)], axis=1)


def weights_of(
    shape: CacheShape, batch: int, tokens: int, seed: int = 3, zeros: float = 0.0
) -> dict[tuple[str, int], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for kind in KINDS:
        for layer, (heads, _) in enumerate(shape):
            drawn = torch.rand(batch, heads, tokens, generator=generator, dtype=torch.float64)
            found[kind, layer] = torch.where(drawn < zeros, 0.0, drawn)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", SPLITS)
def test_features_stand_in_the_order_layer_head_channel(kind: str, split: str) -> None:
    pairs = pair_of_caches()
    source, target = (rows_of(kind_layers(kv, kind)) for kv in pairs[split])
    assert_matches(own_kind(moments_of(pairs), kind, split), from_rows(source, target))


def test_values_that_encode_layer_head_and_position_land_where_the_layout_says() -> None:
    shape = ((2, 3), (3, 3), (2, 3))
    tokens = 2  # as many tokens as heads, so that a swapped axis would go unseen by shape

    def coded(layer: int, heads: int, width: int, base: int) -> Tensor:
        code = torch.empty(1, heads, tokens, width, dtype=torch.float64)
        for h in range(heads):
            for t in range(tokens):
                for c in range(width):
                    code[0, h, t, c] = base + 1000 * layer + 100 * h + 10 * c + t
        return code

    def cache(base: int) -> KVCache:
        keys, values = (
            [coded(layer, heads, width, base + extra) for layer, (heads, width) in enumerate(shape)]
            for extra in (0, 10_000)
        )
        return stripped(keys, values)

    layout = Layout(shape, shape, 2)
    moments = PairMoments.zeros(layout, full_tables(layout, "both_kinds"))
    moments.update("fit", cache(0), cache(50_000))
    mean_x = moments.cut("fit", torch.arange(layout.n_features), torch.arange(0)).mean_x
    mean_y = moments.cut("fit", torch.arange(0), torch.arange(layout.n_targets)).mean_y
    for origin, kind, layer in product(("source", "native"), KINDS, range(3)):
        base = 50_000 * (origin == "native") + 10_000 * (kind == "value") + 1000 * layer
        heads, width = shape[layer]
        for h in range(heads):
            expected = [base + 100 * h + 10 * c + 0.5 for c in range(width)]
            if origin == "native":
                assert mean_y[layout.targets(kind, layer, h)].tolist() == expected
            if origin == "source" or layer < 2:
                assert mean_x[layout.features([Block(origin, kind, layer, h)])].tolist() == expected


def test_only_the_chosen_rows_count_and_pads_never_do() -> None:
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, :4] = False
    source = random_cache(SOURCE_SHAPE, 2, 9, generator, mask)
    target = random_cache(TARGET_SHAPE, 2, 9, generator, mask)
    chosen = calibration_rows(mask, native_head=1, stride=2)
    moments = pair_moments().update("fit", source, target, chosen)
    expected = from_rows(rows_of(source.keys, chosen), rows_of(target.keys, chosen))
    assert_matches(own_kind(moments, "key", "fit"), expected)
    # pads that are asked for do not count either
    assert_same(
        own_kind(pair_moments().update("fit", source, target, torch.ones_like(mask)), "key", "fit"),
        own_kind(pair_moments().update("fit", source, target), "key", "fit"),
    )
    everything = pair_moments().update("fit", source, target)
    assert everything.n_rows("fit") == own_kind(everything, "value", "fit").n_rows == int(mask.sum())
    assert everything.n_rows("held_out") == own_kind(everything, "value", "held_out").n_rows == 0


def test_pads_may_hold_anything() -> None:
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, :4] = False
    source = random_cache(SOURCE_SHAPE, 2, 9, generator, mask)
    target = random_cache(TARGET_SHAPE, 2, 9, generator, mask)
    expected = pair_moments().update("fit", source, target)
    for kv in (source, target):
        for layer in (*kv.keys, *kv.values):
            layer[1, :, :4] = float("nan")
    moments = pair_moments().update("fit", source, target)
    for kind in KINDS:
        assert_same(own_kind(moments, kind, "fit"), own_kind(expected, kind, "fit"))


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("native", [0, 1])
def test_row_weights_reach_their_own_kind_layer_and_head(
    shapes: tuple[CacheShape, CacheShape], support: str, native: int
) -> None:
    source, target = pair_of_caches(shapes[1], source_shape=shapes[0])["fit"]
    selection = both(((0, 2), (1,), (2, 1))[: len(shapes[1])])
    recipe = Recipe(*shapes, support, selection, "both_kinds", native)
    weights = weights_of(shapes[1], 5, 17, zeros=0.2)
    chosen = calibration_rows(source.mask, native_head=2, stride=3)
    moments = PairMoments.zeros(recipe.layout, selected_tables(recipe, weighted=True))
    moments.update("fit", source, target, chosen, weights)
    assert moments.weighted
    fewest = []
    for kind in KINDS:
        for layer in recipe.mapped_layers:
            for head in range(shapes[1][layer][0]):
                x = regressors(recipe, source, target, kind, layer, head, chosen)
                w = weights[kind, layer][:, head][chosen]
                columns = recipe.columns(kind, layer)[0 if recipe.shared else head]
                found = moments.cut("fit", columns, recipe.layout.targets(kind, layer, head))
                assert_matches(found, from_rows(x, head_rows(target, kind, layer, head, chosen), w.numpy()))
                assert found.n_rows == int((w > 0).sum())
                assert found.weight == pytest.approx(float(w.sum()), rel=1e-14)
                fewest.append(found.n_rows)
    assert moments.n_rows("fit") == min(fewest)
    assert moments.n_rows("held_out") == 0


def test_weights_of_tables_that_take_them_must_be_given() -> None:
    source, target = pair_of_caches()["fit"]
    moments = PairMoments.zeros(LAYOUT, selected_tables(RECIPE, weighted=True))
    with pytest.raises(MomentsError, match="no weights were given"):
        moments.update("fit", source, target)
    assert not pair_moments().weighted
    with pytest.raises(MomentsError, match="do not hold"):  # two heads, whose rows weigh differently
        moments.cut("fit", RECIPE.columns("key", 0)[0], LAYOUT.targets("key", 0))


def test_calibration_rows_leave_out_pads_and_the_native_head_of_each_row() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]])
    assert calibration_rows(mask).int().tolist() == mask.tolist()
    assert calibration_rows(mask, native_head=1).int().tolist() == [[0, 0, 0, 1, 1, 1, 1], [0] + [1] * 6]
    assert calibration_rows(mask, native_head=2, stride=2).int().tolist() == [
        [0, 0, 0, 0, 1, 0, 1],
        [0, 0, 1, 0, 1, 0, 1],
    ]
    assert not calibration_rows(mask, native_head=9).any()
    with pytest.raises(KvmapError, match="stride"):
        calibration_rows(mask, stride=0)
    with pytest.raises(KvmapError, match="native_head=-1"):
        calibration_rows(mask, native_head=-1)


@settings(max_examples=40, deadline=None)
@given(
    pads=st.lists(st.integers(0, 11), min_size=1, max_size=4),
    head=st.integers(0, 4),
    stride=st.integers(1, 5),
)
def test_the_rows_of_a_padded_sequence_are_those_of_the_sequence_alone(
    pads: list[int], head: int, stride: int
) -> None:
    mask = torch.stack([torch.arange(12) >= pad for pad in pads])
    rows = calibration_rows(mask, head, stride)
    for row, pad in zip(rows.tolist(), pads, strict=True):
        assert row == [t >= pad + head and (t - pad - head) % stride == 0 for t in range(12)]


@settings(max_examples=25, deadline=None)
@given(
    pads=st.lists(st.integers(0, 8), min_size=2, max_size=6),
    head=st.integers(0, 2),
    stride=st.integers(1, 3),
    offset=st.sampled_from([0.0, 1e6]),
    weighted=st.booleans(),
    order=st.randoms(use_true_random=False),
)
def test_batch_size_order_padding_and_shards_change_nothing_beyond_rounding(
    pads: list[int], head: int, stride: int, offset: float, weighted: bool, order: random.Random
) -> None:
    """Sequences in one padded batch against each alone and unpadded, in any order, on any of three shards."""
    generator = torch.Generator().manual_seed(1)
    mask = torch.stack([torch.arange(9) >= pad for pad in pads])
    source = random_cache(SOURCE_SHAPE, len(pads), 9, generator, mask)
    target = random_cache(TARGET_SHAPE, len(pads), 9, generator, mask)
    source = stripped([k + offset for k in source.keys], [v - offset for v in source.values], mask)
    weights = weights_of(TARGET_SHAPE, len(pads), 9, zeros=0.3)
    recipe = Recipe(SOURCE_SHAPE, TARGET_SHAPE, "head_local", both(((0, 2), (1,))), native_layers=1)
    specs = selected_tables(recipe, weighted=weighted)

    def read(moments: PairMoments, sequences: Sequence[int], start: int) -> None:
        caches = [kv.select_rows(sequences).slice_tokens(start, None) for kv in (source, target)]
        rows = calibration_rows(caches[0].mask, head, stride)
        own = {key: weight[list(sequences)][:, :, start:] for key, weight in weights.items()}
        moments.update("fit", *caches, rows, own)

    whole = PairMoments.zeros(recipe.layout, specs)
    read(whole, range(len(pads)), 0)
    shards = [PairMoments.zeros(recipe.layout, specs) for _ in range(3)]
    for sequence in order.sample(range(len(pads)), len(pads)):
        read(order.choice(shards), [sequence], pads[sequence])
    order.shuffle(shards)
    merged = shards[0].merge(shards[1]).merge(shards[2])
    # as in test_moments: means at 1e6 are good to 1e-10, and so is what lies between them
    rtol = 1e-12 if offset == 0 else 5e-9
    for found, expected in zip(merged.tables, whole.tables, strict=True):
        for split in SPLITS:
            assert_same(found.splits[split], expected.splits[split], rtol)


def test_caches_of_another_shape_rotation_or_padding_are_refused() -> None:
    source, target = pair_of_caches()["fit"]
    moments = pair_moments()
    with pytest.raises(MomentsError, match="the source cache has layers"):
        moments.update("fit", target, target)
    with pytest.raises(MomentsError, match="the target cache has layers"):
        moments.update("fit", source, source)
    with pytest.raises(MomentsError, match="different columns"):
        moments.update("fit", source, target.slice_tokens(0, 5))
    with pytest.raises(MomentsError, match="rotated keys"):
        moments.update("fit", source.rotate([None] * 3), target)
    with pytest.raises(UnknownName, match="held_out"):
        moments.update("held-out", source, target)
    with pytest.raises(UnknownName, match="held_out"):
        moments.cut("held-out", torch.arange(2), torch.arange(1))
    assert moments.n_rows("fit") == 0


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_value_that_is_not_finite_is_refused_before_any_table_takes_it(side: str) -> None:
    source, target = pair_of_caches()["fit"]
    broken = source if side == "source" else target
    broken.values[1][2, 1, 3, 0] = float("inf")
    moments = PairMoments.zeros(LAYOUT, head_local_tables(LAYOUT))
    with pytest.raises(MomentsError, match=f"the {side} .* NaN or infinite value in column"):
        moments.update("fit", source, target)
    assert all(table.splits["fit"].n_rows == 0 for table in moments.tables)


def test_moments_of_another_pair_or_of_other_tables_are_not_merged() -> None:
    moments = pair_moments()
    others = [
        PairMoments.zeros(Layout(TARGET_SHAPE, SOURCE_SHAPE)),
        PairMoments.zeros(Layout(SOURCE_SHAPE, TARGET_SHAPE, 1)),
        PairMoments.zeros(LAYOUT, full_tables(LAYOUT, "both_kinds")),
        PairMoments.zeros(LAYOUT, head_local_tables(LAYOUT)),
    ]
    for other in others:
        with pytest.raises(MomentsError, match="another pair or with other tables"):
            moments.merge(other)
    weighted = selected_tables(RECIPE, weighted=True)
    plain = [TableSpec(spec.features, spec.targets) for spec in weighted]
    with pytest.raises(MomentsError, match="another pair or with other tables"):
        PairMoments.zeros(LAYOUT, weighted).merge(PairMoments.zeros(LAYOUT, plain))


MODES: dict[str, Callable[[Recipe], list[TableSpec]]] = {
    "full": lambda recipe: full_tables(recipe.layout, recipe.regressors),
    "head_local": lambda recipe: head_local_tables(recipe.layout, recipe.regressors),
    "probes": lambda recipe: probe_tables(recipe.layout),
    "selected": selected_tables,
    "weighted": partial(selected_tables, weighted=True),
}


@pytest.mark.parametrize("mode", MODES)
def test_moments_come_back_from_a_file_exactly(mode: str, tmp_path: object) -> None:
    recipe = Recipe(SOURCE_SHAPE, TARGET_SHAPE, "head_local", both(((0,), (1,))), native_layers=1)
    moments = PairMoments.zeros(recipe.layout, MODES[mode](recipe), product_dtype=torch.float32)
    for split, (source, target) in pair_of_caches().items():
        weights = weights_of(TARGET_SHAPE, source.batch_size, 17, zeros=0.2)
        moments.update(split, source, target, None, weights)
    tensors, state = moments.to_tensors()
    path = f"{tmp_path}/moments.safetensors"
    save_file(tensors, path)
    back = PairMoments.from_tensors(load_file(path), json.loads(json.dumps(state)))
    assert back.layout == moments.layout
    assert back.product_dtype == torch.float32
    assert back.weighted == moments.weighted == (mode == "weighted")
    for table, found in zip(moments.tables, back.tables, strict=True):
        assert found.spec.head == table.spec.head
        assert torch.equal(found.spec.features, table.spec.features)
        assert torch.equal(found.spec.targets, table.spec.targets)
        for split in SPLITS:
            mine, theirs = table.splits[split], found.splits[split]
            assert (theirs.n_rows, theirs.weight) == (mine.n_rows, mine.weight)
            assert all(torch.equal(getattr(theirs, name), getattr(mine, name)) for name in FIELDS)
    merged = back.merge(moments)  # what was read is as good as what was made
    assert merged.n_rows("fit") == 2 * moments.n_rows("fit")


@pytest.mark.parametrize("name", ["0.fit.s_xy", "0.held_out.mean_x", "1.features", "1.targets"])
def test_a_tensor_that_is_missing_or_of_another_shape_is_named(name: str) -> None:
    tensors, state = moments_of(pair_of_caches()).to_tensors()
    with pytest.raises(MomentsError, match=name.replace(".", r"\.")):
        PairMoments.from_tensors({key: t for key, t in tensors.items() if key != name}, state)
    if "features" not in name and "targets" not in name:
        with pytest.raises(MomentsError, match=name.replace(".", r"\.")):
            PairMoments.from_tensors({**tensors, name: tensors[name][:-1]}, state)


@pytest.mark.parametrize("mode", MODES)
def test_memory_is_known_beforehand_and_a_budget_refuses(mode: str) -> None:
    specs = MODES[mode](RECIPE)
    moments = PairMoments.zeros(LAYOUT, specs)
    tensors, _ = moments.to_tensors()
    sums = {name: t for name, t in tensors.items() if not name.endswith((".features", ".targets"))}
    needed = tables_bytes(specs)
    assert needed == sum(t.numel() * t.element_size() for t in sums.values()) == moments.nbytes
    check_memory(specs, needed)
    check_memory(specs, None)
    with pytest.raises(MemoryBudgetExceeded, match=f"{needed:,} bytes.*{needed - 1:,} are allowed"):
        PairMoments.zeros(LAYOUT, specs, budget_bytes=needed - 1)


def test_the_full_tables_are_one_for_each_kind_and_one_for_both() -> None:
    p, q = 18, 16
    assert tables_bytes(full_tables(LAYOUT)) == 2 * 2 * moments_bytes(p, q)
    assert tables_bytes(full_tables(LAYOUT, "both_kinds")) == 2 * moments_bytes(2 * p, 2 * q)
    # two heads, each with its own half of the features and of the targets
    assert tables_bytes(head_local_tables(LAYOUT)) == 2 * 2 * 2 * moments_bytes(p // 2, q // 2)
    # one table for each kind, source layer and head
    assert tables_bytes(probe_tables(LAYOUT)) == 2 * 2 * 3 * 2 * moments_bytes(3, q // 2)


def test_no_feature_stands_twice_in_a_table_and_heads_that_read_alike_share_one() -> None:
    layout = Layout(UNEVEN_SOURCE_SHAPE, UNEVEN_TARGET_SHAPE, 1)
    for specs in (full_tables(layout), head_local_tables(layout), probe_tables(layout)):
        seen = set()
        for spec in specs:
            assert bool((spec.features.diff() > 0).all())
            assert bool((spec.targets.diff() > 0).all())
            seen.add(spec.features.numpy().tobytes())
        assert len(seen) == len(specs)


def test_tables_of_several_recipes_serve_them_all() -> None:
    recipes = [
        Recipe(SOURCE_SHAPE, TARGET_SHAPE, "head_local", both(((0,), (1,)))),
        Recipe(SOURCE_SHAPE, TARGET_SHAPE, "full_head", both(((0, 1), (2,))), native_layers=1),
    ]
    layout = Layout(SOURCE_SHAPE, TARGET_SHAPE, 1)
    moments = PairMoments.zeros(layout, tables_for(recipes, layout))
    assert all(moments.covers(recipe) for recipe in recipes)
    assert not PairMoments.zeros(layout, tables_for(recipes[:1], layout)).covers(recipes[1])


def cut_cases(layout: Layout, tables: Tables) -> st.SearchStrategy[tuple[list[int], list[int]]]:
    """Some features and targets that one of the tables holds, in any order."""

    def part(spec: TableSpec) -> st.SearchStrategy[tuple[list[int], list[int]]]:
        features, targets = spec.features.tolist(), spec.targets.tolist()
        return st.tuples(
            st.lists(st.sampled_from(features), unique=True, max_size=8),
            st.lists(st.sampled_from(targets), unique=True, max_size=6),
        )

    return st.sampled_from(range(len(tables(layout)))).flatmap(lambda i: part(tables(layout)[i]))


CUT_LAYOUT = Layout(UNEVEN_SOURCE_SHAPE, UNEVEN_TARGET_SHAPE, 2)
CUT_PAIRS = pair_of_caches(UNEVEN_TARGET_SHAPE, source_shape=UNEVEN_SOURCE_SHAPE)
CUT_ROWS = {
    split: (all_features(CUT_LAYOUT, *pair), all_targets(pair[1])) for split, pair in CUT_PAIRS.items()
}


@pytest.mark.parametrize("tables", [full_tables, head_local_tables, probe_tables])
def test_any_cut_in_any_order_is_that_of_its_own_rows(tables: Tables) -> None:
    moments = moments_of(CUT_PAIRS, 2, tables)

    @settings(max_examples=30, deadline=None)
    @given(case=cut_cases(CUT_LAYOUT, tables), split=st.sampled_from(SPLITS))
    def check(case: tuple[list[int], list[int]], split: str) -> None:
        features, targets = case
        found = moments.cut(split, *(torch.tensor(part, dtype=torch.int64) for part in case))
        x, y = CUT_ROWS[split]
        assert_matches(found, from_rows(x[:, features], y[:, targets]))
        assert found.n_rows == len(x)

    check()


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("native", [0, 1, 2])
def test_every_mode_gives_the_cut_that_the_full_tables_give(support: str, native: int) -> None:
    for shapes, regressors_ in product(SHAPES, REGRESSORS):
        pairs = pair_of_caches(shapes[1], source_shape=shapes[0])
        selection = both(((1, 0), (2,), (0, 2))[: len(shapes[1])])
        recipe = Recipe(*shapes, support, selection, regressors_, native)
        full = moments_of(pairs, native, partial(full_tables, regressors=regressors_))
        modes = [moments_of(pairs, native, lambda _, recipe=recipe: selected_tables(recipe))]
        if support == "head_local":
            modes.append(moments_of(pairs, native, partial(head_local_tables, regressors=regressors_)))
        for moments, kind, layer, split in product(modes, KINDS, recipe.mapped_layers, SPLITS):
            assert moments.covers(recipe)
            for head in range(shapes[1][layer][0]):
                columns = recipe.columns(kind, layer)[0 if recipe.shared else head]
                targets = recipe.layout.targets(kind, layer, head)
                assert_same(moments.cut(split, columns, targets), full.cut(split, columns, targets))


@pytest.mark.parametrize("shapes", SHAPES)
def test_the_probes_give_the_cut_that_the_full_tables_give(shapes: tuple[CacheShape, CacheShape]) -> None:
    pairs = pair_of_caches(shapes[1], source_shape=shapes[0])
    full, probes = moments_of(pairs), moments_of(pairs, 0, probe_tables)
    for layer in range(len(shapes[0])):
        recipe = Recipe(*shapes, "head_local", both(((layer,),) * len(shapes[1])))
        assert probes.covers(recipe)
        for kind, target, split in product(KINDS, range(len(shapes[1])), SPLITS):
            for head in range(shapes[1][target][0]):
                columns = recipe.columns(kind, target)[head]
                targets = recipe.layout.targets(kind, target, head)
                assert_same(probes.cut(split, columns, targets), full.cut(split, columns, targets))


def covered(moments: PairMoments) -> set[tuple[str, str, int, int]]:
    """(support, regressors, native layers, k) of what the moments cover."""
    found = set()
    for case in product(SUPPORTS, REGRESSORS, (0, 1, 2), (1, 2)):
        support, regressors_, native, top_k = case
        selection = both((tuple(range(top_k)), (1,)))
        recipe = Recipe(SOURCE_SHAPE, TARGET_SHAPE, support, selection, regressors_, native)
        if moments.covers(recipe):
            found.add(case)
    return found


def test_moments_know_what_they_cover() -> None:
    layout = Layout(SOURCE_SHAPE, TARGET_SHAPE, 1)
    every = set(product(SUPPORTS, REGRESSORS, (0, 1), (1, 2)))
    own = {case for case in every if case[1] == "own_kind"}
    local = {case for case in every if case[0] == "head_local"}

    def of(specs: list[TableSpec]) -> set[tuple[str, str, int, int]]:
        return covered(PairMoments.zeros(layout, specs))

    assert of(full_tables(layout, "both_kinds")) == every
    assert of(full_tables(layout)) == own
    assert of(head_local_tables(layout, "both_kinds")) == local
    assert of(head_local_tables(layout)) == local & own
    assert of(probe_tables(layout)) == {("head_local", "own_kind", 0, 1)}
    recipe = Recipe(SOURCE_SHAPE, TARGET_SHAPE, "full_head", both(((0,), (1,))), native_layers=1)
    # its native layer is not mapped, and so not held as a target; what reads less is
    assert of(selected_tables(recipe)) == set(product(SUPPORTS, ("own_kind",), (1,), (1, 2)))


def test_moments_of_one_pair_cover_no_recipe_of_another() -> None:
    moments = moments_of(pair_of_caches())
    selection = both(((0,), (1,)))
    assert moments.covers(Recipe(SOURCE_SHAPE, TARGET_SHAPE, "full_head", selection))
    assert not moments.covers(Recipe(SOURCE_SHAPE, GROUPED_TARGET_SHAPE, "full_head", selection))
    assert not moments.covers(Recipe(SOURCE_SHAPE[:2], TARGET_SHAPE, "full_head", selection))


@pytest.mark.parametrize(
    ("tables", "recipe"),
    [
        (full_tables, Recipe(SOURCE_SHAPE, TARGET_SHAPE, "full_head", both(((0,), (1,))), "both_kinds")),
        (head_local_tables, Recipe(SOURCE_SHAPE, TARGET_SHAPE, "full_head", both(((0,), (1,))))),
        (probe_tables, Recipe(SOURCE_SHAPE, TARGET_SHAPE, "head_local", both(((0, 1), (1,))))),
    ],
)
def test_a_cut_that_no_table_holds_is_refused_with_the_remedy(tables: Tables, recipe: Recipe) -> None:
    moments = PairMoments.zeros(LAYOUT, tables(LAYOUT))
    features, targets = recipe.columns("key", 0)[0], LAYOUT.targets("key", 0, 0)
    assert moments.table_of(features, targets) is None
    message = rf"do not hold {len(features)} features against 4 targets.*calibration\.mode=full"
    with pytest.raises(MomentsError, match=message):
        moments.cut("fit", features, targets)


@pytest.mark.parametrize("mode", MODES)
def test_the_mean_of_a_target_layer_is_had_in_every_mode(mode: str) -> None:
    pairs = pair_of_caches(GROUPED_TARGET_SHAPE)
    recipe = Recipe(SOURCE_SHAPE, GROUPED_TARGET_SHAPE, "head_local", both(((0,), (1,))), native_layers=1)
    moments = PairMoments.zeros(recipe.layout, MODES[mode](recipe))
    for split, (source, target) in pairs.items():
        ones = {
            key: torch.ones_like(w)
            for key, w in weights_of(GROUPED_TARGET_SHAPE, source.batch_size, 17).items()
        }
        moments.update(split, source, target, None, ones)
    for kind, split in product(KINDS, SPLITS):
        expected = rows_of((kind_layers(pairs[split][1], kind)[1],)).mean(0)
        found = moments.mean_target(split, kind, 1)
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)


def test_float32_products_are_within_float32_rounding_and_the_caches_stay_as_they_were() -> None:
    pairs = pair_of_caches()
    before = [t.clone() for kv in pairs["fit"] for t in (*kv.keys, *kv.values)]
    exact = moments_of(pairs)
    single = PairMoments.zeros(LAYOUT, product_dtype=torch.float32).update("fit", *pairs["fit"])
    for kind in KINDS:
        expected = own_kind(exact, kind, "fit")
        assert_matches(
            own_kind(single, kind, "fit"),
            {name: getattr(expected, name).numpy() for name in FIELDS},
            rtol=1e-6,  # products of centred float32 numbers: 2⁻²⁴ relative
        )
    after = [t for kv in pairs["fit"] for t in (*kv.keys, *kv.values)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
