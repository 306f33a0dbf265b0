"""The moments of a pair of models: which tables are held, how caches are added, and what a fit may ask."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvmap.errors import KvmapError, UnknownName
from kvmap.fit.features import (
    KINDS,
    CacheShape,
    Layout,
    Recipe,
    both,
    cache_shape,
    shape_from_json,
)
from kvmap.fit.moments import PRODUCT_DTYPES, Moments, MomentsError, moments_bytes, take
from kvmap.models.cache import KVCache

SPLITS = ("fit", "held_out")

RowWeights = Mapping[tuple[str, int], Tensor]
"""By kind and target layer, (batch, H_t, tokens) row weights."""


class MemoryBudgetExceeded(KvmapError):
    """The moments of this pair need more memory than was allowed."""


@dataclass(frozen=True, eq=False)
class TableSpec:
    """Which features and targets one table of moments holds.

    Attributes:
        features: (p,) int64, ascending numbers of the layout; targets: (q,) likewise.
        head: (kind, target layer, head) whose row weights the table takes; None: every row counts alike.
    """

    features: Tensor
    targets: Tensor
    head: tuple[str, int, int] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the table, both splits."""
        return len(SPLITS) * moments_bytes(len(self.features), len(self.targets))


@dataclass(eq=False)
class Table:
    """One table: its spec, and its moments on each split."""

    spec: TableSpec
    splits: dict[str, Moments]

    def positions(self, features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor] | None:
        """Where these numbers stand in the table; None where it does not hold all of them."""
        found = _positions(self.spec.targets, targets), _positions(self.spec.features, features)
        return None if found[0] is None or found[1] is None else (found[1], found[0])


@dataclass(frozen=True, eq=False)
class RowBlock:
    """Rows of a pair, as its tables take them.

    Attributes:
        x: (n, layout.n_features); y: (n, layout.n_targets).
        weights: (n,) for each table; None where its rows count alike.
    """

    x: Tensor
    y: Tensor
    weights: tuple[Tensor | None, ...]


def full_tables(layout: Layout, regressors: str = "own_kind") -> list[TableSpec]:
    """All source layers and heads: serves every support, k, λ and selection ("full" mode)."""
    return tables_for([_everything(layout, "full_head", regressors)], layout)


def head_local_tables(layout: Layout, regressors: str = "own_kind") -> list[TableSpec]:
    """The matched heads of all source layers: serves head-local support alone ("head_local" mode)."""
    return tables_for([_everything(layout, "head_local", regressors)], layout)


def probe_tables(layout: Layout) -> list[TableSpec]:
    """One matched head of one source layer at a time: serves the probes behind a selection ("probes")."""
    n_target = len(layout.target_shape)
    recipes = [
        Recipe(layout.source_shape, layout.target_shape, "head_local", both(((source,),) * n_target))
        for source in range(len(layout.source_shape))
    ]
    return tables_for(recipes, layout)


def selected_tables(recipe: Recipe, *, weighted: bool = False) -> list[TableSpec]:
    """What one recipe reads and no more ("selected" mode); `weighted`: a table for each head, with its rows'
    own weights ([C]).
    """
    if not weighted:
        return tables_for([recipe], recipe.layout, recipe.mapped_layers)
    return [
        TableSpec(features.sort().values, recipe.layout.targets(kind, layer, head), (kind, layer, head))
        for kind, layer, head, features in _heads(recipe, recipe.layout, recipe.mapped_layers)
    ]


def tables_for(
    recipes: Iterable[Recipe], layout: Layout, layers: Sequence[int] | None = None
) -> list[TableSpec]:
    """The fewest tables that serve some recipes: one for all heads that read the same features.

    Args:
        recipes: what is to be fitted.
        layout: the numbering; it may hold more native layers than a recipe reads.
        layers: target layers; None: all of them.
    """
    groups: dict[bytes, tuple[Tensor, list[Tensor]]] = {}
    for recipe in recipes:
        for kind, layer, head, features in _heads(recipe, layout, layers):
            ordered = features.sort().values
            entry = groups.setdefault(ordered.numpy().tobytes(), (ordered, []))
            entry[1].append(layout.targets(kind, layer, head))
    return [TableSpec(features, torch.cat(targets).unique()) for features, targets in groups.values()]


def tables_bytes(tables: Iterable[TableSpec]) -> int:
    """Bytes of some tables, both splits."""
    return sum(table.nbytes for table in tables)


@dataclass(eq=False)
class PairMoments:
    """Moments of source features (and the target's native layers) against target channels, on both splits.

    Attributes:
        layout: the numbering of features and targets.
        tables: what is held; see the functions that make table specs.
        product_dtype: dtype of the centred products; sums are float64.
    """

    layout: Layout
    tables: list[Table]
    product_dtype: torch.dtype = torch.float64
    _by_target: dict[int, list[int]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Note which tables serve which target."""
        self._by_target = {}
        for number, table in enumerate(self.tables):
            for target in table.spec.targets.tolist():
                self._by_target.setdefault(target, []).append(number)

    @classmethod
    def zeros(
        cls,
        layout: Layout,
        tables: Sequence[TableSpec] | None = None,
        *,
        device: torch.device | str = "cpu",
        product_dtype: torch.dtype = torch.float64,
        budget_bytes: int | None = None,
    ) -> PairMoments:
        """Empty moments of a pair; `tables` None: all source layers and heads.

        Raises:
            MemoryBudgetExceeded: the tables would be larger than `budget_bytes`.
        """
        specs = full_tables(layout) if tables is None else tables
        check_memory(specs, budget_bytes)
        held = [
            Table(spec, {s: Moments.zeros(len(spec.features), len(spec.targets), device) for s in SPLITS})
            for spec in specs
        ]
        return cls(layout, held, product_dtype)

    @property
    def weighted(self) -> bool:
        """Whether each head's rows carry weights of their own."""
        return any(table.spec.head is not None for table in self.tables)

    @property
    def source_shape(self) -> CacheShape:
        """`(n_kv_heads, head_dim)` of each source layer."""
        return self.layout.source_shape

    @property
    def target_shape(self) -> CacheShape:
        """`(n_kv_heads, head_dim)` of each target layer."""
        return self.layout.target_shape

    def update(
        self,
        split: str,
        source: KVCache,
        target: KVCache,
        rows: Tensor | None = None,
        weights: RowWeights | None = None,
    ) -> PairMoments:
        """Add a batch of sequences to one split, in place, and return self.

        Args:
            split: "fit" or "held_out".
            source: stripped cache (see `kvmap.fit.view.calibration_view`); target likewise, same columns.
            rows: (batch, tokens) bool, the columns that count; None: every real token.
            weights: of the heads whose tables take them.

        Raises:
            MomentsError: an unstripped cache, caches that disagree with each other or with the shapes, or a
                value that is not finite, naming where it stands.
        """
        if split not in SPLITS:
            raise UnknownName("split", split, SPLITS)
        return self.add_rows(split, self.read_rows(source, target, rows, weights))

    def read_rows(
        self, source: KVCache, target: KVCache, rows: Tensor | None = None, weights: RowWeights | None = None
    ) -> RowBlock:
        """The rows that `update` adds, for adding later; arguments and errors are its own."""
        self._check_caches(source, target)
        rows = source.mask if rows is None else rows & source.mask.to(rows.device)
        x, y = feature_rows(self.layout, source, target, rows), target_rows(target, rows)
        _check_finite(x, y)
        return RowBlock(x, y, tuple(_row_weights(table.spec, rows, weights) for table in self.tables))

    def add_rows(self, split: str, rows: RowBlock) -> PairMoments:
        """Add rows of `read_rows` to one split, in place, and return self."""
        if split not in SPLITS:
            raise UnknownName("split", split, SPLITS)
        for table, weights in zip(self.tables, rows.weights, strict=True):
            table.splits[split].update(
                take(rows.x, table.spec.features, 1),
                take(rows.y, table.spec.targets, 1),
                weights,
                self.product_dtype,
            )
        return self

    def _check_caches(self, source: KVCache, target: KVCache) -> None:
        for name, kv, shape in (("source", source, self.source_shape), ("target", target, self.target_shape)):
            if not kv.stripped:
                raise MomentsError(
                    f"the {name} cache carries rotated keys; moments are taken of content keys: pass it "
                    f"through calibration_view first"
                )
            if cache_shape(kv) != shape:
                raise MomentsError(
                    f"the {name} cache has layers {cache_shape(kv)} (heads, head_dim); these moments are "
                    f"of {shape}"
                )
        if not torch.equal(source.mask.cpu(), target.mask.cpu()):
            raise MomentsError(
                f"source and target caches hold different columns: {tuple(source.mask.shape)} and "
                f"{tuple(target.mask.shape)} (batch, tokens), or other pads. Both must read the same ids"
            )

    def cut(self, split: str, features: Tensor, targets: Tensor) -> Moments:
        """The moments of some features and targets on one split.

        Args:
            split: "fit" or "held_out".
            features: (p',) numbers of `layout`, in the order wanted; targets: (q',) likewise.

        Returns:
            Float64 moments; views of what is held where the numbers are consecutive, so do not change them.

        Raises:
            MomentsError: no table holds them all.
        """
        if split not in SPLITS:
            raise UnknownName("split", split, SPLITS)
        found = self._find(features, targets)
        if found is not None:
            number, positions = found
            return self.tables[number].splits[split].cut(*positions)
        raise MomentsError(
            f"these moments do not hold {len(features)} features against {len(targets)} targets: they were "
            f"taken for another support, selection, regressors or number of native layers. Calibrate for "
            f"these (calibration.mode=full holds them all)"
        )

    def table_of(self, features: Tensor, targets: Tensor) -> int | None:
        """Number of the table that `cut` would cut from; None: no table holds them all.

        Heads that read the same features may stand in different tables, where they differ in what else the
        tables hold for them; what is cut from one table can be cut together.
        """
        found = self._find(features, targets)
        return None if found is None else found[0]

    def _find(self, features: Tensor, targets: Tensor) -> tuple[int, tuple[Tensor, Tensor]] | None:
        """The first table that holds some features and targets, and their positions in it."""
        every = range(len(self.tables))
        for number in self._by_target.get(int(targets[0]), ()) if len(targets) else every:
            positions = self.tables[number].positions(features, targets)
            if positions is not None:
                return number, positions
        return None

    def mean_target(self, split: str, kind: str, layer: int) -> Tensor:
        """Mean of a target layer's channels, (H_t·d_t,) float64."""
        targets = self.layout.targets(kind, layer)
        heads = targets.split(self.target_shape[layer][1])
        nothing = torch.zeros(0, dtype=torch.int64)
        return torch.cat([self.cut(split, nothing, head).mean_y for head in heads])

    def covers(self, recipe: Recipe) -> bool:
        """Whether a recipe can be fitted from these moments."""
        if (recipe.source_shape, recipe.target_shape) != (self.source_shape, self.target_shape):
            return False
        if recipe.native_layers > self.layout.native_layers:
            return False
        return all(
            self.table_of(features, self.layout.targets(kind, layer, head)) is not None
            for kind, layer, head, features in _heads(recipe, self.layout, recipe.mapped_layers)
        )

    def n_rows(self, split: str) -> int:
        """Rows of one split (of the table with the fewest, where rows are weighted)."""
        return min((table.splits[split].n_rows for table in self.tables), default=0)

    def merge(self, other: PairMoments) -> PairMoments:
        """Add the rows of `other` (another shard), in place, and return self.

        Raises:
            MomentsError: moments of another pair, or other tables.
        """
        if self.layout != other.layout or not _same_tables(self.tables, other.tables):
            raise MomentsError(
                f"cannot merge moments of another pair or with other tables: {other.source_shape} → "
                f"{other.target_shape}, {len(other.tables)} tables, into {self.source_shape} → "
                f"{self.target_shape}, {len(self.tables)} tables"
            )
        for mine, theirs in zip(self.tables, other.tables, strict=True):
            for split in SPLITS:
                mine.splits[split].merge(theirs.splits[split])
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of all tables."""
        return tables_bytes(table.spec for table in self.tables)

    def to(self, device: torch.device | str) -> PairMoments:
        """The same moments elsewhere."""
        tables = [
            Table(table.spec, {split: moments.to(device) for split, moments in table.splits.items()})
            for table in self.tables
        ]
        return PairMoments(self.layout, tables, self.product_dtype)

    def to_tensors(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Flat tensors (float64, numbers int64), and settings that JSON can hold."""
        tensors: dict[str, Tensor] = {}
        tables = []
        for number, table in enumerate(self.tables):
            tensors[f"{number}.features"] = table.spec.features
            tensors[f"{number}.targets"] = table.spec.targets
            for split, moments in table.splits.items():
                for name, tensor in moments.tensors().items():
                    tensors[f"{number}.{split}.{name}"] = tensor.cpu().contiguous()
            tables.append(
                {
                    "head": None if table.spec.head is None else list(table.spec.head),
                    "n_rows": {split: moments.n_rows for split, moments in table.splits.items()},
                    "weight": {split: moments.weight for split, moments in table.splits.items()},
                }
            )
        settings = {
            "source_shape": [list(layer) for layer in self.source_shape],
            "target_shape": [list(layer) for layer in self.target_shape],
            "native_layers": self.layout.native_layers,
            "product_dtype": str(self.product_dtype).removeprefix("torch."),
            "tables": tables,
        }
        return tensors, settings

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> PairMoments:
        """Inverse of `to_tensors`.

        Raises:
            MomentsError: a tensor that is missing or has another shape than the settings say.
        """
        layout = Layout(
            shape_from_json(settings["source_shape"]),
            shape_from_json(settings["target_shape"]),
            int(settings["native_layers"]),
        )
        tables = [_read_table(tensors, number, entry) for number, entry in enumerate(settings["tables"])]
        return cls(layout, tables, PRODUCT_DTYPES[settings["product_dtype"]])


def calibration_rows(mask: Tensor, native_head: int = 0, stride: int = 1) -> Tensor:
    """Which columns of a batch count for the fit.

    Pads are left out, and so are the first `native_head` real tokens of each row, which the target will
    compute itself; of the rest every `stride`-th is kept, starting with the first.

    Args:
        mask: (batch, tokens) bool, True at real tokens; left padding allowed.

    Returns:
        (batch, tokens) bool.

    Raises:
        MomentsError: `native_head` < 0 or `stride` < 1.
    """
    if native_head < 0 or stride < 1:
        raise MomentsError(
            f"native_head={native_head}, stride={stride}: expected native_head >= 0 and stride >= 1"
        )
    mask = mask.bool()
    index = mask.cumsum(-1) - 1 - native_head
    return mask & (index >= 0) & (index % stride == 0)


def feature_rows(layout: Layout, source: KVCache, target: KVCache, rows: Tensor) -> Tensor:
    """All features of a layout for the chosen columns, in its order.

    Args:
        source, target: stripped caches of the same columns; of the target only native layers are read.
        rows: (batch, tokens) bool with n columns True.

    Returns:
        (n, layout.n_features), rows in the order of the batch, then of the tokens.
    """
    native = layout.native_layers
    return _channel_rows((*source.keys, *source.values, *target.keys[:native], *target.values[:native]), rows)


def target_rows(target: KVCache, rows: Tensor) -> Tensor:
    """All targets of a layout for the chosen columns, in its order: (n, layout.n_targets)."""
    return _channel_rows((*target.keys, *target.values), rows)


def check_memory(tables: Iterable[TableSpec], budget_bytes: int | None) -> None:
    """Refuse moments that would not fit a budget.

    Raises:
        MemoryBudgetExceeded: with the bytes needed and allowed.
    """
    needed = tables_bytes(tables)
    if budget_bytes is not None and needed > budget_bytes:
        raise MemoryBudgetExceeded(
            f"the moments of this pair need {needed:,} bytes in this mode (two splits, float64); "
            f"{budget_bytes:,} are allowed. Raise calibration.memory_budget_gib, choose a smaller "
            f"calibration.mode, or use a machine with more memory"
        )


def _everything(layout: Layout, support: str, regressors: str) -> Recipe:
    """A recipe that reads every source layer and every native one."""
    layers = tuple(range(len(layout.source_shape)))
    selection = both((layers,) * len(layout.target_shape))
    return Recipe(
        layout.source_shape, layout.target_shape, support, selection, regressors, layout.native_layers
    )


def _heads(
    recipe: Recipe, layout: Layout, layers: Sequence[int] | None = None
) -> Iterator[tuple[str, int, int, Tensor]]:
    """Kind, target layer, head, and the numbers of the features it reads, (p,)."""
    for kind in KINDS:
        for layer in range(len(layout.target_shape)) if layers is None else layers:
            columns = recipe.columns(kind, layer, layout)
            for head in range(layout.target_shape[layer][0]):
                yield kind, layer, head, columns[0 if recipe.shared else head]


def _channel_rows(layers: Sequence[Tensor], rows: Tensor) -> Tensor:
    """Rows of (layer, head, channel) of the chosen columns: (n, Σ n_kv_heads · head_dim).

    Written layer by layer into the one tensor: joined parts would be held twice.
    """
    first = layers[0]
    chosen = rows.to(first.device)
    dtype = functools.reduce(torch.promote_types, (layer.dtype for layer in layers))
    widths = [layer.shape[1] * layer.shape[3] for layer in layers]
    joined = torch.empty(int(chosen.sum()), sum(widths), dtype=dtype, device=first.device)
    for layer, part in zip(layers, joined.split(widths, 1), strict=True):
        part.copy_(layer.transpose(1, 2)[chosen].flatten(1))
    return joined


def _row_weights(spec: TableSpec, rows: Tensor, weights: RowWeights | None) -> Tensor | None:
    if spec.head is None:
        return None
    if weights is None:
        raise MomentsError("these moments are of weighted rows, and no weights were given")
    kind, layer, head = spec.head
    by_head = weights[kind, layer][:, head]
    return by_head[rows.to(by_head.device)]


def _check_finite(x: Tensor, y: Tensor) -> None:
    for what, values in (("source features", x), ("target channels", y)):
        # a sum needs no copy, and is not finite where a value is not (nor where it overflows)
        if not bool(torch.isfinite(values.sum())) and not bool(torch.isfinite(values).all()):
            column = int((~torch.isfinite(values)).any(0).nonzero()[0])
            raise MomentsError(
                f"the {what} hold a NaN or infinite value in column {column} of {values.shape[1]}: a cache "
                f"overflowed its dtype; capture in bfloat16 or float32"
            )


def _positions(held: Tensor, wanted: Tensor) -> Tensor | None:
    """Where the wanted numbers stand among those held, which ascend; None if one is not there."""
    found = torch.searchsorted(held, wanted)
    inside = found < len(held)
    if not bool(inside.all()) or not torch.equal(held[found], wanted):
        return None
    return found


def _same_tables(mine: Sequence[Table], theirs: Sequence[Table]) -> bool:
    return len(mine) == len(theirs) and all(
        torch.equal(a.spec.features, b.spec.features)
        and torch.equal(a.spec.targets, b.spec.targets)
        and a.spec.head == b.spec.head
        for a, b in zip(mine, theirs, strict=True)
    )


def _read_table(tensors: Mapping[str, Tensor], number: int, entry: Mapping[str, Any]) -> Table:
    for name in ("features", "targets"):
        if f"{number}.{name}" not in tensors:
            raise MomentsError(f"moments tensor '{number}.{name}': got nothing, expected its numbers")
    features, targets = tensors[f"{number}.features"], tensors[f"{number}.targets"]
    p, q = len(features), len(targets)
    expected = {"mean_x": (p,), "mean_y": (q,), "s_xx": (p, p), "s_xy": (p, q), "s_yy": (q,)}
    splits = {}
    for split in SPLITS:
        parts = []
        for name, shape in expected.items():
            key = f"{number}.{split}.{name}"
            if key not in tensors or tuple(tensors[key].shape) != shape:
                got = tuple(tensors[key].shape) if key in tensors else "nothing"
                raise MomentsError(f"moments tensor {key!r}: got {got}, expected {shape}")
            parts.append(tensors[key].double())
        splits[split] = Moments(int(entry["n_rows"][split]), float(entry["weight"][split]), *parts)
    head = entry["head"]
    spec = TableSpec(features, targets, None if head is None else (str(head[0]), int(head[1]), int(head[2])))
    return Table(spec, splits)
