"""Row weights against the Jacobian of a plain attention, and the shrinkage against a search."""

from __future__ import annotations

import pytest
import torch

from kvmap.errors import KvmapError
from kvmap.fit.features import geometry_shape
from kvmap.fit.sensitivity import (
    SensitivityError,
    WeightSpread,
    layer_sensitivity,
    prefix_boundaries,
    read_sensitivity,
    shrink_weights,
    shrinkage,
)
from kvmap.models.capture import prefill
from kvmap.models.loaded import LoadedModel
from kvmap.models.queries import read_queries
from tests.tiny_random_models import FAMILIES, left_padding, random_ids

BATCH, N_HEADS, N_KV_HEADS, TOKENS, WIDTH = 3, 6, 2, 11, 4
GROUP = N_HEADS // N_KV_HEADS


def attention_inputs():
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(BATCH, N_HEADS, TOKENS, WIDTH, generator=generator)
    key, value = (torch.randn(BATCH, N_KV_HEADS, TOKENS, WIDTH, generator=generator) for _ in range(2))
    return query, key, value + 0.5


def some_rows():
    return torch.rand(BATCH, TOKENS, generator=torch.Generator().manual_seed(5)) > 0.4


def output(q, keys, values, scaling, softcap):
    """Attention of one query over its prefix."""
    s = scaling * (keys @ q)
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    return s.softmax(0) @ values


def by_jacobians(query, key, value, scaling, mask, rows, softcap, boundaries):
    """How far the output moves with each key and value, from autograd in float64, one query at a time."""
    weights = {kind: torch.zeros(BATCH, N_KV_HEADS, TOKENS, dtype=torch.float64) for kind in ("key", "value")}
    for row in range(BATCH):
        real = mask[row].nonzero().flatten().tolist()
        for head in range(N_KV_HEADS):
            for b in (b for b in boundaries if b <= len(real)):
                seen = real[:b]
                k, v = (x[row, head, seen].double() for x in (key, value))
                moved = {"key": torch.zeros(b).double(), "value": torch.zeros(b).double()}
                for u in range(head * GROUP, (head + 1) * GROUP):
                    q = query[row, u, seen[-1]].double()
                    by_key, by_value = torch.autograd.functional.jacobian(
                        lambda k, v, q=q: output(q, k, v, scaling, softcap), (k, v)
                    )
                    moved["key"] += by_key.square().sum((0, 2))
                    moved["value"] += by_value.square().sum((0, 2)) / WIDTH
                for kind, mass in moved.items():
                    if b > 1 or kind == "value":
                        weights[kind][row, head, seen] += mass / mass.sum()
    counted = (rows & mask)[:, None]
    for kind, summed in weights.items():
        kept = summed * counted
        total = kept.sum(-1, keepdim=True)
        weights[kind] = torch.where(total > 0, kept * counted.sum(-1, keepdim=True) / total, counted.double())
    return weights


@pytest.mark.parametrize("softcap", [None, 0.8])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("which_rows", ["all", "some"])
@pytest.mark.parametrize("boundaries", [(2, 3, 5, 9, 11), (1, 4), (7,)])
def test_weights_are_the_squared_jacobians_of_the_output(softcap, padded, which_rows, boundaries):
    query, key, value = attention_inputs()
    mask = left_padding(BATCH, TOKENS) if padded else torch.ones(BATCH, TOKENS)
    mask = mask.bool()
    rows = some_rows() if which_rows == "some" else torch.ones_like(mask)
    found = layer_sensitivity(query, key, value, 0.7, mask, rows, softcap=softcap, boundaries=boundaries)
    expected = by_jacobians(query, key, value, 0.7, mask, rows, softcap, boundaries)
    for kind, r in found.items():
        assert r.shape == (BATCH, N_KV_HEADS, TOKENS)
        # float64 throughout, handed out in float32
        torch.testing.assert_close(r.double(), expected[kind], rtol=1e-6, atol=1e-7)


def test_a_token_that_draws_nearly_all_attention_keeps_its_digits():
    _, key, value = attention_inputs()
    query = torch.zeros(BATCH, N_HEADS, TOKENS, WIDTH)
    query[..., 0] = 1.0
    key[:, :, 0, 0] = 20.0  # leaves 1e-8 of the attention to the others, and 1e-16 of ‖v‖² as distance
    mask = torch.ones(BATCH, TOKENS, dtype=torch.bool)
    found = layer_sensitivity(query, key, value, 1.0, mask, boundaries=(11,))
    expected = by_jacobians(query, key, value, 1.0, mask, mask, None, (11,))
    assert bool((found["key"][:, :, 0] > 1).all())  # its key matters most all the same
    # autograd takes the small difference itself: 1e-16 of 1e-8
    torch.testing.assert_close(found["key"].double(), expected["key"], rtol=1e-6, atol=1e-7)


def test_a_padded_row_weighs_as_it_does_alone():
    query, key, value = attention_inputs()
    mask = left_padding(BATCH, TOKENS).bool()
    together = layer_sensitivity(query, key, value, 0.7, mask, boundaries=4)
    for row in range(BATCH):
        real = slice(3 * row, None)
        one = [x[row : row + 1, :, real] for x in (query, key, value)]
        alone = layer_sensitivity(*one, 0.7, mask[row : row + 1, real], boundaries=4)
        for kind in alone:
            torch.testing.assert_close(together[kind][row, :, real], alone[kind][0])
            assert not together[kind][row, :, : 3 * row].any()


def test_every_boundary_has_the_same_mass():
    query, key, value = attention_inputs()
    mask = torch.ones(BATCH, TOKENS, dtype=torch.bool)
    lengths = (2, 5, 11)
    together = layer_sensitivity(query, key, value, 0.7, mask, boundaries=lengths)
    single = [layer_sensitivity(query, key, value, 0.7, mask, boundaries=(b,)) for b in lengths]
    for kind in ("key", "value"):
        torch.testing.assert_close(together[kind], torch.stack([one[kind] for one in single]).mean(0))
        for b, one in zip(lengths, single, strict=True):
            torch.testing.assert_close(one[kind].sum(-1), torch.full((BATCH, N_KV_HEADS), float(TOKENS)))
            assert not one[kind][..., b:].any()  # no query of that prefix sees them


def test_leaving_rows_out_rescales_the_others():
    query, key, value = attention_inputs()
    mask, rows = torch.ones(BATCH, TOKENS, dtype=torch.bool), some_rows()
    whole = layer_sensitivity(query, key, value, 0.7, mask)
    part = layer_sensitivity(query, key, value, 0.7, mask, rows)
    for kind, r in part.items():
        kept = whole[kind] * rows[:, None]
        torch.testing.assert_close(r / r.sum(-1, keepdim=True), kept / kept.sum(-1, keepdim=True))
        torch.testing.assert_close(r.sum(-1), rows.sum(-1, keepdim=True).float().expand(-1, N_KV_HEADS))


def test_weights_do_not_depend_on_units_or_on_the_order_of_a_group():
    query, key, value = attention_inputs()
    mask = torch.ones(BATCH, TOKENS, dtype=torch.bool)
    expected = layer_sensitivity(query, key, value, 0.7, mask)
    swapped = query[:, [2, 0, 1, 4, 5, 3]]
    for other in (
        layer_sensitivity(query, key, 7 * value, 0.7, mask),
        layer_sensitivity(query, key, value + 3, 0.7, mask),  # a constant moves every output alike
        layer_sensitivity(2 * query, key, value, 0.35, mask),
        layer_sensitivity(swapped, key, value, 0.7, mask),
    ):
        for kind in expected:
            torch.testing.assert_close(other[kind], expected[kind], rtol=1e-5, atol=1e-6)


def test_where_nothing_tells_rows_apart_they_weigh_alike():
    query, key, value = (x[:, :, :4] for x in attention_inputs())
    mask = torch.tensor([[0, 0, 0, 1], [1, 1, 1, 1], [1, 1, 1, 1]]).bool()
    rows = torch.tensor([[0, 0, 0, 1], [0, 0, 0, 0], [0, 0, 1, 1]]).bool()
    found = layer_sensitivity(query, key, value, 0.7, mask, rows, boundaries=(1, 2))
    assert found["key"][0, 0].tolist() == [0, 0, 0, 1]  # a prefix of one token
    assert not found["key"][1].any()  # no row counts
    assert found["value"][2, 1].tolist() == [0, 0, 1, 1]  # beyond the last boundary
    empty = layer_sensitivity(query, key, value, 0.7, mask, rows, boundaries=())
    assert torch.equal(empty["value"], rows[:, None].float().expand(-1, N_KV_HEADS, -1))


@pytest.mark.parametrize("n_tokens", [0, 1, 2, 7, 33, 34, 40, 200, 1024, 32768])
@pytest.mark.parametrize("n_boundaries", [1, 2, 5, 32])
def test_boundaries_are_distinct_lengths_up_to_the_whole(n_tokens, n_boundaries):
    lengths = prefix_boundaries(n_tokens, n_boundaries)
    assert len(lengths) == min(n_boundaries, max(n_tokens - 1, min(n_tokens, 1)))
    assert list(lengths) == sorted(set(lengths))
    assert lengths[-1:] == ((n_tokens,) if n_tokens else ())
    assert all(length >= min(2, n_tokens) for length in lengths)


def test_boundaries_are_log_spaced():
    assert prefix_boundaries(1024, 10) == (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    with pytest.raises(SensitivityError, match="n_boundaries=0"):
        prefix_boundaries(9, 0)


@pytest.mark.parametrize("name", ["llama", "gemma2", "ministral3", "gpt_neox"])
def test_one_forward_gives_the_cache_and_the_weights_of_every_layer(name):
    loaded = LoadedModel.from_model(FAMILIES[name](n_layers=3))
    ids, mask = random_ids(2, 10), left_padding(2, 10)
    rows = mask.bool() & (torch.arange(10) % 2 == 0)
    kv, weights = read_sensitivity(loaded, ids, mask, rows, boundaries=4)
    expected_kv = prefill(loaded, ids, mask)
    assert all(map(torch.equal, kv.keys, expected_kv.keys))
    assert set(weights) == {(kind, layer) for kind in ("key", "value") for layer in range(3)}

    def compare(layer, query, key, value, scaling, softcap):
        expected = layer_sensitivity(query, key, value, scaling, mask, rows, softcap=softcap, boundaries=4)
        for kind, r in expected.items():
            assert torch.equal(weights[kind, layer], r)
            assert r.shape == (2, loaded.geometry.n_kv_heads, 10)
            torch.testing.assert_close(r.sum(-1), rows.sum(-1, keepdim=True).expand(r.shape[:2]).float())

    read_queries(loaded, ids, mask, compare)


def kish(w):
    return float(w.sum() ** 2 / w.square().sum())


@pytest.mark.parametrize("n_features", [1, 4, 12, 20, 30, 49, 50, 80])
def test_shrinkage_is_the_largest_that_a_search_finds(n_features):
    r = torch.distributions.Gamma(0.3, 1.0).sample((100,)).double()
    r = r / r.mean()
    floor = min(100, 2 * n_features)
    grid = torch.linspace(0, 1, 20001, dtype=torch.float64)
    effective = (1 + grid[:, None] * (r - 1)).sum(1) ** 2 / (1 + grid[:, None] * (r - 1)).square().sum(1)
    best = float(grid[effective >= floor * (1 - 1e-12)].max())
    alpha = shrinkage(r.var(correction=0), 100, n_features)
    assert float(alpha) == pytest.approx(best, abs=1e-4)  # the grid's step is 5e-5
    assert kish(1 + alpha * (r - 1)) >= floor * (1 - 1e-9)


def test_equal_weights_and_fits_without_features_need_no_shrinkage():
    assert shrinkage(torch.tensor([0.0, 0.5]), 10, 100).tolist() == [1.0, 0.0]
    assert shrinkage(torch.tensor([3.0]), 10, 0).tolist() == [1.0]
    assert shrinkage(torch.tensor([3.0]), 10, 5, rows_per_feature=1.0).item() == pytest.approx(3**-0.5)


def batches_of_weights():
    loaded = LoadedModel.from_model(FAMILIES["llama"]())
    for seed, n_tokens in ((1, 40), (2, 25), (3, 9)):
        ids = random_ids(2, n_tokens, seed)
        rows = torch.ones_like(ids, dtype=torch.bool)
        rows[:, 0] = False
        yield rows, read_sensitivity(loaded, ids, None, rows)[1], geometry_shape(loaded.geometry)


def test_spread_added_up_by_batches_and_parts_is_that_of_all_rows():
    batches = list(batches_of_weights())
    shape = batches[0][2]
    spread, other = WeightSpread.zeros(shape), WeightSpread.zeros(shape)
    for part, (rows, weights, _) in zip((spread, spread, other), batches, strict=True):
        part.update(weights, rows)
    spread.merge(other)
    n_rows = sum(int(rows.sum()) for rows, *_ in batches)
    assert spread.n_rows == n_rows == 2 * (39 + 24 + 8)
    for kind in ("key", "value"):
        for layer, (n_heads, _) in enumerate(shape):
            alpha = spread.alpha(kind, layer, n_features=20)
            for head in range(n_heads):
                r = torch.cat([w[kind, layer][:, head][rows] for rows, w, _ in batches]).double()
                assert float(spread.cv2(kind, layer)[head]) == pytest.approx(
                    float(r.var(correction=0)), rel=1e-5
                )
                shrunk = torch.cat(
                    [shrink_weights(w[kind, layer], alpha, rows)[:, head][rows] for rows, w, _ in batches]
                )
                assert bool((shrunk >= 0).all())
                assert float(shrunk.mean()) == pytest.approx(1.0, rel=1e-6)
                effective = float(spread.effective_rows(kind, layer, alpha)[head])
                assert effective == pytest.approx(kish(shrunk), rel=1e-5)  # r is float32
                assert effective >= 40 * (1 - 1e-9)
                assert alpha[head] == 1 or effective == pytest.approx(40)


def test_shrunk_weights_are_none_where_rows_do_not_count():
    r, rows = torch.tensor([[[0.0, 3.0, 0.0]]]), torch.tensor([[False, True, True]])
    assert shrink_weights(r, torch.tensor([0.5]), rows).tolist() == [[[0.0, 2.0, 0.5]]]
    assert shrink_weights(r, torch.tensor([0.5])).tolist() == [[[0.5, 2.0, 0.5]]]


def test_weights_of_another_target_and_a_spread_of_nothing_are_refused():
    spread = WeightSpread.zeros(((2, 4),))
    weights = {("key", 0): torch.ones(1, 2, 3), ("value", 0): torch.ones(1, 3, 3)}
    with pytest.raises(SensitivityError, match=r"\('value', 0\): 3.*\('value', 0\): 2"):
        spread.update(weights, torch.ones(1, 3, dtype=torch.bool))
    with pytest.raises(SensitivityError, match="two targets"):
        spread.merge(WeightSpread.zeros(((2, 4), (2, 4))))
    with pytest.raises(KvmapError, match="no rows"):
        spread.alpha("key", 0, 3)
