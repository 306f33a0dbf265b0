"""Mapper, published cache and engine: what belongs together is let through, all else is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvmap.mappers import Mapper
from kvmap.mappers.base import FittedFor
from kvmap.mappers.identity import IdentityMapper
from kvmap.mappers.verdict import Verdict
from kvmap.models.identity import ModelIdentity
from kvmap.serving.compatibility import (
    EngineFacts,
    Incompatible,
    check_mapper,
    check_published,
    check_verdict,
    is_exact_copy,
)
from kvmap.serving.store import SharedFolder
from tests.serving.published_caches import ROTATIONS, SHAPE, SOURCE, publish

TARGET = replace(SOURCE, name="large", weights="x" * 64)


def facts(identity: ModelIdentity = TARGET, **other: object) -> EngineFacts:
    known = EngineFacts(identity, SHAPE, ("default", "default", None), ROTATIONS, "float32", 32)
    return replace(known, **other)


def mapper(source: ModelIdentity = SOURCE, target: ModelIdentity = TARGET) -> Mapper:
    made = IdentityMapper(SHAPE)
    made.fitted_for = FittedFor(source, target, "strip")
    return made


def test_parts_that_belong_together_pass(tmp_path: Path) -> None:
    facts().check()
    check_mapper(mapper(), facts())
    check_verdict(mapper(), None)
    check_published(publish(SharedFolder(tmp_path), range(40)), mapper())


@pytest.mark.parametrize("part", ["weights", "config", "tokenizer", "rope", "dtype"])
def test_another_target_or_source_is_named(tmp_path: Path, part: str) -> None:
    with pytest.raises(Incompatible, match=part) as caught:
        check_mapper(mapper(target=replace(TARGET, **{part: "other"})), facts())
    assert caught.value.cause == "mismatch"
    manifest = publish(SharedFolder(tmp_path), range(40), source=replace(SOURCE, **{part: "other"}))
    with pytest.raises(Incompatible, match=part) as caught:
        check_published(manifest, mapper())
    assert caught.value.cause == "mismatch"


def test_another_dtype_is_told_its_remedy(tmp_path: Path) -> None:
    with pytest.raises(Incompatible, match="start this engine with --dtype float32"):
        check_mapper(mapper(), facts(identity=replace(TARGET, dtype="bfloat16")))
    manifest = publish(SharedFolder(tmp_path), range(40), source=replace(SOURCE, dtype="bfloat16"))
    with pytest.raises(Incompatible, match="start the source with --dtype float32"):
        check_published(manifest, mapper())


def test_another_shape_is_named(tmp_path: Path) -> None:
    with pytest.raises(Incompatible, match="target shape"):
        check_mapper(mapper(), facts(shape=SHAPE[:2]))
    manifest = replace(publish(SharedFolder(tmp_path), range(40)), shape=SHAPE[:2])
    with pytest.raises(Incompatible, match="source shape"):
        check_published(manifest, mapper())


def test_a_mapper_that_names_no_models_is_refused() -> None:
    with pytest.raises(Incompatible) as caught:
        check_mapper(IdentityMapper(SHAPE), facts())
    assert caught.value.cause == "unknown_origin"


@pytest.mark.parametrize(
    ("verdict", "require", "allow", "passes"),
    [
        (None, None, (), True),
        (None, "go", (), False),
        ("go", "go", (), True),
        ("no_go", None, (), False),
        ("no_go", None, ("no_go",), True),
        ("try_mlp", None, (), False),
        ("not_enough_evidence", None, (), True),
        ("not_enough_evidence", "go", (), False),
    ],
)
def test_verdicts(verdict: str | None, require: str | None, allow: tuple[str, ...], passes: bool) -> None:
    judged = mapper()
    if verdict is not None:
        judged.verdict = Verdict(verdict, 0.5, 0.4, 0.6, 0.9, reasons=("too far off",))
    if passes:
        check_verdict(judged, require, allow)
        return
    with pytest.raises(Incompatible, match="too far off" if verdict else "no preflight") as caught:
        check_verdict(judged, require, allow)
    assert caught.value.cause == "verdict"


def test_an_engine_that_cannot_be_served_says_why() -> None:
    with pytest.raises(Incompatible, match=r"tensor_parallel_size=2.*dynamic") as caught:
        facts(refusals=("tensor_parallel_size=2",), rope_types=("dynamic", None, None)).check()
    assert caught.value.cause == "layout"


def test_only_the_identity_map_of_one_model_copies_exactly(tmp_path: Path) -> None:
    manifest = publish(SharedFolder(tmp_path), range(40))
    own = facts(identity=replace(SOURCE, name="elsewhere"))
    assert is_exact_copy(manifest, mapper(), own)
    assert not is_exact_copy(manifest, mapper(), facts())
    assert not is_exact_copy(manifest, mapper(), replace(own, dtype="bfloat16"))
    assert not is_exact_copy(manifest, mapper(), replace(own, rotations=(None, None, None)))
