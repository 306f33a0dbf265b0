"""Part of stage `evaluate`: lm-eval's tasks, every arm on the same items."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from kvmap.config.schema import EvaluationConfig
from kvmap.errors import KvmapError
from kvmap.evaluation.arms import available, unavailable
from kvmap.harness.catalogue import LoadedTask, TaskSpec, load_tasks
from kvmap.harness.pool import PROTOCOL, Pool
from kvmap.harness.runner import ChatOptions, TaskResults, run_task
from kvmap.harness.summary import accuracy_of, measures, summarise_tasks
from kvmap.mappers import Mapper
from kvmap.stages.context import Context
from kvmap.stages.evaluate.book import answers_for, reuse_noted
from kvmap.stages.evaluate.ledger import kept


def run(ctx: Context, arms: Mapping[str, Mapper | KvmapError | None]) -> list[dict[str, Any]]:
    """Ask every arm the run's tasks; each document goes to table `tasks_items`, the metrics to the run.

    What was asked and how (versions, examples, filters, limits, seeds) stands in run.json under `tasks`.
    """
    evaluation = ctx.cfg.evaluation
    if not evaluation.tasks:
        return []
    loaded = load_tasks(specs(evaluation), evaluation.include_path)
    protocol = PROTOCOL | {"batch_size": evaluation.batch_size}
    answers = {arm: answers_for(ctx, arm, protocol) for arm in available(arms)}
    pool = Pool(
        ctx.pair,
        arms,
        ctx.options,
        batch_size=evaluation.batch_size,
        max_tokens=evaluation.max_tokens,
        sequential=evaluation.sequential,
        answers=answers,
    )
    results: list[TaskResults] = []
    with kept(ctx, "tasks_items") as ledger, reuse_noted(ctx, "tasks", answers):
        for task in loaded:
            result = _asked(ctx, task, pool)
            chosen = accuracy_of(measures(result), task.spec.metric)
            accuracy = None if chosen is None else chosen.metric
            _note(ctx, result, pool, accuracy)
            ledger.add({"task": task.spec.title, **document.row(accuracy)} for document in result.documents())
            results.append(result)
    metrics, rows = summarise_tasks(
        results,
        unavailable=unavailable(arms),
        n_resamples=evaluation.bootstrap_samples,
        seed=evaluation.seed,
    )
    ctx.run.log(metrics)
    return rows


def specs(evaluation: EvaluationConfig) -> list[TaskSpec]:
    """The entries of `evaluation.tasks`; a plain name stands for an entry of that name."""
    return [
        TaskSpec(name=entry) if isinstance(entry, str) else TaskSpec(**entry) for entry in evaluation.tasks
    ]


def _asked(ctx: Context, task: LoadedTask, pool: Pool) -> TaskResults:
    evaluation = ctx.cfg.evaluation
    chat = ChatOptions(
        evaluation.chat.apply_template,
        evaluation.chat.system_instruction,
        evaluation.chat.fewshot_as_multiturn,
    )
    return run_task(
        task,
        pool,
        chat,
        fewshot_seed=evaluation.fewshot_seed,
        rolling_context=evaluation.rolling_context,
    )


def _note(ctx: Context, result: TaskResults, pool: Pool, accuracy: str | None) -> None:
    """What was asked and how, as facts of the run."""
    evaluation, spec = ctx.cfg.evaluation, result.task.spec
    facts = {
        "tasks": result.record(),
        "limit": spec.limit,
        "accuracy": accuracy,
        "fewshot_seed": evaluation.fewshot_seed,
        "chat": asdict(evaluation.chat),
        "max_length": pool.limit,
        "rolling_context": evaluation.rolling_context,
        "lm_eval": version("lm_eval"),
    }
    ctx.run.note(tasks={spec.title: facts})
