"""What the source has read of each batch of texts: straight from the model, or by way of the disk."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvmap.diagnostics.texts import TextBatch
from kvmap.models.cache import KVCache
from kvmap.models.capture import prefill
from kvmap.models.pair import LoadedModel, ModelPair
from kvmap.models.rope import same_rotations
from kvmap.models.storage import load_kv, save_kv
from kvmap.progress import track


@dataclass(frozen=True, eq=False)
class SourceRead:
    """The source's caches of a batch: of the whole contexts, and of first halves if they are not its columns.

    They are not where the frequencies of the half are others than those of the whole.
    """

    whole: KVCache
    half: KVCache | None

    @classmethod
    def of(cls, source: LoadedModel, batch: TextBatch) -> SourceRead:
        whole = prefill(source, batch.ids, batch.mask)
        if not batch.halved or rotates_alike(source, batch):
            return cls(whole, None)
        return cls(whole, prefill(source, batch.ids[:, : batch.half], batch.mask[:, : batch.half]))


def rotates_alike(model: LoadedModel, batch: TextBatch) -> bool:
    """Whether the model's frequencies are the same for the first halves as for the whole contexts."""
    return same_rotations(model.rotations(batch.half), model.rotations(batch.ids.shape[1]))


@contextmanager
def source_reads(
    pair: ModelPair, batches: list[TextBatch], sequential: bool
) -> Iterator[Iterator[tuple[TextBatch, SourceRead]]]:
    """Each batch as the source has read it; a sequential source has read all and is gone by the first."""
    what = "diagnose: texts"
    if not sequential:
        yield ((batch, SourceRead.of(pair.source, batch)) for batch in track(batches, None, what))
        return
    with tempfile.TemporaryDirectory(prefix="kvmap-") as name:
        pair.release("target")
        for number, batch in enumerate(track(batches, None, f"{what} (source)")):
            _spill(SourceRead.of(pair.source, batch), Path(name) / str(number))
        pair.release("source")
        yield (
            (batch, _spilled(Path(name) / str(number)))
            for number, batch in enumerate(track(batches, None, what))
        )


def _spill(read: SourceRead, folder: Path) -> None:
    folder.mkdir()
    save_kv(read.whole, folder / "whole.safetensors")
    if read.half is not None:
        save_kv(read.half, folder / "half.safetensors")


def _spilled(folder: Path) -> SourceRead:
    """What `_spill` wrote, which is then gone."""
    half = folder / "half.safetensors"
    read = SourceRead(load_kv(folder / "whole.safetensors"), load_kv(half) if half.exists() else None)
    shutil.rmtree(folder)
    return read
