"""What the stages of one run share: pair, store, and artifacts, each made when first asked for."""

from __future__ import annotations

from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvmap.artifacts import Artifact, ArtifactStore
from kvmap.config import Config, ModelConfig, TextConfig
from kvmap.data import TextSpec, TokenBlocks, read_texts, token_blocks
from kvmap.files import load_tensors, read_json, save_tensors, write_json
from kvmap.models.pair import ModelNotFound, ModelPair, ModelSpec, read_geometry
from kvmap.tracking import Run
from kvmap.transfer import TransferOptions

if TYPE_CHECKING:
    from kvmap.fit.moments import PairMoments
    from kvmap.fit.selection import ProbeResult
    from kvmap.mappers import Mapper
    from kvmap.models.geometry import Geometry

MOMENTS, MAPPER = "moments", "mapper"


class Context:
    """One run's configuration, record, store, models and artifacts.

    Attributes:
        cfg: the typed configuration; stages turn its parts into plain arguments.
        run: the record the stages log to.
        store: artifacts shared by all runs under `outputs`.
        pair: the two models, loaded on first use.
        models: their configuration by the part they play, which `direction=down` exchanges.
        keys: where in the configuration each of them stands.
    """

    def __init__(self, cfg: Config, run: Run) -> None:
        self.cfg = cfg
        self.run = run
        self.store = ArtifactStore(Path(cfg.outputs) / "artifacts")
        self.keys = {"source": "pair.source", "target": "pair.target"}
        source, target = cfg.pair.source, cfg.pair.target
        if cfg.direction == "down":
            source, target = target, source
            self.keys = {"source": "pair.target", "target": "pair.source"}
        self.models: dict[str, ModelConfig] = {"source": source, "target": target}
        self.specs = {role: _spec(model) for role, model in self.models.items()}
        self.pair = ModelPair(self.specs["source"], self.specs["target"])
        self.options = TransferOptions(
            hold_back=cfg.transfer.hold_back, native_head=cfg.transfer.native_head, rope=cfg.rope.strategy
        )

    @cached_property
    def geometries(self) -> dict[str, Geometry | None]:
        """Both models' geometry from their configs.

        None for a model whose config cannot be had, where nothing but a plan is asked and the pair file
        states the facts a plan needs.
        """
        return {role: self._geometry(role) for role in ("source", "target")}

    def _geometry(self, role: str) -> Geometry | None:
        facts = self.models[role].geometry
        try:
            return read_geometry(self.specs[role])
        except ModelNotFound:
            if set(self.cfg.stages) - {"plan", "report"} or None in asdict(facts).values():
                raise
            self.run.note(
                geometry={role: "as the pair file states it; the model's own config was out of reach"}
            )
            return None

    @cached_property
    def tokens(self) -> TokenBlocks:
        """The calibration text, as tokens."""
        calibration = self.cfg.calibration
        spec = text_spec(calibration.data, calibration.sequence_length)
        blocks = token_blocks(
            read_texts(spec),
            self.pair.tokenizer,
            n_sequences=calibration.n_sequences,
            length=calibration.sequence_length,
            packing=calibration.packing,
            skip=calibration.data.skip or 0,
            source=spec.describe(),
        )
        self.run.note(
            calibration={"source": blocks.source, "fingerprint": blocks.fingerprint, "n_read": blocks.n_read}
        )
        return blocks

    @cached_property
    def moments_spec(self) -> dict[str, Any]:
        """Exactly what determines the moments; their key in the store is its hash."""
        calibration = self.cfg.calibration
        return {
            "source": _content(self.pair.source_identity),
            "target": _content(self.pair.target_identity),
            "tokens": self.tokens.fingerprint,
            "held_out_share": calibration.held_out_share,
            "split_seed": calibration.seed,
            "token_stride": calibration.token_stride,
            "native_head": self.cfg.transfer.native_head,
            "rope": "coupled" if self.cfg.rope.strategy == "coupled" else "strip",
            "product_dtype": calibration.product_dtype,
        }

    @cached_property
    def moments_artifact(self) -> Artifact:
        """The moments in the store, accumulated now if no run has done so before."""
        return self.store.get_or_build(MOMENTS, self.moments_spec, self._build_moments)

    @cached_property
    def moments(self) -> PairMoments:
        """Moments of both kinds on both splits."""
        from kvmap.fit.moments import PairMoments

        folder = self.moments_artifact.path
        return PairMoments.from_tensors(
            load_tensors(folder / "moments.safetensors"), read_json(folder / "moments.json")
        )

    def _build_moments(self, folder: Path) -> None:
        from kvmap.fit.calibrate import CalibrationOptions, accumulate_moments

        calibration = self.cfg.calibration
        budget = calibration.memory_budget_gib
        fit, held_out = self.tokens.split(calibration.held_out_share, calibration.seed)
        moments = accumulate_moments(
            self.pair,
            self.tokens.input_ids,
            {"fit": fit, "held_out": held_out},
            CalibrationOptions(
                native_head=self.cfg.transfer.native_head,
                token_stride=calibration.token_stride,
                rope=self.cfg.rope.strategy,
                batch_size=calibration.batch_size,
                product_dtype=calibration.product_dtype,
                sequential=calibration.sequential,
                budget_bytes=None if budget is None else int(budget * 2**30),
            ),
            spill_folder=folder / "spill",
        )
        tensors, settings = moments.to_tensors()
        save_tensors(folder / "moments.safetensors", tensors)
        write_json(folder / "moments.json", settings)

    @cached_property
    def probes(self) -> ProbeResult:
        """Head-matched probes of every source layer for every target layer."""
        from kvmap.fit.selection import probe

        return probe(self.moments)

    @cached_property
    def mapper_artifact(self) -> Artifact:
        """The mapper in the store, fitted now if no run has done so before."""
        from kvmap.stages.build import content_settings

        spec = {
            "moments": self.moments_spec,
            "rope": self.cfg.rope.strategy,
            "mapper": content_settings(self.cfg, len(self.pair.source_geometry.layers)),
        }
        return self.store.get_or_build(MAPPER, spec, self._build_mapper)

    @cached_property
    def mapper(self) -> Mapper:
        """The mapper of this run, checked against both models."""
        from kvmap.mappers import check_identities, load_mapper

        mapper, manifest = load_mapper(self.mapper_artifact.path)
        check_identities(manifest, self.pair.source_identity, self.pair.target_identity)
        return mapper

    def _build_mapper(self, folder: Path) -> None:
        from kvmap.mappers import save_mapper
        from kvmap.stages.build import build_mapper

        mapper = build_mapper(self, self.cfg.mapper.kind)
        manifest = {
            "source": asdict(self.pair.source_identity),
            "target": asdict(self.pair.target_identity),
            "estimator": asdict(self.cfg.mapper),
            "selection": asdict(self.cfg.selection),
            "rope": self.cfg.rope.strategy,
            "native_head": self.cfg.transfer.native_head,
            "calibration": {
                "source": self.tokens.source,
                "fingerprint": self.tokens.fingerprint,
                "n_rows": self.moments.tables["key", "fit"].n_rows,
                "token_stride": self.cfg.calibration.token_stride,
            },
        }
        save_mapper(mapper, folder, manifest)


def _spec(model: ModelConfig) -> ModelSpec:
    return ModelSpec(
        id=model.id,
        revision=model.revision,
        gguf_file=model.gguf_file,
        dtype=model.dtype,
        device=model.device,
        device_map=model.device_map,
        attn_implementation=model.attn_implementation,
    )


def _content(identity: Any) -> dict[str, str]:
    """An identity without the model's name: the same weights under another path give the same artifacts."""
    return {key: value for key, value in asdict(identity).items() if key != "name"}


def text_spec(text: TextConfig, length: int) -> TextSpec:
    """The plain description of a corpus that a configuration node stands for.

    Args:
        text: the node.
        length: tokens of the sequences wanted; the world writes its stories at least so long.
    """
    return TextSpec(
        kind=text.kind,
        path=text.path,
        field=text.field,
        where=text.where or None,
        name=text.name,
        config=text.config,
        split=text.split,
        revision=text.revision,
        seed=text.seed,
        min_words=length,
    )
