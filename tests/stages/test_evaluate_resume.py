"""An interrupted evaluation goes on at the item it had reached; a sweep over mappers asks natives once."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvmap.config.schema import DEFAULT_ARMS as ARMS
from kvmap.evaluation.compare import compare_runs
from kvmap.stages import run_stages
from kvmap.stages.evaluate.ledger import Ledger
from tests.stages.conftest import Finished, Runner, configured

ASKED = (
    "stages=[evaluate] evaluation.batch_size=2 evaluation.max_new_tokens=2 "
    "evaluation.world.kinds=[where,count]"
)
N_ITEMS, N_SEQUENCES = 8, 4
TABLES = ("items", "sequences", "arms")
ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def whole(run: Runner) -> Finished:
    """The run that nothing interrupted and that found no answers."""
    return run(ASKED)


@pytest.fixture
def forgotten(whole: Finished) -> Callable[[], None]:
    """Takes away the answers that earlier runs kept; the mapper stays."""

    def forget() -> None:
        shutil.rmtree(whole.outputs / "artifacts" / "answers")

    return forget


def reused(finished: Finished, part: str) -> dict[str, int]:
    return dict(finished.json("run")["facts"]["n_reused"][part])


def test_a_first_run_reuses_nothing(whole: Finished) -> None:
    assert reused(whole, "questions") == dict.fromkeys(ARMS, 0)
    assert reused(whole, "prefix_perplexity") == dict.fromkeys(ARMS, 0)


def test_the_record_says_how_long_each_arm_took_and_what_was_scored(whole: Finished) -> None:
    facts = whole.json("run")["facts"]
    for part, n in (("questions", N_ITEMS), ("perplexity", N_SEQUENCES)):
        taken = facts["seconds_by_arm"][part]
        assert set(taken) == {"source_prefill", *ARMS}
        assert {of_arm["n_contexts"] for of_arm in taken.values()} == {n}
    assert facts["artifacts"]["mapper"] == whole.artifact("mapper").name
    scored = facts["perplexity"]["n_scored_of_each"]
    assert {int(row["n_tokens"]) for row in whole.table("sequences")} == {scored}
    assert facts["perplexity"]["first_continuation_token_scored"] is False
    counted = {(row["task"], row["arm"]) for row in whole.table("arms") if row["metric"] == "n_unmapped"}
    assert {arm for task, arm in counted if task == "perplexity"} == {"mapped", "bias_only", "raw", "random"}
    assert all(row["value"] == "0.0" for row in whole.table("arms") if row["metric"] == "n_unmapped")


@pytest.mark.slow
@pytest.mark.parametrize("n_adds", [0, 3, 9])
def test_an_interrupted_run_goes_on_where_it_was(
    whole: Finished,
    forgotten: Callable[[], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    n_adds: int,
) -> None:
    """Questions take 8 adds: 4 batches, source and target apart. So the last case is in perplexity."""
    forgotten()
    real, done = Ledger.add, []

    def interrupted(ledger: Ledger, rows: object) -> None:
        if len(done) == n_adds:
            raise KeyboardInterrupt
        done.append(ledger)
        real(ledger, rows)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_stages(configured(ASKED, whole.outputs), tmp_path)
    run_stages(configured(ASKED, whole.outputs), tmp_path)
    again = Finished(tmp_path, whole.outputs)
    assert again.json("run")["attempts"][0]["error"] == "interrupted"
    for name in TABLES:
        assert again.table(name) == whole.table(name), name
    found = reused(again, "questions")
    # The batch in whose midst the interruption came had been answered too.
    assert found["source"] == min(N_ITEMS, 2 * (n_adds // 2 + 1))
    assert found["mapped"] == min(N_ITEMS, 2 * ((n_adds + 1) // 2))
    assert reused(again, "prefix_perplexity")["mapped"] == (N_SEQUENCES if n_adds == 9 else 0)


@pytest.mark.slow
def test_a_killed_process_loses_at_most_the_batch_it_was_at(
    whole: Finished, forgotten: Callable[[], None], tmp_path: Path
) -> None:
    forgotten()
    folder, outputs = tmp_path / "run", whole.outputs
    program = (
        "from pathlib import Path; from kvmap.stages import run_stages; "
        "from tests.stages.conftest import configured; "
        f"run_stages(configured({ASKED!r}, Path({str(outputs)!r})), {str(folder)!r})"
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 90
    while len(list((outputs / "artifacts" / "answers").glob("*/answers.jsonl"))) < 3:
        assert process.poll() is None, "it ended before it was killed"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)
    run_stages(configured(ASKED, outputs), folder)
    again = Finished(folder, outputs)
    assert 0 < sum(reused(again, "questions").values()) < N_ITEMS * len(ARMS)
    for name in TABLES:
        assert again.table(name) == whole.table(name), name


def test_a_sweep_over_mappers_asks_target_source_and_no_context_once(run: Runner, whole: Finished) -> None:
    other = run(f"{ASKED} mapper=head_local")
    found = reused(other, "questions")
    # Controls that do not depend on the fitted map are found as well; the random one imitates its scale.
    expected = {arm: 0 if arm in ("mapped", "random") else N_ITEMS for arm in ARMS}
    assert found == expected
    mine, theirs = (
        {(row["task"], row["id"], row["arm"]): row for row in finished.table("items")}
        for finished in (other, whole)
    )
    assert mine.keys() == theirs.keys()
    assert all(mine[key] == theirs[key] for key in mine if expected[key[2]])
    assert any(mine[key] != theirs[key] for key in mine if key[2] == "mapped")


def test_two_runs_are_paired_item_by_item(run: Runner, whole: Finished) -> None:
    other = run(f"{ASKED} mapper=head_local")
    of_target = compare_runs(whole.directory, other.directory, arm="target")
    assert all((row["difference"], row["n_only_a"], row["n_only_b"]) == (0, 0, 0) for row in of_target)
    rows = {(row["measure"], row["task"]): row for row in compare_runs(whole.directory, other.directory)}
    assert rows["accuracy", "average"]["n_pairs"] == N_ITEMS
    gap = whole.metric("evaluate/perplexity/mapped/nll_nats") - other.metric(
        "evaluate/perplexity/mapped/nll_nats"
    )
    assert rows["nll_nats", "perplexity"]["difference"] == pytest.approx(gap)


@pytest.mark.parametrize(
    ("changed", "kept"),
    [
        ("transfer.native_head=2", {"target", "source", "no_context"}),
        pytest.param("transfer.hold_back=2", set(), marks=pytest.mark.slow),
        ("pair.target.attn_implementation=eager", {"source"}),
        # Who compares batch sizes must not be given one and the same answer twice.
        ("evaluation.batch_size=3", set()),
        pytest.param("evaluation.max_new_tokens=3", set(), marks=pytest.mark.slow),
        ("evaluation.reuse_answers=false", set()),
        pytest.param("evaluation.bootstrap_samples=50", set(ARMS), marks=pytest.mark.slow),
    ],
)
def test_answers_are_shared_by_runs_that_agree_in_what_determines_them(
    run: Runner, whole: Finished, changed: str, kept: set[str]
) -> None:
    other = run(f"{ASKED} evaluation.perplexity.n_sequences=0 {changed}")
    expected = {arm: N_ITEMS if arm in kept else 0 for arm in ARMS}
    assert reused(other, "questions") == expected


def test_the_report_says_what_was_reused(
    run: Runner, whole: Finished, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    run(ASKED, again=True)
    printed = " ".join(capsys.readouterr().out.split())
    by_arm = ", ".join(f"{arm.replace('_', ' ')} 8" for arm in ARMS)
    assert f"questions: answers kept from before: {by_arm}" in printed
    assert "prefix perplexity: answers kept from before: target 4," in printed
