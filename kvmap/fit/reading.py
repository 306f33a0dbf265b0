"""A model of a pair reads batches into cache files; layer by layer where it does not fit in memory."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from kvmap.files import remove_temporaries
from kvmap.models.capture import prefill
from kvmap.models.layerwise import prefill_by_layers
from kvmap.models.pair import ModelPair, Side
from kvmap.models.placement import is_offloaded
from kvmap.models.storage import save_kv
from kvmap.progress import track


def remove_unfinished(folder: Path) -> None:
    """Remove what writers that were killed left in a folder that nobody writes to any more, and below it.

    safetensors writes a file under a name of its own (`.tmp...`) beside the one it was given.
    """
    remove_temporaries(folder)
    for path in folder.rglob(".tmp*"):
        if path.is_file():
            path.unlink(missing_ok=True)


def read_to_disk(
    pair: ModelPair,
    role: Side,
    batches: Mapping[str, Tensor],
    paths: Mapping[str, Path],
    layers_folder: Path,
    *,
    layerwise: bool | None = None,
    alone: bool = True,
) -> None:
    """One model reads batches into cache files; those whose file is there already are left out.

    Args:
        pair: the two models.
        role: which of them reads.
        batches: token ids (batch, tokens) int64, without padding, by name.
        paths: the file of each name.
        layers_folder: where unfinished layers wait, if it reads layer by layer.
        layerwise: see `Spill`.
        alone: the other model leaves memory before this one reads, and this one after it has.
    """
    missing = {name: ids for name, ids in batches.items() if not paths[name].is_file()}
    if not missing:
        return
    if alone:
        pair.release("target" if role == "source" else "source")
    model = pair.source if role == "source" else pair.target
    if is_offloaded(model.body) if layerwise is None else layerwise:
        prefill_by_layers(model, missing, layers_folder, lambda name, kv: save_kv(kv, paths[name]))
        shutil.rmtree(layers_folder, ignore_errors=True)
    else:
        for name, ids in track(missing.items(), len(missing), f"calibrate: {role} reads"):
            save_kv(prefill(model, ids), paths[name])
    del model
    if alone:
        pair.release(role)
