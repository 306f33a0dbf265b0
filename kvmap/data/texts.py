"""Where documents come from: the shipped world, JSON Lines, plain text, or a data set on the hub."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from kvmap.errors import KvmapError, UnknownName

N_WORLD_DOCUMENTS = 1_000_000
"""More documents than any run reads; the world writes them one by one, when asked."""

DEFAULT_SPLITS = {"world": "calibration", "hf": "train"}


class UnreadableCorpus(KvmapError):
    """A corpus that is missing, malformed, or out of reach."""


@dataclass(frozen=True)
class TextSpec:
    """Names a corpus; equal specs read equal documents in equal order.

    Attributes:
        kind: `world` (generated, shipped with kvmap), `jsonl`, `text` or `hf`.
        path: file or folder, for `jsonl` and `text`.
        field: the field that holds a document's text, for `jsonl` and `hf`.
        where: keep only rows whose fields equal these values (compared as text), for `jsonl` and `hf`.
        name: data set on the hub, for `hf`.
        config: configuration of that data set.
        split: split of that data set, or of the world (`train`, `calibration`, `evaluation`); None: `train`
            for `hf`, `calibration` for `world`.
        revision: commit, tag or branch of that data set.
        seed: which documents the world writes.
        min_words: least length of the world's documents; give it the length of the blocks to be cut.
    """

    kind: str
    path: str | None = None
    field: str = "text"
    where: Mapping[str, str] | None = None
    name: str | None = None
    config: str | None = None
    split: str | None = None
    revision: str | None = None
    seed: int = 0
    min_words: int = 256

    def describe(self) -> str:
        """One line that says what was read, for manifests and messages."""
        if self.kind == "world":
            return f"world:{self.split_name} seed={self.seed} min_words={self.min_words}"
        parts = [f"{self.kind}:{self.name or self.path}"]
        if self.kind == "hf":
            parts += [part for part in (self.config, self.split_name, self.revision) if part]
        if self.kind != "text":
            parts.append(f"field={self.field}")
        parts += [f"{key}={value}" for key, value in (self.where or {}).items()]
        return " ".join(parts)

    @property
    def split_name(self) -> str | None:
        """The split that is read; None where the kind has no splits."""
        return self.split or DEFAULT_SPLITS.get(self.kind)


def read_texts(spec: TextSpec) -> Iterator[str]:
    """Yields the documents of a corpus, lazily and in a fixed order.

    Raises:
        UnknownName: no such kind of corpus.
        UnreadableCorpus: a file is missing or malformed, `where` keeps nothing, or the hub is out of reach.
    """
    if spec.kind not in READERS:
        raise UnknownName("corpus kind", spec.kind, READERS)
    return READERS[spec.kind](spec)


def read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (line number from 1, object) of every line of a JSON Lines file that is not blank.

    Raises:
        UnreadableCorpus: a line is not a JSON object, or not UTF-8; names the file and the line.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise UnreadableCorpus(f"{path}, line {number}: not JSON ({error}); mend it") from error
            if not isinstance(row, dict):
                raise UnreadableCorpus(
                    f"{path}, line {number}: expected a JSON object, got {type(row).__name__}; mend it"
                )
            yield number, row


def _read_world(spec: TextSpec) -> Iterator[str]:
    from kvmap.zoo import world

    return world.documents(
        spec.seed, N_WORLD_DOCUMENTS, min_words=spec.min_words, split=cast("world.Split", spec.split_name)
    )


def _read_json_lines(spec: TextSpec) -> Iterator[str]:
    files = _files(spec, "*.jsonl")

    def rows() -> Iterator[tuple[str, dict[str, Any]]]:
        for file in files:
            for number, row in read_json_lines(file):
                yield f"{file}, line {number}", row

    return _select(spec, rows())


def _read_text(spec: TextSpec) -> Iterator[str]:
    for file in _files(spec, "*.txt"):
        try:
            yield file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UnreadableCorpus(f"{file}: not UTF-8 text ({error}); convert it") from error


def _read_hub(spec: TextSpec) -> Iterator[str]:
    if not spec.name:
        raise UnreadableCorpus("a corpus of kind 'hf' needs `name`, the data set's id on the hub; got none")
    try:
        import datasets
    except ImportError as error:
        raise UnreadableCorpus(
            "a corpus of kind 'hf' needs the package `datasets`, which is not installed: "
            "pip install datasets, or use a corpus of kind 'jsonl' or 'text'"
        ) from error

    def rows() -> Iterator[tuple[str, dict[str, Any]]]:
        # Whatever fails below, fails outside kvmap: network, permission, a wrong name or split. The library
        # raises a different type for each (and for each HTTP client), so all are told in the same way.
        try:
            stream = datasets.load_dataset(
                spec.name, spec.config, split=spec.split_name, revision=spec.revision, streaming=True
            )
            for number, row in enumerate(stream):
                yield f"{spec.name}, row {number}", row
        except Exception as error:
            raise UnreadableCorpus(
                f"cannot read {spec.describe()} from the hub: {type(error).__name__}: {error}. Check name, "
                "config, split, revision and network (HF_HUB_OFFLINE must be unset), or read local files: "
                "a corpus of kind 'jsonl' or 'text'"
            ) from error

    return _select(spec, rows())


READERS: dict[str, Callable[[TextSpec], Iterator[str]]] = {
    "world": _read_world,
    "jsonl": _read_json_lines,
    "text": _read_text,
    "hf": _read_hub,
}


def _files(spec: TextSpec, pattern: str) -> list[Path]:
    """The corpus's file, or those of its folder that match, in the order of their names."""
    if not spec.path:
        raise UnreadableCorpus(f"a corpus of kind {spec.kind!r} needs `path`, a file or a folder; got none")
    path = Path(spec.path).expanduser()
    if path.is_file():
        return [path]
    files = sorted(path.glob(pattern)) if path.is_dir() else []
    if not files:
        raise UnreadableCorpus(
            f"path={spec.path!r}: expected a file, or a folder with {pattern}; "
            f"found neither (seen from {Path.cwd()})"
        )
    return files


def _select(spec: TextSpec, rows: Iterator[tuple[str, dict[str, Any]]]) -> Iterator[str]:
    """Texts of the rows that `where` keeps; says what there was when it keeps none."""
    where = dict(spec.where or {})
    seen: dict[str, Counter[str]] = {key: Counter() for key in where}
    n_kept = 0
    for place, row in rows:
        for key in (*where, spec.field):
            if key not in row:
                raise UnreadableCorpus(f"{place}: no field {key!r}; it has {', '.join(map(repr, row))}")
        for key in where:
            seen[key][str(row[key])] += 1
        if any(str(row[key]) != str(value) for key, value in where.items()):
            continue
        if not isinstance(row[spec.field], str):
            raise UnreadableCorpus(
                f"{place}: field {spec.field!r} holds {type(row[spec.field]).__name__}, expected text"
            )
        n_kept += 1
        yield row[spec.field]
    if where and not n_kept:
        found = "; ".join(
            f"{key}: {', '.join(f'{value} ({n})' for value, n in counts.most_common(10)) or 'no rows'}"
            for key, counts in seen.items()
        )
        raise UnreadableCorpus(f"{spec.describe()}: no row where {where}; found {found}")
