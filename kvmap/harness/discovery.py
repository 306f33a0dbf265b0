"""How lm-eval learns of the model `kvmap`.

From the first release after 0.4.13 on, lm-eval finds installed packages by the entry points `lm_eval.models`,
and kvmap declares one: nothing else is needed. Before, it looks a name up in its registry alone, which holds
what has been imported, so either kvmap's own command registers it (`python -m kvmap.harness`), or a line in
the environment's site-packages makes every start of Python watch for lm-eval (`watch`).
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

NAME = "kvmap"
TARGET = "kvmap.harness.adapter:KvmapLM"
WATCHED = "lm_eval.models"
"""lm-eval imports it before it looks up a model by its name."""

LINK = "kvmap_lm_eval.pth"
LINE = (
    "import importlib.util; importlib.util.find_spec('kvmap') and "
    "__import__('kvmap.harness.discovery', fromlist=['watch']).watch()\n"
)


def register() -> None:
    """Make lm-eval know the model; it is imported when lm-eval first asks for it."""
    import lm_eval.models  # noqa: F401  its own models first: it imports them only while it knows none
    from lm_eval.api.registry import model_registry

    if NAME not in model_registry:
        model_registry.register(NAME, target=TARGET)


def watch() -> None:
    """Register the model as soon as lm-eval's models are imported, and do nothing until then."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def link(folder: Path) -> Path:
    """Write the line that lets lm-eval's own command find the model, into a site-packages folder."""
    path = folder / LINK
    path.write_text(LINE, encoding="utf-8")
    return path


def unlink(folder: Path) -> Path | None:
    """Take it away again; None where there was none."""
    path = folder / LINK
    if not path.is_file():
        return None
    path.unlink()
    return path


class _Finder(MetaPathFinder):
    """Finds one module, as whoever comes after would, with a loader that registers the model after it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != WATCHED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    def __init__(self, inner: Loader) -> None:
        self._inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        if module.__spec__ is not None:  # from here on nobody need know that it was watched
            module.__spec__.loader = module.__loader__ = self._inner
        register()
