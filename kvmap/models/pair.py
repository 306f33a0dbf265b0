"""A source and a target model, of one tokenizer or aligned, loaded when first needed."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any, Literal

import torch

from kvmap.errors import UnknownName
from kvmap.models.alignment import ALIGNMENT_RULES, Alignment, AlignmentError
from kvmap.models.geometry import Geometry
from kvmap.models.identity import ModelIdentity
from kvmap.models.load import load_config, load_model, load_tokenizer, read_geometry, read_identity
from kvmap.models.loaded import LoadedModel
from kvmap.models.spec import ModelNotFound, ModelSpec
from kvmap.models.tokenization import TokenizerMismatch, check_tokenizers

__all__ = [
    "LoadedModel",
    "ModelIdentity",
    "ModelNotFound",
    "ModelPair",
    "ModelSpec",
    "TokenizerMismatch",
    "check_tokenizers",
    "load_config",
    "load_model",
    "load_tokenizer",
    "read_geometry",
    "read_identity",
]

Side = Literal["source", "target"]

ALIGNMENTS = ("refuse", "spans")


class ModelPair:
    """The two models of a transfer.

    Geometries, tokenizers and identities are known from files alone; weights are read at the first use of
    `source` or `target` and given up by `release`, so that a machine need not hold both at once.
    """

    def __init__(
        self,
        source: ModelSpec | LoadedModel,
        target: ModelSpec | LoadedModel,
        *,
        alignment: str = "refuse",
        alignment_rule: str = "last",
    ) -> None:
        """Two models.

        Args:
            source, target: a spec to load, or a model in memory (which `release` leaves to its owner).
            alignment: what becomes of two different tokenizers. "refuse": an error. "spans", experimental:
                the source is given the target's ids, and reads their text with its own tokenizer.
            alignment_rule: which source tokens a target token takes, see `kvmap.models.alignment`.

        Raises:
            UnknownName: another alignment or rule.
        """
        if alignment not in ALIGNMENTS:
            raise UnknownName("alignment", alignment, ALIGNMENTS)
        if alignment_rule not in ALIGNMENT_RULES:
            raise UnknownName("alignment rule", alignment_rule, ALIGNMENT_RULES)
        self._wanted = (alignment, alignment_rule)
        self._aligned: Alignment | None = None
        self._given: dict[Side, ModelSpec | LoadedModel] = {"source": source, "target": target}
        self._loaded: dict[Side, LoadedModel] = {}
        self._tokenizers: dict[Side, Any] = {}
        self._identities: dict[Side, ModelIdentity] = {}
        self._geometries: dict[Side, Geometry] = {}
        self._checked = False

    @property
    def source(self) -> LoadedModel:
        """The model whose cache exists."""
        return self._load("source")

    @property
    def target(self) -> LoadedModel:
        """The model that is to continue."""
        return self._load("target")

    @property
    def source_identity(self) -> ModelIdentity:
        """Which model the source is; reads no weights."""
        return self._identity("source")

    @property
    def target_identity(self) -> ModelIdentity:
        """Which model the target is; reads no weights."""
        return self._identity("target")

    @property
    def source_geometry(self) -> Geometry:
        """The source's KV geometry; reads no weights."""
        return self._geometry("source")

    @property
    def target_geometry(self) -> Geometry:
        """The target's KV geometry; reads no weights."""
        return self._geometry("target")

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of all ids: of both models, or of aligned ones the target's.

        None if neither in-memory model was given one.
        """
        tokenizer = self._tokenizer("target")
        return self._tokenizer("source") if tokenizer is None else tokenizer

    def check(self) -> None:
        """Refuse, before any weights load, models that kvmap cannot use or that differ in their tokenizers.

        Raises:
            ModelNotFound: if files cannot be had.
            UnsupportedModel: naming model type, layer and reason.
            TokenizerMismatch: naming the first difference, where different tokenizers are to be refused.
            AlignmentError: tokenizers that cannot be aligned.
        """
        if self._checked:
            return
        self._geometry("source")
        self._geometry("target")
        source, target = self._tokenizer("source"), self._tokenizer("target")
        alignment, rule = self._wanted
        if source is not None and target is not None:
            try:
                check_tokenizers(source, target)
            except TokenizerMismatch:
                if alignment == "refuse":
                    raise
                self._aligned = Alignment(source, target, rule)
        elif alignment != "refuse":
            raise AlignmentError(
                f"pair.alignment={alignment} needs both tokenizers, and a model in memory was given none: "
                "LoadedModel.from_model(model, tokenizer)"
            )
        self._checked = True

    @property
    def alignment(self) -> Alignment | None:
        """How the source reads the target's ids; None where both read the same. Reads no weights."""
        if self._wanted[0] == "refuse":
            return None
        self.check()
        return self._aligned

    def release(self, side: Side) -> None:
        """Give up the weights of one side; the next use loads them again. A model given in memory stays."""
        if self._loaded.pop(side, None) is None:
            return
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _load(self, side: Side) -> LoadedModel:
        given = self._given[side]
        if isinstance(given, LoadedModel):
            return given if self._wanted[0] == "refuse" else self._as_read(side, given)
        self.check()
        if side not in self._loaded:
            other: Side = "target" if side == "source" else "source"
            # one spec on both sides, as in the identity oracle, is one model in memory
            shared = self._loaded.get(other) if self._given[other] == given else None
            loaded = shared if shared is not None else load_model(given)
            self._loaded[side] = self._as_read(side, loaded)
        return self._loaded[side]

    def _as_read(self, side: Side, model: LoadedModel) -> LoadedModel:
        """The model, told of the ids it will be given where these are another tokenizer's."""
        aligned = self.alignment
        return model if side == "target" or aligned is None else replace(model, alignment=aligned)

    def _identity(self, side: Side) -> ModelIdentity:
        given = self._given[side]
        if isinstance(given, LoadedModel):
            return given.identity
        if side not in self._identities:
            self._identities[side] = read_identity(given)
        return self._identities[side]

    def _geometry(self, side: Side) -> Geometry:
        given = self._given[side]
        if isinstance(given, LoadedModel):
            return given.geometry
        if side not in self._geometries:
            self._geometries[side] = read_geometry(given)
        return self._geometries[side]

    def _tokenizer(self, side: Side) -> Any:
        given = self._given[side]
        if isinstance(given, LoadedModel):
            return given.tokenizer
        if side not in self._tokenizers:
            self._tokenizers[side] = load_tokenizer(given)
        return self._tokenizers[side]
