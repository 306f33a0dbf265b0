"""Own keys, or own values, in place of the mapped ones: which of the two a hand-off loses by."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch

from kvmap.errors import UnknownName
from kvmap.models.cache import cache_argument, to_transformers
from kvmap.models.capture import prefill
from kvmap.transfer import TransferOptions, native, transfer
from tests.tiny_random_models import left_padding, random_ids
from tests.transfer.noisy_map import NoisyMap, source_model, target_model

# float32 logits, of the same cache run with another mask type
SAME = {"rtol": 0, "atol": 1e-5}


@pytest.fixture(scope="module")
def parts():
    source, target = source_model(), target_model()
    ids, mask = random_ids(2, 24), left_padding(2, 24)
    return prefill(source, ids, mask), NoisyMap(target, scale=0.3), target, ids, mask


def own(parts, kind, **options):
    kv, mapper, target, ids, mask = parts
    return transfer(kv, mapper, target, ids, mask, own_kind=kind, **asdict(TransferOptions(**options)))


@pytest.mark.parametrize("rope", ["strip", "no_rerotate"])
@pytest.mark.parametrize("kind", ["key", "value"])
def test_one_kind_is_the_targets_own_and_the_other_as_it_was_mapped(parts, kind, rope):
    kv, mapper, target, ids, mask = parts
    plain = transfer(kv, mapper, target, ids, mask, rope=rope).kv
    native_kv = prefill(target, ids, mask)
    found = own(parts, kind, rope=rope).kv
    real = mask[:, None, :-1, None].bool().expand_as(plain.keys[0][:, :, :-1])
    for layer in range(len(found.keys)):
        keys = (native_kv if kind == "key" else plain).keys[layer]
        values = (plain if kind == "key" else native_kv).values[layer]
        assert torch.equal(found.keys[layer][:, :, :-1][real], keys[:, :, :-1][real])
        assert torch.equal(found.values[layer][:, :, :-1][real], values[:, :, :-1][real])
    assert not found.exact
    assert found.mixed == (rope == "no_rerotate" and kind == "value")


def test_the_logits_are_those_of_the_last_token_on_that_cache(parts):
    _, _, target, ids, mask = parts
    handed = own(parts, "key")
    cut = handed.kv.slice_tokens(0, ids.shape[1] - 1)
    last = {
        "input_ids": ids[:, -1:],
        "attention_mask": mask,
        "position_ids": mask.sum(-1, keepdim=True) - 1,
    }
    out = target.model(**last, **{cache_argument(target.model): to_transformers(cut)})
    torch.testing.assert_close(handed.logits, out.logits[:, -1].float(), **SAME)


def test_both_kinds_differ_from_the_map_and_from_the_target(parts):
    kv, mapper, target, ids, mask = parts
    plain = transfer(kv, mapper, target, ids, mask).logits
    ceiling = native(target, ids, mask).logits
    for kind in ("key", "value"):
        found = own(parts, kind).logits
        assert (found - plain).abs().max() > 1e-3
        assert (found - ceiling).abs().max() > 1e-3


def test_another_kind_is_refused(parts):
    with pytest.raises(UnknownName, match="own_kind"):
        own(parts, "query")
