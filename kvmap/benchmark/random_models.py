"""Models and maps of true shapes with arbitrary weights: they cost what real ones do, and need no files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kvmap.errors import KvmapError
from kvmap.fit.features import KINDS, CacheShape, Layout, Recipe, geometry_shape
from kvmap.fit.linear import LinearWeights
from kvmap.fit.selection import rank_layers
from kvmap.mappers import LinearMapper
from kvmap.models.loaded import LoadedModel
from kvmap.models.pair import ModelPair
from kvmap.models.shapes import shape_config
from kvmap.models.spec import ModelSpec

_BLOCK = 1_048_573
"""Numbers that are drawn and repeated; a prime, so that no two rows of a matrix are alike."""


@dataclass(frozen=True)
class Depth:
    """How many layers were run of how many.

    Attributes:
        run: layers of the model that was built.
        whole: layers of the model whose shape it has.
    """

    run: int
    whole: int

    @property
    def scale(self) -> float:
        """What a time of the layers that were run is multiplied by to stand for all of them."""
        return self.whole / self.run


def random_model(
    spec: ModelSpec, *, n_positions: int = 0, max_layers: int | None = None, seed: int = 0
) -> LoadedModel:
    """A model of a spec's shape, built where and in what the spec says; its weights are noise of scale
    1/√fan-in, its norms 1.

    Args:
        spec: id, dtype ("auto": bfloat16), device and attention; no weights are read.
        n_positions: the longest context it will be given.
        max_layers: keep this many layers at most.
        seed: of the noise.

    Raises:
        ModelNotFound, UnsupportedModel: see `kvmap.models.shapes.shape_config`.
        KvmapError: a spec with a device map: a random model lies on one device.
    """
    if spec.device_map is not None:
        raise KvmapError(
            f"{spec.id}: device_map={spec.device_map!r}; a random model is built on one device: leave it out"
        )
    config = shape_config(spec, n_positions=n_positions, max_layers=max_layers)
    dtype = torch.bfloat16 if spec.dtype == "auto" else getattr(torch, spec.dtype)
    name = spec.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    model = _built(config, dtype, torch.device(name), spec.attn_implementation, seed)
    return LoadedModel.from_model(model, name=f"random weights in the shape of {spec.id}")


def random_pair(
    source: ModelSpec,
    target: ModelSpec,
    *,
    n_positions: int = 0,
    max_layers: int | None = None,
    seed: int = 0,
) -> tuple[ModelPair, dict[str, Depth]]:
    """Both models, and how deep each of them is.

    Args: see `random_model`.

    Returns:
        The pair, and `Depth` by "source" and "target".
    """
    loaded, depths = [], {}
    for place, (side, spec) in enumerate((("source", source), ("target", target))):
        model = random_model(spec, n_positions=n_positions, max_layers=max_layers, seed=seed + place)
        loaded.append(model)
        depths[side] = Depth(model.geometry.n_layers, shape_config(spec).num_hidden_layers)
    return ModelPair(*loaded), depths


def random_mapper(
    source_shape: CacheShape,
    target_shape: CacheShape,
    top_k: int | Literal["all"],
    support: str = "full_head",
    *,
    regressors: str = "own_kind",
    native_layers: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> LinearMapper:
    """A linear map of noise, which costs what a fitted one of the same kind does.

    A target layer reads the k source layers nearest to its own depth. Weights have the scale 1/√p, so that
    mapped numbers are as large as those that are read.

    Args:
        source_shape: `(n_kv_heads, head_dim)` of each source layer; target_shape likewise.
        top_k: k, source layers that one target layer reads; or "all".
        support: "full_head", "banded" or "head_local"; regressors, native_layers: as of `Recipe`.
        dtype: of the weights; biases are float32.
        device: where they are drawn and kept.
        seed: of the draw.

    Raises:
        SelectionError: k < 1, or more than the source has layers.
    """
    layout = Layout(source_shape, target_shape)
    chosen = rank_layers(layout, "proportional", top_k, native_layers=native_layers)
    recipe = Recipe(source_shape, target_shape, support, chosen, regressors, native_layers)
    generator = torch.Generator(device).manual_seed(seed)

    def drawn(kind: str, layer: int) -> Tensor:
        n_heads, width = target_shape[layer]
        p = recipe.n_features(kind, layer) if layer in recipe.mapped_layers else 0
        noise = torch.randn(n_heads, p, width, generator=generator, dtype=torch.float32, device=device)
        return (noise / max(p, 1) ** 0.5).to(dtype)

    layers = range(len(target_shape))
    weight = {kind: tuple(drawn(kind, layer) for layer in layers) for kind in KINDS}
    bias = {kind: tuple(torch.zeros(shape, device=device) for shape in target_shape) for kind in KINDS}
    return LinearMapper(LinearWeights(recipe, weight, bias))


def random_mapper_of(
    pair: ModelPair,
    top_k: int | Literal["all"],
    support: str = "full_head",
    *,
    regressors: str = "own_kind",
    native_layers: int = 0,
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> LinearMapper:
    """`random_mapper` in the shapes of a pair, on the target's device, in its dtype where none is named."""
    return random_mapper(
        geometry_shape(pair.source_geometry),
        geometry_shape(pair.target_geometry),
        top_k,
        support,
        regressors=regressors,
        native_layers=native_layers,
        dtype=dtype or pair.target.dtype,
        device=pair.target.device,
        seed=seed,
    )


def _built(config: Any, dtype: torch.dtype, device: torch.device, attention: str | None, seed: int) -> Any:
    """Built on no device first: transformers' own initialisation of billions of numbers takes minutes."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    model.to_empty(device=device)
    model.tie_weights()
    body = model.get_decoder()
    with torch.device(device):
        body.rotary_emb = type(body.rotary_emb)(config)  # its frequencies are no weights
    _fill(dict(model.named_parameters()), device, dtype, seed)
    _check_buffers(model)
    return model.eval().requires_grad_(False)


@torch.no_grad()
def _fill(
    parameters: Mapping[str, nn.Parameter], device: torch.device, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator(device).manual_seed(seed)
    noise = torch.randn(_BLOCK, generator=generator, device=device, dtype=torch.float32)
    for name, parameter in parameters.items():
        if parameter.ndim < 2:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        block = (noise / parameter.shape[-1] ** 0.5).to(dtype)
        flat = parameter.view(-1)
        whole = flat.numel() // _BLOCK * _BLOCK
        flat[:whole].view(-1, _BLOCK).copy_(block.expand(whole // _BLOCK, -1))
        flat[whole:].copy_(block[: flat.numel() - whole])


def _check_buffers(model: nn.Module) -> None:
    """Refuse buffers that nothing has filled: those of the rotary module alone are made again."""
    left: Sequence[str] = [name for name, _ in model.named_buffers() if "rotary_emb." not in name]
    if left:
        raise KvmapError(
            f"{type(model).__name__} keeps {left[0]} beside its weights, which a random model has no value "
            f"for; load the model itself"
        )
