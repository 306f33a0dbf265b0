"""A model that is in memory, with what kvmap needs to know about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from kvmap.models.alignment import Alignment
from kvmap.models.families import FAMILIES, Family
from kvmap.models.geometry import Geometry, geometry_from_config
from kvmap.models.identity import ModelIdentity, identity_in_memory
from kvmap.models.placement import execution_device
from kvmap.models.rope import Rotation
from kvmap.models.rotary import prepare_rotary, read_rotations
from kvmap.models.spec import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class LoadedModel:
    """A transformers model with its tokenizer, KV geometry and identity.

    Attributes:
        model: the whole model, head included; in eval mode.
        tokenizer: its tokenizer, or None for a model made in memory.
        geometry: the shape of its KV cache.
        identity: which model it is.
        spec: where it was loaded from; None for a model made in memory.
        alignment: of a source that is given the ids of a target with another tokenizer; its prefills read
            the text of these ids, and come out over the target's columns. None: it is given its own ids.
    """

    model: PreTrainedModel
    tokenizer: Any
    geometry: Geometry
    identity: ModelIdentity
    spec: ModelSpec | None = None
    alignment: Alignment | None = None
    body: nn.Module = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Find the decoder body, also within a multimodal wrapper."""
        self.body = self.model.get_decoder()

    @classmethod
    def from_model(
        cls, model: PreTrainedModel, tokenizer: Any = None, name: str = "in-memory model"
    ) -> LoadedModel:
        """Wrap a model that is in memory already; its rotation is not checked (see `check_rotation`).

        Raises:
            UnsupportedModel: if its KV cannot be transferred.
        """
        geometry = geometry_from_config(model.config)
        model.eval()
        return cls(model, tokenizer, geometry, identity_in_memory(name, model, tokenizer, geometry))

    @property
    def device(self) -> torch.device:
        """Where its inputs go."""
        return execution_device(self.body)

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in."""
        return self.model.dtype

    @property
    def text_config(self) -> Any:
        """The config of the text model, which is `model.config` unless that is a multimodal wrapper's."""
        return self.model.config.get_text_config(decoder=True)

    @property
    def family(self) -> Family:
        """The traits of its model type."""
        return FAMILIES[self.geometry.model_type]

    @property
    def layer_devices(self) -> tuple[torch.device, ...]:
        """The device that every decoder layer computes on; they differ under a device map.

        Weights that are offloaded rest elsewhere: what a layer caches never lies there.
        """
        layers: Any = self.body.layers
        return tuple(execution_device(layer) for layer in layers)

    def rotations(self, n_tokens: int) -> tuple[Rotation | None, ...]:
        """The rotation of every layer that the model itself uses for a prefill of `n_tokens`.

        Calls the model's rotary module as such a prefill does, so that dynamic and longrope models end in
        the state that a following forward continues from, and copies what the module then holds.

        Returns:
            One `Rotation` a layer; None for layers without rotation (NoPE).
        """
        prepare_rotary(self.body, self.text_config, self.geometry, n_tokens, self.dtype)
        return self.current_rotations()

    def current_rotations(self) -> tuple[Rotation | None, ...]:
        """The rotation of every layer as the last forward used it."""
        return read_rotations(self.body, self.text_config, self.geometry, self.family)
