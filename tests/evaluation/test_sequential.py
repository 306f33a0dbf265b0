"""One model in memory at a time gives the numbers of both at once."""

from __future__ import annotations

import pytest

from kvmap.evaluation.choices import evaluate_items
from kvmap.evaluation.perplexity import evaluate_perplexity
from kvmap.models.pair import ModelPair, ModelSpec
from kvmap.transfer import TransferOptions
from tests.evaluation.test_choices import quiet


@pytest.fixture(scope="module")
def specs(models, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, model in models.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return [ModelSpec(id=str(folder / name), device="cpu") for name in ("source", "target")]


class WatchedPair(ModelPair):
    """Fails where both models are in memory."""

    def _load(self, side):
        model = super()._load(side)
        assert len(self._loaded) == 1, "source and target are in memory together"
        return model


@pytest.mark.parametrize("rope", ["strip", pytest.param("coupled", marks=pytest.mark.slow)])
def test_items_score_the_same(specs, arms, items, rope):
    settings = {
        "options": TransferOptions(rope=rope),
        "batch_size": 2,
        "max_new_tokens": 3,
        "progress": quiet,
    }
    together = evaluate_items(ModelPair(*specs), arms, items, **settings)
    assert evaluate_items(WatchedPair(*specs), arms, items, sequential=True, **settings) == together


@pytest.mark.slow
def test_perplexity_is_the_same(specs, arms, blocks):
    settings = {"prefix_tokens": 20, "options": TransferOptions(), "batch_size": 2, "progress": quiet}
    together = evaluate_perplexity(ModelPair(*specs), arms, blocks, **settings)
    assert evaluate_perplexity(WatchedPair(*specs), arms, blocks, sequential=True, **settings) == together


@pytest.mark.slow
def test_where_the_disk_is_too_small_only_the_sources_kl_is_given_up(specs, arms, blocks):
    settings = {"prefix_tokens": 20, "options": TransferOptions(), "batch_size": 2, "progress": quiet}
    together = evaluate_perplexity(ModelPair(*specs), arms, blocks, **settings)
    found = evaluate_perplexity(
        ModelPair(*specs), arms, blocks, sequential=True, max_spill_bytes=1000, **settings
    )
    assert all(kl != kl for kl in found["source"].kl)
    assert found["source"].agreement == together["source"].agreement
    assert found["source"].nll == together["source"].nll
    assert found["mapped"] == together["mapped"]


@pytest.mark.slow
def test_a_target_already_in_memory_makes_room_for_the_source(specs, arms, items):
    pair = WatchedPair(*specs)
    assert pair.target is not None
    evaluate_items(
        pair, arms, items[:1], options=TransferOptions(), sequential=True, generate=False, progress=quiet
    )


def test_without_an_arm_that_needs_it_the_source_is_never_loaded(specs, items):
    pair = ModelPair(*specs)
    evaluate_items(
        pair, {"target": None, "no_context": None}, items[:1], options=TransferOptions(), progress=quiet
    )
    assert set(pair._loaded) == {"target"}
