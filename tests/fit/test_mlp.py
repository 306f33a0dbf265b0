from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from kvmap.errors import UnknownName
from kvmap.files import load_metadata
from kvmap.fit import mlp
from kvmap.fit.features import Recipe, both
from kvmap.fit.mlp import (
    MLPSettings,
    TrainingDiverged,
    generator_of,
    initial_networks,
    train_layer,
    train_mlp,
)
from kvmap.fit.network_rows import (
    LayerRows,
    MLPError,
    StandardisedRows,
    TensorRows,
    residual_rows,
    squared_error,
)
from kvmap.fit.networks import HeadNetworks, evaluate, form_parts, trained_kinds

SMALL = MLPSettings(hidden=(7, 5), epochs=4, batch_size=16, learning_rate=1e-2, seed=3)
N_HEADS, P, D = 3, 6, 4


def made_up_rows(
    shared: bool = True,
    n: int = 53,  # not a multiple of the batch size: the last batch is smaller
    law: Callable[[Tensor], Tensor] = torch.tanh,
    dtype: torch.dtype = torch.float64,
    noise: float = 0.1,
) -> TensorRows:
    """Rows whose targets are a nonlinear image of their features, and noise; half as many held out."""
    generator = torch.Generator().manual_seed(1)
    mix = torch.randn(N_HEADS, P, D, generator=generator, dtype=torch.float64)
    features, targets = {}, {}
    for split, count in (("fit", n), ("held_out", n // 2)):
        x = torch.randn(1 if shared else N_HEADS, count, P, generator=generator, dtype=torch.float64)
        y = law(x @ mix)
        y = y + noise * torch.randn(y.shape, generator=generator, dtype=torch.float64)
        features[split], targets[split] = x.to(dtype), y.to(dtype)
    return TensorRows(features, targets)


def all_rows(rows: LayerRows, split: str) -> tuple[Tensor, Tensor]:
    index = torch.arange(rows.n_rows(split))
    return rows.features(split, index), rows.targets(split, index)


def plain_network(start: HeadNetworks, head: int) -> nn.Sequential:
    """One head's network as anybody would write it."""
    modules: list[nn.Module] = []
    for weight, bias in zip(start.weights, start.biases, strict=True):
        linear = nn.Linear(*weight.shape[1:], dtype=torch.float64)
        linear.weight.data = weight[head].T.double().clone()
        linear.bias.data = bias[head].double().clone()
        modules += [linear, nn.ReLU()]
    return nn.Sequential(*modules[:-1])


def by_plain_loop(
    rows: LayerRows, settings: MLPSettings, kind: str, layer: int, head: int
) -> tuple[nn.Sequential, list[dict[str, Any]]]:
    """One head trained by itself with torch's own modules: the slow oracle."""
    (x, y), (x_out, y_out) = all_rows(rows, "fit"), all_rows(rows, "held_out")
    n_heads, n, d = y.shape
    x, x_out = (t[head if t.shape[0] > 1 else 0] for t in (x, x_out))
    y, y_out = y[head], y_out[head]
    start = initial_networks(
        n_heads, x.shape[1], d, settings, generator_of(settings.seed, kind, layer, "weights")
    )
    model = plain_network(start, head)
    adam = torch.optim.Adam(model.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay)
    order = generator_of(settings.seed, kind, layer, "order")

    def mse(network: nn.Sequential) -> float:
        return ((network(x_out) - y_out) ** 2).mean().item()

    table = [{"epoch": 0, "fit_mse": None, "held_out_mse": mse(model)}]
    best, waited = copy.deepcopy(model), 0
    for epoch in range(1, settings.epochs + 1):
        losses = []
        for index in torch.randperm(n, generator=order).split(settings.batch_size):
            loss = nn.functional.mse_loss(model(x[index]), y[index])
            adam.zero_grad()
            loss.backward()
            adam.step()
            losses += [loss.item()] * len(index)
        held_out = mse(model)
        lowest = min(row["held_out_mse"] for row in table)
        table.append({"epoch": epoch, "fit_mse": np.mean(losses), "held_out_mse": held_out})
        if settings.patience is None or held_out < lowest:
            best, waited = copy.deepcopy(model), 0
        else:
            waited += 1
        if waited == settings.patience:
            break
    return best, table


def assert_same_as_plain_loop(rows: LayerRows, settings: MLPSettings) -> list[dict[str, Any]]:
    networks, history = train_layer(rows, settings, "value", 2)
    for head in range(N_HEADS):
        model, table = by_plain_loop(rows, settings, "value", 2, head)
        linears = [module for module in model if isinstance(module, nn.Linear)]
        for linear, weight, bias in zip(linears, networks.weights, networks.biases, strict=True):
            # The same float64 sums in another order. Adam divides a gradient by its own size, so that the
            # rounding of small gradients grows, by 1e3 or so in these few steps.
            torch.testing.assert_close(weight[head], linear.weight.T, rtol=1e-9, atol=1e-11)
            torch.testing.assert_close(bias[head], linear.bias, rtol=1e-9, atol=1e-11)
        mine = [row for row in history if row["head"] == head]
        assert [row["epoch"] for row in mine] == [row["epoch"] for row in table]
        for name in ("fit_mse", "held_out_mse"):
            assert [row[name] for row in mine[1:]] == pytest.approx(
                [row[name] for row in table[1:]], rel=1e-9
            )
        assert mine[0]["fit_mse"] is None
        assert mine[0]["held_out_mse"] == pytest.approx(table[0]["held_out_mse"], rel=1e-12)
    return history


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("changed", [{}, {"weight_decay": 0.1}, {"hidden": ()}, {"start_at_zero": True}])
def test_all_heads_at_once_are_trained_as_each_by_itself(shared: bool, changed: dict[str, Any]) -> None:
    history = assert_same_as_plain_loop(made_up_rows(shared), replace(SMALL, **changed))
    assert {(row["kind"], row["layer"]) for row in history} == {("value", 2)}
    assert [row["epoch"] for row in history if row["kept"]] == [SMALL.epochs] * N_HEADS


@pytest.mark.parametrize(("learning_rate", "patience"), [(0.03, 2), (0.003, 5)])
def test_each_head_stops_by_itself_and_keeps_its_best_epoch(learning_rate: float, patience: int) -> None:
    settings = replace(SMALL, hidden=(40,), epochs=120, patience=patience, learning_rate=learning_rate)
    rows = made_up_rows(shared=False, n=40, noise=1.0)  # few rows and much noise: it overfits soon
    history = assert_same_as_plain_loop(rows, settings)
    last = [max(row["epoch"] for row in history if row["head"] == head) for head in range(N_HEADS)]
    assert len(set(last)) > 1  # the heads stop at different epochs
    assert max(last) < settings.epochs
    kept = {row["head"]: row["held_out_mse"] for row in history if row["kept"]}
    for head in range(N_HEADS):
        assert kept[head] == min(row["held_out_mse"] for row in history if row["head"] == head)
    networks, _ = train_layer(rows, settings, "value", 2)
    error = squared_error(lambda x: evaluate(networks, x), rows, "held_out", 7)
    # one float64 sum over other batches
    assert (error.mean(1) / rows.n_rows("held_out")).tolist() == pytest.approx(list(kept.values()), rel=1e-12)


def test_nothing_to_learn_keeps_the_residual_form_at_its_linear_part() -> None:
    rows = made_up_rows(law=torch.zeros_like, noise=1.0, n=30)
    settings = replace(SMALL, epochs=20, learning_rate=0.1, patience=3, start_at_zero=True)
    networks, history = train_layer(rows, settings, "key", 0)
    assert [row["epoch"] for row in history if row["kept"]] == [0] * N_HEADS
    assert not evaluate(networks, all_rows(rows, "fit")[0]).any()


def test_initial_weights_are_drawn_as_torch_draws_them() -> None:
    networks = initial_networks(2, 50, 30, replace(SMALL, hidden=(40,)), torch.Generator().manual_seed(0))
    for number, (n_in, n_out) in enumerate([(50, 40), (40, 30)]):
        module = nn.Linear(n_in, n_out)
        for mine, theirs in (
            (networks.weights[number], module.weight.data),
            (networks.biases[number], module.bias.data),
        ):
            assert float(mine.abs().max()) <= n_in**-0.5
            # uniform in ±1/√in: its standard deviation within 6 of its own (at most .58/√(2·30)/2) of theirs
            assert float(mine.std()) == pytest.approx(float(theirs.std()), rel=0.3)
    assert [tuple(weight.shape) for weight in networks.weights] == [(2, 50, 40), (2, 40, 30)]


def test_every_layer_and_kind_has_random_streams_of_its_own() -> None:
    names = [
        (seed, kind, layer, purpose)
        for seed in (0, 1)
        for kind in ("key", "value")
        for layer in (0, 1, 11)
        for purpose in ("weights", "order")
    ]
    drawn = {float(torch.rand(1, generator=generator_of(*name), dtype=torch.float64)) for name in names}
    assert len(drawn) == len(names)


def test_networks_equal_their_definition_number_by_number() -> None:
    generator = torch.Generator().manual_seed(0)
    networks = HeadNetworks(
        tuple(torch.randn(2, *shape, generator=generator) for shape in ((3, 5), (5, 4), (4, 2))),
        tuple(torch.randn(2, width, generator=generator) for width in (5, 4, 2)),
        torch.randn(1, 3, generator=generator),
    )
    x = torch.randn(1, 6, 3, generator=generator)
    before = x.clone()
    got = evaluate(networks, x)
    assert torch.equal(x, before)
    for head in range(2):
        for row in range(6):
            hidden = x[0, row].double().numpy() + networks.input_bias[0].double().numpy()
            for i in range(3):
                hidden = hidden @ networks.weights[i][head].double().numpy()
                hidden = hidden + networks.biases[i][head].double().numpy()
                hidden = np.maximum(hidden, 0) if i < 2 else hidden
            # float32 sums of at most 5 products, three deep
            np.testing.assert_allclose(got[head, row].numpy(), hidden, rtol=1e-5, atol=1e-5)
    together = evaluate(networks, x.expand(2, -1, -1))
    torch.testing.assert_close(got, together, rtol=1e-6, atol=1e-6)  # the same sums by another routine


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features_that_heads_share_are_not_copied_for_each(dtype: torch.dtype) -> None:
    made: list[tuple[int, ...]] = []

    class Shapes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            made.extend(tuple(t.shape) for t in (*args, out) if isinstance(t, Tensor))
            return out

    heads, n, p = 3, 17, 19
    weight = torch.randn(p, heads, 4, dtype=dtype, requires_grad=True)
    networks = HeadNetworks((weight.transpose(0, 1),), (torch.zeros(heads, 4),))
    with Shapes():
        evaluate(networks, torch.randn(1, n, p, dtype=dtype)).sum().backward()
    assert any(shape == (n, p) for shape in made)
    assert not any(np.prod(shape) >= heads * n * p for shape in made)


def test_rows_are_read_a_batch_at_a_time_and_all_of_them() -> None:
    class Watched(TensorRows):
        seen: list[Tensor]

        def features(self, split: str, index: Tensor) -> Tensor:
            assert index.dtype == torch.int64
            self.seen += [index] if split == "fit" and len(index) > 1 else []
            assert len(index) <= SMALL.batch_size
            return super().features(split, index)

    inner = made_up_rows()
    watched = Watched(inner._features, inner._targets)
    watched.seen = []
    train_layer(watched, SMALL, "key", 0)
    per_epoch = -(-53 // SMALL.batch_size)
    assert len(watched.seen) == SMALL.epochs * per_epoch
    epochs = [torch.cat(watched.seen[i : i + per_epoch]) for i in range(0, len(watched.seen), per_epoch)]
    assert all(torch.equal(order.sort().values, torch.arange(53)) for order in epochs)
    assert not torch.equal(epochs[0], epochs[1])


def test_a_second_training_gives_the_same_bits_and_another_seed_others() -> None:
    rows = made_up_rows(dtype=torch.float32)
    torch.manual_seed(1)
    first, _ = train_layer(rows, SMALL, "key", 0)
    torch.manual_seed(2)
    again, _ = train_layer(rows, SMALL, "key", 0)
    other, _ = train_layer(rows, replace(SMALL, seed=4), "key", 0)
    assert all(torch.equal(a, b) for a, b in zip(first.weights, again.weights, strict=True))
    assert not torch.equal(first.weights[0], other.weights[0])
    assert first.weights[0].dtype == first.biases[0].dtype == torch.float32
    assert not first.weights[0].requires_grad


@pytest.mark.parametrize("shared", [True, False])
def test_bfloat16_products_train_nearly_as_well_with_float32_weights(shared: bool) -> None:
    rows = made_up_rows(shared, dtype=torch.float32)
    settings = replace(SMALL, epochs=40)
    exact, half = (
        train_layer(rows, replace(settings, compute_dtype=dtype), "key", 0)
        for dtype in ("float32", "bfloat16")
    )
    assert half[0].weights[0].dtype == torch.float32
    last = [[row["held_out_mse"] for row in history if row["kept"]] for _, history in (exact, half)]
    assert last[1] == pytest.approx(last[0], rel=0.15)  # products of 8 bits; the noise they leave is unbiased
    assert last[1] != last[0]


@pytest.mark.parametrize("shared", [True, False])
def test_the_residual_form_trains_on_what_the_linear_map_missed(shared: bool) -> None:
    rows = made_up_rows(shared)
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(N_HEADS, P, D, generator=generator, dtype=torch.float64)
    bias = torch.randn(N_HEADS, D, generator=generator, dtype=torch.float64)
    reduced = TensorRows(
        {split: all_rows(rows, split)[0] for split in ("fit", "held_out")},
        {
            split: all_rows(rows, split)[1] - (all_rows(rows, split)[0] @ weight + bias.unsqueeze(1))
            for split in ("fit", "held_out")
        },
    )
    residual = residual_rows(rows, weight, bias)
    (got, history), (expected, _) = (train_layer(one, SMALL, "key", 1) for one in (residual, reduced))
    for mine, theirs in zip(got.weights, expected.weights, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)  # see assert_same_as_plain_loop
    x, y = all_rows(rows, "held_out")
    whole = x @ weight + bias.unsqueeze(1) + evaluate(got, x)
    kept = [row["held_out_mse"] for row in history if row["kept"]]
    assert ((whole - y) ** 2).mean((1, 2)).tolist() == pytest.approx(kept, rel=1e-12)


def test_the_linear_part_may_read_other_features_than_the_network() -> None:
    rows, wide = made_up_rows(shared=True), made_up_rows(shared=False)
    weight, bias = torch.ones(N_HEADS, P, D).double(), torch.ones(N_HEADS, D).double()
    index = torch.tensor([4, 0, 9])
    got = residual_rows(rows, weight, bias, inputs=wide).targets("fit", index)
    expected = rows.targets("fit", index) - wide.features("fit", index).sum(-1, keepdim=True) - 1
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("hidden", [(7, 5), ()])
def test_standardised_training_is_folded_into_networks_of_raw_rows(
    shared: bool, hidden: tuple[int, ...]
) -> None:
    inner = made_up_rows(shared)
    stretch, shift = torch.logspace(-2, 3, P).double(), 1e3 * torch.linspace(-1, 1, P).double()
    raw_x, raw_y, unit_x, unit_y = {}, {}, {}, {}
    for split in ("fit", "held_out"):
        x, y = all_rows(inner, split)
        raw_x[split], raw_y[split] = x * stretch + shift, 30 * y - 200
        raw_x[split][..., 2] = 5.0  # a dead channel
    mean_x, std_x = raw_x["fit"].mean(1, keepdim=True), raw_x["fit"].std(1, keepdim=True, correction=0)
    std_x[..., 2] = 1.0
    mean_y = raw_y["fit"].mean(1, keepdim=True)
    scale_y = raw_y["fit"].var(1, keepdim=True, correction=0).mean(2, keepdim=True).sqrt()
    for split in ("fit", "held_out"):
        unit_x[split] = (raw_x[split] - mean_x) / std_x
        unit_y[split] = (raw_y[split] - mean_y) / scale_y
    settings = replace(SMALL, hidden=hidden)
    by_hand, table = train_layer(TensorRows(unit_x, unit_y), settings, "key", 1)
    raw = TensorRows(raw_x, raw_y)
    networks, history = train_layer(raw, replace(settings, standardise=True), "key", 1)
    assert networks.input_bias.shape == (1 if shared else N_HEADS, P)
    expected = evaluate(by_hand, unit_x["held_out"]) * scale_y + mean_y
    # float64, but the features' mean is up to 1e5 of their deviations: 1e-16 · 1e5, grown by Adam as above
    torch.testing.assert_close(evaluate(networks, raw_x["held_out"]), expected, rtol=1e-7, atol=1e-7)
    for mine, theirs in zip(history, table, strict=True):
        unit = float(scale_y[mine["head"]].square())
        assert mine["held_out_mse"] == pytest.approx(unit * theirs["held_out_mse"], rel=1e-6)
    kept = torch.tensor([row["held_out_mse"] for row in history if row["kept"]])
    error = squared_error(lambda x: evaluate(networks, x), raw, "held_out", 10)
    torch.testing.assert_close(error.mean(1) / raw.n_rows("held_out"), kept.double(), rtol=1e-6, atol=0)


def test_standardising_survives_a_mean_that_dwarfs_the_deviation() -> None:
    """Float32 rows at 1,000 with deviation 1: sums of squares about zero would lose 6 of 7 digits."""
    x = 1000 + torch.randn(1, 4000, 1, generator=torch.Generator().manual_seed(0))
    rows = TensorRows({"fit": x}, {"fit": x.clone()})
    unit = StandardisedRows(rows, 100, "cpu")
    got = unit.features("fit", torch.arange(4000)).double()
    # features near 1,000 are spaced 6e-5 apart in float32; their mean is known far better than that
    assert float(got.mean()) == pytest.approx(0, abs=1e-4)
    assert float(got.std(correction=0)) == pytest.approx(1, abs=1e-4)


def test_a_function_that_no_linear_map_can_give_is_learnt() -> None:
    rows = made_up_rows(n=600, law=torch.abs, dtype=torch.float32)
    settings = MLPSettings(hidden=(48, 48), epochs=60, batch_size=64, learning_rate=3e-3)
    networks, history = train_layer(rows, settings, "value", 0)
    (x, y), (x_out, y_out) = all_rows(rows, "fit"), all_rows(rows, "held_out")
    ones = [torch.cat([t[0], torch.ones(t.shape[1], 1)], 1) for t in (x, x_out)]
    linear = torch.stack([ones[1] @ torch.linalg.lstsq(ones[0], head).solution for head in y])
    spread = (y_out - y_out.mean(1, keepdim=True)).square().sum((1, 2))
    r2_linear = 1 - (linear - y_out).square().sum((1, 2)) / spread
    error = squared_error(lambda t: evaluate(networks, t), rows, "held_out", 64)
    r2 = 1 - error.sum(1) / spread
    assert float(r2_linear.max()) < 0.1
    assert float(r2.min()) > 0.8
    first, last = ([row["fit_mse"] for row in history if row["epoch"] == epoch] for epoch in (1, 60))
    assert all(b < a / 3 for a, b in zip(first, last, strict=True))


@pytest.mark.parametrize("split", ["fit", "held_out"])
def test_a_loss_that_is_not_finite_names_kind_layer_and_head(split: str) -> None:
    inner = made_up_rows(shared=False)
    targets = {name: all_rows(inner, name)[1].clone() for name in ("fit", "held_out")}
    targets[split][1, 3, 0] = float("nan")
    rows = TensorRows({name: all_rows(inner, name)[0] for name in targets}, targets)
    expected = {"fit": "the fit loss of epoch 1", "held_out": "the held-out loss of epoch 0"}[split]
    with pytest.raises(TrainingDiverged, match=f"value, target layer 7, head 1: {expected} is nan"):
        train_layer(rows, SMALL, "value", 7)


def test_a_learning_rate_far_too_high_says_so() -> None:
    rows = made_up_rows(dtype=torch.float32)
    with pytest.raises(TrainingDiverged, match=r"key, target layer 0, head 0: .*Lower learning_rate"):
        train_layer(rows, replace(SMALL, learning_rate=1e20), "key", 0)


def test_settings_that_make_no_sense_are_refused_all_at_once() -> None:
    with pytest.raises(MLPError, match=r"epochs=0.*learning_rate=-1.*patience=0.*compute_dtype='fp8'"):
        MLPSettings(epochs=0, learning_rate=-1, patience=0, compute_dtype="fp8")
    assert MLPSettings(hidden=[3, 4]).hidden == (3, 4)
    published = MLPSettings()
    assert (published.hidden, published.epochs, published.batch_size) == ((1024, 1024), 20, 4096)
    assert (published.learning_rate, published.patience, published.standardise) == (1e-3, None, False)


def test_rows_that_cannot_be_trained_on_are_refused() -> None:
    x, y = all_rows(made_up_rows(), "fit")
    with pytest.raises(MLPError, match="expected the same, by split"):
        TensorRows({"fit": x}, {"fit": y[:, 1:]})
    with pytest.raises(MLPError, match="the MLP of key, target layer 1 has no fit rows"):
        train_layer(TensorRows({}, {}), SMALL, "key", 1)
    with pytest.raises(MLPError, match="no held-out rows, which patience=2 judges by"):
        train_layer(TensorRows({"fit": x}, {"fit": y}), replace(SMALL, patience=2), "key", 1)
    with pytest.raises(MLPError, match="reads no features"):
        train_layer(TensorRows({"fit": x[..., :0]}, {"fit": y}), SMALL, "key", 1)
    with pytest.raises(MLPError, match="the held_out split has no rows"):
        squared_error(lambda t: t, TensorRows({"fit": x}, {"fit": y}), "held_out", 5)


def test_without_held_out_rows_the_history_says_nothing_of_them() -> None:
    x, y = all_rows(made_up_rows(), "fit")
    _, history = train_layer(TensorRows({"fit": x}, {"fit": y}), SMALL, "key", 1)
    assert {row["held_out_mse"] for row in history} == {None}


def test_forms_say_which_kinds_are_trained() -> None:
    assert trained_kinds("full") == trained_kinds("residual") == ("key", "value")
    assert trained_kinds("values_only") == trained_kinds("residual_values") == ("value",)
    assert form_parts("residual_values", "key") == ("linear",)
    assert form_parts("residual_values", "value") == ("linear", "mlp")
    with pytest.raises(UnknownName, match="Did you mean 'residual'"):
        form_parts("residul", "key")


# Whole mappers: layers, folders, interruptions.

RECIPE = Recipe(((3, 2),) * 2, ((3, 4),) * 3, "full_head", both(((), (0,), (1,))), native_layers=1)


class Source:
    """Gives the rows of each layer, and writes down for which it was asked."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.asked: list[tuple[str, int]] = []
        self._fail_at = fail_at

    def __call__(self, kind: str, layer: int) -> TensorRows:
        if len(self.asked) == self._fail_at:
            raise KeyboardInterrupt
        self.asked.append((kind, layer))
        return made_up_rows(n=20 + layer, dtype=torch.float32)


JOBS = [("key", 1), ("key", 2), ("value", 1), ("value", 2)]


def tensors_of(weights: Any) -> dict[str, Tensor]:
    return {
        f"{kind}.{layer}.{name}": tensor
        for kind, layers in weights.networks.items()
        for layer, networks in enumerate(layers)
        if networks is not None
        for name, tensor in networks.tensors().items()
    }


def assert_equal(first: Any, second: Any) -> None:
    a, b = tensors_of(first), tensors_of(second)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert first.history == second.history


@pytest.mark.parametrize("standardise", [False, True])
def test_an_interrupted_training_goes_on_where_it_stopped(tmp_path: Path, standardise: bool) -> None:
    settings = replace(SMALL, standardise=standardise)
    whole = train_mlp(Source(), RECIPE, settings)
    with pytest.raises(KeyboardInterrupt):
        train_mlp(Source(fail_at=2), RECIPE, settings, folder=tmp_path, rows_identity="a")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key.1.safetensors", "key.2.safetensors"]
    rest = Source()
    resumed = train_mlp(rest, RECIPE, settings, folder=tmp_path, rows_identity="a")
    assert rest.asked == JOBS[2:]
    assert_equal(resumed, whole)
    unasked = Source(fail_at=0)
    assert_equal(train_mlp(unasked, RECIPE, settings, folder=tmp_path, rows_identity="a"), whole)


def test_layers_of_other_settings_recipes_or_rows_are_trained_anew(tmp_path: Path) -> None:
    train_mlp(Source(), RECIPE, SMALL, folder=tmp_path, rows_identity="a")
    first = load_metadata(tmp_path / "key.1.safetensors")["fingerprint"]
    others = [
        (RECIPE, replace(SMALL, epochs=5), "a"),
        (replace(RECIPE, support="banded"), SMALL, "a"),
        (RECIPE, SMALL, "b"),
    ]
    for recipe, settings, identity in others:
        again = Source()
        train_mlp(again, recipe, settings, folder=tmp_path, rows_identity=identity)
        assert again.asked == JOBS
        assert load_metadata(tmp_path / "key.1.safetensors")["fingerprint"] != first


def test_a_damaged_layer_is_trained_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = train_mlp(Source(), RECIPE, SMALL, folder=tmp_path, rows_identity="a")
    path = tmp_path / "value.1.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    again = Source()
    assert_equal(train_mlp(again, RECIPE, SMALL, folder=tmp_path, rows_identity="a"), whole)
    assert again.asked == [("value", 1)]
    assert "value.1.safetensors is no sound safetensors file" in caplog.text


def test_a_folder_needs_the_name_of_the_rows(tmp_path: Path) -> None:
    with pytest.raises(MLPError, match="rows_identity is empty"):
        train_mlp(Source(), RECIPE, SMALL, folder=tmp_path)


def test_a_kind_trained_alone_is_the_one_trained_with_the_other() -> None:
    both_kinds, values = train_mlp(Source(), RECIPE, SMALL), train_mlp(Source(), RECIPE, SMALL, ("value",))
    assert list(values.networks) == ["value"]
    a, b = tensors_of(both_kinds), tensors_of(values)
    assert all(torch.equal(a[name], b[name]) for name in b)
    assert values.networks["value"][0] is None  # the native layer
    assert list(values.history) == [row for row in both_kinds.history if row["kind"] == "value"]
    assert {(row["kind"], row["layer"]) for row in both_kinds.history} == set(JOBS)


def test_few_steps_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    mlp._warn_of_few_steps.cache_clear()
    settings = replace(SMALL, epochs=3, batch_size=10)
    for _ in range(2):
        mlp._warn_of_few_steps(95, settings)
    assert caplog.text.count("95 rows in batches of 10 for 3 epochs are 30 steps of Adam") == 1
    mlp._warn_of_few_steps(95, replace(settings, epochs=20))
    assert len(caplog.records) == 1
