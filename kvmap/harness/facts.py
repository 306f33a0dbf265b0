"""What was read, cut off and mapped of each document that lm-eval's requests belong to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from kvmap.errors import KvmapError
from kvmap.evaluation.arms import check_something_maps
from kvmap.harness.requests import Request
from kvmap.mappers import Mapper
from kvmap.transfer import TransferOptions

Origin: TypeAlias = tuple[str, int]
"""Task and document that a request belongs to."""


class Asker(Protocol):
    """lm-eval's request, as far as it says who asks."""

    @property
    def task_name(self) -> str | None:
        """The task; None where it stands alone."""


@dataclass
class Facts:
    """What one document's requests came to; the largest of them, for rolling windows their sum.

    Attributes:
        n_context: context tokens read.
        n_truncated: context tokens cut off on the left, the same for every arm.
        n_mapped: context tokens that were mapped.
    """

    n_context: int = 0
    n_truncated: int = 0
    n_mapped: int = 0

    def add_request(self, n_context: int, n_truncated: int, n_mapped: int) -> None:
        """One more request of this document."""
        self.n_context = max(self.n_context, n_context)
        self.n_truncated = max(self.n_truncated, n_truncated)
        self.n_mapped = max(self.n_mapped, n_mapped)

    def add_window(self, n_context: int, n_mapped: int) -> None:
        """One more window of this document."""
        self.n_context += n_context
        self.n_mapped += n_mapped


def check_tasks_map(
    askers: Sequence[Asker],
    asked: Sequence[Request],
    arms: Mapping[str, Mapper | None],
    options: TransferOptions,
) -> None:
    """Refuses a task of which not one context would be mapped, before any model reads it.

    Requests without a task are somebody's own, and answered as they are.

    Args:
        askers: lm-eval's requests.
        asked: what each of them asks, in the same order.
        arms: the arms that can be run.
        options: how a cache is transferred.

    Raises:
        KvmapError: naming the task, the arms, the options and the longest context.
    """
    lengths: dict[str, list[int]] = {}
    for asker, question in zip(askers, asked, strict=True):
        if asker.task_name is not None:
            lengths.setdefault(asker.task_name, []).append(len(question.context))
    for task, of_task in lengths.items():
        try:
            check_something_maps(arms, of_task, options)
        except KvmapError as error:
            raise KvmapError(f"task {task}: {error}") from error
