"""Quantised checkpoints: captured as they compute, known by how they are quantised, never read wrongly."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from kvmap.errors import KvmapError
from kvmap.fit.features import geometry_shape
from kvmap.mappers import IdentityMapper, MapperMismatch, identity_record, load_mapper, save_mapper
from kvmap.models.capture import forward, prefill
from kvmap.models.geometry import UnsupportedModel
from kvmap.models.load import load_model, read_identity
from kvmap.models.loaded import LoadedModel
from kvmap.models.quantisation import quantisation_of
from kvmap.models.spec import ModelSpec
from kvmap.transfer import native, transfer
from tests.models.test_gguf import write
from tests.models.tiny_tokenizers import byte_level_tokenizer
from tests.tiny_random_models import build, random_ids

BLOCK = 16
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
SIZES = {"vocab_size": 272, "hidden_size": 32, "intermediate_size": 32}
# float32 logits of size 1 to 15
SAME = {"rtol": 0, "atol": 1e-4}

pytest.importorskip("accelerate")  # transformers loads fp8 by it


def in_blocks(weight: Tensor) -> Tensor:
    """(rows, columns) as (row blocks, BLOCK, column blocks, BLOCK)."""
    return weight.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))


def to_fp8(weight: Tensor, per_tensor: bool) -> tuple[Tensor, Tensor]:
    """A weight in float8 and the scales to multiply it by."""
    if per_tensor:
        scale = weight.abs().max() / 448
        return (weight / scale).to(torch.float8_e4m3fn), scale
    blocks = in_blocks(weight)
    scales = blocks.abs().amax((1, 3)) / 448
    return (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn).flatten(2, 3).flatten(0, 1), scales


def from_fp8(stored: Tensor, scales: Tensor) -> Tensor:
    if scales.ndim == 0:
        return stored.float() * scales
    return (in_blocks(stored.float()) * scales[:, None, :, None]).flatten(2, 3).flatten(0, 1)


def save_fp8(
    folder: Path, family: str = "llama", *, per_tensor: bool = False, said: bool = True
) -> tuple[ModelSpec, LoadedModel]:
    """An fp8 checkpoint, and the model of the same weights dequantised by hand."""
    model = build(family, **SIZES)
    state: dict[str, Tensor] = {}
    dequantised: dict[str, Tensor] = {}
    for name, weight in model.state_dict().items():
        if "_proj" not in name or weight.ndim != 2:
            state[name] = weight.contiguous()
            continue
        stored, scales = to_fp8(weight, per_tensor)
        state[name], state[f"{name}_scale_inv"] = stored.contiguous(), scales.contiguous()
        if per_tensor:
            state[f"{name.removesuffix('weight')}activation_scale"] = torch.tensor(1.0)
        dequantised[name] = from_fp8(stored, scales)
    folder.mkdir()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    if said:
        static = {"activation_scheme": "static", "weight_block_size": None}
        config["quantization_config"] = {**FP8, **(static if per_tensor else {})}
    (folder / "config.json").write_text(json.dumps(config))
    byte_level_tokenizer().save_pretrained(folder)
    model.load_state_dict(dequantised, strict=False)
    return ModelSpec(str(folder), dtype="float32"), LoadedModel.from_model(model)


without_fp8_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may compute in fp8 itself")


@without_fp8_gpu
@pytest.mark.parametrize("per_tensor", [False, True])
@pytest.mark.parametrize("family", ["llama", "ministral3", "qwen3"])
def test_an_fp8_checkpoint_is_captured_with_its_scales(tmp_path: Path, family: str, per_tensor: bool) -> None:
    spec, by_hand = save_fp8(tmp_path / "fp8", family, per_tensor=per_tensor)
    loaded, ids = load_model(spec), random_ids(2, 20)
    mine, theirs = prefill(loaded, ids), prefill(by_hand, ids)
    for layer in range(mine.n_layers):
        torch.testing.assert_close(mine.keys[layer], theirs.keys[layer], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(mine.values[layer], theirs.values[layer], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(forward(loaded, ids, None)[0], forward(by_hand, ids, None)[0], **SAME)
    identity = IdentityMapper(geometry_shape(loaded.geometry))
    handed = transfer(prefill(loaded, ids), identity, loaded, ids)
    torch.testing.assert_close(handed.logits, native(loaded, ids).logits, **SAME)
    assert loaded.identity == read_identity(spec)
    assert loaded.identity.quantisation == "fp8-dequantised"


def test_fp8_weights_that_no_config_explains_are_refused(tmp_path: Path) -> None:
    """Transformers reads them without their scales, and says no more than that there were other tensors."""
    spec, _ = save_fp8(tmp_path / "fp8", said=False)
    for read in (load_model, read_identity):
        with pytest.raises(UnsupportedModel, match=r"proj.weight is stored as F8_E4M3.*quantization_config"):
            read(spec)


def test_a_mapper_knows_the_quantisation_and_refuses_another(tmp_path: Path) -> None:
    spec, plain = save_fp8(tmp_path / "fp8")
    quantised = read_identity(spec)
    record = identity_record(quantised)
    assert str(record["config"]).startswith("fp8")
    assert plain.identity.quantisation == "none"
    mapper = IdentityMapper(geometry_shape(plain.geometry))
    manifest = {"source": record, "target": record, "rope": "strip"}
    save_mapper(mapper, tmp_path / "mapper", manifest)
    loaded, _ = load_mapper(tmp_path / "mapper")
    loaded.check_models(quantised, quantised, "strip")
    # the same weights and settings, computed otherwise
    elsewhere = dataclasses.replace(quantised, config=quantised.config.replace("fp8-dequantised:", "fp8:"))
    if elsewhere != quantised:
        with pytest.raises(MapperMismatch, match="config: fp8-dequantised"):
            loaded.check_models(elsewhere, elsewhere, "strip")


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes-4bit"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes-8bit"),
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "fp8", "dequantize": True}, "fp8-dequantised"),
    ],
)
def test_quantisations_have_names(settings: dict[str, Any], name: str) -> None:
    config = build("llama").config
    assert quantisation_of(config) == "none"
    config.quantization_config = settings
    assert quantisation_of(config) == name


def test_fp8_is_computed_as_it_is_where_a_gpu_can(monkeypatch: pytest.MonkeyPatch) -> None:
    config = build("llama").config
    config.quantization_config = FP8
    for available, capability, name in (
        (False, (0, 0), "fp8-dequantised"),
        (True, (8, 0), "fp8-dequantised"),
        (True, (9, 0), "fp8"),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        assert quantisation_of(config) == name


def test_bitsandbytes_without_its_package_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, _ = save_fp8(tmp_path / "bnb")
    path = Path(spec.id) / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    path.write_text(json.dumps(config))
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "bitsandbytes" else found(name, *rest),
    )
    with pytest.raises(UnsupportedModel, match="bitsandbytes-4bit, which needs a GPU and the package"):
        load_model(spec)


@pytest.mark.parametrize("method", ["gptq", "awq", "torchao", "compressed-tensors"])
def test_a_method_whose_package_is_missing_is_refused_in_one_message(tmp_path: Path, method: str) -> None:
    spec, _ = save_fp8(tmp_path / "other")
    path = Path(spec.id) / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": 16}
    path.write_text(json.dumps(config))
    with pytest.raises(KvmapError, match=Path(spec.id).name):
        load_model(spec)


def test_a_gguf_files_number_format_is_part_of_its_identity(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    spec = write(tmp_path / "tiny.gguf", build("llama", vocab_size=272))
    assert read_identity(spec).quantisation == "gguf"
