"""Anchor 1: with source = target and the identity map, a hand-off is the target's own prefill."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch
from torch import Tensor

from kvmap.fit.features import geometry_shape
from kvmap.mappers import IdentityMapper
from kvmap.models.cache import InvalidCache
from kvmap.models.capture import prefill
from kvmap.models.pair import LoadedModel
from kvmap.transfer import continue_greedy, native, transfer
from tests.tiny_random_models import FAMILIES, MAX_POSITIONS, ORIGINAL_MAX, left_padding, random_ids

# METHOD asks for 1e-4 in float32 on logits of size 1 to 15; taking a rotation off and on costs some 1e-6
TOLERANCE = 1e-4
N_NEW = 5
LENGTH_DEPENDENT = ["llama_dynamic", "phi3_longrope"]
SCALED = [*LENGTH_DEPENDENT, "llama_yarn", "llama_llama3", "llama_linear", "ministral3"]


@cache
def loaded(family: str) -> LoadedModel:
    return LoadedModel.from_model(FAMILIES[family](), name=family)


def native_logits(model: LoadedModel, ids: Tensor, mask: Tensor) -> Tensor:
    """The model's own forward over the whole context, no cache involved."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model.model(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False
        ).logits
    return logits[:, -1].float()


def native_generation(model: LoadedModel, ids: Tensor, mask: Tensor) -> list[list[int]]:
    """Transformers' own greedy generation."""
    with torch.no_grad():
        out = model.model.generate(
            ids, attention_mask=mask, max_new_tokens=N_NEW, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    return out[:, ids.shape[1] :].tolist()


class ZeroMapper(IdentityMapper):
    """An all-zero cache: nothing of the context arrives but what the target runs itself."""

    def map_layer(
        self,
        layer: int,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        native_keys: Sequence[Tensor] = (),
        native_values: Sequence[Tensor] = (),
    ) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(keys[layer]), torch.zeros_like(values[layer])


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_identity_reproduces_native_logits_and_generations(family: str, batch: int) -> None:
    model = loaded(family)
    ids, mask = random_ids(batch, 18), left_padding(batch, 18)
    expected, generation = native_logits(model, ids, mask), native_generation(model, ids, mask)
    identity = IdentityMapper(geometry_shape(model.geometry))
    for native_head in (0, 1):
        for hold_back in (1, 4):
            source = prefill(model, ids, mask)
            handoff = transfer(
                source, identity, model, ids, mask, hold_back=hold_back, native_head=native_head
            )
            torch.testing.assert_close(handoff.logits, expected, rtol=0, atol=TOLERANCE)
            assert continue_greedy(model, handoff, N_NEW) == generation
            assert handoff.n_mapped == int(mask.sum()) - batch * (native_head + hold_back)
            assert not handoff.kv.exact
    own = native(model, ids, mask)
    torch.testing.assert_close(own.logits, expected, rtol=0, atol=TOLERANCE)
    assert continue_greedy(model, own, N_NEW) == generation


@pytest.mark.parametrize("native_head", [0, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_zeroed_cache_changes_the_outputs_so_the_cache_is_really_read(
    family: str, native_head: int
) -> None:
    model = loaded(family)
    ids = random_ids(1, 18)
    zero = ZeroMapper(geometry_shape(model.geometry))
    handoff = transfer(prefill(model, ids), zero, model, ids, native_head=native_head)
    difference = (handoff.logits - native_logits(model, ids, torch.ones_like(ids))).abs().max()
    assert float(difference) > 100 * TOLERANCE


@pytest.mark.parametrize("native_head", [0, 1, 3])
@pytest.mark.parametrize("family", SCALED)
def test_identity_holds_beyond_the_length_a_scaled_model_was_trained_on(
    family: str, native_head: int
) -> None:
    model = loaded(family)
    n_tokens = min(ORIGINAL_MAX + 9, MAX_POSITIONS - N_NEW)
    ids, mask = random_ids(2, n_tokens, seed=1), left_padding(2, n_tokens)
    expected = native_logits(model, ids, mask)
    identity = IdentityMapper(geometry_shape(model.geometry))
    for hold_back in (1, 4):
        source = prefill(model, ids, mask)
        # another, short context is read in between: frequencies that depend on length must not stick
        prefill(model, random_ids(1, 5))
        handoff = transfer(source, identity, model, ids, mask, hold_back=hold_back, native_head=native_head)
        torch.testing.assert_close(handoff.logits, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family", LENGTH_DEPENDENT)
def test_a_prefix_of_a_short_context_is_turned_to_the_frequencies_of_the_whole(family: str) -> None:
    """Its hidden states stay those of the short context; all rotations of one cache are the same."""
    model = loaded(family)
    ids = random_ids(1, ORIGINAL_MAX + 9, seed=1)
    identity = IdentityMapper(geometry_shape(model.geometry))
    prefix = prefill(model, ids[:, :3])
    handoff = transfer(prefill(model, ids), identity, model, ids, native_head=5, native_prefix=prefix)
    assert handoff.n_native_head == 5
    assert not handoff.kv.mixed
    whole, short = handoff.kv.strip(), prefix.strip()
    for layer in range(2):
        torch.testing.assert_close(whole.keys[layer][:, :, :3], short.keys[layer], rtol=1e-5, atol=1e-5)
        assert torch.equal(whole.values[layer][:, :, :3], short.values[layer])


@pytest.mark.parametrize("rope", ["strip", "coupled"])
def test_identity_holds_for_every_strategy_that_rotates(rope: str) -> None:
    model = loaded("llama_llama3")
    ids, mask = random_ids(3, 18), left_padding(3, 18)
    identity = IdentityMapper(geometry_shape(model.geometry))
    handoff = transfer(prefill(model, ids, mask), identity, model, ids, mask, rope=rope)
    torch.testing.assert_close(handoff.logits, native_logits(model, ids, mask), rtol=0, atol=TOLERANCE)


def test_keys_left_unrotated_are_another_cache_unless_the_model_rotates_none() -> None:
    model = loaded("llama")
    ids = random_ids(1, 18)
    identity = IdentityMapper(geometry_shape(model.geometry))
    handoff = transfer(prefill(model, ids), identity, model, ids, rope="no_rerotate")
    assert float((handoff.logits - native_logits(model, ids, torch.ones_like(ids))).abs().max()) > 1e-2
    with pytest.raises(InvalidCache, match="cannot be stripped"):
        handoff.kv.strip()
    content = prefill(model, ids).strip()
    torch.testing.assert_close(handoff.kv.keys[0][:, :, 1:-1], content.keys[0][:, :, 1:-1])
