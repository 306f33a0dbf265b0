from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvmap.fit.features import Recipe, both
from kvmap.fit.linear import Penalty, fit_linear
from kvmap.mappers import (
    BiasOnlyMapper,
    FittedFor,
    IdentityMapper,
    LinearMapper,
    Mapper,
    MapperFileError,
    MapperMismatch,
    RandomMapper,
    RawMapper,
    check_identities,
    identity_record,
    load_mapper,
    save_mapper,
)
from kvmap.models.cache import KVCache
from kvmap.models.pair import ModelIdentity
from tests.fit.caches import SOURCE_SHAPE, moments_of, pair_of_caches, stripped

SHAPE = ((2, 3), (2, 3))
SELECTION = ((0, 2), (1,))


def every_mapper() -> list[Mapper]:
    moments = moments_of(pair_of_caches(SHAPE), 1)

    def fit(support: str, penalty: Penalty, native: int = 0, dtype: torch.dtype = torch.float32):
        recipe = Recipe(SOURCE_SHAPE, SHAPE, support, both(SELECTION), native_layers=native)
        return fit_linear(moments, recipe, penalty, dtype=dtype)

    full = fit("full_head", Penalty(0.01))
    return [
        LinearMapper(full),
        LinearMapper(fit("head_local", Penalty(0.0), dtype=torch.bfloat16)),
        RandomMapper.from_fitted(full, moments, 0),
        BiasOnlyMapper.from_moments(moments),
        RawMapper(SOURCE_SHAPE, SHAPE),
        IdentityMapper(SOURCE_SHAPE),
        LinearMapper(fit("banded", Penalty(0.01, 3.0, 0.1, "relative"), native=1)),
        LinearMapper(fit("head_local", Penalty(0.01), native=1, dtype=torch.bfloat16)),
        RandomMapper.from_fitted(fit("banded", Penalty(), native=1), moments, 0),
        BiasOnlyMapper.from_moments(moments, 1),
        RawMapper(SOURCE_SHAPE, SHAPE, 1),
    ]


def mapped(mapper: Mapper) -> KVCache:
    source, target = pair_of_caches(SHAPE)["fit"]
    count = mapper.native_layers
    native = stripped(list(target.keys[:count]), list(target.values[:count])) if count else None
    return mapper.map(source, native)


def save_linear(folder: Path) -> LinearMapper:
    mapper = every_mapper()[0]
    assert isinstance(mapper, LinearMapper)
    save_mapper(mapper, folder, {"ridge_lambda": 0.01})
    return mapper


@pytest.mark.parametrize("index", range(11))
def test_every_kind_comes_back_exactly(index: int, tmp_path: Path) -> None:
    mapper = every_mapper()[index]
    save_mapper(mapper, tmp_path / "deep" / "mapper", {"calibration": {"n_tokens": 85}, "note": "ℓ"})
    back, manifest = load_mapper(tmp_path / "deep" / "mapper")
    assert type(back) is type(mapper)
    assert back.settings() == mapper.settings()
    assert manifest["calibration"] == {"n_tokens": 85}
    assert manifest["note"] == "ℓ"
    for name, tensor in mapper.tensors().items():
        assert back.tensors()[name].dtype == tensor.dtype
        assert torch.equal(back.tensors()[name], tensor)
    assert back.native_layers == mapper.native_layers == (1 if index > 5 else 0)
    assert torch.equal(mapped(back).keys[1], mapped(mapper).keys[1])
    assert {p.name for p in (tmp_path / "deep" / "mapper").iterdir()} == {
        "mapper.safetensors",
        "manifest.json",
    }


def test_views_and_shared_storage_are_saved_right(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    key = [base.T[:2, :3], base[::2, ::2]]
    bias = {"key": key, "value": [key[0], base[1:3, 3:]]}
    mapper = BiasOnlyMapper(SOURCE_SHAPE, SHAPE, bias)
    assert not key[0].is_contiguous()
    save_mapper(mapper, tmp_path, {})
    tensors = load_mapper(tmp_path)[0].tensors()
    assert torch.equal(tensors["key.0.bias"], key[0])
    assert torch.equal(tensors["key.1.bias"], key[1])
    assert torch.equal(tensors["value.0.bias"], key[0])
    assert torch.equal(tensors["value.1.bias"], base[1:3, 3:])


def test_tensors_that_alias_or_overlap_each_other_are_saved_apart(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(4, 3)
    bias = {"key": [base[:2], base[2:]], "value": [base[:2], base[1:3]]}
    save_mapper(BiasOnlyMapper(SOURCE_SHAPE, SHAPE, bias), tmp_path, {})
    tensors = load_mapper(tmp_path)[0].tensors()
    for kind, layers in bias.items():
        for layer, tensor in enumerate(layers):
            assert torch.equal(tensors[f"{kind}.{layer}.bias"], tensor)


def test_saving_again_replaces_the_mapper_whole(tmp_path: Path) -> None:
    save_mapper(every_mapper()[3], tmp_path, {"first": 1})
    mapper = save_linear(tmp_path)
    back, manifest = load_mapper(tmp_path)
    assert isinstance(back, LinearMapper)
    assert "first" not in manifest
    assert torch.equal(back.tensors()["value.1.weight"], mapper.tensors()["value.1.weight"])


def test_a_cut_file_is_refused_by_name(tmp_path: Path) -> None:
    save_linear(tmp_path)
    path = tmp_path / "mapper.safetensors"
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(MapperFileError, match=r"mapper\.safetensors.*cut or changed"):
        load_mapper(tmp_path)


@pytest.mark.parametrize("position", [3, 200, -1])
def test_one_altered_byte_is_refused(position: int, tmp_path: Path) -> None:
    save_linear(tmp_path)
    path = tmp_path / "mapper.safetensors"
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(MapperFileError, match=r"mapper\.safetensors"):
        load_mapper(tmp_path)


@pytest.mark.parametrize("key", ["ridge_lambda", "kind", "settings", "sha256"])
def test_an_altered_manifest_is_refused(key: str, tmp_path: Path) -> None:
    save_linear(tmp_path)
    path = tmp_path / "manifest.json"
    record = json.loads(path.read_text())
    record[key] = {"ridge_lambda": 1.0, "kind": "random", "settings": {}, "sha256": "0" * 64}[key]
    path.write_text(json.dumps(record))
    with pytest.raises(MapperFileError, match=r"manifest\.json was changed"):
        load_mapper(tmp_path)


@pytest.mark.parametrize("name", ["mapper.safetensors", "manifest.json"])
def test_a_half_written_mapper_is_refused_by_name(name: str, tmp_path: Path) -> None:
    save_linear(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(MapperFileError, match=f"{name} is missing"):
        load_mapper(tmp_path)


def test_tensors_of_one_mapper_under_the_manifest_of_another_are_refused(tmp_path: Path) -> None:
    save_linear(tmp_path / "a")
    save_mapper(every_mapper()[2], tmp_path / "b", {})
    (tmp_path / "b" / "mapper.safetensors").replace(tmp_path / "a" / "mapper.safetensors")
    with pytest.raises(MapperFileError, match="checksum"):
        load_mapper(tmp_path / "a")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": "other"}', '{"format": "kvmap-mapper"}'])
def test_a_foreign_manifest_is_refused(content: str, tmp_path: Path) -> None:
    save_file({"x": torch.ones(1)}, tmp_path / "mapper.safetensors")
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(MapperFileError, match=r"manifest\.json"):
        load_mapper(tmp_path)


def test_a_manifest_must_be_json_and_leave_kvmaps_own_keys_alone(tmp_path: Path) -> None:
    mapper = every_mapper()[0]
    with pytest.raises(MapperFileError, match=r"\['kind', 'sha256'\]"):
        save_mapper(mapper, tmp_path, {"kind": "x", "sha256": "y"})
    with pytest.raises(MapperFileError, match="JSON"):
        save_mapper(mapper, tmp_path, {"when": object()})
    assert list(tmp_path.iterdir()) == []


def test_a_mapper_of_other_models_is_refused_naming_what_differs(tmp_path: Path) -> None:
    small = ModelIdentity("small", "w1", "c1", "t", "r1", "float32")
    large = ModelIdentity("large", "w2", "c2", "t", "r2", "float32")
    save_mapper(
        every_mapper()[0], tmp_path, {"source": identity_record(small), "target": identity_record(large)}
    )
    _, manifest = load_mapper(tmp_path)
    check_identities(manifest, small, replace(large, name="the same under another name"))
    for field, value in (("weights", "w3"), ("rope", "r3"), ("tokenizer", "t2"), ("dtype", "bfloat16")):
        with pytest.raises(MapperMismatch, match=f"target {field}"):
            check_identities(manifest, small, replace(large, **{field: value}))
    with pytest.raises(MapperMismatch, match="source weights"):
        check_identities(manifest, large, large)
    with pytest.raises(MapperMismatch, match="names no source model"):
        check_identities({}, small, large)
    with pytest.raises(MapperMismatch, match="names no target model"):
        check_identities({"source": identity_record(small)}, small, large)


def test_a_loaded_mapper_knows_what_it_was_fitted_for_and_keeps_it_elsewhere(tmp_path: Path) -> None:
    small = ModelIdentity("small", "w1", "c1", "t", "r1", "float32")
    large = ModelIdentity("large", "w2", "c2", "t", "r2", "float32")
    manifest = {"source": identity_record(small), "target": identity_record(large), "rope": "coupled"}
    for mapper in every_mapper():
        assert mapper.fitted_for is None
        save_mapper(mapper, tmp_path, manifest)
        loaded, _ = load_mapper(tmp_path)
        assert loaded.fitted_for == FittedFor(small, large, "coupled")
        assert loaded.to("cpu", torch.float64).fitted_for == loaded.fitted_for
        loaded.check_models(small, large, "coupled")
        loaded.check_models(None, large, "coupled")
        with pytest.raises(MapperMismatch, match=r"source weights.*target weights.*rope: 'coupled'"):
            loaded.check_models(large, small, "strip")
    save_linear(tmp_path)
    assert load_mapper(tmp_path)[0].fitted_for is None


def test_a_manifest_whose_identity_is_not_one_is_refused(tmp_path: Path) -> None:
    save_mapper(every_mapper()[0], tmp_path, {"source": {"name": "x"}, "target": {}})
    with pytest.raises(MapperFileError, match="whole 'linear' mapper"):
        load_mapper(tmp_path)


@pytest.mark.parametrize("fit", ["strip", "no_rerotate", "coupled", None])
@pytest.mark.parametrize("rope", ["strip", "no_rerotate", "coupled"])
def test_content_strategies_share_a_fit_and_coupled_does_not(fit: str | None, rope: str) -> None:
    model = ModelIdentity("model", "w", "c", "t", "r", "float32")
    found = FittedFor(model, model, fit).mismatches(model, model, rope)
    assert bool(found) == (fit is not None and (fit == "coupled") != (rope == "coupled"))
