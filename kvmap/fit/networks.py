"""What the networks of a nonlinear map are, and what they give: all heads of a layer at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvmap.errors import UnknownName
from kvmap.fit.features import KINDS, Recipe

FORMS: dict[str, dict[str, tuple[str, ...]]] = {
    "full": {"key": ("mlp",), "value": ("mlp",)},
    "values_only": {"key": ("linear",), "value": ("mlp",)},
    "residual": {"key": ("linear", "mlp"), "value": ("linear", "mlp")},
    "residual_values": {"key": ("linear",), "value": ("linear", "mlp")},
}
"""By form and kind of cache, the parts whose outputs are added up."""


@dataclass(frozen=True, eq=False)
class HeadNetworks:
    """The networks of all heads of one target layer and kind. A linear map is one without hidden layers.

    Attributes:
        weights: (H_t, in, out) of each layer of the networks, the first with in = p, the last with out = d_t.
        biases: (H_t, out) of each, at least float32.
        input_bias: (1 or H_t, p), added to the features before anything else (minus their mean, where they
            were standardised): a large mean is gone before a narrow dtype can round it. None: nothing.
    """

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]
    input_bias: Tensor | None = None

    def to(self, device: torch.device | str) -> HeadNetworks:
        """The same networks elsewhere."""
        shift = None if self.input_bias is None else self.input_bias.to(device)
        return HeadNetworks(
            tuple(weight.to(device) for weight in self.weights),
            tuple(bias.to(device) for bias in self.biases),
            shift,
        )

    def tensors(self) -> dict[str, Tensor]:
        """`{i}.weight`, `{i}.bias` of each layer of the networks, and `input_bias` where there is one."""
        named = {f"{i}.weight": weight for i, weight in enumerate(self.weights)}
        named |= {f"{i}.bias": bias for i, bias in enumerate(self.biases)}
        return named if self.input_bias is None else {**named, "input_bias": self.input_bias}

    @classmethod
    def from_tensors(cls, named: Mapping[str, Tensor], depth: int) -> HeadNetworks:
        """Inverse of `tensors`, for networks of `depth` weight matrices."""
        return cls(
            tuple(named[f"{i}.weight"] for i in range(depth)),
            tuple(named[f"{i}.bias"] for i in range(depth)),
            named.get("input_bias"),
        )


@dataclass(frozen=True, eq=False)
class MLPWeights:
    """Trained networks, layer by layer.

    Attributes:
        recipe: what each of them reads.
        networks: by kind that was trained, one for each target layer; None for a native layer.
        history: one row for each kind, layer, head and epoch, epoch 0 before training: `fit_mse` over the
            epoch's batches as they were met, `held_out_mse` after it (None where there are no such rows),
            both over a head's channels in the targets' units squared, and whether that epoch was `kept`.
    """

    recipe: Recipe
    networks: dict[str, tuple[HeadNetworks | None, ...]]
    history: tuple[dict[str, Any], ...] = ()


def form_parts(form: str, kind: str) -> tuple[str, ...]:
    """What a form adds up for one kind of cache: "linear", "mlp" or both.

    Raises:
        UnknownName: with the forms there are.
    """
    if form not in FORMS:
        raise UnknownName("form of the MLP", form, FORMS)
    return FORMS[form][kind]


def trained_kinds(form: str) -> tuple[str, ...]:
    """The kinds of cache for which a form has networks."""
    return tuple(kind for kind in KINDS if "mlp" in form_parts(form, kind))


def evaluate(networks: HeadNetworks, features: Tensor) -> Tensor:
    """`h ← relu(h W_i + b_i)`, without the ReLU after the last, for each head.

    Products run in the weights' dtype; biases are added, and the ReLU taken, in theirs.

    Args:
        networks: of H_t heads.
        features: (H_t, n, p), or (1, n, p) where all heads read the same, which is not copied for each.

    Returns:
        (H_t, n, d_t) in the biases' dtype.
    """
    hidden = features
    if networks.input_bias is not None:
        hidden = hidden + networks.input_bias.unsqueeze(1)
    last = len(networks.weights) - 1
    for i, (weight, bias) in enumerate(zip(networks.weights, networks.biases, strict=True)):
        hidden = _products(hidden.to(weight.dtype), weight).to(bias.dtype).add_(bias.unsqueeze(1))
        if i < last:
            hidden = hidden.relu_()
    return hidden


def _products(x: Tensor, weight: Tensor) -> Tensor:
    """`x W` of each head: (H or 1, n, in), (H, in, out) → (H, n, out)."""
    if x.shape[0] == weight.shape[0]:
        return torch.bmm(x, weight)
    # one product for all heads: a batched one may copy x for each (bfloat16 on the CPU does)
    joined = x[0] @ weight.transpose(0, 1).flatten(1)
    return joined.unflatten(1, weight.shape[::2]).transpose(0, 1)
