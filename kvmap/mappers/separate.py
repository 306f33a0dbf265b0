"""Outlier tokens mapped apart: what their kind looks like in the target, and the inner map for all others."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from kvmap.fit.features import KINDS
from kvmap.fit.linear import LinearWeights
from kvmap.fit.outliers import OutlierError, OutlierRows, OutlierRule
from kvmap.mappers.base import Mapper, MapperMismatch, get_mapper, register


@register("separate")
class SeparateMapper(Mapper):
    """`k̂ = k̄_outlier`, `v̂ = v̄_outlier` for the tokens that a rule flags, the inner map for the others.

    The flagged tokens' vectors are the means of the calibration's flagged rows (`kvmap.fit.outliers`), not
    mixed with the inner map; native layers stay the target's own.

    Attributes:
        inner: maps the other tokens; of any kind.
        rule: flags tokens of the source's cache.
    """

    def __init__(self, inner: Mapper, rule: OutlierRule, outliers: Mapping[str, Sequence[Tensor]]) -> None:
        """Args: the inner mapper; the rule; by kind, per target layer, what flagged tokens get (H_t, d_t), of
        which those of native layers are not read.

        Raises:
            MapperMismatch: a rule of another source, or vectors of another target.
        """
        super().__init__(inner.source_shape, inner.target_shape)
        self.native_layers = inner.native_layers
        self.inner, self.rule = inner, rule
        if rule.source_shape != inner.source_shape:
            raise MapperMismatch(
                f"the outlier rule reads source layers {rule.source_shape} (heads, head_dim), the inner "
                f"{inner.kind} mapper {inner.source_shape}: fit both on one source"
            )
        for kind in KINDS:
            got = tuple(tuple(tensor.shape) for tensor in outliers[kind])
            if got != tuple(inner.target_shape):
                raise MapperMismatch(
                    f"outlier {kind}s of shapes {got}; the target's layers are {inner.target_shape} (heads, "
                    f"head_dim)"
                )
        self._outliers = {kind: tuple(outliers[kind]) for kind in KINDS}
        self._flag = _FlagsOfLast(rule)

    @classmethod
    def from_rows(cls, inner: Mapper, rows: OutlierRows, dtype: torch.dtype = torch.float32) -> Self:
        """Of a settled calibration.

        Args:
            inner: fitted on the moments without the flagged rows.
            rows: that calibration's own.
            dtype: of the outliers' vectors.

        Raises:
            OutlierError: a calibration whose policy was not "separate" in the end; use the inner mapper then.
            MapperMismatch: rows of another pair.
        """
        if rows.applied != "separate" or rows.undecided:
            raise OutlierError(
                f"outlier policy {rows.policy!r}, applied as {rows.applied!r}, with "
                f"{rows.flagged['fit'].n_rows} flagged rows of {rows.min_rows} needed: there is nothing to "
                f"map apart, use the inner mapper as it is"
            )
        means = {kind: tuple(mean.to(dtype) for mean in layers) for kind, layers in rows.means().items()}
        made = cls(inner, rows.rule, means)
        made.fitted_for = inner.fitted_for
        return made

    @property
    def linear_weights(self) -> Callable[[], LinearWeights]:
        """The inner map's, where it is linear: on moments without flagged rows `r2_of` it is this map's.

        Raises:
            AttributeError: the inner map is not linear, so neither is this.
        """
        own: Callable[[], LinearWeights] | None = getattr(self.inner, "linear_weights", None)
        if own is None:
            raise AttributeError(f"{self.inner.kind!r} mappers have no linear_weights")
        return own

    def map_layer(
        self,
        layer: int,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        native_keys: Sequence[Tensor] = (),
        native_values: Sequence[Tensor] = (),
    ) -> tuple[Tensor, Tensor]:
        """See `Mapper.map_layer`."""
        flags = self._flag(keys, values)[:, None, :, None]
        mapped = self.inner.map_layer(layer, keys, values, native_keys, native_values)
        key, value = (
            torch.where(flags, self._outliers[kind][layer][None, :, None].to(part), part)
            for kind, part in zip(KINDS, mapped, strict=True)
        )
        return key, value

    def settings(self) -> dict[str, Any]:
        """See `Mapper.settings`."""
        inner = {"kind": self.inner.kind, "settings": self.inner.settings()}
        return {"inner": inner, "rule": self.rule.to_state()[0]}

    def tensors(self) -> dict[str, Tensor]:
        """`inner.` and the inner mapper's names; `rule.` and the rule's; `outlier.{kind}.{layer}.bias`, (H_t,
        d_t), mapped layers alone.
        """
        mapped = range(self.native_layers, len(self.target_shape))
        return {
            **{f"inner.{name}": tensor for name, tensor in self.inner.tensors().items()},
            **{f"rule.{name}": tensor for name, tensor in self.rule.to_state()[1].items()},
            **{f"outlier.{kind}.{i}.bias": self._outliers[kind][i] for kind in KINDS for i in mapped},
        }

    @classmethod
    def from_state(cls, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        """See `Mapper.from_state`."""
        stored = settings["inner"]
        inner = get_mapper(stored["kind"]).from_state(stored["settings"], _below("inner.", tensors))
        rule = OutlierRule.from_state(settings["rule"], _below("rule.", tensors))
        outliers = {
            kind: [
                torch.zeros(shape) if i < inner.native_layers else tensors[f"outlier.{kind}.{i}.bias"]
                for i, shape in enumerate(inner.target_shape)
            ]
            for kind in KINDS
        }
        return cls(inner, rule, outliers)

    def stored_dtype(self, name: str, tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
        """The inner mapper's choice for what is its own; the rule stays as it is, so that it flags alike."""
        if name.startswith("inner."):
            return self.inner.stored_dtype(name.removeprefix("inner."), tensor, dtype)
        return tensor.dtype if name.startswith("rule.") else super().stored_dtype(name, tensor, dtype)

    @property
    def n_weights(self) -> int:
        """The inner mapper's; neither the rule's numbers nor the outliers' vectors."""
        return self.inner.n_weights


@dataclass(frozen=True)
class _Seen:
    """Columns whose flags are known: the tensors, not kept alive, and how often each had been written to."""

    tensors: tuple[weakref.ref[Tensor], ...]
    versions: tuple[int, ...]
    flags: Tensor

    def is_of(self, tensors: Sequence[Tensor]) -> bool:
        return len(tensors) == len(self.tensors) and all(
            seen() is tensor and tensor._version == version
            for tensor, seen, version in zip(tensors, self.tensors, self.versions, strict=True)
        )


class _FlagsOfLast:
    """A rule's flags, found once for all target layers of a map, which read the same columns one by one.

    Only the very tensors of the last call, unchanged since, are taken for the same columns. Tensors made in
    inference mode do not say whether they were changed: there every call flags anew.
    """

    def __init__(self, rule: OutlierRule) -> None:
        self._rule = rule
        self._last: _Seen | None = None

    def __call__(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
        tensors = (*keys, *values)
        last = self._last  # read once: another thread may map other columns
        if last is not None and last.is_of(tensors):
            return last.flags
        flags = self._rule.flag_columns(keys, values)
        if not any(tensor.is_inference() for tensor in tensors):
            versions = tuple(tensor._version for tensor in tensors)
            self._last = _Seen(tuple(weakref.ref(tensor) for tensor in tensors), versions, flags)
        return flags


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
