"""The nonlinear map of [H]: one small network for each target layer, head and kind, trained on rows.

All heads of a layer are trained at once, in batched products, and each as if it were trained by itself: the
loss is the sum of the heads' own losses, and Adam treats every weight apart.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvmap.files import ArtifactCorrupt, ArtifactMissing, load_metadata, load_tensors, save_tensors
from kvmap.fit.features import KINDS, Recipe
from kvmap.fit.network_rows import LayerRows, MLPError, StandardisedRows, squared_error
from kvmap.fit.networks import HeadNetworks, MLPWeights, evaluate
from kvmap.progress import track

COMPUTE_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}

_FILE_FORMAT = "kvmap-mlp-layer-1"

_logger = logging.getLogger(__name__)

FEW_STEPS = 200
"""Published: 250 (51,000 rows in batches of 4,096, 20 epochs). See experiments/linear_vs_mlp."""


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
    _warn_of_few_steps(rows.n_rows("fit"), settings)
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


@functools.cache
def _warn_of_few_steps(n_rows: int, settings: MLPSettings) -> None:
    """Once for a number of rows: networks that Adam hardly moves lose to ridge, whatever they could learn."""
    n_steps = settings.epochs * -(-n_rows // settings.batch_size)
    if 0 < n_steps < FEW_STEPS:
        _logger.warning(
            "mapper.mlp: %d rows in batches of %d for %d epochs are %d steps of Adam; fewer than %d leave "
            "networks undertrained: lower mapper.mlp.batch_size or raise mapper.mlp.epochs",
            n_rows,
            settings.batch_size,
            settings.epochs,
            n_steps,
            FEW_STEPS,
        )


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
