"""Prefill layer by layer: all batches pass one layer before any passes the next, so its weights come in once.

For a model whose weights do not fit in memory together. accelerate's offload brings each layer in anew for
each batch; here a layer is brought in once for all batches of a pass. Hidden states and finished layers wait
on disk, so memory holds the weights of one layer and the states of one batch. What runs is the model's own
forward on the same batches, entered at a layer and left behind it: masks, rotations and arithmetic are those
of `kvmap.models.capture.prefill`, and so are the caches, bit for bit.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kvmap.files import load_tensors, save_tensors
from kvmap.models.alignment import AlignedIds, take_columns
from kvmap.models.cache import KVCache, announcing_cache, cache_argument
from kvmap.models.capture import positions_from_mask, prefill
from kvmap.models.geometry import UnsupportedModel
from kvmap.models.loaded import LoadedModel
from kvmap.models.placement import weights_in_memory
from kvmap.models.storage import load_kv, save_kv
from kvmap.progress import track


@torch.no_grad()
def prefill_by_layers(
    loaded: LoadedModel,
    batches: Mapping[str, Tensor],
    folder: Path,
    finished: Callable[[str, KVCache], None],
) -> None:
    """Read whole contexts without padding, all of them through one layer before the next.

    Disk: the caches of all batches, in the model's dtype, and one set of hidden states. What lies in `folder`
    from a pass over the same batches that was cut short is gone on with: at most one layer of one batch is
    computed twice.

    Args:
        loaded: the model, of any device map.
        batches: token ids (batch, tokens) int64 of each, by a name that will do for a folder.
        folder: where layers and hidden states wait, a folder for each batch; empty afterwards.
        finished: told of each batch's name and cache, on the CPU, as of `prefill`; in order, after the last
            layer. A batch it has been told of is not kept: it is not to be among those of a further call.

    Raises:
        UnsupportedModel: a layer that gives more than hidden states, or contexts that `prefill` refuses.
    """
    reads = {name: _Read(loaded, ids, folder / name) for name, ids in batches.items()}
    layers: Any = loaded.body.layers
    outside = [module for module in loaded.body.children() if module is not layers]
    with weights_in_memory(*outside):
        if new := [read for read in reads.values() if read.n_done == 0]:
            with weights_in_memory(layers[0]):
                for read in new:
                    read.check()
        for number in track(range(len(layers)), len(layers), "prefill: layer by layer"):
            waiting = [read for read in reads.values() if read.n_done <= number]
            if waiting:
                with weights_in_memory(layers[number]):
                    for read in waiting:
                        read.run(number)
    for name, read in reads.items():
        finished(name, read.cache())
        shutil.rmtree(read.folder)


class _Read:
    """One batch on its way through the layers.

    Its folder holds `{layer}.safetensors`, a cache of one layer each, and `hidden.{n}.safetensors`: the
    hidden states that layer n is given. A layer is done once what comes after it is there.
    """

    def __init__(self, loaded: LoadedModel, ids: Tensor, folder: Path) -> None:
        self.loaded, self.folder = replace(loaded, alignment=None), folder
        self.given = torch.ones_like(ids, dtype=torch.bool)
        self.aligned: AlignedIds | None = None
        mask = self.given
        if loaded.alignment is not None:
            self.aligned = loaded.alignment.align(ids, mask)
            ids, mask = self.aligned.ids, self.aligned.mask.bool()
        self.ids, self.mask = ids.to(loaded.device), mask.to(loaded.device)
        self.positions = positions_from_mask(self.mask)
        self.n_layers = loaded.geometry.n_layers
        done = [int(path.name.split(".")[1]) for path in folder.glob("hidden.*.safetensors")]
        last = self._layer(self.n_layers - 1).is_file()
        self.n_done = self.n_layers if last else max(done, default=0)

    def check(self) -> None:
        """Refuse what `prefill` would refuse, before anything is computed."""
        prefill(self.loaded, self.ids, self.mask, n_layers=1)

    def run(self, number: int) -> None:
        """One layer: its keys and values to disk, then what the next layer is given."""
        before = self._hidden(number)
        hidden = load_tensors(before)["hidden"] if number else None
        passed = _pass_layer(self.loaded, number, self.ids, self.mask, self.positions, hidden)
        save_kv(passed.cache, self._layer(number))
        if passed.hidden is not None:
            save_tensors(self._hidden(number + 1), {"hidden": passed.hidden})
        before.unlink(missing_ok=True)
        self.n_done = number + 1

    def cache(self) -> KVCache:
        """All layers, as `prefill` gives them; on the CPU, backed by the files."""
        parts = [load_kv(self._layer(layer)) for layer in range(self.n_layers)]
        rotations = [part.rotations[0] for part in parts if part.rotations is not None]
        kv = replace(
            parts[0],
            keys=tuple(part.keys[0] for part in parts),
            values=tuple(part.values[0] for part in parts),
            rotations=tuple(rotations),
            owner=self.loaded.identity,
        )
        if self.aligned is None:
            return kv
        return take_columns(kv, self.aligned, positions_from_mask(self.given), self.given)

    def _layer(self, number: int) -> Path:
        return self.folder / f"{number}.safetensors"

    def _hidden(self, number: int) -> Path:
        return self.folder / f"hidden.{number}.safetensors"


@dataclass(frozen=True)
class _Passed:
    """What one layer leaves of a batch: a cache of that layer alone; hidden states, but for the last one."""

    cache: KVCache
    hidden: Tensor | None


class _Left(Exception):
    """Leaves a forward behind the layer that was wanted. Not an error; never seen from outside."""


def _pass_layer(
    loaded: LoadedModel, number: int, ids: Tensor, mask: Tensor, positions: Tensor, hidden: Tensor | None
) -> _Passed:
    """The model's own forward, of which one layer runs; of the last one, only what its cache depends on.

    Args:
        hidden: what the layer is given; None for the first, which gets the embeddings.
    """
    is_last = number + 1 == loaded.geometry.n_layers
    held: list[tuple[Tensor, Tensor]] = []
    after: list[Tensor] = []

    def cached(_layer: int, keys: Tensor, values: Tensor) -> None:
        held.append((keys, values))
        if is_last:
            raise _Left

    with _entered(loaded, number, hidden, after), suppress(_Left):
        loaded.body(
            input_ids=ids,
            attention_mask=mask.long(),
            position_ids=positions,
            use_cache=True,
            **{cache_argument(loaded.body): announcing_cache(cached)},
        )
    if not held:
        raise UnsupportedModel(
            f"{loaded.identity.name}: layer {number} put no keys into the cache: it has no KV of its own"
        )
    keys, values = held[0]
    rotation = loaded.current_rotations()[number]
    cache = KVCache((keys,), (values,), positions, mask, (rotation,))
    return _Passed(cache, None if is_last else after[0])


@contextmanager
def _entered(loaded: LoadedModel, number: int, hidden: Tensor | None, after: list[Tensor]) -> Iterator[None]:
    """Within it a forward skips the layers before one, gives that one `hidden`, and ends behind it."""
    layers: Any = loaded.body.layers
    own = layers[number].forward
    device = loaded.layer_devices[number]

    def entered(hidden_states: Tensor, *args: Any, **kwargs: Any) -> None:
        output = own(hidden_states if hidden is None else hidden.to(device), *args, **kwargs)
        after.append(_hidden_states(loaded, number, output))
        raise _Left

    forwards = dict.fromkeys(layers[:number], _skipped) | {layers[number]: entered}
    with _with_forwards(forwards):
        yield


def _skipped(hidden_states: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
    return hidden_states


@contextmanager
def _with_forwards(forwards: dict[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    # a device map puts a forward of its own on the instance
    own: dict[nn.Module, Any] = {module: vars(module).get("forward") for module in forwards}
    try:
        for module, forward in forwards.items():
            vars(module)["forward"] = forward
        yield
    finally:
        for module in forwards:
            vars(module).pop("forward", None)
            if own[module] is not None:
                vars(module)["forward"] = own[module]


def _hidden_states(loaded: LoadedModel, number: int, output: Any) -> Tensor:
    if not isinstance(output, Tensor):
        raise UnsupportedModel(
            f"{loaded.identity.name}: layer {number} gives more than hidden states, so the model cannot be "
            "read layer by layer; set calibration.layerwise=false"
        )
    return output
