"""A route is judged as a hand-off of its own would be; a way round is two maps, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvmap.evaluation.relay import evaluate_relay
from kvmap.fit.features import geometry_shape
from kvmap.fit.view import cache_view
from kvmap.fleet import fold, judge, relayed
from kvmap.mappers import IdentityMapper
from kvmap.models.capture import prefill
from kvmap.models.pair import ModelPair
from kvmap.transfer import TransferOptions, transfer

PREFIX = 24
OPTIONS = TransferOptions()


@pytest.fixture(scope="module")
def caches(models, blocks):
    with torch.no_grad():
        return {name: prefill(model, blocks.input_ids) for name, model in models.items()}


def judged(models, tokenizer, blocks, caches, mapper, sources, target="c", options=OPTIONS):
    return judge(
        models[target],
        tokenizer,
        mapper,
        sources,
        caches[target],
        blocks.input_ids,
        prefix_tokens=PREFIX,
        options=options,
    )


@pytest.mark.parametrize(
    "options", [OPTIONS, TransferOptions(hold_back=3, native_head=0)], ids=["default", "other"]
)
def test_a_direct_route_is_the_first_hop_of_a_relay(
    models, tokenizer, blocks, caches, mappers, options
) -> None:
    there = mappers["b", "c"].to(dtype=torch.float32)
    back = mappers["c", "b"].to(dtype=torch.float32)
    wanted = evaluate_relay(
        ModelPair(models["b"], models["c"]),
        there,
        back,
        blocks,
        prefix_tokens=PREFIX,
        n_hops=1,
        options=options,
        batch_size=8,
    )
    got = judged(models, tokenizer, blocks, caches, there, {"direct": caches["b"]}, options=options)["direct"]
    for one, hop in zip(got, wanted, strict=True):
        assert (one.n_tokens, one.agreement) == (hop.n_tokens, hop.agreement)
        for name in ("nll", "nll_native", "nll_none", "kl", "key_r2", "value_r2"):
            # the relay prefills the prefix alone, the trace the whole text: float32 products in another order
            assert getattr(one, name) == pytest.approx(getattr(hop, name), rel=2e-4, abs=2e-5)


def test_the_target_itself_loses_nothing(models, tokenizer, blocks, caches) -> None:
    shape = geometry_shape(models["c"].geometry)
    found = judged(models, tokenizer, blocks, caches, IdentityMapper(shape, shape), {"own": caches["c"]})[
        "own"
    ]
    for one in found:
        assert one.kl == pytest.approx(0, abs=1e-6)
        assert one.agreement == one.n_tokens
        assert one.nll == pytest.approx(one.nll_native, rel=1e-5)
        assert (one.key_r2, one.value_r2) == pytest.approx((1, 1), abs=1e-6)


@pytest.mark.parametrize("rope", ["strip", "coupled"])
def test_a_way_round_is_the_second_map_of_what_the_first_made(models, blocks, caches, mappers, rope) -> None:
    """Against the definition: both maps applied to the view of the strategy, then the hand-off of one map."""
    first, second = mappers["a", "b"], mappers["b", "c"]
    middle = relayed(caches["a"], first, caches["b"], rope)
    assert not middle.exact
    assert middle.owner is None
    assert middle.stripped is (rope == "strip")
    ids = blocks.input_ids
    got = transfer(middle, second, models["c"], ids, rope=rope)
    wanted = transfer(caches["a"], fold(first, second), models["c"], ids, rope=rope)
    torch.testing.assert_close(got.logits, wanted.logits, rtol=1e-4, atol=1e-4)
    content = second.map(first.map(cache_view(caches["a"], rope)))
    again = second.map(cache_view(middle, rope))
    assert all(torch.allclose(x, y) for x, y in zip(content.keys, again.keys, strict=True))


def test_a_way_round_and_its_folded_map_are_judged_alike(models, tokenizer, blocks, caches, mappers) -> None:
    first, second = mappers["a", "b"], mappers["b", "c"]
    sources = {"relay": relayed(caches["a"], first, caches["b"])}
    relay = judged(models, tokenizer, blocks, caches, second, sources)["relay"]
    folded = judged(models, tokenizer, blocks, caches, fold(first, second), {"folded": caches["a"]})["folded"]
    for one, other in zip(relay, folded, strict=True):
        assert one.kl == pytest.approx(other.kl, rel=1e-3, abs=1e-5)
        assert one.key_r2 == pytest.approx(other.key_r2, abs=1e-5)


def test_routes_are_judged_alone_as_together(models, tokenizer, blocks, caches, mappers) -> None:
    second = mappers["b", "c"]
    sources = {"direct": caches["b"], "relay": relayed(caches["a"], mappers["a", "b"], caches["b"])}
    together = judged(models, tokenizer, blocks, caches, second, sources)
    for name, kv in sources.items():
        assert together[name] == judged(models, tokenizer, blocks, caches, second, {name: kv})[name]


def test_a_cache_of_other_columns_is_refused(models, tokenizer, blocks, caches, mappers) -> None:
    short = replace(caches["b"].slice_tokens(0, PREFIX - 4))
    with pytest.raises(Exception, match="column"):
        judged(models, tokenizer, blocks, caches, mappers["b", "c"], {"direct": short})
