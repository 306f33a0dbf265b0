"""Wall time by arm, on a clock that ticks once a look: what is counted, not how long it takes."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvmap.evaluation import stopwatch
from kvmap.evaluation.choices import evaluate_items
from kvmap.evaluation.perplexity import evaluate_perplexity
from kvmap.evaluation.stopwatch import SOURCE_PREFILL, Stopwatch
from kvmap.transfer import TransferOptions
from tests.evaluation.test_choices import quiet

CPU = SimpleNamespace(device=torch.device("cpu"), layer_devices=())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = count()
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: float(next(ticks)))


@pytest.mark.usefixtures("clock")
def test_laps_of_a_batch_add_up_and_the_median_is_over_batches() -> None:
    watch = Stopwatch()
    for batch in ((0, 1), (2, 3), (0, 1), (4,), (0, 1)):
        with watch.lap("mapped", CPU, batch):  # type: ignore[arg-type]
            pass
    assert watch.record() == {"mapped": {"seconds": 5.0, "n_contexts": 5, "median_seconds": 1.0}}


@pytest.mark.usefixtures("clock")
def test_a_hand_off_counts_until_the_next_is_asked_for_and_a_stream_while_it_is_made() -> None:
    watch, model, batch = Stopwatch(), CPU, (7,)
    made: Any = iter([("target", "a"), ("mapped", "b")])
    passed = []
    for arm, hand_off in watch.hand_offs(model, batch, made):  # type: ignore[arg-type]
        passed.append((arm, hand_off))
        stopwatch.time.perf_counter()  # the work on it: one tick more
    assert passed == [("target", "a"), ("mapped", "b")]
    assert {name: row["seconds"] for name, row in watch.record().items()} == {"target": 2.0, "mapped": 2.0}
    chunks = []
    for chunk in watch.stream("mapped", model, batch, ["x", "y"]):  # type: ignore[arg-type]
        chunks.append(chunk)
        stopwatch.time.perf_counter()  # not the stream's
    assert chunks == ["x", "y"]
    assert watch.record()["mapped"]["seconds"] == 5.0  # two chunks, and to find that there is no third


def test_questions_and_perplexity_time_every_arm(pair: Any, arms: Any, items: Any, blocks: Any) -> None:
    asked = {arm: arms[arm] for arm in ("target", "source", "mapped", "no_context")}
    for part, n, work in (
        ("questions", 2, lambda **s: evaluate_items(pair, asked, items[:2], max_new_tokens=2, **s)),
        ("perplexity", 5, lambda **s: evaluate_perplexity(pair, asked, blocks, prefix_tokens=20, **s)),
    ):
        watch = Stopwatch()
        work(options=TransferOptions(), batch_size=2, progress=quiet, watch=watch)
        record = watch.record()
        assert set(record) == {SOURCE_PREFILL, *asked}, part
        assert {row["n_contexts"] for row in record.values()} == {n}, part
        assert all(row["seconds"] > 0 for row in record.values()), part
