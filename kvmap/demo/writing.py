"""Events to a stream: lines of text, coloured on a terminal alone, or one JSON object a line."""

from __future__ import annotations

import json
import math
from typing import Any, Protocol, TextIO

from kvmap.demo.events import Event

RICH_STYLES = {"answer": "bold", "detail": "dim", "hand_off": "yellow", "refusal": "red", "plain": ""}


class Writer(Protocol):
    """Where events go."""

    def write(self, event: Event) -> None:
        """One event, at once."""

    def echo(self, prompt: str, line: str) -> None:
        """A line that was read and that no terminal has shown."""


class TextWriter:
    """Lines of text. Without a terminal there is no colour, whatever the environment says."""

    def __init__(self, stream: TextIO) -> None:
        """Args: where to."""
        from rich.console import Console

        self._console = Console(file=stream, force_terminal=stream.isatty(), soft_wrap=True)

    def write(self, event: Event) -> None:
        """See `Writer.write`."""
        for text, style in event.lines():
            self._print(text, RICH_STYLES[style])

    def echo(self, prompt: str, line: str) -> None:
        """See `Writer.echo`."""
        self._print(f"{prompt}{line}", "")

    def _print(self, text: str, style: str) -> None:
        self._console.print(text, style=style, markup=False, highlight=False)
        self._console.file.flush()


class JsonWriter:
    """One JSON object a line, with the event's name under `event`. Lines read are not repeated."""

    def __init__(self, stream: TextIO) -> None:
        """Args: where to."""
        self._stream = stream

    def write(self, event: Event) -> None:
        """See `Writer.write`."""
        record = {name: _plain(value) for name, value in event.record().items()}
        print(json.dumps(record, ensure_ascii=False), file=self._stream, flush=True)

    def echo(self, prompt: str, line: str) -> None:
        """See `Writer.echo`."""


def _plain(value: Any) -> Any:
    """As strict JSON can hold it: NaN and infinities by their names."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
