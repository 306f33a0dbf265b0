"""The configuration tree: everything shipped composes and is right; every mistake is named, all at once."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvmap import config
from kvmap.config import Config, ConfigError, register, unknown_keys, validate

ROOT = Path(__file__).resolve().parent.parent
CONF = ROOT / "conf"
GROUPS = {
    folder.name: sorted(file.stem for file in folder.glob("*.yaml"))
    for folder in sorted(CONF.iterdir())
    if folder.is_dir() and folder.name not in ("hydra", "local", "__pycache__")
}
# Values that a shipped option leaves to the user on purpose.
REQUIRED = {
    "pair=custom": ["pair.source.id=a", "pair.target.id=b"],
    "calibration=jsonl": ["calibration.data.path=a.jsonl"],
    "evaluation=jsonl": ["evaluation.perplexity.data.path=a.jsonl"],
    "experiment=first_transfer": ["calibration.data.path=a.jsonl", "evaluation.perplexity.data.path=a.jsonl"],
}


def composed(*overrides: str) -> Config:
    """The typed configuration, as `python -m kvmap.run <overrides>` would get it."""
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", overrides=list(overrides))
    cfg.outputs = "outputs"
    typed = OmegaConf.to_object(cfg)
    assert isinstance(typed, Config)
    return typed


@pytest.mark.parametrize("option", [f"{group}={name}" for group, names in GROUPS.items() for name in names])
def test_every_shipped_option_composes_and_is_right(option: str) -> None:
    assert validate(composed(option, *REQUIRED.get(option, []))) == []


def test_the_default_is_the_shipped_family() -> None:
    cfg = composed()
    assert (cfg.pair.name, cfg.pair.source.id, cfg.pair.target.id) == (
        "tiny",
        "zoo:tiny-small",
        "zoo:tiny-large",
    )
    assert cfg.study == "tiny"


@pytest.mark.parametrize("kind", GROUPS["mapper"])
def test_every_mapper_has_top_k_and_ridge_lambda(kind: str) -> None:
    cfg = composed(f"mapper={kind}", "mapper.top_k=2", "mapper.ridge_lambda=1e-4")
    assert (cfg.mapper.top_k, cfg.mapper.ridge_lambda) == (2, 1e-4)


def test_slurm_launcher_composes() -> None:
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", overrides=["hydra/launcher=slurm"], return_hydra_config=True)
    assert "SlurmLauncher" in cfg.hydra.launcher._target_


MISTAKES = {
    "direction=sideways": "direction",
    "stages=[fitt]": "did you mean 'fit'",
    "stages=[]": "stages",
    "mapper.ridge_lambda=-1": "mapper.ridge_lambda=-1.0",
    "mapper.ridge_lambda=nan": "mapper.ridge_lambda",
    "mapper.top_k=0": "mapper.top_k=0",
    "mapper.top_k=some": "mapper.top_k='some'",
    "mapper.support=half": "mapper.support",
    "selection.rule=best": "selection.rule",
    "rope.strategy=none": "rope.strategy",
    "transfer.hold_back=0": "transfer.hold_back",
    "transfer.native_head=-1": "transfer.native_head",
    "transfer.native_head=256": "no calibration rows",
    "calibration.held_out_share=1": "calibration.held_out_share",
    "calibration.token_stride=0": "calibration.token_stride",
    "calibration.data.kind=wold": "did you mean 'world'",
    "calibration.data.kind=hf": "calibration.data.name",
    "evaluation.arms=[mapped,no_context]": "'target' is always needed",
    "evaluation.arms=[target,mapped,no_context,mapped]": "stands twice",
    "benchmark.lengths=[]": "benchmark.lengths",
    "benchmark.lengths=[1]": "benchmark.lengths",
    "tracking.backend=mlflow": "tracking.backend",
    "pair.source.dtype=int3": "pair.source.dtype",
    "study=a/b": "study",
    "threads=0": "threads",
    "evaluation.perplexity.prefix_tokens=2": "nothing would be mapped",
    "benchmark.lengths=[2,64]": "nothing would be mapped",
    "evaluation.world.kinds=[wher]": "did you mean 'where'",
    "evaluation.jsonl.paths=[/no/such.jsonl]": "no file /no/such.jsonl",
    "calibration.sequential=true": "holds both models in memory",
}


@pytest.mark.parametrize(("override", "named"), MISTAKES.items())
def test_a_mistake_is_named(override: str, named: str) -> None:
    mistakes = validate(composed(override))
    assert any(named in mistake for mistake in mistakes)
    assert all(override.partition("=")[0].partition(".")[0] in mistake for mistake in mistakes)


def test_all_mistakes_come_at_once() -> None:
    mistakes = validate(
        composed("mapper.ridge_lambda=-1", "mapper.top_k=0", "stages=[fitt]", "transfer.hold_back=0")
    )
    assert len(mistakes) == 4
    message = str(ConfigError(mistakes))
    assert message.startswith("4 mistakes")
    assert all(mistake in message for mistake in mistakes)


@pytest.mark.parametrize(
    "override", ["mapper.topk=3", "pair=nobody", "mapper.ridge_lambda=abc", "mapper=gbm"]
)
def test_hydra_refuses_what_the_schema_does_not_know(override: str) -> None:
    with pytest.raises((HydraException, OmegaConfBaseException)):
        composed(override)


def test_an_added_key_that_nothing_reads_is_named() -> None:
    assert [*unknown_keys({"seed": 1, "foo": 1, "mapper": {"bla": 2, "top_k": 1}}, Config)] == [
        "foo: nothing reads this key; expected one of " + ", ".join(sorted(Config.__dataclass_fields__)),
        "mapper.bla: nothing reads this key; expected one of "
        + ", ".join(sorted(config.MapperConfig.__dataclass_fields__)),
    ]


def test_configuration_knows_nothing_of_torch() -> None:
    code = "import sys, kvmap.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_names_in_the_schema_are_those_of_the_code() -> None:
    from kvmap import data, tracking
    from kvmap.evaluation import arms
    from kvmap.fit import linear, moments, selection, view
    from kvmap.mappers import mapper_kinds
    from kvmap.zoo import world

    assert set(config.MAPPER_KINDS) == set(mapper_kinds())
    assert config.ARMS == arms.ARMS
    assert config.SUPPORTS == linear.SUPPORTS
    assert config.SELECTION_RULES == selection.RULES
    assert config.ROPE_STRATEGIES == view.ROPE_STRATEGIES
    assert set(config.TEXT_KINDS) == set(data.texts.READERS)
    assert config.PACKINGS == data.blocks.PACKINGS
    assert set(config.TRACKING_BACKENDS) == set(tracking.BACKENDS)
    assert moments.SPLITS == ("fit", "held_out")
    assert config.WORLD_KINDS == world.KINDS


def test_the_wheel_carries_every_package_and_group() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    code = {".".join(path.relative_to(ROOT).parent.parts) for path in (ROOT / "kvmap").rglob("*.py")}
    conf = {".".join(("kvmap", *path.relative_to(ROOT).parent.parts)) for path in CONF.rglob("*.yaml")}
    assert code | conf | {"kvmap.conf"} <= listed | {"kvmap.conf.local"}


def test_outputs_are_anchored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KVMAP_OUTPUTS", raising=False)
    assert config.outputs_root() == str(ROOT / "outputs")
    monkeypatch.setenv("KVMAP_OUTPUTS", str(tmp_path / "elsewhere"))
    assert config.outputs_root() == str(tmp_path / "elsewhere")


def test_starts_in_one_second_get_directories_of_their_own() -> None:
    """The directory's name ends in digits that each process draws; its time alone would not do."""
    register()
    names = set()
    for _ in range(24):
        config.start_token.cache_clear()  # each draw stands for a process of its own
        with initialize_config_dir(str(CONF), version_base="1.3"):
            cfg = compose("config", overrides=["study=one"], return_hydra_config=True)
        for directory in (cfg.hydra.run.dir, cfg.hydra.sweep.dir):
            assert directory.endswith(config.start_token())
        names.add(Path(cfg.hydra.run.dir).name.rpartition("-")[2])
    assert len(names) == 24
