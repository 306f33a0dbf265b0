"""Outcomes, what a request may ask, and how answers are read and counted."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvmap.causes import CAUSES as GATE_CAUSES
from kvmap.serving.asking import Asked, BadAsking, read_asked
from kvmap.serving.outcome import (
    CAUSES,
    Outcome,
    OutcomeCounts,
    Published,
    read_outcome,
    read_published,
    refused,
)


def body(record: object) -> dict[str, object]:
    return {"choices": [], "kv_transfer_params": {"kvmap": record}}


def test_the_causes_are_those_of_the_gate_and_servings_own() -> None:
    assert GATE_CAUSES.items() <= CAUSES.items()
    assert set(CAUSES.values()) == {"fell_back", "unsupported"}


@pytest.mark.parametrize("cause", sorted(CAUSES))
def test_a_refusal_has_the_status_of_its_cause_and_one_line(cause: str) -> None:
    outcome = refused(cause, "two\nlines  here", n_prompt=7)
    assert (outcome.outcome, outcome.cause, outcome.n_prompt) == (CAUSES[cause], cause, 7)
    assert outcome.reason == "two lines here"


def test_an_answer_reads_back() -> None:
    outcome = Outcome("applied", None, "5 tokens mapped", 9, 5, 1, 2, 1, 1000, 0.1, 0.2)
    assert read_outcome(body(outcome.record())) == outcome
    assert read_outcome(body({**outcome.record(), "published": 3, "later": 1})) == outcome
    published = Published(3, 100, 0.5, output_pending=9)
    assert read_published(body(published.record())) == published
    assert "reason" not in published.record()


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"kv_transfer_params": None},
        body(None),
        body({}),
        body({"outcome": "odd"}),
        body({"published": "3"}),
    ],
)
def test_a_body_that_says_nothing_reads_as_nothing(answer: dict[str, object]) -> None:
    assert read_outcome(answer) is None
    assert read_published(answer) is None


def test_answers_are_counted_by_outcome_and_cause() -> None:
    counts = OutcomeCounts()
    for outcome in (
        Outcome("applied", None, "", n_mapped=5),
        refused("partial", ""),
        refused("partial", ""),
        refused("layout", ""),
    ):
        counts.add(outcome)
    for published in (Published(12), Published(0, reason="why")):
        counts.add_published(published)
    assert counts.record() == {
        "requests": 4,
        "applied": 1,
        "fell_back": 2,
        "unsupported": 1,
        "by_cause": {"layout": 1, "partial": 2},
        "mapped_tokens": 5,
        "published": 1,
        "published_tokens": 12,
    }


@pytest.mark.parametrize(
    "params", [None, {}, {"kvmap": None}, {"kvmap": {}}, {"kvmap": {"take": False}}, {"other": 1}]
)
def test_a_request_that_asks_nothing_is_left_alone(params: dict[str, object] | None) -> None:
    assert read_asked(params) is None


def test_a_request_is_read_and_unknown_keys_are_ignored() -> None:
    asked = read_asked(
        {"kvmap": {"take": True, "min_tokens": 64, "wait_seconds": 2, "require": "go", "later": []}}
    )
    assert asked == Asked(take=True, min_tokens=64, wait_seconds=2.0, require="go")


@pytest.mark.parametrize(
    ("record", "named"),
    [
        ([], "list"),
        ({"take": 1}, "take=1"),
        ({"take": True, "min_tokens": True}, "min_tokens=True"),
        ({"take": True, "min_tokens": "9"}, "min_tokens='9'"),
        ({"take": True, "wait_seconds": -1}, "wait_seconds"),
        ({"take": True, "wait_seconds": float("nan")}, "wait_seconds"),
        ({"take": True, "require": "yes"}, "require='yes'"),
    ],
)
def test_a_value_of_another_type_is_named(record: object, named: str) -> None:
    with pytest.raises(BadAsking, match=named):
        read_asked({"kvmap": record})


def test_the_light_parts_import_neither_vllm_nor_a_web_framework() -> None:
    names = [
        "asking",
        "background",
        "compatibility",
        "engine",
        "index",
        "keys",
        "manifest",
        "outcome",
        "parts",
        "store",
    ]
    code = "import sys\n" + "".join(f"import kvmap.serving.{name}\n" for name in names)
    code += "print([m for m in ('vllm', 'fastapi', 'uvicorn', 'httpx') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
