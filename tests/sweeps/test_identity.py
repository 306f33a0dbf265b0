"""What a job is known by."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest

from kvmap.sweeps.identity import job_identity

CONFIG = {
    "mapper": {"top_k": 2, "ridge_lambda": 1e-4, "tuning": {"cross_ratio": [1.0, math.inf]}},
    "pair": {"name": "a/b", "source": {"id": "x", "revision": None}},
    "seed": 0,
}


def changed(**settings: object) -> dict[str, object]:
    return {**CONFIG, **settings}


def test_it_is_sixteen_hexadecimal_digits_and_the_same_in_another_process() -> None:
    program = (
        f"import math\nfrom math import inf\nfrom kvmap.sweeps.identity import job_identity\n"
        f"print(job_identity({CONFIG!r}))"
    )
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == job_identity(CONFIG)
    assert len(job_identity(CONFIG)) == 16
    int(job_identity(CONFIG), 16)


@pytest.mark.parametrize("name", ["outputs", "study", "threads", "tracking", "sweep", "hydra"])
def test_where_it_is_kept_changes_nothing(name: str) -> None:
    assert job_identity(changed(**{name: {"any": 1}})) == job_identity(CONFIG)


@pytest.mark.parametrize(
    "settings",
    [
        {"seed": 1},
        {"seed": False},
        {"seed": "0"},
        {"stages": ["fit"]},
        {"mapper": {**CONFIG["mapper"], "top_k": [2]}},  # type: ignore[dict-item]
        {"mapper": {**CONFIG["mapper"], "tuning": {"cross_ratio": [1.0, "inf"]}}},  # type: ignore[dict-item]
        {"mapper": {**CONFIG["mapper"], "tuning": {"cross_ratio": [math.inf, 1.0]}}},  # type: ignore[dict-item]
    ],
)
def test_every_other_setting_makes_another(settings: dict[str, object]) -> None:
    assert job_identity(changed(**settings)) != job_identity(CONFIG)


def test_neither_order_nor_spelling_counts() -> None:
    reverse = json.loads(json.dumps({"seed": 0.0, "pair": CONFIG["pair"]}))
    reverse["pair"] = dict(reversed(reverse["pair"].items()))
    mapper = {"tuning": {"cross_ratio": (1, math.inf)}, "ridge_lambda": 0.0001, "top_k": 2.0}
    assert job_identity({**reverse, "mapper": mapper}) == job_identity(CONFIG)


def test_what_is_no_plain_value_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"pair\.source\[1\]"):
        job_identity({"pair": {"source": [1, object()]}})
