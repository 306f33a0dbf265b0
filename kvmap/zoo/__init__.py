"""The shipped family `tiny`: four small Llama-style models that share one tokenizer, and their world."""

from __future__ import annotations

from pathlib import Path

from kvmap.errors import UnknownName

NAMES = ("tiny-small", "tiny-medium", "tiny-large", "tiny-wide")


def weights_folder(name: str) -> Path:
    """The transformers folder of a shipped model.

    Raises:
        UnknownName: no model of the family is called so.
    """
    if name not in NAMES:
        raise UnknownName("model of the tiny family", name, NAMES)
    return Path(__file__).parent / "weights" / name
