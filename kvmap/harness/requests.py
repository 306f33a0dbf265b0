"""What lm-eval asks of a model, as token ids: a continuation to be scored, or one to be written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from kvmap.errors import KvmapError
from kvmap.evaluation.answers import item_key

DEFAULT_NEW_TOKENS = 256  # lm-eval's own
_NEW_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_WITHOUT_EFFECT = ("do_sample", "temperature", "top_p", "top_k")


class Request(Protocol):
    """Something asked about a context."""

    @property
    def context(self) -> tuple[int, ...]:
        """Ids of what is read before; at least one."""

    @property
    def key(self) -> str:
        """Hash of all that is asked: two requests of one key have one answer."""


@dataclass(frozen=True)
class Score:
    """How likely is this continuation.

    Attributes:
        context: ids that are read; requests that share them share one prefill and one map.
        continuation: ids that are scored, at least one.
    """

    context: tuple[int, ...]
    continuation: tuple[int, ...]

    @cached_property
    def key(self) -> str:
        """Hash of context and continuation."""
        return item_key("score", self.context, self.continuation)


@dataclass(frozen=True)
class Generate:
    """What comes next, greedily.

    Attributes:
        context: ids that are read.
        stop: texts at which this answer ends, besides the end of text.
        max_new_tokens: tokens at most.
        repetition_penalty: as in transformers; None: what the model's own generation config says.
    """

    context: tuple[int, ...]
    stop: tuple[str, ...]
    max_new_tokens: int
    repetition_penalty: float | None = None

    @cached_property
    def key(self) -> str:
        """Hash of the context and of all that ends or shapes the answer."""
        stops = sorted(set(self.stop))
        return item_key("generate", self.context, stops, self.max_new_tokens, self.repetition_penalty)


def generation_settings(settings: Mapping[str, Any], task: str | None) -> tuple[list[str], int, float | None]:
    """Stops, number of tokens and repetition penalty of a request's generation settings.

    Raises:
        KvmapError: settings that greedy decoding cannot heed.
    """
    rest = dict(settings)
    until = rest.pop("until", None) or []
    stops = [until] if isinstance(until, str) else list(until)
    named = [rest.pop(name) for name in _NEW_TOKENS if rest.get(name) is not None]
    n_new = int(named[0]) if named else DEFAULT_NEW_TOKENS
    penalty = rest.pop("repetition_penalty", None)
    if rest.get("do_sample") or (rest.get("do_sample") is None and float(rest.get("temperature") or 0) > 0):
        raise KvmapError(
            f"task {task}: generation settings {dict(settings)} ask for sampling; kvmap decodes greedily, "
            "so that arms can be compared answer by answer; set do_sample=False with --gen_kwargs or "
            "generation_kwargs, or leave the task out"
        )
    unknown = {name: value for name, value in rest.items() if name not in _WITHOUT_EFFECT}
    if unknown or n_new < 1:
        raise KvmapError(
            f"task {task}: generation settings {unknown or {'max_gen_toks': n_new}}: kvmap knows until, "
            f"max_gen_toks (at least 1), repetition_penalty and do_sample=False; take the others out"
        )
    return stops, n_new, None if penalty is None else float(penalty)
