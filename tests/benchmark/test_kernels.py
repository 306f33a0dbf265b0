"""The regression benchmark of the kernels: what it compares is right; what it times is only there."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kvmap.benchmark import kernels
from kvmap.benchmark.kernels import Case, case_rows, main, map_case, moments_case, shortfalls
from kvmap.benchmark.mapping import MAPPING_PATHS
from kvmap.errors import KvmapError
from tests.fit.oracles import from_rows

CPU = torch.device("cpu")
SMALL = [
    *("--source", "3x2x8", "--target", "4x1x16", "--top-k", "2", "--tokens", "5", "--rows", "9"),
    *("--repeats", "2", "--warmup", "0", "--device", "cpu"),
]


def constant(*values: float) -> Callable[[str], list[torch.Tensor]]:
    """Paths "a", "b", … that compute one number each."""
    return lambda path: [torch.tensor([1.0, values["abc".index(path)]])]


def case_of(found: Callable[[str], list[torch.Tensor]], tolerance: float = 0.1) -> Case:
    calls = dict.fromkeys("ab", lambda: None)
    return Case("work", calls, found, base="b", truth="a", tolerance=tolerance, flops=1000)


@pytest.mark.parametrize(
    ("support", "weights"),
    [("full_head", "float8"), ("head_local", "float32"), ("head_local", "bfloat16")],
)
def test_every_path_maps_alike(support: str, weights: str) -> None:
    case = map_case(
        ((2, 8),) * 3,
        ((1, 16),) * 4,
        support=support,
        top_k=2,
        n_tokens=5,
        dtype=torch.bfloat16,
        weights=weights,
        device=CPU,
    )
    rows = case_rows(case, repeats=1, warmup=0)
    assert [row["name"] for row in rows] == [f"map_cache/{support}/{weights}/{path}" for path in case.calls]
    assert {"auto", *case.calls} == set(MAPPING_PATHS)
    for row in rows:
        assert row["skipped"] or row["error"] <= row["tolerance"]
    assert case.flops == 2 * 5 * 2 * 4 * 16 * (2 * 16 if support == "full_head" else 2 * 8)


@pytest.mark.parametrize("weighted", [False, True])
def test_moments_are_those_of_two_passes(weighted: bool) -> None:
    case = moments_case(9, 5, 3, dtype=torch.float32, weighted=weighted, device=CPU)
    rows = case.calls["torch/float64"].args[0]
    assert (rows.weights is not None) == weighted
    w = None if rows.weights is None else rows.weights.numpy()
    expected = from_rows(rows.x.numpy(), rows.y.numpy(), w)
    for path in ("torch/float64", "torch/float32"):
        for got, name in zip(case.found(path), ("s_xx", "s_xy", "s_yy"), strict=True):
            want = torch.from_numpy(expected[name].astype(float))
            torch.testing.assert_close(got, want.triu() if name == "s_xx" else want, rtol=0, atol=1e-5)
    measured = case_rows(case, repeats=1, warmup=0)
    assert [bool(row["skipped"]) for row in measured[:2]] == [False, False]
    assert case.flops == 9 * 5 * (5 + 2 * 3)


def test_a_difference_is_by_the_largest_number_of_the_truth() -> None:
    rows = case_rows(case_of(constant(4.0, 3.0)), repeats=3, warmup=1)
    assert [row["error"] for row in rows] == [0.0, 0.25]
    assert all(row["p20_ms"] <= row["p50_ms"] <= row["p80_ms"] for row in rows)
    assert rows[1]["ratio"] == 1.0
    assert rows[0]["ratio"] > 0


def test_a_path_that_cannot_serve_says_why_and_is_not_timed() -> None:
    def found(path: str) -> list[torch.Tensor]:
        if path == "a":
            return [torch.ones(1)]
        raise KvmapError("no such device")

    rows = case_rows(replace(case_of(found), base="a"), repeats=1, warmup=0)
    assert [row["skipped"] for row in rows] == [None, "no such device"]
    assert rows[1]["p50_ms"] is rows[1]["ratio"] is rows[1]["error"] is None


def test_what_strays_and_what_is_too_slow_is_named() -> None:
    for second, strays in ((3.5, True), (3.95, False), (math.nan, True)):
        rows = case_rows(case_of(constant(4.0, second), 0.1), repeats=1, warmup=0)
        said = shortfalls(rows, {"work/b": 0.99})
        assert bool(said) == strays
        assert not strays or said[0].startswith("work/b is off by")
    assert shortfalls(rows, {"work/a": math.inf})[-1].endswith("times as fast as its base, asked inf")
    with pytest.raises(KvmapError, match="--at-least work/c: not measured; measured were work/a, work/b"):
        shortfalls(rows, {"work/c": 1.0})


def test_the_last_line_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    assert main([*SMALL, "--weights", "float8"]) == 0
    assert torch.get_num_threads() == threads
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(lines[-1])
    assert found["failures"] == []
    assert found["setting"]["tokens"] == 5
    assert {f"map_cache/head_local/float8/{path}" for path in ("batched", "per_head")} <= set(found["ratios"])
    assert found["ratios"]["second_moments/weighted/torch/float64"] == 1.0
    assert len(found["rows"]) == 2 * (len(MAPPING_PATHS) - 1) + 2 * 3
    for row in found["rows"]:
        assert row["skipped"] is None or f"{row['name']}: {row['skipped']}" in lines


def test_a_ratio_that_is_missed_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--operations", "second_moments", "--at-least", "second_moments/plain/torch/float32=1e9"]
    assert main([*SMALL, *asked]) == 2
    captured = capsys.readouterr()
    assert "second_moments/plain/torch/float32 is" in captured.err
    assert json.loads(captured.out.splitlines()[-1])["failures"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tokens", "0"], "--tokens=0: expected 1 or more"),
        (["--top-k", "4"], "top_k=4: the source has 3 layers; expected an integer from 1 to 3"),
        (["--at-least", "nothing=2"], "--at-least nothing: not measured"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main([*SMALL, *arguments]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="the refusal is of a CUDA device that is not there")
def test_a_gpu_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--device", "cuda"]) == 1
    assert "there is no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["24x2", "24x0x64", "ax2x64"])
def test_a_shape_that_is_none_is_refused(capsys: pytest.CaptureFixture[str], text: str) -> None:
    with pytest.raises(SystemExit):
        main(["--source", text])
    assert "expected LAYERSxHEADSxDIM" in capsys.readouterr().err


def test_layers_of_one_width_share_a_rotation() -> None:
    first, second, third = kernels._rotations(((2, 8), (1, 16), (4, 8)), CPU)
    assert first is third
    assert second.rotary_dim == 16
