"""Mappers: from a source's cache to a target's. Importing this package registers every kind."""

from __future__ import annotations

from kvmap.mappers.base import (
    FittedFor,
    Mapper,
    MapperFileError,
    MapperMismatch,
    RegistryCollision,
    Unavailable,
    check_shape,
    get_mapper,
    mapper_kinds,
    register,
)
from kvmap.mappers.bias_only import BiasOnlyMapper
from kvmap.mappers.compressed import CompressedLinearMapper
from kvmap.mappers.identity import IdentityMapper
from kvmap.mappers.linear import LinearMapper
from kvmap.mappers.mlp import MLPMapper
from kvmap.mappers.random_map import RandomMapper
from kvmap.mappers.raw import RawMapper
from kvmap.mappers.separate import SeparateMapper
from kvmap.mappers.store import (
    check_identities,
    identity_record,
    load_mapper,
    save_mapper,
)
from kvmap.mappers.verdict import (
    VERDICTS,
    Canary,
    InvalidVerdict,
    Verdict,
    attach_verdict,
    read_verdict,
)

__all__ = [
    "VERDICTS",
    "BiasOnlyMapper",
    "Canary",
    "CompressedLinearMapper",
    "FittedFor",
    "IdentityMapper",
    "InvalidVerdict",
    "LinearMapper",
    "MLPMapper",
    "Mapper",
    "MapperFileError",
    "MapperMismatch",
    "RandomMapper",
    "RawMapper",
    "RegistryCollision",
    "SeparateMapper",
    "Unavailable",
    "Verdict",
    "attach_verdict",
    "check_identities",
    "check_shape",
    "get_mapper",
    "identity_record",
    "load_mapper",
    "mapper_kinds",
    "read_verdict",
    "register",
    "save_mapper",
]
