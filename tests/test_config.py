"""The configuration tree: everything shipped composes and is right; every mistake is named, all at once."""

from __future__ import annotations

import copy
import importlib
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvmap import config
from kvmap.config import Config, ConfigError, register, schema, unknown_keys, validate

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
    "evaluation=local": ["evaluation.jsonl.folder=."],
    "experiment=calibration_domain": ["calibration.data.path=a.jsonl"],
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


@cache
def _of_options(*options: str) -> DictConfig:
    """What a choice of options composes to. Once: reading all files anew takes most of a test's time."""
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", overrides=list(options))
    cfg.outputs = "outputs"
    return cfg


def with_settings(overrides: str) -> Config:
    """As `composed`, of overrides parted by spaces: single settings on top of options composed once."""
    parsed = OverridesParser.create().parse_overrides(overrides.split())
    options = [o.input_line for o in parsed if o.key_or_group in GROUPS]
    cfg = copy.deepcopy(_of_options(*options))
    for override in parsed:
        if override.key_or_group not in GROUPS:
            OmegaConf.update(cfg, override.key_or_group, override.value(), merge=True)
    typed = OmegaConf.to_object(cfg)
    assert isinstance(typed, Config)
    return typed


def test_settings_on_top_of_options_compose_alike() -> None:
    overrides = "mapper=banded stages=[fit] mapper.lambda_cross=inf calibration.keep_captures=true study=a"
    assert with_settings(overrides) == composed(*overrides.split())


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
    "preflight.mappers=[]": "preflight.mappers=[]",
    "preflight.mappers=[mlp]": "preflight.mappers=mlp: expected one of head_local",
    "preflight.mappers=[banded,banded]": "stands twice",
    "preflight.n_sequences=1": "preflight.n_sequences=1: expected at least 2",
    "preflight.min_retention=0": "preflight.min_retention",
    "preflight.reach=-1": "preflight.reach",
    "preflight.confidence=1": "preflight.confidence",
    "preflight.min_pairs=3": "needs 4 pairs or more",
    "preflight.evidence=[no.csv]": "preflight.evidence: no file no.csv",
    "preflight.prompts.n=0": "preflight.prompts.n=0: expected a whole number",
    "preflight.prompts.paths=[no.jsonl]": "preflight.prompts.paths: no file or folder no.jsonl",
    "stages=[preflight] pair.alignment=spans": "the recorded cases are of pairs that share a tokenizer",
    "mapper.ridge_lambda=-1": "mapper.ridge_lambda=-1: expected",
    "mapper.ridge_lambda=nan": "mapper.ridge_lambda=nan: expected",
    "mapper.ridge_lambda=abc": "mapper.ridge_lambda=abc: expected",
    "mapper.ridge_lambda=null": "mapper.ridge_lambda=None: expected",
    "mapper.ridge_lambda=inf": "mapper.ridge_lambda=inf: expected",
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
    "evaluation.max_tokens=8": "tokens do not fit, and its sequences are not cut",
    "benchmark.lengths=[2,64]": "nothing would be mapped",
    "evaluation.world.kinds=[wher]": "did you mean 'where'",
    "evaluation.jsonl.paths=[/no/such.jsonl]": "no file /no/such.jsonl",
    "calibration.sequential=true": "holds both models in memory",
}


@pytest.mark.parametrize(("override", "named"), MISTAKES.items())
def test_a_mistake_is_named(override: str, named: str) -> None:
    mistakes = validate(with_settings(override))
    assert any(named in mistake for mistake in mistakes)
    assert all(override.partition("=")[0].partition(".")[0] in mistake for mistake in mistakes)


# What the fit is asked for: the setting as the mistake names it, and what it says to do about it.
FITTING_MISTAKES = {
    "mapper.kind=lin": ("mapper.kind=lin", "did you mean 'linear'?"),
    "mapper.kind=separate": ("mapper.kind=separate", "expected one of linear, mlp"),
    "mapper.kind=compressed_linear": ("mapper.kind=compressed_linear", "expected one of linear, mlp"),
    "mapper.support=band": ("mapper.support=band", "did you mean 'banded'?"),
    "mapper.regressors=both": ("mapper.regressors=both", "expected one of own_kind, both_kinds"),
    "mapper.penalty=relativ": ("mapper.penalty=relativ", "did you mean 'relative'?"),
    "mapper.row_weights=attention": ("mapper.row_weights=attention", "expected one of none, sensitivity"),
    "mapper.tuning.per=layer": ("mapper.tuning.per=layer", "expected one of pair, head"),
    "mapper.mlp.form=residuals": ("mapper.mlp.form=residuals", "did you mean 'residual'?"),
    "mapper.mlp.compute_dtype=half": ("mapper.mlp.compute_dtype=half", "expected one of null, bfloat16"),
    "mapper.compression.method=int8": ("mapper.compression.method=int8", "expected one of none, bfloat16"),
    "calibration.regressors=all": ("calibration.regressors=all", "expected one of own_kind, both_kinds"),
    "calibration.mode=fulll": ("calibration.mode=fulll", "did you mean 'full'?"),
    "calibration.mode=probes": (
        "calibration.mode=probes",
        "expected one of auto, full, head_local, selected",
    ),
    "calibration.outliers.policy=remove": (
        "calibration.outliers.policy=remove",
        "expected one of keep, drop",
    ),
    "selection.rule=cosinus": ("selection.rule=cosinus", "did you mean 'cosine'?"),
    "mapper.top_k=1.5": ("mapper.top_k=1.5", "1 or more, 'all' or 'auto'"),
    "mapper.top_k=true": ("mapper.top_k=True", "1 or more, 'all' or 'auto'"),
    "mapper.ridge_lambda=true": ("mapper.ridge_lambda=True", "a finite number of at least 0 or 'auto'"),
    "mapper=banded mapper.lambda_cross=-1": (
        "mapper.lambda_cross=-1",
        "null (as mapper.ridge_lambda) or 'auto'",
    ),
    "mapper=banded mapper.lambda_cross=nan": ("mapper.lambda_cross=nan", "a finite number of at least 0"),
    "mapper.native_layers=1 mapper.lambda_native=some": ("mapper.lambda_native=some", "or 'auto'"),
    "mapper.lambda_cross=5": ("mapper.lambda_cross=5", "take mapper=banded, or leave it null"),
    "mapper=head_local mapper.lambda_cross=auto": ("mapper.lambda_cross=auto", "take mapper=banded"),
    "mapper.lambda_native=5": ("mapper.lambda_native=5", "set mapper.native_layers, or leave it null"),
    "mapper.native_layers=-1": ("mapper.native_layers=-1", "at least 0"),
    "mapper.tuning.top_k=[]": ("mapper.tuning.top_k=[]", "1 or more, or null"),
    "mapper.tuning.top_k=[0,1]": ("mapper.tuning.top_k=[0, 1]", "1 or more, or null"),
    "mapper.tuning.ridge_lambda=[]": ("mapper.tuning.ridge_lambda=[]", "one or more numbers of at least 0"),
    "mapper.tuning.ridge_lambda=[1,-1]": ("mapper.tuning.ridge_lambda=[1.0, -1.0]", "of at least 0"),
    "mapper.tuning.ridge_lambda=[inf]": ("mapper.tuning.ridge_lambda=[inf]", "of at least 0"),
    "mapper.tuning.cross_ratio=[0]": ("mapper.tuning.cross_ratio=[0.0]", "one or more numbers above 0"),
    "mapper.tuning.native_ratio=[]": ("mapper.tuning.native_ratio=[]", "one or more numbers above 0"),
    "mapper.tuning.native_ratio=[nan]": ("mapper.tuning.native_ratio=[nan]", "numbers above 0"),
    "mapper=mlp mapper.row_weights=sensitivity": (
        "mapper.row_weights=sensitivity",
        "take a linear mapper, or none",
    ),
    "mapper=residual mapper.compression.method=fp8": (
        "mapper.compression.method=fp8",
        "store an mlp in another dtype (mapper.dtype=bfloat16)",
    ),
    "mapper.mlp.support=banded": ("mapper.mlp.support=banded", "expected one of null, full_head"),
    "mapper.mlp.regressors=values": ("mapper.mlp.regressors=values", "expected one of null, own_kind"),
    "mapper.mlp.top_k=0": ("mapper.mlp.top_k=0", "expected 1 or more source layers"),
    "mapper.mlp.top_k=5 mapper.top_k=2": ("mapper.mlp.top_k=5", "only mapper.top_k=2 source layers"),
    "mapper.mlp.hidden=[]": ("mapper.mlp.hidden=[]", "one or more widths of at least 1"),
    "mapper.mlp.hidden=[8,0]": ("mapper.mlp.hidden=[8, 0]", "one or more widths of at least 1"),
    "mapper.mlp.learning_rate=0": ("mapper.mlp.learning_rate=0.0", "a finite number above 0"),
    "mapper.mlp.learning_rate=inf": ("mapper.mlp.learning_rate=inf", "a finite number above 0"),
    "mapper.mlp.epochs=0": ("mapper.mlp.epochs=0", "at least 1"),
    "mapper.mlp.batch_size=0": ("mapper.mlp.batch_size=0", "at least 1"),
    "mapper.mlp.weight_decay=-1": ("mapper.mlp.weight_decay=-1.0", "at least 0"),
    "mapper.mlp.patience=0": ("mapper.mlp.patience=0", "at least 1"),
    "mapper.compression.tolerance=-1": ("mapper.compression.tolerance=-1.0", "at least 0"),
    "mapper.compression.max_r2_loss=nan": ("mapper.compression.max_r2_loss=nan", "at least 0"),
    "mapper.compression.max_kl_nats=-1": ("mapper.compression.max_kl_nats=-1.0", "at least 0"),
    "mapper.compression.n_sequences=0": ("mapper.compression.n_sequences=0", "at least 1"),
    "diagnostics.n_sequences=0": ("diagnostics.n_sequences=0", "at least 1"),
    "diagnostics.texts=[heldout]": ("diagnostics.texts=heldout", "did you mean 'held_out'"),
    "diagnostics.texts=[questions,questions]": (
        "diagnostics.texts=['questions', 'questions']",
        "stands twice",
    ),
    "diagnostics.rare_share=1": ("diagnostics.rare_share=1.0", "expected a share"),
    "calibration.native_layers=-1": ("calibration.native_layers=-1", "at least 0"),
    "calibration.sensitivity_boundaries=0": ("calibration.sensitivity_boundaries=0", "at least 1"),
    "calibration.keep_captures=maybe": ("calibration.keep_captures=maybe", "expected auto, true or false"),
    "mapper=weighted calibration.keep_captures=false": ("calibration.keep_captures=false", "set it to auto"),
    "mapper=mlp calibration.keep_captures=false": ("calibration.keep_captures=false", "set it to auto"),
    "calibration.outliers.threshold=0": ("calibration.outliers.threshold=0.0", "a number above 0"),
    "calibration.outliers.share=0": ("calibration.outliers.share=0.0", "above 0, at most 1"),
    "calibration.outliers.share=1.5": ("calibration.outliers.share=1.5", "above 0, at most 1"),
    "calibration.shards=0": ("calibration.shards=0", "at least 1"),
    "calibration.shards=49": ("calibration.shards=49", "has 48 sequences; expected at most"),
    "stages=[calibrate] calibration.worker=0 calibration.shards=2 calibration.n_sequences=2": (
        "calibration.shards=2",
        "has 1 sequences",
    ),
    "stages=[calibrate] calibration.shards=4 calibration.worker=4": ("calibration.worker=4", "from 0 to"),
    "stages=[calibrate] calibration.worker=-1": ("calibration.worker=-1", "calibration.shards - 1 = 0"),
    "calibration.shards=4 calibration.worker=1": (
        "calibration.worker=1",
        "fit, diagnose, evaluate, benchmark again; set stages=[calibrate]",
    ),
}


@pytest.mark.parametrize("overrides", FITTING_MISTAKES)
def test_a_mistake_of_the_fit_gets_one_line_with_its_remedy(overrides: str) -> None:
    setting, remedy = FITTING_MISTAKES[overrides]
    (mistake,) = validate(with_settings(overrides))
    assert mistake.startswith(f"{setting}: ")
    assert remedy in mistake
    assert "\n" not in mistake


@pytest.mark.parametrize(
    "overrides",
    [
        "mapper.top_k=auto mapper.ridge_lambda=auto mapper.penalty=relative",
        "mapper=banded mapper.lambda_cross=inf",
        "mapper=banded mapper.ridge_lambda=1 mapper.lambda_cross=auto mapper.tuning.cross_ratio=[1,inf]",
        "mapper.native_layers=2 mapper.lambda_native=inf",
        "mapper.ridge_lambda=0 mapper.tuning.ridge_lambda=[0]",
        "mapper=mlp mapper.mlp.form=residual_values mapper.mlp.patience=1 mapper.mlp.compute_dtype=bfloat16",
        "mapper=mlp calibration.keep_captures=false stages=[calibrate]",
        "stages=[plan,calibrate,report] calibration.shards=4 calibration.worker=3",
        "calibration.shards=48",
        "calibration.outliers.policy=separate calibration.outliers.share=1",
        "calibration.keep_captures=true calibration.mode=selected selection=forward selection.apart=true",
    ],
)
def test_settings_at_their_bounds_are_right(overrides: str) -> None:
    assert validate(with_settings(overrides)) == []


def test_all_mistakes_come_at_once() -> None:
    mistakes = validate(
        composed("mapper.ridge_lambda=-1", "mapper.top_k=0", "stages=[fitt]", "transfer.hold_back=0")
    )
    assert len(mistakes) == 4
    message = str(ConfigError(mistakes))
    assert message.startswith("4 mistakes")
    assert all(mistake in message for mistake in mistakes)


@pytest.mark.parametrize(
    "override",
    ["mapper.topk=3", "pair=nobody", "mapper.native_layers=abc", "mapper.mlp.hidden=4", "mapper=gbm"],
)
def test_hydra_refuses_what_the_schema_does_not_know(override: str) -> None:
    with pytest.raises((HydraException, OmegaConfBaseException)):
        composed(override)


def test_an_added_key_that_nothing_reads_is_named() -> None:
    assert [*unknown_keys({"seed": 1, "foo": 1, "mapper": {"bla": 2, "top_k": 1}}, Config)] == [
        "foo: nothing reads this key; expected one of " + ", ".join(sorted(Config.__dataclass_fields__)),
        "mapper.bla: nothing reads this key; expected one of "
        + ", ".join(sorted(schema.MapperConfig.__dataclass_fields__)),
    ]


def test_configuration_knows_nothing_of_torch() -> None:
    code = "import sys, kvmap.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Kinds that come of a setting: `mapper.compression`, `calibration.outliers`.
DERIVED_KINDS = {"compressed_linear", "separate"}


def test_names_in_the_schema_are_those_of_the_code() -> None:
    from kvmap import data, models, tracking
    from kvmap.evaluation import arms
    from kvmap.fit import (
        features,
        moments,
        networks,
        outliers,
        pair_moments,
        planner,
        ridge,
        selection,
        tuning,
        view,
    )
    from kvmap.mappers import compressed, mapper_kinds
    from kvmap.stages import build
    from kvmap.zoo import world

    assert {*schema.MAPPER_KINDS, *DERIVED_KINDS} == set(mapper_kinds())
    assert set(schema.MAPPER_KINDS) == set(build.BUILDERS)
    assert set(schema.MAPPER_KINDS).isdisjoint(DERIVED_KINDS)
    assert schema.ARMS == arms.ARMS
    assert schema.SUPPORTS == features.SUPPORTS
    assert schema.REGRESSORS == features.REGRESSORS
    assert schema.PENALTIES == ridge.CONVENTIONS
    assert tuple(networks.FORMS) == schema.MLP_FORMS
    assert ("none", *build.METHODS) == schema.COMPRESSIONS
    assert tuple(build.METHODS.values()) == compressed.METHODS
    assert schema.TUNING_SCOPES == tuning.SCOPES
    assert ("auto", *planner.MODES) == schema.MOMENTS_MODES
    assert schema.OUTLIER_POLICIES == outliers.POLICIES
    assert set(schema.SELECTION_RULES) == set(selection.RULES)
    assert schema.ROPE_STRATEGIES == view.ROPE_STRATEGIES
    assert set(schema.TEXT_KINDS) == set(data.texts.READERS)
    assert schema.PACKINGS == data.blocks.PACKINGS
    assert set(schema.TRACKING_BACKENDS) == set(tracking.BACKENDS)
    assert pair_moments.SPLITS == ("fit", "held_out")
    assert schema.WORLD_KINDS == world.KINDS
    assert ("auto", *models.load.DTYPES) == schema.DTYPES
    assert set(moments.PRODUCT_DTYPES) == {"float64", "float32"}


@pytest.mark.parametrize(
    ("key", "module", "names"),
    [
        ("mapper.mlp.compute_dtype", "kvmap.fit.mlp", "COMPUTE_DTYPES"),
        ("calibration.product_dtype", "kvmap.fit.moments", "PRODUCT_DTYPES"),
    ],
)
def test_names_that_only_the_code_lists_are_right(key: str, module: str, names: str) -> None:
    for name in getattr(importlib.import_module(module), names):
        assert validate(with_settings(f"{key}={name}")) == []


def test_row_weights_are_those_that_a_run_knows() -> None:
    """One rule has no list in the code: all but "none" must ask for the target's attention."""
    from kvmap.stages.calibrated import Calibrated

    for name in schema.ROW_WEIGHTS:
        ctx = SimpleNamespace(cfg=with_settings(f"mapper.row_weights={name}"))
        assert Calibrated(ctx).weighted is (name != "none")  # type: ignore[arg-type]


@pytest.mark.parametrize("stage", schema.STAGES)
def test_every_stage_is_a_module(stage: str) -> None:
    assert callable(importlib.import_module(f"kvmap.stages.{stage}").run)


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


@pytest.mark.slow
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
