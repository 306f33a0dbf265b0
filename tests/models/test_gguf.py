"""Models in GGUF files, written as llama.cpp writes them: rows of Q and K permuted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvmap.models.capture import forward, prefill
from kvmap.models.geometry import UnsupportedModel
from kvmap.models.gguf_header import read_gguf_header
from kvmap.models.load import load_model, read_geometry, read_identity
from kvmap.models.loaded import LoadedModel
from kvmap.models.spec import ModelNotFound, ModelSpec
from tests.models.tiny_tokenizers import MERGES, byte_level_tokenizer
from tests.tiny_random_models import FAMILIES, random_ids

gguf = pytest.importorskip("gguf")

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def permuted(weight: torch.Tensor, n_heads: int) -> torch.Tensor:
    """llama.cpp's order of Q and K rows: the halves of each head interleaved."""
    return weight.unflatten(0, (n_heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def tensors_of(model, permute: bool):
    yield "token_embd.weight", model.model.embed_tokens.weight
    yield "output_norm.weight", model.model.norm.weight
    yield "output.weight", model.lm_head.weight
    for index, layer in enumerate(model.model.layers):
        for ours, theirs in NAMES.items():
            weight = layer.get_submodule(ours).weight
            if permute and theirs in ("attn_q", "attn_k"):
                config = model.config
                weight = permuted(
                    weight, config.num_attention_heads if theirs == "attn_q" else config.num_key_value_heads
                )
            yield f"blk.{index}.{theirs}.weight", weight


def write(
    path: Path, model, *, scaling: str | None = None, frequencies: bool = False, permute: bool = True
) -> ModelSpec:
    config, tokenizer = model.config, byte_level_tokenizer()
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    if scaling:
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling))
        writer.add_rope_scaling_factor(4.0)
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    tokens += [f"<unused{i}>" for i in range(config.vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges([" ".join(merge) for merge in MERGES])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if frequencies:
        writer.add_tensor("rope_freqs.weight", torch.ones(4).numpy())
    for name, weight in tensors_of(model, permute):
        writer.add_tensor(name, weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelSpec(str(path.parent), gguf_file=path.name)


@pytest.fixture(scope="module")
def model():
    return FAMILIES["llama"](vocab_size=272)


def test_permuted_rows_come_back_so_keys_are_equal(model, tmp_path):
    spec = write(tmp_path / "tiny.gguf", model)
    loaded, original = load_model(spec), LoadedModel.from_model(model)
    ids = random_ids(2, 40)
    for mine, theirs in zip(
        prefill(loaded, ids).strip().keys, prefill(original, ids).strip().keys, strict=True
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    assert (forward(loaded, ids, None)[0] - forward(original, ids, None)[0]).abs().max() <= 1e-4
    assert loaded.tokenizer("the")["input_ids"] == byte_level_tokenizer()("the")["input_ids"]


def test_rows_left_unpermuted_would_show(model, tmp_path):
    loaded = load_model(write(tmp_path / "tiny.gguf", model, permute=False))
    ids = random_ids(1, 20)
    mine, theirs = (prefill(m, ids).keys[0] for m in (loaded, LoadedModel.from_model(model)))
    assert (mine - theirs).abs().max() > 0.1


def test_identity_is_known_from_the_file_and_follows_it(model, tmp_path):
    spec = write(tmp_path / "one.gguf", model)
    other = write(tmp_path / "two.gguf", FAMILIES["llama"](vocab_size=272, seed=1))
    identity = read_identity(spec)
    assert load_model(spec).identity == identity
    assert identity.dtype == "float32"
    assert "weights" in [line.split(":")[0] for line in identity.mismatches(read_identity(other))]


def test_a_scaling_that_loading_would_drop_is_refused(model, tmp_path):
    with pytest.raises(UnsupportedModel, match=r"llama\.rope\.scaling\.type = linear"):
        read_geometry(write(tmp_path / "linear.gguf", model, scaling="linear"))
    with pytest.raises(UnsupportedModel, match=r"tensor rope_freqs\.weight"):
        read_geometry(write(tmp_path / "llama3.gguf", model, frequencies=True))
    assert read_geometry(write(tmp_path / "none.gguf", model, scaling="none")).n_layers == 2


def test_the_header_is_read_as_the_gguf_package_writes_it(model, tmp_path):
    spec = write(tmp_path / "tiny.gguf", model)
    header = read_gguf_header(tmp_path / spec.gguf_file)
    assert header.settings["llama.attention.head_count_kv"] == 2
    assert header.settings["tokenizer.ggml.model"] == "gpt2"
    assert "tokenizer.ggml.tokens" not in header.settings
    assert set(header.tensor_names) == {name for name, _ in tensors_of(model, True)}


def test_files_that_are_not_whole_gguf_files_are_named(model, tmp_path):
    path = tmp_path / "tiny.gguf"
    write(path, model)
    whole = path.read_bytes()
    path.write_bytes(whole[:200])
    with pytest.raises(ModelNotFound, match="breaks off"):
        read_gguf_header(path)
    path.write_bytes(b"PK\x03\x04" + whole[4:])
    with pytest.raises(ModelNotFound, match="not a GGUF file"):
        read_gguf_header(path)
