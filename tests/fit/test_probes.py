from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression
from sklearn.metrics import r2_score

from kvmap.fit.features import KINDS, Block, CacheShape, Layout, SelectionError
from kvmap.fit.moments import MomentsError
from kvmap.fit.pair_moments import PairMoments, TableSpec, head_local_tables, probe_tables
from kvmap.fit.probes import held_parts, layer_scores, probe, probe_r2, procrustes_cosines
from kvmap.fit.ridge import RidgeError
from tests.fit.caches import random_cache
from tests.fit.pair_rows import PairRows, random_rows

MATCHED: tuple[CacheShape, CacheShape] = (((2, 3),) * 3, ((2, 3),) * 2)
GROUPED: tuple[CacheShape, CacheShape] = (((2, 3),) * 3, ((4, 2),) * 2)
FEWER: tuple[CacheShape, CacheShape] = (((4, 2),) * 2, ((2, 5),) * 2)
RAGGED: tuple[CacheShape, CacheShape] = (((2, 3), (1, 5), (3, 2)), ((1, 5), (3, 2), (2, 4)))
PAIRS = pytest.mark.parametrize(
    "shapes", [MATCHED, GROUPED, FEWER, RAGGED], ids=["matched", "grouped", "fewer", "ragged"]
)


def heads(rows: PairRows) -> list[tuple[str, int, int, int, int]]:
    """(kind, source layer, target layer, target head, the source head it reads)."""
    return [
        (kind, source, target, head, head * n_source // n_target)
        for kind in KINDS
        for source, (n_source, _) in enumerate(rows.layout.source_shape)
        for target, (n_target, _) in enumerate(rows.layout.target_shape)
        if target >= rows.layout.native_layers
        for head in range(n_target)
    ]


@PAIRS
@pytest.mark.parametrize("split", ["fit", "held_out"])
def test_probes_equal_least_squares_on_the_rows(shapes: tuple[CacheShape, CacheShape], split: str) -> None:
    rows = random_rows(*shapes)
    r2 = probe_r2(rows, split)
    for kind, source, target, head, own in heads(rows):
        model = LinearRegression().fit(
            rows.source_head(kind, source, own), rows.target_head(kind, target, head)
        )
        predicted = model.predict(rows.source_head(kind, source, own, split))
        expected = r2_score(
            rows.target_head(kind, target, head, split), predicted, multioutput="variance_weighted"
        )
        # both solve well-conditioned systems of at most five columns in float64
        assert float(r2[kind][source, target, head]) == pytest.approx(expected, abs=1e-10)


@PAIRS
def test_cosines_equal_those_of_the_rotated_rows(shapes: tuple[CacheShape, CacheShape]) -> None:
    rows = random_rows(*shapes)
    cosines = procrustes_cosines(rows)
    for kind, source, target, head, own in heads(rows):
        x, y = rows.source_head(kind, source, own), rows.target_head(kind, target, head)
        x, y = x - x.mean(0), y - y.mean(0)
        width = max(x.shape[1], y.shape[1])
        x, y = (np.pad(z, ((0, 0), (0, width - z.shape[1]))) for z in (x, y))
        left, _, right = np.linalg.svd(x.T @ y)
        rotated = x @ (left @ right)
        expected = (rotated * y).sum() / (np.linalg.norm(rotated) * np.linalg.norm(y))
        # float64 throughout; singular values near 0 carry an absolute error of 1e-15 of the largest
        assert float(cosines[kind][source, target, head]) == pytest.approx(expected, abs=1e-12)


def test_a_rotated_and_shifted_copy_has_cosine_one_and_a_stretched_one_less() -> None:
    rows = random_rows(((1, 4),) * 2, ((1, 4),))
    x, y = rows.rows["fit"]
    rotation = torch.linalg.qr(torch.arange(16, dtype=torch.float64).reshape(4, 4).sin()).Q
    y[:, :4] = 3 * x[:, :4] @ rotation + 5
    x[:, 4:8] = x[:, :4] * torch.tensor([10.0, 1.0, 0.1, 0.01])
    cosine, r2 = procrustes_cosines(rows)["key"][:, 0, 0], probe_r2(rows)["key"][:, 0, 0]
    assert float(cosine[0]) == pytest.approx(1, abs=1e-12)
    assert float(cosine[1]) < 0.9
    torch.testing.assert_close(r2, torch.ones(2, dtype=torch.float64))


def test_a_head_that_never_varies_has_cosine_zero() -> None:
    rows = random_rows(*MATCHED)
    rows.rows["fit"][1][:, :3] = 2.0
    rows.rows["fit"][0][:, 6:9] = 0.0
    cosines = procrustes_cosines(rows)["key"]
    assert (cosines[:, 0, 0] == 0).all()
    assert (cosines[1, :, 0] == 0).all()
    assert (cosines[0, 1] > 0).all()


@pytest.mark.parametrize("table", [probe_r2, procrustes_cosines])
def test_heads_that_are_not_there_and_native_layers_are_nan(table) -> None:
    rows = random_rows(*RAGGED, native_layers=1)
    found = table(rows)
    for kind in KINDS:
        assert found[kind].shape == (3, 3, 3)
        assert found[kind].dtype == torch.float64
        assert found[kind][:, 0].isnan().all()
        assert found[kind][:, 1].isfinite().all()
        assert found[kind][:, 2, 2:].isnan().all()
        assert found[kind][:, 2, :2].isfinite().all()


def test_dead_and_duplicated_channels_are_finite_and_recorded() -> None:
    rows = random_rows(*MATCHED)
    x = rows.rows["fit"][0]
    x[:, 8] = 5.0  # a key channel of layer 1, head 0
    x[:, 35] = x[:, 33]  # value channels of layer 2, head 1
    result = probe(rows)
    assert result.fallbacks == (("key", 1, 0), ("value", 2, 1))
    for kind, source, target, head, own in heads(rows):
        if (kind, source, own) in result.fallbacks:
            x, y = rows.source_head(kind, source, own), rows.target_head(kind, target, head)
            expected = LinearRegression().fit(x, y).predict(x)
            expected = r2_score(y, expected, multioutput="variance_weighted")
            assert float(result.r2[kind][source, target, head]) == pytest.approx(expected, abs=1e-10)


def test_moments_that_are_not_finite_are_refused_by_kind_and_layer() -> None:
    rows = random_rows(*MATCHED)
    rows.rows["fit"][0][0, 18 + 6] = float("nan")
    for table, error in ((probe_r2, RidgeError), (procrustes_cosines, SelectionError)):
        with pytest.raises(error, match="values from source layer 1, head 0"):
            table(rows)


def test_a_fast_probe_says_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "kvmap.progress"):
        probe(random_rows(*MATCHED))
    (line,) = caplog.messages
    assert line.startswith("probe: source heads, keys and values: 12 done in")


def test_scores_average_heads_first_and_then_keys_and_values() -> None:
    nan = float("nan")
    r2 = {
        "key": torch.tensor([[[0.2, 0.4], [0.8, nan]]]),
        "value": torch.tensor([[[0.6, 0.8], [0.0, nan]]]),
    }
    torch.testing.assert_close(layer_scores(r2), torch.tensor([[0.5, 0.4]]))


def per_head_tables(layout: Layout) -> list[TableSpec]:
    """Every head in a table of its own, as weighted rows need."""
    return [
        TableSpec(spec.features, layout.targets(kind, layer, head))
        for spec in head_local_tables(layout)
        for kind in KINDS
        for layer in range(layout.native_layers, len(layout.target_shape))
        for head in range(layout.target_shape[layer][0])
        if torch.isin(layout.targets(kind, layer, head), spec.targets).all()
    ]


@PAIRS
@pytest.mark.parametrize("tables", [probe_tables, head_local_tables, per_head_tables, None])
@pytest.mark.parametrize("native_layers", [0, 1])
def test_every_mode_of_calibration_gives_the_same_tables(
    shapes: tuple[CacheShape, CacheShape], tables, native_layers: int
) -> None:
    """Native features split the tables of heads that read the same source head."""
    rows = random_rows(*shapes, native_layers=native_layers)
    generator = torch.Generator().manual_seed(1)
    source, target = (random_cache(shape, 2, 20, generator) for shape in shapes)
    layout = rows.layout
    full = PairMoments.zeros(layout).update("fit", source, target)
    held = full if tables is None else PairMoments.zeros(layout, tables(layout)).update("fit", source, target)
    for table in (probe_r2, procrustes_cosines):
        expected, found = table(full), table(held)
        for kind in KINDS:
            torch.testing.assert_close(found[kind], expected[kind], equal_nan=True)


@pytest.mark.parametrize(
    ("tables", "native_layers", "n_parts"), [(None, 0, 1), (head_local_tables, 1, 2), (per_head_tables, 1, 6)]
)
def test_heads_are_read_in_as_few_parts_as_the_tables_allow(tables, native_layers: int, n_parts: int) -> None:
    """Source head 0 serves heads 0 and 1 of three layers; head 0 and head 1 read other native features."""
    layout = Layout(((2, 3),) * 2, ((4, 2),) * (3 + native_layers), native_layers)
    moments = PairMoments.zeros(layout, None if tables is None else tables(layout))
    readers = tuple((layer + native_layers, head) for layer in range(3) for head in range(2))
    parts = [part for part, _ in held_parts(moments, "fit", "key", [Block("source", "key", 1, 0)], readers)]
    assert len(parts) == n_parts
    assert sorted(reader for part in parts for reader in part) == sorted(readers)


def test_moments_taken_for_something_else_are_refused() -> None:
    layout = Layout(*MATCHED)
    specs = [spec for spec in probe_tables(layout) if 0 not in spec.features]
    with pytest.raises(MomentsError, match="do not hold"):
        probe_r2(PairMoments.zeros(layout, specs))
