"""The base of every error that is the user's to mend: one message, no traceback, a non-zero exit."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class KvmapError(Exception):
    """A mistake in the input, or something outside kvmap that failed.

    The message names the key or file, the value got, what was expected and the remedy.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        """How it crosses to the process that started the job: by message, whatever `__init__` takes."""
        return _with_message, (type(self), self.args, self.__dict__)


def _with_message(kind: type[KvmapError], arguments: tuple[Any, ...], state: dict[str, Any]) -> KvmapError:
    error = kind.__new__(kind)
    error.args = arguments
    error.__dict__.update(state)
    return error


class UnknownName(KvmapError):
    """A name that no registry, group or family knows."""

    def __init__(self, what: str, name: str, known: Iterable[str]) -> None:
        """Args: what kind of thing (`mapper`), the name got, and every name that would have done."""
        names = sorted(known)
        near = difflib.get_close_matches(name, names, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        super().__init__(f"unknown {what} {name!r}.{hint} Known: {', '.join(names)}")
