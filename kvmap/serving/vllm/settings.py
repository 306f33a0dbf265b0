"""What the connector is given by `kv_connector_extra_config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvmap.errors import KvmapError, UnknownName


class BadSetting(KvmapError):
    """A setting of the connector that is missing, or not what it must be."""


@dataclass(frozen=True)
class Settings:
    """The connector's settings.

    Attributes:
        storage: the folder that source and target share.
        mapper: the mapper's folder; needed to take caches.
        max_storage_bytes: what the storage may hold.
        hold_back: last tokens of a prompt that the engine reads itself, at least 1.
        native_head: first tokens that the target's own layers compute; None: as many as the mapper's manifest
            says, else 1.
        min_tokens: fewer mapped tokens are not worth it, where a request says nothing.
        mapper_dtype: what weights of the mapper are turned into when it is loaded; None: as they are stored.
        allow_verdicts: verdicts of a preflight beside "go" that are let through.
        look_seconds: the storage may take to say what it has.
        load_seconds: reading and checking a cache may take, before the target reads the prompt itself.
        flush_seconds: a source waits for its writer before it answers.
        chunk_tokens: tokens that are mapped at a time.
    """

    storage: Path
    mapper: Path | None = None
    max_storage_bytes: int = 4 << 30
    hold_back: int = 1
    native_head: int | None = None
    min_tokens: int = 1
    mapper_dtype: str | None = None
    allow_verdicts: tuple[str, ...] = ()
    look_seconds: float = 1.0
    load_seconds: float = 10.0
    flush_seconds: float = 2.0
    chunk_tokens: int = 1024


def read_settings(extra: Mapping[str, Any], *, takes: bool) -> Settings:
    """The settings in an extra config.

    Args:
        extra: as given to vLLM.
        takes: whether the engine is to take caches, and so needs a mapper.

    Raises:
        BadSetting, UnknownName: naming the key, its value and what is expected.
    """
    known = {field.name for field in fields(Settings)}
    for name in extra:
        if name not in known:
            raise UnknownName("setting of kv_connector_extra_config", name, known)
    if not extra.get("storage"):
        raise BadSetting("kv_connector_extra_config.storage is missing: give the folder that engines share")
    if takes and not extra.get("mapper"):
        raise BadSetting("kv_connector_extra_config.mapper is missing: a target needs a mapper's folder")
    values: dict[str, Any] = dict(extra)
    values["storage"] = Path(values["storage"])
    values["mapper"] = Path(values["mapper"]) if values.get("mapper") else None
    values["allow_verdicts"] = tuple(values.get("allow_verdicts", ()))
    settings = Settings(**values)
    for name, least in (("hold_back", 1), ("native_head", 0), ("min_tokens", 1), ("chunk_tokens", 1)):
        value = getattr(settings, name)
        if name == "native_head" and value is None:
            continue
        if not isinstance(value, int) or value < least:
            raise BadSetting(f"kv_connector_extra_config.{name}={value!r}: expected {least} or more")
    if settings.mapper_dtype not in (None, "float32", "bfloat16"):
        raise BadSetting(f"mapper_dtype={settings.mapper_dtype!r}: expected float32, bfloat16 or nothing")
    return settings
