"""vLLM's own benchmark client, run for one point against one engine."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from kvmap.errors import KvmapError
from kvmap.files import read_json
from kvmap.serving.bench.points import Point

STATUS_SECONDS = 10.0


@dataclass(frozen=True)
class Engine:
    """An engine that runs, or a gateway.

    Attributes:
        url: without a path.
        model: name that it serves.
        tokenizer: folder or name, for the client's random prompts.
        counted_at: address of the engine that counts; None: its own. A gateway counts at its target.
    """

    url: str
    model: str
    tokenizer: str
    counted_at: str | None = None

    def counts(self) -> dict[str, int]:
        """Finished requests by outcome since it started.

        Raises:
            KvmapError: it does not answer as an engine of kvmap does.
        """
        address = f"{self.counted_at or self.url}/kvmap/status"
        try:
            with urlopen(address, timeout=STATUS_SECONDS) as answer:
                counts = json.load(answer)["counts"]
        except (URLError, OSError, ValueError, KeyError) as error:
            raise KvmapError(
                f"{address}: no status ({error}); expected an engine that python -m kvmap.serving.engine has "
                "started"
            ) from error
        return {name: int(value) for name, value in counts.items() if isinstance(value, int)}


def running_engine(url: str, tokenizer: str, counted_at: str | None = None) -> Engine:
    """The engine, or the gateway, at an address, under the name that it gives itself.

    Raises:
        KvmapError: none answers there, or none that kvmap has started.
    """
    url = url.rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise KvmapError(f"{url}: expected the address of an engine, as http://127.0.0.1:8001")
    try:
        with urlopen(f"{url}/v1/models", timeout=STATUS_SECONDS) as answer:
            model = json.load(answer)["data"][0]["id"]
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise KvmapError(f"{url}: no engine answers ({error}); start it, or mend the address") from error
    engine = Engine(url, model, tokenizer, counted_at)
    engine.counts()
    return engine


@dataclass(frozen=True)
class Measured:
    """What the client saw of one point.

    Attributes:
        ttft_ms: time to first token of a request, mean; ttft_median_ms, ttft_p90_ms: median, 90th percentile.
        whole_ms: time to the last token, mean.
        tpot_ms: time for each token after the first, mean.
        tokens_per_second: output tokens of all requests over the time of the run.
        n_completed: requests answered.
        counts: what the engine counted meanwhile.
    """

    ttft_ms: float
    ttft_median_ms: float
    ttft_p90_ms: float
    whole_ms: float
    tpot_ms: float
    tokens_per_second: float
    n_completed: int
    counts: dict[str, int]


def command(engine: Engine, point: Point, file: Path) -> list[str]:
    """The client's command line; `file` is where it writes its result."""
    extra = {"temperature": 0, **point.extra}
    return [
        *(sys.executable, "-m", "kvmap.serving.vllm.bench_client"),
        *("--backend", "openai", "--base-url", engine.url, "--endpoint", "/v1/completions"),
        *("--model", engine.model, "--served-model-name", engine.model, "--tokenizer", engine.tokenizer),
        *("--dataset-name", "random", "--random-input-len", str(point.n_tokens)),
        *("--random-output-len", str(point.n_output), "--random-range-ratio", "0", "--ignore-eos"),
        *("--num-prompts", str(point.n_requests), "--max-concurrency", str(point.concurrency)),
        *("--seed", str(point.seed), "--extra-body", json.dumps(extra), "--disable-tqdm"),
        *("--percentile-metrics", "ttft,tpot,e2el", "--metric-percentiles", "90"),
        *("--ready-check-timeout-sec", "0", "--save-result"),
        *("--result-dir", str(file.parent), "--result-filename", file.name),
    ]


def run(engine: Engine, point: Point) -> Measured:
    """Run the client, and read what it found.

    Raises:
        KvmapError: the client failed, with the end of what it said, or requests of the point did.
    """
    before = engine.counts()
    with tempfile.TemporaryDirectory(prefix="kvmap-bench-") as folder:
        file = Path(folder) / "result.json"
        done = subprocess.run(command(engine, point, file), capture_output=True, text=True, check=False)
        if done.returncode or not file.is_file():
            raise KvmapError(f"{point}: the client of vLLM failed: {(done.stderr or done.stdout)[-800:]}")
        found = read_json(file)
    after = engine.counts()
    if found["completed"] < point.n_requests:
        raise KvmapError(
            f"{point}: {found['completed']} of {point.n_requests} requests were answered by {engine.url}; "
            "look at the engine's log"
        )
    return Measured(
        ttft_ms=found["mean_ttft_ms"],
        ttft_median_ms=found["median_ttft_ms"],
        ttft_p90_ms=found["p90_ttft_ms"],
        whole_ms=found["mean_e2el_ms"],
        tpot_ms=found["mean_tpot_ms"],
        tokens_per_second=found["output_throughput"],
        n_completed=found["completed"],
        counts={name: value - before.get(name, 0) for name, value in after.items()},
    )
