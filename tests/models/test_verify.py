"""The check made at loading finds a rotation that is not the model's."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvmap.models import families
from kvmap.models.geometry import LayerGeometry, UnsupportedModel
from kvmap.models.loaded import LoadedModel
from kvmap.models.rope import Rotation
from kvmap.models.verify import check_rotation
from tests.tiny_random_models import FAMILIES

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def plant(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, change) -> None:
    """Let every layer that rotates be described by a changed rotation."""
    original = loaded.current_rotations
    changed = lambda: tuple(None if r is None else change(r) for r in original())  # noqa: E731
    monkeypatch.setattr(loaded, "current_rotations", changed)


@dtypes
@pytest.mark.parametrize("name", FAMILIES)
def test_right_rotations_pass_in_every_dtype(name, dtype):
    check_rotation(LoadedModel.from_model(FAMILIES[name]().to(dtype)))


@dtypes
@pytest.mark.parametrize(("name", "wrong"), [("llama", "interleaved"), ("cohere", "half"), ("glm4", "half")])
def test_a_wrong_layout_is_found(name, wrong, dtype, monkeypatch):
    loaded = LoadedModel.from_model(FAMILIES[name]().to(dtype))
    plant(loaded, monkeypatch, lambda r: Rotation(r.inv_freq, r.scaling, wrong))
    with pytest.raises(UnsupportedModel, match="layer 0 depend on position"):
        check_rotation(loaded)


@dtypes
@pytest.mark.parametrize("name", ["llama_llama3", "llama_yarn", "llama_linear", "phi3_longrope"])
def test_a_forgotten_scaling_is_found(name, dtype, monkeypatch):
    loaded = LoadedModel.from_model(FAMILIES[name]().to(dtype))
    unscaled = LoadedModel.from_model(FAMILIES["llama"]()).rotations(1)[0].inv_freq
    plant(loaded, monkeypatch, lambda r: Rotation(unscaled, r.scaling, r.layout))
    with pytest.raises(UnsupportedModel, match="depend on position"):
        check_rotation(loaded)


def test_one_rotation_for_layers_of_different_bases_is_found(monkeypatch):
    loaded = LoadedModel.from_model(FAMILIES["gemma3"](n_layers=4))
    first = loaded.rotations(1)[0]
    plant(loaded, monkeypatch, lambda r: first)
    with pytest.raises(UnsupportedModel, match="layer 1 depend on position"):
        check_rotation(loaded)


def test_a_layer_without_rotation_taken_for_a_rotating_one_is_found(monkeypatch):
    loaded = LoadedModel.from_model(FAMILIES["smollm3"](n_layers=4))
    every = (loaded.rotations(1)[0],) * 4
    monkeypatch.setattr(loaded, "current_rotations", lambda: every)
    with pytest.raises(UnsupportedModel, match="layer 1 depend on position"):
        check_rotation(loaded)


def test_a_norm_after_the_rotation_is_found(monkeypatch):
    from transformers import HunYuanDenseV1Config, HunYuanDenseV1ForCausalLM

    from tests.tiny_random_models import _BASE, randomise, rope

    monkeypatch.setattr(families, "REFUSED", {})
    monkeypatch.setattr("kvmap.models.geometry.REFUSED", {})
    monkeypatch.setitem(families.FAMILIES, "hunyuan_v1_dense", families.Family())
    model = HunYuanDenseV1ForCausalLM(HunYuanDenseV1Config(**_BASE, head_dim=16, rope_parameters=rope()))
    randomise(model, 0)
    with pytest.raises(UnsupportedModel, match="layer 0 depend on position"):
        check_rotation(LoadedModel.from_model(model))


def test_a_geometry_other_than_the_tensors_is_found():
    loaded = LoadedModel.from_model(FAMILIES["llama"]())
    layers = (LayerGeometry(2, 16, None, "default"),) * 2
    loaded.geometry = dataclasses.replace(loaded.geometry, layers=layers)
    with pytest.raises(UnsupportedModel, match=r"layer 0 caches .* \(2, 8\), but its config says \(2, 16\)"):
        check_rotation(loaded)


def test_the_check_leaves_a_dynamic_model_as_it_was():
    loaded = LoadedModel.from_model(FAMILIES["llama_dynamic"]())
    before = loaded.rotations(10)[0]
    check_rotation(loaded)
    assert loaded.rotations(10)[0].matches(before)
    assert int(loaded.body.rotary_emb.max_seq_len_cached) == 32
