"""What the stages of one run share: pair, store, and artifacts, each made when first asked for."""

from __future__ import annotations

import math
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvmap.artifacts import Artifact, ArtifactStore
from kvmap.config import Config, ModelConfig, TextConfig
from kvmap.data import TextSpec, TokenBlocks, read_texts, token_blocks
from kvmap.files import read_json, write_json
from kvmap.models.pair import ModelNotFound, ModelPair, ModelSpec, read_geometry
from kvmap.models.shapes import SHAPES, shape_geometry
from kvmap.models.spec import is_local
from kvmap.tracking import Run
from kvmap.transfer import TransferOptions

if TYPE_CHECKING:
    from kvmap.fit.pair_moments import PairMoments
    from kvmap.mappers import Mapper
    from kvmap.models.geometry import Geometry
    from kvmap.stages.calibrated import Calibrated

MAPPER, TABLES = "mapper", "tables.json"


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
        self.pair = ModelPair(
            self.specs["source"],
            self.specs["target"],
            alignment=cfg.pair.alignment,
            alignment_rule=cfg.pair.alignment_rule,
        )
        self.options = TransferOptions(**asdict(cfg.transfer), rope=cfg.rope.strategy)
        self._conditions: dict[str, dict[str, Any]] = {}

    @property
    def random_weights(self) -> bool:
        """Whether the run times models of random weights, and reads none."""
        return "benchmark" in self.cfg.stages and self.cfg.benchmark.random_weights

    @cached_property
    def geometries(self) -> dict[str, Geometry | None]:
        """Both models' geometry from their configs.

        Where nothing but a plan is asked, that of the shipped facts for a model whose config cannot be had;
        None for one that they do not know, if the pair file states its layers, heads and head_dim.
        """
        return {role: self._geometry(role) for role in ("source", "target")}

    def _geometry(self, role: str) -> Geometry | None:
        facts = self.models[role].geometry
        if self.random_weights:
            return shape_geometry(self.specs[role], n_positions=max(self.cfg.benchmark.lengths) + 1)
        try:
            return read_geometry(self.specs[role])
        except ModelNotFound:
            known = self.specs[role].id in SHAPES
            beyond_a_plan = set(self.cfg.stages) - {"plan", "economics", "report"}
            if beyond_a_plan or (not known and None in asdict(facts).values()):
                raise
            if known:
                self.run.note(
                    geometry={role: "of the shipped facts; the model's own config was out of reach"}
                )
                return shape_geometry(self.specs[role])
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

    def content(self, role: str) -> dict[str, str]:
        """A model's identity without its name: weights under another path give the same artifacts.

        Of a source that reads another tokenizer's ids, also by which rule its columns are laid over them.
        """
        identity = self.pair.source_identity if role == "source" else self.pair.target_identity
        content = {key: value for key, value in asdict(identity).items() if key != "name"}
        if role == "source" and self.pair.alignment is not None:
            content["alignment"] = self.pair.alignment.name
        return content

    def conditions(self, role: str) -> dict[str, Any]:
        """Which model, and what else its numbers depend on; reads no weights."""
        if role not in self._conditions:
            from kvmap.evaluation.conditions import spec_conditions

            self._conditions[role] = self.content(role) | spec_conditions(
                self.specs[role], self.pair.tokenizer
            )
        return self._conditions[role]

    @cached_property
    def calibrated(self) -> Calibrated:
        """Captures, moments and selection, each made when first asked for."""
        from kvmap.stages.calibrated import Calibrated

        return Calibrated(self)

    @property
    def moments(self) -> PairMoments:
        """Moments of both kinds on both splits."""
        return self.calibrated.moments

    @cached_property
    def mapper_artifact(self) -> Artifact:
        """The mapper in the store, fitted now if no run has done so before."""
        from kvmap.stages.build import content_settings

        spec = {
            "rows": self.calibrated.rows_spec,
            "rope": self.cfg.rope.strategy,
            "mapper": content_settings(self),
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

        built = build_mapper(self, self.cfg.mapper.kind)
        manifest = {
            "source": asdict(self.pair.source_identity),
            "target": asdict(self.pair.target_identity),
            "estimator": plain(asdict(self.cfg.mapper)),
            "selection": asdict(self.cfg.selection),
            "rope": self.cfg.rope.strategy,
            "native_head": self.calibrated.native_head,
            "calibration": {
                "source": self.tokens.source,
                "fingerprint": self.tokens.fingerprint,
                "n_rows": self.moments.n_rows("fit"),
                "token_stride": self.cfg.calibration.token_stride,
            },
        }
        if self.pair.alignment is not None:
            manifest["alignment"] = self.pair.alignment.name
        save_mapper(built.mapper, folder, manifest)
        write_json(folder / TABLES, built.tables)

    @property
    def mapper_tables(self) -> dict[str, list[dict[str, Any]]]:
        """What was noted while the mapper was fitted, by table; kept beside it, for runs that find it."""
        path = self.mapper_artifact.path / TABLES
        return read_json(path) if path.is_file() else {}


def plain(value: Any) -> Any:
    """Settings as JSON can hold them: an infinite number by its name."""
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _spec(model: ModelConfig) -> ModelSpec:
    """Where a model is. The revision that a pair file pins is the hub's: folders have none."""
    return ModelSpec(
        id=model.id,
        revision=None if is_local(model.id) else model.revision,
        gguf_file=model.gguf_file,
        dtype=model.dtype,
        device=model.device,
        device_map=model.device_map,
        max_memory=model.max_memory,
        offload_folder=model.offload_folder,
        attn_implementation=model.attn_implementation,
    )


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
