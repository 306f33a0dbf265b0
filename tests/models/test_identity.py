"""Identities: equal for copies, different by name for anything else, the same in every process."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvmap.models.identity import (
    BLOCK_BYTES,
    BLOCKS_PER_FILE,
    fingerprint_file,
    fingerprint_state,
)
from kvmap.models.load import load_model, read_identity
from kvmap.models.loaded import LoadedModel
from kvmap.models.spec import ModelSpec
from tests.models.tiny_tokenizers import byte_level_tokenizer
from tests.tiny_random_models import FAMILIES


def save(folder: Path, name: str = "llama_llama3", **settings) -> Path:
    FAMILIES[name](vocab_size=272, **settings).save_pretrained(folder)
    byte_level_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("models") / "one")


def edited(saved: Path, tmp_path: Path, name: str, **changes) -> Path:
    copy = tmp_path / "copy"
    shutil.copytree(saved, copy)
    settings = json.loads((copy / name).read_text())
    (copy / name).write_text(json.dumps({**settings, **changes}))
    return copy


def parts_that_differ(one: Path, other: Path, **spec) -> list[str]:
    lines = read_identity(ModelSpec(str(one))).mismatches(read_identity(ModelSpec(str(other), **spec)))
    return [line.split(":")[0] for line in lines]


def test_a_copy_is_the_same_model_under_another_name(saved, tmp_path):
    copy = shutil.copytree(saved, tmp_path / "copy")
    assert parts_that_differ(saved, copy) == []
    one, two = (read_identity(ModelSpec(str(folder))) for folder in (saved, copy))
    assert dataclasses.replace(one, name=two.name) == two
    assert one.name != two.name


def test_identity_is_known_before_weights_load_and_equal_after(saved):
    spec = ModelSpec(str(saved))
    assert load_model(spec).identity == read_identity(spec)


def test_a_same_shaped_other_checkpoint_differs_in_weights_alone(saved, tmp_path):
    assert parts_that_differ(saved, save(tmp_path, seed=1)) == ["weights"]


def test_another_scaling_differs_in_config_and_rope(saved, tmp_path):
    parameters = json.loads((saved / "config.json").read_text())["rope_parameters"]
    copy = edited(saved, tmp_path, "config.json", rope_parameters={**parameters, "factor": 8.0})
    assert parts_that_differ(saved, copy) == ["config", "rope"]


def test_another_dtype_differs_in_dtype_alone(saved):
    assert parts_that_differ(saved, saved, dtype="bfloat16") == ["dtype"]


def test_another_tokenizer_differs_in_tokenizer_alone(saved, tmp_path):
    copy = shutil.copytree(saved, tmp_path / "copy")
    byte_level_tokenizer(add_bos=True).save_pretrained(copy)
    assert parts_that_differ(saved, copy) == ["tokenizer"]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("config.json", {"transformers_version": "9.9", "_name_or_path": "x", "use_cache": False}),
        ("tokenizer_config.json", {"chat_template": "x", "padding_side": "left"}),
    ],
)
def test_fields_that_change_no_output_do_not_count(saved, tmp_path, name, changes):
    assert parts_that_differ(saved, edited(saved, tmp_path, name, **changes)) == []


def test_mismatches_name_both_models(saved, tmp_path):
    one, two = (read_identity(ModelSpec(str(folder))) for folder in (saved, save(tmp_path, seed=1)))
    (line,) = one.mismatches(two)
    assert line == f"weights: {one.weights[:16]} of {one.name} is not {two.weights[:16]} of {two.name}"


def test_one_altered_tensor_of_a_small_file_is_seen(saved, tmp_path):
    copy = shutil.copytree(saved, tmp_path / "copy")
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"][3] += 1e-3
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    assert parts_that_differ(saved, copy) == ["weights"]


def test_large_files_are_sampled_from_end_to_end(tmp_path):
    size = BLOCK_BYTES * BLOCKS_PER_FILE * 2
    content = bytearray(size)
    header = json.dumps({"w": {"dtype": "U8", "shape": [size - 72], "data_offsets": [0, size - 72]}}).encode()
    content[:8] = len(header).to_bytes(8, "little")
    content[8 : 8 + len(header)] = header
    path = tmp_path / "large.safetensors"

    def fingerprint_with(position: int) -> str:
        changed = bytearray(content)
        changed[position] ^= 1
        path.write_bytes(changed)
        return fingerprint_file(path)

    path.write_bytes(content)
    same = fingerprint_file(path)
    assert fingerprint_with(10) != same  # the header
    assert fingerprint_with(size - 1) != same  # the last block
    assert fingerprint_with(31 * (size - BLOCK_BYTES) // 63) != same  # a block in the middle
    path.write_bytes(content + b"x")
    assert fingerprint_file(path) != same


def test_weights_in_memory_are_told_apart():
    one, same, other = (FAMILIES["llama"](seed=seed).state_dict() for seed in (0, 0, 1))
    assert fingerprint_state(one) == fingerprint_state(same) != fingerprint_state(other)
    large = {"w": torch.zeros(200, 1000)}
    moved = {"w": torch.zeros(200, 1000)}
    moved["w"][-1, -1] = 1
    assert fingerprint_state(large) != fingerprint_state(moved)


def test_models_in_memory_have_identities_too():
    one, same, half = (LoadedModel.from_model(FAMILIES["gemma3"](), name=name) for name in ("a", "b", "c"))
    assert one.identity.mismatches(same.identity) == []
    half.model.to(torch.bfloat16)
    assert [
        line.split(":")[0] for line in one.identity.mismatches(LoadedModel.from_model(half.model).identity)
    ] == [
        "weights",
        "dtype",
    ]
    assert one.identity.tokenizer == "none"
    assert len({field.name for field in dataclasses.fields(one.identity)}) == 6


@pytest.mark.slow
def test_the_key_does_not_depend_on_the_hash_seed(saved):
    script = (
        "import sys; from kvmap.models.load import read_identity; from kvmap.models.spec import ModelSpec; "
        "print(read_identity(ModelSpec(sys.argv[1])))"
    )
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    command = [sys.executable, "-c", script, str(saved)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert run.stdout.strip().splitlines()[-1] == str(read_identity(ModelSpec(str(saved))))
