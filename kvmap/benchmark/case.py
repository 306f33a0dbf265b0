"""One length of the latency study: both caches, their copies, and a call for every arm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor

from kvmap.benchmark.mapping import BY_LAYER, MAPPING_PATHS, Mapping, prepare_mapping
from kvmap.benchmark.timing import Call, in_turn, n_copies
from kvmap.benchmark.work import Work, arm_work
from kvmap.errors import KvmapError, UnknownName
from kvmap.mappers import Mapper
from kvmap.models.cache import KVCache
from kvmap.models.capture import forward, prefill
from kvmap.models.pair import ModelPair
from kvmap.transfer import TransferOptions, transfer


@dataclass(frozen=True)
class LatencySettings:
    """How everything is timed.

    Attributes:
        batch_size: contexts at a time.
        repeats: timed runs of each arm and length.
        warmup: runs before them that are not timed.
        buffers: copies of ids and caches that take turns, so that no run finds its data where the last one
            left it; fewer where a copy is larger than any cache of the device.
        path: of mapping alone, one of `MAPPING_PATHS`.
        link_gbit_per_s: of the computed transport.
        memory: whether each arm is run once more for its peak memory.
        seed: of the token ids, which are random.
    """

    batch_size: int = 1
    repeats: int = 10
    warmup: int = 2
    buffers: int = 3
    path: str = "auto"
    link_gbit_per_s: float = 100.0
    memory: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be timed.

        Raises:
            KvmapError, UnknownName: naming the setting, its value and what is expected.
        """
        lowest = {"batch_size": 1, "repeats": 1, "warmup": 0, "buffers": 1}
        wrong = [f"{name}={getattr(self, name)}" for name, low in lowest.items() if getattr(self, name) < low]
        if wrong or not self.link_gbit_per_s > 0:
            wrong += [] if self.link_gbit_per_s > 0 else [f"link_gbit_per_s={self.link_gbit_per_s}"]
            raise KvmapError(
                f"{', '.join(wrong)}: expected batch_size, repeats and buffers of at least 1, warmup of at "
                f"least 0, and a link of more than 0 Gb/s"
            )
        if self.path not in MAPPING_PATHS:
            raise UnknownName("mapping path", self.path, MAPPING_PATHS)


def check_lengths(pair: ModelPair, lengths: Sequence[int], options: TransferOptions) -> None:
    """Refuse lengths with nothing to map, or too long for a model.

    Raises:
        KvmapError: naming the first.
    """
    shortest = options.hold_back + options.native_head + 1
    for length in lengths:
        if length < shortest:
            raise KvmapError(
                f"length {length}: expected at least {shortest} tokens, or nothing is left to map with "
                f"hold_back={options.hold_back} and native_head={options.native_head}"
            )
        for side, geometry in (("source", pair.source_geometry), ("target", pair.target_geometry)):
            if length + 1 > geometry.max_positions:
                raise KvmapError(
                    f"length {length} and one token more: the {side} takes {geometry.max_positions}; "
                    "shorten it"
                )


@dataclass(frozen=True, eq=False)
class Case:
    """One length: as many copies of everything as take turns."""

    pair: ModelPair
    mapper: Mapper
    settings: LatencySettings
    options: TransferOptions
    ids: list[Tensor]
    caches: list[KVCache]
    mappings: list[Mapping]
    handed: list[KVCache]

    @classmethod
    def prepare(
        cls,
        pair: ModelPair,
        mapper: Mapper,
        length: int,
        settings: LatencySettings,
        options: TransferOptions,
        *,
        hand_off: bool = True,
    ) -> Case:
        """Read random contexts, as often as copies take turns; and hand them over, if asked."""
        source, target = pair.source, pair.target
        n_bytes = settings.batch_size * sum(
            model.geometry.kv_bytes(length, model.dtype.itemsize) for model in (source, target)
        )
        copies = n_copies(settings.buffers, n_bytes)
        vocabulary = min(source.geometry.vocab_size, target.geometry.vocab_size)
        generator = torch.Generator().manual_seed(settings.seed)
        ids = [
            torch.randint(vocabulary, (settings.batch_size, length), generator=generator)
            for _ in range(copies)
        ]
        caches = [prefill(source, row) for row in ids]
        own = mapper.native_layers
        native = [prefill(target, row, n_layers=own) if own else None for row in ids]
        mappings = [
            prepare_mapping(mapper, cache, target, first) for cache, first in zip(caches, native, strict=True)
        ]
        case = cls(pair, mapper, settings, options, ids, caches, mappings, [])
        if hand_off:
            case.handed.extend(case.transfer(copy) for copy in range(copies))
        return case

    def transfer(self, copy: int) -> KVCache:
        """The hand-off of one copy."""
        target = self.pair.target
        settings = asdict(self.options)
        return transfer(self.caches[copy], self.mapper, target, self.ids[copy], **settings).kv

    def calls(self) -> dict[str, Call]:
        """Every arm that is measured."""
        source, target = self.pair.source, self.pair.target
        numbers = range(len(self.ids))
        calls: dict[str, Call] = {
            "source_prefill": in_turn([partial(prefill, source, row) for row in self.ids]),
            "map": in_turn([mapping.call(self.settings.path) for mapping in self.mappings]),
            "hand_off": in_turn([partial(self.transfer, copy) for copy in numbers]),
            "re_prefill": in_turn([partial(prefill, target, row) for row in self.ids]),
            "first_token": in_turn(
                [
                    partial(forward, target, row[:, -1:], cache)
                    for row, cache in zip(self.ids, self.handed, strict=True)
                ]
            ),
        }
        if target.device.type == "cuda":
            calls["transport"] = in_turn([_from_host(cache, target.device) for cache in self.caches])
        return calls

    def work(self) -> dict[str, Work]:
        """Of every arm."""
        return arm_work(
            self.pair.source,
            self.pair.target,
            self.mapper,
            self.options,
            length=self.ids[0].shape[1],
            batch_size=self.settings.batch_size,
            source_bytes=self.source_bytes,
            mapped_bytes=self.mapped_bytes,
        )

    @property
    def source_bytes(self) -> int:
        """Of the source's cache of the whole batch."""
        return self.caches[0].nbytes

    @property
    def mapped_bytes(self) -> int:
        """Of the target's."""
        target, length = self.pair.target, self.ids[0].shape[1]
        return self.settings.batch_size * target.geometry.kv_bytes(length, target.dtype.itemsize)

    @property
    def path(self) -> str:
        """Of mapping alone."""
        return BY_LAYER if self.mapper.cache_map() is None else self.settings.path


def _from_host(cache: KVCache, device: torch.device) -> Call:
    """A copy of a cache from pinned memory to the device."""
    held = [tensor.cpu().pin_memory() for tensor in (*cache.keys, *cache.values)]
    return lambda: [tensor.to(device, non_blocking=True) for tensor in held]
