"""A cache on disk comes back the same: numbers, dtypes, rotations, what it may be used for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvmap.files import ArtifactCorrupt
from kvmap.models.cache import KVCache
from kvmap.models.capture import prefill
from kvmap.models.loaded import LoadedModel
from kvmap.models.rope import same_rotations
from kvmap.models.storage import load_kv, save_kv
from tests.tiny_random_models import FAMILIES


@pytest.fixture(scope="module", params=["llama_llama3", "smollm3"])
def captured(request: pytest.FixtureRequest) -> KVCache:
    """Rotated, with and without NoPE layers; the second row is padded on the left."""
    loaded = LoadedModel.from_model(FAMILIES[request.param]())
    ids = torch.randint(3, 90, (2, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1] * 7, [0, 0] + [1] * 5])
    return prefill(loaded, ids, mask)


def assert_same(a: KVCache, b: KVCache) -> None:
    for first, second in zip((*a.keys, *a.values), (*b.keys, *b.values), strict=True):
        assert first.dtype == second.dtype
        assert torch.equal(first, second)
    assert torch.equal(a.positions, b.positions)
    assert torch.equal(a.mask, b.mask)
    assert (a.exact, a.mixed, a.stripped) == (b.exact, b.mixed, b.stripped)


def test_round_trip(captured: KVCache, tmp_path: Path) -> None:
    save_kv(captured, tmp_path / "kv.safetensors")
    loaded = load_kv(tmp_path / "kv.safetensors")
    assert_same(captured, loaded)
    assert captured.rotations is not None
    assert loaded.rotations is not None
    assert same_rotations(captured.rotations, loaded.rotations)
    assert_same(captured.strip(), loaded.strip())


def test_round_trip_of_a_stripped_mapped_slice(captured: KVCache, tmp_path: Path) -> None:
    kv = replace(captured.strip(), exact=False).slice_tokens(2, 5)
    save_kv(kv, tmp_path / "kv.safetensors")
    assert_same(kv, load_kv(tmp_path / "kv.safetensors"))


def test_a_truncated_file_is_refused_by_name(captured: KVCache, tmp_path: Path) -> None:
    path = tmp_path / "kv.safetensors"
    save_kv(captured, path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ArtifactCorrupt, match=r"kv\.safetensors"):
        load_kv(path)
