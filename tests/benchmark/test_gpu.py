"""The study on a GPU, rehearsed on the CPU; and what it makes of its figures."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from kvmap.benchmark import gpu
from kvmap.benchmark.gpu_cases import PATHS, GpuCase, PairShape, in_fp8, weight_count
from kvmap.benchmark.gpu_checks import check_rows, dry_checks, gpu_checks
from kvmap.benchmark.gpu_reach import reach_rows
from kvmap.benchmark.gpu_study import DRY, FULL, Record
from kvmap.errors import KvmapError
from kvmap.kernels.map_cache import KINDS
from tests.test_house import HEAVY

CPU = torch.device("cpu")
SHAPE = PairShape(3, 2, 2, 16)


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory):
    """A dry run in a process without hydra and the like, where kernels are interpreted."""
    output = tmp_path_factory.mktemp("gpu") / "latency.json"
    program = (
        f"import sys\nfor name in {(*HEAVY, 'pandas', 'matplotlib')!r}: sys.modules[name] = None\n"
        f"from kvmap.benchmark.gpu import main\nsys.exit(main(['--dry-run', '--output', {str(output)!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=110, check=False
    )
    return done, output


@pytest.mark.slow
@pytest.mark.interpreter
def test_a_dry_run_does_everything_and_ends_with_one_json_object(rehearsed):
    done, output = rehearsed
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert json.loads(output.read_text())["reach"] == found["reach"]
    assert found["study"]["dry_run"] is True
    assert all(row["passed"] for row in found["checks"])
    assert {row["path"] for row in found["checks"]} == {"batched", "triton"}
    timed = {(row["support"], row["length"], row["path"]) for row in found["mapping"] if row.get("p50_ms")}
    for support in ("full_head", "head_local"):
        for length in DRY.lengths:
            for path in ("per_head_stripped", "batched", "compiled", "triton"):
                assert (support, length, path) in timed
    graphs = [row for row in found["mapping"] if row["path"].endswith("_graph")]
    assert all("no CUDA device" in row["note"] for row in graphs)
    assert {row["role"] for row in found["re_prefill"]} == {"source", "target"}
    assert all(row["how"] == "scaled from 2 of 30 layers" for row in found["re_prefill"])
    assert {row["support"] for row in found["tuning"]} == {"full_head", "head_local"}
    assert "skipped" not in found


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 1
    assert "--dry-run rehearses" in capsys.readouterr().err


def test_what_there_is_no_time_for_is_named():
    record = Record(seconds=0.0)
    found = gpu.measure(DRY, record, ["mapping", "re_prefill"])
    assert "mapping full_head at 3 tokens" in found["skipped"]
    assert "prefill of the target" in found["skipped"]
    assert all(row["reached"] is None for row in found["reach"])


def test_the_study_has_the_published_shapes():
    cache_map = PairShape(4, 2, 8, 128).cache_map("full_head", 4, torch.bfloat16, CPU)
    # [H]: 2 · L_t · H_t · (k · H_s · d_s) · d_t = 1.07 B at k = 8; here of 2 layers and k = 4
    assert weight_count(cache_map) == 2 * 2 * 8 * 4 * 8 * 128 * 128
    shape = FULL.shape
    weights = 2 * shape.n_target * shape.n_heads * FULL.top_k * shape.n_heads * shape.head_dim**2
    assert round(weights / 1e9, 2) == 1.07
    assert FULL.lengths[0] == 64
    assert FULL.lengths[-1] == 65536


@pytest.mark.parametrize("support", ["full_head", "head_local"])
@pytest.mark.parametrize("path", PATHS[:3])
def test_paths_write_alike(support, path):
    maps = {"": SHAPE.cache_map(support, 2, torch.float32, CPU)}
    case = GpuCase.prepare(SHAPE, maps, 9, torch.float32, CPU, batch_size=2)
    case.call("reference")()
    wanted = [case.output.tensor(kind, layer).clone() for kind in KINDS for layer in range(2)]
    for tensors in (case.output.keys, case.output.values):
        for tensor in tensors.values():
            tensor.zero_()
    case.call(path)()
    got = [case.output.tensor(kind, layer) for kind in KINDS for layer in range(2)]
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_float8_weights_are_a_sixteenth_off_at_most():
    plain = SHAPE.cache_map("head_local", 2, torch.float32, CPU)
    product, small = plain.products["key"][1], in_fp8(plain).products["key"][1]
    assert small.weight.dtype == torch.float8_e4m3fn
    back = small.weight.float() * small.scale.unsqueeze(1)
    assert ((back - product.weight).abs() <= product.weight.abs() / 16 + small.scale.unsqueeze(1) / 512).all()


def test_a_graph_needs_a_device():
    maps = {"": SHAPE.cache_map("full_head", 2, torch.float32, CPU)}
    with pytest.raises(KvmapError, match="no CUDA device"):
        GpuCase.prepare(SHAPE, maps, 4, torch.float32, CPU).call("batched_graph")


def test_checks_catch_a_path_that_errs(monkeypatch):
    rows = [row for row in check_rows(dry_checks(), CPU) if row["path"] == "batched"]
    assert all(row["passed"] for row in rows)
    from kvmap.benchmark import gpu_checks as module

    right = module.map_cache

    def wrong(cache_map, inputs, output, *, path):
        counts = right(cache_map, inputs, output, path="reference")
        if path != "reference":
            output.values[1].mul_(1.01)
        return counts

    monkeypatch.setattr(module, "map_cache", wrong)
    assert not any(row["passed"] for row in check_rows(dry_checks(), CPU))


def test_checks_cover_every_head_dim_and_kind():
    checks = gpu_checks()
    assert {check.shape.head_dim for check in checks} == {64, 80, 96, 112, 128, 256}
    assert {check.dtype for check in checks} == {torch.bfloat16, torch.float16, torch.float32}
    assert any(check.fp8 for check in checks)
    assert any(check.keep for check in checks)
    assert {check.support for check in checks if check.paged} == {"full_head", "head_local"}
    assert min(check.n_tokens for check in checks) == 1


def mapped(support, path, length, p50, share=0.8, peak=10**9):
    return {
        "support": support,
        "path": path,
        "length": length,
        "p50_ms": p50,
        "roofline_share": share,
        "peak_bytes": None if path.endswith("_graph") else peak,
        "source_bytes": length * 160_000,
        "output_bytes": length * 260_000,
    }


def test_reach_takes_the_fastest_path_and_leaves_float8_apart():
    found = {
        "study": {"chunk_tokens": 2048},
        "mapping": [
            mapped("full_head", "per_head_stripped", 32768, 500.0, 0.2),
            mapped("full_head", "triton", 32768, 120.0),
            mapped("full_head", "triton_fp8", 32768, 90.0),
            mapped("full_head", "triton_graph", 64, 1.2, 0.5),
            mapped("full_head", "triton", 64, 4.0, 0.5),
            mapped("full_head", "triton", 4096, 20.0, 0.6),
            mapped("head_local", "triton", 32768, 25.0, peak=10**8),
        ],
        "re_prefill": [{"role": "target", "length": 32768, "whole_p50_ms": 6000.0}],
        "checks": [{"passed": True}, {"passed": None}],
    }
    by_name = {row["what"]: row for row in reach_rows(found)}
    full = by_name["full_head: mapping 32768 tokens"]
    assert (full["got"], full["by"], full["reached"]) == (120.0, "triton", True)
    assert by_name["full_head: re-prefill over mapping, 32768 tokens"]["got"] == 50.0
    assert by_name["full_head: fixed cost at 64 tokens, as a graph"]["got"] == 1.2
    share = by_name["full_head: least roofline share from 4096 tokens on"]
    assert (share["got"], share["by"], share["reached"]) == (0.6, "triton at 4096", False)
    memory = by_name["full_head: memory besides output and mapper, over one chunk of both caches"]
    assert memory["got"] == pytest.approx(1e9 / (2048 * 420_000))
    assert memory["reached"] is False
    assert by_name["head_local: mapping 32768 tokens"]["reached"] is False
    assert by_name["head_local: fixed cost at 64 tokens, as a graph"]["reached"] is None
    assert by_name["checks against the reference that fail"]["reached"] is True


@pytest.mark.gpu
def test_a_captured_graph_writes_what_the_call_does():
    device = torch.device("cuda")
    shape = PairShape(3, 2, 2, 64)
    maps = {"": shape.cache_map("full_head", 2, torch.bfloat16, device)}
    for path in ("batched", "triton"):
        case = GpuCase.prepare(shape, maps, 100, torch.bfloat16, device)
        case.call(path)()
        wanted = case.output.keys[1].clone()
        replay = case.call(f"{path}_graph")
        case.output.keys[1].zero_()
        replay()
        torch.testing.assert_close(case.output.keys[1], wanted)


@pytest.mark.gpu
@pytest.mark.slow
def test_all_checks_pass_on_a_gpu():
    rows = list(check_rows(gpu_checks(), torch.device("cuda")))
    assert [row for row in rows if row["passed"] is False] == []
