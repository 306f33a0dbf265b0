"""Both models' caches of the calibration text, kept on disk: what needs rows reads these, not the models."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvmap.files import link_or_copy, load_tensors, read_json, save_tensors, write_json
from kvmap.fit.pair_moments import calibration_rows
from kvmap.fit.reading import read_to_disk, remove_unfinished
from kvmap.fit.sensitivity import N_BOUNDARIES, read_sensitivity
from kvmap.models.cache import KVCache
from kvmap.models.capture import prefill
from kvmap.models.pair import ModelPair, Side
from kvmap.models.storage import load_kv, load_layers, save_kv
from kvmap.progress import track

RECORD = "captures.json"
ROLES: tuple[Side, Side] = ("source", "target")

Batch = tuple[int, int]


@dataclass(frozen=True)
class SensitivityOptions:
    """How attention-sensitivity weights are taken ([C]); see `kvmap.fit.sensitivity`.

    Attributes:
        n_boundaries: prefix lengths at which attention is looked at.
        native_head, token_stride: which rows count; see `kvmap.fit.pair_moments.calibration_rows`.
    """

    n_boundaries: int = N_BOUNDARIES
    native_head: int = 1
    token_stride: int = 1


@dataclass(frozen=True, eq=False)
class CapturedBatch:
    """Caches of the same columns from both models, as captured.

    Attributes:
        split: "fit" or "held_out".
        sequences: numbers of its sequences among all.
        source, target: rotated caches.
        sensitivity: raw attention-sensitivity weights by (kind, target layer), (batch, H_t, tokens), where
            they were taken; see `kvmap.fit.sensitivity`.
    """

    split: str
    sequences: tuple[int, ...]
    source: KVCache
    target: KVCache
    sensitivity: Mapping[tuple[str, int], Tensor] | None = None


Stream = Generator[CapturedBatch, None, None]


@dataclass(frozen=True)
class Captures:
    """A folder of caches: `{start}.source.safetensors`, `{start}.target.safetensors` for each batch.

    Attributes:
        folder: where they lie.
        batches: (start, stop) sequence numbers of each.
        sensitivity: whether `{start}.sensitivity.safetensors` lie there too.
    """

    folder: Path
    batches: tuple[Batch, ...]
    sensitivity: bool

    @classmethod
    def open(cls, folder: Path) -> Captures:
        """Captures that `capture` wrote."""
        record = read_json(folder / RECORD)
        batches = tuple((int(start), int(stop)) for start, stop in record["batches"])
        return cls(folder, batches, bool(record["sensitivity"]))

    def stream(self, splits: Mapping[str, Sequence[int]]) -> Stream:
        """Every batch, its sequences apart by split; those in no split are left out."""
        for start, stop in track(self.batches, len(self.batches), "calibrate: captured caches"):
            wanted = {split: _members(numbers, start, stop) for split, numbers in splits.items()}
            if not any(wanted.values()):
                continue
            source, target = (load_kv(self.path(start, role)) for role in ROLES)
            weights = self.weights(start) if self.sensitivity else None
            for split, numbers in wanted.items():
                if numbers:
                    rows = [number - start for number in numbers]
                    yield CapturedBatch(
                        split,
                        tuple(numbers),
                        source.select_rows(rows),
                        target.select_rows(rows),
                        None if weights is None else {key: value[rows] for key, value in weights.items()},
                    )

    def layers(
        self, role: str, kind: str, layers: Sequence[int], start: int, *, stripped: bool = True
    ) -> list[Tensor]:
        """Some layers of one batch, (batch, n_kv_heads, tokens, head_dim) float32; the rest stays on disk."""
        return load_layers(self.path(start, role), kind, layers, stripped=stripped)

    def mask(self, start: int) -> Tensor:
        """(batch, tokens) bool of one batch, True at real tokens."""
        return load_tensors(self.path(start, "source"), ["mask"])["mask"]

    def path(self, start: int, what: str) -> Path:
        """The file of one batch."""
        return self.folder / f"{start}.{what}.safetensors"

    def weights(self, start: int) -> dict[tuple[str, int], Tensor]:
        """Raw attention-sensitivity weights of one batch, by kind and target layer."""
        tensors = load_tensors(self.path(start, "sensitivity"))
        return {(kind, layer): tensors[f"{kind}.{layer}"] for kind, layer in _names(tensors)}


def capture(
    pair: ModelPair,
    input_ids: Tensor,
    folder: Path,
    *,
    batch_size: int,
    batches: Sequence[Batch] | None = None,
    sequential: bool = False,
    sensitivity: SensitivityOptions | None = None,
    layerwise: bool | None = None,
    resume: bool = False,
) -> Captures:
    """Let both models read the calibration sequences, and keep their caches.

    Args:
        pair: the two models, loaded on first use.
        input_ids: (n_sequences, tokens) int64, no padding.
        folder: where the caches go; `Captures.open` reads it.
        batch_size: sequences per forward pass, and per file.
        batches: those to read, of `batches_of`; all where None.
        sequential: never hold both models in memory.
        sensitivity: also take the target's attention-sensitivity weights; None: do not. The target is then
            read batch by batch.
        layerwise: whether models are read layer by layer, see `kvmap.models.layerwise`; None: those of whose
            layers any is offloaded. Only beside `sequential`.
        resume: what lies in the folder is of the same capture, cut short, and is not read again.

    Disk: the bytes of both caches over all tokens, in the models' dtypes.
    """
    batches = tuple(batches_of(len(input_ids), batch_size) if batches is None else batches)
    found = Captures(folder, batches, sensitivity is not None)
    (folder / RECORD).unlink(missing_ok=True)  # of an earlier capture, over whose files this one writes

    remove_unfinished(folder)
    if not resume:
        for file in folder.glob("*.safetensors"):
            file.unlink()
    if sequential:
        for role in ROLES:
            _read_role(pair, role, input_ids, found, sensitivity, layerwise)
    else:
        for batch in track(batches, len(batches), "capture: both models read"):
            for role in ROLES:
                _read_batch(pair, role, input_ids, found, batch, sensitivity)
    _write_record(found)
    return found


def _read_role(
    pair: ModelPair,
    role: Side,
    input_ids: Tensor,
    found: Captures,
    sensitivity: SensitivityOptions | None,
    layerwise: bool | None,
) -> None:
    """All batches of one model, which is in memory alone, and is not afterwards."""
    if role == "source" or sensitivity is None:
        ids = {str(start): input_ids[start:stop] for start, stop in found.batches}
        paths = {str(start): found.path(start, role) for start, _ in found.batches}
        read_to_disk(pair, role, ids, paths, found.folder / f"layers.{role}", layerwise=layerwise)
        return
    pair.release("source")
    for batch in track(found.batches, len(found.batches), f"capture: {role} reads"):
        _read_batch(pair, role, input_ids, found, batch, sensitivity)
    pair.release(role)


def _read_batch(
    pair: ModelPair,
    role: Side,
    input_ids: Tensor,
    found: Captures,
    batch: Batch,
    sensitivity: SensitivityOptions | None,
) -> None:
    """One batch of one model, unless its files are there."""
    start, stop = batch
    path, ids = found.path(start, role), input_ids[start:stop]
    if path.is_file():
        return
    if role == "source" or sensitivity is None:
        save_kv(prefill(pair.source if role == "source" else pair.target, ids), path)
        return
    rows = calibration_rows(torch.ones_like(ids), sensitivity.native_head, sensitivity.token_stride)
    kv, weights = read_sensitivity(pair.target, ids, None, rows, boundaries=sensitivity.n_boundaries)
    tensors = {f"{kind}.{layer}": tensor for (kind, layer), tensor in weights.items()}
    save_tensors(found.path(start, "sensitivity"), tensors)
    save_kv(kv, path)  # last: a batch whose cache is there is done


def batches_of(n_sequences: int, batch_size: int) -> list[Batch]:
    """(start, stop) sequence numbers of each batch."""
    return [(start, min(start + batch_size, n_sequences)) for start in range(0, n_sequences, batch_size)]


def join_captures(parts: Sequence[Path], folder: Path) -> None:
    """One folder of captures from parts that hold some batches each; their files are linked, not copied.

    Raises:
        StorageError: The folder cannot be written to.
    """
    found = [Captures.open(part) for part in parts]
    for part in found:
        for file in sorted(part.folder.glob("*.safetensors")):
            link_or_copy(file, folder / file.name)
    batches = tuple(sorted(batch for part in found for batch in part.batches))
    _write_record(Captures(folder, batches, all(part.sensitivity for part in found)))


def _write_record(found: Captures) -> None:
    batches = [list(batch) for batch in found.batches]
    write_json(found.folder / RECORD, {"batches": batches, "sensitivity": found.sensitivity})


def _names(tensors: Mapping[str, Tensor]) -> list[tuple[str, int]]:
    return [(kind, int(layer)) for kind, layer in (name.split(".") for name in tensors)]


def _members(numbers: Sequence[int], start: int, stop: int) -> list[int]:
    return sorted(number for number in numbers if start <= number < stop)
