from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from kvmap.errors import UnknownName
from kvmap.fit.features import KINDS, CacheShape, Layout, Selection
from kvmap.fit.selection import (
    RULES,
    SelectionError,
    head_map,
    needs,
    probe_r2,
    procrustes_cosines,
    proportional_layer,
    rank_layers,
)
from tests.fit.pair_rows import random_rows

SHAPES: tuple[CacheShape, CacheShape] = (((2, 3),) * 6, ((2, 4),) * 4)
RAGGED: tuple[CacheShape, CacheShape] = (((2, 3), (1, 5), (3, 2), (2, 1)), ((1, 5), (3, 2), (2, 4)))


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


def test_a_model_without_heads_is_refused() -> None:
    with pytest.raises(SelectionError, match="at least 1"):
        head_map(0, 2)


def random_scores(layout: Layout, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    n_heads = max(heads for heads, _ in layout.target_shape)
    shape = (len(layout.source_shape), len(layout.target_shape), n_heads)
    tables = {kind: torch.rand(*shape, generator=generator, dtype=torch.float64) for kind in KINDS}
    for table in tables.values():
        table[:, : layout.native_layers] = float("nan")
        for layer, (heads, _) in enumerate(layout.target_shape):
            table[:, layer, heads:] = float("nan")
    return tables


@pytest.mark.parametrize("shapes", [SHAPES, RAGGED])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("native_layers", [0, 1])
def test_a_smaller_choice_is_the_beginning_of_a_larger_one(
    shapes: tuple[CacheShape, CacheShape], rule: str, apart: bool, native_layers: int
) -> None:
    rows = random_rows(*shapes, native_layers=native_layers)
    n_source, n_target = map(len, shapes)
    everything = rank_layers(rows, rule, "all", apart=apart)
    for kind in KINDS:
        assert everything[kind][:native_layers] == ((),) * native_layers
        assert all(sorted(layers) == list(range(n_source)) for layers in everything[kind][native_layers:])
    for k in range(1, n_source + 1):
        chosen = rank_layers(rows, rule, k, apart=apart)
        assert set(chosen) == set(KINDS)
        kept = n_source if rule == "all" else k
        for kind in KINDS:
            assert chosen[kind] == tuple(layers[:kept] for layers in everything[kind])
            assert len(chosen[kind]) == n_target
        if not apart:
            assert chosen["key"] == chosen["value"]


@pytest.mark.parametrize(("rule", "table"), [("r2", probe_r2), ("cosine", procrustes_cosines)])
@pytest.mark.parametrize("apart", [False, True])
def test_layers_are_ranked_by_their_mean_score(rule: str, table, apart: bool) -> None:
    rows = random_rows(*RAGGED)
    scores = table(rows)
    chosen = rank_layers(rows, rule, "all", apart=apart)
    for kind in KINDS:
        for layer, (n_heads, _) in enumerate(RAGGED[1]):
            kinds = (kind,) if apart else KINDS
            mean = [
                sum(float(scores[k][s, layer, h]) for k in kinds for h in range(n_heads)) for s in range(4)
            ]
            assert list(chosen[kind][layer]) == sorted(range(4), key=lambda s: -mean[s])


@pytest.mark.parametrize("rule", ["r2", "cosine"])
def test_scores_at_hand_are_used_and_no_moments_are_read(rule: str) -> None:
    rows = random_rows(*SHAPES)
    scores = {"r2": probe_r2, "cosine": procrustes_cosines}[rule](rows)
    assert rank_layers(rows.layout, rule, 3, scores=scores) == rank_layers(rows, rule, 3)


def test_the_r2_rule_finds_the_layers_that_made_the_target() -> None:
    rows = random_rows(((1, 3),) * 5, ((1, 6),) * 2, noise=0.1)
    x, y = rows.rows["fit"]
    for layer, sources in enumerate(((3, 1), (4, 0))):
        for kind in range(2):
            made = [x[:, kind * 15 + s * 3 : kind * 15 + s * 3 + 3] for s in sources]
            y[:, kind * 12 + layer * 6 : kind * 12 + layer * 6 + 6] = torch.cat(made, 1)
    for rule in ("r2", "forward"):
        chosen = rank_layers(rows, rule, 2)["key"]
        assert [set(layers) for layers in chosen] == [{3, 1}, {4, 0}]


@pytest.mark.parametrize("rule", ["r2", "cosine"])
def test_keys_and_values_choose_apart_or_together(rule: str) -> None:
    layout = Layout(((1, 2),) * 3, ((1, 2),))
    scores = {
        "key": torch.tensor([0.9, 0.1, 0.6]).reshape(3, 1, 1),
        "value": torch.tensor([0.1, 0.7, 0.6]).reshape(3, 1, 1),
    }
    apart = rank_layers(layout, rule, 2, apart=True, scores=scores)
    assert apart == {"key": ((0, 2),), "value": ((1, 2),)}
    assert rank_layers(layout, rule, 2, scores=scores) == {"key": ((2, 0),), "value": ((2, 0),)}


def test_equal_scores_go_to_the_lower_layer() -> None:
    layout = Layout(((1, 2),) * 5, ((1, 2),))
    mean = torch.tensor([0.3, 0.5 + 1e-12, 0.3, 0.5 - 1e-12, 0.5], dtype=torch.float64)
    scores = {kind: mean.reshape(5, 1, 1) for kind in KINDS}
    assert rank_layers(layout, "r2", "all", scores=scores)["key"] == ((1, 3, 4, 0, 2),)


@pytest.mark.parametrize(("n_source", "n_target"), [(4, 4), (28, 36), (24, 28), (36, 28), (1, 3), (5, 2)])
def test_the_proportional_layer_lies_at_the_same_depth(n_source: int, n_target: int) -> None:
    layout = Layout(((1, 2),) * n_source, ((1, 2),) * n_target)
    chosen: Selection = rank_layers(layout, "proportional", 1)["value"]
    for layer, (source,) in enumerate(chosen):
        exact = Fraction(layer * n_source, n_target)
        assert source == min(round(exact), n_source - 1) == proportional_layer(layer, n_source, n_target)
    if n_source == n_target:
        assert chosen == tuple((i,) for i in range(n_source))


def test_the_nearest_proportional_layers_come_first() -> None:
    layout = Layout(((1, 2),) * 6, ((1, 2),) * 4)
    assert rank_layers(layout, "proportional", 4)["key"] == (
        (0, 1, 2, 3),
        (2, 1, 3, 0),
        (3, 2, 4, 1),
        (4, 5, 3, 2),
    )


@pytest.mark.parametrize("rule", ["r2", "cosine", "forward", "proportional"])
@pytest.mark.parametrize("top_k", [0, 7, -1, 2.0, True, "every"])
def test_a_number_of_layers_that_cannot_be_served_is_refused(rule: str, top_k: object) -> None:
    with pytest.raises(SelectionError, match=r"top_k=.*6 layers; expected an integer from 1 to 6, or 'all'"):
        rank_layers(Layout(*SHAPES), rule, top_k)


def test_all_layers_are_all_whatever_their_number() -> None:
    assert rank_layers(Layout(*SHAPES), "all", 2)["key"] == (tuple(range(6)),) * 4


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_reads_what_it_says(rule: str) -> None:
    assert needs(rule) in ("nothing", "matched", "joint")
    if needs(rule) == "nothing":
        assert rank_layers(Layout(*SHAPES), rule, 2) == rank_layers(random_rows(*SHAPES), rule, 2)
    else:
        with pytest.raises(SelectionError, match=rf"'{rule}' reads moments.*calibrate first"):
            rank_layers(Layout(*SHAPES), rule, 2)


@pytest.mark.parametrize("rule", ["r2", "cosine", "forward"])
def test_layers_are_chosen_on_the_fit_split(rule: str) -> None:
    rows = random_rows(*SHAPES)
    expected = rank_layers(rows, rule, 3)
    rows.rows["held_out"] = tuple(torch.full_like(part, float("nan")) for part in rows.rows["held_out"])
    assert rank_layers(rows, rule, 3) == expected


def test_an_unknown_rule_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match="proportional"):
        rank_layers(Layout(*SHAPES), "proportionate", 1)
    with pytest.raises(UnknownName, match="forward"):
        needs("forwards")


def test_scores_that_are_not_finite_are_refused() -> None:
    layout = Layout(*SHAPES)
    scores = random_scores(layout)
    scores["key"][1, 0, 1] = float("nan")
    with pytest.raises(SelectionError, match="probe R² of keys from source layer 1 to target layer 0"):
        rank_layers(layout, "r2", 1, scores=scores)


def test_scores_of_another_pair_are_refused() -> None:
    with pytest.raises(SelectionError, match=r"\(4, 3, 3\).*6 source layers, 4 target layers"):
        rank_layers(Layout(*SHAPES), "cosine", 1, scores=random_scores(Layout(*RAGGED)))
