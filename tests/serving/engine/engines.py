"""An engine in this process' service: vLLM's `LLM` with kvmap's connector."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvmap.files import ArtifactCorrupt
from kvmap.serving.engine import CONNECTOR, CONNECTOR_MODULE
from kvmap.serving.manifest import Manifest, read_manifest
from kvmap.serving.parts import part_name

Prompt = Sequence[int]


@dataclass(frozen=True)
class Answer:
    """Attributes: what was generated; kvmap's object; and prompt tokens that were not computed."""

    tokens: tuple[int, ...]
    record: dict[str, Any]
    n_cached: int

    @property
    def cause(self) -> str | None:
        return self.record.get("cause")

    @property
    def is_applied(self) -> bool:
        return self.record.get("outcome") == "applied"


class Engine:
    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def run(
        self,
        prompts: Sequence[Prompt],
        n_tokens: int,
        asked: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
    ) -> list[Answer]:
        """All at once, greedy; `asked` for all of them, or one each."""
        from vllm import SamplingParams

        each = list(asked) if isinstance(asked, Sequence) else [asked] * len(prompts)
        params = [
            SamplingParams(
                temperature=0,
                max_tokens=n_tokens,
                ignore_eos=True,
                extra_args=None if not one else {"kv_transfer_params": {"kvmap": one}},
            )
            for one in each
        ]
        outputs = self.llm.generate([{"prompt_token_ids": list(p)} for p in prompts], params, use_tqdm=False)
        return [
            Answer(
                tuple(output.outputs[0].token_ids),
                (output.kv_transfer_params or {}).get("kvmap", {}),
                output.num_cached_tokens or 0,
            )
            for output in outputs
        ]

    def publish(self, prompts: Sequence[Prompt]) -> None:
        for prompt, answer in zip(prompts, self.run(prompts, 1, {"publish": True}), strict=True):
            assert answer.record["published"] == len(prompt), answer.record

    def forget(self) -> None:
        """Empty the engine's own prefix cache."""
        assert self.llm.reset_prefix_cache()


@contextmanager
def running(model: Path, role: str, settings: dict[str, Any], **options: Any) -> Iterator[Engine]:
    from vllm import LLM

    config = {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            name: str(v) if isinstance(v, Path) else v for name, v in settings.items()
        },
    }
    known = {
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": 32,
        "max_model_len": 1024,
        "max_num_batched_tokens": 256,
        "max_num_seqs": 8,
    }
    llm = LLM(model=str(model), kv_transfer_config=config, **{**known, **options})
    try:
        yield Engine(llm)
    finally:
        llm.llm_engine.engine_core.shutdown()


def manifest_of(storage: Path, prompt: Prompt) -> tuple[Path, Manifest]:
    """The manifest's file and what it says, of the cache of these very tokens."""
    for path in (storage / "published").glob("*.json"):
        try:
            manifest = read_manifest(path.read_text().partition("\n")[2])
        except ArtifactCorrupt:
            continue
        if manifest.token_ids == tuple(prompt):
            return path, manifest
    raise AssertionError(f"no cache of these {len(prompt)} tokens is published")


def wait_until_published(storage: Path, prompt: Prompt, seconds: float = 20.0) -> None:
    """What is written after an answer takes its time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            manifest_of(storage, prompt)
            return
        except AssertionError:
            time.sleep(0.05)
    manifest_of(storage, prompt)


def part_of(storage: Path, prompt: Prompt, run: int, layer: int) -> Path:
    return storage / "parts" / manifest_of(storage, prompt)[1].group / part_name(run, layer)


def last_part_of(storage: Path, prompt: Prompt, layer: int) -> Path:
    """Of its last tokens, which no prefix that a target has kept reaches."""
    runs = [path for run in range(len(prompt)) if (path := part_of(storage, prompt, run, layer)).exists()]
    return runs[-1]


def rewrite_manifest(path: Path, **changed: Any) -> None:
    """Change fields of a manifest's JSON and leave its checksum as it was."""
    first, _, text = path.read_text().partition("\n")
    path.write_text(f"{first}\n{json.dumps({**json.loads(text), **changed})}")
