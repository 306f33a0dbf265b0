"""Every study's folder is whole, and every point of its sweep is a right configuration."""

from __future__ import annotations

import ast
import copy
import os
import re
from functools import cache
from itertools import product
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from kvmap.config import register, validate

ROOT = Path(__file__).resolve().parents[2]
CONF, EXPERIMENTS = ROOT / "conf", ROOT / "experiments"
FOLDERS = sorted(path.name for path in EXPERIMENTS.iterdir() if (path / "analyse.py").is_file())
ON_THE_FAMILY = (
    "source_layers",
    "rope_strategy",
    "ridge_lambda",
    "calibration_size",
    "calibration_domain",
    "linear_vs_mlp",
    "predicting_retention",
    "hold_back",
    "attention_sinks",
    "native_features",
    "direction",
)
GIVEN_BY_RUN_SH = {"calibration_domain": ["calibration.data.path=texts.jsonl"]}
GROUPS = {folder.name for folder in CONF.iterdir() if folder.is_dir()}


@cache
def composed(*overrides: str):
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides=list(overrides), return_hydra_config=True)


def points(study: str) -> dict[str, list[str]]:
    """What is swept, and its values as text."""
    swept = OmegaConf.to_container(
        composed(f"experiment={study}", *GIVEN_BY_RUN_SH.get(study, [])).hydra.sweeper.params, resolve=False
    )
    parser = OverridesParser.create()
    found = {}
    for name, text in swept.items():
        override = parser.parse_override(f"{name}={text}")
        sweep = override.sweep_string_iterator() if override.is_sweep_override() else [text]
        found[name] = [str(value) for value in sweep]
    return found


def settings(study: str, chosen: dict[str, str]):
    """The typed configuration of one point: groups are composed once, single settings put on top."""
    groups = [f"{name}={value}" for name, value in chosen.items() if name in GROUPS]
    cfg = copy.deepcopy(composed(f"experiment={study}", *GIVEN_BY_RUN_SH.get(study, []), *groups))
    OmegaConf.set_struct(cfg, False)
    del cfg["hydra"]
    cfg.outputs = "outputs"
    parser = OverridesParser.create()
    for name, value in chosen.items():
        if name not in GROUPS:
            OmegaConf.update(cfg, name, parser.parse_override(f"{name}={value}").value(), merge=True)
    return OmegaConf.to_object(cfg)


@pytest.mark.parametrize("study", FOLDERS)
def test_a_study_has_its_command_its_analysis_its_result_and_says_what_it_found(study):
    folder = EXPERIMENTS / study
    assert os.access(folder / "run.sh", os.X_OK)
    assert (folder / "results.csv").stat().st_size > 0
    assert (folder / "figure.png").stat().st_size > 0
    readme = (folder / "README.md").read_text()
    assert f"experiments/{study}/run.sh" in readme
    assert f"python experiments/{study}/analyse.py" in readme
    for picture in re.findall(r"!\[[^]]*\]\(([^)]+)\)", readme):
        assert (folder / picture).is_file()


@pytest.mark.parametrize("study", [study for study in ON_THE_FAMILY if study in FOLDERS])
def test_a_study_says_question_published_expected_found_and_why(study):
    readme = (EXPERIMENTS / study / "README.md").read_text()
    for part in (
        "**Question.**",
        "**Published.**",
        "**Expected.**",
        "## Found",
        "## Why",
        "pair=qwen3_14b_32b",
    ):
        assert part in readme, part


@pytest.mark.parametrize("study", FOLDERS)
def test_an_analysis_reads_run_directories_only(study):
    """It loads no model and no store, and it is given its directories."""
    tree = ast.parse((EXPERIMENTS / study / "analyse.py").read_text())
    imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    heavy = ("kvmap.models", "kvmap.mappers", "kvmap.artifacts", "kvmap.transfer", "torch", "transformers")
    assert not [name for name in imported if name.startswith(heavy)]


@pytest.mark.parametrize("study", ON_THE_FAMILY)
def test_the_sweep_covers_all_ordered_pairs_and_three_seeds_with_right_settings(study):
    swept = points(study)
    directed = list(product(swept.pop("pair"), swept.pop("direction")))
    assert len(swept.pop("calibration.data.seed")) == 3
    ends = [(pair_file(pair), direction) for pair, direction in directed]
    assert (
        len({(p.source.id, p.target.id) if d == "up" else (p.target.id, p.source.id) for p, d in ends}) == 12
    )
    for chosen in product(*swept.values()):
        point = dict(zip(swept, chosen, strict=True))
        assert validate(settings(study, point)) == [], point


def pair_file(name: str):
    return OmegaConf.load(CONF / "pair" / f"{name}.yaml")
