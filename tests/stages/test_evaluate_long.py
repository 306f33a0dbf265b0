"""The long-context part of stage `evaluate`: what it leaves and refuses, and that it goes on where it was."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest

from kvmap.config import validate
from kvmap.evaluation.answers import Answers
from kvmap.stages import run_stages
from kvmap.tracking import Run
from tests.stages.conftest import Finished, Runner, configured
from tests.test_config import with_settings

LONG = (
    "stages=[evaluate] evaluation=long evaluation.world.n_per_kind=0 evaluation.perplexity.n_sequences=0 "
    "evaluation.long_context.multiples=[1,2] evaluation.long_context.depths=[0,1] "
    "evaluation.long_context.n_needles=2 evaluation.long_context.n_sequences=2 "
    "evaluation.long_context.continuation_tokens=8 evaluation.long_context.growth_tokens=12 "
    "evaluation.long_context.growth_windows=3 evaluation.batch_size=4 "
    "evaluation.arms=[target,source,mapped,no_context]"
)
ARMS = ("target", "source", "mapped", "no_context")
IDENTITY = "pair=tiny_self mapper=identity"
TABLES = (
    "needle",
    "needle_items",
    "length",
    "length_sequences",
    "growth",
    "growth_layers",
    "growth_sequences",
    "arms",
)
# calibration.sequence_length is 96
LENGTHS = ("96", "192")


@pytest.fixture(scope="module")
def whole(run: Runner) -> Finished:
    return run(LONG)


@pytest.fixture(autouse=True)
def _no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are drawn in every run, and written by `whole` alone: that takes longer than the rest."""
    monkeypatch.setattr(Run, "figure", lambda *_: None)


def values(finished: Finished, table: str, metric: str, *keys: str) -> dict[tuple[str, ...], float]:
    return {
        tuple(row[key] for key in keys): float(row["value"])
        for row in finished.table(table)
        if row["metric"] == metric and row["value"]
    }


def test_every_arm_has_every_length_depth_and_window(whole: Finished) -> None:
    assert set(TABLES) <= whole.tables
    accuracy = values(whole, "needle", "accuracy", "n_tokens", "depth", "arm")
    assert set(accuracy) == {(n, d, arm) for n in LENGTHS for d in ("", "0.0", "1.0") for arm in ARMS}
    nll = values(whole, "length", "nll_nats", "n_tokens", "arm")
    assert set(nll) == {(n, arm) for n in LENGTHS for arm in ARMS}
    grown = values(whole, "growth", "nll_nats", "window", "stop", "arm")
    windows = [("", "12"), ("0", "4"), ("1", "8"), ("2", "12")]
    assert set(grown) == {(*window, arm) for window in windows for arm in ARMS}
    assert len(whole.table("needle_items")) == 2 * 2 * 2 * len(ARMS)
    assert len(whole.table("length_sequences")) == 2 * 2 * len(ARMS)
    growths = whole.table("growth_sequences")
    assert len(growths) == 2 * 3 * len(ARMS)
    assert len({(row["sequence"], row["content"]) for row in growths}) == 2
    assert all(row["content"] for row in growths)
    drawn = {path.stem for path in (whole.directory / "figures").glob("*.png")}
    assert {"needle", "length", "growth"} <= drawn


def test_tables_have_intervals_and_the_metrics_are_theirs(whole: Finished) -> None:
    for table in ("needle", "length", "growth"):
        for row in whole.table(table):
            if row["value"] and row["metric"] in ("accuracy", "nll_nats", "key_r2"):
                assert float(row["low"]) <= float(row["value"]) <= float(row["high"])
    accuracy = values(whole, "needle", "accuracy", "n_tokens", "depth", "arm")
    assert whole.metric("evaluate/long_context/mapped/needle_accuracy_at_96_depth_1") == pytest.approx(
        accuracy["96", "1.0", "mapped"]
    )
    nll = values(whole, "length", "nll_nats", "n_tokens", "arm")
    assert whole.metric("evaluate/long_context/source/length_nll_nats_at_192") == pytest.approx(
        nll["192", "source"]
    )
    gap = values(whole, "growth", "nll_minus_target_nats", "window", "arm")
    assert whole.metric("evaluate/long_context/mapped/growth_nll_minus_target_nats_to_8") == pytest.approx(
        gap["1", "mapped"]
    )
    tasks = {row["task"] for row in whole.table("arms")}
    assert tasks == {"needle_96", "needle_192", "length_96", "length_192", "growth"}


def test_the_table_of_answers_adds_up_to_the_accuracies(whole: Finished) -> None:
    accuracy = values(whole, "needle", "accuracy", "n_tokens", "depth", "arm")
    answers = whole.table("needle_items")
    for (n_tokens, depth, arm), value in accuracy.items():
        of_cell = [
            row["correct"] == "True"
            for row in answers
            if (row["n_tokens"], row["arm"]) == (n_tokens, arm) and depth in ("", row["depth"])
        ]
        assert value == pytest.approx(sum(of_cell) / len(of_cell))
    for row in answers:
        assert int(row["n_truncated"]) == 0
        assert int(row["n_context"]) <= int(row["n_tokens"])


@pytest.mark.slow
@pytest.mark.parametrize("rope", ["strip", "coupled"])
def test_the_identity_is_native_at_every_length_and_depth(run: Runner, rope: str) -> None:
    finished = run(f"{LONG} {IDENTITY} rope={rope}")
    accuracy = values(finished, "needle", "accuracy", "n_tokens", "depth", "arm")
    for (n_tokens, depth, arm), value in accuracy.items():
        assert arm != "mapped" or value == accuracy[n_tokens, depth, "target"]
    # float32: keys are turned back and forth
    for table, where in (("length", "n_tokens"), ("growth", "window")):
        gap = values(finished, table, "nll_minus_target_nats", where, "arm")
        assert all(value == pytest.approx(0, abs=1e-4) for (_, arm), value in gap.items() if arm == "mapped")
        kl = values(finished, table, "kl_nats", where, "arm")
        assert all(value == pytest.approx(0, abs=1e-6) for (_, arm), value in kl.items() if arm == "mapped")


@pytest.mark.slow
def test_each_rope_strategy_has_answers_of_its_own(run: Runner, whole: Finished) -> None:
    nll = {"strip": values(whole, "length", "nll_nats", "n_tokens", "arm")}
    for rope in ("coupled", "no_rerotate"):
        finished = run(f"{LONG} rope={rope}")
        nll[rope] = values(finished, "length", "nll_nats", "n_tokens", "arm")
        assert set(finished.tables) >= set(TABLES)
        reused = finished.json("run")["facts"]["n_reused"]["length_96"]
        assert (reused["target"], reused["mapped"]) == (2, 0)
    for n_tokens in LENGTHS:
        assert len({round(of[n_tokens, "mapped"], 6) for of in nll.values()}) == 3
        assert len({of[n_tokens, "target"] for of in nll.values()}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("n_adds", [9, 21])
def test_an_interrupted_run_goes_on_where_it_was(
    whole: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_adds: int
) -> None:
    """A batch of an arm is one add, of 4 arms: 4 and 8 for needles, 4 and 4 for lengths, 4 for growth."""
    shutil.rmtree(whole.outputs / "artifacts" / "answers")
    real, done = Answers.add, []

    def interrupted(answers: Answers, rows: object) -> None:
        if len(done) == n_adds:
            raise KeyboardInterrupt
        done.append(answers)
        real(answers, rows)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(Answers, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_stages(configured(LONG, whole.outputs), tmp_path)
    run_stages(configured(LONG, whole.outputs), tmp_path)
    again = Finished(tmp_path, whole.outputs)
    for name in TABLES:
        assert again.table(name) == whole.table(name), name
    parts = again.json("run")["facts"]["n_reused"]
    assert sum(sum(arms.values()) for arms in parts.values()) >= n_adds


def test_lengths_that_do_not_fit_are_cut_and_said_to_be(
    run: Runner, caplog: pytest.LogCaptureFixture
) -> None:
    finished = run(f"{LONG} evaluation.max_tokens=150")
    facts = finished.json("run")["facts"]["long_context"]
    assert facts["needles"]["lengths"] == [96, 149]
    assert facts["length"]["lengths"] == [96, 141]
    assert facts["growth"]["lengths"] == [96]
    assert "192 tokens; the pair takes 150, less 9 for what follows: 141" in facts["length"]["shortened"][0]
    assert any("149 are read instead" in record.message for record in caplog.records)
    assert max(int(row["n_context"]) for row in finished.table("needle_items")) <= 149


def test_nothing_is_asked_that_is_off(run: Runner) -> None:
    finished = run(f"{LONG} evaluation.long_context.n_sequences=0")
    assert {"needle", "needle_items"} <= finished.tables
    assert not finished.tables & {"length", "growth"}
    finished = run(
        f"{LONG} evaluation.long_context.n_needles=0 evaluation.long_context.continuation_tokens=0"
    )
    assert "growth" in finished.tables
    assert not finished.tables & {"length", "needle"}
    finished = run(f"{LONG} evaluation.long_context.n_needles=0 evaluation.long_context.growth_tokens=0")
    assert "length" in finished.tables
    assert not finished.tables & {"growth", "needle"}


def test_text_is_read_on_where_calibration_stopped(run: Runner) -> None:
    """A corpus of the same description, which the world's is where its documents are as long."""
    length = 96 + 12 + 1
    finished = run(
        f"{LONG} evaluation.long_context.n_needles=0 evaluation.long_context.continuation_tokens=0 "
        f"evaluation.long_context.data.split=calibration evaluation.long_context.data.seed=1000"
    )
    text = finished.json("run")["facts"]["long_context"]["text"]
    assert text["source"] == f"world:calibration seed=1000 min_words={length}"
    assert text["skipped"] > 0


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("n_needles=-1", "n_needles=-1: expected 0, which is off, or more"),
        ("n_sequences=-2", "n_sequences=-2: expected 0"),
        ("growth_tokens=-1", "growth_tokens=-1: expected 0"),
        ("continuation_tokens=1", "continuation_tokens=1: expected 0, which is off, or at least 2"),
        ("multiples=[]", "multiples=[]: expected one or more finite numbers above 0"),
        ("multiples=[1,0]", "multiples=[1.0, 0.0]"),
        ("multiples=[inf]", "multiples=[inf]"),
        ("multiples=[2,2]", "multiples=[2.0, 2.0]: a value stands twice"),
        ("depths=[]", "depths=[]: expected one or more shares"),
        ("depths=[0,1.1]", "depths=[0.0, 1.1]"),
        ("kinds=[]", "kinds=[]: expected at least one of where"),
        (
            "kinds=[where,color]",
            "kinds=color: expected one of where, colour, holder (did you mean 'colour'?)",
        ),
        ("packing=none", "packing=none: expected one of document, packed"),
        ("growth_multiple=0", "growth_multiple=0.0: expected a finite number above 0"),
        ("growth_windows=0", "growth_windows=0: expected at least 1"),
        ("growth_windows=300", "no more than evaluation.long_context.growth_tokens=256"),
        ("data.kind=jsonl", "evaluation.long_context.data.path is not set"),
        ("data.skip=-1", "evaluation.long_context.data.skip=-1"),
    ],
)
def test_settings_that_cannot_be_right_are_named(setting: str, said: str) -> None:
    mistakes = validate(with_settings(f"evaluation=long evaluation.long_context.{setting}"))
    assert len(mistakes) == 1
    assert mistakes[0].startswith("evaluation.long_context.")
    assert said in mistakes[0]


def test_the_part_alone_is_something_to_ask() -> None:
    off = "evaluation.long_context.n_needles=0 evaluation.long_context.n_sequences=0"
    assert validate(with_settings("evaluation=long")) == []
    assert validate(with_settings("evaluation=long evaluation.long_context.n_needles=0")) == []
    mistakes = validate(with_settings(f"evaluation=long {off}"))
    assert any("asks nothing" in mistake for mistake in mistakes)
    assert math.isclose(with_settings("evaluation=long").evaluation.long_context.depths[1], 0.25)
