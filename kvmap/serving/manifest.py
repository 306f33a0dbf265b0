"""What a published cache consists of, as its manifest says; and before, while it is being written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvmap import __version__
from kvmap.files import ArtifactCorrupt
from kvmap.fit.features import CacheShape
from kvmap.models.identity import ModelIdentity
from kvmap.models.rope import Rotation
from kvmap.serving.keys import BLOCK_TOKENS, block_keys, whole_key

FORMAT, SCHEMA_VERSION = "kvmap-published-cache", 2


@dataclass(frozen=True)
class PartFile:
    """One layer over one run of tokens.

    Attributes:
        sha256: of the bytes of its keys and values.
        n_bytes: of the file.
    """

    sha256: str
    n_bytes: int


@dataclass(frozen=True)
class Run:
    """Tokens that one step of the source has cached: columns start:stop, one file a layer."""

    start: int
    stop: int
    files: tuple[PartFile, ...]


@dataclass(frozen=True, eq=False)
class Manifest:
    """A cache that lies complete on the storage, or is being written there.

    Positions are 0 … n_tokens − 1, without padding.

    Attributes:
        namespace: of `kvmap.serving.keys.namespace`.
        source: the model that computed it.
        group: of the store, which holds its parts.
        token_ids: what was read.
        shape: (n_kv_heads, head_dim) of each layer.
        dtype: of keys and values, as "bfloat16".
        rotations: what each layer's keys carry; None for a layer that has no rotation.
        runs: by token, first to last, without gaps; none while it is being written, when only its parts know.
        seconds: from the first page copied to the manifest.
    """

    namespace: str
    source: ModelIdentity
    group: str
    token_ids: tuple[int, ...]
    shape: CacheShape
    dtype: str
    rotations: tuple[Rotation | None, ...]
    runs: tuple[Run, ...] = ()
    seconds: float = 0.0

    @property
    def is_written(self) -> bool:
        """Whether it lies complete on the storage."""
        return bool(self.runs)

    @property
    def key(self) -> str:
        """What it is published under: that of its tokens as a whole."""
        return whole_key(self.namespace, self.token_ids)

    @property
    def block_keys(self) -> list[str]:
        """What it is found by."""
        return block_keys(self.namespace, self.token_ids)

    @property
    def n_bytes(self) -> int:
        """Of all parts."""
        return sum(file.n_bytes for run in self.runs for file in run.files)


def manifest_text(manifest: Manifest) -> str:
    """As JSON, with its own checksum."""
    record = {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "kvmap_version": __version__,
        "namespace": manifest.namespace,
        "source": asdict(manifest.source),
        "group": manifest.group,
        "token_ids": list(manifest.token_ids),
        "block_tokens": BLOCK_TOKENS,
        "shape": [list(layer) for layer in manifest.shape],
        "dtype": manifest.dtype,
        "rotations": rotation_records(manifest.rotations),
        "runs": [[r.start, r.stop, [[f.sha256, f.n_bytes] for f in r.files]] for r in manifest.runs],
        "seconds": manifest.seconds,
    }
    return json.dumps({**record, "checksum": _digest(record)}, separators=(",", ":"), allow_nan=False)


def read_manifest(text: str) -> Manifest:
    """Inverse of `manifest_text`, of a cache that lies complete on the storage.

    Raises:
        ArtifactCorrupt: it was cut or changed, is of another version, or its parts do not fit together.
    """
    manifest = _read(text)
    _check_runs(manifest)
    return manifest


def read_announcement(text: str) -> Manifest:
    """Inverse of `manifest_text`, of a cache that is being written.

    Raises:
        ArtifactCorrupt: see `read_manifest`; or it names parts.
    """
    manifest = _read(text)
    if manifest.is_written or len(manifest.rotations) != len(manifest.shape):
        raise ArtifactCorrupt("no announcement: it names parts, or not every layer's rotation")
    return manifest


def _read(text: str) -> Manifest:
    try:
        record = json.loads(text)
        checksum = record.pop("checksum")
        if record["format"] != FORMAT or record["schema_version"] != SCHEMA_VERSION:
            raise ArtifactCorrupt(
                f"format {record['format']!r}, schema {record['schema_version']!r}; this kvmap reads "
                f"{FORMAT!r}, schema {SCHEMA_VERSION}: publish it again"
            )
        if checksum != _digest(record):
            raise ArtifactCorrupt("the manifest was changed after it was written")
        return _from_record(record)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactCorrupt(f"no whole manifest of a published cache: {error!r}") from error


def rotation_records(rotations: Sequence[Rotation | None]) -> dict[str, Any]:
    """Each distinct rotation once, and which one each layer has (−1: none). Frequencies come back exactly."""
    distinct: list[Rotation] = []
    of_layer = []
    for rotation in rotations:
        if rotation is None:
            of_layer.append(-1)
            continue
        if not any(rotation is known for known in distinct):
            distinct.append(rotation)
        of_layer.append(next(i for i, known in enumerate(distinct) if known is rotation))
    records = [{"inv_freq": r.inv_freq.tolist(), "scaling": r.scaling, "layout": r.layout} for r in distinct]
    return {"distinct": records, "of_layer": of_layer}


def rotations_from(record: Mapping[str, Any]) -> tuple[Rotation | None, ...]:
    """Inverse of `rotation_records`."""
    distinct = [
        Rotation(torch.tensor(r["inv_freq"], dtype=torch.float32), float(r["scaling"]), r["layout"])
        for r in record["distinct"]
    ]
    return tuple(None if i < 0 else distinct[i] for i in record["of_layer"])


def _from_record(record: Mapping[str, Any]) -> Manifest:
    return Manifest(
        namespace=str(record["namespace"]),
        source=ModelIdentity(**record["source"]),
        group=str(record["group"]),
        token_ids=tuple(record["token_ids"]),
        shape=tuple((int(heads), int(width)) for heads, width in record["shape"]),
        dtype=str(record["dtype"]),
        rotations=rotations_from(record["rotations"]),
        runs=tuple(
            Run(int(start), int(stop), tuple(PartFile(str(sha), int(n)) for sha, n in files))
            for start, stop, files in record["runs"]
        ),
        seconds=float(record["seconds"]),
    )


def _check_runs(manifest: Manifest) -> None:
    at = 0
    for run in manifest.runs:
        if run.start != at or run.stop <= run.start or len(run.files) != len(manifest.shape):
            raise ArtifactCorrupt(f"tokens {run.start}:{run.stop} do not follow {at}, or lack layers")
        at = run.stop
    if at != len(manifest.token_ids) or len(manifest.rotations) != len(manifest.shape):
        raise ArtifactCorrupt(f"parts for {at} of {len(manifest.token_ids)} tokens: publish it again")


def _digest(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
