"""Outlier tokens: a rule that finds them in the source's cache alone, and what becomes of their rows.

Beyond the first token some others, delimiters above all, carry massive activations: a few hidden channels so
large that normalisation leaves one fixed direction (Sun et al. 2024, arXiv 2402.17762). In each such layer
their keys stand together far from all others, and their values are drained to next to nothing. They are few,
alike, and of great leverage: in a least-squares fit they move the map of ordinary tokens, which serves them
badly all the same. As they are alike, one vector a head, their mean, serves them well.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from kvmap.errors import KvmapError, UnknownName
from kvmap.fit.features import KINDS, CacheShape, Layout, cache_shape, shape_from_json
from kvmap.fit.moments import Moments
from kvmap.fit.pair_moments import SPLITS, PairMoments, RowBlock, target_rows
from kvmap.models.cache import KVCache

POLICIES = ("keep", "drop", "separate")
THRESHOLD = 6.0
SHARE = 0.5
MIN_ROWS = 8
"""Flagged rows of the fit split below which a mean of them is not trusted."""

SAMPLE_TOKENS = 4096
"""Tokens that a rule is fitted on: a median of so many is off by about 2 % of the spread."""

_MIN_SAMPLE = 32
_MAD_TO_SIGMA = 1.4826
# However alike the others are, a size within a factor e^(0.1 · threshold) of theirs is no outlier.
_LEAST_SPREAD = 0.1
# A channel is never finer than bfloat16 holds it.
_RESOLUTION = 2.0**-8


class OutlierError(KvmapError):
    """An outlier rule that cannot be fitted or applied, or rows that cannot be joined."""


@dataclass(frozen=True, eq=False)
class LayerProfile:
    """What the tokens of one source layer are like. Its size says how far a token's vector is from that::

        size^K_t = √ mean_c ((k_tc − m_c) / s_c)²      m: median over tokens, s: MAD about it
        size^V_t = √ mean_c (v_tc / r_c)²              r: median of |v|

    over all channels c of all heads. Keys are centred: many models add the same large vector to every key, or
    give every key the same norm, and what sets a sink apart is where it points. Values are not: a drained
    value is one near zero. Each channel counts by its own spread, so that no channel drowns the others,
    and a size is the leverage its token would have in a fit, were channels independent.

    Attributes:
        key_centre: m; key_scale: s; value_scale: r; each (n_kv_heads, head_dim). A channel of scale 0 does
            not count.
        level: (2,) median over tokens of log size, of keys and of values; spread: (2,) its deviation,
            1.4826 MAD, at least `_LEAST_SPREAD`.
    """

    key_centre: Tensor
    key_scale: Tensor
    value_scale: Tensor
    level: Tensor
    spread: Tensor

    @classmethod
    def fit(cls, keys: Tensor, values: Tensor) -> LayerProfile:
        """Of (n, n_kv_heads, head_dim) keys and values; float64 within, medians the lower of two.

        Whatever order the tokens come in, the profile is the same.
        """
        keys, values = keys.double(), values.double()
        centre = keys.median(0).values
        scale = (keys - centre).abs().median(0).values
        scale = scale.maximum(_RESOLUTION * centre.abs())
        unset = keys.new_zeros(2)
        profile = cls(centre, scale, values.abs().median(0).values, unset, unset)
        sizes = profile.log_sizes(keys.transpose(0, 1)[None], values.transpose(0, 1)[None])[:, 0]
        level = sizes.median(1).values
        spread = _MAD_TO_SIGMA * (sizes - level[:, None]).abs().median(1).values
        profile = replace(profile, level=level, spread=spread.clamp(min=_LEAST_SPREAD))
        return cls(*(getattr(profile, part.name).float() for part in fields(cls)))

    def log_sizes(self, keys: Tensor, values: Tensor) -> Tensor:
        """Log sizes of keys and of values: (2, batch, tokens), from (batch, n_kv_heads, tokens, head_dim)."""
        return torch.stack(
            [
                _log_rms(keys, self.key_scale, self.key_centre),
                _log_rms(values, self.value_scale, None),
            ]
        )

    def flag(self, keys: Tensor, values: Tensor, threshold: float) -> Tensor:
        """Keys larger, or values larger or smaller, than `threshold` deviations allow: (batch, tokens) bool.

        What is not finite is no outlier: it is an error, which moments and the hand-off report.
        """
        sizes = self.log_sizes(keys, values)
        level, spread = (part.to(sizes)[:, None, None] for part in (self.level, self.spread))
        far = (sizes - level) / spread
        return ((far[0] > threshold) | (far[1].abs() > threshold)) & sizes.isfinite().all(0)


@dataclass(frozen=True, eq=False)
class OutlierRule:
    """Flags a token where its keys or values are far from the usual in at least a share of the source layers.

    It reads the source's cache alone, so that it can be applied when a cache is handed over, and each token
    by itself, whatever stands beside it.

    Attributes:
        layers: of each source layer.
        threshold: robust deviations of the log size from its median that a layer allows.
        share: of the layers that must find it far, above 0, at most 1.
    """

    layers: tuple[LayerProfile, ...]
    threshold: float = THRESHOLD
    share: float = SHARE

    def __post_init__(self) -> None:
        """Refuse numbers that make no rule.

        Raises:
            OutlierError: naming them.
        """
        if not self.threshold > 0 or not 0 < self.share <= 1:
            raise OutlierError(
                f"threshold={self.threshold}, share={self.share}: expected a threshold above 0 and a share "
                f"of layers above 0, at most 1"
            )

    @classmethod
    def fit(
        cls, caches: Iterable[KVCache], *, threshold: float = THRESHOLD, share: float = SHARE
    ) -> OutlierRule:
        """The rule of a sample, whose real tokens all count; how it is batched or ordered changes nothing.

        Less than half of the tokens may be outliers. The sample is held in float32, one layer at a time in
        float64.

        Args:
            caches: stripped source caches (see `kvmap.fit.view.cache_view`) of a sample of the fit split, see
                `sample_sequences`.
            threshold, share: see `OutlierRule`.

        Raises:
            OutlierError: an unstripped cache, caches of several shapes, too few tokens, or a value that is
                not finite.
        """
        held: list[tuple[list[Tensor], list[Tensor]]] = []
        shape: CacheShape | None = None
        for kv in caches:
            _check_stripped(kv)
            shape = shape or cache_shape(kv)
            _check_layers(shape, cache_shape(kv))
            held = held or [([], []) for _ in shape]
            for layer, (keys, values) in zip(held, zip(kv.keys, kv.values, strict=True), strict=True):
                for kept, part in zip(layer, (keys, values), strict=True):
                    kept.append(part.transpose(1, 2)[kv.mask.to(part.device)].cpu())
        n_tokens = sum(len(part) for part in held[0][0]) if held else 0
        if n_tokens < _MIN_SAMPLE:
            raise OutlierError(
                f"an outlier rule was to be fitted on {n_tokens} tokens; it needs {_MIN_SAMPLE} or more, "
                f"better {SAMPLE_TOKENS}"
            )
        profiles = []
        for number, layer in enumerate(held):
            keys, values = (torch.cat(parts) for parts in layer)
            if not bool(torch.isfinite(keys).all() and torch.isfinite(values).all()):
                raise OutlierError(
                    f"source layer {number} holds a NaN or infinite value: a cache overflowed its dtype; "
                    f"capture in bfloat16 or float32"
                )
            profiles.append(LayerProfile.fit(keys, values))
            layer[0].clear()
            layer[1].clear()
        return cls(tuple(profiles), threshold, share)

    @property
    def source_shape(self) -> CacheShape:
        """`(n_kv_heads, head_dim)` of each source layer."""
        return tuple((profile.key_scale.shape[0], profile.key_scale.shape[1]) for profile in self.layers)

    def flag(self, kv: KVCache) -> Tensor:
        """The real tokens of a stripped source cache that are outliers: (batch, tokens) bool.

        Raises:
            OutlierError: an unstripped cache, or one of another shape.
        """
        _check_stripped(kv)
        flags = self.flag_columns(kv.keys, kv.values)
        return flags & kv.mask.to(flags.device)

    def flag_columns(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
        """The columns that are outliers, pads as if they were tokens: (batch, tokens) bool.

        Costs one read of all source layers; float32 within (float64 stays).

        Args:
            keys: content keys of every source layer, (batch, n_kv_heads, tokens, head_dim).
            values: likewise.

        Raises:
            OutlierError: layers of another shape.
        """
        _check_layers(self.source_shape, tuple((part.shape[1], part.shape[3]) for part in keys))
        far = torch.zeros(keys[0].shape[0], keys[0].shape[2], dtype=torch.int32, device=keys[0].device)
        for profile, key, value in zip(self.layers, keys, values, strict=True):
            far += profile.flag(key, value, self.threshold).to(far)
        # 0.7 · 10 layers is 7, though not in binary
        return far >= max(1, math.ceil(self.share * len(self.layers) - 1e-9))

    def same_as(self, other: OutlierRule) -> bool:
        """Whether another rule flags alike, to the last digit."""
        (mine, tensors), (theirs, others) = self.to_state(), other.to_state()
        return mine == theirs and all(torch.equal(t, others[name]) for name, t in tensors.items())

    def to_state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Settings, as JSON can hold them, and float32 tensors `{layer}.{name of LayerProfile}`."""
        tensors = {
            f"{number}.{part.name}": getattr(profile, part.name)
            for number, profile in enumerate(self.layers)
            for part in fields(LayerProfile)
        }
        return {"threshold": self.threshold, "share": self.share, "n_layers": len(self.layers)}, tensors

    @classmethod
    def from_state(cls, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> OutlierRule:
        """Inverse of `to_state`."""
        layers = tuple(
            LayerProfile(*(tensors[f"{number}.{part.name}"] for part in fields(LayerProfile)))
            for number in range(int(settings["n_layers"]))
        )
        return cls(layers, float(settings["threshold"]), float(settings["share"]))


@dataclass(eq=False)
class OutlierRows:
    """The flagged rows of a calibration: kept among the others, dropped, or in a table of their own.

    * "keep": they are rows of the fit like any other, and are counted.
    * "drop": they are no rows, of either split; moments, fit and held-out R² are of the others.
    * "separate": likewise, and a `SeparateMapper` gives flagged tokens the mean of the flagged rows of the
      fit split, plain and unweighted, without regard to what the source holds. With fewer than `min_rows` of
      them it falls back to "keep": rows wait until there are enough, and `settle` puts them back.

    Whatever the policy, target means of the flagged rows are taken.

    Attributes:
        rule: which rows are flagged.
        policy: see above.
        layout: the numbering of the pair.
        min_rows: of the fit split, for a mean of their own.
        n_rows: by split, rows that count, flagged or not.
        flagged: by split, moments of the flagged rows: no features, all targets.
        waiting: by split, flagged rows that may have to go back.
        fell_back: whether they did.
    """

    rule: OutlierRule
    policy: str
    layout: Layout
    min_rows: int = MIN_ROWS
    n_rows: dict[str, int] = field(init=False)
    flagged: dict[str, Moments] = field(init=False)
    waiting: dict[str, list[RowBlock]] = field(init=False)
    fell_back: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        """Start without rows.

        Raises:
            UnknownName: another policy.
            OutlierError: a rule of another source, or min_rows < 1.
        """
        if self.policy not in POLICIES:
            raise UnknownName("outlier policy", self.policy, POLICIES)
        if self.min_rows < 1:
            raise OutlierError(f"min_rows={self.min_rows}: expected 1 or more")
        _check_layers(self.rule.source_shape, self.layout.source_shape)
        self.n_rows = dict.fromkeys(SPLITS, 0)
        self.flagged = {split: Moments.zeros(0, self.layout.n_targets) for split in SPLITS}
        self._forget()

    @property
    def applied(self) -> str:
        """The policy that was followed in the end."""
        return "keep" if self.fell_back else self.policy

    @property
    def undecided(self) -> bool:
        """Whether flagged rows of "separate" are still too few for a mean of their own."""
        return self.policy == "separate" and self.flagged["fit"].n_rows < self.min_rows

    def take(self, split: str, source: KVCache, target: KVCache, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Count the flagged rows of a batch and take their means; say which rows the fit gets.

        Args:
            split: "fit" or "held_out".
            source, target: stripped caches of the same columns.
            rows: (batch, tokens) bool, the columns that count.

        Returns:
            The rows of the fit, and those to be handed to `wait`; (batch, tokens) bool on the CPU.
        """
        rows = rows.cpu()
        found = self.rule.flag(source).cpu() & rows
        y = target_rows(target, found).cpu()
        self.n_rows[split] += int(rows.sum())
        self.flagged[split].update(y[:, :0], y)
        if not self.undecided:
            self._forget()
        kept = rows if self.policy == "keep" else rows & ~found
        return kept, found if self.undecided else torch.zeros_like(found)

    def wait(self, split: str, rows: RowBlock) -> None:
        """Hold flagged rows of one split that may have to go back."""
        weights = tuple(None if each is None else each.cpu() for each in rows.weights)
        self.waiting[split].append(RowBlock(rows.x.cpu(), rows.y.cpu(), weights))

    def settle(self, moments: PairMoments) -> None:
        """After the last row: where "separate" found too few, put what waits into the moments.

        Shards are merged first, moments and outlier rows alike.
        """
        if self.undecided:
            for split, blocks in self.waiting.items():
                for block in blocks:
                    moments.add_rows(split, block)
            self.fell_back = True
        self._forget()

    def merge(self, other: OutlierRows) -> OutlierRows:
        """Add the rows of another shard, before either is settled, in place, and return self.

        Raises:
            OutlierError: another pair, rule or policy, or rows that were put back already.
        """
        mine, theirs = ((each.policy, each.min_rows, each.layout) for each in (self, other))
        if mine != theirs or not self.rule.same_as(other.rule):
            raise OutlierError(
                "cannot merge outlier rows of another pair, rule or policy: fit the rule once, and use it in "
                "every shard"
            )
        if self.fell_back or other.fell_back:
            raise OutlierError("these outlier rows were settled: merge shards first, then settle() once")
        for split in SPLITS:
            self.n_rows[split] += other.n_rows[split]
            self.flagged[split].merge(other.flagged[split])
            self.waiting[split] += other.waiting[split]
        if not self.undecided:
            self._forget()
        return self

    def counts(self) -> list[dict[str, Any]]:
        """Rows {split, policy, applied, n_rows, n_flagged, share}; the share of no rows is nan."""
        return [
            {
                "split": split,
                "policy": self.policy,
                "applied": self.applied,
                "n_rows": self.n_rows[split],
                "n_flagged": self.flagged[split].n_rows,
                "share": self.flagged[split].n_rows / self.n_rows[split] if self.n_rows[split] else math.nan,
            }
            for split in SPLITS
        ]

    def means(self) -> dict[str, tuple[Tensor, ...]]:
        """By kind, per target layer, the mean of the flagged rows of the fit split: (H_t, d_t) float64."""
        return self._by_layer(self.flagged["fit"].mean_y)

    def relative_error(self, split: str) -> dict[str, Tensor]:
        """Error of `means` on the flagged rows of one split, `Σ‖y − ȳ_fit‖² / Σ‖y‖²`, nothing centred.

        Returns:
            By kind, (n_target_layers, n_heads) float64; nan past a layer's own number of heads, and where
            either split has no such rows.
        """
        table = self.flagged[split]
        if not self.flagged["fit"].n_rows:
            table = Moments.zeros(0, self.layout.n_targets)
        true = table.s_yy + table.n_rows * table.mean_y.square()
        off = table.mean_y - self.flagged["fit"].mean_y
        error = table.s_yy + table.n_rows * off.square()
        found = {}
        for kind in KINDS:
            n_heads = max(heads for heads, _ in self.layout.target_shape)
            ratios = torch.full((len(self.layout.target_shape), n_heads), math.nan, dtype=torch.float64)
            for layer, (numerator, denominator) in enumerate(
                zip(self._by_layer(error)[kind], self._by_layer(true)[kind], strict=True)
            ):
                ratios[layer, : len(numerator)] = numerator.sum(1) / denominator.sum(1)
            found[kind] = ratios
        return found

    def to_state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Settings, as JSON can hold them, and tensors; rows that wait are among them."""
        settings = self._settings()
        tensors = {f"rule.{name}": tensor for name, tensor in self.rule.to_state()[1].items()}
        for split in SPLITS:
            table = self.flagged[split]
            tensors |= {f"{split}.mean_y": table.mean_y, f"{split}.s_yy": table.s_yy}
            for number, block in enumerate(self.waiting[split]):
                stem = f"{split}.waiting.{number}"
                tensors |= {f"{stem}.x": block.x, f"{stem}.y": block.y}
                weights = enumerate(block.weights)
                tensors |= {f"{stem}.weight.{i}": each for i, each in weights if each is not None}
        return settings, {name: tensor.contiguous() for name, tensor in tensors.items()}

    @classmethod
    def from_state(cls, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> OutlierRows:
        """Inverse of `to_state`."""
        rule = {name.removeprefix("rule."): t for name, t in tensors.items() if name.startswith("rule.")}
        layout = Layout(
            shape_from_json(settings["source_shape"]),
            shape_from_json(settings["target_shape"]),
            int(settings["native_layers"]),
        )
        found = cls(
            OutlierRule.from_state(settings["rule"], rule),
            settings["policy"],
            layout,
            int(settings["min_rows"]),
        )
        found.fell_back = bool(settings["fell_back"])
        for split in SPLITS:
            n = int(settings["n_flagged"][split])
            found.n_rows[split] = int(settings["n_rows"][split])
            empty = Moments.zeros(0, layout.n_targets)
            mean_y, s_yy = tensors[f"{split}.mean_y"], tensors[f"{split}.s_yy"]
            found.flagged[split] = Moments(n, float(n), empty.mean_x, mean_y, empty.s_xx, empty.s_xy, s_yy)
            for number, n_tables in enumerate(settings["waiting"][split]):
                stem = f"{split}.waiting.{number}"
                weights = tuple(tensors.get(f"{stem}.weight.{table}") for table in range(n_tables))
                found.waiting[split].append(RowBlock(tensors[f"{stem}.x"], tensors[f"{stem}.y"], weights))
        return found

    def _forget(self) -> None:
        """Nothing waits any more."""
        self.waiting = {split: [] for split in SPLITS}

    def _settings(self) -> dict[str, Any]:
        return {
            "rule": self.rule.to_state()[0],
            "policy": self.policy,
            "min_rows": self.min_rows,
            "source_shape": [list(layer) for layer in self.layout.source_shape],
            "target_shape": [list(layer) for layer in self.layout.target_shape],
            "native_layers": self.layout.native_layers,
            "n_rows": dict(self.n_rows),
            "n_flagged": {split: table.n_rows for split, table in self.flagged.items()},
            "waiting": {split: [len(block.weights) for block in self.waiting[split]] for split in SPLITS},
            "fell_back": self.fell_back,
        }

    def _by_layer(self, targets: Tensor) -> dict[str, tuple[Tensor, ...]]:
        """Numbers of all targets as (H_t, d_t) of each layer, by kind."""
        return {
            kind: tuple(
                targets[self.layout.targets(kind, layer)].view(shape)
                for layer, shape in enumerate(self.layout.target_shape)
            )
            for kind in KINDS
        }


def sample_sequences(sequences: Iterable[int], tokens_each: int, n_tokens: int = SAMPLE_TOKENS) -> list[int]:
    """The first sequences, by number, that hold `n_tokens` together: what a rule is fitted on.

    Args:
        sequences: numbers of those of the fit split, in any order.
        tokens_each: of one sequence.
    """
    return sorted(sequences)[: max(1, math.ceil(n_tokens / tokens_each))]


def _log_rms(x: Tensor, scale: Tensor, centre: Tensor | None) -> Tensor:
    """`log √ mean_c ((x_c − m_c) / s_c)²` over all channels that have a scale: (batch, tokens)."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = scale.to(x)
    inverse = torch.where(scale > 0, scale.reciprocal(), 0.0)
    if centre is not None:
        x = x - centre.to(x)[:, None]
    square = (x * inverse[:, None]).square_().sum((1, 3)) / (scale > 0).sum().clamp(min=1)
    # nothing at all has one size, whatever the dtype
    return square.clamp(min=torch.finfo(torch.float32).tiny).log() / 2


def _check_stripped(kv: KVCache) -> None:
    if not kv.stripped:
        raise OutlierError(
            "the source cache carries rotated keys; an outlier rule reads what mappers read: pass it through "
            "kvmap.fit.view.cache_view first"
        )


def _check_layers(expected: CacheShape, got: CacheShape) -> None:
    if expected != got:
        raise OutlierError(
            f"source layers {got} (heads, head_dim) for an outlier rule of {expected}: fit the rule on this "
            f"source"
        )
