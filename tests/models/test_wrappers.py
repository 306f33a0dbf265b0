"""Multimodal models are served through their text model: texts are read as the whole model reads them."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import transformers

from kvmap.fit.features import geometry_shape
from kvmap.mappers import IdentityMapper
from kvmap.models.capture import forward, positions_from_mask, prefill
from kvmap.models.geometry import UnsupportedModel, geometry_from_config
from kvmap.models.loaded import LoadedModel
from kvmap.models.verify import check_rotation
from kvmap.transfer import transfer
from tests.models.wrappers import FIRST_TEXT_ID, WRAPPERS, build_wrapper
from tests.tiny_random_models import left_padding, random_ids

# float32 logits of size 1 to 15
SAME = {"rtol": 0, "atol": 1e-4}
every_wrapper = pytest.mark.parametrize("name", WRAPPERS)


@cache
def loaded(name: str) -> LoadedModel:
    return LoadedModel.from_model(build_wrapper(name), name=name)


def texts() -> tuple[torch.Tensor, torch.Tensor]:
    return random_ids(3, 30).clamp(min=FIRST_TEXT_ID), left_padding(3, 30)


@every_wrapper
def test_a_text_is_read_as_the_whole_model_reads_it(name: str) -> None:
    model, (ids, mask) = loaded(name), texts()
    assert model.body is not model.model
    assert model.geometry == geometry_from_config(model.text_config)
    with torch.no_grad():
        whole = model.model(
            input_ids=ids, attention_mask=mask, position_ids=positions_from_mask(mask), use_cache=False
        ).logits
    assert whole.std() > 0.1
    kv = prefill(model, ids[:, :25], mask[:, :25])
    torch.testing.assert_close(forward(model, ids[:, 25:], kv)[0], whole[:, 25:], **SAME)
    identity = IdentityMapper(geometry_shape(model.geometry))
    handed = transfer(prefill(model, ids, mask), identity, model, ids, mask)
    torch.testing.assert_close(handed.logits, whole[:, -1], **SAME)


@every_wrapper
def test_its_rotation_is_the_text_models(name: str) -> None:
    assert max(check_rotation(loaded(name))) < 1e-5


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("PaliGemma", "both directions"),
        ("Qwen2VL", "three positions"),
        ("Qwen2_5_VL", "three positions"),
        ("Qwen3VL", "three positions"),
        ("Glm4v", "three positions"),
        ("Mllama", "attend to the image"),
        ("Gemma3n", "owns no KV"),
        ("Llama4", "normalises keys after the rotation"),
    ],
)
def test_wrappers_that_cannot_be_served_are_refused_with_the_reason(name: str, message: str) -> None:
    settings = {}
    if name == "PaliGemma":
        settings = {"text_config": {"model_type": "gemma"}}
    with pytest.raises(UnsupportedModel, match=message):
        geometry_from_config(getattr(transformers, f"{name}Config")(**settings))
