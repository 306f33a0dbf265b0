"""Conditions known from a model's files are those of the model once it is loaded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvmap.evaluation.conditions import loaded_conditions, spec_conditions
from kvmap.models.load import load_model, load_tokenizer
from kvmap.models.loaded import LoadedModel
from kvmap.models.spec import ModelSpec
from tests.tiny_random_models import FAMILIES


def both_ways(spec: ModelSpec) -> dict[str, Any]:
    model = load_model(spec)
    known = spec_conditions(spec, load_tokenizer(spec))
    assert known == loaded_conditions(model)
    return known


@pytest.fixture
def folder(tmp_path: Path, tokenizer: Any) -> Path:
    """A llama in a folder, as transformers saves it."""
    model = FAMILIES["llama"](vocab_size=len(tokenizer))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("attention", ["sdpa", "eager", None])
def test_of_the_shipped_family(attention: str | None) -> None:
    known = both_ways(ModelSpec("zoo:tiny-small", device="cpu", attn_implementation=attention))
    assert known == {
        "attention": attention or "sdpa",
        "device": "cpu",
        "end_of_text_ids": [2],
        "repetition_penalty": 1.0,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


@pytest.mark.parametrize("attention", ["sdpa", None])
def test_a_family_without_sdpa_runs_in_eager_attention(
    tmp_path: Path, tokenizer: Any, attention: str | None
) -> None:
    FAMILIES["gemma2"](vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    known = both_ways(ModelSpec(str(tmp_path), device="cpu", attn_implementation=attention))
    assert known["attention"] == "eager"


@pytest.mark.parametrize(
    ("settings", "ends", "penalty"),
    [
        ({}, [2], 1.0),
        ({"eos_token_id": 7}, [2, 7], 1.0),
        ({"eos_token_id": [9, 7], "repetition_penalty": 1.1}, [2, 7, 9], 1.1),
    ],
)
def test_generation_config_is_read(
    folder: Path, settings: dict[str, Any], ends: list[int], penalty: float
) -> None:
    (folder / "generation_config.json").write_text(json.dumps(settings))
    known = both_ways(ModelSpec(str(folder), device="cpu"))
    assert (known["end_of_text_ids"], known["repetition_penalty"]) == (ends, penalty)


def test_without_a_generation_config_the_models_own_config_counts(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": [5, 6]}
    (folder / "config.json").write_text(json.dumps(config))
    assert both_ways(ModelSpec(str(folder), device="cpu"))["end_of_text_ids"] == [2, 5, 6]


def test_of_a_gguf_file(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from tests.models.test_gguf import write

    # Its folder's generation config is not its own.
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    spec = write(tmp_path / "tiny.gguf", FAMILIES["llama"](vocab_size=272))
    assert both_ways(replace(spec, device="cpu"))["end_of_text_ids"] == [2]


def test_a_device_is_named_by_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ModelSpec("zoo:tiny-small", device="cuda:1")
    assert spec_conditions(spec, None)["device"] == "cuda"
    assert spec_conditions(replace(spec, device_map="auto"), None)["device"] == "device_map=auto"
    for there in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert spec_conditions(replace(spec, device="auto"), None)["device"] == ("cuda" if there else "cpu")


def test_a_model_in_memory_without_a_tokenizer() -> None:
    known = loaded_conditions(LoadedModel.from_model(FAMILIES["llama"]()))
    assert known["attention"] == "sdpa"
    assert known["end_of_text_ids"] == [2]
