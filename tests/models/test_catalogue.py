"""docs/families.md says what the code does: its tables but for the measured columns, which are bounded."""

from __future__ import annotations

import re

import pytest

from kvmap.models.families import FAMILIES, REFUSED
from tests.models.catalogue import DOCUMENT, facts, filled, refused, supported, tables, wrappers
from tests.tiny_random_models import FAMILIES as TINY

STALE = "docs/families.md is stale: run python -m tests.models.catalogue"


@pytest.fixture(scope="module")
def document() -> str:
    return DOCUMENT.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["supported", "wrappers", "refused"])
def test_the_document_says_what_the_code_does(document: str, name: str) -> None:
    table = next(table for table in tables(measured=False) if table.name == name)
    expected = [row[: len(table.head) - table.n_measured] for row in table.rows]
    assert facts(document, table) == expected, STALE


def test_every_error_is_there_and_within_its_bound(document: str) -> None:
    for table in (supported(measured=False), wrappers(measured=False)):
        section = document.split(f"<!-- table: {table.name} -->\n")[1].split("\n<!-- end -->")[0]
        for line in section.split("\n")[2:]:
            for cell in [cell.strip() for cell in line.strip("|").split("|")][-table.n_measured :]:
                assert cell == "–" or float(cell) <= 1e-4, line


def test_the_identity_holds_on_at_least_twenty_classes() -> None:
    classes = {type(TINY[name]()).__name__ for name in TINY}
    assert len(classes) >= 20
    assert len(supported(measured=False).rows) == len(FAMILIES)


def without_versions(document: str) -> str:
    """The document names the versions it was written with; tests run with others too."""
    return re.sub(r"(transformers|torch) \d+\.\d+\.\d+", r"\1", document)


def test_filling_in_keeps_the_rest(document: str) -> None:
    assert without_versions(filled(document, [refused()])) == without_versions(document)
    assert sum(len(row[0].split(", ")) for row in refused().rows) == len(REFUSED)
