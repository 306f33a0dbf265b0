"""The connector in the worker: pages out and in."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvmap.errors import KvmapError
from kvmap.serving.compatibility import EngineFacts, Incompatible
from kvmap.serving.store import SharedFolder
from kvmap.serving.vllm.facts import engine_facts
from kvmap.serving.vllm.heads import KeptHeads
from kvmap.serving.vllm.loading import Loader
from kvmap.serving.vllm.mapper_files import engine_mapper
from kvmap.serving.vllm.messages import Messages, Report, Take, Taken
from kvmap.serving.vllm.model_access import find_model
from kvmap.serving.vllm.native import NativeLayers
from kvmap.serving.vllm.own_tokens import TargetParts
from kvmap.serving.vllm.pages import LayerPages, PageOrder
from kvmap.serving.vllm.publishing import Publisher
from kvmap.serving.vllm.rotary_check import check_rotary
from kvmap.serving.vllm.settings import Settings
from kvmap.serving.vllm.taking import Taker

_log = logging.getLogger(__name__)

#: while the engine has nothing to compute, it may as well wait for a cache that is being read
_IDLE_WAIT_SECONDS = 0.02


class WorkerSide:
    """Reads and writes pages as the scheduler side says."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, settings: Settings) -> None:
        """Args: as vLLM gives them to a connector; and the settings."""
        self._settings = settings
        context = vllm_config.compilation_config.static_forward_context
        names = [name for group in kv_cache_config.kv_cache_groups for name in group.layer_names]
        self._attention = {name: context[name] for name in names if name in context}
        self._numbers: dict[str, int] = {}
        self._model = _found_model(self._attention)
        self._store = SharedFolder(settings.storage, settings.max_storage_bytes)
        self._loader = Loader(self._store)
        self._native: NativeLayers | None = None
        self._configs = (vllm_config, kv_cache_config)
        self._opened: tuple[Publisher, Taker | None] | Incompatible | None = None
        self._taken: dict[str, Taken] = {}
        self._invalid: set[int] = set()
        self._received: set[str] = set()
        self._sent: set[str] = set()
        self._failed_groups: dict[str, str] = {}

    def start_step(self, messages: Messages) -> None:
        """Do what can be done beside a forward, or in place of one."""
        if not (messages.takes or messages.publishes or messages.dropped_groups or self._opened):
            return
        publisher, taker = self._parts()
        for group in messages.dropped_groups:
            if publisher is not None:
                publisher.drop(group)
        for publish in messages.publishes:
            if publish.after_end:
                if publisher is not None:
                    for layer in range(len(self._attention)):
                        publisher.copy_layer(publish, layer)
                    publisher.finish(publish)
                self._sent.add(publish.request_id)
        self._take(messages, taker)

    def _take(self, messages: Messages, taker: Taker | None) -> None:
        if taker is None:
            opened = self._opened
            why = opened if isinstance(opened, Incompatible) else Incompatible("mapper_file", "no mapper")
            for take in messages.takes:
                self._note(take, Taken(why.cause, str(why)))
            return
        for request_id in messages.given_up_takes:
            if taker.give_up(request_id) is not None:
                self._received.add(request_id)
        if not messages.is_idle:
            # a take of this step may begin with pages that this step computes: not before the next one
            self._advance(taker, 0.0)
        for take in messages.takes:
            taker.start(take)
        if messages.is_idle:
            self._advance(taker, _IDLE_WAIT_SECONDS)

    def _advance(self, taker: Taker, idle_seconds: float) -> None:
        for done in taker.advance(idle_seconds):
            self._note(*done)

    def save_layer(self, messages: Messages, layer_name: str) -> None:
        """The forward has cached this step's tokens in a layer."""
        if not messages.publishes:
            return
        publisher, _ = self._parts()
        for publish in messages.publishes:
            if not publish.after_end and publisher is not None:
                publisher.copy_layer(publish, self._numbers[layer_name])

    def end_step(self, messages: Messages) -> None:
        """The forward is over: close what is complete."""
        publishes = [publish for publish in messages.publishes if not publish.after_end]
        if not publishes:
            return
        publisher, _ = self._parts()
        for publish in publishes:
            if publisher is None:
                self._failed_groups[publish.group] = str(self._opened)
            else:
                publisher.finish(publish)
        if publisher is not None:
            publisher.flush(self._settings.flush_seconds)

    def finished(self) -> tuple[set[str], set[str]]:
        """Requests whose pages were read after their end, and those whose pages are filled or given up."""
        sent, received = self._sent, self._received
        self._sent, self._received = set(), set()
        return sent, received

    def invalid_blocks(self) -> set[int]:
        """Pages that were to be filled, and are not."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def report(self) -> Report | None:
        """What became of takes and publications since the last report."""
        failures, self._failed_groups = self._failed_groups, {}
        if isinstance(self._opened, tuple):
            failures |= self._opened[0].take_failures()
        if not self._taken and not failures:
            return None
        taken, self._taken = self._taken, {}
        return Report(taken, failures)

    def close(self) -> None:
        """Let threads end."""
        self._loader.close()
        if isinstance(self._opened, tuple):
            self._opened[0].close()

    def _note(self, take: Take, taken: Taken) -> None:
        self._taken[take.request_id] = taken
        self._received.add(take.request_id)
        if taken.cause is not None:
            block = self._configs[0].cache_config.block_size
            self._invalid.update(take.block_ids[take.n_own // block : -(-len(take.token_ids) // block)])

    def _parts(self) -> tuple[Publisher | None, Taker | None]:
        """What reads and writes pages, made when it is first needed: the pages are there then."""
        if self._opened is None:
            try:
                self._opened = self._open()
            except Incompatible as error:
                self._opened = error
            except KvmapError as error:
                self._opened = Incompatible("layout", str(error))
            except Exception as error:
                # whatever a backend lacks or memory does not hold, the engine goes on
                _log.warning("kvmap's part of the worker", exc_info=True)
                self._opened = Incompatible("layout", f"{type(error).__name__}: {error}")
            if isinstance(self._opened, Incompatible):
                _log.warning("kvmap serves nothing in this engine: %s", self._opened)
        return self._opened if isinstance(self._opened, tuple) else (None, None)

    def _open(self) -> tuple[Publisher, Taker | None]:
        facts = engine_facts(*self._configs)
        facts.check()
        order = sorted(self._attention, key=_layer_number)
        self._numbers = {name: number for number, name in enumerate(order)}
        orders: dict[Any, PageOrder] = {}
        pages = []
        for name in order:
            layer = self._attention[name]
            key = (tuple(layer.kv_cache.shape[1:]), layer.kv_cache.dtype)
            if key not in orders:
                orders[key] = PageOrder(layer)
            pages.append(LayerPages(layer, orders[key]))
        check_rotary(self._model_found(), order, facts)
        return Publisher(facts, pages, self._store), self._taker(facts, pages)

    def _taker(self, facts: EngineFacts, pages: list[LayerPages]) -> Taker | None:
        if self._settings.mapper is None:
            return None
        mapper = engine_mapper(self._settings).to(pages[0].device)
        parts = TargetParts(facts, mapper, pages, self._native_layers, KeptHeads())
        return Taker(parts, self._loader, self._settings)

    def _model_found(self) -> nn.Module:
        if isinstance(self._model, KvmapError):
            raise self._model
        return self._model

    def _native_layers(self) -> NativeLayers:
        if self._native is None:
            self._native = NativeLayers(self._model_found(), self._attention)
        return self._native


def _found_model(attention: dict[str, Any]) -> nn.Module | KvmapError:
    """The model, or why it was not found: an engine starts all the same, and serves no cache."""
    try:
        return find_model(attention)
    except KvmapError as error:
        return error


def _layer_number(name: str) -> int:
    return next(int(part) for part in name.split(".") if part.isdigit())
