"""The streaming pass: what must be perfect, what must not change a number, and what is refused."""

from __future__ import annotations

import math
import tempfile

import pytest
import torch

from kvmap.diagnostics import source_reads
from kvmap.diagnostics import streaming as room
from kvmap.diagnostics.findings import text_metrics, text_tables
from kvmap.diagnostics.texts import Text
from kvmap.errors import KvmapError
from kvmap.mappers import FittedFor, MapperMismatch
from kvmap.models.pair import LoadedModel, ModelPair
from kvmap.transfer import TransferOptions
from tests.diagnostics.plain_loops import (
    CONTEXTS,
    DEFAULT,
    KINDS_OF_TOKENS,
    QUESTIONS,
    ROWS,
    SEQUENCES,
    diagnosed,
    identity,
    mixed,
    pair_of,
    self_pair,
)
from tests.tiny_random_models import FAMILIES, random_ids


def everything(pair, mapper, texts=(QUESTIONS, SEQUENCES), options=DEFAULT, **settings):
    """All numbers by table, text and place, and all metrics."""
    found = diagnosed(pair, mapper, texts, options, **settings)
    tables = text_tables(found.values())
    named = {
        (table, *(str(value) for value in row.values() if not isinstance(value, float)), column): value
        for table, rows in tables.items()
        for row in rows
        for column, value in row.items()
        if isinstance(value, float)
    }
    for sums in found.values():
        named |= {name: metric.value for name, metric in text_metrics(sums, tables).items()}
    return named


def assert_same(found, expected, **close):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, **close, nan_ok=True), name


@pytest.fixture(scope="module")
def pair():
    return pair_of("llama_yarn", "llama")


@pytest.mark.parametrize(
    "name", ["llama", "gemma2", "phi3_longrope", "gpt_neox", "ministral3", "cohere2", "granite", "qwen3_moe"]
)
def test_the_identity_of_a_model_with_itself_is_perfect(name):
    both = self_pair(name)
    found = diagnosed(both, identity(both), options=TransferOptions(native_head=0))
    for text, sums in found.items():
        metrics = {key.split("/")[-1]: metric.value for key, metric in text_metrics(sums).items()}
        # float32 keys stripped and rotated again
        assert metrics["attention_cosine"] == pytest.approx(1.0, abs=1e-6)
        assert metrics["sink_mass_mapped"] == pytest.approx(metrics["sink_mass"], abs=1e-6)
        for kind in ("key", "value"):
            assert metrics[f"r2_{kind}"] == pytest.approx(1.0, abs=1e-9)
        assert metrics["kl_nats"] == pytest.approx(0.0, abs=1e-6)
        assert metrics["top1_agreement"] == 1.0
        assert metrics["concentration_value"] == 1.0, "values are copied: no error, concentration 1"
        assert math.isfinite(metrics["concentration_key"])
        assert f"diagnose/{text}/mapped/effective_rank_value" not in text_metrics(sums), "no error, no rank"


@pytest.mark.parametrize("name", ["llama_dynamic", "phi3_longrope"])
def test_frequencies_that_depend_on_the_length_do_not_part_the_identity(name):
    """Native predictions are read in two steps, as the mapped ones are, where one step rotates otherwise."""
    both = self_pair(name)
    text = Text.of_sequences("evaluation", random_ids(2, 50, seed=3))
    options = TransferOptions(native_head=1, hold_back=2)
    (sums,) = diagnosed(both, identity(both), [text], options).values()
    metrics = text_metrics(sums)
    assert metrics["diagnose/evaluation/mapped/attention_cosine"].value == pytest.approx(1.0, abs=1e-6)
    # the half is shorter than the pretrained length, and the whole longer
    assert metrics["diagnose/evaluation/mapped/kl_nats"].value == pytest.approx(0.0, abs=1e-6)
    assert metrics["diagnose/evaluation/mapped/top1_agreement"].value == 1.0


def test_of_second_halves_only_the_beginning_is_predicted_where_that_is_asked(pair):
    mapper, ids = mixed(pair), random_ids(2, 30, seed=4)
    (whole,) = diagnosed(pair, mapper, [Text.of_sequences("evaluation", ids)]).values()
    (some,) = diagnosed(pair, mapper, [Text.of_sequences("evaluation", ids, 5)]).values()
    assert some.predicted[0].kl.shape == (2, 5)
    torch.testing.assert_close(some.predicted[0].kl, whole.predicted[0].kl[:, :5], atol=1e-6, rtol=1e-4)
    with pytest.raises(KvmapError, match="n_predicted=0"):
        diagnosed(pair, mapper, [Text.of_sequences("evaluation", ids, 0)])


def test_native_layers_are_exact_and_are_not_counted_as_mapped(pair):
    mapper = mixed(pair, native_layers=1)
    found = diagnosed(pair, mapper)
    tables = text_tables(found.values())
    for row in tables["attention_output"]:
        exact = row["cosine"] == pytest.approx(1.0, abs=1e-6)
        assert exact == (row["layer"] == 0)
        if row["layer"] == 0:
            assert (row["concentration_key"], row["concentration_value"]) == (1.0, 1.0)
    for table in ("r2", "errors_by_token", "errors_by_position", "spectrum", "spectrum_summary"):
        assert {row["layer"] for row in tables[table]} == {1}
    metrics = text_metrics(found["questions"])
    heads = pair.target.geometry.n_heads
    assert metrics["diagnose/questions/mapped/attention_cosine"].n == 2 * heads
    assert metrics["diagnose/questions/mapped/concentration_key"].n == heads
    assert metrics["diagnose/questions/mapped/r2_key"].n == 2


def test_where_the_target_computes_all_layers_there_is_nothing_to_say_of_a_map(pair):
    found = diagnosed(pair, mixed(pair, native_layers=2))
    tables = text_tables(found.values())
    assert {name for name, rows in tables.items() if rows} == {"attention_output"}
    assert {row["concentration_key"] for row in tables["attention_output"]} == {1.0}
    names = {name.split("/")[-1] for sums in found.values() for name in text_metrics(sums)}
    assert names == {"attention_cosine", "sink_mass", "sink_mass_mapped"}


@pytest.mark.parametrize("rope", ["strip", "no_rerotate"])
def test_the_cache_that_is_judged_is_the_one_that_recompute_leaves(pair, rope):
    options = TransferOptions(recompute_share=1.0, rope=rope)
    both = everything(pair, mixed(pair), options=options)
    for text in ("questions", "evaluation"):
        # all is recomputed: nothing mapped is left, in the same arithmetic but for the batch's shape
        assert both[f"diagnose/{text}/mapped/attention_cosine"] == pytest.approx(1.0, abs=1e-5)
        assert both[f"diagnose/{text}/mapped/r2_key"] == pytest.approx(1.0, abs=1e-6)
        assert both[f"diagnose/{text}/mapped/kl_nats"] == pytest.approx(0.0, abs=1e-5)


def test_recomputed_keys_carry_a_rotation_that_mapped_ones_lack():
    """Under "no_rerotate" keys are exact as the identity maps them, and as they are recomputed."""
    both = self_pair("llama")
    options = TransferOptions(recompute_share=0.3, recompute_rule="random", rope="no_rerotate")
    found = everything(both, identity(both), options=options)
    # recomputed over keys that were left unrotated, so their own are not exact but in the first layer
    first = [value for name, value in found.items() if name[:3] == ("r2", "0", "0") and "key" in name]
    assert len(first) == 2
    assert first == pytest.approx([1.0, 1.0], abs=1e-9)


@pytest.mark.parametrize(("batch_size", "query_block"), [(1, 128), (3, 1), (2, 4)])
def test_batches_blocks_and_padding_change_nothing(pair, batch_size, query_block):
    expected = everything(pair, mixed(pair))
    found = everything(pair, mixed(pair), batch_size=batch_size, query_block=query_block)
    assert_same(found, expected, rel=1e-4, abs=1e-5)


def test_eager_and_sdpa_agree():
    expected = everything(
        *(lambda p: (p, mixed(p)))(pair_of("llama_yarn", "llama", attn_implementation="eager"))
    )
    found = everything(*(lambda p: (p, mixed(p)))(pair_of("llama_yarn", "llama", attn_implementation="sdpa")))
    assert_same(found, expected, rel=1e-4, abs=1e-5)


def test_texts_are_told_apart(pair):
    together = everything(pair, mixed(pair))
    apart = everything(pair, mixed(pair), [QUESTIONS]) | everything(pair, mixed(pair), [SEQUENCES])
    assert_same(together, apart, rel=1e-6, abs=1e-9)


def test_a_context_of_which_nothing_is_mapped_counts_nowhere(pair):
    text = Text.of_contexts("questions", [*CONTEXTS, ROWS[0][:2]])
    assert_same(
        everything(pair, mixed(pair), [text]), everything(pair, mixed(pair), [QUESTIONS]), rel=1e-4, abs=1e-5
    )


def test_halves_too_short_to_map_give_no_predictions(pair):
    text = Text.of_sequences("evaluation", torch.tensor(ROWS)[:, :5])
    (sums,) = diagnosed(pair, mixed(pair), [text]).values()
    assert sums.predicted == []
    assert text_tables([sums])["next_token"] == []
    assert "diagnose/evaluation/mapped/kl_nats" not in text_metrics(sums)


def test_one_model_at_a_time_is_released_before_the_other_reads(monkeypatch, pair, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    expected = everything(pair, mixed(pair), batch_size=2)
    events = []
    monkeypatch.setattr(pair, "release", lambda side: events.append(f"release {side}"))
    for place, name in ((source_reads, "prefill"), (room, "read_queries")):
        actual = getattr(place, name)
        monkeypatch.setattr(
            place,
            name,
            lambda model, *given, a=actual: events.append(model.identity.name) or a(model, *given),
        )
    found = everything(pair, mixed(pair), batch_size=2, sequential=True)
    assert found == expected
    assert events == ["release target", *["source"] * 4, "release source", *["target"] * 4]
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_read_is_refused(pair):
    mapper = mixed(pair)
    with pytest.raises(KvmapError, match="one or more, of different names"):
        diagnosed(pair, mapper, [QUESTIONS, QUESTIONS])
    with pytest.raises(KvmapError, match="one or more, of different names"):
        diagnosed(pair, mapper, [])
    with pytest.raises(KvmapError, match="query_block=0"):
        diagnosed(pair, mapper, query_block=0)
    with pytest.raises(KvmapError, match="contexts of 2 tokens leave nothing to map"):
        diagnosed(pair, mapper, [Text.of_contexts("questions", [[3, 4]])])
    fitted = mixed(pair)
    fitted.fitted_for = FittedFor(pair.source_identity, pair.target_identity, "coupled")
    with pytest.raises(MapperMismatch, match="rope: 'coupled'"):
        diagnosed(pair, fitted)


def test_a_target_in_bfloat16_is_judged_in_float32():
    model = LoadedModel.from_model(FAMILIES["llama"]().to(torch.bfloat16))
    both = ModelPair(model, model)
    found = everything(both, identity(both), options=TransferOptions(native_head=0))
    # keys are stripped in float32 and rounded again: at most 2⁻⁸ off
    assert found["diagnose/evaluation/mapped/attention_cosine"] == pytest.approx(1.0, abs=1e-4)
    assert found["diagnose/evaluation/mapped/r2_value"] == 1.0


@pytest.mark.parametrize("sequential", [False, True])
def test_mappers_that_share_a_pass_are_each_judged_as_if_alone(sequential):
    pair = pair_of("llama_yarn", "llama")
    mappers = {"all": mixed(pair), "above the first": mixed(pair, native_layers=1)}
    together = room.diagnose_mappers(
        pair, mappers, [QUESTIONS, SEQUENCES], KINDS_OF_TOKENS, DEFAULT, batch_size=2, sequential=sequential
    )
    for name, mapper in mappers.items():
        alone = diagnosed(pair, mapper, batch_size=2)
        for text, sums in alone.items():
            assert text_metrics(together[name][text]) == text_metrics(sums)
