"""One model at a time, in waves, killed and gone on with: the moments are those of one undisturbed pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvmap import files
from kvmap.errors import KvmapError
from kvmap.fit import reading, sequential
from kvmap.fit.calibrate import CalibrationOptions, accumulate_moments, live_stream
from kvmap.fit.captures import SensitivityOptions, capture
from kvmap.fit.features import Layout, geometry_shape
from kvmap.fit.outliers import OutlierRows, OutlierRule
from kvmap.fit.pair_moments import SPLITS, PairMoments, full_tables, head_local_tables
from kvmap.fit.sequential import accumulate_sequentially
from kvmap.fit.spill import Spill, captures_bytes, split_batches, waves_of
from kvmap.fit.view import cache_view
from kvmap.models.capture import prefill
from kvmap.models.pair import ModelPair, ModelSpec
from tests.fit.oracles import FIELDS
from tests.fit.watched_pair import WatchedPair
from tests.killed_writes import ends
from tests.models.tiny_tokenizers import byte_level_tokenizer
from tests.tiny_random_models import build, random_ids

N, N_TOKENS = 8, 16
IDS = random_ids(N, N_TOKENS)
SPLITS_OF = {"fit": [5, 0, 3, 7, 6], "held_out": [1, 4, 2]}
OPTIONS = CalibrationOptions(token_stride=2)
BATCH_SIZE = 2
N_BATCHES = 3 + 2


@pytest.fixture(scope="module")
def specs(tmp_path_factory) -> list[ModelSpec]:
    folder = tmp_path_factory.mktemp("models")
    for side, family, seed in (("source", "llama_yarn", 1), ("target", "smollm3", 2)):
        build(family, seed=seed, n_layers=3, vocab_size=272).save_pretrained(folder / side)
        byte_level_tokenizer().save_pretrained(folder / side)
    return [ModelSpec(str(folder / side), device="cpu") for side in ("source", "target")]


@pytest.fixture
def pair(specs) -> WatchedPair:
    return WatchedPair(*specs)


@pytest.fixture(scope="module")
def layout(specs) -> Layout:
    both = ModelPair(*specs)
    shapes = (geometry_shape(geometry) for geometry in (both.source_geometry, both.target_geometry))
    return Layout(*shapes, 1)


@pytest.fixture(scope="module")
def undisturbed(specs, layout) -> PairMoments:
    """Both models in memory, every batch had once."""
    stream = live_stream(ModelPair(*specs), IDS, SPLITS_OF, batch_size=BATCH_SIZE)
    return accumulate_moments(stream, layout, full_tables(layout), OPTIONS)


def added_up(pair: ModelPair, layout: Layout, folder: Path, **settings: object) -> PairMoments:
    spill = Spill(folder, settings.pop("max_bytes", None), settings.pop("layerwise", None))
    tables = settings.pop("tables", full_tables(layout))
    moments, _ = accumulate_sequentially(
        pair, IDS, SPLITS_OF, layout, tables, OPTIONS, spill, batch_size=BATCH_SIZE, **settings
    )
    return moments


def assert_same_bits(found: PairMoments, expected: PairMoments) -> None:
    for mine, theirs in zip(found.tables, expected.tables, strict=True):
        for split in SPLITS:
            got, wanted = mine.splits[split], theirs.splits[split]
            assert (got.n_rows, got.weight) == (wanted.n_rows, wanted.weight)
            assert all(torch.equal(getattr(got, name), getattr(wanted, name)) for name in FIELDS)


def bound(pair: ModelPair, n_batches: float) -> int:
    """Disk for so many batches of this calibration, with what one of them needs beside the others."""
    return int((n_batches + 1.5) * 1.3 * captures_bytes(pair, BATCH_SIZE * N_TOKENS))


@pytest.mark.parametrize(
    ("layerwise", "n_batches"),
    [
        pytest.param(None, None, id="batches, one wave"),
        pytest.param(True, 2.2, id="layers, larger waves", marks=pytest.mark.slow),
        pytest.param(None, 1.2, id="batches, small waves", marks=pytest.mark.slow),
    ],
)
def test_the_moments_are_those_of_both_models_at_once(
    pair, layout, undisturbed, tmp_path, layerwise, n_batches
) -> None:
    max_bytes = None if n_batches is None else bound(pair, n_batches)
    n_waves = len(waves_of(pair, split_batches(SPLITS_OF, BATCH_SIZE), N_TOKENS, Spill(tmp_path, max_bytes)))
    assert n_waves == 1 if n_batches is None else n_waves > 1
    found = added_up(pair, layout, tmp_path, max_bytes=max_bytes, layerwise=layerwise)
    assert_same_bits(found, undisturbed)
    assert pair.order == ["source", "target"] * n_waves
    assert pair._loaded == {}  # tables grow while neither is in memory


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layerwise", "n_batches"),
    [(False, 1.2), (True, 2.2), (True, 1.2)],
)
def test_the_caches_on_disk_are_never_more_than_allowed(
    pair, layout, tmp_path, monkeypatch, layerwise, n_batches
) -> None:
    peak = 0
    save = files.os.replace

    def watched(temporary: str, path: str) -> None:
        nonlocal peak
        save(temporary, path)
        caches = (file for file in tmp_path.rglob("*.safetensors") if not file.name.startswith("moments"))
        peak = max(peak, sum(file.stat().st_size for file in caches))

    monkeypatch.setattr(files.os, "replace", watched)
    max_bytes = bound(pair, n_batches)
    added_up(pair, layout, tmp_path, max_bytes=max_bytes, layerwise=layerwise)
    assert max_bytes / 4 < peak <= max_bytes


def test_a_batch_that_has_no_room_is_refused_before_weights_load(pair, layout, tmp_path) -> None:
    with pytest.raises(
        KvmapError, match=r"calibration\.max_spill_gib=.*one batch of 2 sequences.*batch_size"
    ):
        added_up(pair, layout, tmp_path, max_bytes=1000)
    assert pair.order == []


@pytest.mark.slow
def test_blocks_of_tables_share_the_caches_of_one_wave(
    pair, layout, undisturbed, tmp_path, monkeypatch
) -> None:
    read: list[object] = []

    def counted(model: object, ids: torch.Tensor) -> object:
        read.append(model)
        return prefill(model, ids)

    monkeypatch.setattr(reading, "prefill", counted)
    for block, table in enumerate(full_tables(layout)):
        found = added_up(pair, layout, tmp_path, tables=[table], block=block)
        expected = PairMoments(layout, [undisturbed.tables[block]], undisturbed.product_dtype)
        assert_same_bits(found, expected)
    assert len(read) == 2 * N_BATCHES


@pytest.mark.slow
def test_sums_of_other_tables_are_not_gone_on_with(pair, layout, undisturbed, tmp_path) -> None:
    max_bytes = bound(pair, 2.2)
    added_up(pair, layout, tmp_path, max_bytes=max_bytes, tables=head_local_tables(layout))
    assert (tmp_path / "moments.0.safetensors").is_file()
    assert_same_bits(added_up(pair, layout, tmp_path, max_bytes=max_bytes), undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["separate", pytest.param("drop", marks=pytest.mark.slow)])
def test_outlier_rows_are_gone_on_with_too(specs, layout, tmp_path, policy) -> None:
    both = ModelPair(*specs)
    sample = [cache_view(prefill(both.source, IDS[:4]), "strip")]
    rule = OutlierRule.fit(iter(sample), threshold=1.5, share=0.3)
    expected = OutlierRows(rule, policy, layout)
    stream = live_stream(both, IDS, SPLITS_OF, batch_size=BATCH_SIZE)
    moments = accumulate_moments(stream, layout, full_tables(layout), OPTIONS, outliers=expected)
    assert expected.flagged["fit"].n_rows > 0
    spill = Spill(tmp_path, bound(both, 2.2))
    mine, outliers = accumulate_sequentially(
        both,
        IDS,
        SPLITS_OF,
        layout,
        full_tables(layout),
        OPTIONS,
        spill,
        batch_size=BATCH_SIZE,
        outliers=OutlierRows(rule, policy, layout),
    )
    assert_same_bits(mine, moments)
    assert outliers.counts() == expected.counts()
    assert torch.equal(outliers.flagged["fit"].mean_y, expected.flagged["fit"].mean_y)


# kills


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layerwise", "n_batches", "before"),
    [
        pytest.param(False, None, True, id="batches, one wave, while it writes"),
        pytest.param(True, 1.2, False, id="layers, small waves, between writes"),
        pytest.param(False, 1.2, True, id="batches, small waves, while it writes"),
        pytest.param(True, None, True, id="layers, one wave, while it writes"),
        pytest.param(True, 1.2, True, id="layers, small waves, while it writes"),
        pytest.param(False, 1.2, False, id="batches, small waves, between writes"),
    ],
)
def test_moments_of_a_calibration_killed_again_and_again(
    specs, layout, undisturbed, tmp_path, layerwise, n_batches, before
) -> None:
    pair = ModelPair(*specs)
    pair.check()
    max_bytes = None if n_batches is None else bound(pair, n_batches)
    # each process gets a little further than the one before; a kill before the first write would end it
    step = 12 if layerwise else 3
    kills = 0

    def work() -> object:
        return added_up(pair, layout, tmp_path, max_bytes=max_bytes, layerwise=layerwise)

    while not ends(work, step, before=before):
        kills += 1
        assert kills < 40
    assert kills >= 3
    left = {file.name for file in tmp_path.iterdir()}
    assert not any(name.startswith(".") for name in left)
    assert_same_bits(added_up(pair, layout, tmp_path, max_bytes=max_bytes, layerwise=layerwise), undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "sensitivity"),
    [
        ({"sequential": True, "layerwise": True}, None),
        ({}, SensitivityOptions(n_boundaries=3)),
        ({"sequential": True}, SensitivityOptions(n_boundaries=3)),
        ({}, None),
    ],
)
def test_captures_killed_again_and_again_are_those_of_one_go(specs, tmp_path, settings, sensitivity) -> None:
    settings = settings | {"batch_size": 3, "sensitivity": sensitivity}
    whole = capture(ModelPair(*specs), IDS, tmp_path / "whole", batch_size=3, sensitivity=sensitivity)
    pair = ModelPair(*specs)
    pair.check()
    kills = 0

    def work() -> object:
        return capture(pair, IDS, tmp_path / "killed", resume=True, **settings)

    while not ends(work, 8 if settings.get("layerwise") else 4):
        kills += 1
        assert kills < 40
    assert kills >= 2
    found, expected = (
        {file.name: file.read_bytes() for file in folder.iterdir()}
        for folder in (tmp_path / "killed", whole.folder)
    )
    assert found == expected


@pytest.mark.slow
def test_what_a_kill_leaves_of_an_unfinished_file_is_removed(pair, layout, undisturbed, tmp_path) -> None:
    left = [tmp_path / ".0.source.writing-0123456789ab.safetensors", tmp_path / "layers.source/0/.tmpX9a0bc"]
    for path in left:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half a file")
    assert_same_bits(added_up(pair, layout, tmp_path), undisturbed)
    assert not any(path.exists() for path in left)
    for path in left[:1]:
        path.write_bytes(b"half a file")
    capture(pair, IDS, tmp_path, batch_size=4, sequential=True)
    assert not any(path.exists() for path in left)


@pytest.mark.slow
def test_the_sums_are_written_in_one_step(pair, layout, tmp_path, monkeypatch) -> None:
    """What is added up of a wave is removed only once the sums that hold it are on disk."""
    forget, seen = Spill.forget, []

    def watched(self: Spill, numbers: range) -> None:
        if numbers:
            sums = sequential._Sums(self.folder / "moments.0.safetensors")
            seen.append((numbers.stop, sums.read(layout, full_tables(layout), None)[2]))
        forget(self, numbers)

    monkeypatch.setattr(Spill, "forget", watched)
    added_up(pair, layout, tmp_path, max_bytes=bound(pair, 2.2))
    assert seen
    assert all(stop == n_done for stop, n_done in seen)
