from __future__ import annotations

import dataclasses

import pytest
import torch

from kvmap.errors import KvmapError
from kvmap.evaluation import arms as room
from kvmap.evaluation.arms import SourcePart, SpilledPart, batches_of, without_context
from kvmap.evaluation.limits import context_limit
from kvmap.models.capture import prefill
from kvmap.models.pair import LoadedModel, ModelPair
from kvmap.transfer import TransferOptions
from tests.tiny_random_models import WINDOW, build

CONTEXTS = [[1, 5], [1, 6, 7, 8], [1, 9, 10], [1]]


def test_batches_hold_each_context_once_the_longest_first():
    batches = batches_of(CONTEXTS, batch_size=3, pad_id=0)
    assert [batch.index for batch in batches] == [(1, 2, 0), (3,)]
    for batch in batches:
        assert batch.rows() == [CONTEXTS[row] for row in batch.index]
    with pytest.raises(KvmapError, match="batch_size=0"):
        batches_of(CONTEXTS, batch_size=0, pad_id=0)


@pytest.mark.parametrize(
    ("hold_back", "left"), [(1, [[1, 5], [1, 8], [1, 10], [1]]), (2, [[1, 5], [1, 7, 8], [1, 9, 10], [1]])]
)
def test_without_context_leaves_the_held_back_tokens_after_one_bos(tokenizer, hold_back, left):
    [batch] = batches_of(CONTEXTS, batch_size=4, pad_id=0)
    rows = without_context(batch, tokenizer, hold_back).rows()
    assert rows == [left[row] for row in batch.index]


def test_numbers_clamped_on_the_way_are_reported(monkeypatch, caplog, pair, arms):
    [batch] = batches_of([[1, 5, 6, 7]], batch_size=1, pad_id=0)
    real = room.transfer
    monkeypatch.setattr(room, "transfer", lambda *a, **k: dataclasses.replace(real(*a, **k), n_clamped=3))
    cache = prefill(pair.source, batch.input_ids)
    mapped = {"mapped": arms["mapped"]}
    list(room.target_hand_offs(pair.target, pair.tokenizer, batch, mapped, cache, TransferOptions()))
    assert "arm mapped: 3 mapped numbers did not fit torch.float32" in caplog.text


@pytest.mark.parametrize("stripped", [False, True])
def test_a_spilled_part_comes_back_as_it_was_and_leaves_no_file(pair, tmp_path, stripped):
    cache = prefill(pair.source, torch.tensor([[0, 1, 5], [1, 6, 7]]), torch.tensor([[0, 1, 1], [1, 1, 1]]))
    cache = cache.strip() if stripped else cache
    stream = [{"top": torch.tensor([[1, 2]])}, {"top": torch.tensor([[3]])}]
    spilled = SpilledPart.write(SourcePart(cache, stream), tmp_path / "0")
    part = spilled.read()
    assert [chunk["top"].tolist() for chunk in part.stream] == [[[1, 2]], [[3]]]
    assert part.cache is not None
    assert part.cache.owner == cache.owner
    assert part.cache.stripped is stripped
    for name in ("keys", "values"):
        assert all(
            torch.equal(a, b) for a, b in zip(getattr(part.cache, name), getattr(cache, name), strict=True)
        )
    assert torch.equal(part.cache.mask, cache.mask)
    assert not list((tmp_path / "0").iterdir())


def test_the_limit_is_the_fewer_positions_whatever_the_windows():
    llama = LoadedModel.from_model(build("llama", max_position_embeddings=200))
    sliding = LoadedModel.from_model(build("mistral_sliding", max_position_embeddings=300))
    assert context_limit(ModelPair(llama, llama)) == 200
    assert context_limit(ModelPair(llama, sliding)) == 200
    assert context_limit(ModelPair(sliding, sliding)) == 300 > WINDOW
