"""The hand-off itself: mapped by one model's mapper, or read by the target alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvmap.errors import UnknownName
from kvmap.fit.view import check_rope
from kvmap.mappers.base import Mapper
from kvmap.models.cache import KVCache
from kvmap.models.capture import forward, prefill
from kvmap.models.pair import LoadedModel
from kvmap.transfer.columns import (
    Columns,
    extend_head,
    own_counts,
    put_own_columns,
    split_columns,
    unfilled_cache,
)
from kvmap.transfer.context import (
    Context,
    TransferError,
    check_own_cache,
    check_parts,
    prepare_prefix,
    read_context,
)
from kvmap.transfer.mapping import Filling, start_filling
from kvmap.transfer.oracle import OwnKind, with_own
from kvmap.transfer.recompute import RECOMPUTE_RULES, Handed, recompute


@dataclass(frozen=True)
class TransferOptions:
    """How a cache is handed over.

    Attributes:
        hold_back: last tokens of the context that the target runs itself, at least 1.
        native_head: first tokens of the context that the target runs itself; 0 is the published behaviour.
        rope: "strip" maps content keys and rotates them for the target; "coupled" maps rotated keys to
            rotated keys; "no_rerotate" maps content keys and leaves them unrotated.
        recompute_share: r in [0, 1], the share of the mapped tokens that the target runs itself after all,
            over the mapped cache; at least one token where r > 0. 0: none.
        recompute_rule: which they are. "attention": those that the held-back tokens attend to most;
            "map_error": those whose keys and values the map misses most in the first layer it writes;
            "random": any.
        recompute_seed: of the rule "random".
    """

    hold_back: int = 1
    native_head: int = 1
    rope: str = "strip"
    recompute_share: float = 0.0
    recompute_rule: str = "attention"
    recompute_seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what no hand-off can do.

        Raises:
            TransferError, UnknownName: naming the option, its value and what is expected.
        """
        if self.hold_back < 1:
            raise TransferError(
                f"hold_back={self.hold_back}: expected at least 1, the token whose logits come first"
            )
        if self.native_head < 0:
            raise TransferError(f"native_head={self.native_head}: expected 0 or more tokens")
        if not (math.isfinite(self.recompute_share) and 0 <= self.recompute_share <= 1):
            raise TransferError(
                f"recompute_share={self.recompute_share}: expected a share of the mapped tokens, 0 to 1"
            )
        if self.recompute_rule not in RECOMPUTE_RULES:
            raise UnknownName("recompute_rule", self.recompute_rule, RECOMPUTE_RULES)
        check_rope(self.rope)


@dataclass(frozen=True, eq=False)
class HandOff:
    """A context the target is ready to continue. Counts are sums over the rows of the batch, without pads.

    Attributes:
        kv: the target's cache over all columns of the context, `exact=False` if any of them was mapped and
            not recomputed. In windowed layers the columns that no later token sees may hold zeros.
        logits: (batch, vocab) float32, for the token after the context.
        n_mapped: tokens that were mapped, in the layers above the native ones.
        n_native_head: tokens before the held-back ones whose columns are the target's own.
        n_hold_back: tokens run through the target on top of the rest.
        n_clamped: mapped numbers that did not fit the target's dtype and were set to its largest, ±65,504 in
            float16. Anything but 0 says that the target should run in bfloat16.
        n_mapped_of_row: `n_mapped` row by row.
        n_native_layers: first layers of which no column was mapped: the mapper's `native_layers`, or all
            layers where nothing was mapped.
        n_recomputed: of the mapped tokens, those that the target then computed itself.
        n_recomputed_of_row: `n_recomputed` row by row.
        n_mapped_of_layer: tokens mapped in each target layer: none in native ones, in the others `n_mapped`,
            or those of them that a windowed layer's later tokens can see.
    """

    kv: KVCache
    logits: Tensor
    n_mapped: int
    n_native_head: int
    n_hold_back: int
    n_clamped: int
    n_mapped_of_row: tuple[int, ...]
    n_native_layers: int
    n_recomputed: int
    n_recomputed_of_row: tuple[int, ...]
    n_mapped_of_layer: tuple[int, ...]

    def select_rows(self, index: Sequence[int] | Tensor) -> HandOff:
        """Rows of the batch, repeats allowed, so that several continuations of one context make one batch.

        The counts stay those of the whole hand-off, but for those row by row.
        """
        rows = torch.as_tensor(index, dtype=torch.long)
        return replace(
            self,
            kv=self.kv.select_rows(rows),
            logits=self.logits[rows.to(self.logits.device)],
            n_mapped_of_row=tuple(self.n_mapped_of_row[row] for row in rows.tolist()),
            n_recomputed_of_row=tuple(self.n_recomputed_of_row[row] for row in rows.tolist()),
        )


def transfer(
    source_kv: KVCache,
    mapper: Mapper,
    target: LoadedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    hold_back: int = 1,
    native_head: int = 1,
    rope: str = "strip",
    recompute_share: float = 0.0,
    recompute_rule: str = "attention",
    recompute_seed: int = 0,
    native_prefix: KVCache | None = None,
    own_kind: OwnKind | None = None,
    every_column: bool = False,
) -> HandOff:
    """Hand a context over: map the source's cache, let the target run the rest ([H] §3.4).

    `k̂ = R_target(position)(k_content W_K + b_K)`, `v̂ = v W_V + b_V`, mapped and rotated in float32 with the
    frequencies the target would use for a prefill of this length, then cast to the target's dtype.
    A mapper with `native_layers` = m has the target run its first m layers over the whole context, for the
    price of m − 1 layers and one projection: their columns are exact, whatever becomes of mapped keys under
    `rope`, and feed the map of the layers above, as content keys (rotated ones under "coupled").
    With `recompute_share` = r the target then runs the share r of the mapped tokens through all its layers,
    over the cache as it was mapped: in each layer their own keys and values replace the mapped ones before
    they attend to it. At r = 1 nothing mapped is left, and the cache is the target's own.
    A context that leaves nothing to map (one token, no more than `hold_back` and `native_head` cover, or a
    mapper of native layers alone) is a plain native run. Nothing given is changed.

    Args:
        source_kv: the source's cache over all columns of `input_ids`.
        mapper: of this pair and strategy. One that was loaded knows what it was fitted for
            (`Mapper.fitted_for`) and is refused elsewhere; of one made in memory shapes alone are checked.
        target: the model that goes on.
        input_ids: (batch, tokens) the context; attention_mask: (batch, tokens), left padding only, or None.
        hold_back, native_head, rope, recompute_share, recompute_rule, recompute_seed: see `TransferOptions`,
            whose fields these are: `transfer(..., **dataclasses.asdict(options))`.
        native_prefix: the target's own cache of the first q tokens of each row (or one row that serves all),
            used as it is; `native_head` then only counts what it exceeds q by. That it holds these tokens
            is the caller's to know: a cache carries no ids. Native layers read its tokens again.
        own_kind: an oracle for diagnosis: all "key"s, or all "value"s, are the target's own after all, of a
            prefill of the whole context; see `kvmap.transfer.oracle`.
        every_column: map also those columns of windowed layers that neither the held-back tokens nor any
            later one can see. They cost as much as the others and change no output; needed where the cache is
            read otherwise (diagnosed, mapped on, cut shorter). With tokens to recompute, which see other
            columns than the last, every column is mapped whatever is said here.

    A dynamic or longrope model runs its own first tokens with the frequencies of the whole context. A
    `native_prefix` read within a shorter context is turned to them, but keeps the hidden states it had there.

    Raises:
        TransferError: naming the mismatch, or the layer whose mapped keys or values are not finite.
        MapperMismatch: a mapper of other shapes than source or target, or one fitted for other models or
            for another RoPE strategy ("strip" and "no_rerotate" share one fit).
        UnsupportedModel: tokens to recompute, and a target whose attention takes no mask.
    """
    options = TransferOptions(hold_back, native_head, rope, recompute_share, recompute_rule, recompute_seed)
    context = read_context(target, input_ids, attention_mask, options.hold_back)
    check_parts(source_kv, mapper, target, context, options.rope)
    begun = begin(mapper, target, context, options, native_prefix, every_column)
    if begun is None:
        return native(target, input_ids, attention_mask, hold_back=options.hold_back)
    if begun.any_wanted:
        begun.filling.map_all(source_kv)
    return complete(begun, own_kind)


@dataclass(frozen=True, eq=False)
class Begun:
    """A hand-off before its map.

    Attributes:
        options: as asked.
        head: a cache that begins with each row's own tokens; None where there are none.
        room: the target's cache over all columns of the context, those of the held-back end empty.
        filling: its columns before that end, and what fills them.
    """

    options: TransferOptions
    head: KVCache | None
    room: KVCache
    filling: Filling

    @property
    def any_wanted(self) -> bool:
        """Whether there is a column to map."""
        columns = self.filling.columns
        return columns.start < columns.context.n_columns


def begin(
    mapper: Mapper,
    target: LoadedModel,
    context: Context,
    options: TransferOptions,
    prefix: KVCache | None,
    every_column: bool = False,
) -> Begun | None:
    """What the target does before the map: its own head, its native layers, room for its cache.

    Args:
        prefix, every_column: as given, see `transfer`.

    Returns:
        None where the whole context is the target's own, and nothing is there that it could use.
    """
    everything_native = mapper.native_layers == len(mapper.target_shape)
    n_first = context.n_columns if everything_native else options.native_head
    head = prepare_prefix(prefix, target, context)
    own = own_counts(context, n_first, head)
    if head is None and bool((own >= context.n_cut).all()):
        return None
    head = extend_head(target, context, head, torch.full_like(own, n_first).minimum(context.n_cut))
    columns = split_columns(context, own)
    room = unfilled_cache(target, columns, target.rotations(context.length))
    kv = room.slice_tokens(0, context.n_columns)
    every_column = every_column or options.recompute_share > 0
    return Begun(options, head, room, start_filling(mapper, target, columns, options.rope, kv, every_column))


def complete(begun: Begun, own_kind: OwnKind | None) -> HandOff:
    """What comes after the map: own columns, tokens to recompute, the held-back end.

    Raises:
        TransferError: mapped keys or values that are not finite.
    """
    options, head, filling = begun.options, begun.head, begun.filling
    target, columns, joined = filling.target, filling.columns, filling.kv
    context, n_layers = columns.context, joined.n_layers
    n_clamped = filling.finish()
    if head is not None:
        put_own_columns(joined, columns, head)
    if own_kind is not None:
        joined = with_own(target, context, joined, own_kind)
    cut, recomputed = _recomputed(target, columns, joined, filling.mapper.native_layers, options)
    mapped = tuple((context.n_cut - columns.own).tolist())
    n_native, n_mapped, n_recomputed = int(columns.own.sum()), sum(mapped), sum(recomputed)
    exact = n_mapped == n_recomputed and (head is None or head.exact)
    cut = replace(
        cut,
        exact=exact,
        owner=target.identity if exact else None,
        mixed=options.rope == "no_rerotate" and own_kind != "key" and n_mapped > n_recomputed,
    )
    in_place = own_kind is None and not n_recomputed
    logits, kv = _run_tail(target, context, cut, begun.room if in_place else None)
    return HandOff(
        kv,
        logits,
        n_mapped=n_mapped,
        n_native_head=n_native,
        n_hold_back=int(context.mask.sum()) - n_native - n_mapped,
        n_clamped=n_clamped,
        n_mapped_of_row=mapped,
        n_native_layers=filling.mapper.native_layers if n_mapped else n_layers,
        n_recomputed=n_recomputed,
        n_recomputed_of_row=recomputed,
        n_mapped_of_layer=filling.mapped_of_layer(n_mapped),
    )


def _recomputed(
    target: LoadedModel, columns: Columns, kv: KVCache, native_layers: int, options: TransferOptions
) -> tuple[KVCache, tuple[int, ...]]:
    """The cache with the tokens recomputed that the options ask for, and how many of each row."""
    turned = options.rope != "no_rerotate"
    # a rule may run the target on the cache, which is not yet its own
    handed = Handed(target, columns, replace(kv, exact=False), native_layers, turned, options.recompute_seed)
    return recompute(handed, options.recompute_share, options.recompute_rule)


def native(
    target: LoadedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    hold_back: int = 1,
    *,
    cache: KVCache | None = None,
) -> HandOff:
    """The target reads the whole context itself: the ceiling, behind the same interface.

    The context is prefilled whole, so that length-dependent frequencies are those of its full length, and the
    last `hold_back` tokens are run again on top of the others, the only ones whose logits are made.

    Args:
        target: the model.
        input_ids: (batch, tokens) the context; attention_mask: (batch, tokens), left padding only, or None.
        hold_back: last tokens that are run again, at least 1.
        cache: the model's own prefill of this very context, where it is there already, so that nothing is
            read twice; it stays as it is. None: it is made here.

    Raises:
        TransferError: hold_back < 1, a mask that is not left padding, or a cache of another model, of other
            rows or columns, or with stripped keys.
    """
    options = TransferOptions(hold_back=hold_back)
    context = read_context(target, input_ids, attention_mask, options.hold_back)
    if cache is not None:
        check_own_cache(cache, target, context)
    cut = None
    if context.n_columns > 0:
        whole = prefill(target, context.ids, context.mask) if cache is None else cache
        cut = whole.slice_tokens(0, context.n_columns)
    logits, kv = _run_tail(target, context, cut)
    n_native = int(context.n_cut.sum())
    n_tail = int(context.mask.sum()) - n_native
    n_layers = target.geometry.n_layers
    none = (0,) * context.ids.shape[0]
    return HandOff(kv, logits, 0, n_native, n_tail, 0, none, n_layers, 0, none, (0,) * n_layers)


def _run_tail(
    target: LoadedModel, context: Context, cut: KVCache | None, room: KVCache | None = None
) -> tuple[Tensor, KVCache]:
    """Run the held-back tokens on the cut cache: (batch, vocab) logits after the last, and the full cache.

    Args:
        room: of which `cut` is the first columns, so that nothing is copied; see `forward`.
    """
    tail = slice(context.n_columns, None)
    logits, kv = forward(target, context.ids[:, tail], cut, context.mask[:, tail], room=room)
    return logits[:, -1], kv
