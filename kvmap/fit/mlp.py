"""The nonlinear map of [H]: one small network for each target layer, head and kind, trained on rows.

All heads of a layer are trained at once, in batched products, and each as if it were trained by itself: the
loss is the sum of the heads' own losses, and Adam treats every weight apart.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from kvmap.errors import KvmapError, UnknownName
from kvmap.files import ArtifactCorrupt, ArtifactMissing, load_metadata, load_tensors, save_tensors
from kvmap.fit.features import KINDS, Recipe
from kvmap.progress import track

FORMS: dict[str, dict[str, tuple[str, ...]]] = {
    "full": {"key": ("mlp",), "value": ("mlp",)},
    "values_only": {"key": ("linear",), "value": ("mlp",)},
    "residual": {"key": ("linear", "mlp"), "value": ("linear", "mlp")},
    "residual_values": {"key": ("linear",), "value": ("linear", "mlp")},
}
"""By form and kind of cache, the parts whose outputs are added up."""

COMPUTE_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}

_FILE_FORMAT = "kvmap-mlp-layer-1"

_logger = logging.getLogger(__name__)


class MLPError(KvmapError):
    """Settings or rows that networks cannot be trained with."""


class TrainingDiverged(MLPError):
    """A loss that is not finite."""


@dataclass(frozen=True)
class MLPSettings:
    """How the networks are built and trained; the defaults are the published ones ([H]).

    Attributes:
        hidden: widths between the p features and the d_t outputs, ReLU after each.
        epochs: passes over the fit rows, each in an order of its own.
        batch_size: rows for each step of Adam; the last batch of an epoch may be smaller.
        learning_rate: of Adam.
        weight_decay: added to the gradient as `weight_decay · w` (Adam's, not AdamW's).
        patience: stop a head after so many epochs in a row without a lower held-out MSE, and keep its best
            epoch, the untrained network of epoch 0 included. None: train all epochs and keep the last.
        standardise: centre each feature and divide it by its standard deviation over the fit rows, centre
            each output, and divide a head's outputs by one scale, which leaves the objective what it was.
            What is kept maps raw features to raw outputs all the same.
        start_at_zero: begin with a last layer of zeros, so that a residual form begins as its linear part.
        compute_dtype: of the training's products, "bfloat16", "float32" or "float64"; None: that of the rows.
            Weights, biases and Adam's state are at least float32.
        seed: of initial weights and batch orders; every layer and kind draws from a stream of its own.
    """

    hidden: tuple[int, ...] = (1024, 1024)
    epochs: int = 20
    batch_size: int = 4096
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    patience: int | None = None
    standardise: bool = False
    start_at_zero: bool = False
    compute_dtype: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse settings that make no sense, all at once.

        Raises:
            MLPError: naming each.
        """
        object.__setattr__(self, "hidden", tuple(self.hidden))
        wrong = [
            f"{name}={getattr(self, name)!r}: expected {expected}"
            for name, sound, expected in (
                ("hidden", all(width >= 1 for width in self.hidden), "widths of at least 1"),
                ("epochs", self.epochs >= 1, "at least 1"),
                ("batch_size", self.batch_size >= 1, "at least 1"),
                ("learning_rate", 0 < self.learning_rate < math.inf, "a finite number > 0"),
                ("weight_decay", 0 <= self.weight_decay < math.inf, "a finite number >= 0"),
                ("patience", self.patience is None or self.patience >= 1, "at least 1, or none at all"),
                (
                    "compute_dtype",
                    self.compute_dtype is None or self.compute_dtype in COMPUTE_DTYPES,
                    f"one of {', '.join(COMPUTE_DTYPES)}, or none at all",
                ),
            )
            if not sound
        ]
        if wrong:
            raise MLPError("settings of the MLP: " + "; ".join(wrong))


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


class ResidualRows:
    """`LayerRows` whose targets are what a linear map missed: `y − (xW + b)`.

    A network trained on them belongs on top of that map: its output is `xW + b + mlp(x)`.
    """

    def __init__(
        self, rows: LayerRows, weight: Tensor, bias: Tensor, inputs: LayerRows | None = None
    ) -> None:
        """What is missed, and by what.

        Args:
            rows: the features that the network reads, and the whole targets.
            weight: (H_t, p, d_t) of the linear map; bias: (H_t, d_t).
            inputs: the same rows with the features that the linear map reads; None: those of `rows`.
        """
        self._rows, self._inputs = rows, inputs or rows
        self._map = HeadNetworks((weight,), (bias,))

    def n_rows(self, split: str) -> int:
        """See `LayerRows`."""
        return self._rows.n_rows(split)

    def features(self, split: str, index: Tensor) -> Tensor:
        """See `LayerRows`."""
        return self._rows.features(split, index)

    def targets(self, split: str, index: Tensor) -> Tensor:
        """See `LayerRows`."""
        targets, inputs = self._rows.targets(split, index), self._inputs.features(split, index)
        if self._map.weights[0].device != inputs.device:
            self._map = self._map.to(inputs.device)
        return targets - evaluate(self._map, inputs).to(targets.device)


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


def generator_of(seed: int, kind: str, layer: int, purpose: str) -> torch.Generator:
    """A CPU stream of its own for each kind, target layer and purpose ("weights" or "order").

    So a layer is trained alike whatever was trained before it, and on whatever device.
    """
    digest = hashlib.sha256(f"{seed}/{kind}/{layer}/{purpose}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def initial_networks(
    n_heads: int, n_features: int, n_outputs: int, settings: MLPSettings, generator: torch.Generator
) -> HeadNetworks:
    """Weights and biases uniform in ±1/√in, as `torch.nn.Linear` draws them; float32, on the CPU."""
    widths = (n_features, *settings.hidden, n_outputs)
    weights, biases = [], []
    for n_in, n_out in pairwise(widths):
        bound = 1 / math.sqrt(n_in)
        weights.append(torch.empty(n_heads, n_in, n_out).uniform_(-bound, bound, generator=generator))
        biases.append(torch.empty(n_heads, n_out).uniform_(-bound, bound, generator=generator))
    if settings.start_at_zero:
        weights[-1].zero_()
        biases[-1].zero_()
    return HeadNetworks(tuple(weights), tuple(biases))


def train_mlp(
    layer_rows_for: Callable[[str, int], LayerRows],
    recipe: Recipe,
    settings: MLPSettings,
    kinds: Iterable[str] = KINDS,
    folder: Path | None = None,
    *,
    rows_identity: str = "",
    device: torch.device | str = "cpu",
) -> MLPWeights:
    """Train the networks of every mapped target layer.

    Args:
        layer_rows_for: gives the rows of a kind and target layer; called once for each that is trained.
        recipe: what the networks read; its native layers are left out.
        settings: see `MLPSettings`.
        kinds: "key", "value" or both.
        folder: where each finished layer is written, and taken from by a later call of the same settings,
            recipe and rows; layers that others left there are trained anew. None: nothing is kept.
        rows_identity: names the rows and their targets: calibration, pair, linear map of a residual. Needed
            with a folder: the rows of a finished layer are not read again, so nothing else tells them apart.
        device: where to train. What comes back is on the CPU.

    Raises:
        MLPError: no rows, no features, or a folder without `rows_identity`.
        TrainingDiverged: naming kind, layer, head and epoch.
    """
    if folder is not None and not rows_identity:
        raise MLPError(
            f"rows_identity is empty: a layer in {folder} could be one of other rows. Give it a text "
            f"that names the rows, such as a digest of the calibration's settings"
        )
    kinds = tuple(kinds)
    fingerprint = _fingerprint(settings, recipe, rows_identity)
    networks: dict[str, list[HeadNetworks | None]] = {
        kind: [None] * len(recipe.target_shape) for kind in kinds
    }
    history: list[dict[str, Any]] = []
    jobs = [(kind, layer) for kind in kinds for layer in recipe.mapped_layers]
    for kind, layer in track(jobs, len(jobs), "mlp: layers"):
        path = None if folder is None else Path(folder) / f"{kind}.{layer}.safetensors"
        done = None if path is None else _load_layer(path, fingerprint)
        if done is None:
            done = train_layer(layer_rows_for(kind, layer), settings, kind, layer, device)
            if path is not None:
                _save_layer(path, *done, fingerprint)
        networks[kind][layer] = done[0]
        history += done[1]
    return MLPWeights(recipe, {kind: tuple(found) for kind, found in networks.items()}, tuple(history))


def train_layer(
    rows: LayerRows, settings: MLPSettings, kind: str, layer: int, device: torch.device | str = "cpu"
) -> tuple[HeadNetworks, list[dict[str, Any]]]:
    """Train all heads of one target layer and kind, each as if by itself ([H]).

    Minimises, for each head, the mean of `(y − f(x))²` over rows and channels by Adam.

    Args:
        rows: see `LayerRows`; weights take their dtype, at least float32.
        settings: see `MLPSettings`.
        kind, layer: name the random streams, and the networks in errors and history.
        device: where to train.

    Returns:
        Networks of raw features and outputs on the CPU, and the rows of `MLPWeights.history`.

    Raises:
        MLPError: no fit rows, no features, or `patience` without held-out rows.
        TrainingDiverged: a loss that is not finite.
    """
    what = f"the MLP of {kind}, target layer {layer}"
    _check_rows(rows, settings, what)
    unit = StandardisedRows(rows, settings.batch_size, device) if settings.standardise else None
    trainee = _Trainee(unit or rows, settings, generator_of(settings.seed, kind, layer, "weights"), device)
    # MSE in the targets' own units, whatever the scale they are trained at
    scale = unit.target_scale.flatten().square() if unit else torch.ones(trainee.n_heads, device=device)
    keeper = _Keeper(settings.patience, trainee.n_heads)
    order = generator_of(settings.seed, kind, layer, "order")
    epochs: list[tuple[int, list[int], Tensor | None, Tensor | None]] = []

    def finish(epoch: int, fit: Tensor | None) -> None:
        held_out = trainee.held_out_mse()
        found = [None if mse is None else (mse * scale).cpu() for mse in (fit, held_out)]
        running = keeper.running()
        _check_finite(found, running, what, epoch)
        keeper.offer(epoch, found[1], trainee)
        epochs.append((epoch, running, found[0], found[1]))

    finish(0, None)
    for epoch in track(range(1, settings.epochs + 1), settings.epochs, f"mlp: {kind} layer {layer}"):
        fit = trainee.epoch(torch.randperm(rows.n_rows("fit"), generator=order))
        finish(epoch, fit)
        if not keeper.running():
            break
    networks = keeper.networks(trainee)
    networks = (unit.folded(networks) if unit else networks).to("cpu")
    return networks, list(_history(kind, layer, epochs, keeper.kept.tolist()))


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


class _Trainee:
    """The networks in training: their weights, Adam's state, and the rows they are trained on."""

    def __init__(
        self,
        rows: LayerRows,
        settings: MLPSettings,
        generator: torch.Generator,
        device: torch.device | str,
    ) -> None:
        one = torch.zeros(1, dtype=torch.int64)
        x, y = rows.features("fit", one), rows.targets("fit", one)
        self.n_heads, _, n_outputs = y.shape
        self._rows, self._settings, self._device = rows, settings, torch.device(device)
        self._dtype = torch.promote_types(x.dtype, torch.float32)
        self._compute = COMPUTE_DTYPES[settings.compute_dtype] if settings.compute_dtype else self._dtype
        start = initial_networks(self.n_heads, x.shape[2], n_outputs, settings, generator)
        # Where heads share their features, (p, H_t, out) makes the first layer one product for all of them.
        self._packed = x.shape[0] == 1
        first = start.weights[0].transpose(0, 1) if self._packed else start.weights[0]
        self._weights = [self._parameter(weight) for weight in (first, *start.weights[1:])]
        self._biases = [self._parameter(bias) for bias in start.biases]
        self._adam = torch.optim.Adam(
            [*self._weights, *self._biases],
            lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
            fused=self._device.type in ("cpu", "cuda"),
        )

    def _parameter(self, start: Tensor) -> Tensor:
        owned = start.to(self._device, self._dtype).clone(memory_format=torch.contiguous_format)
        return owned.requires_grad_()

    def networks(self, dtype: torch.dtype | None = None) -> HeadNetworks:
        """The networks as they are: views of the parameters, or their weights rounded to a dtype."""
        first = self._weights[0].transpose(0, 1) if self._packed else self._weights[0]
        weights = (first, *self._weights[1:])
        if dtype is not None:
            weights = tuple(weight.to(dtype) for weight in weights)
        return HeadNetworks(weights, tuple(self._biases))

    def epoch(self, order: Tensor) -> Tensor:
        """One pass over the fit rows in an order; the mean of each head's MSE over it, (H_t,) float64."""
        total = torch.zeros(self.n_heads, dtype=torch.float64, device=self._device)
        with torch.enable_grad():
            for index in order.split(self._settings.batch_size):
                x = self._rows.features("fit", index).to(self._device, self._dtype)
                y = self._rows.targets("fit", index).to(self._device, self._dtype)
                loss = (evaluate(self.networks(self._compute), x) - y).square().mean((1, 2))
                self._adam.zero_grad(set_to_none=True)
                loss.sum().backward()
                self._adam.step()
                total += loss.detach().double() * len(index)
        return total / len(order)

    def held_out_mse(self) -> Tensor | None:
        """Each head's MSE on the held-out rows, (H_t,) float64; None where there are none."""
        n_rows = self._rows.n_rows("held_out")
        if n_rows == 0:
            return None
        with torch.no_grad():
            networks = self.networks(self._compute)

        def predict(x: Tensor) -> Tensor:
            return evaluate(networks, x.to(self._dtype))

        error = squared_error(predict, self._rows, "held_out", self._settings.batch_size, device=self._device)
        return error.mean(1) / n_rows


class _Keeper:
    """Which epoch's weights each head keeps, and which heads are still in training."""

    def __init__(self, patience: int | None, n_heads: int) -> None:
        self._patience = patience
        self._lowest = torch.full((n_heads,), math.inf, dtype=torch.float64)
        self._waited = torch.zeros(n_heads, dtype=torch.int64)
        self._best: HeadNetworks | None = None
        self.kept = torch.zeros(n_heads, dtype=torch.int64)

    def running(self) -> list[int]:
        """Heads in training; what comes of the others' weights no longer matters."""
        limit = math.inf if self._patience is None else self._patience
        return [head for head, waited in enumerate(self._waited.tolist()) if waited < limit]

    def offer(self, epoch: int, held_out: Tensor | None, trainee: _Trainee) -> None:
        """Keep an epoch where it is the best of a head in training; without patience, always."""
        if self._patience is None or held_out is None:
            self.kept[:] = epoch
            return
        in_training = torch.zeros_like(self._waited, dtype=torch.bool)
        in_training[self.running()] = True
        better = in_training & (held_out < self._lowest)
        self._waited += (in_training & ~better).long()
        self._waited[better] = 0
        self._lowest = torch.where(better, held_out, self._lowest)
        self.kept[better] = epoch
        networks = trainee.networks()
        if self._best is None:
            self._best = _detached(networks)
        for name, best in self._best.tensors().items():
            chosen = better.to(best.device)
            best[chosen] = networks.tensors()[name].detach()[chosen]

    def networks(self, trainee: _Trainee) -> HeadNetworks:
        """What is kept of each head."""
        return _detached(trainee.networks()) if self._best is None else self._best


def _detached(networks: HeadNetworks) -> HeadNetworks:
    """A copy that is no longer trained."""
    return HeadNetworks(
        tuple(weight.detach().clone() for weight in networks.weights),
        tuple(bias.detach().clone() for bias in networks.biases),
    )


def _products(x: Tensor, weight: Tensor) -> Tensor:
    """`x W` of each head: (H or 1, n, in), (H, in, out) → (H, n, out)."""
    if x.shape[0] == weight.shape[0]:
        return torch.bmm(x, weight)
    # one product for all heads: a batched one may copy x for each (bfloat16 on the CPU does)
    joined = x[0] @ weight.transpose(0, 1).flatten(1)
    return joined.unflatten(1, weight.shape[::2]).transpose(0, 1)


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


def _check_rows(rows: LayerRows, settings: MLPSettings, what: str) -> None:
    if rows.n_rows("fit") == 0:
        raise MLPError(f"{what} has no fit rows: calibrate on more sequences")
    if settings.patience is not None and rows.n_rows("held_out") == 0:
        raise MLPError(
            f"{what} has no held-out rows, which patience={settings.patience} judges by: hold some sequences "
            f"out, or set no patience"
        )
    if rows.features("fit", torch.zeros(1, dtype=torch.int64)).shape[2] == 0:
        raise MLPError(f"{what} reads no features: select a source layer for it")


def _check_finite(losses: Sequence[Tensor | None], running: list[int], what: str, epoch: int) -> None:
    """Refuse to go on with a head that is lost; one that has stopped may do as it likes.

    Raises:
        TrainingDiverged: naming the first such head.
    """
    for split, mse in zip(("fit", "held-out"), losses, strict=True):
        for head in running if mse is not None else ():
            if not math.isfinite(loss := float(mse[head])):  # type: ignore[index]
                raise TrainingDiverged(
                    f"{what}, head {head}: the {split} loss of epoch {epoch} is {loss}, expected a finite "
                    f"number. Lower learning_rate or set standardise; if that does not help, the rows hold "
                    f"NaN or infinite values: calibrate again with finite caches"
                )


def _history(
    kind: str,
    layer: int,
    epochs: Sequence[tuple[int, list[int], Tensor | None, Tensor | None]],
    kept: list[int],
) -> Iterator[dict[str, Any]]:
    for head in range(len(kept)):
        for epoch, running, fit, held_out in epochs:
            if head not in running:
                break
            yield {
                "kind": kind,
                "layer": layer,
                "head": head,
                "epoch": epoch,
                "fit_mse": None if fit is None else float(fit[head]),
                "held_out_mse": None if held_out is None else float(held_out[head]),
                "kept": epoch == kept[head],
            }


def _fingerprint(settings: MLPSettings, recipe: Recipe, rows_identity: str) -> str:
    """What a finished layer depends on, but for its kind and number, as one digest."""
    content = [_FILE_FORMAT, asdict(settings), recipe.to_json(), rows_identity]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _save_layer(path: Path, networks: HeadNetworks, history: list[dict[str, Any]], fingerprint: str) -> None:
    save_tensors(path, networks.tensors(), {"fingerprint": fingerprint, "history": json.dumps(history)})


def _load_layer(path: Path, fingerprint: str) -> tuple[HeadNetworks, list[dict[str, Any]]] | None:
    """A finished layer of the same fingerprint; None where there is none, or a damaged one."""
    try:
        metadata = load_metadata(path)
        if metadata.get("fingerprint") != fingerprint:
            _logger.info("%s is of other settings or rows: trained anew", path)
            return None
        tensors = load_tensors(path)
    except ArtifactMissing:
        return None
    except ArtifactCorrupt as error:
        _logger.warning("%s: trained anew", error)
        return None
    depth = sum(name.endswith(".weight") for name in tensors)
    return HeadNetworks.from_tensors(tensors, depth), json.loads(metadata["history"])
