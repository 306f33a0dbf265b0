"""lm-eval's tasks by name: found, set as asked, their data read; what cannot be read is said once for all."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvmap.errors import KvmapError, UnknownName

OWN_TASKS = Path(__file__).parent


class UnknownTask(KvmapError):
    """A name that neither lm-eval, nor kvmap, nor the given folder has a task of."""


class UnreadableTask(KvmapError):
    """Tasks whose data cannot be had."""


@dataclass(frozen=True)
class TaskSpec:
    """One entry of a task set.

    Attributes:
        name: of a task, a group or a tag that lm-eval knows, or a file of one.
        label: what its results are counted under; None: its name.
        num_fewshot: examples before each question; None: as the task says, 0 where it says nothing.
        limit: the first so many documents (of each task of a group); None: all.
        metric: what is called its accuracy, `acc_norm` or, with a filter, `exact_match,strict-match`; None:
            the first of acc_norm, acc and exact_match that it has.
        generation: settings that go before the task's own, such as `max_gen_toks`.
    """

    name: str
    label: str | None = None
    num_fewshot: int | None = None
    limit: int | None = None
    metric: str | None = None
    generation: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """What its results are counted under."""
        return self.label or Path(self.name).stem


@dataclass(frozen=True, eq=False)
class LoadedTask:
    """An entry with lm-eval's tasks, their documents read.

    Attributes:
        spec: the entry.
        found: lm-eval's own record: tasks and groups by name.
    """

    spec: TaskSpec
    found: dict[str, Any]

    @property
    def tasks(self) -> dict[str, Any]:
        """lm-eval's tasks by name; several where the entry names a group."""
        return dict(self.found["tasks"])


def load_tasks(specs: Sequence[TaskSpec], include_path: str | None = None) -> list[LoadedTask]:
    """Finds every entry, sets it as asked, and reads its documents.

    Args:
        specs: the entries.
        include_path: folder with YAML files of further tasks; they go before lm-eval's own of their name.

    Raises:
        UnknownTask: a task that nobody knows.
        UnreadableTask: naming every entry whose data cannot be had, the data set and what to do.
        UnknownName: a metric that a task does not have.
        KvmapError: settings that a task does not take.
    """
    manager = _manager([spec.name for spec in specs], include_path)
    loaded, failed = [], dict[str, str]()
    for spec in specs:
        try:
            found = manager.load([spec.name])
        except ImportError as error:  # many tasks judge answers with packages of their own
            failed[spec.title] = f"a package that it needs ({_in_short(error)})"
            continue
        except Exception as error:
            if not _is_of_data(error):
                raise
            failed[spec.title] = f"{_data_of(manager, spec.name)} ({_in_short(error)})"
            continue
        for task in found["tasks"].values():
            _set(task, spec)
            _check_metric(task, spec)
        loaded.append(LoadedTask(spec, dict(found)))
    if failed:
        raise UnreadableTask(_unreadable(failed))
    return loaded


def _is_of_data(error: Exception) -> bool:
    """Whether reading a data set fails so: no network, no file, no such configuration, another format.

    The libraries that read have types of their own besides, some of them without a common base. What is none
    of these, such as an AttributeError, is a mistake in the program or in a task's file.
    """
    library = type(error).__module__.partition(".")[0]
    return isinstance(error, OSError | ValueError | RuntimeError) or library in (
        "datasets",
        "huggingface_hub",
    )


def _manager(names: Sequence[str], include_path: str | None) -> Any:
    """lm-eval's index of tasks; its own 14,000 files are read only if a name is not found without them."""
    from lm_eval.tasks import TaskManager

    paths = [str(OWN_TASKS), *([] if include_path is None else [str(Path(include_path).expanduser())])]
    manager = TaskManager(include_path=paths, include_defaults=False)
    if any(name not in manager.task_index and not Path(name).is_file() for name in names):
        manager = TaskManager(include_path=paths)
    for name in names:
        if name not in manager.task_index and not Path(name).is_file():
            near = difflib.get_close_matches(name, manager.task_index, n=3)
            hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
            raise UnknownTask(
                f"evaluation.tasks: no task {name!r} among the {len(manager.task_index)} known.{hint} "
                "`lm_eval ls tasks` lists lm-eval's; tasks of your own lie in evaluation.include_path"
            )
    return manager


def _set(task: Any, spec: TaskSpec) -> None:
    own = task.get_config("num_fewshot")
    if spec.num_fewshot is None:
        task.set_config("num_fewshot", own or 0)
    elif own == 0 and spec.num_fewshot:
        raise KvmapError(
            f"evaluation.tasks: {spec.title}: num_fewshot={spec.num_fewshot}, but {task.task_name} is to be "
            "asked without examples (num_fewshot: 0 in its file); leave num_fewshot out"
        )
    else:
        task.set_config("num_fewshot", spec.num_fewshot)
    if spec.generation:
        if task.OUTPUT_TYPE != "generate_until":
            raise KvmapError(
                f"evaluation.tasks: {spec.title}: generation={dict(spec.generation)}, but {task.task_name} "
                f"generates nothing ({task.OUTPUT_TYPE}); leave generation out"
            )
        task.set_config("generation_kwargs", dict(spec.generation), update=True)


def _check_metric(task: Any, spec: TaskSpec) -> None:
    """Refuse a metric that the task has not, with the nearest that it has."""
    names = metric_names(task)
    if spec.metric is not None and spec.metric not in names and not _names_metrics_as_it_goes(task):
        raise UnknownName(f"metric of {task.task_name} (evaluation.tasks)", spec.metric, names)


def metric_names(task: Any) -> list[str]:
    """What may be asked of a task: each metric alone, and with each filter that is one."""
    filters = [one.name for one in task._filters]
    return list(
        dict.fromkeys(
            name
            for metric in task.aggregation()
            for name in (metric, *(metric_name(metric, filter_name) for filter_name in filters))
        )
    )


def metric_name(metric: str, filter_name: str) -> str:
    """lm-eval's name of a metric, with the filter after a comma where it is one."""
    return metric if filter_name in ("", "none") else f"{metric},{filter_name}"


def _names_metrics_as_it_goes(task: Any) -> bool:
    """Whether a metric of the task may come out as several, which nobody knows before the first answer.

    A function that is not lm-eval's own (of the task's file, or of the library `evaluate`) may give a record.
    """
    from lm_eval.api.registry import METRIC_REGISTRY

    if task.OUTPUT_TYPE != "generate_until" or task.get_config("process_results") is not None:
        return False
    return any(metric not in METRIC_REGISTRY for metric in task.aggregation())


def _data_of(manager: Any, name: str) -> str:
    """The data sets that a task, or the tasks of a group, read."""
    sets = dict.fromkeys(_data_sets(manager, name, set()))
    shown = ", ".join(sets) or "its data set"
    return f"the data set {shown}" if len(sets) == 1 else shown


def _data_sets(manager: Any, name: str, seen: set[str]) -> Iterator[str]:
    entry = manager.task_index.get(name)
    if entry is None or name in seen:
        return
    seen.add(name)
    config = entry.cfg or {}
    if config.get("dataset_path"):
        yield str(config["dataset_path"])
    for child in _children(entry):
        yield from _data_sets(manager, child, seen)


def _children(entry: Any) -> Iterator[str]:
    """Names of the tasks of a group, or of those under a tag (whose own `tags` they are)."""
    members = (entry.cfg or {}).get("task") if entry.kind.name == "GROUP" else None
    if entry.kind.name == "TAG":
        members = sorted(entry.tags)
    for member in members if isinstance(members, list) else ():
        yield member if isinstance(member, str) else str(member.get("task") or member.get("group"))


def _in_short(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."


def _unreadable(failed: Mapping[str, str]) -> str:
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    why = " HF_HUB_OFFLINE is set, so nothing is fetched." if offline else ""
    lines = "".join(f"\n  - {title}: {what}" for title, what in failed.items())
    return (
        f"evaluation.tasks: {len(failed)} cannot be read.{why}{lines}\n"
        "On a machine that reaches the hub, run the same tasks once (any small model will do) and copy "
        "~/.cache/huggingface; or write their questions as files (evaluation=local), or as YAML tasks over "
        "local files (evaluation.include_path), or leave them out. Without a network there are "
        "evaluation=tiny and evaluation.tasks=[mmlu_dev]"
    )
