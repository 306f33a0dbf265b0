"""Loading from folders and hubs, and what is said when that fails."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from kvmap.models.capture import forward, prefill
from kvmap.models.geometry import UnsupportedModel
from kvmap.models.load import IncompleteWeights, load_model, load_tokenizer, read_geometry, read_identity
from kvmap.models.spec import InvalidSpec, ModelNotFound, ModelSpec
from tests.models.tiny_tokenizers import byte_level_tokenizer
from tests.tiny_random_models import FAMILIES, build_config, random_ids, randomise


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "llama"
    FAMILIES["llama_llama3"](vocab_size=272).save_pretrained(folder)
    byte_level_tokenizer().save_pretrained(folder)
    return folder


def spec_of(folder: Path, **settings) -> ModelSpec:
    return ModelSpec(str(folder), **settings)


def test_a_folder_loads_to_the_same_model(saved):
    loaded = load_model(spec_of(saved, device="cpu"))
    ids = random_ids(1, 12)
    expected, _ = forward(loaded, ids, None)
    with torch.no_grad():
        assert torch.equal(expected, FAMILIES["llama_llama3"](vocab_size=272)(ids).logits)
    assert (loaded.device.type, loaded.dtype) == ("cpu", torch.float32)
    assert loaded.tokenizer.padding_side == "left"
    assert not loaded.model.training


def test_dtype_auto_follows_the_config_then_the_checkpoint(saved, tmp_path):
    FAMILIES["llama"](vocab_size=272).to(torch.bfloat16).save_pretrained(tmp_path)
    byte_level_tokenizer().save_pretrained(tmp_path)
    assert load_model(spec_of(tmp_path)).dtype == torch.bfloat16
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "dtype"}))
    assert read_identity(spec_of(tmp_path)).dtype == "bfloat16"
    assert load_model(spec_of(tmp_path, dtype="float32")).identity.dtype == "float32"


def test_geometry_and_tokenizer_need_no_weights(saved, tmp_path):
    copy = shutil.copytree(saved, tmp_path / "copy", ignore=shutil.ignore_patterns("*.safetensors"))
    assert read_geometry(spec_of(copy)).n_layers == 2
    assert len(load_tokenizer(spec_of(copy))) == 265
    with pytest.raises(ModelNotFound, match=r"no model\.safetensors"):
        load_model(spec_of(copy))


def test_an_unsupported_model_is_refused_before_its_missing_weights_are(tmp_path):
    transformers.MambaConfig(num_hidden_layers=2).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="recurrent"):
        load_model(spec_of(tmp_path))


def test_a_missing_folder_is_named(tmp_path):
    for name in (str(tmp_path / "absent"), "./absent", "some/deep/folder"):
        with pytest.raises(ModelNotFound, match="no such model folder"):
            read_geometry(ModelSpec(name))


def test_a_folder_without_a_config_and_a_file_are_explained(tmp_path):
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        read_geometry(spec_of(tmp_path))
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelNotFound, match="give its folder as the id"):
        read_geometry(spec_of(tmp_path / "model.gguf"))


def test_a_missing_gguf_file_is_named_with_those_there(tmp_path):
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(
        ModelNotFound, match=r"no GGUF file 'model\.gguf' there; GGUF files found: other\.gguf"
    ):
        read_geometry(spec_of(tmp_path, gguf_file="model.gguf"))


def test_pickled_weights_are_refused(saved, tmp_path):
    copy = shutil.copytree(saved, tmp_path / "copy", ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save({}, copy / "pytorch_model.bin")
    with pytest.raises(ModelNotFound, match=r"pytorch_model\.bin, but pickled weights are never loaded"):
        load_model(spec_of(copy))


def test_a_missing_shard_is_named(saved, tmp_path):
    folder = tmp_path / "sharded"
    FAMILIES["llama"](vocab_size=272).save_pretrained(folder, max_shard_size="20KB")
    byte_level_tokenizer().save_pretrained(folder)
    load_model(spec_of(folder))
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelNotFound, match=shard.name):
        read_identity(spec_of(folder))


def test_a_checkpoint_that_lacks_tensors_is_refused(saved, tmp_path):
    copy = shutil.copytree(saved, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(IncompleteWeights, match=r"9 tensors .* model\.layers\.2\."):
        load_model(spec_of(copy))


def test_a_folder_without_a_tokenizer_is_refused(saved, tmp_path):
    copy = shutil.copytree(saved, tmp_path / "copy", ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(
        ModelNotFound,
        match=rf"(?s)no tokenizer .* from {copy} \(tokenizer files there: none\).*Copy or download",
    ):
        load_model(spec_of(copy))


@pytest.mark.parametrize("kept", [0, 5, 100, 20_000])
def test_a_truncated_checkpoint_is_named(saved, tmp_path, kept):
    copy = shutil.copytree(saved, tmp_path / "copy")
    whole = (copy / "model.safetensors").read_bytes()
    assert kept < len(whole)
    (copy / "model.safetensors").write_bytes(whole[:kept])
    with pytest.raises(
        IncompleteWeights, match=rf"weights in {copy} cannot be read.*Copy or download that folder"
    ):
        load_model(spec_of(copy))


def test_a_damaged_header_is_named_where_the_dtype_is_read_from_it(saved, tmp_path):
    copy = shutil.copytree(saved, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "dtype"}))
    for content in (b"", b"\xff" * 40, b"\x04" + bytes(7) + b"\xff" * 4):
        (copy / "model.safetensors").write_bytes(content)
        with pytest.raises(IncompleteWeights, match=rf"files in {copy} cannot be read"):
            read_identity(spec_of(copy))


@pytest.mark.parametrize("content", [b"", b"{", b"<html>not found</html>", b"\xff\xfe"])
@pytest.mark.parametrize(
    ("name", "error", "what"),
    [
        ("config.json", ModelNotFound, "config in"),
        ("tokenizer.json", ModelNotFound, "no tokenizer could be loaded from"),
        ("tokenizer_config.json", ModelNotFound, "no tokenizer could be loaded from"),
    ],
)
def test_a_file_that_is_not_json_is_named(saved, tmp_path, name, error, what, content):
    copy = shutil.copytree(saved, tmp_path / "copy")
    (copy / name).write_bytes(content)
    with pytest.raises(error, match=rf"{copy}: .*{what} {copy}"):
        load_model(spec_of(copy))


def test_a_damaged_index_of_shards_is_named(saved, tmp_path):
    copy = shutil.copytree(saved, tmp_path / "copy", ignore=shutil.ignore_patterns("*.safetensors"))
    for content in ("{", "{}"):
        (copy / "model.safetensors.index.json").write_text(content)
        with pytest.raises(IncompleteWeights, match=rf"files in {copy} cannot be read"):
            load_model(spec_of(copy))


@pytest.mark.slow
def test_loading_warns_about_nothing(saved):
    script = (
        "import sys; from kvmap.models.load import load_model; from kvmap.models.spec import ModelSpec; "
        "load_model(ModelSpec(sys.argv[1], device='cpu', dtype='bfloat16'))"
    )
    command = [sys.executable, "-W", "error::FutureWarning", "-c", script, str(saved)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = run.stderr.replace("\r", "\n").splitlines()
    assert [line for line in lines if line.strip() and "Loading weights" not in line] == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "int4"}, "dtype 'int4'; expected auto, float32, bfloat16, float16"),
        ({"device": "gpu"}, "device 'gpu'"),
        ({"attn_implementation": "fast"}, "attn_implementation=fast"),
    ],
)
def test_impossible_settings_are_named(saved, settings, message):
    with pytest.raises(InvalidSpec, match=message):
        load_model(spec_of(saved, **settings))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_named(saved):
    with pytest.raises(InvalidSpec, match="torch finds no GPU here; use device=cpu"):
        load_model(spec_of(saved, device="cuda"))


def test_an_architecture_transformers_does_not_know_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "brand_new"}))
    with pytest.raises(UnsupportedModel, match="brand_new"):
        read_geometry(spec_of(tmp_path))


def test_without_a_hub_the_message_says_what_to_do(tmp_path):
    script = (
        "from kvmap.models.load import read_geometry; from kvmap.models.spec import *\n"
        "try: read_geometry(ModelSpec('some-org/some-model', revision='abc'))\n"
        "except ModelNotFound as error: print(error)"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True
    )
    assert "some-org/some-model@abc: no such local folder, not in the local hub cache" in run.stdout
    assert "HF_HUB_OFFLINE is set" in run.stdout
    assert "hf download some-org/some-model" in run.stdout


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("GatedRepoError", "gated: accept its licence"),
        ("RepositoryNotFoundError", "neither a local folder nor a model on the hub"),
        ("RevisionNotFoundError", "no revision 'abc'"),
        ("LocalEntryNotFoundError", "the hub did not give it"),
    ],
)
def test_answers_of_the_hub_are_explained(monkeypatch, error, message):
    import huggingface_hub
    from huggingface_hub import errors

    kind = getattr(errors, error)

    def refuse(*args, **kwargs):
        raise kind.__new__(kind, "said no")

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ModelNotFound, match=message):
        read_geometry(ModelSpec("some-org/some-model", revision="abc"))


def test_a_hub_model_is_read_at_its_pinned_revision(monkeypatch, saved):
    import huggingface_hub

    asked = []

    def snapshot(repo, revision, allow_patterns):
        asked.append((repo, revision, "*.safetensors" in allow_patterns))
        return str(saved)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    spec = ModelSpec("some-org/some-model", revision="abc")
    read_geometry(spec)
    assert asked == [("some-org/some-model", "abc", False)]
    assert read_identity(spec).name == "some-org/some-model@abc"
    assert asked[-1] == ("some-org/some-model", "abc", True)


def test_the_shipped_family_is_found_by_name(monkeypatch, saved):
    import kvmap.zoo

    monkeypatch.setattr(
        kvmap.zoo, "weights_folder", lambda name: saved if name == "tiny-small" else None, raising=False
    )
    assert read_geometry(ModelSpec("zoo:tiny-small")).n_layers == 2


def test_a_family_without_sdpa_loads_in_eager(tmp_path):
    FAMILIES["gemma2"](vocab_size=272).save_pretrained(tmp_path)
    byte_level_tokenizer().save_pretrained(tmp_path)
    assert load_model(spec_of(tmp_path)).model.config._attn_implementation == "eager"


def test_the_text_model_of_a_multimodal_wrapper_is_used(tmp_path):
    vision = {
        "model_type": "pixtral",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 8,
        "image_size": 28,
        "patch_size": 14,
    }
    config = transformers.Mistral3Config(
        text_config=build_config("ministral3", vocab_size=272).to_dict(),
        vision_config=vision,
        image_token_index=9,
    )
    model = transformers.Mistral3ForConditionalGeneration(config)
    randomise(model, 0)
    model.eval().save_pretrained(tmp_path)
    byte_level_tokenizer().save_pretrained(tmp_path)
    loaded = load_model(spec_of(tmp_path))
    assert loaded.geometry.model_type == "ministral3"
    ids = random_ids(2, 40)
    with torch.no_grad():
        full = model(input_ids=ids).logits
    logits, _ = forward(loaded, ids[:, 35:], prefill(loaded, ids[:, :35]))
    assert (logits - full[:, 35:]).abs().max() <= 1e-4
