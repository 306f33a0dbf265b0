"""`python -m kvmap.economics`: what it prints and writes, and how it refuses."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from kvmap.economics.command import main
from tests.economics.cases import benchmark_rows
from tests.economics.test_curves import write

Answer = tuple[int, str, str]


@pytest.fixture
def table(tmp_path: Path) -> str:
    return str(write(tmp_path / "latency.csv", benchmark_rows()))


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> Answer:
    status = main(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def last_line(out: str) -> dict[str, Any]:
    return dict(json.loads(out.splitlines()[-1]))


def test_the_last_line_is_everything_as_json(capsys: pytest.CaptureFixture[str], table: str) -> None:
    status, out, err = call(
        capsys, "--latency", table, "--escalation-rate", "0.4", "--target-accuracy", "0.9"
    )
    assert (status, err) == (0, "")
    found = last_line(out)
    assert found["facts"]["escalation_rate"] == 0.4
    assert [row["policy"] for row in found["economics"]][:2] == ["always_small", "always_large"]
    assert found["economics"][1]["accuracy"] == 0.9
    assert "warm hand-off is faster than re-prefill" in out
    assert "note: a token of the source" in out
    assert f"latencies: {table}" in out


def test_tables_and_figure_are_written(
    capsys: pytest.CaptureFixture[str], table: str, tmp_path: Path
) -> None:
    folder, figure = tmp_path / "tables", tmp_path / "figure.png"
    status, out, _ = call(capsys, "--latency", table, "--csv", str(folder), "--figure", str(figure))
    assert status == 0
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert f"figure: {figure}" in out
    found = last_line(out)
    for name in ("economics", "economics_lengths", "economics_break_even", "economics_time_surface"):
        with open(folder / f"{name}.csv", newline="") as stream:
            assert len(list(csv.DictReader(stream))) == len(found[name])


def test_assumptions_reach_the_result(capsys: pytest.CaptureFixture[str], table: str, tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.jsonl"
    lengths.write_text('{"length": 400}\n')
    usual = last_line(call(capsys, "--latency", table, "--contexts", str(lengths))[1])
    changes = {
        "--shared-memory": ("gbit_per_s", None),
        "--sent mapped": ("sent", "mapped"),
        "--link-ms 5": ("link_ms", 5),
        "--output-tokens 8": ("output_tokens", 8),
        "--judged-after 3": ("judged_after", 3),
        "--decode-batch 4": ("decode_batch", 4),
        "--cached-share 0.25": ("cached_share", 0.25),
        "--cached-discount 0.5": ("cached_discount", 0.5),
        "--source-price 3": ("source_price", 3),
        "--target-gpus 2": ("target_gpus", 2),
        "--gbyte-price 9": ("gbyte_price", 9),
        "--context-median 1000 --context-sigma 0": ("mean_length", 1000),
        "--context-lengths 200 600 --context-weights 3 1": ("mean_length", 300),
        "--source-token-ms 4": None,
    }
    for flags, named in changes.items():
        arguments = [] if "context" in flags else ["--contexts", str(lengths)]
        found = last_line(call(capsys, "--latency", table, *arguments, *flags.split())[1])
        assert found["economics"] != usual["economics"], flags
        if named is not None:
            assert found["facts"][named[0]] == named[1]


REFUSED = {
    "": "give times: --latency FILE",
    "--source zoo:tiny-small": "give times",
    "--latency nowhere.csv": "nowhere.csv: cannot be read",
    "--latency T --source zoo:tiny-small --target zoo:tiny-large": "one of the two",
    "--latency T --escalation-rate 2": "escalation_rate=2: expected a number from 0 to 1",
    "--latency T --context-lengths 64": "64 to 64 tokens: times are known from 128 to 8,192 alone",
    "--latency T --context-lengths 200 --context-median 200": "give one",
    "--latency T --context-weights 1": "--context-weights are those of --context-lengths",
    "--latency T --contexts nowhere.csv": "nowhere.csv: cannot be read",
    "--latency T --source-token-ms 0": "source_token_ms=0: expected a number above 0",
    "--latency T --surface-price-ratios 0": "surface price_ratios=[0.0]",
    "--latency T --context-median 5 --context-sigma 0.1": "nothing of it lies between",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_bad_input_has_one_message(capsys: pytest.CaptureFixture[str], table: str, arguments: str) -> None:
    given = [table if word == "T" else word for word in arguments.split()]
    status, out, err = call(capsys, *given)
    assert (status, out) == (1, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert REFUSED[arguments] in err


def test_curves_are_extended_where_asked_and_it_is_said(
    capsys: pytest.CaptureFixture[str], table: str
) -> None:
    asked = ("--latency", table, "--context-lengths", "64", "200", "--beyond", "extend")
    status, out, _ = call(capsys, *asked)
    assert status == 0
    assert "note: 50.0% of the contexts are outside" in out
    wide = ("--latency", table, "--context-median", "5000", "--context-sigma", "2", "--beyond", "extend")
    assert last_line(call(capsys, *wide)[1])["facts"]["extended_share"] > 0.3


def test_planned_times_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    models = "--source zoo:tiny-small --target zoo:tiny-large --device cpu --top-k 1 --lengths 64 128 256"
    status, out, _ = call(capsys, *models.split())
    assert status == 0
    assert "planned for cpu" in out
    assert "note: planned, not measured" in out
