"""Where a model comes from, and the folder that holds its files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvmap.errors import KvmapError

_CONFIG_FILES = ["config.json", "generation_config.json"]
_TOKENIZER_FILES = [
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.jinja",
]
_TOKENIZER_FILES += ["tekken.json"]
_WEIGHT_FILES = ["*.safetensors", "*.safetensors.index.json"]
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


class ModelNotFound(KvmapError):
    """Model files that are not where they were said to be; the message says what to do."""


class InvalidSpec(KvmapError):
    """A dtype, device or attention that does not exist, or not on this machine."""


@dataclass(frozen=True)
class ModelSpec:
    """Where a model is and how to load it.

    Attributes:
        id: a hub id ("Qwen/Qwen3-8B"), a local folder, or "zoo:<name>" for the family shipped with kvmap.
        revision: a hub branch, tag or commit; pin a commit for results that can be repeated.
        gguf_file: a GGUF file within the folder or repository, instead of safetensors.
        dtype: "auto" (what the checkpoint is in), "float32", "bfloat16" or "float16".
        device: "auto" (a GPU if there is one), "cpu", "cuda", "cuda:1", ...
        device_map: accelerate's device map instead of `device`: "auto", "balanced", "balanced_low_0" or
            "sequential"; "disk", where all weights rest on disk and compute on the CPU; or module names and
            their devices ({"model": 0, "lm_head": "cpu"}), none within another.
        max_memory: what a named map may use of each device ({0: "20GiB", "cpu": "30GiB"}); what is left over
            stays on disk. None: what accelerate finds free.
        offload_folder: where weights go that a map leaves on disk and that do not lie in safetensors as they
            are used (experts that transformers joins). None: such models are refused.
        attn_implementation: transformers' attention; families that have no sdpa get "eager" in its place.
    """

    id: str
    revision: str | None = None
    gguf_file: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    device_map: str | Mapping[str, Any] | None = field(default=None, hash=False)
    max_memory: Mapping[int | str, int | str] | None = field(default=None, hash=False)
    offload_folder: str | None = None
    attn_implementation: str | None = "sdpa"

    @property
    def name(self) -> str:
        """What to call the model in messages and manifests."""
        parts = [self.id, *([f"@{self.revision}"] if self.revision else [])]
        return "".join([*parts, *([f":{self.gguf_file}"] if self.gguf_file else [])])


def config_folder(spec: ModelSpec) -> Path:
    """The folder with the model's config (for a GGUF file, with that file)."""
    return _folder(spec, [spec.gguf_file] if spec.gguf_file else _CONFIG_FILES)


def tokenizer_folder(spec: ModelSpec) -> Path:
    """The folder with the model's tokenizer files."""
    return _folder(spec, [spec.gguf_file] if spec.gguf_file else [*_CONFIG_FILES, *_TOKENIZER_FILES])


def weights_folder(spec: ModelSpec) -> Path:
    """The folder with everything; what a hub has and this machine has not is downloaded."""
    wanted = [spec.gguf_file] if spec.gguf_file else [*_CONFIG_FILES, *_TOKENIZER_FILES, *_WEIGHT_FILES]
    return _folder(spec, wanted)


def weight_files(spec: ModelSpec, folder: Path) -> list[Path]:
    """The files whose tensors loading reads.

    Raises:
        ModelNotFound: if there are none, or only pickled ones.
    """
    if spec.gguf_file:
        return [folder / spec.gguf_file]
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ModelNotFound(f"{spec.name}: {index.name} names {missing[0]}, which is not in {folder}")
        return [folder / name for name in names]
    pickled = sorted(path.name for path in folder.glob("*.bin"))
    hint = (
        f"it holds {pickled[0]}, but pickled weights are never loaded: convert them"
        if pickled
        else "download it again"
    )
    raise ModelNotFound(f"{spec.name}: no model.safetensors (or an index of shards) in {folder}; {hint}")


def is_local(model_id: str) -> bool:
    """Whether an id names a folder of this machine or the shipped family, and not a model of the hub."""
    return model_id.startswith("zoo:") or Path(model_id).expanduser().is_dir()


def _folder(spec: ModelSpec, patterns: list[str]) -> Path:
    folder = _local_folder(spec)
    if folder is None:
        folder = _download(spec, patterns)
    if spec.gguf_file and not (folder / spec.gguf_file).is_file():
        found = ", ".join(sorted(path.name for path in folder.glob("*.gguf"))) or "none"
        raise ModelNotFound(f"{spec.id}: no GGUF file {spec.gguf_file!r} there; GGUF files found: {found}")
    if not spec.gguf_file and not (folder / "config.json").is_file():
        raise ModelNotFound(
            f"{spec.id}: no config.json in {folder}; a model folder holds config.json, tokenizer files and "
            "safetensors (for a GGUF file, set gguf_file)"
        )
    return folder


def _local_folder(spec: ModelSpec) -> Path | None:
    """The local folder a spec names; None for a hub id."""
    if spec.id.startswith("zoo:"):
        from kvmap.zoo import weights_folder as zoo_folder

        return Path(zoo_folder(spec.id.removeprefix("zoo:")))
    folder = Path(spec.id).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_file():
        raise ModelNotFound(
            f"{spec.id} is a file; give its folder as the id (and a GGUF file's name as gguf_file)"
        )
    if spec.id.startswith(("/", "./", "../", "~")) or not _HUB_ID.fullmatch(spec.id):
        raise ModelNotFound(f"no such model folder: {spec.id}")
    return None


def _download(spec: ModelSpec, patterns: list[str]) -> Path:
    """The snapshot folder of a hub model, fetched as far as `patterns` ask and the cache lacks it."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return Path(snapshot_download(spec.id, revision=spec.revision, allow_patterns=patterns))
    except GatedRepoError as error:
        raise ModelNotFound(
            f"{spec.id} is gated: accept its licence on the hub, then log in with `hf auth login` or set "
            "HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelNotFound(
            f"{spec.id} has no revision {spec.revision!r} on the hub. Where a pair file pins it and the id "
            "is another, set pair.<role>.revision=null as well"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"{spec.id!r} is neither a local folder nor a model on the hub that you may read (a private "
            "one needs HF_TOKEN)"
        ) from error
    except HFValidationError as error:
        raise ModelNotFound(f"{spec.id!r} is neither a local folder nor a hub id: {error}") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
        why = "HF_HUB_OFFLINE is set" if offline else f"the hub did not give it ({_first_line(error)})"
        raise ModelNotFound(
            f"{spec.name}: no such local folder, not in the local hub cache, and {why}. Download it on a "
            f"machine that reaches the hub (`hf download {spec.id}`) and copy the cache, or give a local "
            "folder"
        ) from error


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
