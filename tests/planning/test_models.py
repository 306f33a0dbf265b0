from __future__ import annotations

import pytest
import torch

from kvmap.models.capture import prefill
from kvmap.models.load import load_model
from kvmap.models.spec import ModelNotFound, ModelSpec
from kvmap.planning.models import facts_of, read_facts
from kvmap.transfer.cost import decoder_work
from tests.models.wrappers import WRAPPERS, build_wrapper
from tests.tiny_random_models import FAMILIES, build_config


@pytest.mark.parametrize("name", ["tiny-small", "tiny-large", "tiny-wide"])
def test_a_config_tells_what_a_loaded_model_holds(name: str) -> None:
    spec = ModelSpec(f"zoo:{name}", dtype="float32", device="cpu")
    facts, loaded = read_facts(spec), load_model(spec)
    assert facts.weights_bytes() == sum(p.numel() * p.element_size() for p in loaded.model.parameters())
    assert facts.work == decoder_work(loaded)
    kv = prefill(loaded, torch.ones(2, 9, dtype=torch.int64))
    cached = sum(tensor.numel() * tensor.element_size() for tensor in (*kv.keys, *kv.values))
    assert facts.geometry.kv_bytes(2 * 9, facts.item_bytes) == cached
    assert (facts.dtype, facts.origin, facts.quantisation) == ("float32", "config", "none")


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_can_be_planned(name: str) -> None:
    model = FAMILIES[name]()
    facts = facts_of(build_config(name), ModelSpec("somewhere", dtype="bfloat16"))
    n_parameters = sum(p.numel() for p in model.parameters())
    assert facts.parameters == n_parameters
    assert facts.weights_bytes() == 2 * n_parameters
    own_head = model.get_output_embeddings().weight is not model.get_input_embeddings().weight
    assert facts.head == (model.get_output_embeddings().weight.numel() if own_head else 0)


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_counts_whole(name: str) -> None:
    model = build_wrapper(name)
    facts = facts_of(model.config, ModelSpec("somewhere"))
    assert facts.parameters == sum(p.numel() for p in model.parameters())


def test_out_of_reach_the_shipped_facts_serve() -> None:
    facts = read_facts(ModelSpec("Qwen/Qwen3-32B"))
    assert facts.origin == "shipped facts"
    assert facts.dtype == "bfloat16"
    assert facts.weights_bytes() == pytest.approx(65.5e9, rel=1e-3)
    assert facts.weights_bytes(dtype="float32") == 2 * facts.weights_bytes()


def test_weights_stored_in_8_bits_stay_so_where_the_device_computes_with_them() -> None:
    facts = read_facts(ModelSpec("mistralai/Ministral-3-8B-Instruct-2512"))
    assert facts.quantisation == "fp8"
    wide, narrow = facts.weights_bytes(fp8=False), facts.weights_bytes(fp8=True)
    assert wide - narrow == facts.matrices
    # 8.4 B of the text model and 0.4 B of the vision encoder
    assert facts.parameters / 1e9 == pytest.approx(8.9, abs=0.05)


def test_an_unknown_model_out_of_reach_is_not_guessed() -> None:
    with pytest.raises(ModelNotFound):
        read_facts(ModelSpec("nobody/nothing"))
