"""The command that starts an engine, without an engine."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
from pathlib import Path

import pytest

from kvmap.serving.engine import main, serve_environment


def dry_run(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main([*arguments, "--dry-run"]) == 0
    return shlex.split(capsys.readouterr().out)


def test_a_source_needs_no_mapper_and_passes_on_what_follows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "--role",
        "source",
        "--model",
        "zoo:tiny-small",
        "--storage",
        str(tmp_path),
        "--port",
        "8123",
    ]
    assert main([*arguments, "--dry-run", "--", "--enforce-eager"]) == 0
    command = shlex.split(capsys.readouterr().out)
    assert command[-1] == "--enforce-eager"
    assert command[command.index("--model") + 1].endswith("tiny-small")
    assert command[-3:-1] == ["--enable-prompt-tokens-details", "--enable-per-request-metrics"]
    config = json.loads(command[command.index("--kv-transfer-config") + 1])
    assert config["kv_role"] == "kv_producer"
    assert config["kv_load_failure_policy"] == "recompute"
    assert config["kv_connector_extra_config"] == {"storage": str(tmp_path), "max_storage_bytes": 4 << 30}


def test_a_target_is_given_its_mapper_and_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    command = dry_run(
        capsys,
        *("--role", "target", "--model", "m", "--storage", "s", "--mapper", str(tmp_path)),
        *(
            "--served-name",
            "big",
            "--max-model-len",
            "2048",
            "--hold-back",
            "4",
            "--allow-verdict",
            "try_mlp",
        ),
    )
    config = json.loads(command[command.index("--kv-transfer-config") + 1])
    extra = config["kv_connector_extra_config"]
    assert config["kv_role"] == "kv_consumer"
    assert extra["mapper"] == str(tmp_path)
    assert extra["storage"] == str(Path("s").absolute())
    assert (extra["hold_back"], extra["allow_verdicts"]) == (4, ["try_mlp"])
    assert command[command.index("--served-model-name") + 1] == "big"


@pytest.mark.parametrize(
    ("manifest", "more", "expected"),
    [
        ('{"target": {"dtype": "float32"}}', (), "float32"),
        ('{"target": {"dtype": "float32"}}', ("--dtype", "bfloat16"), "bfloat16"),
        ('{"target": {"dtype": "int3"}}', (), "auto"),
        ('{"target": 3}', (), "auto"),
        ("{", (), "auto"),
    ],
)
def test_a_target_runs_in_the_dtype_of_its_mapper(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], manifest: str, more: tuple[str, ...], expected: str
) -> None:
    (tmp_path / "manifest.json").write_text(manifest)
    arguments = ("--role", "target", "--model", "m", "--storage", "s", "--mapper", str(tmp_path), *more)
    command = dry_run(capsys, *arguments)
    assert command[command.index("--dtype") + 1] == expected


def test_an_engine_without_statistics_tells_no_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--role", "source", "--model", "m", "--storage", str(tmp_path), "--dry-run"]
    assert main([*arguments, "--", "--disable-log-stats"]) == 0
    command = shlex.split(capsys.readouterr().out)
    assert "--enable-per-request-metrics" not in command
    assert "--enable-prompt-tokens-details" in command


@pytest.mark.parametrize(
    ("mapper", "said"), [([], "needs --mapper"), (["--mapper", "/nowhere"], "no manifest.json")]
)
def test_a_target_without_a_mapper_is_refused(
    capsys: pytest.CaptureFixture[str], mapper: list[str], said: str
) -> None:
    assert main(["--role", "target", "--model", "m", "--storage", "s", *mapper, "--dry-run"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_it_says_what_to_install(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--role", "source", "--model", "m", "--storage", str(tmp_path)]) == 2
    assert "install it" in capsys.readouterr().err


def test_the_engines_processes_find_this_package() -> None:
    found = serve_environment({"PYTHONPATH": "/elsewhere"})["PYTHONPATH"].split(os.pathsep)
    assert (Path(found[0]) / "kvmap" / "serving").is_dir()
    assert found[1:] == ["/elsewhere"]
