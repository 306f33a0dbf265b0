"""Stage `diagnose` on the shipped family: which tables and metrics come of which texts."""

from __future__ import annotations

import pytest

from kvmap.config.schema import DIAGNOSTIC_TEXTS
from kvmap.diagnostics.texts import TEXTS
from tests.stages.conftest import Runner

STREAMED = {
    "attention_output",
    "errors_by_token",
    "errors_by_position",
    "spectrum",
    "spectrum_summary",
    "next_token",
}
COLUMNS = {
    "attention_output": "text layer head kv_head cosine concentration_key concentration_value sink_mass "
    "sink_mass_mapped n",
    "r2": "layer head kind split r2",
    "errors_by_token": "text token_kind layer key_error value_error cosine n",
    "errors_by_position": "text low high layer key_error value_error cosine n",
    "spectrum": "text kind layer head component error_share target_share",
    "spectrum_summary": "text kind layer head effective_rank effective_rank_target share_top8 "
    "share_top8_target",
    "next_token": "text low high token_kind kl_nats top1_agreement n",
    "probes": "source_layer target_layer kind r2",
}
METRICS = {
    "r2_key",
    "r2_value",
    "attention_cosine",
    "concentration_key",
    "concentration_value",
    "sink_mass",
    "sink_mass_mapped",
    "kl_nats",
    "top1_agreement",
    "error_key_rest",
    "error_value_rest",
    "effective_rank_key",
    "effective_rank_value",
}
ALL = "stages=[diagnose] diagnostics.texts=[held_out,evaluation,questions] diagnostics.n_sequences=2"


def test_the_texts_that_may_be_named_are_those_that_there_are():
    assert DIAGNOSTIC_TEXTS == TEXTS


def test_every_text_has_every_table_and_metric(run: Runner):
    done = run(ALL)
    for table, columns in COLUMNS.items():
        rows = done.table(table)
        assert list(rows[0]) == columns.split(), table
        if table in STREAMED:
            assert {row["text"] for row in rows} == set(TEXTS)
    metrics = done.json("metrics")
    for text in TEXTS:
        found = {name.split("/")[-1] for name in metrics if name.startswith(f"diagnose/{text}/mapped/")}
        assert found >= METRICS
    read = done.json("run")["facts"]["diagnostics"]
    assert read == {"read": {"held_out": 2, "evaluation": 2, "questions": 2}, "left_out": {}}


def test_the_r2_of_a_split_is_that_of_all_its_rows(run: Runner):
    done, streamed = run(ALL), run(f"{ALL} diagnostics.splits=[fit]")
    splits = [row["split"] for row in done.table("r2")]
    assert set(splits) == {"fit", "held_out", "evaluation", "questions"}
    assert splits.count("held_out") == splits.count("fit")
    # two of the three held-out sequences, where no moments were asked of them
    key = "diagnose/held_out/mapped/r2_key"
    assert done.metric(key) == pytest.approx(streamed.metric(key), abs=0.2)
    assert done.metric(key) != streamed.metric(key)


def test_what_the_run_does_not_have_is_left_out_and_noted(run: Runner):
    done = run("stages=[diagnose] evaluation.perplexity.n_sequences=0")
    assert {row["text"] for row in done.table("attention_output")} == {"questions"}
    facts = done.json("run")["facts"]["diagnostics"]
    assert facts["read"] == {"questions": 1}
    assert "evaluation.perplexity.n_sequences=0" in facts["left_out"]["evaluation"]
    nothing = run("stages=[diagnose] evaluation.perplexity.n_sequences=0 evaluation.world.n_per_kind=0")
    assert not nothing.tables & STREAMED
    assert {"r2", "probes", "first_token"} <= nothing.tables
    assert set(nothing.json("run")["facts"]["diagnostics"]["left_out"]) == {"evaluation", "questions"}


def test_no_text_is_read_where_none_is_named(run: Runner):
    assert not run("stages=[diagnose] diagnostics.texts=[]").tables & STREAMED


def test_a_network_is_read_like_any_map(run: Runner):
    done = run("stages=[diagnose] mapper=mlp mapper.mlp.hidden=[8] mapper.mlp.epochs=1")
    assert {row["split"] for row in done.table("r2")} == {"fit", "held_out", "evaluation", "questions"}
    assert done.metric("diagnose/evaluation/mapped/kl_nats") > 0
    assert -1 < done.metric("diagnose/evaluation/mapped/attention_cosine") < 1


@pytest.mark.slow
def test_one_model_at_a_time_gives_the_same_numbers(run: Runner):
    expected, found = (run(f"{ALL} calibration.sequential={value}") for value in ("false", "true"))
    metrics = found.json("metrics")
    for name, metric in expected.json("metrics").items():
        if name.startswith("diagnose/"):
            assert metrics[name]["value"] == pytest.approx(metric["value"], rel=1e-6), name


def test_the_identity_loses_nothing(run: Runner):
    done = run("stages=[diagnose] pair=tiny_self mapper=identity transfer.native_head=0")
    for text in ("evaluation", "questions"):
        assert done.metric(f"diagnose/{text}/mapped/attention_cosine") == pytest.approx(1.0, abs=1e-6)
        assert done.metric(f"diagnose/{text}/mapped/r2_key") == pytest.approx(1.0, abs=1e-9)
        # float32 keys stripped and rotated again, through all layers
        assert done.metric(f"diagnose/{text}/mapped/kl_nats") == pytest.approx(0.0, abs=1e-5)
        assert done.metric(f"diagnose/{text}/mapped/concentration_value") == 1.0
