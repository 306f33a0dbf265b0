"""The bench's grid, its client's command line and its table, against numbers by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvmap.errors import KvmapError
from kvmap.serving.bench.__main__ import main
from kvmap.serving.bench.client import Engine, Measured, command
from kvmap.serving.bench.points import COLD, PUBLISH, REPREFILL, WARM, Point, grid
from kvmap.serving.bench.table import rows_of

ENGINE = Engine("http://127.0.0.1:1", "served", "folder")


def measured(ttft_ms: float, whole_ms: float = 0.0, **counts: int) -> Measured:
    return Measured(ttft_ms, ttft_ms, ttft_ms, whole_ms, 5.0, 100.0, 4, counts)


def test_no_two_rounds_share_a_prompt_and_a_hand_off_reads_what_was_published():
    rounds = list(grid([128, 512], [1, 8], n_requests=4, n_output=16, repeats=2, seed=7))
    assert len(rounds) == 8
    seeds = [point.seed for together in rounds for point in together]
    assert len(set(seeds)) == 16
    for plain, published, taken in rounds:
        assert (plain.mode, published.mode, taken.mode) == (REPREFILL, PUBLISH, WARM)
        assert published.seed == taken.seed != plain.seed
        assert {point.n_requests for point in (plain, published, taken)} == {max(4, plain.concurrency)}


@pytest.mark.parametrize(
    ("mode", "asked"), [(PUBLISH, {"publish": True}), (WARM, {"take": True}), (REPREFILL, None)]
)
def test_the_client_is_told_what_the_engine_is_asked(mode, asked):
    line = command(ENGINE, Point(mode, 128, 2, 4, 16, 3), Path("result.json"))
    extra = json.loads(line[line.index("--extra-body") + 1])
    assert extra.get("kv_transfer_params") == (None if asked is None else {"kvmap": asked})
    assert line[line.index("--random-input-len") + 1] == "128"
    assert line[line.index("--max-concurrency") + 1] == "2"


def test_ratios_are_of_the_same_repeat_and_cold_is_the_sum():
    found: dict[Point, Measured] = {}
    for repeat, (plain, warm, source) in enumerate(
        [(100.0, 20.0, 30.0), (200.0, 60.0, 50.0), (100.0, 30.0, 30.0)]
    ):
        seed = 2 * repeat
        found[Point(REPREFILL, 128, 1, 4, 16, seed + 1)] = measured(plain)
        found[Point(PUBLISH, 128, 1, 4, 1, seed)] = measured(source - 5, whole_ms=source)
        found[Point(WARM, 128, 1, 4, 16, seed)] = measured(warm, applied=3, fell_back=1)
    rows = {row["mode"]: row for row in rows_of(found)}
    assert list(rows) == [PUBLISH, REPREFILL, WARM, COLD]
    assert rows[WARM]["ttft_ms"] == 30.0
    assert rows[WARM]["of_re_prefill"] == pytest.approx(0.3)
    assert (rows[WARM]["applied"], rows[WARM]["fell_back"], rows[WARM]["requests"]) == (9, 3, 12)
    assert rows[COLD]["ttft_ms"] == 60.0
    assert rows[COLD]["of_re_prefill"] == pytest.approx(0.55)
    assert rows[REPREFILL]["of_re_prefill"] == 1
    assert "tokens_per_second" not in rows[PUBLISH]


def test_an_engine_that_does_not_answer_is_named():
    with pytest.raises(KvmapError, match=r"127\.0\.0\.1:1/kvmap/status"):
        ENGINE.counts()


def test_mistakes_are_one_line(tmp_path, capsys):
    arguments = ["--source-url", "127.0.0.1:1", "--target-url", "http://127.0.0.1:1", "--tokenizer", "x"]
    assert main([*arguments, "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("error: ")
    with pytest.raises(SystemExit):
        main([*arguments, "--out", str(tmp_path), "--lengths", "0"])
