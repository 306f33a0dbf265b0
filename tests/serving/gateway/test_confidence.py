"""Confidence against its definition, and probabilities in the forms that vLLM has for them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmap.serving.gateway.confidence import (
    TokenOdds,
    Window,
    asks_for_odds,
    confidence,
    odds_of,
    without_odds,
)
from kvmap.serving.gateway.settings import ConfidenceSettings

LOG_PS = st.floats(-50, 0)


@given(st.lists(LOG_PS, min_size=1, max_size=9))
def test_mean_is_the_geometric_mean(log_ps: list[float]) -> None:
    product = math.prod(math.exp(log_p) for log_p in log_ps)
    found = confidence("mean", [TokenOdds(log_p) for log_p in log_ps])
    assert found == pytest.approx(product ** (1 / len(log_ps)), rel=1e-6, abs=1e-12)


@given(st.lists(st.floats(0.01, 1.0), min_size=2, max_size=10))
def test_entropy_of_a_whole_distribution_is_its_entropy(weights: list[float]) -> None:
    shares = [weight / sum(weights) for weight in weights]
    odds = TokenOdds(0.0, tuple(math.log(share) for share in shares))
    assert odds.entropy == pytest.approx(-sum(p * math.log(p) for p in shares), abs=1e-9)


@given(st.lists(st.floats(0.01, 1.0), min_size=3, max_size=10), st.integers(1, 9))
def test_entropy_of_the_likeliest_is_no_more_than_that_of_all(weights: list[float], top: int) -> None:
    shares = sorted((weight / sum(weights) for weight in weights), reverse=True)
    log_ps = tuple(math.log(share) for share in shares)
    assert TokenOdds(0.0, log_ps[:top]).entropy <= TokenOdds(0.0, log_ps).entropy + 1e-9


@given(st.lists(st.tuples(LOG_PS, st.lists(LOG_PS, max_size=5)), min_size=1, max_size=9))
def test_every_measure_is_a_number_from_0_to_1(tokens: list[tuple[float, list[float]]]) -> None:
    odds = [TokenOdds(taken, tuple(top)) for taken, top in tokens]
    for measure in ("mean", "first", "entropy"):
        found = confidence(measure, odds)
        assert found is not None
        assert 0 <= found <= 1


def test_of_no_token_there_is_none() -> None:
    assert confidence("mean", []) is None
    assert confidence("off", [TokenOdds(-1.0)]) is None


CHAT = {
    "logprobs": {
        "content": [{"token": "a", "logprob": -1.0, "top_logprobs": [{"logprob": -0.5}, {"logprob": -1.0}]}]
    }
}
COMPLETION = {"logprobs": {"token_logprobs": [-1.0], "top_logprobs": [{"b": -0.5, "a": -1.0}]}}


@pytest.mark.parametrize(("kind", "choice"), [("chat", CHAT), ("completion", COMPLETION)])
def test_both_forms_say_the_same(kind: Any, choice: dict[str, Any]) -> None:
    assert odds_of(kind, choice) == [TokenOdds(-1.0, (-0.5, -1.0))]


@pytest.mark.parametrize("kind", ["chat", "completion"])
@pytest.mark.parametrize("logprobs", [None, {}, {"content": None, "token_logprobs": None}])
def test_no_probabilities_are_none(kind: Any, logprobs: Any) -> None:
    assert odds_of(kind, {"logprobs": logprobs}) == []
    assert odds_of(kind, {}) == []


def test_a_probability_of_zero_is_a_number() -> None:
    odds = odds_of("completion", {"logprobs": {"token_logprobs": [None, -9999.0], "top_logprobs": [None]}})
    assert confidence("mean", odds) == 0.0


@pytest.mark.parametrize(
    ("kind", "wanted", "asked"),
    [
        ("chat", {}, {"logprobs": True, "top_logprobs": 5}),
        ("chat", {"logprobs": True, "top_logprobs": 9}, {"logprobs": True, "top_logprobs": 9}),
        ("completion", {}, {"logprobs": 5}),
        ("completion", {"logprobs": 9}, {"logprobs": 9}),
    ],
)
def test_an_engine_is_asked_for_the_most_that_anyone_wants(
    kind: Any, wanted: dict[str, Any], asked: dict[str, Any]
) -> None:
    body = dict(wanted)
    asks_for_odds(kind, body, ConfidenceSettings(measure="entropy"))
    assert body == asked


def test_a_completion_keeps_the_taken_token_and_as_many_as_were_asked_for() -> None:
    tops = {"a": -1.0, "b": -2.0, "c": -3.0}
    choice: dict[str, Any] = {"logprobs": {"token_logprobs": [-1.0], "top_logprobs": [dict(tops)]}}
    without_odds("completion", choice, {"logprobs": 1})
    assert choice["logprobs"]["top_logprobs"] == [{"a": -1.0, "b": -2.0}]
    without_odds("completion", choice, {"logprobs": 0})
    assert choice["logprobs"]["top_logprobs"] == [{"a": -1.0}]
    without_odds("completion", choice, {})
    assert choice["logprobs"] is None


@pytest.mark.parametrize(("measure", "needed"), [("mean", 3), ("entropy", 3), ("first", 1)])
def test_a_window_is_full_when_there_is_enough_to_judge_by(measure: Any, needed: int) -> None:
    window, seen = Window(ConfidenceSettings(measure=measure, first_tokens=3)), 0
    while not window.full:
        window.odds.append(TokenOdds(-0.1))
        seen += 1
    assert seen == needed
