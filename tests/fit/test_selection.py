from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from kvmap.errors import UnknownName
from kvmap.fit.moments import CacheShape, PairMoments
from kvmap.fit.ridge import RidgeError
from kvmap.fit.selection import (
    SelectionError,
    head_map,
    layer_scores,
    probe,
    probe_r2,
    proportional_layer,
    select_layers,
)
from kvmap.models.cache import KVCache
from tests.fit.caches import (
    GROUPED_TARGET_SHAPE,
    TARGET_SHAPE,
    kind_layers,
    linear_image,
    moments_of,
    pair_of_caches,
    random_cache,
    rows_of,
    stripped,
)


@pytest.mark.parametrize(
    ("n_source", "n_target", "expected"),
    [
        (4, 4, (0, 1, 2, 3)),
        (2, 4, (0, 0, 1, 1)),
        (4, 2, (0, 2)),
        (1, 3, (0, 0, 0)),
        (3, 1, (0,)),
        (3, 4, (0, 0, 1, 2)),
        (8, 5, (0, 1, 3, 4, 6)),
    ],
)
def test_heads_are_matched_in_groups(n_source: int, n_target: int, expected: tuple[int, ...]) -> None:
    assert head_map(n_source, n_target) == expected


def test_a_fast_probe_says_one_line(caplog: pytest.LogCaptureFixture) -> None:
    moments = moments_of(pair_of_caches())
    with caplog.at_level("INFO", "kvmap.progress"):
        probe(moments)
    (line,) = caplog.messages
    assert line.startswith("probe: source layers, keys and values: 6 done in")


def test_a_model_without_heads_is_refused() -> None:
    with pytest.raises(SelectionError, match="at least 1"):
        head_map(0, 2)


def brute_force_r2(
    pairs: dict[str, tuple[KVCache, KVCache]],
    kind: str,
    split: str,
    layer: int,
    target: int,
    head: int,
    a: int,
) -> float:
    """Least squares on the rows with numpy, judged on the rows of `split`."""

    def rows(name: str) -> tuple[np.ndarray, np.ndarray]:
        source, image = pairs[name]
        x = rows_of((kind_layers(source, kind)[layer][:, a : a + 1],))
        y = rows_of((kind_layers(image, kind)[target][:, head : head + 1],))
        return np.hstack([x, np.ones((len(x), 1))]), y

    x, y = rows("fit")
    weight = np.linalg.lstsq(x, y, rcond=None)[0]
    x, y = rows(split)
    return float(1 - ((y - x @ weight) ** 2).sum() / ((y - y.mean(0)) ** 2).sum())


@pytest.mark.parametrize("shape", [TARGET_SHAPE, GROUPED_TARGET_SHAPE, ((1, 5), (3, 2))])
@pytest.mark.parametrize("split", ["fit", "held_out"])
def test_probes_equal_least_squares_on_the_rows(shape: CacheShape, split: str) -> None:
    pairs = pair_of_caches(shape)
    r2 = probe_r2(moments_of(pairs), split)
    for kind in ("key", "value"):
        assert r2[kind].shape == (3, 2, max(heads for heads, _ in shape))
        for layer in range(3):
            for target, (heads, _) in enumerate(shape):
                for head in range(heads):
                    a = head * 2 // heads
                    expected = brute_force_r2(pairs, kind, split, layer, target, head, a)
                    # both solve well-conditioned 4-column problems in float64
                    assert float(r2[kind][layer, target, head]) == pytest.approx(expected, abs=1e-10)
                assert r2[kind][layer, target, heads:].isnan().all()


def test_probes_of_dead_and_duplicated_channels_are_finite_and_recorded() -> None:
    pairs = pair_of_caches()
    source, target = pairs["fit"]
    keys = [k.clone() for k in source.keys]
    keys[1][:, 0, :, 2] = 5.0
    values = [v.clone() for v in source.values]
    values[2][:, 1, :, 2] = values[2][:, 1, :, 0]
    pairs["fit"] = (stripped(keys, values), target)
    result = probe(moments_of(pairs))
    assert result.fallbacks == (("key", 1, 0), ("value", 2, 1))
    for kind, layer, head in result.fallbacks:
        expected = brute_force_r2(pairs, kind, "fit", layer, 0, head, head)
        assert float(result.r2[kind][layer, 0, head]) == pytest.approx(expected, abs=1e-10)


def test_moments_that_are_not_finite_are_refused_by_kind_and_layer() -> None:
    moments = moments_of(pair_of_caches())
    column = int(moments.feature_index((1,))[0])
    moments.tables["value", "fit"].s_xx[column, column] = float("nan")
    with pytest.raises(RidgeError, match="values from source layer 1"):
        probe_r2(moments)


def test_the_r2_rule_finds_the_layers_that_made_the_target() -> None:
    generator = torch.Generator().manual_seed(0)
    shape: CacheShape = ((2, 3),) * 5
    source = random_cache(shape, 4, 30, generator)
    made = []
    for layers in ((3, 1), (4, 0)):
        keys = [source.keys[i] for i in layers]
        values = [source.values[i] for i in layers]
        made.append(linear_image(stripped(keys, values), ((1, 6),), seed=1, noise=0.1))
    target = stripped([kv.keys[0] for kv in made], [kv.values[0] for kv in made])
    moments = PairMoments.zeros(shape, ((1, 6),) * 2).update("fit", source, target)
    assert select_layers(probe_r2(moments), "r2", 1)[0][0] in (1, 3)
    # head 0 of source serves the single target head; both layers that were mixed in beat the others
    assert select_layers(probe_r2(moments), "r2", 2) == ((1, 3), (0, 4))


def test_scores_average_heads_first_and_then_keys_and_values() -> None:
    nan = float("nan")
    r2 = {
        "key": torch.tensor([[[0.2, 0.4], [0.8, nan]]]),
        "value": torch.tensor([[[0.6, 0.8], [0.0, nan]]]),
    }
    torch.testing.assert_close(layer_scores(r2), torch.tensor([[0.5, 0.4]]))


def scores(n_source: int, n_target: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {kind: torch.rand(n_source, n_target, 2, generator=generator) for kind in ("key", "value")}


@pytest.mark.parametrize("rule", ["r2", "proportional"])
def test_selected_layers_are_ascending_distinct_and_nested_in_k(rule: str) -> None:
    r2 = scores(6, 4)
    smaller: tuple[tuple[int, ...], ...] = ((),) * 4
    for k in range(1, 7):
        chosen = select_layers(r2, rule, k)
        for layer, layers in enumerate(chosen):
            assert list(layers) == sorted(set(layers))
            assert len(layers) == k
            assert set(smaller[layer]) <= set(layers)
        smaller = chosen
    assert chosen == select_layers(r2, rule, "all") == select_layers(r2, "all", 1)


@pytest.mark.parametrize(("n_source", "n_target"), [(4, 4), (28, 36), (24, 28), (36, 28), (1, 3), (5, 2)])
def test_the_proportional_layer_lies_at_the_same_depth(n_source: int, n_target: int) -> None:
    chosen = select_layers(scores(n_source, n_target), "proportional", 1)
    for layer, (source,) in enumerate(chosen):
        exact = Fraction(layer * n_source, n_target)
        assert source == min(round(exact), n_source - 1) == proportional_layer(layer, n_source, n_target)
    if n_source == n_target:
        assert chosen == tuple((i,) for i in range(n_source))


@pytest.mark.parametrize("top_k", [0, 7, -1, 2.0, True, "every"])
def test_a_number_of_layers_that_cannot_be_served_is_refused(top_k: object) -> None:
    with pytest.raises(SelectionError, match=r"top_k=.*6 layers; expected an integer from 1 to 6, or 'all'"):
        select_layers(scores(6, 4), "r2", top_k)


def test_an_unknown_rule_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match="proportional"):
        select_layers(scores(6, 4), "proportionate", 1)


def test_scores_that_are_not_finite_are_refused() -> None:
    r2 = scores(3, 2)
    r2["key"][1, 0] = float("nan")
    with pytest.raises(SelectionError, match="source layer 1 to target layer 0"):
        select_layers(r2, "r2", 1)
