from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from kvmap.errors import KvmapError, UnknownName
from kvmap.fit.moments import (
    MemoryBudgetExceeded,
    Moments,
    MomentsError,
    PairMoments,
    calibration_rows,
    check_memory,
    moments_bytes,
)
from tests.fit.caches import (
    SOURCE_SHAPE,
    TARGET_SHAPE,
    kind_layers,
    moments_of,
    pair_of_caches,
    random_cache,
    rows_of,
    stripped,
)

FIELDS = ("mean_x", "mean_y", "s_xx", "s_xy", "s_yy")


def data(n: int, p: int, q: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.normal(size=(n, p))), torch.from_numpy(rng.normal(size=(n, q)))


def from_rows(x: np.ndarray, y: np.ndarray, w: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """Two passes over all rows in extended precision."""
    x, y = x.astype(np.longdouble), y.astype(np.longdouble)
    w = np.ones(len(x), np.longdouble) if w is None else w.astype(np.longdouble)
    mean_x, mean_y = w @ x / w.sum(), w @ y / w.sum()
    xc, yc = x - mean_x, y - mean_y
    return {
        "mean_x": mean_x,
        "mean_y": mean_y,
        "s_xx": (xc * w[:, None]).T @ xc,
        "s_xy": (xc * w[:, None]).T @ yc,
        "s_yy": (w[:, None] * yc * yc).sum(0),
    }


def assert_matches(moments: Moments, expected: dict[str, np.ndarray], rtol: float = 1e-12) -> None:
    """Within float64 rounding of some hundred additions, against the scale of each table."""
    for name in FIELDS:
        want = expected[name].astype(np.float64)
        scale = max(float(np.abs(want).max()), 1.0)
        got = getattr(moments, name).numpy()
        assert getattr(moments, name).dtype == torch.float64
        np.testing.assert_allclose(got, want, rtol=0, atol=rtol * scale, err_msg=name)


def test_moments_equal_two_passes_over_the_rows() -> None:
    x, y = data(50, 5, 3)
    moments = Moments.zeros(5, 3).update(x, y)
    assert (moments.n_rows, moments.weight) == (50, 50.0)
    assert_matches(moments, from_rows(x.numpy(), y.numpy()))


def test_weights_act_as_sklearn_takes_them_and_zero_weights_do_not_count() -> None:
    x, y = data(60, 4, 2)
    w = torch.from_numpy(np.random.default_rng(1).gamma(1.0, size=60))
    w[::7] = 0
    moments = Moments.zeros(4, 2).update(x[:25], y[:25], w[:25]).update(x[25:], y[25:], w[25:])
    assert moments.n_rows == int((w > 0).sum())
    assert moments.weight == pytest.approx(float(w.sum()), rel=1e-14)
    assert_matches(moments, from_rows(x.numpy(), y.numpy(), w.numpy()))


def test_integer_weights_equal_repeated_rows() -> None:
    x, y = data(20, 4, 2)
    counts = torch.tensor([1, 2, 3, 1] * 5)
    weighted = Moments.zeros(4, 2).update(x, y, counts)
    repeated = Moments.zeros(4, 2).update(x.repeat_interleave(counts, 0), y.repeat_interleave(counts, 0))
    for name in FIELDS:
        torch.testing.assert_close(getattr(weighted, name), getattr(repeated, name), rtol=1e-12, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 30), max_size=6),
    order=st.randoms(use_true_random=False),
    offset=st.sampled_from([0.0, 1e3, -1e6]),
    weighted=st.booleans(),
)
def test_chunks_their_order_and_sharding_change_nothing_beyond_rounding(
    cuts: list[int], order: object, offset: float, weighted: bool
) -> None:
    x, y = data(30, 4, 3, seed=3)
    x, y = x + offset, y - offset
    w = torch.linspace(0.1, 3, 30, dtype=torch.float64) if weighted else None
    edges = [0, *sorted(cuts), 30]
    chunks = [slice(a, b) for a, b in pairwise(edges)]
    order.shuffle(chunks)
    streamed, shards = Moments.zeros(4, 3), [Moments.zeros(4, 3), Moments.zeros(4, 3)]
    for i, chunk in enumerate(chunks):
        part = None if w is None else w[chunk]
        streamed.update(x[chunk], y[chunk], part)
        shards[i % 2].update(x[chunk], y[chunk], part)
    # an offset of 1e6 costs the rows themselves 1e6 · 2⁻⁵² ≈ 2e-10 in every centred value
    rtol = 1e-12 if abs(offset) < 1e4 else 2e-9
    expected = from_rows(x.numpy(), y.numpy(), None if w is None else w.numpy())
    assert_matches(streamed, expected, rtol)
    assert_matches(shards[0] + shards[1], expected, rtol)
    assert_matches(shards[1].merge(shards[0]), expected, rtol)
    assert streamed.n_rows == 30


def test_one_channel_300_times_larger_costs_the_others_nothing() -> None:
    x, y = data(200, 5, 3)
    x[:, 2] = 300 * x[:, 2] + 4000
    moments = Moments.zeros(5, 3)
    for i in range(0, 200, 16):
        moments.update(x[i : i + 16], y[i : i + 16])
    expected = from_rows(x.numpy(), y.numpy())
    keep = [0, 1, 3, 4]
    np.testing.assert_allclose(
        moments.s_xx[keep][:, keep].numpy(), expected["s_xx"][keep][:, keep].astype(float), rtol=0, atol=1e-10
    )
    assert_matches(moments, expected)


def test_float32_products_keep_float64_sums_and_survive_an_offset() -> None:
    x, y = data(512, 6, 2)
    x = (x + 1000).float()
    moments = Moments.zeros(6, 2)
    for i in range(0, 512, 32):
        moments.update(x[i : i + 32], y[i : i + 32], product_dtype=torch.float32)
    # products of centred float32 numbers: 2⁻²⁴ relative, against sums of 512
    assert_matches(moments, from_rows(x.numpy(), y.numpy()), rtol=1e-6)


def test_features_past_one_block_are_all_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmap.fit.moments._BLOCK_FEATURES", 3)
    x, y = data(30, 8, 2)
    assert_matches(Moments.zeros(8, 2).update(x, y), from_rows(x.numpy(), y.numpy()))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_refused_and_its_column_named(bad: float) -> None:
    x, y = data(5, 3, 2)
    x[2, 1] = bad
    with pytest.raises(MomentsError, match="column 1"):
        Moments.zeros(3, 2).update(x, y)


def test_shapes_and_weights_that_do_not_fit_are_refused() -> None:
    x, y = data(5, 3, 2)
    with pytest.raises(MomentsError, match="expected"):
        Moments.zeros(4, 2).update(x, y)
    with pytest.raises(MomentsError, match=r"expected \(5,\)"):
        Moments.zeros(3, 2).update(x, y, torch.ones(4))
    with pytest.raises(MomentsError, match="at least 0"):
        Moments.zeros(3, 2).update(x, y, -torch.ones(5))
    with pytest.raises(MomentsError, match="cannot merge"):
        Moments.zeros(3, 2).merge(Moments.zeros(2, 2))


@pytest.mark.parametrize("kind", ["key", "value"])
@pytest.mark.parametrize("split", ["fit", "held_out"])
def test_pair_moments_order_features_by_layer_head_channel(kind: str, split: str) -> None:
    pairs = pair_of_caches()
    moments = moments_of(pairs)
    source, target = (rows_of(kind_layers(kv, kind)) for kv in pairs[split])
    assert_matches(moments.tables[kind, split], from_rows(source, target))


def test_values_that_encode_layer_head_and_position_land_where_the_index_says() -> None:
    shape = ((2, 3), (3, 3), (2, 3))
    tokens = 2  # as many tokens as heads, so that a swapped axis would go unseen by shape

    def coded(layer: int, heads: int, width: int) -> torch.Tensor:
        code = torch.empty(1, heads, tokens, width, dtype=torch.float64)
        for h in range(heads):
            for t in range(tokens):
                for c in range(width):
                    code[0, h, t, c] = 1000 * layer + 100 * h + 10 * c + t
        return code

    layers = [coded(layer, heads, width) for layer, (heads, width) in enumerate(shape)]
    kv = stripped(layers, layers)
    moments = PairMoments.zeros(shape, shape).update("fit", kv, kv)
    mean = moments.tables["key", "fit"].mean_x
    for layer, (heads, width) in enumerate(shape):
        for h in range(heads):
            expected = [1000 * layer + 100 * h + 10 * c + 0.5 for c in range(width)]
            assert mean[moments.feature_index((layer,), h)].tolist() == expected
            assert mean[moments.target_slice(layer, h)].tolist() == expected
    assert moments.feature_index((2, 0)).tolist() == [15, 16, 17, 18, 19, 20, 0, 1, 2, 3, 4, 5]
    assert moments.target_slice(1) == slice(6, 15)


def test_only_the_chosen_rows_count_and_pads_never_do() -> None:
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, :4] = False
    source = random_cache(SOURCE_SHAPE, 2, 9, generator, mask)
    target = random_cache(TARGET_SHAPE, 2, 9, generator, mask)
    chosen = calibration_rows(mask, native_head=1, stride=2)
    moments = PairMoments.zeros(SOURCE_SHAPE, TARGET_SHAPE).update("fit", source, target, chosen)
    expected = from_rows(rows_of(source.keys, chosen), rows_of(target.keys, chosen))
    assert_matches(moments.tables["key", "fit"], expected)
    everything = PairMoments.zeros(SOURCE_SHAPE, TARGET_SHAPE).update("fit", source, target)
    assert everything.tables["value", "fit"].n_rows == int(mask.sum())
    assert everything.tables["value", "held_out"].n_rows == 0


def test_row_weights_reach_both_kinds() -> None:
    source, target = pair_of_caches()["fit"]
    w = torch.rand(source.mask.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    moments = PairMoments.zeros(SOURCE_SHAPE, TARGET_SHAPE).update("fit", source, target, weights=w)
    for kind in ("key", "value"):
        rows = [rows_of(kind_layers(kv, kind)) for kv in (source, target)]
        assert_matches(moments.tables[kind, "fit"], from_rows(*rows, w.flatten().numpy()))


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


def test_batch_size_and_sharding_do_not_change_pair_moments() -> None:
    source, target = pair_of_caches()["fit"]
    whole = PairMoments.zeros(SOURCE_SHAPE, TARGET_SHAPE).update("fit", source, target)
    one_by_one = PairMoments.zeros(SOURCE_SHAPE, TARGET_SHAPE)
    shard = PairMoments.zeros(SOURCE_SHAPE, TARGET_SHAPE)
    for i in (3, 0, 4):
        one_by_one.update("fit", source.select_rows([i]), target.select_rows([i]))
    for i in (2, 1):
        shard.update("fit", source.select_rows([i]), target.select_rows([i]))
    one_by_one.merge(shard)
    for kind in ("key", "value"):
        for name in FIELDS:
            torch.testing.assert_close(
                getattr(one_by_one.tables[kind, "fit"], name),
                getattr(whole.tables[kind, "fit"], name),
                rtol=1e-12,
                atol=1e-12,
            )


def test_caches_of_another_shape_rotation_or_padding_are_refused() -> None:
    source, target = pair_of_caches()["fit"]
    moments = PairMoments.zeros(SOURCE_SHAPE, TARGET_SHAPE)
    with pytest.raises(MomentsError, match="the source cache has layers"):
        moments.update("fit", target, target)
    with pytest.raises(MomentsError, match="different columns"):
        moments.update("fit", source, target.slice_tokens(0, 5))
    with pytest.raises(MomentsError, match="rotated keys"):
        moments.update("fit", source.rotate([None] * 3), target)
    with pytest.raises(UnknownName, match="held_out"):
        moments.update("held-out", source, target)
    with pytest.raises(MomentsError, match="another pair"):
        moments.merge(PairMoments.zeros(TARGET_SHAPE, SOURCE_SHAPE))


def test_moments_come_back_from_a_file_exactly(tmp_path: object) -> None:
    moments = moments_of(pair_of_caches())
    tensors, state = moments.to_tensors()
    path = f"{tmp_path}/moments.safetensors"
    save_file(tensors, path)
    back = PairMoments.from_tensors(load_file(path), json.loads(json.dumps(state)))
    assert (back.source_shape, back.target_shape) == (moments.source_shape, moments.target_shape)
    for key, table in moments.tables.items():
        assert (back.tables[key].n_rows, back.tables[key].weight) == (table.n_rows, table.weight)
        for name in FIELDS:
            assert torch.equal(getattr(back.tables[key], name), getattr(table, name))
    del tensors["key.fit.s_xy"]
    with pytest.raises(MomentsError, match=r"key\.fit\.s_xy"):
        PairMoments.from_tensors(tensors, state)


def test_memory_is_known_beforehand_and_a_budget_refuses() -> None:
    moments = moments_of(pair_of_caches())
    tensors, _ = moments.to_tensors()
    needed = moments_bytes(SOURCE_SHAPE, TARGET_SHAPE)
    assert needed == sum(t.numel() * t.element_size() for t in tensors.values()) == moments.nbytes
    check_memory(SOURCE_SHAPE, TARGET_SHAPE, needed)
    with pytest.raises(MemoryBudgetExceeded, match=f"{needed:,} bytes"):
        PairMoments.zeros(SOURCE_SHAPE, TARGET_SHAPE, budget_bytes=needed - 1)
