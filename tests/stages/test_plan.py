"""Stage `plan`, alone and against what runs then hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvmap.config import validate
from kvmap.report.console import print_summary, summary_console
from kvmap.stages import run_stages
from kvmap.sweeps.identity import job_identity
from tests.stages.conftest import Finished, Runner
from tests.test_config import with_settings

Planned = Callable[[str], Finished]


@pytest.fixture
def plan(tmp_path_factory: pytest.TempPathFactory) -> Planned:
    def planned(overrides: str) -> Finished:
        cfg = with_settings(f"stages=[plan] tracking=none {overrides}")
        cfg.outputs = str(tmp_path_factory.mktemp("outputs"))
        assert validate(cfg) == []
        directory = tmp_path_factory.mktemp("plan")
        run_stages(cfg, directory)
        return Finished(directory, Path(cfg.outputs))

    return planned


def sizes(run: Finished) -> dict[tuple[str, str], float]:
    return {(row["part"], row["quantity"]): float(row["value"]) for row in run.table("plan")}


PUBLISHED = {
    "pair=qwen3_14b_32b mapper.top_k=8": 1.07,
    "pair=qwen3_8b_32b mapper.top_k=12": 1.61,
    "pair=ministral3b_8b mapper.top_k=all": 1.85,
    "pair=ministral3b_14b mapper.top_k=20": 1.68,
    "pair=ministral8b_14b mapper.top_k=12": 1.01,
    "pair=llama8b_70b mapper.top_k=20": 3.36,
}


@pytest.mark.parametrize("overrides", PUBLISHED)
def test_maps_have_the_published_size_with_no_hub_to_ask(plan: Planned, overrides: str) -> None:
    run = plan(overrides)
    weights = sizes(run)["mapper", "n_weights"]
    assert weights / 1e9 == pytest.approx(PUBLISHED[overrides], abs=0.005)
    shape = {quantity: value for (part, quantity), value in sizes(run).items() if part == "target"}
    by_formula = 2 * shape["n_layers"] * shape["n_kv_heads"] * shape["head_dim"]
    assert weights == by_formula * sizes(run)["mapper", "n_features"]
    models = run.json("run")["facts"]["planned_for"]["models"]
    assert {said["known_from"] for said in models.values()} == {"shipped facts"}
    assert "shipped facts" in run.json("run")["facts"]["geometry"]["source"]


@pytest.mark.parametrize(("support", "gigabytes"), [("full_head", 4.296), ("head_local", 0.538)])
def test_maps_take_the_published_bytes(plan: Planned, support: str, gigabytes: float) -> None:
    """In float32, biases with it; what is published is some 0.1 % larger."""
    run = plan(f"pair=qwen3_14b_32b mapper.top_k=8 mapper.support={support}")
    found = sizes(run)
    assert found["mapper", "float32_bytes"] / 1e9 == pytest.approx(gigabytes, rel=2e-3)
    biases = 4 * 2 * 64 * 8 * 128
    assert found["mapper", "bfloat16_bytes"] == 2 * found["mapper", "n_weights"] + biases
    assert found["mapper", "fp8_bytes"] == found["mapper", "n_weights"] + biases


def test_caches_are_counted_by_length_as_far_as_both_models_hold_them(plan: Planned) -> None:
    found = sizes(plan("pair=qwen3_14b_32b mapper.top_k=8 plan.lengths=[1000,32768,50000]"))
    assert found["cache of 1000 tokens", "source_bytes"] == 1000 * 2 * 40 * 8 * 128 * 2
    assert found["cache of 32768 tokens", "target_bytes"] == 32768 * 2 * 64 * 8 * 128 * 2
    assert ("cache of 50000 tokens", "source_bytes") not in found


def test_each_stage_has_its_work_and_its_seconds_on_the_device_named(plan: Planned) -> None:
    seconds = {}
    for device in ("h100", "l4"):
        run = plan(f"pair=qwen3_06b_17b mapper=head_local mapper.top_k=8 plan.device={device}")
        rows = run.table("plan_work")
        assert {row["stage"] for row in rows} == {
            "load",
            "calibrate",
            "fit",
            "diagnose",
            "evaluate",
            "benchmark",
        }
        reads = {row["what"]: float(row["tflop"]) for row in rows if row["stage"] == "calibrate"}
        # 240 sequences of 256 tokens; products with weights of the layers, and some attention
        assert reads["source reads"] == pytest.approx(2 * 240 * 256 * 0.44e9 / 1e12, rel=0.1)
        seconds[device] = run.metric("plan/stage/calibrate/seconds")
    assert seconds["l4"] > seconds["h100"]


def test_what_does_not_fit_comes_with_settings_to_paste(plan: Planned) -> None:
    run = plan("pair=llama8b_70b mapper.top_k=20 plan.device=h100 plan.host_memory_gib=512")
    fits = {
        row["stage"]: row["fits"]
        for row in run.table("plan_memory")
        if row["place"] == "device" and row["fits"]
    }
    assert fits["calibrate"] == "False"
    overrides = [row["override"] for row in run.table("plan_settings")]
    assert "pair.target.device_map=auto" in overrides
    console = summary_console()
    with console.capture() as shown:
        print_summary(run.directory, console)
    text = shown.get()
    for words in (
        "Settings to paste",
        "pair.target.device_map=auto",
        "Memory, about",
        "shipped facts",
        "h100",
    ):
        assert words in text


def test_a_model_known_by_its_pair_file_alone_is_planned_as_far_as_that_goes(plan: Planned) -> None:
    facts = "geometry={n_layers:4,n_kv_heads:2,head_dim:16}"
    run = plan(f"pair=custom pair.source.id=a/b pair.target.id=c/d pair.source.{facts} pair.target.{facts}")
    assert sizes(run)["mapper", "n_weights"] == 2 * 4 * 2 * (4 * 2 * 16) * 16
    assert "plan_memory" not in run.tables


def test_a_measured_device_is_this_machine(plan: Planned) -> None:
    run = plan("pair=tiny plan.device=measured")
    assert run.json("run")["facts"]["planned_for"]["device"] == "measured"
    assert run.metric("plan/stage/calibrate/seconds") > 0


@pytest.mark.parametrize("pair", ["tiny", "tiny_unmatched"])
def test_files_have_the_size_that_was_planned(run: Runner, pair: str) -> None:
    finished = run(f"pair={pair} stages=[plan,calibrate,fit] calibration.keep_captures=true")
    found = sizes(finished)
    mode = finished.json("run")["facts"]["moments_mode"]
    planned = {
        "moments": found[f"moments_{mode}", "size_bytes"],
        "mapper": found["mapper", "float32_bytes"],
        "captures": found["captures", "size_bytes"],
    }
    for kind, n_bytes in planned.items():
        files = finished.artifact(kind).glob("*.safetensors")
        # names and shapes in the files' heads come on top
        assert n_bytes == pytest.approx(sum(file.stat().st_size for file in files), rel=0.1), kind


MISTAKES = {
    "plan.device=h10": "plan.device=h10: expected one of",
    "plan.device_memory_gib=0": "plan.device_memory_gib=0.0: expected a number above 0",
    "plan.host_memory_gib=-1": "plan.host_memory_gib=-1.0: expected a number above 0",
    "plan.lengths=[0]": "plan.lengths=[0]: expected numbers of tokens",
}


@pytest.mark.parametrize("override", MISTAKES)
def test_a_plan_for_nothing_that_is_is_refused(override: str) -> None:
    assert any(line.startswith(MISTAKES[override]) for line in validate(with_settings(override)))


def test_what_is_planned_for_makes_another_job_of_a_plan_alone() -> None:
    def identity(stages: list[str], device: str) -> str:
        return job_identity({"stages": stages, "plan": {"device": device}})

    assert identity(["plan"], "h100") != identity(["plan"], "l4")
    assert identity(["plan", "fit"], "h100") == identity(["plan", "fit"], "l4")
