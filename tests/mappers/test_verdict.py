"""A verdict beside a mapper: it comes back as it was written, and nowhere else."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvmap.errors import KvmapError, UnknownName
from kvmap.files import sha256_file
from kvmap.mappers import (
    Canary,
    IdentityMapper,
    InvalidVerdict,
    MapperFileError,
    Verdict,
    attach_verdict,
    load_mapper,
    read_verdict,
    save_mapper,
)
from tests.mappers.test_store import every_mapper, save_linear

VERDICT = Verdict(
    verdict="go",
    predicted_retention=0.97,
    low=0.93,
    high=1.0,
    min_retention=0.9,
    reasons=("head_local: lower end 0.93", "KL 0.04 nats, λ chosen"),
    canary=Canary(0.5, 8, 0.05),
    n_cases=60,
    n_pairs=12,
    measured={"kl": 0.04, "r2_value": 0.71},
)


@pytest.mark.parametrize(
    "verdict",
    [
        VERDICT,
        Verdict("not_enough_evidence", None, None, None, 0.9),
        replace(VERDICT, verdict="no_go", low=-math.inf, canary=Canary(math.inf), measured={"kl": math.inf}),
    ],
    ids=["go", "bare", "infinite"],
)
def test_it_comes_back_as_it_was_written(verdict: Verdict, tmp_path: Path) -> None:
    save_linear(tmp_path)
    attach_verdict(tmp_path, verdict)
    assert read_verdict(tmp_path) == verdict
    assert load_mapper(tmp_path)[0].verdict == verdict


def test_a_measure_that_is_no_number_comes_back_as_none_is(tmp_path: Path) -> None:
    save_linear(tmp_path)
    attach_verdict(tmp_path, replace(VERDICT, measured={"tail_growth": math.nan}))
    back = read_verdict(tmp_path)
    assert back is not None
    assert math.isnan(back.measured["tail_growth"])


def test_a_number_of_a_library_is_kept_as_the_number_it_is(tmp_path: Path) -> None:
    save_linear(tmp_path)
    measured: dict[str, Any] = {"kl": torch.tensor(0.25, dtype=torch.float64)}
    attach_verdict(tmp_path, replace(VERDICT, measured=measured))
    back = read_verdict(tmp_path)
    assert back is not None
    assert back.measured == {"kl": 0.25}


def test_no_verdict_is_none(tmp_path: Path) -> None:
    save_linear(tmp_path)
    assert read_verdict(tmp_path) is None
    assert load_mapper(tmp_path)[0].verdict is None


def test_it_leaves_the_mappers_own_files_as_they_are(tmp_path: Path) -> None:
    save_linear(tmp_path)
    before = {path.name: sha256_file(path) for path in tmp_path.iterdir()}
    attach_verdict(tmp_path, VERDICT)
    after = {path.name: sha256_file(path) for path in tmp_path.iterdir()}
    assert set(after) == {*before, "verdict.json"}
    assert {name: after[name] for name in before} == before


def test_another_verdict_replaces_the_first(tmp_path: Path) -> None:
    save_linear(tmp_path)
    attach_verdict(tmp_path, VERDICT)
    attach_verdict(tmp_path, replace(VERDICT, verdict="no_go"))
    back = read_verdict(tmp_path)
    assert back is not None
    assert (back.verdict, back.words) == ("no_go", "no-go")


def test_a_mapper_that_is_moved_or_cast_keeps_it(tmp_path: Path) -> None:
    save_linear(tmp_path)
    attach_verdict(tmp_path, VERDICT)
    assert load_mapper(tmp_path)[0].to("cpu", torch.bfloat16).verdict == VERDICT


def test_a_mapper_saved_in_the_place_of_another_does_not_inherit_its_verdict(tmp_path: Path) -> None:
    save_linear(tmp_path)
    attach_verdict(tmp_path, VERDICT)
    save_mapper(every_mapper()[3], tmp_path, {})
    assert read_verdict(tmp_path) is None


def test_the_verdict_of_another_mapper_is_refused(tmp_path: Path) -> None:
    save_linear(tmp_path / "one")
    save_mapper(every_mapper()[3], tmp_path / "other", {})
    attach_verdict(tmp_path / "one", VERDICT)
    (tmp_path / "one" / "verdict.json").rename(tmp_path / "other" / "verdict.json")
    for read in (read_verdict, load_mapper):
        with pytest.raises(MapperFileError, match="verdict of another mapper"):
            read(tmp_path / "other")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:-20], "is not JSON"),
        (lambda text: text.replace('"go"', '"no_go"'), "changed after it was written"),
        (lambda text: text.replace("0.97", "0.99"), "changed after it was written"),
        (lambda text: text.replace("kvmap-verdict", "kvmap-opinion"), "not a kvmap verdict"),
        (lambda text: text.replace('"schema_version": 1', '"schema_version": 2'), "schema_version 2"),
        (lambda text: "[]", "not a kvmap verdict"),
    ],
    ids=["cut", "verdict", "number", "format", "schema", "list"],
)
def test_an_altered_verdict_is_refused(change: Any, message: str, tmp_path: Path) -> None:
    save_linear(tmp_path)
    attach_verdict(tmp_path, VERDICT)
    path = tmp_path / "verdict.json"
    text = path.read_text()
    assert change(text) != text
    path.write_text(change(text))
    for read in (read_verdict, load_mapper):
        with pytest.raises(MapperFileError, match=rf"verdict\.json.*{message}.*preflight again"):
            read(tmp_path)


def test_a_verdict_without_its_mapper_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MapperFileError, match="save that first"):
        attach_verdict(tmp_path, VERDICT)
    save_linear(tmp_path)
    attach_verdict(tmp_path, VERDICT)
    (tmp_path / "mapper.safetensors").unlink()
    with pytest.raises(MapperFileError, match=r"mapper\.safetensors is missing"):
        read_verdict(tmp_path)


def test_a_mapper_without_tensors_has_one_as_well(tmp_path: Path) -> None:
    save_mapper(IdentityMapper(((2, 3),)), tmp_path, {})
    attach_verdict(tmp_path, VERDICT)
    assert load_mapper(tmp_path)[0].verdict == VERDICT


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_kl_nats": -0.1}, "max_kl_nats=-0.1"),
        ({"max_kl_nats": math.nan}, "max_kl_nats=nan"),
        ({"max_kl_nats": 1.0, "n_tokens": 0}, "n_tokens=0"),
        ({"max_kl_nats": 1.0, "share": 1.5}, "share=1.5"),
        ({"max_kl_nats": 1.0, "share": math.nan}, "share=nan"),
    ],
)
def test_a_canary_that_cannot_be_watched_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidVerdict, match=message):
        Canary(**settings)


def test_an_unknown_verdict_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match="Did you mean 'no_go'"):
        Verdict("nogo", None, None, None, 0.9)


def test_what_verdicts_raise_is_the_users_to_mend() -> None:
    assert issubclass(InvalidVerdict, KvmapError)


def test_what_is_written_is_json_for_anyone(tmp_path: Path) -> None:
    save_linear(tmp_path)
    attach_verdict(tmp_path, replace(VERDICT, measured={"kl": math.inf}))

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    record = json.loads((tmp_path / "verdict.json").read_text(), parse_constant=refuse)
    assert record["verdict"]["measured"] == {"kl": "inf"}
    assert record["mapper_sha256"] == sha256_file(tmp_path / "mapper.safetensors")
