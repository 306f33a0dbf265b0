"""The bench's grid, its client's command line and its table, against numbers by hand."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvmap.errors import KvmapError
from kvmap.serving.bench.__main__ import main
from kvmap.serving.bench.client import Engine, Measured, command, running_engine
from kvmap.serving.bench.figure import LINES, draw
from kvmap.serving.bench.points import (
    COLD,
    GATEWAY_COLD,
    GATEWAY_PUBLISH,
    GATEWAY_REPREFILL,
    GATEWAY_WARM,
    PUBLISH,
    REPREFILL,
    WARM,
    Point,
    grid,
)
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


def test_the_gateways_prompts_are_those_of_no_other_point_but_what_is_published_for_it():
    rounds = list(grid([128], [1, 8], n_requests=4, n_output=16, repeats=2, seed=7, gateway=True))
    modes = [REPREFILL, PUBLISH, WARM, GATEWAY_REPREFILL, GATEWAY_COLD, GATEWAY_PUBLISH, GATEWAY_WARM]
    assert [[point.mode for point in together] for together in rounds] == [modes] * 4
    assert len({point.seed for together in rounds for point in together}) == 4 * 5
    for _, published, taken, plain, cold, gateway_published, warm in rounds:
        assert published.seed == taken.seed
        assert gateway_published.seed == warm.seed
        assert len({taken.seed, plain.seed, cold.seed, warm.seed}) == 4
        assert (published.n_output, gateway_published.n_output, warm.n_output) == (1, 1, 16)


HANDED = {"kvmap": {"escalate": True, "mode": "handoff", "min_tokens": 1}}


@pytest.mark.parametrize(
    ("mode", "whom", "asked"),
    [
        (PUBLISH, "source", {"kv_transfer_params": {"kvmap": {"publish": True}}}),
        (WARM, "target", {"kv_transfer_params": {"kvmap": {"take": True}}}),
        (REPREFILL, "target", {}),
        (GATEWAY_PUBLISH, "source", {"kv_transfer_params": {"kvmap": {"publish": True}}}),
        (GATEWAY_REPREFILL, "gateway", {"kvmap": {"escalate": True, "mode": "reprefill"}}),
        (GATEWAY_COLD, "gateway", HANDED),
        (GATEWAY_WARM, "gateway", HANDED),
    ],
)
def test_the_client_is_told_what_the_engine_is_asked(mode, whom, asked):
    point = Point(mode, 128, 2, 4, 16, 3)
    line = command(ENGINE, point, Path("result.json"))
    assert point.whom == whom
    assert json.loads(line[line.index("--extra-body") + 1]) == {"temperature": 0, **asked}
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


def test_the_gateway_has_rows_where_it_was_measured_over_re_prefill_of_the_same_round():
    found: dict[Point, Measured] = {}
    for repeat, (plain, cold) in enumerate([(100.0, 40.0), (200.0, 60.0)]):
        times = {REPREFILL: plain, PUBLISH: 30.0, WARM: 20.0, GATEWAY_REPREFILL: plain + 10}
        times |= {GATEWAY_COLD: cold, GATEWAY_PUBLISH: 30.0, GATEWAY_WARM: 25.0}
        for mode, ttft_ms in times.items():
            found[Point(mode, 128, 1, 4, 16, repeat)] = measured(ttft_ms, whole_ms=ttft_ms, applied=4)
    rows = {row["mode"]: row for row in rows_of(found)}
    assert list(rows) == [PUBLISH, REPREFILL, WARM, COLD, GATEWAY_REPREFILL, GATEWAY_COLD, GATEWAY_WARM]
    assert rows[GATEWAY_COLD]["ttft_ms"] == 50.0
    assert rows[GATEWAY_COLD]["of_re_prefill"] == pytest.approx((0.4 + 0.3) / 2)
    assert rows[GATEWAY_REPREFILL]["of_re_prefill"] == pytest.approx((1.1 + 1.05) / 2)
    assert rows[GATEWAY_WARM]["applied"] == 8
    assert "tokens_per_second" in rows[GATEWAY_COLD]


GATEWAYS = {GATEWAY_REPREFILL, GATEWAY_COLD, GATEWAY_WARM}


@pytest.mark.parametrize("gateway", [False, True])
def test_the_figure_has_a_line_for_each_way_that_was_measured(tmp_path, monkeypatch, gateway):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    rounds = grid([128, 256], [1], n_requests=1, n_output=2, repeats=1, seed=0, gateway=gateway)
    found = {point: measured(10.0, whole_ms=10.0) for together in rounds for point in together}
    figures: list[Any] = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    draw(rows_of(found), tmp_path / "serving.png")
    drawn = figures[0].axes[0].get_legend_handles_labels()[1]
    assert drawn == [LINES[mode][0] for mode in LINES if gateway or mode not in GATEWAYS]
    assert (tmp_path / "serving.png").stat().st_size > 0


class Answers(BaseHTTPRequestHandler):
    """An engine's status, and a gateway's models."""

    def do_GET(self) -> None:
        said = {
            "/kvmap/status": {"counts": {"applied": 3}},
            "/v1/models": {"data": [{"id": "kvmap"}, {"id": "small"}]},
        }
        self.send_response(200 if self.path in said else 404)
        self.end_headers()
        self.wfile.write(json.dumps(said.get(self.path)).encode())

    def log_message(self, *_: object) -> None:
        """Nothing."""


def test_a_gateway_is_asked_by_its_own_name_and_counted_at_its_target():
    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert Engine("http://127.0.0.1:1", "kvmap", "folder", counted_at=url).counts() == {"applied": 3}
        assert running_engine(f"{url}/", "folder", url) == Engine(url, "kvmap", "folder", url)
        server.shutdown()


def test_an_engine_that_does_not_answer_is_named():
    with pytest.raises(KvmapError, match=r"127\.0\.0\.1:1/kvmap/status"):
        ENGINE.counts()


def test_mistakes_are_one_line(tmp_path, capsys):
    arguments = ["--source-url", "127.0.0.1:1", "--target-url", "http://127.0.0.1:1", "--tokenizer", "x"]
    assert main([*arguments, "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("error: ")
    with pytest.raises(SystemExit):
        main([*arguments, "--out", str(tmp_path), "--lengths", "0"])
