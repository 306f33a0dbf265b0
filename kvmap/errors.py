"""The base of every error that is the user's to mend: one message, no traceback, a non-zero exit."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class KvmapError(Exception):
    """A mistake in the input, or something outside kvmap that failed.

    The message names the key or file, the value got, what was expected and the remedy.
    """


class UnknownName(KvmapError):
    """A name that no registry, group or family knows."""

    def __init__(self, what: str, name: str, known: Iterable[str]) -> None:
        """Args: what kind of thing (`mapper`), the name got, and every name that would have done."""
        names = sorted(known)
        near = difflib.get_close_matches(name, names, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        super().__init__(f"unknown {what} {name!r}.{hint} Known: {', '.join(names)}")
