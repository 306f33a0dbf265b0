"""Bad input: one clear message, a non-zero exit, and nothing lost that was finished."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from kvmap import run as cli
from kvmap.zoo import weights_folder
from tests.cli.conftest import Answer
from tests.cli.test_chain import run_directory

BAD_INPUT = {
    ("pair=tinny",): "Did you mean pair=tiny?",
    ("mapper=liner",): "Did you mean mapper=linear?",
    ("mapper.topk=3",): "topk",
    ("+mapper.topk=3",): "mapper.topk: nothing reads this key",
    ("mapper.top_k=0",): "mapper.top_k=0: expected",
    ("mapper.ridge_lambda=-1", "stages=[fitt]"): "2 mistakes",
    ("mapper.top_k=99",): "mapper.top_k=99: the source has",
    ("mapper.top_k=99", "pair.source.geometry.n_layers=99"): "2 mistakes",
    ("pair=custom", "pair.source.id=/no/such/folder", "pair.target.id=zoo:tiny-large"): "/no/such/folder",
    ("pair=custom", "pair.source.id=zoo:tiny-smal", "pair.target.id=zoo:tiny-large"): "tiny-small",
    ("pair=custom", "pair.source.id=zoo:tiny-small"): "pair.target.id is not set; set pair.target.id=<value>",
    ("pair=custom",): "2 mistakes",
    ("pair.source.geometry.n_layers=99",): "pair.source.geometry.n_layers=99",
    ("calibration.sequence_length=100000",): "positions",
    ("calibration=jsonl", "calibration.data.path=/no/such/file.jsonl"): "/no/such/file.jsonl",
    ("calibration.n_sequences=2", "calibration.sequence_length=32"): "calibration.n_sequences=2: gives about",
}


def assert_one_message(err: str) -> None:
    assert err.count("kvmap: ") == 1
    assert "Traceback" not in err


@pytest.mark.parametrize("overrides", BAD_INPUT)
def test_bad_input_gets_one_message_and_a_status(
    call: Callable[..., Answer], shared_outputs: Path, overrides: tuple[str, ...]
) -> None:
    status, _, err = call(f"outputs={shared_outputs}", "stages=[plan,fit]", *overrides)
    assert status in (cli.EXIT_FAILED, cli.EXIT_CONFIG)
    assert BAD_INPUT[overrides] in err
    assert_one_message(err)


@pytest.mark.parametrize("n_documents", [0, 3])
def test_a_corpus_that_is_too_short_is_refused(
    call: Callable[..., Answer], tmp_path: Path, n_documents: int
) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(
        "".join(json.dumps({"text": f"anna is in rome . {i}"}) + "\n" for i in range(n_documents))
    )
    data = ("calibration=jsonl", f"calibration.data.path={corpus}")
    status, _, err = call(f"outputs={tmp_path}", "stages=[fit]", *data)
    assert status == cli.EXIT_FAILED
    assert "corpus.jsonl" in err
    assert "sequences" in err
    assert_one_message(err)


def test_tokenizers_that_differ_are_refused(call: Callable[..., Answer], tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(weights_folder("tiny-small"), other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["rome"], vocabulary["oslo"] = vocabulary["oslo"], vocabulary["rome"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    pair = ("pair=custom", f"pair.source.id={other}", "pair.target.id=zoo:tiny-large")
    status, _, err = call(f"outputs={tmp_path}", "stages=[fit]", *pair)
    assert status == cli.EXIT_FAILED
    assert "tokenizers differ" in err
    assert "rome" in err or "oslo" in err
    assert_one_message(err)


def test_outputs_that_cannot_be_written(call: Callable[..., Answer], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    status, _, err = call(f"outputs={tmp_path / 'file' / 'below'}")
    assert status == cli.EXIT_FAILED
    assert "set outputs=" in err
    assert_one_message(err)


def test_a_full_disk_is_named_and_leaves_no_artifact(
    call: Callable[..., Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fills up while the moments are written; nothing half-written stays, the record says why."""
    from safetensors import torch as safetensors_torch

    def full(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "moments.safetensors")

    monkeypatch.setattr(safetensors_torch, "save_file", full)
    status, out, err = call(f"outputs={tmp_path}", "stages=[calibrate]")
    assert status == cli.EXIT_FAILED
    assert "No space left on device" in err
    assert "outputs=" in err
    assert_one_message(err)
    assert not [
        path for path in (tmp_path / "artifacts" / "moments").iterdir() if not path.name.startswith(".")
    ]
    assert json.loads((run_directory(out) / "run.json").read_text())["status"] == "failed"


@pytest.mark.parametrize(
    ("kind", "file"), [("moments", "moments.0.safetensors"), ("mapper", "mapper.safetensors")]
)
@pytest.mark.parametrize("damage", ["altered", "truncated"])
def test_a_damaged_artifact_is_set_aside_and_made_again(
    call: Callable[..., Answer], tmp_path: Path, kind: str, file: str, damage: str
) -> None:
    common = (f"outputs={tmp_path}", "stages=[calibrate,fit]", "calibration.n_sequences=12", "mapper.top_k=1")
    call(*common)
    (artifact,) = (tmp_path / "artifacts" / kind).glob("*/")
    content = bytearray((artifact / file).read_bytes())
    content[-1] ^= 1
    (artifact / file).write_bytes(content[: len(content) // 2] if damage == "truncated" else content)
    status, out, err = call(*common)
    assert status == 0, err
    metrics = json.loads((run_directory(out) / "metrics.json").read_text())
    stage = {"moments": "calibrate/moments", "mapper": "fit/mapper"}[kind]
    assert metrics[f"{stage}/all/reused"]["value"] == 0.0
    assert list(artifact.parent.glob(f"{artifact.name}.corrupt-*"))


@pytest.mark.parametrize("stage", ["calibrate", "fit", "benchmark"])
def test_interrupt_in_any_stage(
    call: Callable[..., Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """Status 130, one message; what the stages before finished is there, what this one began is not."""

    def interrupted(*_: object, **__: object) -> NoReturn:
        raise KeyboardInterrupt

    inner = {
        "calibrate": "kvmap.fit.calibrate.prefill",
        "fit": "kvmap.stages.build.fit_linear",
        "benchmark": "kvmap.stages.benchmark.latency_rows",
    }[stage]
    monkeypatch.setattr(inner, interrupted)
    status, out, err = call(f"outputs={tmp_path}", "stages=[calibrate,fit,benchmark]")
    assert status == cli.EXIT_INTERRUPTED
    assert "what was finished is kept" in err
    assert_one_message(err)
    record = json.loads((run_directory(out) / "run.json").read_text())
    assert (record["status"], record["error"]) == ("failed", "interrupted")
    assert record["stages"][stage]["status"] == "failed"
    done = {"calibrate": [], "fit": ["moments"], "benchmark": ["moments", "mapper"]}[stage]
    for kind in ("moments", "mapper"):
        whole = list((tmp_path / "artifacts" / kind).glob("*/artifact.json"))
        assert len(whole) == (kind in done)
