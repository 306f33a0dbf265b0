"""A cache on disk comes back the same: numbers, dtypes, rotations, what it may be used for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvmap.files import ArtifactCorrupt, ArtifactMissing
from kvmap.models import storage
from kvmap.models.cache import InvalidCache, KVCache
from kvmap.models.capture import prefill
from kvmap.models.loaded import LoadedModel
from kvmap.models.rope import same_rotations
from kvmap.models.storage import load_kv, load_layers, save_kv
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


LAYERS = [[0], [1, 0], [0, 1], []]


@pytest.mark.parametrize("kind", ["key", "value"])
@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_some_layers_are_those_of_the_whole_cache(
    captured: KVCache, tmp_path: Path, kind: str, layers: list[int], dtype: torch.dtype
) -> None:
    kv = captured.to(dtype=dtype)
    save_kv(kv, tmp_path / "kv.safetensors")
    whole, content = load_kv(tmp_path / "kv.safetensors"), kv.strip()
    stripped = load_layers(tmp_path / "kv.safetensors", kind, layers)
    raw = load_layers(tmp_path / "kv.safetensors", kind, layers, stripped=False)
    assert len(stripped) == len(raw) == len(layers)
    for layer, mine, stored in zip(layers, stripped, raw, strict=True):
        name = f"{kind}s"
        assert mine.dtype == stored.dtype == (dtype if dtype == torch.float64 else torch.float32)
        assert torch.equal(mine, getattr(content, name)[layer])
        assert torch.equal(stored, getattr(whole, name)[layer].to(stored.dtype))


@pytest.mark.parametrize("stripped", [True, False])
def test_layers_of_a_stripped_cache_are_taken_as_they_are(
    captured: KVCache, tmp_path: Path, stripped: bool
) -> None:
    kv = captured.strip()
    save_kv(kv, tmp_path / "kv.safetensors")
    for kind, layers in (("key", kv.keys), ("value", kv.values)):
        found = load_layers(tmp_path / "kv.safetensors", kind, [1, 0], stripped=stripped)
        assert torch.equal(found[0], layers[1])
        assert torch.equal(found[1], layers[0])


def test_nothing_but_the_layers_asked_for_is_read(
    captured: KVCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    original = storage.load_tensors

    def watched(path: Path, names: list[str]) -> dict[str, torch.Tensor]:
        read.extend(names)
        return original(path, names)

    save_kv(captured, tmp_path / "kv.safetensors")
    monkeypatch.setattr(storage, "load_tensors", watched)
    load_layers(tmp_path / "kv.safetensors", "value", [1])
    assert read == ["values.1"]
    read.clear()
    load_layers(tmp_path / "kv.safetensors", "key", [1], stripped=False)
    assert read == ["keys.1"]
    read.clear()
    load_layers(tmp_path / "kv.safetensors", "key", [1])
    assert set(read) <= {"keys.1", "positions", "inv_freq.1"}


def test_layers_of_a_cache_with_different_rotations_cannot_be_stripped(
    captured: KVCache, tmp_path: Path
) -> None:
    save_kv(replace(captured, mixed=True), tmp_path / "kv.safetensors")
    with pytest.raises(InvalidCache, match="cannot be stripped"):
        load_layers(tmp_path / "kv.safetensors", "key", [0])
    raw = load_layers(tmp_path / "kv.safetensors", "key", [0], stripped=False)
    assert torch.equal(raw[0], captured.keys[0])
    assert torch.equal(load_layers(tmp_path / "kv.safetensors", "value", [0])[0], captured.values[0])


def test_layers_that_are_not_there_are_refused_by_name(captured: KVCache, tmp_path: Path) -> None:
    path = tmp_path / "kv.safetensors"
    save_kv(captured, path)
    with pytest.raises(ArtifactCorrupt, match=r"values\.2"):
        load_layers(path, "value", [0, 2])
    with pytest.raises(ArtifactMissing, match=r"other\.safetensors"):
        load_layers(tmp_path / "other.safetensors", "value", [0])
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ArtifactCorrupt, match=r"kv\.safetensors"):
        load_layers(path, "value", [0])
