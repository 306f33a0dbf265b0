"""Rows that networks are trained on and judged by: in memory, less a linear map, or at unit scale."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from kvmap.errors import KvmapError
from kvmap.fit.networks import HeadNetworks, evaluate


class MLPError(KvmapError):
    """Settings or rows that networks cannot be trained with."""


class LayerRows(Protocol):
    """The rows of one target layer and kind, read a batch at a time; they need not be in memory."""

    def n_rows(self, split: str) -> int:
        """Rows of "fit" or "held_out"; 0 where there are none."""

    def features(self, split: str, index: Tensor) -> Tensor:
        """Features of the rows in `index`, (n,) int64 on the CPU: (1 or H_t, n, p) float32, any device."""

    def targets(self, split: str, index: Tensor) -> Tensor:
        """What is to be met there: (H_t, n, d_t) float32, any device."""


class TensorRows:
    """`LayerRows` of tensors in memory."""

    def __init__(self, features: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
        """Args: by split, (1 or H_t, N, p) and (H_t, N, d_t); a split may be missing.

        Raises:
            MLPError: features and targets of different rows.
        """
        got = [{split: t.shape[1] for split, t in tensors.items()} for tensors in (features, targets)]
        if got[0] != got[1]:
            raise MLPError(f"features have rows {got[0]}, targets {got[1]}: expected the same, by split")
        self._features, self._targets = dict(features), dict(targets)

    @property
    def splits(self) -> tuple[str, ...]:
        """Those that have rows."""
        return tuple(self._targets)

    def with_targets(self, targets: Mapping[str, Tensor]) -> TensorRows:
        """The same features with other targets."""
        return TensorRows(self._features, targets)

    def n_rows(self, split: str) -> int:
        """See `LayerRows`."""
        return self._targets[split].shape[1] if split in self._targets else 0

    def features(self, split: str, index: Tensor) -> Tensor:
        """See `LayerRows`."""
        rows = self._features[split]
        return rows.index_select(1, index.to(rows.device))

    def targets(self, split: str, index: Tensor) -> Tensor:
        """See `LayerRows`."""
        rows = self._targets[split]
        return rows.index_select(1, index.to(rows.device))


def residual_rows(
    rows: TensorRows, weight: Tensor, bias: Tensor, inputs: TensorRows | None = None, batch_size: int = 8192
) -> TensorRows:
    """The same features, and for targets what a linear map missed: `y − (xW + b)`.

    A network trained on them belongs on top of that map: its output is `xW + b + mlp(x)`.

    Args:
        rows: the features that the network reads, and the whole targets.
        weight: (H_t, p, d_t) of the linear map; bias: (H_t, d_t).
        inputs: the same rows with the features that the linear map reads; None: those of `rows`.
        batch_size: rows at a time.
    """
    linear = HeadNetworks((weight,), (bias,))
    read = rows if inputs is None else inputs
    missed = {}
    for split in rows.splits:
        parts = []
        for index in torch.arange(rows.n_rows(split)).split(batch_size):
            x, y = read.features(split, index), rows.targets(split, index)
            parts.append(y - evaluate(linear.to(x.device), x).to(y.device))
        missed[split] = torch.cat(parts, 1)
    return rows.with_targets(missed)


class StandardisedRows:
    """`LayerRows` at unit scale: `x' = (x − μ_x)/σ_x` for each feature, `y' = (y − μ_y)/s` for each head.

    Means and deviations are those of the fit rows, summed in float64 about the first batch's mean. s² is the
    mean variance of a head's channels, one number, so that an MSE of y' is that of y over s². Features and
    heads that never vary by more than float32 rounding are not scaled.

    Attributes:
        target_scale: s, (H_t, 1, 1).
    """

    def __init__(self, rows: LayerRows, batch_size: int, device: torch.device | str) -> None:
        """Args: the rows to standardise, how many to read at a time, and where."""
        self._rows, self._device = rows, device
        self._mean_x, variance = _mean_and_variance(rows.n_rows("fit"), rows.features, batch_size, device)
        self._scale_x = _deviation(variance, self._mean_x)
        self._mean_y, variance = _mean_and_variance(rows.n_rows("fit"), rows.targets, batch_size, device)
        magnitude = self._mean_y.square().mean(2, keepdim=True).sqrt()
        self.target_scale = _deviation(variance.mean(2, keepdim=True), magnitude)

    def n_rows(self, split: str) -> int:
        """See `LayerRows`."""
        return self._rows.n_rows(split)

    def features(self, split: str, index: Tensor) -> Tensor:
        """See `LayerRows`; on the device."""
        x = self._rows.features(split, index).to(self._device)
        return (x - self._mean_x.to(x.dtype)) / self._scale_x.to(x.dtype)

    def targets(self, split: str, index: Tensor) -> Tensor:
        """See `LayerRows`; on the device."""
        y = self._rows.targets(split, index).to(self._device)
        return (y - self._mean_y.to(y.dtype)) / self.target_scale.to(y.dtype)

    def folded(self, networks: HeadNetworks) -> HeadNetworks:
        """Networks of raw features and outputs that do what these do of standardised ones.

        `(x − μ_x)/σ_x · W = (x − μ_x)(W/σ_x)` at the first layer, `s(hW + b) + μ_y` at the last.
        """
        weights, biases = list(networks.weights), list(networks.biases)
        dtype = biases[0].dtype
        weights[0] = (weights[0].double() / self._scale_x.transpose(1, 2)).to(dtype)
        weights[-1] = (weights[-1].double() * self.target_scale).to(dtype)
        shifted = biases[-1].double() * self.target_scale.squeeze(1) + self._mean_y.squeeze(1)
        biases[-1] = shifted.to(dtype)
        return HeadNetworks(tuple(weights), tuple(biases), -self._mean_x.squeeze(1).to(dtype))


def squared_error(
    predict: Callable[[Tensor], Tensor],
    rows: LayerRows,
    split: str,
    batch_size: int,
    device: torch.device | str = "cpu",
) -> Tensor:
    """`Σ (y − f(x))²` over a split, (H_t, d_t), with float64 sums.

    `R² = 1 − ΣSSE/ΣSST`; of `ResidualRows` it is the error of linear map and network together.

    Args:
        predict: features (1 or H_t, n, p) to outputs (H_t, n, d_t).
        rows: their features and targets are moved to `device`.
        split: "fit" or "held_out".
        batch_size: rows at a time.

    Raises:
        MLPError: a split without rows.
    """
    if rows.n_rows(split) == 0:
        raise MLPError(f"the {split} split has no rows to sum errors over: calibrate on more sequences")
    parts = []
    with torch.no_grad():
        for index in torch.arange(rows.n_rows(split)).split(batch_size):
            x, y = rows.features(split, index).to(device), rows.targets(split, index).to(device)
            parts.append((predict(x) - y).double().square().sum(1))
    return torch.stack(parts).sum(0)


def _mean_and_variance(
    n_rows: int,
    read: Callable[[str, Tensor], Tensor],
    batch_size: int,
    device: torch.device | str,
) -> tuple[Tensor, Tensor]:
    """Mean and variance over the fit rows, (heads, 1, channels) float64.

    Sums are taken about the first batch's mean: about zero, a large mean would swallow a small variance.
    """
    origin: Tensor | None = None
    for index in torch.arange(n_rows).split(batch_size):
        batch = read("fit", index).to(device).double()
        if origin is None:
            origin = batch.mean(1, keepdim=True)
            total, squares = torch.zeros_like(origin), torch.zeros_like(origin)
        batch = batch - origin
        total += batch.sum(1, keepdim=True)
        squares += batch.square().sum(1, keepdim=True)
    assert origin is not None  # train_layer refuses a fit split without rows
    shift = total / n_rows
    return origin + shift, (squares / n_rows - shift.square()).clamp(min=0)


def _deviation(variance: Tensor, magnitude: Tensor) -> Tensor:
    """Standard deviation; 1 where it is no more than float32 rounding of the values."""
    deviation = variance.sqrt()
    rounding = torch.finfo(torch.float32).eps * magnitude.abs()
    return torch.where(deviation > rounding, deviation, torch.ones_like(deviation))
