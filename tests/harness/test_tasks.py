"""Tasks by name, and what is said of those that cannot be had; MMLU's items from lm-eval's own package."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from lm_eval.tasks import TaskManager

from kvmap.errors import KvmapError, UnknownName
from kvmap.harness.catalogue import TaskSpec, UnknownTask, UnreadableTask, load_tasks
from kvmap.harness.mmlu_dev import dataset, parse
from kvmap.harness.runner import ChatOptions, run_task
from kvmap.harness.summary import summarise_tasks
from kvmap.transfer import TransferOptions
from tests.harness.conftest import Family, LocalTasks, identity_pool


class TestCatalogue:
    def test_entries_are_set_as_asked(self, local_tasks: LocalTasks) -> None:
        specs = [
            TaskSpec("local_choices", label="two", num_fewshot=2, limit=3),
            TaskSpec("local_words", generation={"max_gen_toks": 5}),
            TaskSpec(str(local_tasks.folder / "local_pairs.yaml")),
        ]
        two, words, pairs = load_tasks(specs, str(local_tasks.folder))
        assert two.spec.title == "two"
        assert two.tasks["local_choices"].get_config("num_fewshot") == 2
        assert words.tasks["local_words"].get_config("generation_kwargs") == {
            "until": [" is", "\n\n"],
            "do_sample": False,
            "max_gen_toks": 5,
        }
        assert pairs.spec.title == "local_pairs"
        assert pairs.tasks["local_pairs"].get_config("num_fewshot") == 0

    def test_generation_settings_of_a_task_that_generates_nothing_are_refused(
        self, local_tasks: LocalTasks
    ) -> None:
        with pytest.raises(KvmapError, match="local_choices generates nothing"):
            load_tasks([TaskSpec("local_choices", generation={"until": ["x"]})], str(local_tasks.folder))

    @pytest.mark.parametrize("metric", ["acc_norm", "acc", "exact_match,strict-match", "exact_match"])
    def test_a_metric_that_a_task_has_may_be_asked_for(self, local_tasks: LocalTasks, metric: str) -> None:
        name = "local_words" if "match" in metric else "local_choices"
        (task,) = load_tasks([TaskSpec(name, metric=metric)], str(local_tasks.folder))
        assert task.spec.metric == metric

    @pytest.mark.parametrize(
        ("name", "metric", "near"),
        [
            ("local_choices", "acc_nrm", "acc_norm"),
            ("local_choices", "exact_match", None),
            ("local_words", "exact_match,strict_match", "exact_match,strict-match"),
            ("local_words", "acc", None),
        ],
    )
    def test_a_metric_that_a_task_has_not_is_refused_with_the_nearest(
        self, local_tasks: LocalTasks, name: str, metric: str, near: str | None
    ) -> None:
        with pytest.raises(UnknownName) as caught:
            load_tasks([TaskSpec(name, metric=metric)], str(local_tasks.folder))
        message = str(caught.value)
        assert message.startswith(f"unknown metric of {name} (evaluation.tasks) '{metric}'.")
        assert near is None or f"Did you mean '{near}'?" in message

    def test_a_metric_that_only_the_first_answer_names_is_let_through(
        self, local_tasks: LocalTasks, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A function of the task's own may give several numbers, whose names nobody knows before."""
        from lm_eval.api import registry

        monkeypatch.setattr(registry, "METRIC_REGISTRY", {})
        (task,) = load_tasks([TaskSpec("local_words", metric="pass@1")], str(local_tasks.folder))
        assert task.spec.metric == "pass@1"

    @pytest.mark.parametrize("error", [AttributeError("no such name"), TypeError("two arguments")])
    def test_a_mistake_in_the_program_is_not_taken_for_missing_data(
        self, local_tasks: LocalTasks, monkeypatch: pytest.MonkeyPatch, error: Exception
    ) -> None:
        def fails(*_: Any) -> None:
            raise error

        monkeypatch.setattr(TaskManager, "load", fails)
        with pytest.raises(type(error), match=str(error)):
            load_tasks([TaskSpec("local_choices")], str(local_tasks.folder))

    def test_a_missing_package_is_named_as_one(
        self, local_tasks: LocalTasks, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fails(*_: Any) -> None:
            raise ModuleNotFoundError("No module named 'langdetect'")

        monkeypatch.setattr(TaskManager, "load", fails)
        complaint = (
            r"local_choices: a package that it needs \(ModuleNotFoundError: No module named 'langdetect'"
        )
        with pytest.raises(UnreadableTask, match=complaint):
            load_tasks([TaskSpec("local_choices")], str(local_tasks.folder))

    def test_all_data_that_cannot_be_had_are_named_at_once(self, tmp_path: Any) -> None:
        for name in ("one", "two"):
            (tmp_path / f"{name}.yaml").write_text(
                f"task: {name}\ndataset_path: nobody/{name}\ntest_split: test\noutput_type: multiple_choice\n"
                "doc_to_text: a\ndoc_to_choice: [b, c]\ndoc_to_target: 0\n"
            )
        (tmp_path / "both.yaml").write_text("group: both\ntask: [one, two]\n")
        with pytest.raises(UnreadableTask) as caught:
            load_tasks([TaskSpec("one"), TaskSpec("both"), TaskSpec("mmlu_dev")], str(tmp_path))
        message = str(caught.value)
        assert "2 cannot be read. HF_HUB_OFFLINE is set" in message
        assert "one: the data set nobody/one (" in message
        assert "both: nobody/one, nobody/two (" in message
        assert "evaluation=tiny" in message
        assert "mmlu_dev:" not in message

    @pytest.mark.slow
    def test_an_unknown_name_gets_the_nearest(self) -> None:
        """Slow: lm-eval's own 14,000 files are looked through first."""
        with pytest.raises(UnknownTask, match=r"no task 'arc_chalenge' .* Did you mean 'arc_challenge'"):
            load_tasks([TaskSpec("arc_chalenge")])


class TestMmluDev:
    def test_holds_every_item_of_57_subjects(self) -> None:
        items = dataset()["test"]
        assert len(items) == 282
        per_subject = Counter(item["subject"] for item in items)
        assert len(per_subject) == 57
        assert set(per_subject.values()) == {4, 5}
        assert Counter(len(item["choices"]) for item in items) == {4: 281, 5: 1}
        assert all(0 <= item["answer"] < len(item["choices"]) for item in items)
        assert all(choice for item in items for choice in item["choices"])

    @pytest.mark.parametrize("limit", [9, 57, 60, 114, 282])
    def test_any_limit_covers_the_subjects_evenly(self, limit: int) -> None:
        counts = Counter(item["subject"] for item in dataset()["test"][:limit])
        assert len(counts) == min(limit, 57)
        assert max(counts.values()) - min(counts.values()) <= 1

    @pytest.mark.parametrize(
        ("question", "target", "expected"),
        [
            (
                "Which? Not (this).\n(A) one (B) two, (B-side) (C) 3 (D) four",
                "Let's think. (B) is wrong. The answer is (C).",
                (["one", "two, (B-side)", "3", "four"], 2),
            ),
            ("Which?\n(A) 1 (B) 2 (C) 3 (D) 4 (E) 5", "The answer is (E).", (["1", "2", "3", "4", "5"], 4)),
            ("Which?\n(A) 1 (B) 2", "The answer is (D).", None),
            ("Which?\n(A) 1 (B) 2", "It is B.", None),
            ("Which?", "The answer is (A).", None),
        ],
    )
    def test_a_worked_example_is_read(self, question: str, target: str, expected: Any) -> None:
        item = parse({"question": question, "target": target})
        assert (item and (item["choices"], item["answer"])) == expected

    def test_is_asked_as_mmlu_is_with_other_items_of_the_subject(self) -> None:
        (task,) = load_tasks([TaskSpec("mmlu_dev", num_fewshot=2)])
        (one,) = task.tasks.values()
        items = one.eval_docs
        for number in (0, 3, 100):
            prompt = one.fewshot_context(items[number], 2)
            subject = items[number]["subject"]
            assert prompt.startswith(
                f"The following are multiple choice questions (with answers) about {subject}."
            )
            assert prompt.count("\nAnswer:") == 3
            assert prompt.endswith("\nAnswer:")
            assert prompt.count(items[number]["question"]) == 1
            others = [item for item in items if item["subject"] == subject]
            shown = [item for item in others if item["question"] in prompt]
            assert len(shown) == 3
        with pytest.raises(KvmapError, match=r"num_fewshot=5, and .* has 4 other items"):
            one.fewshot_context(items[0], 5)

    def test_every_arm_is_asked_the_same(self, llama: Family) -> None:
        (task,) = load_tasks([TaskSpec("mmlu_dev", limit=3)])
        pool = identity_pool(llama, "target", "mapped", max_tokens=200, batch_size=3)
        result = run_task(task, pool, ChatOptions(), fewshot_seed=0)
        documents = list(result.documents())
        assert [document.id for document in documents] == ["0", "1", "2"] * 2
        assert [d.content for d in documents[:3]] == [d.content for d in documents[3:]]
        record = result.record()["mmlu_dev"]
        assert (record["version"], record["n_documents"], record["of"]) == (1.1, 3, 282)


class TestChat:
    def test_templates_system_text_and_examples_as_turns(
        self, llama: Family, local_tasks: LocalTasks
    ) -> None:
        (task,) = load_tasks([TaskSpec("local_choices", num_fewshot=1, limit=2)], str(local_tasks.folder))
        chat = ChatOptions(apply_template=True, system_instruction="be brief", fewshot_as_multiturn=True)
        result = run_task(task, identity_pool(llama, "target", "mapped"), chat, fewshot_seed=1)
        prompts = [
            sample["arguments"][0][0] for sample in result.by_arm["mapped"]["samples"]["local_choices"]
        ]
        for prompt in prompts:
            assert prompt.startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n")
            assert prompt.count("<|im_start|>assistant\n") == 2
        single = run_task(
            task,
            identity_pool(llama),
            ChatOptions(apply_template=True, fewshot_as_multiturn=False),
            fewshot_seed=1,
        )
        (first, _) = single.by_arm["mapped"]["samples"]["local_choices"]
        assert first["arguments"][0][0].count("<|im_start|>assistant\n") == 1

    def test_a_tokenizer_without_a_template_is_refused(self, local_tasks: LocalTasks) -> None:
        from tests.harness.conftest import build_family

        plain = build_family("llama", adds_bos=True)
        plain.tokenizer.chat_template = None
        (task,) = load_tasks([TaskSpec("local_pairs")], str(local_tasks.folder))
        with pytest.raises(KvmapError, match="has no chat template"):
            run_task(task, identity_pool(plain), ChatOptions(apply_template=True), fewshot_seed=1)


def test_examples_are_drawn_alike_for_every_arm_and_by_the_seed(
    llama: Family, local_tasks: LocalTasks
) -> None:
    (task,) = load_tasks([TaskSpec("local_choices", num_fewshot=2, limit=3)], str(local_tasks.folder))
    prompts = {}
    for seed in (1, 2):
        pool = identity_pool(llama, "target", "mapped", "no_context", max_tokens=200)
        result = run_task(task, pool, ChatOptions(), fewshot_seed=seed)
        by_arm = [
            [sample["prompt_hash"] for sample in results["samples"]["local_choices"]]
            for results in result.by_arm.values()
        ]
        assert by_arm[0] == by_arm[1] == by_arm[2]
        prompts[seed] = by_arm[0]
    assert prompts[1] != prompts[2]


def test_a_task_whose_mapped_arm_would_be_the_target_is_refused(
    llama: Family, local_tasks: LocalTasks
) -> None:
    """No context is longer than what the target reads itself. Whole texts are answered all the same."""
    choices, texts = load_tasks(
        [TaskSpec("local_choices", limit=2), TaskSpec("local_texts", limit=1)], str(local_tasks.folder)
    )
    options = TransferOptions(native_head=200, hold_back=50)
    pool = identity_pool(llama, "target", "mapped", options=options)
    complaint = r"task local_choices: native_head=200 and hold_back=50 cover every context .* mapped would"
    with pytest.raises(KvmapError, match=complaint):
        run_task(choices, pool, ChatOptions(), fewshot_seed=1)
    assert pool.reading.n_contexts == 0
    result = run_task(texts, pool, ChatOptions(), fewshot_seed=1)
    _, rows = summarise_tasks([result], n_resamples=10)
    (row,) = [row for row in rows if row["metric"] == "n_unmapped"]
    assert (row["task"], row["arm"], row["value"], row["n"]) == ("local_texts", "mapped", 1, 1)
