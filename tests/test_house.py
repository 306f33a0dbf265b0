"""The rules of the house that a machine can check: who imports whom, and what is never called."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import kvmap
from kvmap.errors import KvmapError, UnknownName

PACKAGE = Path(kvmap.__file__).parent
REPOSITORY = PACKAGE.parent
MODULES = sorted(path for path in PACKAGE.rglob("*.py"))

CORE = ("models", "fit", "mappers", "transfer", "kernels")
HEAVY = ("hydra", "omegaconf", "wandb", "tensorboard", "lm_eval", "datasets", "gguf", "jaxtyping")

# Room: the rooms it may import. Data goes from left to right along the pipeline, imports from right to left.
BASE = {"causes", "errors", "files", "locks", "metrics", "progress"}
MODELS = BASE | {"models", "zoo"}
FIT = MODELS | {"data", "kernels", "fit"}
TRANSFER = FIT | {"mappers", "transfer"}
MAY_IMPORT = {
    "": set(),
    "causes": set(),
    "errors": set(),
    "metrics": set(),
    "progress": set(),
    "locks": set(),
    "files": {"errors"},
    "keys": set(),
    "artifacts": BASE | {"keys"},
    "preemption": set(),
    "provenance": {""},
    "tracking": BASE | {"preemption", "provenance", "tracking"},
    "figures": {"figures"},
    "report": BASE | {"config", "evaluation", "figures", "report", "studies", "tracking"},
    "config": BASE,
    "zoo": BASE | {"zoo"},
    "data": BASE | {"data", "zoo"},
    "models": MODELS,
    "kernels": MODELS | {"kernels"},
    "fit": FIT,
    "mappers": FIT | {"mappers"},
    "transfer": TRANSFER,
    "planning": TRANSFER | {"planning"},
    "diagnostics": TRANSFER | {"diagnostics"},
    "evaluation": TRANSFER | {"evaluation"},
    "economics": TRANSFER | {"planning", "figures", "economics"},
    "fleet": TRANSFER | {"evaluation", "fleet"},
    "harness": TRANSFER | {"evaluation", "harness"},
    "benchmark": TRANSFER | {"diagnostics", "benchmark"},
    "studies": BASE | {"evaluation", "tracking", "studies"},
    "prediction": BASE | {"evaluation", "figures", "studies", "prediction"},
    "preflight": TRANSFER | {"diagnostics", "evaluation", "studies", "prediction", "preflight"},
    "stages": TRANSFER
    | {"stages", "config", "artifacts", "tracking", "report", "figures"}
    | {"planning", "diagnostics", "evaluation", "harness", "benchmark", "economics", "fleet", "preflight"},
    "sweeps": BASE | {"config", "preemption", "provenance", "report", "sweeps"},
    "run": {"config", "errors", "preemption", "stages", "sweeps"},
    "sweep": {"run", "sweeps"},
    "demo": TRANSFER | {"config", "demo", "evaluation", "run", "stages", "tracking"},
    "serving": TRANSFER | {"serving"},
}


def room_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def module_name(path: Path) -> str:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports(path: Path) -> tuple[tuple[int, str], ...]:
    """Line and full name of everything a module imports, at the top or inside functions."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)


def calls(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name, as written, of every attribute used."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            yield node.lineno, ast.unparse(node)


def places(found: Iterator[tuple[Path, int, str]]) -> list[str]:
    return [f"{path.relative_to(REPOSITORY)}:{line}: {what}" for path, line, what in found]


def test_every_room_has_a_place_in_the_pipeline() -> None:
    assert {room_of(path) for path in MODULES} <= set(MAY_IMPORT), "name the new room in MAY_IMPORT"


def test_imports_go_from_right_to_left() -> None:
    def wrong() -> Iterator[tuple[Path, int, str]]:
        for path in MODULES:
            room = room_of(path)
            for line, name in imports(path):
                parts = name.split(".")
                if parts[0] != "kvmap":
                    continue
                inner = parts[1] if len(parts) > 1 and is_room(parts[1]) else ""
                if inner != room and inner not in MAY_IMPORT[room] | {""}:
                    yield path, line, f"{room} imports {name}"

    assert places(wrong()) == []


def is_room(name: str) -> bool:
    return (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file()


def test_the_core_names_no_heavy_package_at_the_top() -> None:
    def wrong() -> Iterator[tuple[Path, int, str]]:
        for path in (path for path in MODULES if room_of(path) in CORE):
            for node in ast.parse(path.read_text()).body:
                for line, name in _top_imports(node):
                    if name.split(".")[0] in HEAVY:
                        yield path, line, name

    assert places(wrong()) == []


# An unstable dependency, and the files that may know it.
ADAPTERS = {
    "hydra": {"run.py", "demo/opening.py", "config/hydra.py", "sweeps/points.py", "sweeps/resubmit.py"},
    "omegaconf": {"run.py", "config/hydra.py", "sweeps/points.py", "sweeps/resubmit.py"},
    "wandb": {"tracking/wandb_mirror.py"},
    "tensorboard": {"tracking/tensorboard_mirror.py"},
    "pynvml": {"tracking/usage.py"},
    "transformers.cache_utils": {"models/cache.py"},
    "transformers.DynamicCache": {"models/cache.py"},
    "datasets": {"data/texts.py"},
}


@pytest.mark.parametrize("package", ADAPTERS)
def test_an_unstable_dependency_is_named_in_its_adapter_alone(package: str) -> None:
    found = {
        str(path.relative_to(PACKAGE))
        for path in MODULES
        for _, name in imports(path)
        if name == package or name.startswith(f"{package}.")
    }
    assert found == ADAPTERS[package]


@pytest.mark.parametrize(
    ("package", "folders"),
    [("vllm", ("serving/vllm",)), ("prometheus_client", ("serving/vllm", "serving/gateway"))]
    + [(name, ("serving/gateway",)) for name in ("fastapi", "starlette", "uvicorn", "httpx")],
)
def test_what_serves_is_named_in_its_folder_alone(package: str, folders: tuple[str, ...]) -> None:
    found = {
        str(path.relative_to(PACKAGE).parent)
        for path in MODULES
        for _, name in imports(path)
        if name == package or name.startswith(f"{package}.")
    }
    assert found <= set(folders)


def _top_imports(node: ast.stmt) -> Iterator[tuple[int, str]]:
    """Imports outside functions, those for a type checker included."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return
    if isinstance(node, ast.Import):
        yield from ((node.lineno, alias.name) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield node.lineno, node.module or ""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield from _top_imports(child)


def run_without(packages: tuple[str, ...], program: str) -> subprocess.CompletedProcess[str]:
    """Runs a program for which some packages are not installed: importing and looking for them both fail."""
    blocked = f"import sys\nfor name in {packages!r}: sys.modules[name] = None\n"
    return subprocess.run(
        [sys.executable, "-c", blocked + program], capture_output=True, text=True, timeout=100, check=False
    )


def test_the_core_imports_on_a_machine_without_the_heavy_packages() -> None:
    names = [module_name(path) for path in MODULES if room_of(path) in {*CORE, *BASE}]
    program = f"import importlib\nfor name in {names!r}: importlib.import_module(name)\nprint('imported')"
    result = run_without(HEAVY, program)
    assert result.stdout.strip() == "imported", result.stderr


@pytest.mark.parametrize(
    "module", ["kvmap", "kvmap.config", "kvmap.artifacts", "kvmap.tracking", "kvmap.report"]
)
def test_what_plans_and_reports_loads_no_torch(module: str) -> None:
    result = run_without(("torch", "transformers"), f"import {module}; print('imported')")
    assert result.stdout.strip() == "imported", result.stderr


def test_no_pickle_is_ever_loaded() -> None:
    loaders = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}

    def wrong() -> Iterator[tuple[Path, int, str]]:
        for path in MODULES:
            for line, name in imports(path):
                if name.split(".")[0] in loaders or name in {"torch.load", "torch.save", "numpy.load"}:
                    yield path, line, name
            for line, name in calls(path):
                if name in {"torch.load", "torch.save", "np.load", "numpy.load", "pd.read_pickle"}:
                    yield path, line, name

    assert places(wrong()) == []


def test_no_factorisation_that_hangs_is_called() -> None:
    """Batched LU of two threads hangs for ever in some builds of torch; Cholesky and eigh do not."""
    endings = (
        "linalg.solve",
        "linalg.inv",
        "linalg.solve_ex",
        "linalg.inv_ex",
        "linalg.lu_factor",
        "linalg.lu",
    )

    def wrong() -> Iterator[tuple[Path, int, str]]:
        for path in MODULES:
            for line, name in calls(path):
                if name.endswith(endings) or name in {"torch.inverse", "torch.lu_solve"}:
                    yield path, line, name

    assert places(wrong()) == []


def test_nothing_is_put_off() -> None:
    def wrong() -> Iterator[tuple[Path, int, str]]:
        for path in MODULES:
            for line, text in enumerate(path.read_text().splitlines(), start=1):
                for word in ("NotImplementedError", "TODO", "FIXME", "XXX"):
                    if word in text:
                        yield path, line, word

    assert places(wrong()) == []


def test_no_file_without_a_subject() -> None:
    vague = {"utils.py", "helpers.py", "common.py", "misc.py"}
    assert [path.name for path in MODULES if path.name in vague] == []


class TestUnknownName:
    def test_gives_the_nearest_and_the_full_list(self) -> None:
        error = UnknownName("mapper", "liner", ["raw", "linear", "identity"])
        assert isinstance(error, KvmapError)
        assert str(error) == ("unknown mapper 'liner'. Did you mean 'linear'? Known: identity, linear, raw")

    def test_suggests_nothing_where_nothing_is_near(self) -> None:
        assert "Did you mean" not in str(UnknownName("mapper", "zzz", ["raw", "linear"]))
