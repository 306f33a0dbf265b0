from __future__ import annotations

import math

import pytest
import torch

from kvmap.errors import KvmapError
from kvmap.evaluation.answers import Answers
from kvmap.evaluation.perplexity import evaluate_perplexity
from kvmap.evaluation.relay import HopResult, cache_r2, evaluate_relay, holder_of
from kvmap.evaluation.relay_summary import summarise_relay
from kvmap.fit.calibrate import CalibrationOptions, accumulate_moments, live_stream
from kvmap.fit.features import Layout, Recipe, both, geometry_shape
from kvmap.fit.linear import Penalty, fit_linear
from kvmap.fit.pair_moments import full_tables
from kvmap.mappers import LinearMapper, RawMapper
from kvmap.models.cache import cache_argument
from kvmap.models.capture import prefill
from kvmap.models.pair import ModelPair
from kvmap.transfer import TransferOptions, native, transfer

OPTIONS = TransferOptions()
PREFIX = 32


def quiet(iterable, total=None, description=""):
    return iterable


def relay(pair, there, back, blocks, n_hops=3, options=OPTIONS, **more):
    return evaluate_relay(
        pair,
        there,
        back,
        blocks,
        prefix_tokens=PREFIX,
        n_hops=n_hops,
        options=options,
        progress=quiet,
        **more,
    )


@pytest.fixture(scope="module")
def there(arms):
    return arms["mapped"]


@pytest.fixture(scope="module")
def back(pair, blocks, tmp_path_factory):
    """A mapper of the other direction, fitted on what is at hand."""
    reverse = ModelPair(pair.target, pair.source)
    layout = Layout(geometry_shape(pair.target_geometry), geometry_shape(pair.source_geometry))
    stream = live_stream(
        reverse,
        blocks.input_ids,
        {"fit": [0, 1, 2, 3], "held_out": [4]},
        batch_size=5,
        sequential=False,
        spill_folder=tmp_path_factory.mktemp("spill"),
    )
    moments = accumulate_moments(stream, layout, full_tables(layout), CalibrationOptions())
    recipe = Recipe(layout.source_shape, layout.target_shape, "full_head", both(((0, 1, 2),) * 2))
    return LinearMapper(fit_linear(moments, recipe, Penalty(1.0)))


@pytest.fixture(scope="module")
def results(pair, there, back, blocks):
    return relay(pair, there, back, blocks, batch_size=3)


@pytest.mark.parametrize("rope", ["strip", "coupled"])
def test_four_identity_hops_change_nothing(identity_pair, identity_arms, blocks, rope):
    identity = identity_arms["mapped"]
    options = TransferOptions(rope=rope)
    found = relay(identity_pair, identity, identity, blocks, n_hops=4, options=options)
    assert len(found) == 4 * blocks.n_sequences
    for hop in found:
        # float32: a strip and a rotation a hop
        assert hop.nll == pytest.approx(hop.nll_native, abs=1e-4)
        assert hop.kl == pytest.approx(0, abs=1e-5)
        assert hop.agreement == hop.n_tokens
        assert hop.key_r2 == pytest.approx(1, abs=1e-9)
        assert hop.value_r2 == pytest.approx(1, abs=1e-9)


def test_the_first_hop_is_the_mapped_arm_of_perplexity(pair, arms, there, blocks, results):
    wanted = {"target": None, "mapped": there, "no_context": None}
    scored = evaluate_perplexity(
        pair, wanted, blocks, prefix_tokens=PREFIX, options=OPTIONS, batch_size=3, progress=quiet
    )
    first = [hop for hop in results if hop.hop == 1]
    for name, arm in (("nll", "mapped"), ("nll_native", "target"), ("nll_none", "no_context")):
        assert [getattr(hop, name) for hop in first] == pytest.approx(scored[arm].nll, rel=1e-6)
    assert [hop.kl for hop in first] == pytest.approx(scored["mapped"].kl, rel=1e-6)
    assert [hop.agreement for hop in first] == list(scored["mapped"].agreement)
    assert {hop.holder for hop in first} == {"target"}


def plain_nll(loaded, kv, continuation):
    """Of the continuation after its first token, in one forward of transformers' own model and cache."""
    from transformers.cache_utils import DynamicCache

    cache = DynamicCache(list(zip(kv.keys, kv.values, strict=True)))
    positions = torch.arange(kv.n_tokens, kv.n_tokens + continuation.shape[1])[None]
    out = loaded.model(
        input_ids=continuation,
        position_ids=positions,
        use_cache=True,
        **{cache_argument(loaded.model): cache},
    )
    log_probs = out.logits[0, :-1].double().log_softmax(-1)
    return -float(log_probs.gather(-1, continuation[0, 1:, None]).sum())


def test_every_hop_is_a_transfer_of_what_was_held_before(pair, there, back, blocks, results):
    ids = blocks.input_ids[1:2, :PREFIX]
    kv = prefill(pair.source, ids)
    for number, (mapper, holder) in enumerate(
        [(there, pair.target), (back, pair.source), (there, pair.target)], start=1
    ):
        kv = transfer(kv, mapper, holder, ids).kv
        assert not kv.exact
        found = next(hop for hop in results if (hop.sequence, hop.hop) == (1, number))
        expected = plain_nll(holder, kv, blocks.input_ids[1:2, PREFIX:])
        assert found.nll == pytest.approx(expected, rel=1e-5)
        assert found.holder == holder_of(number) == ("target" if holder is pair.target else "source")
        own = native(holder, ids).kv
        for kind, value in (("keys", found.key_r2), ("values", found.value_r2)):
            assert value == pytest.approx(plain_r2(kv, own, kind, range(1, PREFIX - 1)), rel=1e-4)
        # the first and the last token are the holder's own
        for mine, theirs in zip(kv.keys, own.keys, strict=True):
            torch.testing.assert_close(mine[:, :, 0], theirs[:, :, 0], atol=1e-5, rtol=1e-5)


def plain_r2(relayed, own, kind, columns, first_layer=0):
    """Head by head, in loops."""
    scores = []
    layers = zip(getattr(relayed.strip(), kind), getattr(own.strip(), kind), strict=True)
    for mine, theirs in list(layers)[first_layer:]:
        for head in range(mine.shape[1]):
            x = theirs[0, head, list(columns)].double().numpy()
            error = mine[0, head, list(columns)].double().numpy() - x
            scores.append(1 - (error**2).sum() / ((x - x.mean(0)) ** 2).sum())
    return sum(scores) / len(scores)


def test_the_error_of_a_fitted_map_shows(results):
    assert all(hop.kl > 1e-3 and hop.key_r2 < 0.999 for hop in results)
    assert len({hop.nll for hop in results}) == len(results)


def test_sequences_do_not_depend_on_their_batch(pair, there, back, blocks, results):
    alone = relay(pair, there, back, blocks, batch_size=1)
    for mine, theirs in zip(alone, results, strict=True):
        assert (mine.sequence, mine.hop, mine.agreement) == (theirs.sequence, theirs.hop, theirs.agreement)
        # float32, batches of other sizes
        assert mine.nll == pytest.approx(theirs.nll, rel=1e-5)
        assert mine.kl == pytest.approx(theirs.kl, rel=1e-4)


def test_an_interrupted_relay_goes_on_where_it_was(pair, there, back, blocks, results, tmp_path):
    def interrupt(found):
        raise KeyboardInterrupt

    def book():
        return Answers.open(tmp_path, {"relay": 1})

    with pytest.raises(KeyboardInterrupt):
        relay(pair, there, back, blocks, batch_size=3, answers=book(), on_batch=interrupt)
    second, heard = book(), []
    found = relay(pair, there, back, blocks, batch_size=3, answers=second, on_batch=heard.append)
    assert second.n_reused == 3
    assert {hop.sequence for batch in heard for hop in batch} == {3, 4}
    assert found == results
    third = book()
    relay(pair, there, back, blocks, n_hops=2, answers=third)
    assert third.n_reused == 0


def test_native_layers_do_not_count(pair, blocks):
    shapes = geometry_shape(pair.source_geometry), geometry_shape(pair.target_geometry)
    there, back = RawMapper(*shapes, 1), RawMapper(*reversed(shapes), 1)
    found = relay(pair, there, back, blocks, n_hops=1)[0]
    ids = blocks.input_ids[:1, :PREFIX]
    handed = transfer(prefill(pair.source, ids), there, pair.target, ids).kv
    own = native(pair.target, ids).kv
    columns = range(1, PREFIX - 1)
    assert found.key_r2 == pytest.approx(plain_r2(handed, own, "keys", columns, first_layer=1), rel=1e-4)
    assert found.key_r2 < plain_r2(handed, own, "keys", columns)


def test_a_cache_has_all_of_itself_and_little_of_another(pair, blocks):
    own, other = (prefill(pair.target, blocks.input_ids[rows, :PREFIX]) for rows in ([0, 1], [2, 3]))
    columns = torch.ones_like(own.mask)
    assert all(torch.all(layers == 1) for layers in cache_r2(own, own, columns).values())
    found = cache_r2(other, own, columns)
    assert found["key"].shape == (2, pair.target_geometry.n_layers)
    assert bool((found["value"] < 0.5).all())


@pytest.mark.parametrize(
    ("options", "n_hops", "message"),
    [
        (TransferOptions(rope="no_rerotate"), 2, "no_rerotate"),
        (OPTIONS, 0, "n_hops=0"),
        (TransferOptions(native_head=30), 2, "leave 1 columns to map"),
    ],
)
def test_what_cannot_be_handed_on_is_refused(pair, there, back, blocks, options, n_hops, message):
    with pytest.raises(KvmapError, match=message):
        relay(pair, there, back, blocks, n_hops=n_hops, options=options)


def test_a_prefix_that_leaves_nothing_to_score_is_refused(pair, there, back, blocks):
    with pytest.raises(KvmapError, match=r"prefix_tokens=47.*two of continuation"):
        evaluate_relay(pair, there, back, blocks, prefix_tokens=47, n_hops=2, options=OPTIONS)


def hop(number, sequence, kl, nll=12.0):
    return HopResult(sequence, number, holder_of(number), 10, nll, 10.0, 20.0, kl, 9, 0.8, 0.6, "")


def test_the_summary_is_per_token_and_compares_with_the_holder_s_first_hop():
    made = [hop(n, s, kl=n * (1.0 + s), nll=10.0 + n) for s in range(4) for n in (1, 2, 3, 4)]
    metrics, rows, table = summarise_relay(made)
    assert metrics["evaluate/relay_3/mapped/kl_nats"].value == pytest.approx(3 * 2.5 / 10)
    assert metrics["evaluate/relay_3/mapped/kl_over_first"].value == pytest.approx(3.0)  # over hop 1
    assert metrics["evaluate/relay_4/mapped/kl_over_first"].value == pytest.approx(2.0)  # over hop 2
    assert metrics["evaluate/relay_1/mapped/kl_over_first"].value == 1.0
    assert metrics["evaluate/relay_2/mapped/context_carried"].value == pytest.approx(0.8)
    assert metrics["evaluate/relay_2/mapped/top1_agreement"].value == pytest.approx(0.9)
    assert [(line["hop"], line["holder"], line["n"]) for line in table] == [
        (1, "target", 4),
        (2, "source", 4),
        (3, "target", 4),
        (4, "source", 4),
    ]
    assert table[0]["nll_nats"] == pytest.approx(1.1)
    assert len(rows) == 4 * 7
    assert not any(math.isnan(row["value"]) for row in rows)
