"""lm-eval's tasks as a part of stage `evaluate`, on the shipped family and local files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvmap.config import Config, validate
from kvmap.data import UnreadableCorpus
from kvmap.evaluation.items import jsonl_items, world_items
from kvmap.stages.evaluate.tasks import specs
from tests.stages.conftest import Finished, Runner
from tests.test_config import composed, with_settings

ARMS = ("target", "source", "mapped", "bias_only", "raw", "random", "no_context")
N = 8


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One set of questions twice: as `{context, choices, answer}` lines, and as tasks of lm-eval."""
    folder = tmp_path_factory.mktemp("questions")
    items = world_items(seed=11, n_per_kind=N // 2, kinds=["where", "holder"])
    rows = [{"context": item.context, "choices": list(item.choices), "answer": item.answer} for item in items]
    (folder / "quiz.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    base: dict[str, Any] = {
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"test": str(folder / "quiz.jsonl")},
            "cache_dir": str(folder / "cache"),
        },
        "test_split": "test",
        "doc_to_text": "{{context}}",
        "metadata": {"version": 2.0},
    }
    mean = {"aggregation": "mean", "higher_is_better": True}
    choices = {
        "output_type": "multiple_choice",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", **mean}, {"metric": "acc_norm", **mean}],
    }
    written = {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": [" ."], "max_gen_toks": 2, "do_sample": False},
        "filter_list": [{"name": "strict-match", "filter": [{"function": "take_first"}]}],
        "metric_list": [{"metric": "exact_match", "ignore_case": True, **mean}],
    }
    files = {
        "quiz_choices": {"task": "quiz_choices", **base, **choices},
        "quiz_more": {"task": "quiz_more", **base, **choices},
        "quiz_written": {"task": "quiz_written", **base, **written},
        "quiz_both": {"group": "quiz_both", "task": ["quiz_choices", "quiz_more"]},
    }
    for name, content in files.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content))
    return folder


def asked(folder: Path, more: str = "") -> str:
    tasks = (
        "[{name:quiz_choices,metric:acc},{name:quiz_written,limit:3},{name:quiz_both,label:both,metric:acc}]"
    )
    return (
        f"stages=[evaluate] evaluation.world.n_per_kind=0 evaluation.perplexity.n_sequences=0 "
        f"evaluation.generate=false evaluation.batch_size=5 evaluation.bootstrap_samples=100 "
        f"evaluation.tasks={tasks} evaluation.include_path={folder} evaluation.jsonl.paths=[{folder}] {more}"
    )


@pytest.fixture(scope="module")
def finished(run: Runner, questions: Path) -> Finished:
    return run(asked(questions))


def by_item(rows: list[dict[str, str]], task: str) -> dict[tuple[str, str], dict[str, str]]:
    return {(row["arm"], row["id"]): row for row in rows if row["task"] == task}


def test_every_arm_answers_as_it_does_to_kvmaps_own_questions(finished: Finished) -> None:
    """Two ways from one file to log-likelihoods: lm-eval's encoding and pool, and kvmap's own."""
    theirs = by_item(finished.table("tasks_items"), "quiz_choices")
    ours = by_item(finished.table("items"), "quiz")
    assert len(theirs) == len(ours) == N * len(ARMS)
    for (arm, line), row in ours.items():
        other = theirs[arm, str(int(line.removeprefix("line ")) - 1)]
        # float32 in batches of other make-up
        assert list(map(float, other["logliks"].split())) == pytest.approx(
            list(map(float, row["logliks"].split())), abs=1e-4
        )
        assert float(other["acc"]) == float(row["correct"] == "True")
        assert (other["n_context"], other["n_mapped"]) == (row["n_context"], row["n_mapped"])
    for arm in ARMS:
        one = finished.metric(f"evaluate/quiz_choices/{arm}/accuracy")
        assert one == finished.metric(f"evaluate/quiz/{arm}/accuracy")
        assert one == finished.metric(f"evaluate/quiz_choices/{arm}/acc")


def test_a_group_pools_the_documents_of_its_tasks(finished: Finished) -> None:
    rows = by_item(finished.table("tasks_items"), "both")
    assert len(rows) == 2 * N * len(ARMS)
    assert ("mapped", "quiz_more/0") in rows
    for arm in ARMS:
        alone = finished.metric(f"evaluate/quiz_choices/{arm}/acc_norm")
        assert finished.metric(f"evaluate/both/{arm}/acc_norm") == pytest.approx(alone)
        assert finished.json("metrics")[f"evaluate/both/{arm}/accuracy"]["n"] == 2 * N


def test_items_can_be_paired_between_arms_and_runs(finished: Finished) -> None:
    rows = finished.table("tasks_items")
    contents: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        contents.setdefault((row["task"], row["id"]), set()).add(row["content"])
    assert all(len(found) == 1 for found in contents.values())
    assert {row["n_mapped"] == "0" for row in rows if row["arm"] in ("target", "source")} == {True}
    assert {row["n_mapped"] == "0" for row in rows if row["arm"] in ("mapped", "random")} == {False}


def test_what_was_asked_and_how_is_recorded(finished: Finished) -> None:
    facts = finished.json("run")["facts"]["tasks"]
    assert set(facts) == {"quiz_choices", "quiz_written", "both"}
    written = facts["quiz_written"]
    assert (written["limit"], written["accuracy"]) == (3, "exact_match,strict-match")
    assert written["fewshot_seed"] == finished.json("run")["seeds"]["fewshot"] == 1234
    task = written["tasks"]["quiz_written"]
    assert (task["version"], task["num_fewshot"], task["n_documents"], task["of"]) == (2.0, 0, 3, N)
    assert task["filters"] == {"strict-match": ["{'function': 'take_first'}"]}
    assert task["generation"]["until"] == [" ."]
    assert set(facts["both"]["tasks"]) == {"quiz_choices", "quiz_more"}
    assert facts["both"]["lm_eval"]


def test_the_table_of_arms_has_every_metric_paired_with_the_target(finished: Finished) -> None:
    rows = finished.table("arms")
    found = {(row["task"], row["arm"], row["metric"]) for row in rows}
    for task in ("quiz_choices", "both", "tasks_average"):
        for arm in ARMS[1:]:
            assert {(task, arm, "retention"), (task, arm, "accuracy_minus_target")} <= found
    assert ("quiz_written", "mapped", "exact_match_strict_match") in found
    assert ("tasks_average", "mapped", "mean_retention") in found
    assert ("quiz_choices", "all", "n_truncated") in found


@pytest.mark.slow
def test_what_has_been_answered_is_not_asked_again(finished: Finished, run: Runner, questions: Path) -> None:
    """A second run finds all answers; one with another native head finds those of arms that have none."""
    first = finished.json("run")["facts"]["n_reused"]["tasks"]
    assert set(first.values()) == {0}  # what one task of the group has asked and the other asks again aside
    again = run(asked(questions), again=True)
    n_requests = sum(len(item.choices) for item in jsonl_items(questions)) + 3
    assert set(again.json("run")["facts"]["n_reused"]["tasks"].values()) == {n_requests}
    assert again.table("tasks_items") == finished.table("tasks_items")
    other = run(asked(questions, "transfer.native_head=2 calibration.native_head=1"))
    reused = other.json("run")["facts"]["n_reused"]["tasks"]
    assert reused["mapped"] == reused["random"] == 0
    assert reused["target"] == reused["source"] == reused["no_context"] == n_requests


@pytest.mark.slow
def test_one_model_in_memory_at_a_time_gives_the_same(
    finished: Finished, run: Runner, questions: Path
) -> None:
    settings = "evaluation.sequential=true evaluation.reuse_answers=false"
    after = run(asked(questions, settings))
    for name, metric in finished.json("metrics").items():
        if name.split("/")[1] in ("quiz_choices", "both") and metric["value"] is not None:
            assert after.json("metrics")[name]["value"] == pytest.approx(metric["value"], nan_ok=True)


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        ("evaluation.tasks=[{nam:a}]", "evaluation.tasks[0]={'nam': 'a'}: expected a task's name"),
        ("evaluation.tasks=[3]", "evaluation.tasks[0]=3: expected a task's name"),
        ("evaluation.tasks=[{name:a,limt:3}]", "evaluation.tasks[0].limt: nothing reads this key"),
        ("evaluation.tasks=[{name:a,limit:0}]", "evaluation.tasks[0].limit=0: expected a whole number"),
        ("evaluation.tasks=[{name:a,num_fewshot:-1}]", "evaluation.tasks[0].num_fewshot=-1: expected"),
        ("evaluation.tasks=[{name:a,label:b/c}]", "evaluation.tasks[0].label='b/c': expected a name without"),
        ("evaluation.tasks=[a,{name:a,limit:3}]", "'a' stands 2 times; give each its own label"),
        ("evaluation.include_path=/no/such", "evaluation.include_path=/no/such: no such folder"),
        ("evaluation.rolling_context=0", "evaluation.rolling_context=0: expected a finite number"),
        ("evaluation.jsonl.folder=/no/such", "evaluation.jsonl.folder=/no/such: no such folder"),
        ("evaluation=local", "evaluation.jsonl.folder is not set: set evaluation.jsonl.folder=<folder"),
        ("evaluation.jsonl.paths=[/no/such]", "no file /no/such; expected one of JSON lines, or a folder"),
    ],
)
def test_a_mistake_is_named(overrides: str, complaint: str) -> None:
    (mistake,) = validate(with_settings(overrides))
    assert complaint in mistake


def test_task_sets_compose(tmp_path: Path) -> None:
    def titles(cfg: Config) -> list[str]:
        assert validate(cfg) == []
        return [spec.title for spec in specs(cfg.evaluation)]

    paper = composed("evaluation=paper")
    assert titles(paper) == ["arc_challenge", "hellaswag", "winogrande", "mmlu", "gsm8k"]
    assert [spec.num_fewshot for spec in specs(paper.evaluation)] == [0, 0, 0, 5, 8]
    prefix = paper.evaluation.perplexity
    assert (prefix.prefix_tokens, prefix.continuation_tokens) == (1024, 1024)
    assert titles(composed("evaluation=holdout")) == ["piqa", "arc_easy", "boolq"]
    assert titles(composed("evaluation.tasks=[mmlu_dev]")) == ["mmlu_dev"]
    local = composed("evaluation=local", f"evaluation.jsonl.folder={tmp_path}")
    assert titles(local) == []
    assert local.evaluation.jsonl.folder == str(tmp_path)


def test_a_stage_that_asks_only_tasks_asks_something() -> None:
    nothing = "evaluation.world.n_per_kind=0 evaluation.perplexity.n_sequences=0"
    assert any("evaluation.tasks" in mistake for mistake in validate(with_settings(nothing)))
    assert validate(with_settings(f"{nothing} evaluation.tasks=[mmlu_dev]")) == []


def test_a_folder_stands_for_its_files(tmp_path: Path) -> None:
    row = {"context": "Q: is it? A:", "choices": [" Yes", " No"], "answer": 1}
    for name, n in (("b", 3), ("a", 2)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(n)))
    (tmp_path / "notes.txt").write_text("not a question")
    items = jsonl_items(tmp_path)
    assert [(item.task, item.id) for item in items] == [
        ("a", "line 1"),
        ("a", "line 2"),
        ("b", "line 1"),
        ("b", "line 2"),
        ("b", "line 3"),
    ]
    assert [item.task for item in jsonl_items(tmp_path, limit=1)] == ["a", "b"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnreadableCorpus, match=r"this folder has no file \*\.jsonl"):
        jsonl_items(tmp_path / "empty")
