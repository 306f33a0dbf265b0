"""How long a prefill takes, from prompts that were read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmap.serving.gateway.estimate import PrefillEstimate


def learnt(*seen: tuple[int, float]) -> PrefillEstimate:
    estimate = PrefillEstimate()
    for n_tokens, seconds in seen:
        estimate.add(n_tokens, seconds)
    return estimate


def test_nothing_is_known_at_first() -> None:
    assert PrefillEstimate().seconds(100) is None


def test_a_line_is_found_again() -> None:
    estimate = learnt(*((n, 0.05 + 0.001 * n) for n in (100, 200, 400, 800)))
    assert estimate.seconds(1000) == pytest.approx(1.05)


def test_near_lengths_alone_say_nothing_of_far_ones() -> None:
    estimate = learnt((100, 0.1), (104, 0.2), (96, 0.12), (100, 0.11))
    assert estimate.seconds(110) == pytest.approx(0.115)
    assert estimate.seconds(1000) is None


def test_a_line_that_would_begin_below_zero_begins_at_zero() -> None:
    estimate = learnt((100, 0.01), (200, 0.1), (300, 0.3), (400, 0.5))
    found = estimate.seconds(10)
    assert found is not None
    assert found > 0


def test_what_says_nothing_is_not_learnt() -> None:
    assert learnt((0, 0.1), (-3, 0.1), (100, 0.0)).seconds(100) is None


@given(
    st.lists(st.tuples(st.integers(1, 10_000), st.floats(0.001, 10)), max_size=100), st.integers(1, 20_000)
)
def test_no_estimate_is_below_zero(seen: list[tuple[int, float]], n_tokens: int) -> None:
    found = learnt(*seen).seconds(n_tokens)
    assert found is None or found >= 0
