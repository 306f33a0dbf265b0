"""A numerical check that the rotation read off a model is the one it applies to its keys."""

from __future__ import annotations

import torch
from torch import Tensor

from kvmap.models.cache import cache_argument, from_transformers, to_transformers
from kvmap.models.geometry import UnsupportedModel
from kvmap.models.loaded import LoadedModel

N_TOKENS = 48
_FARTHEST = 4096
# Largest ‖k_t − k̄‖/‖k̄‖ over positions and heads that rounding explains. float32 angles are exact by
# construction, so what remains is the model's own arithmetic through all layers. In 16 bits cos, sin and
# keys are rounded to 8 or 11 bits and hidden states of different positions drift apart by rounding, layer
# upon layer (0.007 in bfloat16 over the 30 layers of SmolLM2-135M). A rotation that is not the model's leaves
# tenths.
TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.06}


@torch.no_grad()
def check_rotation(loaded: LoadedModel, n_tokens: int = N_TOKENS) -> tuple[float, ...]:
    """Refuse a model whose stripped keys still depend on position.

    One token id repeated has, in a decoder that knows positions from rotation only, the same hidden state
    at every position of every layer: attention averages equal values whatever its weights are. Before
    rotation its keys are constant, so after stripping they must be. Positions are spread up to the model's
    maximum (at most 4,096), where a forgotten scaling shows.

    Args:
        loaded: the model.
        n_tokens: length of the constant sequence.

    Returns:
        Per layer the largest ``‖k_t − k̄‖ / ‖k̄‖`` over positions and heads.

    Raises:
        UnsupportedModel: naming the first layer above the tolerance of the model's dtype, or a layer whose
            keys have other heads or channels than the config says.
    """
    farthest = max(n_tokens, min(loaded.geometry.max_positions, _FARTHEST)) - 1
    # Not past the maximum: a dynamic model would keep the frequencies of that length for later contexts.
    positions = torch.linspace(0, farthest, n_tokens, device=loaded.device).round().long()[None]
    token = min(1000, loaded.geometry.vocab_size // 2)
    ids = torch.full_like(positions, token)
    mask = torch.ones_like(positions)
    cache = to_transformers(None)
    loaded.body(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        use_cache=True,
        **{cache_argument(loaded.body): cache},
    )
    kv = from_transformers(cache, positions, mask, loaded.current_rotations())
    for layer, (keys, expected) in enumerate(zip(kv.keys, loaded.geometry.layers, strict=True)):
        got = (keys.shape[1], keys.shape[3])
        if got != (expected.n_kv_heads, expected.head_dim):
            raise UnsupportedModel(
                f"{loaded.identity.name}: layer {layer} caches (KV heads, head_dim) = {got}, but its config "
                f"says {(expected.n_kv_heads, expected.head_dim)}"
            )
    deviations = tuple(_deviation(keys) for keys in kv.strip().keys)
    tolerance = TOLERANCE.get(loaded.dtype, TOLERANCE[torch.bfloat16])
    for layer, deviation in enumerate(deviations):
        if not deviation <= tolerance:
            raise UnsupportedModel(
                f"{loaded.identity.name} ({loaded.geometry.model_type}): stripped keys of layer {layer} "
                f"depend on position (relative deviation {deviation:.3g}, at most {tolerance:g} expected in "
                f"{loaded.dtype}), so kvmap does not take off the rotation this model applies; see 'Add a "
                "model family' in CONTRIBUTING.md"
            )
    return deviations


def _deviation(keys: Tensor) -> float:
    """Largest relative distance of a key from its head's mean over positions; keys (1, heads, tokens,
    head_dim).
    """
    keys = keys.float()
    mean = keys.mean(dim=2, keepdim=True)
    return ((keys - mean).norm(dim=-1) / mean.norm(dim=-1)).max().item()
