"""Prompts of the traffic that a pair is meant for, without answers: what a preflight may be given to read."""

from __future__ import annotations

import hashlib
from pathlib import Path

from kvmap.data.texts import TextSpec, UnreadableCorpus, read_texts
from kvmap.diagnostics.texts import evenly
from kvmap.evaluation.limits import context_limit
from kvmap.files import sha256_file
from kvmap.stages.context import Context


def prompts_of(ctx: Context) -> list[list[int]]:
    """Token ids of `preflight.prompts.n` prompts, spread evenly over each of the files in turn.

    A prompt longer than what both models take is cut on the left. None where no file is named.

    Raises:
        UnreadableCorpus: a file that is missing or malformed, or prompts too short to hand anything over.
    """
    asked = ctx.cfg.preflight.prompts
    files = [list(read_texts(TextSpec("jsonl", path=path, field=asked.field))) for path in asked.paths]
    texts = [text for number, of_file in enumerate(files) for text in _share(of_file, number, ctx)]
    limit, least = context_limit(ctx.pair), ctx.options.native_head + 2
    encoded = [list(map(int, ctx.pair.tokenizer(text)["input_ids"]))[-limit:] for text in texts]
    found = [ids for ids in encoded if len(ids) >= least]
    if asked.paths and not found:
        raise UnreadableCorpus(
            f"preflight.prompts.paths={list(asked.paths)}: none of {len(encoded)} prompts has {least} "
            f"tokens; expected whole prompts in the field {asked.field!r}, see preflight.prompts.field"
        )
    return found


def prompts_spec(ctx: Context) -> dict[str, object] | None:
    """What determines them, for keys; None without prompts."""
    asked = ctx.cfg.preflight.prompts
    if not asked.paths:
        return None
    return {"field": asked.field, "n": asked.n, "files": [_content(Path(path)) for path in asked.paths]}


def _share(texts: list[str], number: int, ctx: Context) -> list[str]:
    """Of one of the files, so many that all together give `n`."""
    asked = ctx.cfg.preflight.prompts
    n_files = len(asked.paths)
    wanted = asked.n // n_files + (number < asked.n % n_files)
    return [texts[position] for position in evenly(len(texts), wanted)]


def _content(path: Path) -> str:
    """Hash of a file, or of all files of a folder."""
    path = path.expanduser()
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    return hashlib.sha256("".join(sha256_file(file) for file in files).encode()).hexdigest()
