"""What the fitting benchmark computes is right; what it times is never looked at, but that it is there."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge

from kvmap.benchmark import accumulation, fitting, sweep
from kvmap.benchmark.accumulation import MemoryCase, accumulation_rows, memory_rows
from kvmap.benchmark.fitting import as_text, main
from kvmap.benchmark.sweep import (
    LAMBDAS,
    Pass,
    SweepSettings,
    calibrate,
    forward_seconds,
    layout_of,
    ratio_rows,
    refit_rows,
    sweep_rows,
)
from kvmap.errors import KvmapError
from kvmap.fit.calibrate import CalibrationOptions
from kvmap.fit.captures import Captures, capture
from kvmap.fit.features import KINDS, SUPPORTS, Layout
from kvmap.fit.pair_moments import SPLITS, PairMoments, full_tables
from kvmap.fit.selection import rank_layers
from kvmap.models.pair import LoadedModel, ModelPair
from tests.fit.oracles import assert_same
from tests.tiny_random_models import build, random_ids

N, TOKENS = 14, 9
SPLIT = {"fit": [0, 1, 2, 3, 4, 5, 8, 9, 11, 12], "held_out": [6, 7, 10, 13]}
SETTINGS = SweepSettings((1, 3), (1.0, 1e-3), cross_ratio=10.0)
OPTIONS = CalibrationOptions()
POINTS = len(SUPPORTS) * len(SETTINGS.top_k) * len(SETTINGS.lambdas)


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    source, target = (build("llama", seed=seed, n_layers=3) for seed in (1, 2))
    return ModelPair(LoadedModel.from_model(source), LoadedModel.from_model(target))


@pytest.fixture(scope="module")
def captures(pair, tmp_path_factory) -> Captures:
    return capture(pair, random_ids(N, TOKENS), tmp_path_factory.mktemp("captures"), batch_size=2)


@pytest.fixture(scope="module")
def made(captures) -> Pass:
    return calibrate(captures, SPLIT, OPTIONS)


@pytest.fixture(autouse=True)
def small_matmul(monkeypatch) -> None:
    monkeypatch.setattr(accumulation, "_MATMUL_SIZE", 8)


def rows_of(captures: Captures, split: str, role: str, kind: str) -> list[np.ndarray]:
    """Per layer (n, heads, channels) of the tokens that count: all but the first of each sequence."""
    parts: list[list[np.ndarray]] = []
    for batch in captures.stream(SPLIT):
        if batch.split == split:
            kv = getattr(batch, role).strip()
            layers = kv.keys if kind == "key" else kv.values
            parts.append([layer[:, :, 1:].transpose(1, 2).flatten(0, 1).double().numpy() for layer in layers])
    return [np.concatenate(layer) for layer in zip(*parts, strict=True)]


def test_the_pass_is_that_of_a_calibration(captures, made) -> None:
    assert made.n_tokens == N * TOKENS
    assert made.seconds > 0
    layout = layout_of(captures)
    assert layout == Layout(((2, 8),) * 3, ((2, 8),) * 3)
    expected = PairMoments.zeros(layout, full_tables(layout))
    for batch in captures.stream(SPLIT):
        counted = torch.ones_like(batch.source.mask)
        counted[:, 0] = False
        expected.update(batch.split, batch.source.strip(), batch.target.strip(), counted)
    for mine, theirs in zip(made.moments.tables, expected.tables, strict=True):
        for split in SPLITS:
            assert_same(mine.splits[split], theirs.splits[split])


def test_every_point_has_the_held_out_r2_of_scikit_learn_on_rows(captures, made) -> None:
    _, points = sweep_rows(made.moments, SETTINGS)
    assert len(points) == POINTS
    ranked = rank_layers(made.moments, SETTINGS.rule, "all")
    data = {
        (split, role, kind): rows_of(captures, split, role, kind)
        for split in SPLITS
        for role in ("source", "target")
        for kind in KINDS
    }
    for point in points:
        scores = []
        for kind in KINDS:
            for layer in range(3):
                chosen = sorted(ranked[kind][layer][: point["top_k"]])
                for head in range(2):
                    x, y = {}, {}
                    for split in SPLITS:
                        source = [data[split, "source", kind][s] for s in chosen]
                        own = np.concatenate([s[:, head] for s in source], 1)
                        other = np.concatenate([s[:, 1 - head] for s in source], 1)
                        scale = np.sqrt(10.0) if point["support"] == "banded" else 1.0
                        x[split] = (
                            own if point["support"] == "head_local" else np.hstack([own, other / scale])
                        )
                        y[split] = data[split, "target", kind][layer][:, head]
                    model = Ridge(alpha=point["ridge_lambda"], solver="svd").fit(x["fit"], y["fit"])
                    predicted, true = model.predict(x["held_out"]), y["held_out"]
                    error = ((true - predicted) ** 2).sum()
                    scores.append(1 - error / ((true - true.mean(0)) ** 2).sum())
        # fewer rows than features, λ of 1e-3: a condition number of some 1e6
        assert point["held_out_r2"] == pytest.approx(np.mean(scores), rel=1e-8, abs=1e-8)


def test_the_sweep_says_what_each_part_took(made) -> None:
    rows, _ = sweep_rows(made.moments, SETTINGS)
    assert [(row["step"], row["support"]) for row in rows] == [
        ("rank", None),
        *((step, support) for support in SUPPORTS for step in ("points", "points", "weights")),
    ]
    for row in rows:
        assert row["seconds"] > 0
        assert row["n_rows"] == len(SPLIT["fit"]) * (TOKENS - 1)
        assert (row["threads"], row["dtype"]) == (torch.get_num_threads(), "float64")
    assert sum(row["n_points"] for row in rows if row["step"] == "points") == POINTS


def test_one_refit_is_timed_for_each_support_and_k_and_multiplied_by_all(captures, made, monkeypatch) -> None:
    """A fit of m outputs that takes 5 + m seconds: what the rows make of it is known."""
    seen = []

    def seconds(x: torch.Tensor, y: torch.Tensor) -> float:
        seen.append((x, y))
        return 5.0 + y.shape[1]

    monkeypatch.setattr(sweep, "_ridge_seconds", seconds)
    rows = refit_rows(captures, SPLIT, made.moments, SETTINGS, OPTIONS)
    assert [(row["support"], row["top_k"]) for row in rows] == [(s, k) for s in SUPPORTS for k in (1, 3)]
    for row in rows:
        heads = 1 if row["support"] == "full_head" else 2  # heads that need a fit of their own
        assert row["n_rows"] == len(SPLIT["fit"]) * (TOKENS - 1)
        assert row["n_features"] == row["top_k"] * 8 * (1 if row["support"] == "head_local" else 2)
        assert row["n_outputs"] == 16 // heads
        n_fits = len(KINDS) * 3 * heads * 2  # kinds, layers, heads, λ
        assert (row["n_fits"], row["seconds"]) == (n_fits, pytest.approx(n_fits * (5 + 16 / heads)))
        # all outputs there are, once for each λ, and what is shared once for each system
        outputs = len(KINDS) * 3 * 16 * 2
        assert row["shared_seconds"] == pytest.approx(5 * row["n_shared_fits"] + outputs)
        assert row["n_shared_fits"] <= n_fits
    # with k of all layers every target layer reads the same
    shared = {row["support"]: row["n_shared_fits"] for row in rows if row["top_k"] == 3}
    assert shared == {"full_head": 2 * 2, "head_local": 2 * 2 * 2, "banded": 2 * 2 * 2}


def test_the_rows_that_scikit_learn_gets_are_those_of_the_point(captures, made, monkeypatch) -> None:
    seen = {}

    def seconds(x: torch.Tensor, y: torch.Tensor) -> float:
        seen.setdefault((x.shape[1], y.shape[1]), (x, y))
        return 1.0

    monkeypatch.setattr(sweep, "_ridge_seconds", seconds)
    refit_rows(captures, SPLIT, made.moments, replace(SETTINGS, top_k=(3,)), OPTIONS)
    source, target = (rows_of(captures, "fit", role, "value") for role in ("source", "target"))
    everything = np.concatenate([layer.reshape(len(layer), -1) for layer in source], 1)
    x, y = seen[48, 16]
    np.testing.assert_array_equal(x.numpy(), everything)
    np.testing.assert_array_equal(y.numpy(), target[1].reshape(len(x), -1))
    x, y = seen[24, 8]
    np.testing.assert_array_equal(x.numpy(), np.concatenate([layer[:, 0] for layer in source], 1))
    np.testing.assert_array_equal(y.numpy(), target[1][:, 0])
    x, y = seen[48, 8]
    scale = np.tile(np.repeat([1.0, np.sqrt(10.0)], 8), 3)
    np.testing.assert_allclose(x.numpy(), everything / scale, rtol=1e-15)
    assert x.dtype == y.dtype == torch.float64


def test_ratios_are_of_the_whole_sweep_without_the_weights() -> None:
    steps = [("rank", 1.0), ("points", 2.0), ("points", 3.0), ("weights", 4.0)]
    rows = [{"step": step, "seconds": seconds} for step, seconds in steps]
    made = Pass(PairMoments(Layout(((1, 1),), ((1, 1),)), []), n_tokens=100, seconds=20.0)
    refits = [{"seconds": 500.0, "shared_seconds": 100.0}, {"seconds": 100.0, "shared_seconds": 20.0}]
    found = {row["compared"]: row for row in ratio_rows(rows, made, 1.0, refits)}
    assert {name: row["seconds"] for name, row in found.items()} == {
        "accumulation": 20.0,
        "calibration pass": 120.0,
        "scikit-learn, each layer": 600.0,
        "scikit-learn, shared": 120.0,
        "best points' weights": 4.0,
    }
    assert all(row["sweep_seconds"] == 6.0 for row in found.values())
    assert found["calibration pass"]["sweep_share"] == 6 / 120
    assert found["scikit-learn, each layer"]["times_sweep"] == 100
    assert [row["compared"] for row in ratio_rows(rows, made, None, [])] == [
        "accumulation",
        "best points' weights",
    ]


def test_both_models_forward_is_timed_for_each_token(pair) -> None:
    assert 0 < forward_seconds(pair, 2, 8, n_batches=1) < 10


def test_accumulation_counts_the_work_that_is_needed(captures) -> None:
    rows = accumulation_rows(captures, repeats=1)
    assert [(row["mode"], row["dtype"]) for row in rows] == [
        (mode, dtype) for mode in ("full", "head_local") for dtype in ("float64", "float32")
    ]
    n = 2 * (TOKENS - 1)
    for row in rows:
        tables, p, q = (2, 48, 48) if row["mode"] == "full" else (4, 24, 24)
        assert (row["n_tables"], row["n_features"], row["n_targets"], row["n_rows"]) == (tables, p, q, n)
        assert row["flops"] == tables * n * (p * p + 2 * p * q)
        assert row["gflop_per_s"] == pytest.approx(row["flops"] / row["seconds"] / 1e9)
        assert row["share"] == pytest.approx(row["gflop_per_s"] / row["matmul_gflop_per_s"])


def test_each_memory_case_is_a_process_of_its_own(captures, monkeypatch) -> None:
    monkeypatch.setattr(accumulation, "GROWTH", 3)
    cases: list[MemoryCase] = []

    def measured(case: MemoryCase) -> dict[str, object]:
        cases.append(case)
        return {"mode": case.mode}

    monkeypatch.setattr(accumulation, "_in_own_process", measured)
    rows = memory_rows(captures, top_k=2)
    modes = ["full", "full", "head_local", "head_local", "selected", "selected"]
    assert [row["mode"] for row in rows] == modes
    assert [case.n_batches for case in cases] == [2, 6] * 3
    assert {case.top_k for case in cases} == {2}


@pytest.mark.slow
def test_a_memory_case_measures_a_pass(captures) -> None:
    shape = ((2, 8),) * 3
    case = MemoryCase(str(captures.folder), shape, shape, "selected", "full_head", 2, 4, "float64")
    row = accumulation._in_own_process(case)
    assert (row["mode"], row["top_k"], row["threads"]) == ("selected", 2, torch.get_num_threads())
    assert (row["n_tokens"], row["batch_tokens"]) == (4 * 2 * TOKENS, 2 * TOKENS)
    assert 0 < row["table_bytes"] < row["planned_bytes"]
    assert row["peak_bytes"] >= 0
    assert row["share"] == row["peak_bytes"] / row["planned_bytes"]
    with pytest.raises(KvmapError, match=r"n_batches=4.*could not be measured:\n(.|\n)*no file"):
        accumulation._in_own_process(replace(case, folder="nowhere"))


def test_what_cannot_be_split_is_refused(captures) -> None:
    with pytest.raises(KvmapError, match="holds 1 batch: expected 2 or more"):
        memory_rows(replace(captures, batches=captures.batches[:1]))


def test_the_command_prints_tables_and_writes_them(captures, tmp_path, capsys) -> None:
    output = tmp_path / "fitting.json"
    given = [
        "--parts",
        "sweep",
        "accumulation",
        "--top-k",
        "1",
        "all",
        "--ridge-lambda",
        "1",
        "--repeats",
        "1",
    ]
    threads = torch.get_num_threads()
    assert main([str(captures.folder), *given, "--seconds-per-token", "0.5", "--output", str(output)]) == 0
    assert torch.get_num_threads() == threads
    written = json.loads(output.read_text())
    assert list(written) == ["accumulation", "sweep", "points", "refits", "ratios"]
    assert [(point["support"], point["top_k"]) for point in written["points"]] == [
        (support, k) for support in SUPPORTS for k in (1, 3)
    ]
    compared = {row["compared"]: row for row in written["ratios"]}
    assert compared["calibration pass"]["seconds"] > 0.5 * N * TOKENS
    assert all(row["threads"] == 1 for rows in written.values() for row in rows if "threads" in row)
    printed = capsys.readouterr().out
    assert "times_sweep" in printed
    assert "held_out_r2" not in printed


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], r"captures\.json"),
        (["--source", "a"], "--source and --target go together"),
        (["--threads", "0"], r"--threads=0, --repeats=3: expected at least 1 of each"),
    ],
)
def test_the_command_says_what_is_wrong(given: list[str], said: str, tmp_path, capsys) -> None:
    assert main([str(tmp_path), *given]) == 1
    assert re.search(said, capsys.readouterr().err)


@pytest.mark.parametrize("top_k", ["0", "-1", "many"])
def test_a_k_that_is_none_is_refused(top_k: str, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["somewhere", f"--top-k={top_k}"])
    assert f"'{top_k}': expected 1 or more, or 'all'" in capsys.readouterr().err


def test_tables_are_aligned_and_short() -> None:
    rows = [{"a": 1234567, "b": 0.123456, "c": None}, {"a": 1, "b": 12.0, "c": "x"}]
    assert as_text(rows).splitlines() == [
        "        a       b  c",
        "1,234,567  0.1235  -",
        "        1      12  x",
    ]


def test_defaults_are_the_sweep_of_the_reach() -> None:
    asked = fitting._parser().parse_args(["somewhere"])
    assert asked.top_k == [1, 2, 4, 8, None]
    assert asked.ridge_lambda == list(LAMBDAS)
    assert (asked.threads, asked.cross_ratio, asked.rule, asked.parts) == (1, 10.0, "r2", list(fitting.PARTS))
