"""What a hand-off costs the target, beside reading the context again: in layer-tokens and in FLOPs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvmap.fit.features import KINDS
from kvmap.mappers.base import Mapper
from kvmap.models.geometry import Geometry
from kvmap.models.pair import LoadedModel
from kvmap.transfer.context import TransferError
from kvmap.transfer.handoff import TransferOptions
from kvmap.transfer.recompute import count_recomputed


def native_share(
    target_geometry: Geometry,
    n_tokens: int,
    native_layers: int = 0,
    native_head: int = 1,
    hold_back: int = 1,
    recompute_share: float = 0.0,
    recompute_rule: str = "attention",
) -> float:
    """The share of a re-prefill's work that a hand-off leaves to the target, in layer-tokens.

    One unit is one decoder layer run for one token. Of T tokens and L layers, re-prefill runs L·T. With m
    native layers the target runs a = max(m − 1, 0) layers for every token (of layer m − 1, counted from 0,
    it needs the projection of keys and values alone, which counts as nothing), and the L − a others for the
    e = min(T, native_head + hold_back) tokens at the ends. Of the T − e in between it recomputes n, all
    layers of each, and a rule that chooses among them costs c:

    ``share = (a·T + (L − a)·e + L·n + c) / (L·T)``

    c is L·hold_back for "attention", m·(T − hold_back) for "map_error", and 0 for "random" or where nothing
    is to be chosen. With m = L nothing is mapped, the hand-off is a native run, and the share is 1. The share
    passes 1 where more is recomputed than the map saves.

    It is a model, not a measurement: that attention grows with the square of T, the logits and the map's own
    products are left out (`handoff_flops` counts them), and a native head that is run once in full and once
    more in the native layers counts once.

    Args:
        target_geometry: of the target; L is its `n_layers`.
        n_tokens: T, tokens of the context.
        native_layers: m of the mapper.
        native_head, hold_back, recompute_share, recompute_rule: as in `kvmap.transfer.TransferOptions`.

    Raises:
        TransferError, UnknownName: a number out of range, or another rule.
    """
    TransferOptions(hold_back, native_head, recompute_share=recompute_share, recompute_rule=recompute_rule)
    n_layers = target_geometry.n_layers
    if n_tokens < 1 or not 0 <= native_layers <= n_layers:
        raise TransferError(
            f"n_tokens={n_tokens}, native_layers={native_layers}: expected at least 1 token, and 0 to "
            f"{n_layers} layers"
        )
    if native_layers == n_layers:
        return 1.0
    ends = min(n_tokens, native_head + hold_back)
    n_between = n_tokens - ends
    n_recomputed = count_recomputed(n_between, recompute_share)
    run_by_all = max(native_layers - 1, 0)
    units = run_by_all * n_tokens + (n_layers - run_by_all) * ends + n_layers * n_recomputed
    if n_recomputed > 0 and recompute_share < 1:
        choosing = {"attention": n_layers * hold_back, "map_error": native_layers * (n_tokens - hold_back)}
        units += choosing.get(recompute_rule, 0)
    return units / (n_layers * n_tokens)


@dataclass(frozen=True)
class DecoderWork:
    """What a decoder multiplies.

    Attributes:
        weights: of each layer, those that one token is multiplied with: all matrices; of experts as many as
            a token goes through.
        projections: of each layer, those among them that make queries, keys and values.
        channels: of each layer, n_heads · head_dim: products of one query with one key, and again of its
            weight with one value.
        logits: weights of the output head.
        windows: of each layer, the tokens a query sees, itself included; None: all before it.
    """

    weights: tuple[int, ...]
    projections: tuple[int, ...]
    channels: tuple[int, ...]
    logits: int
    windows: tuple[int | None, ...]

    def run(self, first: int, last: int, n_layers: int | None = None, n_tokens: float | None = None) -> float:
        """FLOPs of tokens that run through layers.

        Args:
            first, last: the tokens at these places of a context, counted from 1, and all between them.
            n_layers: the first so many layers; None: all.
            n_tokens: so many of these tokens, lying evenly; None: each of them.
        """
        n_places = last - first + 1
        if n_places < 1:
            return 0.0
        n = n_places if n_tokens is None else n_tokens
        layers = slice(0, n_layers)
        return 2 * n * sum(self.weights[layers]) + n / n_places * self.attention(first, last, n_layers)

    def attention(self, first: int, last: int, n_layers: int | None = None) -> float:
        """FLOPs of the attention products of the tokens at places first to last, counted from 1."""
        layers = slice(0, n_layers)
        pairs = {window: pairs_seen(first, last, window) for window in set(self.windows)}
        per_layer = zip(self.channels[layers], self.windows[layers], strict=True)
        return sum(4 * pairs[window] * channels for channels, window in per_layer)

    def first_layers(self, n_tokens: int, n_layers: int) -> float:
        """FLOPs of the first keys and values of n ≥ 1 layers: the last of them runs its projections alone."""
        if n_layers == 0:
            return 0.0
        return self.run(1, n_tokens, n_layers - 1) + 2 * n_tokens * self.projections[n_layers - 1]


@dataclass(frozen=True)
class HandOffFlops:
    """FLOPs of one hand-off of one context on the target's side; a multiply-add counts as two.

    Attributes:
        hold_back: the held-back tokens in all layers, and their logits.
        native_head: the first tokens in all layers.
        native_layers: the first layers over the whole context.
        recompute: the recomputed tokens in all layers.
        rule: choosing them.
        map: the map's own products, wherever they run.
        re_prefill: reading the whole context, and the logits after it: what all these replace.
    """

    hold_back: float
    native_head: float
    native_layers: float
    recompute: float
    rule: float
    map: float
    re_prefill: float

    @property
    def total(self) -> float:
        """Of the hand-off."""
        return sum(asdict(self).values()) - self.re_prefill

    @property
    def share(self) -> float:
        """Of the hand-off, over re-prefill's."""
        return self.total / self.re_prefill


def decoder_work(target: LoadedModel) -> DecoderWork:
    """The products of a loaded decoder, see `work_of`."""
    return work_of(target.body, target.geometry, target.text_config)


def work_of(body: Any, geometry: Geometry, text_config: Any) -> DecoderWork:
    """The products of a decoder, read off its weights' shapes and its geometry.

    Weights are matrices; norms, biases, rotations and softmax are not counted.

    Args:
        body: the decoder, which may be on no device.
        geometry: of its cache.
        text_config: its transformers config.
    """
    width = geometry.hidden_size
    taken = _share_of_experts(text_config)
    weights = [
        sum(
            round(weight.numel() * (taken if "experts." in name else 1.0))
            for name, weight in layer.named_parameters()
            if weight.ndim >= 2
        )
        for layer in body.layers
    ]
    return DecoderWork(
        weights=tuple(weights),
        projections=tuple(
            width * (geometry.n_heads + 2 * layer.n_kv_heads) * layer.head_dim for layer in geometry.layers
        ),
        channels=tuple(geometry.n_heads * layer.head_dim for layer in geometry.layers),
        logits=width * geometry.vocab_size,
        windows=tuple(layer.window for layer in geometry.layers),
    )


def handoff_flops(
    target: LoadedModel, mapper: Mapper, n_tokens: int, options: TransferOptions
) -> HandOffFlops:
    """FLOPs that a hand-off of one context leaves to do, part by part, beside those of reading it again.

    Running n tokens through a layer of w weights costs ``2·n·w + 4·p·n_heads·head_dim``, p being the number
    of (token, column it sees) pairs: T(T + 1)/2 for a whole context, which is attention's square term, and in
    a layer with a window w no more than w for each token. A windowed layer is mapped where tokens from the
    held-back ones on can see it, and everywhere where tokens are recomputed. Recomputed tokens are taken to
    lie evenly among the mapped ones. A kernel that does not skip what a mask hides does up to twice the
    products of attention counted here, in either way alike, and in windowed layers those of the whole
    context.

    Args:
        target: the model that goes on.
        mapper: of the pair; its weights are its products, one for each mapped token.
        n_tokens: T, tokens of the context.
        options: how the cache is handed over.

    Raises:
        TransferError: fewer than one token.
    """
    if n_tokens < 1:
        raise TransferError(f"n_tokens={n_tokens}: expected at least 1 token")
    work, m = decoder_work(target), mapper.native_layers
    n_tail = min(options.hold_back, n_tokens)
    n_cut = n_tokens - n_tail
    n_head = n_cut if m == target.geometry.n_layers else min(options.native_head, n_cut)
    n_mapped = n_cut - n_head
    re_prefill = work.run(1, n_tokens) + 2 * work.logits
    tail = work.run(n_cut + 1, n_tokens) + 2 * n_tail * work.logits
    if n_mapped == 0:
        return HandOffFlops(0.0, 0.0, re_prefill, 0.0, 0.0, 0.0, re_prefill)
    n_recomputed = count_recomputed(n_mapped, options.recompute_share)
    rule = 0.0
    if n_recomputed > 0 and options.recompute_share < 1:
        rule = _rule_flops(work, m, n_cut, n_tokens, tail, options.recompute_rule)
    mapped = mapped_tokens(target.geometry, n_cut, n_mapped, every_column=options.recompute_share > 0)
    return HandOffFlops(
        hold_back=tail,
        native_head=work.run(1, n_head),
        native_layers=work.first_layers(n_cut, m),
        recompute=work.run(n_head + 1, n_cut, n_tokens=n_recomputed),
        rule=rule,
        map=_map_flops(mapper, mapped),
        re_prefill=re_prefill,
    )


def mapped_tokens(
    target_geometry: Geometry, n_cut: int, n_mapped: int, *, every_column: bool = False
) -> tuple[int, ...]:
    """Tokens of one context that are mapped in each layer, were all layers mapped.

    Args:
        target_geometry: of the target.
        n_cut: tokens before the held-back ones.
        n_mapped: the last of these, that are mapped where all are needed.
        every_column: see `kvmap.transfer.transfer`.

    Returns:
        min(n_mapped, w − 1) in a layer with a window of w tokens, n_mapped in the others.
    """
    if every_column:
        return (n_mapped,) * target_geometry.n_layers
    return tuple(min(n_mapped, max(seen, 1)) for seen in target_geometry.seen_tokens(n_cut))


def pairs_seen(first: int, last: int, window: int | None) -> float:
    """Pairs of a query and a column it sees, `Σ_{i = first}^{last} min(i, window)`; places count from 1."""
    upto = last if window is None else min(last, window)
    growing = (first + upto) * (upto - first + 1) / 2 if upto >= first else 0.0
    return growing + (0 if window is None else window * (last - max(upto, first - 1)))


def _map_flops(mapper: Mapper, mapped: tuple[int, ...]) -> float:
    """Of a map that leaves out tokens in some layers; its weights lie in the layers as its tables do."""
    layers = range(mapper.native_layers, len(mapper.target_shape))
    tokens = [mapped[layer] for layer in layers]
    if len(set(tokens)) == 1:
        return 2 * tokens[0] * mapper.n_weights
    cache_map = mapper.cache_map()
    shares = [
        1 if cache_map is None else sum(cache_map.products[kind][layer].weight.numel() for kind in KINDS)
        for layer in layers
    ]
    taken = sum(n * share for n, share in zip(tokens, shares, strict=True))
    return 2 * mapper.n_weights * taken / sum(shares)


def _rule_flops(
    work: DecoderWork, native_layers: int, n_cut: int, n_tokens: int, tail: float, rule: str
) -> float:
    if rule == "attention":  # the tail once more, and its scores by themselves
        return tail + work.attention(n_cut + 1, n_tokens) / 2
    return work.first_layers(n_cut, native_layers + 1) if rule == "map_error" else 0.0


def _share_of_experts(config: Any) -> float:
    """The part of its experts that a token goes through; 1 without experts."""
    names = ("num_local_experts", "num_experts")
    n_experts = next((getattr(config, name) for name in names if getattr(config, name, None)), None)
    return config.num_experts_per_tok / n_experts if n_experts else 1.0
