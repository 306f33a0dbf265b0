"""What a smaller mapper costs: held-out R² and next-token KL beside its bytes, and a gate on both."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any, TypeAlias

import torch
from torch import Tensor

from kvmap.errors import KvmapError
from kvmap.fit.features import KINDS, Recipe
from kvmap.fit.linear import HasLinearWeights, LinearWeights, r2_of
from kvmap.fit.pair_moments import PairMoments
from kvmap.mappers import Mapper
from kvmap.metrics import Metric
from kvmap.models.cache import KVCache
from kvmap.models.capture import forward, prefill
from kvmap.models.pair import LoadedModel, ModelPair
from kvmap.progress import track
from kvmap.transfer import HandOff, TransferOptions, native, transfer

Row: TypeAlias = dict[str, Any]

UNCOMPRESSED = "uncompressed"
"""The name under which the mapper itself stands among its variants."""

CHUNK_TOKENS = 32
"""Continuation tokens compared at once: a vocabulary of 150,000 makes 40 MB of float64 logits of them."""


@dataclass(frozen=True)
class CompressionGate:
    """How much a compressed mapper may lose.

    Attributes:
        max_r2_loss: of the held-out R², mean over layers and heads, of keys and of values each.
        max_kl_nats: mean next-token KL(uncompressed ‖ compressed) on held-out text, in nats.
    """

    max_r2_loss: float = 0.01
    max_kl_nats: float = 0.02

    def __post_init__(self) -> None:
        """Refuse bounds that make no sense.

        Raises:
            KvmapError: naming the bound and its value.
        """
        for name, bound in asdict(self).items():
            if not bound >= 0:
                raise KvmapError(f"{name}={bound}: expected a number >= 0")

    def reasons(self, r2_loss: Mapping[str, float], kl_nats: float) -> list[str]:
        """Why a variant does not pass; nothing where it does. What is not a number does not pass.

        Args:
            r2_loss: by kind.
            kl_nats: against the uncompressed mapper.
        """
        found = [
            f"held-out R² of {kind}s falls by {loss:.4g}, more than max_r2_loss={self.max_r2_loss:g}"
            for kind, loss in r2_loss.items()
            if not loss <= self.max_r2_loss
        ]
        if not kl_nats <= self.max_kl_nats:
            found.append(f"next-token KL is {kl_nats:.4g} nats, more than max_kl_nats={self.max_kl_nats:g}")
        return found


def gate_r2(
    original: LinearWeights | HasLinearWeights,
    compressed: LinearWeights | HasLinearWeights,
    moments: PairMoments,
) -> list[Row]:
    """Exact held-out R² before and after, from moments alone, no model run.

    Args:
        original: the mapper as it was fitted.
        compressed: the same map in fewer bytes.
        moments: of its calibration.

    Returns:
        One row a kind: {kind, n_heads, r2_before, r2_after, r2_loss}, means over mapped layers and heads, and
        {worst_layer, worst_head, worst_r2_loss}, the head that loses most; nan counts as the most.

    Raises:
        KvmapError: moments of another pair, or without held-out rows.
    """
    _check_held_out(moments)
    weights = original if isinstance(original, LinearWeights) else original.linear_weights()
    before, after = (r2_of(each, moments, "held_out") for each in (weights, compressed))
    return _compared(weights.recipe, before, after)


def compression_rows(
    pair: ModelPair,
    mapper: Mapper,
    variants: Mapping[str, Mapper],
    moments: PairMoments,
    input_ids: Tensor,
    options: TransferOptions,
    *,
    prefix_tokens: int,
    gate: CompressionGate | None = None,
    batch_size: int = 1,
    sequential: bool = False,
) -> list[Row]:
    """What each variant of a mapper takes, what it costs, and whether it passes the gate.

    Each sequence is a prefix, whose cache is the target's own or mapped, and a continuation, which is fed to
    the target on top of it. At every continuation token the next-token distributions are compared in float64,
    `KL(p ‖ q) = Σ p (log p − log q)`.

    Args:
        pair: source and target.
        mapper: a linear one, as it was fitted.
        variants: the same map in fewer bytes, by name.
        moments: of its calibration; the held-out split is read.
        input_ids: (sequences, tokens) int64, not padded, of text that was not calibrated on.
        options: how caches are handed over.
        prefix_tokens: length of the prefix; the rest is the continuation.
        gate: what a variant may lose; None: the default bounds.
        batch_size: sequences at a time.
        sequential: one model in memory at a time; the source is released, its caches wait on the CPU.

    Returns:
        The mapper itself, under `UNCOMPRESSED`, and each variant: {variant, nbytes, n_weights, bytes_ratio,
        r2_key, r2_value, r2_loss_key, r2_loss_value, worst_r2_loss, worst_head, kl_nats, kl_standard_error,
        kl_native_nats, kl_native_standard_error, n_tokens, n_sequences, passes, reason}. `kl_nats` is
        KL(uncompressed ‖ variant) and `kl_native_nats` KL(native ‖ variant), means over tokens; standard
        errors are over sequences, nan of one alone. `reason` is empty where the gate passes.

    Raises:
        KvmapError: no tokens to map or to compare, no held-out rows, a variant called `UNCOMPRESSED`, a
            mapper that is not linear, or one of other models, shapes or another strategy.
    """
    mappers = {UNCOMPRESSED: mapper, **variants}
    _check(pair, mappers, len(variants), input_ids, options, prefix_tokens, batch_size)
    r2 = _r2_of_all(mappers, moments)
    batches = input_ids.split(batch_size)
    sources = (prefill(pair.source, ids[:, :prefix_tokens]) for ids in batches)
    if sequential:
        pair.release("target")
        read = [kv.to(device="cpu") for kv in track(sources, len(batches), "compression: source reads")]
        sources = (kv for kv in read)
        pair.release("source")
    placed = {
        name: other if other.device in (None, pair.target.device) else other.to(pair.target.device)
        for name, other in mappers.items()
    }
    sums: dict[str, list[tuple[float, float]]] = {name: [] for name in mappers}
    for ids, source in track(
        zip(batches, sources, strict=True), len(batches), "compression: target continues"
    ):
        for name, parts in _divergences(pair.target, placed, source, ids, prefix_tokens, options).items():
            sums[name] += parts
    return [
        _judged(
            {
                "variant": name,
                "nbytes": other.nbytes,
                "n_weights": other.n_weights,
                "bytes_ratio": other.nbytes / mapper.nbytes,
                **_r2_columns(r2[name]),
                **_kl_columns(sums[name], input_ids.shape[1] - prefix_tokens),
            },
            gate or CompressionGate(),
        )
        for name, other in mappers.items()
    ]


def compression_metrics(rows: Iterable[Row]) -> dict[str, Metric]:
    """`diagnose/compression/<variant>/<nbytes | r2_loss_<kind> | kl_nats | kl_native_nats | passes>`."""
    found: dict[str, Metric] = {}
    for row in rows:
        start = f"diagnose/compression/{row['variant']}"
        found |= {f"{start}/nbytes": Metric(row["nbytes"]), f"{start}/passes": Metric(float(row["passes"]))}
        found |= {f"{start}/r2_loss_{kind}": Metric(row[f"r2_loss_{kind}"]) for kind in KINDS}
        for name in ("kl", "kl_native"):
            error = row[f"{name}_standard_error"]
            found[f"{start}/{name}_nats"] = Metric(
                row[f"{name}_nats"], row["n_tokens"], None if math.isnan(error) else error
            )
    return found


def next_token_kl(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """`KL(p ‖ q) = Σ p (log p − log q)` of two next-token distributions, float64, nats: (..., v) → (...).

    A token that p gives no probability adds nothing.
    """
    p, q = p_logits.double().log_softmax(-1), q_logits.double().log_softmax(-1)
    weight = p.exp()
    return torch.where(weight > 0, weight * (p - q), 0.0).sum(-1)


def _check(
    pair: ModelPair,
    mappers: Mapping[str, Mapper],
    n_variants: int,
    input_ids: Tensor,
    options: TransferOptions,
    prefix_tokens: int,
    batch_size: int,
) -> None:
    if len(mappers) == n_variants:
        raise KvmapError(f"a variant is called {UNCOMPRESSED!r}, as the mapper itself is: rename it")
    if input_ids.ndim != 2 or 0 in input_ids.shape or batch_size < 1:
        raise KvmapError(
            f"input_ids have shape {tuple(input_ids.shape)}, batch_size={batch_size}: expected (sequences, "
            f"tokens) and a batch size, one or more each"
        )
    own = options.native_head + options.hold_back
    if not own < prefix_tokens < input_ids.shape[1]:
        raise KvmapError(
            f"prefix_tokens={prefix_tokens} of {input_ids.shape[1]} tokens: expected more than the {own} of "
            f"native_head and hold_back, or nothing is mapped and every mapper is the target, and a token to "
            f"continue with"
        )
    for other in mappers.values():
        other.check_models(pair.source_identity, pair.target_identity, options.rope)


def _check_held_out(moments: PairMoments) -> None:
    if moments.n_rows("held_out") == 0:
        raise KvmapError(
            "the moments have no held-out rows, so nothing says what a compression loses: calibrate with "
            "held-out sequences (calibration.held_out_share)"
        )


def _r2_of_all(mappers: Mapping[str, Mapper], moments: PairMoments) -> dict[str, list[Row]]:
    """`gate_r2` of each against the uncompressed one, which is judged once."""
    _check_held_out(moments)
    original = _linear(UNCOMPRESSED, mappers[UNCOMPRESSED])
    before = r2_of(original, moments, "held_out")
    found = {}
    for name, mapper in mappers.items():
        after = before if name == UNCOMPRESSED else r2_of(_linear(name, mapper), moments, "held_out")
        found[name] = _compared(original.recipe, before, after)
    return found


def _compared(recipe: Recipe, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> list[Row]:
    places = [
        (layer, head) for layer in recipe.mapped_layers for head in range(recipe.target_shape[layer][0])
    ]
    rows = []
    for kind in KINDS:
        old, new = ([float(table[place]) for place in places] for table in (before[kind], after[kind]))
        losses = {place: a - b for place, a, b in zip(places, old, new, strict=True)}
        worst = max(places, key=lambda place: _nan_last(losses[place]))
        rows.append(
            {
                "kind": kind,
                "n_heads": len(places),
                "r2_before": fmean(old),
                "r2_after": fmean(new),
                "r2_loss": fmean(losses.values()),
                "worst_layer": worst[0],
                "worst_head": worst[1],
                "worst_r2_loss": losses[worst],
            }
        )
    return rows


def _nan_last(loss: float) -> float:
    return math.inf if math.isnan(loss) else loss


def _linear(name: str, mapper: Mapper) -> LinearWeights:
    if not hasattr(mapper, "linear_weights"):
        raise KvmapError(
            f"{name}: mapper kind {mapper.kind!r} is not linear in the source cache, so moments do not give "
            f"its R²; compress a linear kind"
        )
    return mapper.linear_weights()


def _divergences(
    target: LoadedModel,
    mappers: Mapping[str, Mapper],
    source: KVCache,
    ids: Tensor,
    prefix_tokens: int,
    options: TransferOptions,
) -> dict[str, list[tuple[float, float]]]:
    """By mapper, for each row the sums over continuation tokens of KL(uncompressed ‖ it), KL(native ‖ it).

    All are read side by side, a few tokens at a time: no continuation's whole distributions are ever held.
    """
    prefix, continuation = ids[:, :prefix_tokens], ids[:, prefix_tokens:]
    own = _chunks(target, native(target, prefix, hold_back=options.hold_back), continuation)
    streams = {
        name: _chunks(target, transfer(source, mapper, target, prefix, **asdict(options)), continuation)
        for name, mapper in mappers.items()
    }
    sums = {name: torch.zeros(len(ids), 2, dtype=torch.float64) for name in mappers}
    for true in own:
        logits = {name: next(stream) for name, stream in streams.items()}
        for name, other in logits.items():
            both = [next_token_kl(p, other).sum(1) for p in (logits[UNCOMPRESSED], true)]
            sums[name] += torch.stack(both, dim=-1).cpu()
    return {name: [(row[0], row[1]) for row in total.tolist()] for name, total in sums.items()}


def _chunks(model: LoadedModel, hand_off: HandOff, continuation: Tensor) -> Iterator[Tensor]:
    """Logits that predict each continuation token, (batch, n, vocabulary) at a time; the first by itself."""
    yield hand_off.logits.unsqueeze(1)
    kv = hand_off.kv
    for chunk in continuation[:, :-1].split(CHUNK_TOKENS, dim=1):
        if chunk.shape[1]:
            logits, kv = forward(model, chunk, kv)
            yield logits


def _r2_columns(rows: Sequence[Row]) -> Row:
    """One row of both kinds, with the one head that loses most, as `kind layer.head`."""
    worst = max(rows, key=lambda row: _nan_last(row["worst_r2_loss"]))
    return {
        **{f"r2_{row['kind']}": row["r2_after"] for row in rows},
        **{f"r2_loss_{row['kind']}": row["r2_loss"] for row in rows},
        "worst_r2_loss": worst["worst_r2_loss"],
        "worst_head": f"{worst['kind']} {worst['worst_layer']}.{worst['worst_head']}",
    }


def _kl_columns(sums: Sequence[tuple[float, float]], n_tokens: int) -> Row:
    """Means over tokens, `n_tokens` of each sequence, and standard errors over sequences."""
    columns: Row = {}
    for name, totals in zip(("kl", "kl_native"), zip(*sums, strict=True), strict=True):
        means = [total / n_tokens for total in totals]
        error = stdev(means) / math.sqrt(len(means)) if len(means) > 1 else math.nan
        columns |= {f"{name}_nats": fmean(means), f"{name}_standard_error": error}
    return {**columns, "n_tokens": n_tokens * len(sums), "n_sequences": len(sums)}


def _judged(row: Row, gate: CompressionGate) -> Row:
    reasons = gate.reasons({kind: row[f"r2_loss_{kind}"] for kind in KINDS}, row["kl_nats"])
    return {**row, "passes": not reasons, "reason": "; ".join(reasons)}
