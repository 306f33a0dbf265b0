"""The nonlinear mapper of [H]: a small network for each target head, alone or on top of the linear map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from kvmap.fit.features import KINDS, Recipe
from kvmap.fit.linear import LinearWeights
from kvmap.fit.networks import HeadNetworks, MLPWeights, evaluate, form_parts
from kvmap.mappers.base import Mapper, MapperMismatch, register

ROWS_AT_ONCE = 8192
"""Columns for which hidden activations, H_t times the hidden width each, are held at a time."""


@register("mlp")
class MLPMapper(Mapper):
    """`ŷ = mlp(x)`, `xW + b`, or `xW + b + mlp(x)`, for keys and for values as the form says.

    Products run in the weights' dtype; biases, ReLU and the sum of the parts in float32.

    Attributes:
        form: see `kvmap.fit.networks.FORMS`.
        recipes: what each part ("linear", "mlp") reads; they may differ.
    """

    def __init__(self, form: str, parts: Mapping[str, MLPWeights]) -> None:
        """A mapper of trained parts; `from_weights` takes them as they are fitted.

        Args:
            form: "full", "values_only", "residual" or "residual_values".
            parts: "mlp" and, where the form has one, "linear", as networks without hidden layers. What the
                form does not use is left out.

        Raises:
            UnknownName: another form.
            MapperMismatch: a part that is missing or not of its recipe's shapes, or parts of different pairs.
        """
        wanted = [(part, kind) for kind in KINDS for part in form_parts(form, kind)]
        for part, kind in wanted:
            if part not in parts or kind not in parts[part].networks:
                raise MapperMismatch(f"form {form!r} needs {part} weights for each {kind}: fit those too")
        self.form = form
        self.recipes = {part: parts[part].recipe for part in dict.fromkeys(part for part, _ in wanted)}
        own = self.recipes["mlp"]
        for recipe in self.recipes.values():
            _check_same_pair(recipe, own)
        super().__init__(own.source_shape, own.target_shape)
        self.native_layers = own.native_layers
        self._networks = {
            (part, kind): tuple(
                None if layer not in own.mapped_layers else _checked(parts[part], part, kind, layer)
                for layer in range(len(own.target_shape))
            )
            for part, kind in wanted
        }

    @classmethod
    def from_weights(cls, form: str, mlp: MLPWeights, linear: LinearWeights | None = None) -> Self:
        """A mapper of trained networks and, where the form adds it or needs it, a linear map.

        Args:
            form: see `MLPMapper`.
            mlp: see `kvmap.fit.mlp.train_mlp`.
            linear: for a residual form the very map on top of which the networks were trained
                (`kvmap.fit.network_rows.residual_rows`).
        """
        return cls(form, {"mlp": mlp} if linear is None else {"mlp": mlp, "linear": linear_networks(linear)})

    def map_layer(
        self,
        layer: int,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        native_keys: Sequence[Tensor] = (),
        native_values: Sequence[Tensor] = (),
    ) -> tuple[Tensor, Tensor]:
        """See `Mapper.map_layer`.

        Raises:
            MapperMismatch: a native layer, which is the target's own.
        """
        if layer < self.native_layers:
            raise MapperMismatch(
                f"target layer {layer} is not mapped: the target computes its first {self.native_layers} "
                f"layers itself"
            )
        caches = (keys, values, native_keys, native_values)
        key, value = (self._map_kind(kind, layer, caches) for kind in KINDS)
        return key, value

    def needs(self, layer: int) -> int:
        """See `Mapper.needs`."""
        slots = (
            slot for recipe in self.recipes.values() for kind in KINDS for slot in recipe.sources(kind, layer)
        )
        return max((number + 1 for origin, _, number in slots if origin == "source"), default=0)

    def _map_kind(self, kind: str, layer: int, caches: tuple[Sequence[Tensor], ...]) -> Tensor:
        batch, _, tokens, _ = next(tensors[0] for tensors in caches if tensors).shape
        heads, width = self.target_shape[layer]
        mapped: Tensor | None = None
        recipe, features = None, torch.empty(0)
        for part in form_parts(self.form, kind):
            if self.recipes[part] != recipe:
                recipe = self.recipes[part]
                features = recipe.gather(kind, layer, *caches)
            networks = self._networks[part, kind][layer]
            assert networks is not None  # only native layers have none
            output = _in_chunks(networks, features)
            mapped = output if mapped is None else mapped + output
        assert mapped is not None  # every form has a part for every kind
        return mapped.view(heads, batch, tokens, width).transpose(0, 1)

    def settings(self) -> dict[str, Any]:
        """See `Mapper.settings`."""
        depth = {
            part: len(networks.weights)
            for (part, _), layers in self._networks.items()
            for networks in layers
            if networks is not None
        }
        recipes = {part: recipe.to_json() for part, recipe in self.recipes.items()}
        return {"form": self.form, "recipes": recipes, "depth": depth}

    def tensors(self) -> dict[str, Tensor]:
        """`{part}.{kind}.{layer}.{i}.weight`: (H_t, in, out) of the i-th product; `.bias`: (H_t, out).

        `{part}.{kind}.{layer}.input_bias`: (1 or H_t, p), where features are centred.
        """
        return {
            f"{part}.{kind}.{layer}.{name}": tensor
            for (part, kind), layers in self._networks.items()
            for layer, networks in enumerate(layers)
            if networks is not None
            for name, tensor in networks.tensors().items()
        }

    @classmethod
    def from_state(cls, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        """See `Mapper.from_state`."""
        parts = {}
        for part, stored in settings["recipes"].items():
            recipe = Recipe.from_json(stored)
            depth = int(settings["depth"].get(part, 0))
            parts[part] = MLPWeights(
                recipe,
                {
                    kind: tuple(
                        _from_named(tensors, f"{part}.{kind}.{layer}.", depth)
                        if layer in recipe.mapped_layers
                        else None
                        for layer in range(len(recipe.target_shape))
                    )
                    for kind in KINDS
                    if part in form_parts(settings["form"], kind)
                },
            )
        return cls(settings["form"], parts)


def linear_networks(weights: LinearWeights) -> MLPWeights:
    """A linear map as networks without hidden layers, over the same storage."""
    recipe = weights.recipe
    return MLPWeights(
        recipe,
        {
            kind: tuple(
                HeadNetworks((weights.weight[kind][layer],), (weights.bias[kind][layer],))
                if layer in recipe.mapped_layers
                else None
                for layer in range(len(recipe.target_shape))
            )
            for kind in weights.weight
        },
    )


def _in_chunks(networks: HeadNetworks, features: Tensor) -> Tensor:
    """`evaluate`, a number of rows at a time."""
    if features.shape[1] <= ROWS_AT_ONCE:
        return evaluate(networks, features).contiguous()
    return torch.cat([evaluate(networks, rows) for rows in features.split(ROWS_AT_ONCE, 1)], 1)


def _from_named(tensors: Mapping[str, Tensor], prefix: str, depth: int) -> HeadNetworks:
    named = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    return HeadNetworks.from_tensors(named, depth)


def _check_same_pair(recipe: Recipe, other: Recipe) -> None:
    for name in ("source_shape", "target_shape", "native_layers"):
        mine, theirs = getattr(recipe, name), getattr(other, name)
        if mine != theirs:
            raise MapperMismatch(
                f"the linear part has {name}={mine}, the networks {theirs}: fit both for one pair and one "
                f"number of native layers"
            )


def _checked(weights: MLPWeights, part: str, kind: str, layer: int) -> HeadNetworks:
    """One layer's networks, packed as they are applied, after a check that they are the recipe's."""
    recipe, networks = weights.recipe, weights.networks[kind][layer]
    heads, width = recipe.target_shape[layer]
    expected = (heads, recipe.n_features(kind, layer), width)
    got = networks and (*networks.weights[0].shape[:2], networks.weights[-1].shape[2])
    if networks is None or got != expected:
        raise MapperMismatch(
            f"{part} weights for the {kind}s of target layer {layer}: (heads, features, head_dim) {got}; the "
            f"recipe needs {expected}. Fit them for this recipe"
        )
    if not recipe.shared:
        return networks
    # (p, H_t, out) in memory: one product for all heads, see `kvmap.fit.networks.evaluate`
    packed = networks.weights[0].transpose(0, 1).contiguous().transpose(0, 1)
    return HeadNetworks((packed, *networks.weights[1:]), networks.biases, networks.input_bias)
