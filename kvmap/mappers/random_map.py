"""Random weights of the fitted scale: the control that says whether the fitted directions matter."""

from __future__ import annotations

from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from kvmap.fit.features import KINDS
from kvmap.fit.linear import LinearWeights, joined, layer_cuts, output_variance
from kvmap.fit.pair_moments import PairMoments
from kvmap.fit.ridge import intercept
from kvmap.mappers.base import register
from kvmap.mappers.linear import LinearMapper


@register("random")
class RandomMapper(LinearMapper):
    """A linear mapper whose weights are noise.

    Each output channel has the mean and the variance, over the calibration rows, that the fitted mapper
    gives it; only what it says about a token is arbitrary.
    """

    @classmethod
    def from_fitted(cls, fitted: LinearWeights, moments: PairMoments, seed: int) -> Self:
        """Draw the weights.

        Args:
            fitted: the mapper to imitate in support, selection and scale.
            moments: what it was fitted on; the fit split is read.
            seed: of the Gaussian; the same seed gives the same mapper on every device.
        """
        generator = torch.Generator().manual_seed(seed)
        weight: dict[str, tuple[Tensor, ...]] = {}
        bias: dict[str, tuple[Tensor, ...]] = {}
        for kind in KINDS:
            drawn = [_noise(w, generator) for w in fitted.weight[kind]]
            noise = replace(fitted, weight={**fitted.weight, kind: tuple(drawn)})
            scaled = []
            for layer in range(len(drawn)):
                if layer not in fitted.recipe.mapped_layers:
                    scaled.append(fitted.weight[kind][layer])
                    continue
                wanted = output_variance(fitted, moments, kind, layer)
                got = output_variance(noise, moments, kind, layer)
                scale = torch.where(got > 0, (wanted / torch.where(got > 0, got, 1.0)).sqrt(), 0.0)
                stored = fitted.weight[kind][layer]
                scaled.append((drawn[layer] * scale.unsqueeze(1).to(drawn[layer].device)).to(stored.dtype))
            weight[kind] = tuple(scaled)
            bias[kind] = tuple(
                _bias(fitted, moments, kind, layer, scaled[layer]) for layer in range(len(scaled))
            )
        return cls(replace(fitted, weight=weight, bias=bias, fallbacks=()))


def _noise(like: Tensor, generator: torch.Generator) -> Tensor:
    """Drawn on the CPU, so that a seed means the same everywhere."""
    return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.device)


def _bias(fitted: LinearWeights, moments: PairMoments, kind: str, layer: int, weight: Tensor) -> Tensor:
    """`b = ȳ − x̄W` with the random W: the outputs' means stay those of the fitted mapper."""
    own = fitted.bias[kind][layer]
    if layer not in fitted.recipe.mapped_layers:
        return own
    bias = torch.empty_like(own)
    for heads, cut in layer_cuts(moments, "fit", fitted.recipe, kind, layer):
        offset = intercept(joined(weight[heads]).to(cut.s_xx.device), cut.mean_x, cut.mean_y)
        bias[heads] = offset.view(len(heads), -1).to(own.device, own.dtype)
    return bias
