"""From a source's cache to a target's, and on: what a model does with a context another model has read.

The columns of a hand-off come from three places. The first real tokens of each row are the target's own
(`native_head`, or a prefix it has cached already), the last `hold_back` are run through the target on top of
everything else and give the first logits, and what lies between is mapped.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvmap.errors import KvmapError
from kvmap.fit.moments import cache_shape, geometry_shape
from kvmap.fit.view import ROPE_STRATEGIES, cache_view, calibration_view, check_rope
from kvmap.mappers.base import Mapper, check_shape
from kvmap.models.cache import KVCache
from kvmap.models.capture import forward, positions_from_mask, prefill
from kvmap.models.pair import LoadedModel
from kvmap.models.rope import Rotation, apply_rotation, same_rotations

__all__ = [
    "ROPE_STRATEGIES",
    "HandOff",
    "TransferError",
    "TransferOptions",
    "calibration_view",
    "continue_greedy",
    "native",
    "score_continuations",
    "transfer",
]


class TransferError(KvmapError):
    """A hand-off that cannot be made: caches, ids and masks that disagree, or a map that is not finite."""


@dataclass(frozen=True)
class TransferOptions:
    """How a cache is handed over.

    Attributes:
        hold_back: last tokens of the context that the target runs itself, at least 1.
        native_head: first tokens of the context that the target runs itself; 0 is the published behaviour.
        rope: "strip" maps content keys and rotates them for the target; "coupled" maps rotated keys to
            rotated keys; "no_rerotate" maps content keys and leaves them unrotated.
    """

    hold_back: int = 1
    native_head: int = 1
    rope: str = "strip"

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
        check_rope(self.rope)


@dataclass(frozen=True, eq=False)
class HandOff:
    """A context the target is ready to continue. Counts are sums over the rows of the batch, without pads.

    Attributes:
        kv: the target's cache over all columns of the context, `exact=False` if any of them was mapped.
        logits: (batch, vocab) float32, for the token after the context.
        n_mapped: tokens that were mapped.
        n_native_head: tokens before the held-back ones whose columns are the target's own.
        n_hold_back: tokens run through the target on top of the rest.
        n_clamped: mapped numbers that did not fit the target's dtype and were set to its largest, ±65,504 in
            float16. Anything but 0 says that the target should run in bfloat16.
        n_mapped_of_row: `n_mapped` row by row.
    """

    kv: KVCache
    logits: Tensor
    n_mapped: int
    n_native_head: int
    n_hold_back: int
    n_clamped: int
    n_mapped_of_row: tuple[int, ...]

    def select_rows(self, index: Sequence[int] | Tensor) -> HandOff:
        """Rows of the batch, repeats allowed, so that several continuations of one context make one batch.

        The counts stay those of the whole hand-off, but for `n_mapped_of_row`.
        """
        rows = torch.as_tensor(index, dtype=torch.long)
        return replace(
            self,
            kv=self.kv.select_rows(rows),
            logits=self.logits[rows.to(self.logits.device)],
            n_mapped_of_row=tuple(self.n_mapped_of_row[row] for row in rows.tolist()),
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
    native_prefix: KVCache | None = None,
) -> HandOff:
    """Hand a context over: map the source's cache, let the target run the rest ([H] §3.4).

    `k̂ = R_target(position)(k_content W_K + b_K)`, `v̂ = v W_V + b_V`, mapped and rotated in float32 with the
    frequencies the target would use for a prefill of this length, then cast to the target's dtype.
    A context that leaves nothing to map (one token, or no more than `hold_back` and `native_head` cover) is a
    plain native run. Nothing given is changed.

    Args:
        source_kv: the source's cache over all columns of `input_ids`.
        mapper: of this pair and strategy. One that was loaded knows what it was fitted for
            (`Mapper.fitted_for`) and is refused elsewhere; of one made in memory shapes alone are checked.
        target: the model that goes on.
        input_ids: (batch, tokens) the context; attention_mask: (batch, tokens), left padding only, or None.
        hold_back, native_head, rope: see `TransferOptions`.
        native_prefix: the target's own cache of the first q tokens of each row (or one row that serves all),
            used as it is; `native_head` then only counts what it exceeds q by. That it holds these tokens
            is the caller's to know: a cache carries no ids.

    A dynamic or longrope model runs its own first tokens with the frequencies of the whole context. A
    `native_prefix` read within a shorter context is turned to them, but keeps the hidden states it had there.

    Raises:
        TransferError: naming the mismatch, or the layer whose mapped keys or values are not finite.
        MapperMismatch: a mapper of other shapes than source or target, or one fitted for other models or
            for another RoPE strategy ("strip" and "no_rerotate" share one fit).
    """
    options = TransferOptions(hold_back, native_head, rope)
    context = _read_context(target, input_ids, attention_mask, options.hold_back)
    _check_parts(source_kv, mapper, target, context, options.rope)
    head = _prepare_prefix(native_prefix, target, context)
    own = _own_counts(context, options.native_head, head)
    if head is None and bool((own >= context.n_cut).all()):
        return native(target, input_ids, attention_mask, hold_back=options.hold_back)
    head = _extend_head(
        target, context, head, torch.full_like(own, options.native_head).minimum(context.n_cut)
    )
    rotations = target.rotations(context.length)
    cut, n_clamped = _cut_cache(source_kv, mapper, target, context, options.rope, head, own, rotations)
    n_native = int(own.sum())
    n_mapped_of_row = tuple((context.n_cut - own).tolist())
    n_mapped = sum(n_mapped_of_row)
    cut = replace(
        cut,
        exact=n_mapped == 0 and (head is None or head.exact),
        owner=target.identity if n_mapped == 0 else None,
        mixed=options.rope == "no_rerotate" and n_mapped > 0,
    )
    logits, kv = _run_tail(target, context, cut)
    n_tail = int(context.mask.sum()) - n_native - n_mapped
    return HandOff(kv, logits, n_mapped, n_native, n_tail, n_clamped, n_mapped_of_row)


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
    context = _read_context(target, input_ids, attention_mask, options.hold_back)
    if cache is not None:
        _check_own_cache(cache, target, context)
    cut = None
    if context.n_columns > 0:
        whole = prefill(target, context.ids, context.mask) if cache is None else cache
        cut = whole.slice_tokens(0, context.n_columns)
    logits, kv = _run_tail(target, context, cut)
    n_native = int(context.n_cut.sum())
    n_tail = int(context.mask.sum()) - n_native
    return HandOff(kv, logits, 0, n_native, n_tail, 0, (0,) * context.ids.shape[0])


def continue_greedy(
    target: LoadedModel, handoff: HandOff, max_new_tokens: int, stop_ids: Collection[int] = ()
) -> list[list[int]]:
    """The likeliest next token, again and again, from a hand-off that stays as it is.

    Frequencies that depend on the length (dynamic, longrope) are what the target itself uses at each step;
    mapped keys keep those of the context's length, as the target's own cached keys do. Nothing is read again.

    Returns:
        For each row its new ids, up to `max_new_tokens`, ended by the first of `stop_ids`, which is left
        out. A row that has stopped does not stop the others.

    Raises:
        TransferError: `max_new_tokens` < 0.
    """
    if max_new_tokens < 0:
        raise TransferError(f"max_new_tokens={max_new_tokens}: expected 0 or more")
    stop = frozenset(stop_ids)
    rows: list[list[int]] = [[] for _ in range(handoff.logits.shape[0])]
    running = set(range(len(rows)))
    logits, kv = handoff.logits, handoff.kv
    for step in range(max_new_tokens):
        chosen = logits.argmax(-1)
        for row, token in enumerate(chosen.tolist()):
            if token in stop:
                running.discard(row)
            if row in running:
                rows[row].append(token)
        if not running or step == max_new_tokens - 1:
            break
        # stopped rows are fed on and ignored: rows do not see each other
        step_logits, kv = forward(target, chosen.unsqueeze(1), kv)
        logits = step_logits[:, -1]
    return rows


def score_continuations(
    target: LoadedModel, handoff: HandOff, continuations: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Log-probability of each token of one continuation a row, in nats; the hand-off stays as it is.

    The first token is judged by the hand-off's own logits, the others in one forward.

    Args:
        target: the model of the hand-off.
        handoff: see `HandOff.select_rows` for several continuations of one context.
        continuations: one list of ids for each row, of any length, empty ones too.

    Returns:
        For each row (n,) float32.

    Raises:
        TransferError: another number of continuations than rows.
    """
    if len(continuations) != handoff.logits.shape[0]:
        raise TransferError(
            f"{len(continuations)} continuations for a hand-off of {handoff.logits.shape[0]} rows: expected "
            f"one a row; repeat rows with HandOff.select_rows"
        )
    lengths = [len(continuation) for continuation in continuations]
    longest = max(lengths, default=0)
    device = handoff.logits.device
    if longest == 0:
        return [torch.empty(0, device=device) for _ in continuations]
    ids = torch.zeros(len(lengths), longest, dtype=torch.long, device=device)
    real = torch.zeros_like(ids, dtype=torch.bool)
    for row, continuation in enumerate(continuations):
        ids[row, : lengths[row]] = torch.as_tensor(continuation, dtype=torch.long, device=device)
        real[row, : lengths[row]] = True
    logits = handoff.logits.unsqueeze(1)
    if longest > 1:
        later, _ = forward(target, ids[:, :-1], handoff.kv, real[:, :-1])
        logits = torch.cat([logits, later.to(device)], dim=1)
    scores = logits.float().log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    return [scores[row, :length] for row, length in enumerate(lengths)]


@dataclass(frozen=True, eq=False)
class _Context:
    """Ids (batch, tokens) on the target's device, the mask, and where rows are cut for the held-back end."""

    ids: Tensor
    mask: Tensor
    positions: Tensor
    n_columns: int
    """columns before the held-back ones"""
    n_cut: Tensor
    """(batch,) real tokens among them"""

    @property
    def length(self) -> int:
        """Tokens of the longest row, which is what length-dependent frequencies go by."""
        return int(self.mask.sum(-1).max())

    @property
    def first(self) -> Tensor:
        """(batch,) column of each row's first real token."""
        return self.mask.shape[1] - self.mask.sum(-1)


def _read_context(
    target: LoadedModel, input_ids: Tensor, attention_mask: Tensor | None, hold_back: int
) -> _Context:
    if input_ids.ndim != 2 or input_ids.shape[1] == 0:
        raise TransferError(
            f"input_ids have shape {tuple(input_ids.shape)}: expected (batch, tokens), tokens >= 1"
        )
    ids = input_ids.to(target.device)
    mask = (
        torch.ones_like(ids, dtype=torch.bool)
        if attention_mask is None
        else attention_mask.to(ids.device).bool()
    )
    if mask.shape != ids.shape:
        raise TransferError(f"attention_mask has shape {tuple(mask.shape)}; input_ids {tuple(ids.shape)}")
    if not bool(mask[:, -1].all()) or bool((mask[:, :-1] & ~mask[:, 1:]).any()):
        raise TransferError(
            "attention_mask: expected left padding, zeros and then at least one 1 in each row"
        )
    n_columns = max(ids.shape[1] - hold_back, 0)
    context = _Context(ids, mask, positions_from_mask(mask), n_columns, mask[:, :n_columns].sum(-1))
    target.geometry.check_length(context.length)
    return context


def _check_columns(what: str, kv: KVCache, context: _Context) -> None:
    """Refuse a cache that does not hold the context's rows, columns and pads."""
    if kv.mask.shape != context.mask.shape:
        raise TransferError(
            f"the {what} cache holds {kv.batch_size} rows of {kv.n_tokens} columns; input_ids "
            f"are {tuple(context.ids.shape)}: prefill these very ids"
        )
    if not torch.equal(kv.mask.cpu(), context.mask.cpu()):
        raise TransferError(
            f"the {what} cache has pads elsewhere than attention_mask: prefill it with this mask"
        )


def _check_own_cache(cache: KVCache, model: LoadedModel, context: _Context) -> None:
    _check_columns("given", cache, context)
    if cache.owner is not None and (mismatches := cache.owner.mismatches(model.identity)):
        raise TransferError("the given cache is another model's: " + "; ".join(mismatches))
    if cache.stripped or not cache.exact:
        raise TransferError("the given cache was stripped or mapped: give the model's own, as captured")


def _check_parts(
    source_kv: KVCache, mapper: Mapper, target: LoadedModel, context: _Context, rope: str
) -> None:
    _check_columns("source", source_kv, context)
    mapper.check_models(source_kv.owner, target.identity, rope)
    if rope == "coupled" and source_kv.stripped:
        raise TransferError(
            "rope='coupled' maps rotated keys; the source cache was stripped: give it as captured"
        )
    check_shape("source cache", cache_shape(source_kv), mapper.source_shape)
    check_shape("target model", geometry_shape(target.geometry), mapper.target_shape)


def _prepare_prefix(prefix: KVCache | None, target: LoadedModel, context: _Context) -> KVCache | None:
    """The given prefix, one row for each context, checked as far as a cache without ids can be."""
    if prefix is None or prefix.n_tokens == 0:
        return None
    n_rows = context.ids.shape[0]
    if prefix.batch_size == 1 and n_rows > 1:
        prefix = prefix.select_rows([0] * n_rows)
    if prefix.batch_size != n_rows:
        raise TransferError(
            f"native_prefix has {prefix.batch_size} rows; the context has {n_rows}: give 1 or {n_rows}"
        )
    check_shape("native_prefix", cache_shape(prefix), geometry_shape(target.geometry))
    if prefix.owner is not None and (mismatches := prefix.owner.mismatches(target.identity)):
        raise TransferError("native_prefix is another model's cache: " + "; ".join(mismatches))
    counted = positions_from_mask(prefix.mask)
    if bool((prefix.positions != counted)[prefix.mask].any()):
        raise TransferError(
            "native_prefix does not start at position 0: it must hold the first tokens of each row"
        )
    return prefix.to(device=target.device)


def _own_counts(context: _Context, native_head: int, prefix: KVCache | None) -> Tensor:
    """(batch,) leading tokens of each row that need no map, never more than lie before its held-back end."""
    wanted = torch.full_like(context.n_cut, native_head)
    if prefix is not None:
        wanted = wanted.maximum(prefix.mask.sum(-1))
    return wanted.minimum(context.n_cut)


def _extend_head(
    target: LoadedModel, context: _Context, prefix: KVCache | None, wanted: Tensor
) -> KVCache | None:
    """Let the target run each row's leading tokens, up to `wanted` (batch,), that the prefix does not hold.

    Rows may need different numbers: the block of new tokens is padded on its left.
    """
    held = torch.zeros_like(wanted) if prefix is None else prefix.mask.sum(-1)
    n_new = int((wanted - held).clamp(min=0).max())
    if n_new == 0:
        return prefix
    index = wanted.unsqueeze(1) - n_new + torch.arange(n_new, device=wanted.device)
    real = index >= held.unsqueeze(1)
    columns = (context.first.unsqueeze(1) + index).clamp(min=0)
    ids = context.ids.gather(1, columns)
    if prefix is None:
        return prefill(target, ids, real, length=context.length)
    prefix = _with_rotations(prefix, target.rotations(context.length))
    return forward(target, ids, prefix, real, length=context.length)[1]


def _cut_cache(
    source_kv: KVCache,
    mapper: Mapper,
    target: LoadedModel,
    context: _Context,
    rope: str,
    head: KVCache | None,
    own: Tensor,
    rotations: tuple[Rotation | None, ...],
) -> tuple[KVCache, int]:
    """The target's cache over the columns before the held-back ones: own columns first, mapped ones after."""
    mask, positions = context.mask[:, : context.n_columns], context.positions[:, : context.n_columns]
    is_own = mask & (positions < own.unsqueeze(1))
    wanted = mask & ~is_own
    start = int(wanted.any(0).int().argmax()) if bool(wanted.any()) else context.n_columns
    mapped: list[tuple[Tensor, Tensor]] = []
    n_clamped = 0
    if start < context.n_columns:
        view = cache_view(source_kv.slice_tokens(start, context.n_columns), rope).to(device=mapper.device)
        turned = rotations if rope == "strip" else (None,) * len(rotations)
        mapped, n_clamped = _map_columns(
            view, mapper, target, positions[:, start:], wanted[:, start:], turned
        )
    own_keys, own_values = ([], []) if head is None else _own_columns(_with_rotations(head, rotations), own)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for layer, (n_heads, width) in enumerate(geometry_shape(target.geometry)):
        empty = torch.zeros(
            (*mask.shape, n_heads, width), dtype=target.dtype, device=target.layer_devices[layer]
        )
        for parts, own_parts, mapped_part in ((keys, own_keys, 0), (values, own_values, 1)):
            whole = empty.clone()
            if mapped:
                whole[:, start:] = mapped[layer][mapped_part].transpose(1, 2).to(whole.device)
            if own_parts:
                whole[is_own.to(whole.device)] = own_parts[layer].to(whole)
            parts.append(whole.transpose(1, 2))
    return KVCache(tuple(keys), tuple(values), positions, mask, rotations), n_clamped


def _own_columns(head: KVCache, own: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The first `own` (batch,) real tokens of the rows, joined: per layer (Σ own, n_kv_heads, head_dim)."""
    taken = head.mask & (head.mask.cumsum(-1) <= own.unsqueeze(1))
    keys, values = (
        [layer.transpose(1, 2)[taken.to(layer.device)] for layer in layers]
        for layers in (head.keys, head.values)
    )
    return keys, values


def _map_columns(
    view: KVCache,
    mapper: Mapper,
    target: LoadedModel,
    positions: Tensor,
    wanted: Tensor,
    rotations: tuple[Rotation | None, ...],
) -> tuple[list[tuple[Tensor, Tensor]], int]:
    """Mapped keys and values of each layer, target's dtype, 0 where not `wanted`; how many were clamped.

    Args:
        view: source columns as the mapper reads them.
        positions: (batch, columns); wanted: (batch, columns) bool.
        rotations: what each layer's mapped keys are turned by; None leaves them as they are.
    """
    unwanted = ~wanted[:, None, :, None]
    some_unwanted = bool(unwanted.any())
    mapped, checks = [], []
    for layer in range(len(mapper.target_shape)):
        key, value = (part.to(target.device) for part in mapper.map_layer(layer, view.keys, view.values))
        key = apply_rotation(key, positions, rotations[layer])
        if some_unwanted:
            key, value = key.masked_fill(unwanted, 0.0), value.masked_fill(unwanted, 0.0)
        cast_key, key_check = _cast(key, target.dtype)
        cast_value, value_check = _cast(value, target.dtype)
        mapped.append((cast_key, cast_value))
        checks.append(torch.stack([key_check, value_check]))
    # one read of all checks: on a GPU each would otherwise wait for its layer
    counts = torch.stack(checks).tolist()
    for layer, (key_counts, value_counts) in enumerate(counts):
        for kind, (n_bad, _) in (("keys", key_counts), ("values", value_counts)):
            if n_bad:
                raise TransferError(
                    f"{n_bad} mapped {kind} of target layer {layer} are NaN or infinite: the source cache or "
                    f"the mapper is damaged; capture the source in bfloat16 or float32, or fit again"
                )
    return mapped, sum(part[1] for layer_counts in counts for part in layer_counts)


def _cast(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """To the target's dtype, clamped to its finite range; and int64 (numbers not finite, numbers clamped)."""
    largest = torch.finfo(dtype).max
    n_bad = (~torch.isfinite(x)).sum()
    if largest >= torch.finfo(x.dtype).max:
        return x.to(dtype), torch.stack([n_bad, torch.zeros_like(n_bad)])
    n_clamped = (x.abs() > largest).sum() - torch.isinf(x).sum()
    return x.clamp(-largest, largest).to(dtype), torch.stack([n_bad, n_clamped])


def _with_rotations(kv: KVCache, rotations: tuple[Rotation | None, ...]) -> KVCache:
    """The same cache under the frequencies of the whole context: a short prefill may have used others."""
    if kv.rotations is not None and same_rotations(kv.rotations, rotations):
        return kv
    return kv.strip().rotate(rotations, dtype=kv.keys[0].dtype)


def _run_tail(target: LoadedModel, context: _Context, cut: KVCache | None) -> tuple[Tensor, KVCache]:
    """Run the held-back tokens on the cut cache: (batch, vocab) logits after the last, and the full cache."""
    tail = slice(context.n_columns, None)
    logits, kv = forward(target, context.ids[:, tail], cut, context.mask[:, tail])
    return logits[:, -1], kv
