"""Two models, loaded when first needed and given up again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import kvmap.models.pair as pair_module
from kvmap.models.geometry import UnsupportedModel
from kvmap.models.loaded import LoadedModel
from kvmap.models.pair import ModelPair, ModelSpec, TokenizerMismatch
from tests.models.tiny_tokenizers import byte_level_tokenizer
from tests.tiny_random_models import FAMILIES


def save(folder: Path, name: str, **tokenizer) -> ModelSpec:
    FAMILIES[name](vocab_size=272).save_pretrained(folder)
    byte_level_tokenizer(**tokenizer).save_pretrained(folder)
    return ModelSpec(str(folder))


@pytest.fixture(scope="module")
def specs(tmp_path_factory) -> tuple[ModelSpec, ModelSpec]:
    folder = tmp_path_factory.mktemp("pair")
    return save(folder / "source", "llama"), save(folder / "target", "qwen3")


@pytest.fixture
def loads(monkeypatch) -> list[str]:
    """The ids of the specs whose weights were loaded."""
    names: list[str] = []
    original = pair_module.load_model

    def counting(spec: ModelSpec) -> LoadedModel:
        names.append(spec.id)
        return original(spec)

    monkeypatch.setattr(pair_module, "load_model", counting)
    return names


def test_checks_and_identities_load_no_weights(specs, loads):
    pair = ModelPair(*specs)
    pair.check()
    assert pair.source_geometry.model_type == "llama"
    assert pair.target_geometry.head_dim == 16
    assert pair.source_identity.mismatches(pair.target_identity)
    assert pair.tokenizer("the")["input_ids"]
    assert loads == []


def test_weights_load_once_and_again_after_release(specs, loads):
    pair = ModelPair(*specs)
    assert pair.source is pair.source
    assert loads == [specs[0].id]
    assert pair.source.identity == pair.source_identity
    pair.release("source")
    pair.release("target")
    assert pair.source.geometry == pair.source_geometry
    assert loads == [specs[0].id] * 2


def test_one_spec_on_both_sides_is_one_model_in_memory(specs, loads):
    pair = ModelPair(specs[0], specs[0])
    assert pair.source is pair.target
    assert len(loads) == 1
    pair.release("source")
    assert pair.target is not None
    assert len(loads) == 1


def test_models_in_memory_stay_with_their_owner(specs):
    loaded = LoadedModel.from_model(FAMILIES["llama"](), name="mine")
    pair = ModelPair(loaded, loaded)
    pair.check()
    pair.release("source")
    assert pair.source is loaded
    assert pair.source_identity is loaded.identity
    assert pair.tokenizer is None


def test_another_tokenizer_is_refused_before_any_weights(specs, loads, tmp_path):
    pair = ModelPair(specs[0], save(tmp_path, "llama", add_bos=True))
    with pytest.raises(TokenizerMismatch):
        _ = pair.source
    assert loads == []


def test_an_unsupported_model_is_refused_before_any_weights(specs, loads, tmp_path):
    import transformers

    transformers.DeepseekV3Config().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="deepseek_v3"):
        ModelPair(specs[0], ModelSpec(str(tmp_path))).check()
    assert loads == []


def test_a_copy_in_another_folder_is_the_same_model(specs, tmp_path):
    copy = shutil.copytree(specs[0].id, tmp_path / "copy")
    pair = ModelPair(specs[0], ModelSpec(str(copy)))
    assert pair.source_identity.mismatches(pair.target_identity) == []
