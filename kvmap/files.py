"""Files written in one step and read with care: text, JSON and tensors. No pickle is ever loaded."""

from __future__ import annotations

import csv
import errno
import hashlib
import io
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvmap.errors import KvmapError

if TYPE_CHECKING:
    from torch import Tensor

OUTPUTS_REMEDY = "free space or mend the permissions there, or write elsewhere with outputs=<another folder>"

_TEMPORARY = re.compile(r"\..+\.writing-[0-9a-f]{12}(\.\w+)?")
_REFUSALS = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST}


class ArtifactMissing(KvmapError):
    """There is no such artifact or file."""


class ArtifactCorrupt(KvmapError):
    """An artifact or file is half-written, truncated or altered."""


class StorageError(KvmapError):
    """The file system would not take what was to be written."""

    def __init__(self, path: Path, error: OSError) -> None:
        """Args: where it was to be written, and what the system said."""
        meaning = os.strerror(error.errno) if error.errno else str(error)
        name = errno.errorcode.get(error.errno or 0, "OSError")
        super().__init__(f"cannot write {path}: {meaning} ({name}); {OUTPUTS_REMEDY}")


def fsync(path: Path) -> None:
    """Has the system write a file or folder out, so that it outlives a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):  # folders on some file systems
            raise
    finally:
        os.close(handle)


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turns the system's refusals to write into one message that names the place and the remedy."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or (error.errno in _REFUSALS and _concerns(error.filename, path)):
            raise StorageError(path, error) from error
        raise


def _concerns(name: str | bytes | None, path: Path) -> bool:
    """Whether a failed file is one we write (beside `path`) or a folder on the way there."""
    if name is None:
        return True
    failed = Path(os.fsdecode(name))
    return failed in path.parents or path.parent in failed.parents


def sha256_file(path: Path) -> str:
    """The sha256 of a file's bytes, in hex."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a temporary name beside `path`; what is written there takes the place of `path` in one step.

    If the block raises, `path` stays as it was.

    Raises:
        StorageError: The folder cannot be written to, or the disk is full.
    """
    # The suffix is kept: writers such as matplotlib choose the format by it.
    temporary = path.with_name(f".{path.stem}.writing-{secrets.token_hex(6)}{path.suffix}")
    try:
        with storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            fsync(temporary)
            os.replace(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink()


def remove_temporaries(folder: Path) -> None:
    """Removes what writers that were killed left in a folder and below, where none is writing any more."""
    for path in Path(folder).rglob(".*"):
        if _TEMPORARY.fullmatch(path.name):
            with suppress(OSError):
                path.unlink()


def link_or_copy(source: Path, target: Path) -> None:
    """The same file under a second name; a copy of it where the file system has no hard links.

    Raises:
        StorageError: See `replacing`.
    """
    with storage_errors(target):
        try:
            os.link(source, target)
        except FileExistsError:
            raise
        except OSError:
            shutil.copyfile(source, target)


def write_text(path: Path, text: str) -> None:
    """Writes a text file (UTF-8) in one step: a reader sees the old content or the new, never a part."""
    with replacing(Path(path)) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, content: Any) -> None:
    """Writes strict JSON in one step. NaN and infinities, for which JSON has no word, become null.

    Besides JSON's own types it takes tuples, paths (as text) and numbers of numpy and torch (by `.item()`).

    Raises:
        TypeError: For anything else.
        StorageError: See `replacing`.
    """
    write_text(path, json_text(content, indent=2) + "\n")


def json_text(content: Any, indent: int | None = None) -> str:
    """What `write_json` writes; on one line without `indent`."""
    return json.dumps(_finite(content), indent=indent, allow_nan=False, ensure_ascii=False)


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Writes rows as CSV in one step and gives the columns: every key, in order of first appearance."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    if columns:
        writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())
    return columns


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if not isinstance(value, bool | int | float | str) and hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(path: Path) -> Any:
    """Reads a JSON file.

    Raises:
        ArtifactMissing: There is no such file.
        ArtifactCorrupt: It is no JSON.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArtifactMissing(f"no file {path}") from None
    except ValueError as error:
        raise ArtifactCorrupt(f"{path} is no sound JSON file: {error}") from error


def save_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes tensors of any device, stride and sharing to a safetensors file in one step.

    Each is stored contiguous and by itself, so views and tensors that share memory come back equal, apart.

    Args:
        path: The file.
        tensors: By name.
        metadata: Text by name, stored in the header.

    Raises:
        StorageError: See `replacing`.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with replacing(Path(path)) as temporary:
        try:
            # An empty dict for metadata makes a file of no tensors unreadable.
            save_file(_own_memory(tensors), temporary, dict(metadata) if metadata else None)
        except SafetensorError as error:
            # safetensors speaks of a full disk in words only: "... No space left on device (os error 28)".
            if code := re.search(r"os error (\d+)", str(error)):
                raise OSError(int(code[1]), os.strerror(int(code[1])), str(temporary)) from error
            raise


def _own_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    owned: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        plain = tensor.detach().to("cpu").contiguous()
        place = plain.untyped_storage().data_ptr()
        if place in seen or plain.untyped_storage().nbytes() != plain.nbytes:
            plain = plain.clone()
        seen.add(plain.untyped_storage().data_ptr())
        owned[name] = plain
    return owned


def load_tensors(path: Path, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Reads the tensors of a safetensors file, on the CPU; only those named, if any are.

    Raises:
        ArtifactMissing: There is no such file.
        ArtifactCorrupt: It is no sound safetensors file, or lacks a tensor that is named.
    """
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load_file

    try:
        if names is None:
            return load_file(path)
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in names}
    except FileNotFoundError:
        raise ArtifactMissing(f"no file {path}") from None
    except SafetensorError as error:
        raise ArtifactCorrupt(f"{path} is no sound safetensors file: {error}") from error


def load_metadata(path: Path) -> dict[str, str]:
    """The text stored in a safetensors file's header; raises as `load_tensors` does."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except FileNotFoundError:
        raise ArtifactMissing(f"no file {path}") from None
    except SafetensorError as error:
        raise ArtifactCorrupt(f"{path} is no sound safetensors file: {error}") from error
