"""The tables of docs/families.md, measured on tiny random models: `python -m tests.models.catalogue`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from kvmap.fit.features import geometry_shape
from kvmap.mappers import IdentityMapper
from kvmap.models.capture import positions_from_mask, prefill
from kvmap.models.families import FAMILIES, REFUSED
from kvmap.models.geometry import Geometry, geometry_from_config
from kvmap.models.loaded import LoadedModel
from kvmap.transfer import transfer
from tests.models.test_windows import WINDOWED, W
from tests.models.wrappers import FIRST_TEXT_ID, WRAPPERS, build_wrapper, wrapper_config
from tests.tiny_random_models import FAMILIES as TINY
from tests.tiny_random_models import build, build_config, left_padding, random_ids

DOCUMENT = Path(__file__).parents[2] / "docs" / "families.md"
N_TOKENS = 30
"""Two and a half windows of `W` tokens, and fewer than any scaled model was "trained" on."""
_CELLS_MEASURED = 2
"""The last columns of the first table; they differ in their last digits from machine to machine."""


@dataclass(frozen=True)
class Table:
    """One table of the document.

    Attributes:
        name: of its marks in the document.
        head: titles of its columns.
        rows: its cells.
        n_measured: how many of the last columns are measured.
    """

    name: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    n_measured: int = 0

    def markdown(self) -> str:
        """As the document holds it."""
        lines = [self.head, tuple("---" for _ in self.head), *self.rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def identity_error(model: LoadedModel) -> float:
    """The largest difference of a logit between the model's own run and a hand-off to itself.

    Three contexts of unequal length, padded; one and four tokens held back, none and one read first.
    """
    ids = random_ids(3, N_TOKENS).clamp(min=FIRST_TEXT_ID)
    mask = left_padding(3, N_TOKENS)
    with torch.no_grad():
        own = model.model(
            input_ids=ids, attention_mask=mask, position_ids=positions_from_mask(mask), use_cache=False
        ).logits[:, -1]
    identity = IdentityMapper(geometry_shape(model.geometry))
    source = prefill(model, ids, mask)
    return max(
        float((transfer(source, identity, model, ids, mask, **options).logits - own).abs().max())
        for options in ({"hold_back": 1, "native_head": 1}, {"hold_back": 4, "native_head": 0})
    )


def supported(measured: bool = True) -> Table:
    """One row for each model type, over its tiny variants."""
    variants: dict[str, list[str]] = {}
    for name in TINY:
        variants.setdefault(build_config(name).model_type, []).append(name)
    windowed: dict[str, list[str]] = {}
    for name, (family, settings) in WINDOWED.items():
        windowed.setdefault(build_config(family, **settings).model_type, []).append(name)
    rows = []
    for model_type in sorted(FAMILIES):
        geometries = [geometry_from_config(build_config(name)) for name in variants[model_type]]
        kinds = {layer.rope_type for geometry in geometries for layer in geometry.layers}
        errors = ("", "")
        if measured:
            errors = (
                _worst(LoadedModel.from_model(TINY[name](), name=name) for name in variants[model_type]),
                _worst(_windowed(name) for name in windowed.get(model_type, ())),
            )
        rows.append(
            (
                f"`{model_type}`",
                _rotation(variants[model_type][0], FAMILIES[model_type].layout),
                ", ".join(sorted(kind for kind in kinds if kind)),
                _kv(variants[model_type][0]),
                _window(geometries, windowed.get(model_type, ())),
                *errors,
            )
        )
    known = ("model type", "rotation", "scalings tried", "KV heads", "windows")
    return Table("supported", (*known, "identity error", "past windows"), tuple(rows), _CELLS_MEASURED)


def wrappers(measured: bool = True) -> Table:
    """One row for each multimodal model."""
    rows = []
    for name in WRAPPERS:
        config = wrapper_config(name)
        geometry = geometry_from_config(config)
        error = _worst([LoadedModel.from_model(build_wrapper(name), name=name)]) if measured else ""
        window = f"yes, of {geometry.windows[0]} tokens" if geometry.windows else "no"
        rows.append((f"`{config.model_type}`", f"`{geometry.model_type}`", window, error))
    return Table("wrappers", ("wrapper", "text model", "windows", "identity error"), tuple(rows), 1)


def refused() -> Table:
    """Model types by the reason they are refused for."""
    reasons: dict[str, list[str]] = {}
    for model_type, reason in REFUSED.items():
        reasons.setdefault(reason, []).append(f"`{model_type}`")
    rows = tuple((", ".join(sorted(names)), reason) for reason, names in reasons.items())
    return Table("refused", ("model types", "why"), rows)


def filled(document: str, tables: Sequence[Table]) -> str:
    """The document with these tables between their marks.

    Raises:
        ValueError: a table without marks.
    """
    for table in tables:
        pattern = re.compile(rf"(<!-- table: {table.name} -->\n).*?(<!-- end -->)", re.DOTALL)
        text = table.markdown()
        document, n = pattern.subn(lambda found, text=text: f"{found[1]}{text}\n{found[2]}", document)
        if n != 1:
            raise ValueError(f"{DOCUMENT.name} has {n} places for table {table.name!r}: expected 1")
    versions = f"transformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]}"
    return re.sub(r"(?<=Verified against )transformers [\w.]+, torch [\w.]+", versions, document)


def facts(document: str, table: Table) -> list[tuple[str, ...]]:
    """The cells of a table in the document, those that are measured left out."""
    found = re.search(rf"<!-- table: {table.name} -->\n(.*?)\n<!-- end -->", document, re.DOTALL)
    assert found is not None, table.name
    lines = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in found[1].split("\n")]
    return [line[: len(table.head) - table.n_measured] for line in lines[2:]]


def _worst(models: Any) -> str:
    errors = [identity_error(model) for model in models]
    return f"{max(errors):.0e}" if errors else "–"


def _windowed(name: str) -> LoadedModel:
    family, settings = WINDOWED[name]
    return LoadedModel.from_model(build(family, n_layers=3, **settings), name=name)


def _rotation(name: str, layout: str) -> str:
    model = LoadedModel.from_model(TINY[name](), name=name)
    rotations = [rotation for rotation in model.rotations(8) if rotation is not None]
    pairs = {"half": "halves", "interleaved": "interleaved"}[layout]
    partial = 2 * len(rotations[0].inv_freq) < model.geometry.head_dim
    some = len(rotations) < model.geometry.n_layers
    return pairs + (", part of the channels" if partial else "") + (", not in all layers" if some else "")


def _kv(name: str) -> str:
    config = build_config(name)
    return "grouped" if getattr(config, "num_key_value_heads", None) else "as many as query heads"


def _window(geometries: Sequence[Geometry], windowed: Sequence[str]) -> str:
    if not windowed:
        return "none"
    family, settings = WINDOWED[windowed[0]]
    layers = geometry_from_config(build_config(family, n_layers=3, **settings)).layers
    where = "all layers" if all(layer.window == W for layer in layers) else "layers by type"
    always = all(geometry.windows for geometry in geometries)
    return where if always else f"{where}, where the config sets one"


def tables(measured: bool = True) -> Iterator[Table]:
    """All of them, in the order of the document."""
    yield supported(measured)
    yield wrappers(measured)
    yield refused()


def main() -> None:
    """Write the document anew."""
    text = filled(DOCUMENT.read_text(encoding="utf-8"), list(tables()))
    DOCUMENT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
