"""The target's own keys, or values, in place of the mapped ones: which of the two a hand-off loses by.

An oracle for diagnosis. It has the target read the whole context, so it saves nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, TypeAlias

from kvmap.errors import UnknownName
from kvmap.fit.features import KINDS
from kvmap.models.cache import KVCache
from kvmap.models.capture import prefill
from kvmap.models.pair import LoadedModel
from kvmap.transfer.context import Context

OwnKind: TypeAlias = Literal["key", "value"]


def with_own(target: LoadedModel, context: Context, kv: KVCache, kind: OwnKind) -> KVCache:
    """The cache before the held-back tokens, with every key (or value) as the target itself caches it.

    Args:
        target: the model.
        context: what the columns are of.
        kv: mapped columns, the native head among them.
        kind: "key" or "value"; the other stays as it was mapped.

    Raises:
        UnknownName: another kind.
    """
    if kind not in KINDS:
        raise UnknownName("own_kind", kind, KINDS)
    own = prefill(target, context.ids, context.mask).slice_tokens(0, context.n_columns)
    if kind == "value":
        return replace(kv, values=own.values)
    return replace(kv, keys=own.keys, rotations=own.rotations)
