"""A model's own cache of the calibration text, on disk; two of them are the captures of a pair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from kvmap.files import link_or_copy, read_json, write_json
from kvmap.fit.captures import Batch, Captures, batches_of
from kvmap.fit.reading import read_to_disk, remove_unfinished
from kvmap.models.cache import KVCache
from kvmap.models.loaded import LoadedModel
from kvmap.models.pair import ModelPair
from kvmap.models.spec import ModelSpec
from kvmap.models.storage import load_kv

RECORD = "trace.json"


@dataclass(frozen=True)
class Trace:
    """A folder of one model's caches: `{start}.trace.safetensors` for each batch.

    Attributes:
        folder: where they lie.
        batches: (start, stop) sequence numbers of each.
    """

    folder: Path
    batches: tuple[Batch, ...]

    @classmethod
    def open(cls, folder: Path) -> Trace:
        """A trace that `read_trace` wrote."""
        batches = read_json(folder / RECORD)["batches"]
        return cls(folder, tuple((int(start), int(stop)) for start, stop in batches))

    def path(self, start: int) -> Path:
        """The file of one batch."""
        return self.folder / f"{start}.trace.safetensors"

    def parts(self, numbers: Sequence[int]) -> list[tuple[int, list[int]]]:
        """The batches that hold some sequences: (start, its members among `numbers`)."""
        held = [(start, [n for n in numbers if start <= n < stop]) for start, stop in self.batches]
        return [(start, members) for start, members in held if members]

    def load(self, start: int, numbers: Sequence[int]) -> KVCache:
        """The caches of some sequences of one batch, in their order."""
        return load_kv(self.path(start)).select_rows([number - start for number in numbers])


@dataclass(frozen=True)
class PairedTraces(Captures):
    """Captures whose source and target were read apart: `folder` is the source's trace.

    Attributes:
        target_folder: the target's trace, of the same batches.
    """

    target_folder: Path

    @classmethod
    def of(cls, source: Trace, target: Trace) -> PairedTraces:
        """The captures of an ordered pair."""
        return cls(source.folder, source.batches, False, target.folder)

    def path(self, start: int, what: str) -> Path:
        """See `Captures.path`."""
        return (self.target_folder if what == "target" else self.folder) / f"{start}.trace.safetensors"


def read_trace(
    model: ModelSpec | LoadedModel,
    input_ids: Tensor,
    folder: Path,
    waiting: Path,
    *,
    batch_size: int,
    layerwise: bool | None = None,
) -> Trace:
    """Let one model read the calibration text, and keep its caches; it is in memory no longer than that.

    Args:
        model: what reads; one in memory stays there.
        input_ids: (n_sequences, tokens) int64, no padding.
        folder: where the trace goes.
        waiting: where unfinished batches wait; what lies there is of the same trace, cut short, and is not
            read again. The caller removes it once the trace is kept.
        batch_size: sequences per forward pass, and per file.
        layerwise: see `kvmap.fit.spill.Spill`.

    Disk: the bytes of the cache over all tokens, in the model's dtype.
    """
    batches = tuple(batches_of(len(input_ids), batch_size))
    remove_unfinished(waiting)
    ids = {str(start): input_ids[start:stop] for start, stop in batches}
    paths = {str(start): Trace(waiting, batches).path(start) for start, _ in batches}
    read_to_disk(ModelPair(model, model), "source", ids, paths, waiting / "layers", layerwise=layerwise)
    folder.mkdir(parents=True, exist_ok=True)
    for path in paths.values():
        link_or_copy(path, folder / path.name)
    write_json(folder / RECORD, {"batches": [list(batch) for batch in batches]})
    return Trace(folder, batches)
