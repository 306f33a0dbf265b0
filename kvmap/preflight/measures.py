"""What a preflight measures of one mapper on held-out text, no labelled task asked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from kvmap.diagnostics.findings import text_metrics, text_tables
from kvmap.diagnostics.next_token import Predicted, kl_divergence
from kvmap.diagnostics.reconstruction import r2_rows
from kvmap.diagnostics.streaming import diagnose_mappers
from kvmap.diagnostics.sums import TextSums
from kvmap.diagnostics.texts import Text
from kvmap.diagnostics.token_kinds import TokenKinds
from kvmap.fit.features import KINDS, cache_shape
from kvmap.fit.pair_moments import PairMoments
from kvmap.mappers import IdentityMapper, Mapper
from kvmap.models.capture import prefill
from kvmap.models.logits import keep_hidden_states, logits_of
from kvmap.models.pair import LoadedModel, ModelPair
from kvmap.transfer import TransferOptions, transfer

TEXT, PROMPTS = "held_out", "prompts"
CANARY_TOKENS = 8
CANARY_QUANTILE = 0.99

MAX_TOKENS = 4096
"""Held-out tokens that are diagnosed at most, in whole sequences but never fewer than `MIN_SEQUENCES`: of a
long calibration text, reading them again with each map would cost as much as fitting the maps."""
MIN_SEQUENCES = 2
N_PREDICTED = 128
"""Tokens that are predicted after each hand-off."""

STREAMED = (
    "kl_nats",
    "top1_agreement",
    "attention_cosine",
    "concentration_key",
    "concentration_value",
)
"""Metrics of `kvmap.diagnostics.findings.text_metrics` that are taken over as they are."""


def measure(
    pair: ModelPair,
    mappers: Mapping[str, Mapper],
    moments: Mapping[str, PairMoments],
    sequences: Tensor,
    kinds: TokenKinds,
    options: TransferOptions,
    *,
    batch_size: int = 8,
    sequential: bool = False,
    prompts: Sequence[Sequence[int]] = (),
) -> dict[str, dict[str, float]]:
    """Diagnostics of mappers on text that they were not fitted on; both models read it once.

    * `STREAMED`: KL(native ‖ mapped), nats a token, and top-1 agreement on the first `N_PREDICTED` tokens of
      second halves; cosine of attention outputs; concentration of the errors of keys and of values.
    * `prompts_kl_nats`, `prompts_top1_agreement`: of the one token after each prompt, where there are any.
    * `r2_<kind>`, `r2_<kind>_fit`: means over mapped layers and heads, on held-out and on fitted rows;
      `gap_<kind>` is the second less the first.
    * `rows_per_feature`: N / p, p of the head that reads most; inf for a mapper that reads no features.
    * `tail_growth_<kind>`: relative error of the positions of the last bin (which is as wide as all those
      before it) over that of all before it; above 1 where the error grows with the position.
    * `kl_window_nats`: the 99th percentile of the mean KL of eight tokens in a row: what a canary of eight
      tokens has to let pass.

    Args:
        pair: source and target.
        mappers: by name, fitted on the fit split of the moments, and linear in the cache.
        moments: of the small calibration, both splits, by the same names.
        sequences: (n, tokens) int64, of the held-out split; up to `MAX_TOKENS` of them are read.
        kinds: sorts tokens.
        options: how a cache is handed over.
        batch_size: sequences at a time.
        sequential: one model in memory at a time.
        prompts: token ids of prompts as the pair will be given them, without answers; none is fine.

    Returns:
        Values by name, of each mapper; what could not be had is nan.
    """
    n = max(MIN_SEQUENCES, MAX_TOKENS // sequences.shape[1])
    texts = [Text.of_sequences(TEXT, sequences[:n], N_PREDICTED)]
    if prompts:
        texts.append(Text.of_contexts(PROMPTS, prompts))
    found = diagnose_mappers(
        pair, mappers, texts, kinds, options, batch_size=batch_size, sequential=sequential
    )
    return {
        name: _streamed(found[name][TEXT])
        | _reconstruction(mapper, moments[name])
        | (_of_prompts(found[name][PROMPTS]) if prompts else {})
        for name, mapper in mappers.items()
    }


def _of_prompts(found: TextSums) -> dict[str, float]:
    metrics = text_metrics(found, text_tables([found]))
    keys = {name: f"diagnose/{PROMPTS}/mapped/{name}" for name in ("kl_nats", "top1_agreement")}
    return {
        f"{PROMPTS}_{name}": metrics[key].value if key in metrics else math.nan for name, key in keys.items()
    }


def _streamed(found: TextSums) -> dict[str, float]:
    tables = text_tables([found])
    metrics = text_metrics(found, tables)
    values = {
        name: metrics[key].value if (key := f"diagnose/{TEXT}/mapped/{name}") in metrics else math.nan
        for name in STREAMED
    }
    values |= _tail_growth(tables["errors_by_position"])
    return values | {"kl_window_nats": window_quantile(found.predicted)}


def _reconstruction(mapper: Mapper, moments: PairMoments) -> dict[str, float]:
    rows = r2_rows(mapper, moments)
    values = {}
    for kind in KINDS:
        by_split = {
            split: _mean(row["r2"] for row in rows if (row["kind"], row["split"]) == (kind, split))
            for split in ("held_out", "fit")
        }
        values[f"r2_{kind}"] = by_split["held_out"]
        values[f"r2_{kind}_fit"] = by_split["fit"]
        values[f"gap_{kind}"] = by_split["fit"] - by_split["held_out"]
    features = _features(mapper)
    return values | {"rows_per_feature": moments.n_rows("fit") / features if features else math.inf}


def _features(mapper: Mapper) -> int:
    """Features p of the target head that reads most; 0 for a mapper without a recipe."""
    recipe = getattr(mapper, "recipe", None)
    if recipe is None:
        return 0
    return max(recipe.n_features(kind, layer) for kind in KINDS for layer in recipe.mapped_layers)


def _tail_growth(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Error of the last bin of positions over the error of all bins before it, mean over layers."""
    values = {}
    last = max((row["low"] for row in rows), default=0)
    for kind in KINDS:
        ratios = []
        for layer in {row["layer"] for row in rows}:
            of_layer = [row for row in rows if row["layer"] == layer and math.isfinite(row[f"{kind}_error"])]
            late = [row for row in of_layer if row["low"] == last]
            early = [row for row in of_layer if row["low"] < last]
            n = sum(row["n"] for row in early)
            before = sum(row[f"{kind}_error"] * row["n"] for row in early) / n if n else 0.0
            if late and before > 0:
                ratios.append(late[0][f"{kind}_error"] / before)
        values[f"tail_growth_{kind}"] = _mean(ratios)
    return values


def window_quantile(
    predicted: Sequence[Predicted], n_tokens: int = CANARY_TOKENS, quantile: float = CANARY_QUANTILE
) -> float:
    """Quantile of the mean KL of `n_tokens` predictions in a row, windows that do not overlap; nats.

    Shorter runs of predictions count as one window; nan without any.
    """
    means = []
    for part in predicted:
        width = min(n_tokens, part.kl.shape[1])
        n = part.kl.shape[1] // width
        means.append(part.kl[:, : n * width].unflatten(1, (n, width)).mean(2).flatten())
    return float(torch.quantile(torch.cat(means), quantile)) if means else math.nan


def check_identity(model: LoadedModel, ids: Tensor, options: TransferOptions) -> float:
    """KL(native ‖ handed over), nats, of a model that takes over its own cache; the mean over rows.

    `R(position)` is taken off the keys and put back, as in any hand-off, and the last tokens are run. What is
    left is rounding, unless the rotation that is undone is not the one that the model applies.

    Args:
        model: either of the pair.
        ids: (batch, tokens) int64.
        options: of the hand-off; under "no_rerotate" the keys stay unrotated, and this says what that costs.
    """
    with keep_hidden_states(model) as states:
        kv = prefill(model, ids)
    shape = cache_shape(kv)
    native = logits_of(model, states[0][:, -1:])[:, 0]
    handed = transfer(
        kv,
        IdentityMapper(shape, shape),
        model,
        ids,
        hold_back=options.hold_back,
        native_head=options.native_head,
        rope=options.rope,
    )
    return float(kl_divergence(native.cpu().float(), handed.logits.cpu().float()).mean())


def _mean(values: Iterable[float]) -> float:
    kept = [value for value in values if math.isfinite(value)]
    return fmean(kept) if kept else math.nan
