"""One task set under every arm: lm-eval makes prompts and judges answers, the pool answers for all arms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvmap.errors import KvmapError
from kvmap.evaluation.answers import CONTENT_CHARACTERS, item_key
from kvmap.harness.catalogue import LoadedTask, metric_name
from kvmap.harness.facts import Facts
from kvmap.harness.pool import Pool
from kvmap.progress import track


@dataclass(frozen=True)
class ChatOptions:
    """How a prompt becomes a conversation.

    Attributes:
        apply_template: whether the tokenizer's chat template is applied.
        system_instruction: what the system says; None: nothing but the task's description.
        fewshot_as_multiturn: examples as turns of their own, instead of in one turn with the question.
    """

    apply_template: bool = False
    system_instruction: str | None = None
    fewshot_as_multiturn: bool = True


@dataclass(frozen=True)
class Document:
    """One document under one arm.

    Attributes:
        id: tells it from the entry's others: its number, and its task's name where the entry is a group.
        arm: which arm.
        values: what its answer is worth by metric, with the filter after a comma where there is one. A metric
            that is made of all documents together, such as perplexity per word, has no value here.
        logliks: per choice, nats; None where there are no choices.
        generated: the answer before any filter; None where none was asked for.
        extracted: what each filter made of that.
        target: the right answer as lm-eval puts it.
        content: hash of the document and its prompt: what was asked.
        facts: what was read, cut off and mapped; None where nothing was asked.
    """

    id: str
    arm: str
    values: dict[str, float]
    logliks: tuple[float, ...] | None
    generated: str | None
    extracted: dict[str, str]
    target: str
    content: str
    facts: Facts | None

    def row(self, accuracy: str | None) -> dict[str, Any]:
        """One row of a table.

        Args:
            accuracy: the metric that is called so.
        """
        return {
            "id": self.id,
            "arm": self.arm,
            "accuracy": None if accuracy is None else self.values.get(accuracy),
            **{flat(metric): value for metric, value in self.values.items()},
            "logliks": None if self.logliks is None else " ".join(f"{value:.6f}" for value in self.logliks),
            "generated": self.generated,
            **{flat(f"extracted,{name}"): text for name, text in self.extracted.items()},
            "target": self.target,
            "n_context": self.facts and self.facts.n_context,
            "n_truncated": self.facts and self.facts.n_truncated,
            "n_mapped": self.facts and self.facts.n_mapped,
            "content": self.content,
        }


@dataclass(frozen=True, eq=False)
class TaskResults:
    """One entry under every arm.

    Attributes:
        task: the entry.
        by_arm: arm to lm-eval's own results, samples among them.
        facts: arm to task and document to what was read, cut off and mapped.
    """

    task: LoadedTask
    by_arm: dict[str, dict[str, Any]]
    facts: dict[str, dict[tuple[str, int], Facts]]

    def documents(self) -> Iterator[Document]:
        """Every document under every arm, the same ones in the same order."""
        several = len(self.task.tasks) > 1
        for arm, results in self.by_arm.items():
            for name, samples in results["samples"].items():
                by_filter: dict[int, list[Mapping[str, Any]]] = {}
                for sample in samples:
                    by_filter.setdefault(sample["doc_id"], []).append(sample)
                for number, found in by_filter.items():
                    title = f"{name}/{number}" if several else str(number)
                    facts = self.facts[arm].get((name, number))
                    yield _document(title, arm, self.task.tasks[name], found, facts)

    def record(self) -> dict[str, Any]:
        """What was asked and how, by task: version, examples, filters, metrics, data."""
        results = next(iter(self.by_arm.values()))
        return {
            name: {
                "version": results["versions"].get(name),
                "num_fewshot": results["n-shot"].get(name),
                "n_documents": results["n-samples"][name]["effective"],
                "of": results["n-samples"][name]["original"],
                "data": [task.DATASET_PATH, task.DATASET_NAME],
                "output_type": task.OUTPUT_TYPE,
                "filters": _filters(task),
                "metrics": sorted(task.aggregation()),
                "generation": dict(task.get_config("generation_kwargs") or {}),
            }
            for name, task in self.task.tasks.items()
        }


def run_task(
    task: LoadedTask, pool: Pool, chat: ChatOptions, *, fewshot_seed: int, rolling_context: int = 1
) -> TaskResults:
    """Asks every arm of the pool the same documents, in prompts with the same examples.

    Args:
        task: the entry.
        pool: the models.
        chat: how a prompt becomes a conversation.
        fewshot_seed: of the draw of examples, where a task draws them.
        rolling_context: tokens before each window of a text that is scored whole.

    Raises:
        KvmapError: a tokenizer without the chat template that is asked for, arms whose prompts differ, or a
            task of which not one context would be mapped (texts that are scored whole aside, see
            `KvmapLM.loglikelihood_rolling`).
    """
    from lm_eval.evaluator import evaluate

    from kvmap.harness.adapter import KvmapLM

    if chat.apply_template and getattr(pool.tokenizer, "chat_template", None) is None:
        raise KvmapError(
            "evaluation.chat.apply_template=true: the tokenizer of these models has no chat template; take "
            "instruction-tuned models, or leave it false"
        )
    results = TaskResults(task, {}, {})
    for arm in pool.arms:
        model = KvmapLM(pool, arm, rolling_context=rolling_context)
        for one in task.tasks.values():
            one.set_fewshot_seed(seed=fewshot_seed)
        with _own_progress():
            results.by_arm[arm] = evaluate(
                model,
                task.found,
                limit=task.spec.limit,
                bootstrap_iters=0,
                log_samples=True,
                system_instruction=chat.system_instruction,
                apply_chat_template=chat.apply_template,
                fewshot_as_multiturn=chat.apply_template and chat.fewshot_as_multiturn,
            )
        results.facts[arm] = model.facts
        _check_alike(task.spec.title, results.by_arm)
    return results


@contextmanager
def _own_progress() -> Iterator[None]:
    """Building prompts is shown as all work is: lm-eval's own bars know neither our terminal nor our log."""
    from lm_eval.api import task

    theirs = task.tqdm
    task.tqdm = lambda documents, total=None: track(documents, total, "lm-eval prompts")
    try:
        yield
    finally:
        task.tqdm = theirs


def _filters(task: Any) -> dict[str, list[str]]:
    """Each filter by name, and its steps as the task's file gives them."""
    steps = {one["name"]: one["filter"] for one in task.get_config("filter_list") or ()}
    return {one.name: [str(step) for step in steps.get(one.name, ())] for one in task._filters}


def flat(metric: str) -> str:
    """A metric, with its filter, as part of a key or the name of a column: without commas and dashes."""
    return metric.replace(",", "_").replace("-", "_")


def _document(
    title: str, arm: str, task: Any, samples: Sequence[Mapping[str, Any]], facts: Facts | None
) -> Document:
    """One document's samples, one for each filter."""
    first = samples[0]
    values = {
        metric_name(metric, sample["filter"]): float(sample[metric])
        for sample in samples
        for metric in sample["metrics"]
        if isinstance(sample[metric], int | float)
    }
    choices = task.OUTPUT_TYPE == "multiple_choice"
    writes = task.OUTPUT_TYPE == "generate_until"
    logliks = [float(answer[0][0]) for answer in first["resps"]] if choices else []
    if choices and "acc_mutual_info" in first["metrics"]:
        del logliks[len(logliks) // 2 :]  # asked a second time, without their context
    return Document(
        id=title,
        arm=arm,
        values=values,
        logliks=tuple(logliks) if choices else None,
        generated=str(first["resps"][0][0]) if writes else None,
        extracted={s["filter"]: str(s["filtered_resps"][0]) for s in samples} if writes else {},
        target=str(first["target"]),
        content=item_key(first["doc_hash"], first["prompt_hash"], first["target_hash"])[:CONTENT_CHARACTERS],
        facts=facts,
    )


def _check_alike(title: str, by_arm: Mapping[str, Mapping[str, Any]]) -> None:
    """Arms are compared document by document, so they must have been asked the same."""
    (first, expected), *_, (arm, found) = [next(iter(by_arm.items())), *by_arm.items()]
    if _prompts(expected) != _prompts(found):
        raise KvmapError(
            f"{title}: the prompts of arm {arm!r} are not those of arm {first!r}; the task draws them by "
            "chance without a seed, so its arms cannot be compared: leave it out"
        )


def _prompts(results: Mapping[str, Any]) -> list[tuple[str, int, str]]:
    samples = results["samples"]
    return [(name, row["doc_id"], row["prompt_hash"]) for name, rows in samples.items() for row in rows]
