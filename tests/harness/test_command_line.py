"""`lm_eval --model kvmap`: what its arguments mean, and how lm-eval's own command comes to know the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.model import CachingLM
from lm_eval.api.registry import get_model

from kvmap.errors import KvmapError, UnknownName
from kvmap.files import write_json
from kvmap.fit.features import KINDS, geometry_shape
from kvmap.harness import __main__ as command
from kvmap.harness import discovery
from kvmap.harness.adapter import KvmapLM
from kvmap.harness.arguments import pool_from_arguments
from kvmap.mappers import (
    BiasOnlyMapper,
    IdentityMapper,
    Mapper,
    MapperMismatch,
    RawMapper,
    identity_record,
    save_mapper,
)
from kvmap.models.pair import ModelSpec, read_geometry, read_identity
from kvmap.transfer import TransferOptions
from tests.harness.conftest import Family, LocalTasks, identity_pool, instances

ROOT = Path(__file__).resolve().parents[2]
TINY = "zoo:tiny-small"


def saved(
    folder: Path, source: str = TINY, target: str = TINY, *, mapper: Mapper | None = None, **more: Any
) -> Path:
    """A mapper's folder, as a run leaves it."""
    sides = {
        role: ModelSpec(name, dtype="float32") for role, name in (("source", source), ("target", target))
    }
    shapes = [
        tuple((layer.n_kv_heads, layer.head_dim) for layer in read_geometry(spec).layers)
        for spec in sides.values()
    ]
    manifest = {role: identity_record(read_identity(spec)) for role, spec in sides.items()}
    kind = IdentityMapper if shapes[0] == shapes[1] else RawMapper
    save_mapper(mapper or kind(*shapes), folder, manifest | {"rope": "strip", "native_head": 3} | more)
    return folder


def one_weight_changed(change: float) -> Mapper:
    """A mapper of the shipped model onto itself, which gives every token the same keys and values."""
    shape = geometry_shape(read_geometry(ModelSpec(TINY)))
    random = torch.Generator().manual_seed(0)
    bias = {kind: [torch.randn(layer, generator=random) for layer in shape] for kind in KINDS}
    bias["key"][0][0, 0] += change
    return BiasOnlyMapper(shape, shape, bias)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("mapper"))


class TestArguments:
    def test_a_mappers_folder_knows_its_models_and_how_it_was_fitted(self, folder: Path) -> None:
        pool = pool_from_arguments("mapped", mapper=str(folder))
        assert pool.pair.source_identity.name == pool.pair.target_identity.name == TINY
        assert pool.pair.target_identity.dtype == "float32"
        assert pool.options == TransferOptions(hold_back=1, native_head=3, rope="strip")
        assert pool.arms["mapped"].kind == "identity"

    def test_what_is_given_goes_before(self, folder: Path) -> None:
        pool = pool_from_arguments(
            "mapped", mapper=str(folder), hold_back=4, native_head=0, source=TINY, batch_size=5, max_tokens=99
        )
        assert (pool.options.hold_back, pool.options.native_head) == (4, 0)
        assert (pool.batch_size, pool.limit) == (5, 99)

    def test_a_runs_folder_stands_for_the_mapper_it_fitted(self, folder: Path, tmp_path: Path) -> None:
        store = tmp_path / "outputs" / "artifacts" / "mapper"
        store.mkdir(parents=True)
        (store / "abc").symlink_to(folder)
        run = tmp_path / "run"
        run.mkdir()
        facts = {"artifacts": {"mapper": "abc"}}
        write_json(run / "run.json", {"config": {"outputs": str(tmp_path / "outputs")}, "facts": facts})
        assert pool_from_arguments("mapped", mapper=str(run)).arms["mapped"].kind == "identity"
        facts["artifacts"]["mapper"] = "gone"
        write_json(run / "run.json", {"config": {"outputs": str(tmp_path / "outputs")}, "facts": facts})
        with pytest.raises(KvmapError, match="is gone; run its stage fit again"):
            pool_from_arguments("mapped", mapper=str(run))
        write_json(run / "run.json", {"config": {"outputs": "x"}, "facts": {}})
        with pytest.raises(KvmapError, match="fitted no mapper"):
            pool_from_arguments("mapped", mapper=str(run))

    @pytest.mark.parametrize(
        ("arm", "kind"), [("target", None), ("source", None), ("no_context", None), ("raw", "raw")]
    )
    def test_arms_that_need_no_fit_need_no_mapper(self, arm: str, kind: str | None) -> None:
        mapper = pool_from_arguments(arm, source=TINY, target=TINY).arms[arm]
        assert (mapper and mapper.kind) == kind

    @pytest.mark.parametrize(
        ("call", "complaint"),
        [
            (
                lambda: pool_from_arguments("mapped", source=TINY, target=TINY),
                "arm=mapped: mapper is not named",
            ),
            (lambda: pool_from_arguments("target", target=TINY), "source is not named: give source=<hub id"),
            (lambda: pool_from_arguments("maped"), "unknown arm 'maped'. Did you mean 'mapped'"),
            (lambda: pool_from_arguments("mapped", holdback=2), "unknown model argument 'holdback'. Did you"),
            (lambda: pool_from_arguments("mapped", mapper="/nowhere"), "no mapper was written"),
            (lambda: KvmapLM(batch_size="auto"), "batch_size='auto': expected a whole number of at least 1"),
            (lambda: KvmapLM(arm="target", source=TINY, target=TINY, max_length=1), "max_length=1: expected"),
        ],
    )
    def test_a_mistake_is_named_with_its_remedy(self, call: Callable[[], Any], complaint: str) -> None:
        with pytest.raises((KvmapError, UnknownName), match=complaint):
            call()

    def test_a_control_that_needs_a_fit_says_how_to_make_one(self, folder: Path, tmp_path: Path) -> None:
        with pytest.raises(
            KvmapError, match=r"arm=bias_only: the mapper is of kind 'identity'.*mapper=bias_only"
        ):
            pool_from_arguments("bias_only", mapper=str(folder))
        assert BiasOnlyMapper.kind == "bias_only"

    def test_a_mapper_of_other_models_is_refused(self, folder: Path) -> None:
        with pytest.raises(MapperMismatch, match="fitted for other models"):
            pool_from_arguments("mapped", mapper=str(folder), source="zoo:tiny-medium")

    def test_one_model_may_have_settings_of_its_own(self) -> None:
        pool = pool_from_arguments(
            "target", source=TINY, target=TINY, dtype="bfloat16", target_dtype="float32"
        )
        assert pool.pair.source_identity.dtype == "bfloat16"
        assert pool.pair.target_identity.dtype == "float32"

    @pytest.mark.parametrize(
        "spec",
        [
            ModelSpec("zoo:tiny-small"),
            ModelSpec("Qwen/Qwen3-8B", revision="main"),
            ModelSpec("a/b", revision="v1", gguf_file="x.gguf"),
            ModelSpec("zoo:tiny-small", gguf_file="y.gguf"),
        ],
    )
    def test_a_models_name_is_read_back(self, spec: ModelSpec) -> None:
        from kvmap.harness.arguments import _named

        assert ModelSpec(**_named(spec.name)) == spec


class TestResponseCache:
    """lm-eval's `--use_cache` looks answers up by the request alone."""

    def test_one_models_file_serves_it_again_and_no_other(self, llama: Family, tmp_path: Path) -> None:
        asked = instances("loglikelihood", [("anna is", " here"), ("bob is", " away")])
        path = str(tmp_path / "answers.db")
        pool = identity_pool(llama)
        first = CachingLM(KvmapLM(pool, "mapped"), path).loglikelihood(asked)
        fresh = identity_pool(llama)
        assert CachingLM(KvmapLM(fresh, "mapped"), path).loglikelihood(asked) == first
        assert fresh.reading.n_contexts == 0
        other = {
            "another arm": KvmapLM(identity_pool(llama, "target"), "target"),
            "another option": KvmapLM(identity_pool(llama, options=TransferOptions(hold_back=2)), "mapped"),
            "another limit": KvmapLM(identity_pool(llama, max_tokens=50), "mapped"),
            "another batch size": KvmapLM(identity_pool(llama, batch_size=2), "mapped"),
        }
        for model in other.values():
            with pytest.raises(KvmapError, match=r"--use_cache: .*answers.db holds answers of other models"):
                CachingLM(model, path)

    def test_another_mapper_is_refused(self, tmp_path: Path) -> None:
        """Of the same kind, settings, arm, models and options: one weight is another."""
        path = str(tmp_path / "answers.db")
        asked = instances("loglikelihood", [("anna is in the kitchen and", " here")])

        def model(name: str, change: float) -> KvmapLM:
            return KvmapLM(mapper=str(saved(tmp_path / name, mapper=one_weight_changed(change))))

        CachingLM(model("first", 0.0), path).loglikelihood(asked)
        CachingLM(model("same", 0.0), path)
        other = model("other", 1e-3)
        with pytest.raises(KvmapError, match="name another file"):
            CachingLM(other, path)
        mine, theirs = other.pool.conditions("mapped"), model("again", 0.0).pool.conditions("mapped")
        assert {name for name in mine if mine[name] != theirs[name]} == {"mapper"}
        assert {n for n in mine["mapper"] if mine["mapper"][n] != theirs["mapper"][n]} == {"tensors"}

    def test_a_task_whose_longer_contexts_were_answered_before_is_not_refused(
        self, llama: Family, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = str(tmp_path / "answers.db")
        long, short = ("anna is in the kitchen", " here"), ("", " here")
        CachingLM(KvmapLM(identity_pool(llama), "mapped"), path).loglikelihood(
            instances("loglikelihood", [long])
        )
        again = CachingLM(KvmapLM(identity_pool(llama), "mapped"), path)
        assert len(again.loglikelihood(instances("loglikelihood", [long, short]))) == 2
        assert "task t: native_head=1 and hold_back=1 cover every context" in caplog.text
        fresh = CachingLM(KvmapLM(identity_pool(llama), "mapped"), str(tmp_path / "fresh.db"))
        with pytest.raises(KvmapError, match="task t: native_head=1"):
            fresh.loglikelihood(instances("loglikelihood", [short]))

    def test_a_file_that_another_model_left_is_refused(self, llama: Family, tmp_path: Path) -> None:
        from sqlitedict import SqliteDict

        path = str(tmp_path / "answers.db")
        with SqliteDict(path, autocommit=True) as left:
            left["0" * 64] = (-1.0, True)
        with pytest.raises(KvmapError, match="name another file"):
            CachingLM(KvmapLM(identity_pool(llama), "mapped"), path)


class TestDiscovery:
    def test_the_entry_point_names_the_model(self) -> None:
        """As lm-eval's releases after 0.4.13 find it."""
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        assert project["entry-points"]["lm_eval.models"] == {discovery.NAME: discovery.TARGET}

    def test_registered_it_is_what_lm_eval_gives(self) -> None:
        discovery.register()
        discovery.register()
        assert get_model("kvmap") is KvmapLM

    def test_a_linked_environment_registers_it_without_loading_anything(self, tmp_path: Path) -> None:
        discovery.link(tmp_path)
        program = (
            f"import site, sys; site.addsitedir({str(tmp_path)!r})\n"
            "assert 'lm_eval' not in sys.modules and 'torch' not in sys.modules\n"
            "import lm_eval.models\n"
            "from lm_eval.api.registry import model_registry\n"
            "print('kvmap' in model_registry, 'hf' in model_registry, 'torch' in sys.modules)\n"
            "print(type(lm_eval.models.__spec__.loader).__name__)"
        )
        run = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False
        )
        assert run.stdout.split() == ["True", "True", "False", "SourceFileLoader"], run.stderr

    def test_a_link_outlives_kvmap_without_harm(self, tmp_path: Path) -> None:
        line = discovery.LINE.replace("'kvmap'", "'no_such_package'")
        (tmp_path / discovery.LINK).write_text(line)
        run = subprocess.run(
            [sys.executable, "-c", f"import site; site.addsitedir({str(tmp_path)!r})"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert (run.returncode, run.stderr) == (0, "")

    def test_enable_disable_and_tasks(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(command.sysconfig, "get_path", lambda name: str(tmp_path))
        assert command.main(["enable"]) == 0
        assert (tmp_path / discovery.LINK).read_text() == discovery.LINE
        assert command.main(["disable"]) == command.main(["disable"]) == 0
        assert not (tmp_path / discovery.LINK).exists()
        assert "nothing to remove" in capsys.readouterr().out
        assert command.main(["tasks"]) == 0
        assert (Path(capsys.readouterr().out.strip()) / "mmlu_dev.yaml").is_file()


def evaluated(prefix: list[str], folder: Path, tasks: LocalTasks, out: Path) -> dict[str, Any]:
    """lm-eval's results of a command line."""
    done = subprocess.run(
        [
            *prefix,
            *("--model", "kvmap", "--model_args", f"mapper={folder}", "--batch_size", "4"),
            *("--tasks", "local_choices,local_words", "--include_path", str(tasks.folder)),
            *("--output_path", str(out), "--log_samples"),
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(next(out.rglob("results_*.json")).read_text())
    return found


@pytest.mark.slow
def test_lm_evals_own_command_and_ours_agree(folder: Path, local_tasks: LocalTasks, tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    discovery.link(tmp_path / "site")
    linked = (
        f"import site; site.addsitedir({str(tmp_path / 'site')!r})\n"
        "from lm_eval.__main__ import cli_evaluate; cli_evaluate()"
    )
    theirs = evaluated([sys.executable, "-c", linked], folder, local_tasks, tmp_path / "theirs")
    ours = evaluated([sys.executable, "-m", "kvmap.harness"], folder, local_tasks, tmp_path / "ours")
    assert theirs["results"] == ours["results"]
    assert theirs["config"]["kvmap"]["mapper"] == "identity"
    assert theirs["config"]["kvmap"]["n_source_prefills"] == theirs["config"]["kvmap"]["n_contexts"] > 0


@pytest.mark.slow
def test_a_mistake_on_our_command_line_is_one_line(local_tasks: LocalTasks) -> None:
    run = subprocess.run(
        [
            *(sys.executable, "-m", "kvmap.harness", "--model", "kvmap", "--tasks", "local_choices"),
            *("--include_path", str(local_tasks.folder), "--model_args", "arm=mapped"),
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1].startswith("kvmap: source is not named: give source=<hub id")
