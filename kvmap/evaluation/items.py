"""Multiple-choice items: the shipped world's questions, or JSON Lines of {context, choices, answer}."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvmap.data import UnreadableCorpus, read_json_lines
from kvmap.errors import KvmapError
from kvmap.zoo import world

LINE_STOP = ("\n",)
WORLD_STOP = ("\n", " .")


@dataclass(frozen=True)
class Item:
    """One question: a context, choices that continue it, and which is right.

    Attributes:
        task: what its score is counted under.
        id: tells it from the other items of its task, in every run.
        context: the prompt.
        choices: continuations of the prompt, with their leading space where they have one.
        answer: index of the right choice.
        stop: where a generated answer ends, besides the end of text.
    """

    task: str
    id: str
    context: str
    choices: tuple[str, ...]
    answer: int
    stop: tuple[str, ...] = LINE_STOP


def world_items(seed: int, n_per_kind: int, kinds: Sequence[str] | None = None) -> list[Item]:
    """Questions of the shipped world's evaluation split; the task is `world_<kind>`.

    Args:
        seed: which questions.
        n_per_kind: questions of each kind.
        kinds: the kinds to ask; None: all.

    Raises:
        UnknownName: no such kind.
    """
    chosen = tuple(world.KINDS if kinds is None else kinds)
    asked = world.questions(seed, n_per_kind * len(chosen), chosen)
    return [
        Item(
            task=f"world_{question.kind}",
            id=f"{seed}/{number}",
            context=question.context + question.question,
            choices=question.choices,
            answer=question.answer,
            stop=WORLD_STOP,
        )
        for number, question in enumerate(asked)
    ]


def jsonl_items(path: str | Path, limit: int | None = None, seed: int = 0) -> list[Item]:
    """Items of a JSON Lines file with {context, choices, answer} on each line; the task is the file's stem.

    Args:
        path: the file, or a folder, of which every `*.jsonl` is taken, in the order of their names.
        limit: keep so many of each file, drawn by `seed`, in the file's order; None: all.
        seed: which subsample. Equal seeds keep equal items, and a smaller limit a subset of a larger one's.

    Raises:
        UnreadableCorpus: no such file, a folder without any, or a line that is malformed; names the file and
            the line.
    """
    file = Path(path).expanduser()
    if file.is_dir():
        files = sorted(file.glob("*.jsonl"))
        if not files:
            raise UnreadableCorpus(
                f"path={str(path)!r}: this folder has no file *.jsonl; expected at least one"
            )
        return [item for one in files for item in jsonl_items(one, limit, seed)]
    if not file.is_file():
        raise UnreadableCorpus(
            f"path={str(path)!r}: expected a JSON Lines file or a folder of them; found none (seen from "
            f"{Path.cwd()})"
        )
    if limit is not None and limit < 1:
        raise KvmapError(f"limit={limit} for {file}: expected at least 1, or null for all")
    items = [_item(row, file, number) for number, row in read_json_lines(file)]
    if not items:
        raise UnreadableCorpus(f"{file}: no items in it; expected lines of {{context, choices, answer}}")
    order = list(range(len(items)))
    random.Random(seed).shuffle(order)
    return [items[index] for index in sorted(order[:limit])]


def _item(row: dict[str, Any], file: Path, number: int) -> Item:
    context, choices, answer = row.get("context"), row.get("choices"), row.get("answer")
    if not isinstance(context, str) or not context.strip():
        raise _malformed(file, number, "context", context, "text that is not blank")
    if (
        not isinstance(choices, list)
        or len(choices) < 2
        or not all(isinstance(choice, str) and choice.strip() for choice in choices)
    ):
        raise _malformed(file, number, "choices", choices, "two or more texts that are not blank")
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(choices):
        raise _malformed(file, number, "answer", answer, f"the index of a choice, 0 to {len(choices) - 1}")
    return Item(file.stem, f"line {number}", context, tuple(choices), answer)


def _malformed(file: Path, number: int, key: str, value: object, expected: str) -> UnreadableCorpus:
    got = repr(value)
    got = got if len(got) <= 60 else got[:57] + "..."
    return UnreadableCorpus(f"{file}, line {number}: {key}={got}, expected {expected}; mend or drop the line")
