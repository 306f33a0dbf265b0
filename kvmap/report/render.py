"""A report as one HTML file that needs nothing else, and as Markdown for a paper."""

from __future__ import annotations

import base64
import os
import re
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from kvmap.report.page import Cell, Grid, Link, Page, Picture
from kvmap.report.verdict import BETTER, WORSE

LONG = 60  # characters from which a cell of text may wrap
CSS_PIXELS = 2  # of the picture to one of the page: 300 dots an inch are drawn for print


def to_html(page: Page, folder: Path) -> str:
    """One self-contained page: styles inside, figures as data, links to files relative to `folder`.

    Every text is escaped: names of runs, tasks and models are whatever a user wrote.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("kvmap.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    template = environment.get_template("report.html.jinja")
    return template.render(page=page, sections=list(_sections(page, folder)))


def _sections(page: Page, folder: Path) -> Iterator[dict[str, Any]]:
    used = {"asked"}
    for section in page.sections:
        yield {
            "id": _unused(_slug(section.title), used),
            "title": section.title,
            "lines": section.lines,
            "grids": [_html_grid(grid, folder) for grid in section.grids],
            "pictures": [_html_picture(picture, used) for picture in section.pictures],
        }


def _html_grid(grid: Grid, folder: Path) -> dict[str, Any]:
    return {
        "title": grid.title,
        "columns": grid.columns,
        "headed": any(grid.columns),
        "n_left": grid.n_left,
        "note": grid.note,
        "folded": grid.folded,
        "rows": [
            {
                "rule": place in grid.breaks,
                "cells": [_html_cell(cell, column < grid.n_left, folder) for column, cell in enumerate(row)],
            }
            for place, row in enumerate(grid.rows)
        ],
    }


def _html_cell(cell: Cell, left: bool, folder: Path) -> dict[str, str]:
    text = cell.label if isinstance(cell, Link) else cell
    kinds = ["left"] if left else []
    kinds += [text] if text in (BETTER, WORSE) else []
    kinds += ["long"] if left and len(text) > LONG else []
    href = relative(cell.path, folder) if isinstance(cell, Link) else ""
    return {"text": text, "kind": " ".join(kinds), "href": href}


def _html_picture(picture: Picture, used: set[str]) -> dict[str, Any]:
    content = picture.path.read_bytes()
    width, height = struct.unpack(">II", content[16:24])  # of the PNG's header
    return {
        "id": _unused(f"figure-{_slug(picture.name)}", used),
        "data": f"data:image/png;base64,{base64.b64encode(content).decode('ascii')}",
        "width": width // CSS_PIXELS,
        "height": height // CSS_PIXELS,
        "alt": f"Figure: {picture.caption}",
        "caption": picture.caption,
    }


def relative(path: Path, folder: Path) -> str:
    """The address of a file from a page in `folder`: relative, with what an address may not hold escaped."""
    return quote(Path(os.path.relpath(path.resolve(), folder.resolve())).as_posix(), safe="/")


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "part"


def _unused(name: str, used: set[str]) -> str:
    """The name, with a number behind it where it is taken; ids of a page are unique."""
    found, number = name, 2
    while found in used:
        found, number = f"{name}-{number}", number + 1
    used.add(found)
    return found


def to_markdown(page: Page, folder: Path) -> str:
    """Verdict and the tables fit for a paper, in GitHub's Markdown."""
    lines = [f"# {_escaped(page.title)}", "", _escaped(page.lead), ""]
    for part in (page.asked, page.verdict):
        lines += [*(f"* {_escaped(line)}" for line in part), ""] if part else []
    for grid in page.paper:
        lines += [*markdown_table(grid, folder), ""]
    return "\n".join(lines).rstrip() + "\n"


def markdown_table(grid: Grid, folder: Path) -> list[str]:
    """Title, a table, its note."""
    lines = [f"**{_escaped(grid.title)}**", ""]
    if grid.rows:
        rule = [":---" if place < grid.n_left else "---:" for place in range(len(grid.columns))]
        body = ([_markdown_cell(cell, folder) for cell in row] for row in grid.rows)
        lines += [_line(map(_escaped, grid.columns)), _line(rule), *map(_line, body)]
    return [*lines, *(["", _escaped(grid.note)] if grid.note else [])]


def _markdown_cell(cell: Cell, folder: Path) -> str:
    if isinstance(cell, Link):
        return f"[{_escaped(cell.label)}]({relative(cell.path, folder)})"
    return _escaped(cell) if cell else ""


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escaped(text: str) -> str:
    """Text in which nothing is taken for markup, in a cell or elsewhere, and which stays on one line."""
    text = " ".join(text.split())
    text = re.sub(r"([\\`*|<>]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))", r"\\\1", text)
    # A bracket opens a link only where a parenthesis follows its end; intervals stay as they are.
    return re.sub(r"\](?=[(\[:])", r"\\]", text)
