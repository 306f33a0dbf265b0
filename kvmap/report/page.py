"""What a report says, wherever it is shown: cells of text, pictures and links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Link:
    """A file of a run.

    Attributes:
        label: what the link is called.
        path: where the file lies; relative to the report once it is rendered.
    """

    label: str
    path: Path


Cell = str | Link


@dataclass(frozen=True)
class Grid:
    """A table of text.

    Attributes:
        title: with the unit, and what follows a ± or stands in brackets.
        columns: headers.
        rows: cells, as many as columns.
        n_left: columns set to the left, which name things; numbers are set to the right.
        breaks: rows above which a rule is drawn.
        note: what a reader must know, below the table.
        folded: shown only when asked for, where that is possible.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    n_left: int = 1
    breaks: Sequence[int] = ()
    note: str = ""
    folded: bool = False


@dataclass(frozen=True)
class Picture:
    """A figure on disk.

    Attributes:
        name: of its file, without `.png`.
        path: the file.
        caption: what is drawn, with units.
    """

    name: str
    path: Path
    caption: str


@dataclass(frozen=True)
class Card:
    """One headline number: what it is, its value, and its interval, count or comparison."""

    label: str
    value: str
    detail: str = ""


@dataclass(frozen=True)
class Section:
    """A part of the report under a heading of its own; left out where it holds nothing."""

    title: str
    lines: Sequence[str] = ()
    grids: Sequence[Grid] = ()
    pictures: Sequence[Picture] = ()

    def __bool__(self) -> bool:
        """Whether there is anything to show."""
        return bool(self.lines or self.grids or self.pictures)


@dataclass(frozen=True)
class Page:
    """A report.

    Attributes:
        title: of the page.
        lead: one line that says whose report this is, and how it ended.
        asked: what was done, in words.
        verdict: what came out, in words and numbers; the first line is the short answer.
        cards: headline numbers.
        sections: everything else, in reading order; of which Markdown keeps those in `paper`.
        paper: tables fit for a paper.
    """

    title: str
    lead: str
    asked: Sequence[str] = ()
    verdict: Sequence[str] = ()
    cards: Sequence[Card] = ()
    sections: Sequence[Section] = ()
    paper: Sequence[Grid] = field(default_factory=tuple)
