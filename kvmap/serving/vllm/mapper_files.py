"""The mapper of an engine, read once a process: scheduler and worker side may share one."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from kvmap.mappers import Mapper, load_mapper
from kvmap.serving.vllm.settings import BadSetting, Settings


@dataclass(frozen=True, eq=False)
class EngineMapper:
    """A mapper, and how it is to be used.

    Attributes:
        mapper: the mapper.
        rope: the strategy of its fit.
        native_head: first tokens that the target computes itself.
    """

    mapper: Mapper
    rope: str
    native_head: int

    def to(self, device: torch.device) -> EngineMapper:
        """With the weights on the device of the pages."""
        return self if device.type == "cpu" else replace(self, mapper=self.mapper.to(device=device))


@functools.lru_cache(maxsize=2)
def engine_mapper(settings: Settings) -> EngineMapper:
    """The mapper that settings name.

    Raises:
        MapperFileError: naming the file and what is wrong with it.
        BadSetting: none is named.
    """
    if settings.mapper is None:
        raise BadSetting("kv_connector_extra_config.mapper is missing: a target needs a mapper's folder")
    mapper, manifest = load_mapper(settings.mapper)
    if settings.mapper_dtype is not None:
        mapper = mapper.to(dtype=getattr(torch, settings.mapper_dtype))
    rope = mapper.fitted_for.rope if mapper.fitted_for is not None else None
    native_head = settings.native_head
    if native_head is None:
        said = manifest.get("native_head")
        native_head = said if isinstance(said, int) and said >= 0 else 1
    return EngineMapper(mapper, rope or "strip", native_head)
