"""Judges the settings of `mapper` that `auto`, bands, networks and row weights make depend on each other."""

from __future__ import annotations

import math
from collections.abc import Iterator

from kvmap.config.judging import is_integer, is_penalty
from kvmap.config.schema import (
    Config,
)


def mapper_mistakes(cfg: Config) -> Iterator[str]:
    """Settings of the map that `auto`, bands, networks and row weights make depend on each other."""
    mapper, tuning = cfg.mapper, cfg.mapper.tuning
    top_k = mapper.top_k
    if top_k not in ("all", "auto") and not (is_integer(top_k) and top_k >= 1):
        yield f"mapper.top_k={top_k!r}: expected a number of source layers, 1 or more, 'all' or 'auto'"
    for key in ("ridge_lambda", "lambda_cross", "lambda_native"):
        value = getattr(mapper, key)
        none = key != "ridge_lambda"
        if value != "auto" and not (none and value is None) and not is_penalty(value, infinite=none):
            more = ", null (as mapper.ridge_lambda)" if none else ""
            yield f"mapper.{key}={value}: expected a finite number of at least 0{more} or 'auto'"
    if mapper.lambda_cross is not None and mapper.support != "banded":
        yield (
            f"mapper.lambda_cross={mapper.lambda_cross}: only mapper.support=banded penalises the other "
            f"heads' features apart; take mapper=banded, or leave it null"
        )
    if mapper.lambda_native is not None and not mapper.native_layers:
        yield (
            f"mapper.lambda_native={mapper.lambda_native}: there are no native features to penalise; set "
            f"mapper.native_layers, or leave it null"
        )
    yield from _grids(cfg)
    if mapper.kind == "mlp" and mapper.row_weights != "none":
        yield (
            f"mapper.row_weights={mapper.row_weights}: the networks of mapper.kind=mlp are trained on rows "
            f"that count alike; take a linear mapper, or none"
        )
    if mapper.kind == "mlp" and mapper.compression.method != "none":
        yield (
            f"mapper.compression.method={mapper.compression.method}: only linear mappers are compressed; "
            f"store an mlp in another dtype (mapper.dtype=bfloat16) instead"
        )
    if any(width < 1 for width in mapper.mlp.hidden) or not mapper.mlp.hidden:
        yield f"mapper.mlp.hidden={list(mapper.mlp.hidden)}: expected one or more widths of at least 1"
    yield from _network_top_k(cfg)
    if not 0 < mapper.mlp.learning_rate < math.inf:
        yield f"mapper.mlp.learning_rate={mapper.mlp.learning_rate}: expected a finite number above 0"
    if tuning.top_k is not None and (not tuning.top_k or any(k < 1 for k in tuning.top_k)):
        yield f"mapper.tuning.top_k={list(tuning.top_k)}: expected numbers of layers, 1 or more, or null"


def _network_top_k(cfg: Config) -> Iterator[str]:
    """The networks read of the layers that were ranked, which are as many as the linear map may read."""
    own, ranked = cfg.mapper.mlp.top_k, cfg.mapper.top_k
    if own is None:
        return
    if own < 1:
        yield f"mapper.mlp.top_k={own}: expected 1 or more source layers, or null (as mapper.top_k)"
    elif is_integer(ranked) and own > ranked:
        yield (
            f"mapper.mlp.top_k={own}: only mapper.top_k={ranked} source layers are ranked for each; "
            f"expected at most that, or raise mapper.top_k"
        )


def _grids(cfg: Config) -> Iterator[str]:
    """What `auto` tries must be numbers that ridge can take."""
    tuning = cfg.mapper.tuning
    for key, infinite, above in (
        ("ridge_lambda", False, False),
        ("cross_ratio", True, True),
        ("native_ratio", True, True),
    ):
        values = getattr(tuning, key)
        right = [is_penalty(value, infinite=infinite) and (value > 0 or not above) for value in values]
        if not values or not all(right):
            least = "above 0" if above else "of at least 0"
            yield f"mapper.tuning.{key}={list(values)}: expected one or more numbers {least}"
