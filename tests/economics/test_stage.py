"""Stage `economics`: from a benchmark of the same run, from a file, and planned; and what it may be asked."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvmap.config import schema, validate
from kvmap.economics import Axes, Prices, Quality, Workload, curves, policies
from kvmap.metrics import Metric
from kvmap.report.console import print_summary, summary_console
from kvmap.stages import run_stages
from kvmap.stages.economics import _quality
from tests.economics.cases import benchmark_rows
from tests.economics.test_curves import write
from tests.stages.conftest import Finished
from tests.test_config import with_settings

RANDOM = "benchmark.random_weights=true mapper.top_k=1 benchmark.lengths=[8,16,32] benchmark.repeats=1"


@pytest.fixture
def finished(tmp_path: Path) -> Finished:
    return Finished(tmp_path / "run", tmp_path)


def run(finished: Finished, overrides: str) -> Finished:
    cfg = with_settings(f"tracking.backend=none {overrides}")
    cfg.outputs = str(finished.outputs)
    assert validate(cfg) == []
    run_stages(cfg, finished.directory)
    return finished


TABLES = {f"economics{name}" for name in ("", "_lengths", "_break_even", "_time_surface", "_cost_surface")}


@pytest.mark.slow
def test_of_this_runs_own_benchmark(finished: Finished) -> None:
    stages = "stages=[benchmark,economics,report]"
    done = run(finished, f"{stages} {RANDOM} economics.accuracy.target=0.9 economics.output_tokens=4")
    assert done.tables >= TABLES
    (benchmarked,) = {
        float(row["whole_p50_ms"])
        for row in done.table("latency")
        if (row["length"], row["arm"]) == ("16", "re_prefill")
    }
    (taken,) = (
        float(row["takeover_ms"])
        for row in done.table("economics_lengths")
        if (row["length"], row["policy"]) == ("16.0", "re_prefill")
    )
    assert taken == pytest.approx(benchmarked)
    facts = done.json("run")["facts"]["economics"]
    assert facts["latencies"] == "measured by this run's benchmark"
    large = next(row for row in done.table("economics") if row["policy"] == "always_large")
    assert float(large["accuracy"]) == 0.9
    assert done.metric("economics/policies/always_large/cost") == pytest.approx(float(large["cost"]))
    assert (done.directory / "figures" / "economics.png").is_file()
    page = (done.directory / "report.html").read_text()
    assert "A request, by the way it is served" in page
    assert "Where it pays" in page


def test_planned_without_any_model_and_shown(finished: Finished, capsys: pytest.CaptureFixture[str]) -> None:
    done = run(finished, "stages=[economics] pair=qwen3_14b_32b mapper.top_k=8 economics.device=h100")
    facts = done.json("run")["facts"]["economics"]
    assert facts["latencies"].startswith("planned for h100")
    assert facts["known_lengths"] == [256, 32768]
    assert any("planned, not measured" in note for note in facts["notes"])
    capsys.readouterr()
    print_summary(done.directory, summary_console())
    shown = capsys.readouterr().out
    assert "warm hand-off" in shown
    assert "bandwidth, Gb/s" in shown


def test_of_a_file(finished: Finished) -> None:
    file = write(finished.outputs / "latency.csv", benchmark_rows())
    given = f"stages=[economics] pair=tiny economics.latency={file} economics.contexts.median=1000"
    done = run(finished, f"{given} economics.surface.lengths=[200,300]")
    assert {row["length"] for row in done.table("economics_time_surface")} == {"200.0", "300.0"}
    assert "log-normal" in done.json("run")["facts"]["economics"]["contexts"]


def test_it_is_no_stage_of_a_usual_run() -> None:
    assert "economics" not in with_settings("").stages


MISTAKES = {
    "economics.escalation_rate=2": "economics.escalation_rate=2",
    "economics.judged_after=300": "economics.output_tokens=256",
    "economics.beyond=guess": "economics.beyond=guess: expected one of refuse, extend",
    "economics.device=h1000": "did you mean 'h100'",
    "economics.sent=maped": "did you mean 'mapped'",
    "economics.latency=/nowhere.csv": "economics.latency=/nowhere.csv: no such file",
    "economics.gbit_per_s=0": "economics.gbit_per_s=0",
    "economics.source_token_ms=0": "economics.source_token_ms=0.0: expected a finite number above 0",
    "economics.prices.target_gpus=0": "target_gpus=0: expected a finite number of at least 1",
    "economics.prices.cached_discount=1.5": "at most 1",
    "economics.accuracy.mapped=80": "economics.accuracy.mapped=80",
    "economics.contexts.lengths=[5] economics.contexts.median=5": "set one of them",
    "economics.contexts.lengths=[0]": "expected numbers of tokens above 0",
    "economics.contexts.weights=[1]": "expected one for each economics.contexts.lengths",
    "economics.contexts.lengths=[5] economics.contexts.weights=[0]": "not all 0",
    "economics.contexts.path=/nowhere.jsonl": "economics.contexts.path=/nowhere.jsonl: no such file",
    "economics.surface.price_ratios=[]": "expected one or more",
    "economics.surface.escalation_rates=[0,2]": "each at least 0 and at most 1",
    "economics.surface.lengths=[0]": "expected each at least 1",
}


@pytest.mark.parametrize("override", MISTAKES)
def test_a_mistake_is_named(override: str) -> None:
    assert any(MISTAKES[override] in mistake for mistake in validate(with_settings(override)))


def test_several_mistakes_come_at_once() -> None:
    found = validate(with_settings("economics.link_ms=-1 economics.sent=x economics.prices.gbyte=-2"))
    assert len([line for line in found if line.startswith("economics.")]) == 3


def test_the_schema_knows_the_librarys_names_and_defaults() -> None:
    assert schema.BEYOND_KNOWN == curves.BEYOND
    assert schema.SENT_CACHES == policies.SENT
    given = schema.EconomicsConfig()
    for own in (Workload(), Prices(), Axes()):
        node = {"Workload": given, "Prices": given.prices, "Axes": given.surface}[type(own).__name__]
        for name, value in vars(own).items():
            configured = getattr(node, name)
            assert (tuple(configured) if isinstance(configured, list) else configured) == value, name


def test_accuracies_are_those_configured_else_those_this_run_has_evaluated() -> None:
    measured = {
        f"evaluate/average/{arm}/accuracy": Metric(value)
        for arm, value in (("source", 0.5), ("target", 0.8), ("mapped", math.nan))
    }
    cfg = with_settings("economics.accuracy.source=0.6")
    ctx = SimpleNamespace(cfg=cfg, run=SimpleNamespace(metrics=measured))
    # a stand-in for the context
    assert _quality(ctx) == Quality(source=0.6, target=0.8, mapped=None)  # type: ignore[arg-type]
