"""The worker's half of taking a cache: load it beside the steps, map it between them, fill the pages."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvmap.errors import KvmapError
from kvmap.serving.compatibility import EngineFacts, Incompatible, check_published, is_exact_copy
from kvmap.serving.vllm.filling import ColumnMap
from kvmap.serving.vllm.heads import KeptHeads
from kvmap.serving.vllm.loading import LoadedCache, LoadedRun, Loader, LoadFailed, Loading
from kvmap.serving.vllm.mapper_files import EngineMapper
from kvmap.serving.vllm.messages import Take, Taken
from kvmap.serving.vllm.native import NativeLayers
from kvmap.serving.vllm.pages import LayerPages
from kvmap.serving.vllm.settings import Settings

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class TargetParts:
    """What filling pages needs of the engine.

    Attributes:
        facts: the engine's.
        mapper: of this pair.
        pages: of every layer.
        native: the engine's own layers; may raise until the model has been seen.
    """

    facts: EngineFacts
    mapper: EngineMapper
    pages: Sequence[LayerPages]
    native: Callable[[], NativeLayers]


class Taker:
    """Caches on their way into pages. Pages and model are touched by the engine's own thread alone."""

    def __init__(self, parts: TargetParts, loader: Loader, settings: Settings) -> None:
        """Args: the engine's parts; what reads from the store; and the connector's settings."""
        self._parts, self._loader, self._settings = parts, loader, settings
        self._heads = KeptHeads()
        self._jobs: dict[str, tuple[Take, Loading]] = {}

    def start(self, take: Take) -> None:
        """Begin to read."""
        seconds = self._settings.load_seconds
        loading = self._loader.start(take.manifest, take.n_own, len(take.token_ids), seconds)
        self._jobs[take.request_id] = (take, loading)

    def finish_one(self, wait_seconds: float) -> tuple[Take, Taken] | None:
        """Fill the pages of one cache that has come; None where none has.

        Args:
            wait_seconds: to wait for the one that was begun first, where the engine has nothing else to do.
        """
        if wait_seconds and self._jobs:
            next(iter(self._jobs.values()))[1].wait(wait_seconds)
        over = next((key for key, (_, loading) in self._jobs.items() if loading.is_over), None)
        if over is None:
            return None
        take, loading = self._jobs.pop(over)
        return take, self._taken(take, loading)

    def _taken(self, take: Take, loading: Loading) -> Taken:
        begun = time.perf_counter()
        try:
            loaded = loading.result()
            n_head = self._fill(take, loaded)
        except (LoadFailed, Incompatible) as error:
            _log.warning("%s: the target reads the prompt itself: %s", take.request_id, error)
            return Taken(error.cause, str(error))
        except KvmapError as error:
            _log.warning("%s: the target reads the prompt itself: %s", take.request_id, error)
            return Taken("layout", str(error))
        except Exception as error:
            # whatever a damaged mapper or cache provokes, the request is answered
            _log.warning("%s: the target reads the prompt itself", take.request_id, exc_info=True)
            return Taken("failure", f"{type(error).__name__}: {error}")
        n_mapped = len(take.token_ids) - take.n_own - n_head
        map_seconds = time.perf_counter() - begun
        return Taken(
            None, f"{n_mapped} tokens mapped", n_mapped, n_head, loaded.n_bytes, loaded.seconds, map_seconds
        )

    @torch.inference_mode()
    def _fill(self, take: Take, loaded: LoadedCache) -> int:
        """Write all pages; returns how many tokens the target's own layers computed in full.

        Raises:
            Incompatible: another source, or mapped numbers that are not finite or do not fit the dtype.
        """
        parts, mapper = self._parts, self._parts.mapper.mapper
        check_published(take.manifest, mapper)
        _check_filled(loaded)
        block_ids = torch.tensor(take.block_ids, dtype=torch.long)
        start, stop = take.n_own, len(take.token_ids)
        if is_exact_copy(take.manifest, mapper, parts.facts):
            for run in loaded.runs:
                _check_finite(run)
                self._write(block_ids, run.start, run.keys, run.values, start, stop)
            return 0
        first = max(start, min(parts.mapper.native_head, stop))
        native = self._native(take, block_ids, first)
        dtype, device = parts.pages[0].dtype, parts.pages[0].device
        rotations = take.manifest.rotations, parts.facts.rotations
        columns = ColumnMap(mapper, parts.mapper.rope, *rotations, dtype)
        for run in loaded.runs:
            low, high = max(run.start, first), min(run.stop, stop)
            for at in range(low, high, self._settings.chunk_tokens):
                end = min(at + self._settings.chunk_tokens, high)
                cut = slice(at - run.start, end - run.start)
                mapped = columns.map(
                    [key[:, :, cut].to(device) for key in run.keys],
                    [value[:, :, cut].to(device) for value in run.values],
                    at,
                    [
                        (k[:, :, at - start : end - start], v[:, :, at - start : end - start])
                        for k, v in native
                    ],
                )
                if mapped.n_bad:
                    raise Incompatible("not_finite", f"{mapped.n_bad} mapped numbers are NaN or infinite")
                if mapped.n_clamped:
                    raise Incompatible("clamped", f"{mapped.n_clamped} mapped numbers do not fit {dtype}")
                for layer in columns.layers:
                    self._write_layer(layer, block_ids, at, mapped.keys[layer], mapped.values[layer])
        return first - start

    def _native(self, take: Take, block_ids: Tensor, first: int) -> list[tuple[Tensor, Tensor]]:
        """Have the target run its native layers over all tokens, and all layers over those before `first`.

        Returns:
            Keys and values of its native layers from token `take.n_own` on.
        """
        n_layers, start = self._parts.mapper.mapper.native_layers, take.n_own
        head = take.token_ids[start:first]
        kept = self._heads.get(head) if start == 0 and head else None
        n_first = 0 if kept is not None else len(head)
        for layer, (keys, values) in enumerate(kept or ()):
            self._write_layer(layer, block_ids, 0, keys, values)
        if n_first == 0 and n_layers == 0:
            return []
        token_ids = take.token_ids[start:] if n_layers else head
        below, above = self._run_native(token_ids, block_ids, start, n_first, n_layers)
        for layer, (keys, values) in enumerate([*below, *above]):
            self._write_layer(layer, block_ids, start, keys, values)
        if start == 0 and n_first:
            self._heads.put(head, [*below, *above])
        return below

    def _run_native(
        self, token_ids: tuple[int, ...], block_ids: Tensor, start: int, n_first: int, n_layers: int
    ) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
        """See `NativeLayers.run`; tokens before `start` are read from the pages."""

        def past(layer: int) -> tuple[Tensor, Tensor]:
            return self._parts.pages[layer].read(block_ids, 0, start)

        ids = torch.tensor(token_ids, dtype=torch.long, device=self._parts.pages[0].device)
        return self._parts.native().run(ids, start, n_first, n_layers, past if start else None)

    def _write(
        self,
        block_ids: Tensor,
        at: int,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        start: int,
        stop: int,
    ) -> None:
        """Every layer's columns of tokens start:stop, of those from `at` on that are given."""
        low, high = max(at, start), min(at + keys[0].shape[2], stop)
        if low < high:
            for layer, (key, value) in enumerate(zip(keys, values, strict=True)):
                cut = slice(low - at, high - at)
                self._write_layer(layer, block_ids, low, key[:, :, cut], value[:, :, cut])

    def _write_layer(self, layer: int, block_ids: Tensor, at: int, keys: Tensor, values: Tensor) -> None:
        """(1, n_kv_heads, tokens, width) as a request's tokens from `at` on."""
        pages = self._parts.pages[layer]
        by_token = [part[0].transpose(0, 1).contiguous().to(pages.device) for part in (keys, values)]
        pages.write(block_ids, at, *by_token)


def _check_filled(loaded: LoadedCache) -> None:
    """Refuse a layer that is 0 throughout in its last token, which no model caches.

    Raises:
        Incompatible: cause "empty_layer".
    """
    run = loaded.runs[-1]
    for kind, layers in (("keys", run.keys), ("values", run.values)):
        for number, layer in enumerate(layers):
            if not bool(layer[:, :, -1].any()):
                raise Incompatible(
                    "empty_layer", f"{kind} of source layer {number} are 0 at token {run.stop - 1}"
                )


def _check_finite(run: LoadedRun) -> None:
    """Refuse numbers that would be copied as they are.

    Raises:
        Incompatible: cause "not_finite".
    """
    for kind, layers in (("keys", run.keys), ("values", run.values)):
        for number, layer in enumerate(layers):
            if not bool(torch.isfinite(layer).all()):
                raise Incompatible("not_finite", f"{kind} of source layer {number} are NaN or infinite")
