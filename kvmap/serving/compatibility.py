"""Whether a mapper, a published cache and an engine belong together, judged before anything is mapped."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvmap.errors import KvmapError
from kvmap.fit.features import CacheShape
from kvmap.mappers import Mapper
from kvmap.models.identity import ModelIdentity
from kvmap.models.rope import Rotation, same_rotations
from kvmap.serving.manifest import Manifest

#: rotations that are the same for every length, which a cache of any length carries
FIXED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class Incompatible(KvmapError):
    """Parts that do not belong together, or may not be used.

    Attributes:
        cause: one of `kvmap.serving.outcome.CAUSES`.
    """

    def __init__(self, cause: str, reason: str) -> None:
        """Args: the cause, and one line for people."""
        super().__init__(reason)
        self.cause = cause


@dataclass(frozen=True, eq=False)
class EngineFacts:
    """What an engine runs, and how it keeps its cache.

    Attributes:
        identity: the model.
        shape: (n_kv_heads, head_dim) of each layer.
        rope_types: of each layer; None for a layer without rotation.
        rotations: of each layer.
        dtype: of its pages, as "bfloat16".
        block_tokens: tokens of a page.
        refusals: why no cache of this engine can be published or taken, one line each; empty where it can.
    """

    identity: ModelIdentity
    shape: CacheShape
    rope_types: tuple[str | None, ...]
    rotations: tuple[Rotation | None, ...]
    dtype: str
    block_tokens: int
    refusals: tuple[str, ...] = field(default=())

    def check(self) -> None:
        """Refuse an engine whose pages kvmap cannot read or write.

        Raises:
            Incompatible: cause "layout".
        """
        found = list(self.refusals)
        odd = sorted({t for t in self.rope_types if t is not None and t not in FIXED_ROPE_TYPES})
        if odd:
            found.append(
                f"rope type {', '.join(odd)} turns keys by a context's length, which an engine fixes when it "
                f"starts; served are {', '.join(FIXED_ROPE_TYPES)}"
            )
        if found:
            raise Incompatible("layout", "; ".join(found))


def check_mapper(mapper: Mapper, target: EngineFacts) -> None:
    """Refuse a mapper that was not fitted for this engine's model.

    Raises:
        Incompatible: cause "unknown_origin" or "mismatch", naming each thing that differs.
    """
    if mapper.fitted_for is None:
        raise Incompatible(
            "unknown_origin", "the mapper's manifest names no models, so it cannot be trusted with any"
        )
    lines = mapper.fitted_for.mismatches(None, target.identity)
    if mapper.target_shape != target.shape:
        lines.append(f"target shape: {mapper.target_shape} of the fit is not the engine's {target.shape}")
    if not 0 <= mapper.native_layers <= len(target.shape):
        lines.append(f"native_layers={mapper.native_layers}: the target has {len(target.shape)} layers")
    if mapper.fitted_for.target.dtype != target.identity.dtype:
        lines.append(f"start this engine with --dtype {mapper.fitted_for.target.dtype}")
    if lines:
        raise Incompatible("mismatch", "this mapper was fitted for something else: " + "; ".join(lines))


def check_verdict(mapper: Mapper, require: str | None, allow: tuple[str, ...] = ()) -> None:
    """Refuse a mapper that a preflight has judged badly, or has not judged where that is required.

    Args:
        mapper: with its verdict.
        require: "go": only that will do. None: also a mapper that no preflight has judged.
        allow: verdicts beside "go" that are let through.

    Raises:
        Incompatible: cause "verdict".
    """
    verdict = mapper.verdict
    name = "not_enough_evidence" if verdict is None else verdict.verdict
    if name == "go" or name in allow or (name == "not_enough_evidence" and require is None):
        return
    if verdict is None:
        raise Incompatible("verdict", "no preflight has judged this mapper, and a verdict is required")
    because = f": {verdict.reasons[0]}" if verdict.reasons else ""
    raise Incompatible("verdict", f"the preflight's verdict on this mapper is {verdict.words}{because}")


def check_published(manifest: Manifest, mapper: Mapper) -> None:
    """Refuse a cache of another model than the mapper reads.

    Raises:
        Incompatible: cause "mismatch".
    """
    assert mapper.fitted_for is not None
    lines = mapper.fitted_for.source.mismatches(manifest.source)
    if manifest.shape != mapper.source_shape:
        lines.append(f"source shape: {mapper.source_shape} of the fit is not the cache's {manifest.shape}")
    if mapper.fitted_for.source.dtype != manifest.source.dtype:
        lines.append(f"start the source with --dtype {mapper.fitted_for.source.dtype}")
    if lines:
        raise Incompatible("mismatch", "the published cache is of another source: " + "; ".join(lines))


def is_exact_copy(manifest: Manifest, mapper: Mapper, target: EngineFacts) -> bool:
    """Whether the cache is the target's own, to the last bit: one model on both sides and the identity map.

    Then keys are copied as they are. Taking a rotation off and putting it on again gives back every bfloat16
    key but those that are some 30,000 times smaller than their partner in the rotation.
    """
    return (
        mapper.kind == "identity"
        and not manifest.source.mismatches(target.identity)
        and manifest.dtype == target.dtype
        and same_rotations(manifest.rotations, target.rotations)
    )
