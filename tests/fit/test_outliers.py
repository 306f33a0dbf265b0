"""Outlier tokens: the rule that finds them, and what each policy makes of their rows."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from kvmap.errors import UnknownName
from kvmap.fit.calibrate import CalibrationOptions, Stream, accumulate_moments
from kvmap.fit.captures import CapturedBatch
from kvmap.fit.features import KINDS, CacheShape, Layout, Recipe, both
from kvmap.fit.linear import Penalty, fit_linear
from kvmap.fit.moments import MomentsError
from kvmap.fit.outliers import (
    OutlierError,
    OutlierRows,
    OutlierRule,
    sample_sequences,
)
from kvmap.fit.pair_moments import PairMoments, TableSpec, full_tables, head_local_tables, selected_tables
from kvmap.mappers import LinearMapper
from kvmap.models.cache import KVCache
from tests.fit.caches import kind_layers, linear_image, random_cache, stripped

SOURCE: CacheShape = ((2, 8), (2, 8), (1, 12), (2, 8))
TARGET: CacheShape = ((2, 4), (2, 4))
LAYOUT = Layout(SOURCE, TARGET)
SPLIT_OF_ROW = ("fit", "fit", "held_out", "fit", "held_out", "fit")
TOKENS = 40
SINKS = (
    (0, 7),
    (0, 21),
    (1, 9),
    (1, 30),
    (2, 11),
    (3, 5),
    (3, 6),
    (3, 39),
    (4, 20),
    (5, 2),
    (5, 17),
    (5, 33),
)
"""(sequence, token)."""
N_FIT, N_HELD_OUT = 10, 2

Kinds = tuple[list[Tensor], list[Tensor]]


def at(sinks: Iterable[tuple[int, int]] = SINKS) -> Tensor:
    flags = torch.zeros(len(SPLIT_OF_ROW), TOKENS, dtype=torch.bool)
    for row, token in sinks:
        flags[row, token] = True
    return flags


def clean_source(seed: int = 0) -> KVCache:
    """Keys about a large common vector, channels of unlike spread."""
    kv = random_cache(SOURCE, len(SPLIT_OF_ROW), TOKENS, torch.Generator().manual_seed(seed))
    law = torch.Generator().manual_seed(11)
    keys, values = [], []
    for layer, (heads, width) in enumerate(SOURCE):
        spread = 2.0 ** torch.randint(-3, 4, (heads, 1, width), generator=law)
        offset = 5 * torch.randn(heads, 1, width, generator=law, dtype=torch.float64)
        keys.append((kv.keys[layer] + offset) * spread)
        values.append(kv.values[layer] * spread)
    return stripped(keys, values)


def with_sinks(
    kv: KVCache,
    sinks: Iterable[tuple[int, int]] = SINKS,
    how: str = "sink",
    layers: Iterable[int] = range(len(SOURCE)),
) -> KVCache:
    """What a massive activation does to some tokens, in some layers."""
    keys, values = [k.clone() for k in kv.keys], [v.clone() for v in kv.values]
    for layer in layers:
        spread = keys[layer].std((0, 2))
        direction = spread * torch.sign(torch.arange(spread.numel()).view(spread.shape) % 3 - 0.5)
        for row, token in sinks:
            if how in ("far_key", "sink"):
                keys[layer][row, :, token] = keys[layer].mean((0, 2)) + 20 * direction
            if how in ("drained_value", "sink"):
                values[layer][row, :, token] *= 0.01
            if how == "massive_value":
                values[layer][row, :, token] *= 100
    return replace(kv, keys=tuple(keys), values=tuple(values))


def by_row(kv: KVCache) -> list[KVCache]:
    return [kv.select_rows([row]) for row in range(kv.batch_size)]


@pytest.mark.parametrize("how", ["sink", "far_key", "drained_value", "massive_value"])
def test_planted_outliers_are_found_and_no_others(how: str) -> None:
    kv = with_sinks(clean_source(), how=how)
    rule = OutlierRule.fit([kv])
    assert torch.equal(rule.flag(kv), at())
    assert not OutlierRule.fit([clean_source()]).flag(clean_source()).any()


def test_a_rule_finds_the_outliers_of_texts_it_was_not_fitted_on() -> None:
    rule = OutlierRule.fit([with_sinks(clean_source())])
    other = with_sinks(clean_source(5), SINKS[:3])
    assert torch.equal(rule.flag(other), at(SINKS[:3]))


def loop_flags(sample: KVCache, kv: KVCache, threshold: float, share: float) -> np.ndarray:
    """The definition, in numpy: lower medians by sorting, token by token."""

    def median(x: np.ndarray) -> np.ndarray:
        return np.sort(x, axis=0)[(len(x) - 1) // 2]

    def rows(layer: Tensor) -> np.ndarray:
        return layer.transpose(1, 2).flatten(0, 1).flatten(1).double().numpy()

    votes = np.zeros(kv.batch_size * kv.n_tokens)
    for layer in range(kv.n_layers):
        keys, values = rows(sample.keys[layer]), rows(sample.values[layer])
        centre = median(keys)
        scale = np.maximum(median(abs(keys - centre)), abs(centre) / 256)
        size = median(abs(values))

        def sizes(k: np.ndarray, v: np.ndarray, c=centre, s=scale, r=size) -> list[np.ndarray]:
            return [0.5 * np.log((((k - c) / s) ** 2).mean(1)), 0.5 * np.log(((v / r) ** 2).mean(1))]

        far = []
        for known, new in zip(
            sizes(keys, values), sizes(rows(kv.keys[layer]), rows(kv.values[layer])), strict=True
        ):
            level = median(known)
            far.append((new - level) / max(0.1, 1.4826 * median(abs(known - level))))
        votes += (far[0] > threshold) | (abs(far[1]) > threshold)
    return (votes >= share * kv.n_layers).reshape(kv.batch_size, kv.n_tokens)


@pytest.mark.parametrize(("threshold", "share"), [(6.0, 0.5), (1.0, 0.25), (1.5, 0.5), (0.5, 1.0)])
def test_the_rule_is_its_definition(threshold: float, share: float) -> None:
    sample, kv = with_sinks(clean_source()), with_sinks(clean_source(1))
    rule = OutlierRule.fit([sample], threshold=threshold, share=share)
    flags = rule.flag(kv)
    assert flags.any()
    assert np.array_equal(flags.numpy(), loop_flags(sample, kv, threshold, share))


def test_a_token_must_be_far_in_its_share_of_layers() -> None:
    kv = with_sinks(clean_source(), layers=(1, 3))
    for share, found in ((0.25, True), (0.5, True), (0.51, False), (1.0, False)):
        assert torch.equal(OutlierRule.fit([kv], share=share).flag(kv), at() & found)


def test_the_sample_alone_makes_the_rule_not_its_batches_or_order() -> None:
    kv = with_sinks(clean_source())
    whole = OutlierRule.fit([kv])
    pieces = [kv.select_rows([4]), kv.select_rows([5, 0, 2]), kv.select_rows([3, 1])]
    for other in (OutlierRule.fit(by_row(kv)), OutlierRule.fit(pieces)):
        assert other.same_as(whole)
    assert not OutlierRule.fit(by_row(kv)[:3]).same_as(whole)
    assert not OutlierRule.fit([kv], threshold=5.0).same_as(whole)


def test_a_token_is_judged_by_itself() -> None:
    kv = with_sinks(clean_source())
    rule = OutlierRule.fit([kv])
    alone = [rule.flag(kv.slice_tokens(t, t + 1)) for t in range(TOKENS)]
    assert torch.equal(torch.cat(alone, 1), at())


def test_pads_count_neither_for_the_rule_nor_as_outliers() -> None:
    kv = with_sinks(clean_source())
    wild = replace(
        kv,
        keys=tuple(torch.cat([1e4 * k[:, :, :9], k], 2) for k in kv.keys),
        values=tuple(torch.cat([1e4 * v[:, :, :9], v], 2) for v in kv.values),
        positions=torch.cat([torch.zeros_like(kv.positions[:, :9]), kv.positions], 1),
        mask=torch.cat([torch.zeros_like(kv.mask[:, :9]), kv.mask], 1),
    )
    rule = OutlierRule.fit([wild])
    assert rule.same_as(OutlierRule.fit([kv]))
    assert torch.equal(rule.flag(wild)[:, 9:], at())
    assert not rule.flag(wild)[:, :9].any()
    assert rule.flag_columns(wild.keys, wild.values)[:, :9].all()


@pytest.mark.parametrize("factor", [2.0**-20, 256.0])
def test_a_channel_of_another_scale_changes_nothing(factor: float) -> None:
    kv = with_sinks(clean_source())
    scaled = replace(kv, keys=_channel(kv.keys, factor), values=_channel(kv.values, factor))
    rule, other = OutlierRule.fit([kv]), OutlierRule.fit([scaled])
    # powers of two change no digit
    assert all(
        torch.equal(a.level, b.level) and torch.equal(a.spread, b.spread)
        for a, b in zip(rule.layers, other.layers, strict=True)
    )
    assert torch.equal(other.flag(scaled), at())


def _channel(layers: tuple[Tensor, ...], factor: float) -> tuple[Tensor, ...]:
    scaled = [layer.clone() for layer in layers]
    for layer in scaled:
        layer[:, 0, :, 3] *= factor
    return tuple(scaled)


@pytest.mark.parametrize(("constant", "jitter"), [(0.0, 0.0), (300.0, 0.0), (300.0, 1e-4)])
def test_channels_that_hardly_vary_say_nothing(constant: float, jitter: float) -> None:
    kv = with_sinks(clean_source())
    fixed = [[layer.clone() for layer in layers] for layers in (kv.keys, kv.values)]
    generator = torch.Generator().manual_seed(2)
    for layers in fixed:
        for layer in layers:
            noise = torch.randn(layer[:, 0, :, 3].shape, generator=generator)
            layer[:, 0, :, 3] = constant + jitter * noise
            layer[0, 0, 12, 3] += constant / 256  # a unit in the last place of bfloat16
    dull = replace(kv, keys=tuple(fixed[0]), values=tuple(fixed[1]))
    assert torch.equal(OutlierRule.fit([dull]).flag(dull), at())


def test_a_constant_cache_has_no_outliers() -> None:
    kv = stripped([torch.zeros(2, 1, 40, 3)], [torch.ones(2, 1, 40, 3)])
    assert not OutlierRule.fit([kv]).flag(kv).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrower_caches_are_judged_alike(dtype: torch.dtype) -> None:
    kv = with_sinks(clean_source())
    rule = OutlierRule.fit([kv])
    assert torch.equal(rule.flag(kv.to(dtype=dtype)), at())


def test_what_is_not_finite_is_no_outlier_and_moments_still_refuse_it() -> None:
    source = with_sinks(clean_source())
    rule = OutlierRule.fit([source])
    for bad in (math.inf, math.nan):
        broken = [k.clone() for k in source.keys]
        for layer in broken:
            layer[0, 0, 12, 0] = bad
        broken_source = replace(source, keys=tuple(broken))
        assert torch.equal(rule.flag(broken_source), at())
        with pytest.raises(MomentsError, match="NaN or infinite"):
            accumulated(broken_source, linear_image(source, TARGET, 3), OutlierRows(rule, "drop", LAYOUT))
        with pytest.raises(OutlierError, match="source layer 0 holds a NaN"):
            OutlierRule.fit([broken_source])


def test_a_rule_comes_back_from_its_state() -> None:
    rule = OutlierRule.fit([with_sinks(clean_source())], threshold=5.5, share=0.4)
    settings, tensors = rule.to_state()
    assert OutlierRule.from_state(json.loads(json.dumps(settings)), tensors).same_as(rule)


def test_a_rule_refuses_what_it_cannot_read() -> None:
    kv = clean_source()
    rule = OutlierRule.fit([kv])
    rotated = replace(kv, rotations=(None,) * kv.n_layers)
    for call in (rule.flag, lambda given: OutlierRule.fit([given])):
        with pytest.raises(OutlierError, match="rotated keys"):
            call(rotated)
    fewer = replace(kv, keys=kv.keys[:2], values=kv.values[:2])
    for call in (rule.flag, lambda given: OutlierRule.fit([kv, given])):
        with pytest.raises(OutlierError, match="fit the rule on this source"):
            call(fewer)
    with pytest.raises(OutlierError, match="on 5 tokens"):
        OutlierRule.fit([kv.select_rows([0]).slice_tokens(0, 5)])
    with pytest.raises(OutlierError, match="on 0 tokens"):
        OutlierRule.fit([])
    for wrong in ({"threshold": 0.0}, {"share": 0.0}, {"share": 1.1}, {"threshold": math.nan}):
        with pytest.raises(OutlierError, match=r"threshold=.*share="):
            OutlierRule.fit([kv], **wrong)


def test_a_sample_is_the_first_sequences_by_number() -> None:
    assert sample_sequences([9, 4, 7, 1, 8], 1024, 2048) == [1, 4]
    assert sample_sequences([9, 4], 1000, 2048) == [4, 9]
    assert sample_sequences([9, 4], 5000, 2048) == [4]


# rows


def stream(source: KVCache, target: KVCache, batches: Iterable[Iterable[int]] | None = None) -> Stream:
    """Batches of sequences, each of one split; one sequence each unless said."""
    for rows in batches or [[row] for row in range(source.batch_size)]:
        numbers = tuple(rows)
        (split,) = {SPLIT_OF_ROW[number] for number in numbers}
        yield CapturedBatch(split, numbers, source.select_rows(numbers), target.select_rows(numbers))


def accumulated(
    source: KVCache,
    target: KVCache,
    outliers: OutlierRows | None = None,
    tables: list[TableSpec] | None = None,
    weigh=None,
    batches: Iterable[Iterable[int]] | None = None,
    **options,
) -> PairMoments:
    tables = full_tables(LAYOUT) if tables is None else tables
    settings = CalibrationOptions(native_head=1)
    return accumulate_moments(
        stream(source, target, batches), LAYOUT, tables, settings, weigh, outliers, **options
    )


def pair(seed: int = 0, n_sinks: int = len(SINKS)) -> tuple[KVCache, KVCache]:
    """A source with outliers, and a target that is a linear image but at them."""
    source = clean_source(seed)
    target = linear_image(source, TARGET, 3)
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for layers in (target.keys, target.values):
        copies = [layer.clone() for layer in layers]
        for layer in copies:
            centre = 30 * torch.randn(layer.shape[1], layer.shape[3], generator=generator).double()
            for row, token in SINKS[:n_sinks]:
                noise = torch.randn(centre.shape, generator=generator).double()
                layer[row, :, token] = centre + 0.1 * noise
        parts.append(tuple(copies))
    return with_sinks(source, SINKS[:n_sinks]), replace(target, keys=parts[0], values=parts[1])


def moments_without(source: KVCache, target: KVCache, left_out: Tensor, **given) -> PairMoments:
    """Moments of all rows but the first token's and those left out, added directly."""
    moments = PairMoments.zeros(LAYOUT, given.get("tables"))
    for row, split in enumerate(SPLIT_OF_ROW):
        rows = ~left_out[[row]]
        rows[:, 0] = False
        weights = given.get("weights")
        own = None if weights is None else {name: w[[row]] for name, w in weights.items()}
        moments.update(split, source.select_rows([row]), target.select_rows([row]), rows, own)
    return moments


def assert_same(one: PairMoments, other: PairMoments, tolerance: float = 0.0) -> None:
    """Equal tables; `tolerance` is relative to each tensor's largest number, for sums in another order."""
    for mine, theirs in zip(one.tables, other.tables, strict=True):
        for split in ("fit", "held_out"):
            a, b = mine.splits[split], theirs.splits[split]
            assert a.n_rows == b.n_rows
            assert a.weight == pytest.approx(b.weight, rel=1e-14)
            for name, tensor in a.tensors().items():
                limit = tolerance * float(tensor.abs().max())
                assert float((tensor - b.tensors()[name]).abs().max()) <= limit, name


def row_weights() -> dict[tuple[str, int], Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        (kind, layer): torch.rand(len(SPLIT_OF_ROW), TARGET[layer][0], TOKENS, generator=generator) + 0.1
        for kind in KINDS
        for layer in range(len(TARGET))
    }


def weighted_case() -> dict:
    recipe = Recipe(SOURCE, TARGET, "head_local", both(((0, 2), (1, 3))))
    weights = row_weights()

    def weigh(batch: CapturedBatch, rows: Tensor) -> dict[tuple[str, int], Tensor]:
        return {name: w[list(batch.sequences)] * rows[:, None] for name, w in weights.items()}

    return {"tables": selected_tables(recipe, weighted=True), "weigh": weigh}


TABLES = {
    "full": lambda: {"tables": full_tables(LAYOUT)},
    "head_local": lambda: {"tables": head_local_tables(LAYOUT)},
    "weighted": weighted_case,
}


def expected(source: KVCache, target: KVCache, left_out: Tensor, case: dict) -> PairMoments:
    weights = row_weights() if "weigh" in case else None
    return moments_without(source, target, left_out, tables=case["tables"], weights=weights)


@pytest.mark.parametrize("tables", TABLES)
@pytest.mark.parametrize("policy", ["drop", "separate"])
def test_flagged_rows_are_no_rows(policy: str, tables: str) -> None:
    source, target = pair()
    case = TABLES[tables]()
    outliers = OutlierRows(OutlierRule.fit(by_row(source)), policy, LAYOUT)
    moments = accumulated(source, target, outliers, **case)
    assert_same(moments, expected(source, target, at(), case))
    assert outliers.applied == policy


@pytest.mark.parametrize("tables", TABLES)
def test_keep_counts_them_and_changes_nothing(tables: str) -> None:
    source, target = pair()
    case = TABLES[tables]()
    outliers = OutlierRows(OutlierRule.fit([source]), "keep", LAYOUT)
    assert_same(accumulated(source, target, outliers, **case), accumulated(source, target, **case))
    assert [row["n_flagged"] for row in outliers.counts()] == [N_FIT, N_HELD_OUT]


@pytest.mark.parametrize("tables", TABLES)
@pytest.mark.parametrize("min_rows", [N_FIT + 1, 50])
def test_separate_with_too_few_flagged_rows_is_keep(tables: str, min_rows: int) -> None:
    source, target = pair()
    case = TABLES[tables]()
    outliers = OutlierRows(OutlierRule.fit([source]), "separate", LAYOUT, min_rows)
    moments = accumulated(source, target, outliers, **case)
    # the rows are added in another order: float64 sums of 235 rows
    assert_same(moments, expected(source, target, at(()), case), tolerance=1e-13)
    assert outliers.fell_back
    assert not any(outliers.waiting.values())
    assert {row["applied"] for row in outliers.counts()} == {"keep"}


@pytest.mark.parametrize("min_rows", [1, 8, N_FIT])
def test_rows_wait_no_longer_than_needed(min_rows: int) -> None:
    source, target = pair()
    outliers = OutlierRows(OutlierRule.fit([source]), "separate", LAYOUT, min_rows)
    moments = accumulated(source, target, outliers, is_part=True)
    assert not outliers.undecided
    assert not any(outliers.waiting.values())
    assert_same(moments, moments_without(source, target, at()))


def parts(source: KVCache, target: KVCache, min_rows: int) -> Iterator[tuple[PairMoments, OutlierRows]]:
    """Three shards, through their stored form."""
    rule = OutlierRule.fit([source])
    for rows in ([0, 2], [1, 4], [3, 5]):
        outliers = OutlierRows(rule, "separate", LAYOUT, min_rows)
        batches = [[row] for row in rows]
        moments = accumulated(source, target, outliers, batches=batches, is_part=True)
        settings, tensors = outliers.to_state()
        yield moments, OutlierRows.from_state(json.loads(json.dumps(settings)), tensors)


@pytest.mark.parametrize("min_rows", [4, N_FIT, N_FIT + 1])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_shards_decide_together(min_rows: int, order: tuple[int, ...]) -> None:
    source, target = pair()
    shards = list(parts(source, target, min_rows))
    moments, outliers = shards[order[0]]
    for number in order[1:]:
        moments.merge(shards[number][0])
        outliers.merge(shards[number][1])
    outliers.settle(moments)
    assert outliers.fell_back == (min_rows > N_FIT)
    left_out = at(()) if outliers.fell_back else at()
    assert_same(moments, moments_without(source, target, left_out), tolerance=1e-13)
    assert [row["n_flagged"] for row in outliers.counts()] == [N_FIT, N_HELD_OUT]
    assert [row["n_rows"] for row in outliers.counts()] == [4 * 39, 2 * 39]


def test_means_and_errors_are_those_of_the_flagged_rows() -> None:
    source, target = pair()
    outliers = OutlierRows(OutlierRule.fit([source]), "separate", LAYOUT)
    accumulated(source, target, outliers, batches=[[0, 1], [2], [5, 3], [4]])
    for kind in KINDS:
        for layer in range(len(TARGET)):
            y = kind_layers(target, kind)[layer]
            rows = {
                split: torch.stack([y[b, :, t] for b, t in SINKS if SPLIT_OF_ROW[b] == split])
                for split in ("fit", "held_out")
            }
            mean = rows["fit"].mean(0)
            # centred sums joined batch by batch, of numbers about 30
            torch.testing.assert_close(outliers.means()[kind][layer], mean, rtol=1e-13, atol=1e-12)
            for split, own in rows.items():
                error = ((own - mean) ** 2).sum((0, 2)) / (own**2).sum((0, 2))
                found = outliers.relative_error(split)[kind][layer]
                torch.testing.assert_close(found, error, rtol=1e-9, atol=0)


def test_counts_name_both_splits() -> None:
    source, target = pair()
    outliers = OutlierRows(OutlierRule.fit([source]), "drop", LAYOUT)
    assert all(math.isnan(row["share"]) for row in outliers.counts())
    assert all(bool(table.isnan().all()) for table in outliers.relative_error("fit").values())
    accumulated(source, target, outliers)
    fit, held_out = outliers.counts()
    assert fit == {
        "split": "fit",
        "policy": "drop",
        "applied": "drop",
        "n_rows": 156,
        "n_flagged": N_FIT,
        "share": N_FIT / 156,
    }
    assert (held_out["split"], held_out["n_rows"], held_out["n_flagged"]) == ("held_out", 78, N_HELD_OUT)


def test_shards_of_unlike_calibrations_do_not_merge() -> None:
    source, target = pair()
    rule = OutlierRule.fit([source])
    mine = OutlierRows(rule, "separate", LAYOUT)
    for other in (
        OutlierRows(rule, "drop", LAYOUT),
        OutlierRows(rule, "separate", LAYOUT, 9),
        OutlierRows(rule, "separate", Layout(SOURCE, ((2, 4),))),
        OutlierRows(OutlierRule.fit([source], share=0.7), "separate", LAYOUT),
        OutlierRows(OutlierRule.fit([clean_source(3)]), "separate", LAYOUT),
    ):
        with pytest.raises(OutlierError, match="another pair, rule or policy"):
            mine.merge(other)
    settled = OutlierRows(rule, "separate", LAYOUT, 50)
    accumulated(source, target, settled)
    with pytest.raises(OutlierError, match="merge shards first"):
        settled.merge(OutlierRows(rule, "separate", LAYOUT, 50))


def test_bad_settings_are_refused() -> None:
    rule = OutlierRule.fit([clean_source()])
    with pytest.raises(UnknownName, match="Did you mean 'separate'"):
        OutlierRows(rule, "seperate", LAYOUT)
    with pytest.raises(OutlierError, match="min_rows=0"):
        OutlierRows(rule, "separate", LAYOUT, 0)
    with pytest.raises(OutlierError, match="fit the rule on this source"):
        OutlierRows(rule, "drop", Layout(TARGET, TARGET))


def test_a_huge_channel_and_sinks_barely_move_ordinary_tokens_under_drop() -> None:
    def huge(kv: KVCache) -> KVCache:
        return replace(kv, keys=_channel(kv.keys, 300.0), values=_channel(kv.values, 300.0))

    clean = huge(clean_source())
    truth = linear_image(clean_source(), TARGET, 3, noise=0.01)
    source, wild = huge(with_sinks(clean_source())), pair()[1]
    flags = at()[:, None, :, None]
    target = replace(
        truth,
        keys=tuple(torch.where(flags, w, t) for w, t in zip(wild.keys, truth.keys, strict=True)),
        values=tuple(torch.where(flags, w, t) for w, t in zip(wild.values, truth.values, strict=True)),
    )
    outliers = partial(OutlierRows, OutlierRule.fit([source]), layout=LAYOUT)
    fits = {
        "clean": accumulated(clean, truth),
        "keep": accumulated(source, target),
        "drop": accumulated(source, target, outliers(policy="drop")),
        "separate": accumulated(source, target, outliers(policy="separate")),
    }
    recipe = Recipe(SOURCE, TARGET, "full_head", both(((0, 1, 2, 3),) * 2))
    mappers = {
        name: LinearMapper(fit_linear(moments, recipe, Penalty(0.01), dtype=torch.float64))
        for name, moments in fits.items()
    }
    unseen = huge(clean_source(seed=9))
    wanted = linear_image(clean_source(seed=9), TARGET, 3, noise=0.01)

    def error(name: str) -> float:
        got = mappers[name].map(unseen)
        pairs = zip((*got.keys, *got.values), (*wanted.keys, *wanted.values), strict=True)
        return float(sum(((a - b) ** 2).sum() for a, b in pairs))

    assert error("separate") == error("drop")
    # ten rows of 156 fewer, for 60 features: noise over n − p, so some 10 % more
    assert error("drop") < 1.2 * error("clean")
    assert error("keep") > 100 * error("clean")
