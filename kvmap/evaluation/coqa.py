"""CoQA as its authors define it: files to conversations, answers to scores.

Reddy, Chen and Manning 2019, "CoQA: A Conversational Question Answering Challenge", §4 and the evaluation
script that came with it.
"""

from __future__ import annotations

import json
import random
import re
import string
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvmap.data import UnreadableCorpus, read_json_lines
from kvmap.errors import KvmapError
from kvmap.evaluation.conversation_items import Conversation, Turn

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class Score:
    """How well one answer agrees with people's, each in [0, 1].

    Attributes:
        f1: of the words both have.
        exact_match: whether they are the same after normalising.
    """

    f1: float
    exact_match: float


def normalise_answer(text: str) -> str:
    """Lower case, then without ASCII punctuation, then without a, an and the, then in single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def word_f1(gold: str, predicted: str) -> float:
    """``2 P R / (P + R)`` over the bags of normalised words, P = shared / predicted, R = shared / gold.

    Where one of them has no words left, 1 if neither has any, else 0.
    """
    gold_words, words = normalise_answer(gold).split(), normalise_answer(predicted).split()
    if not gold_words or not words:
        return float(gold_words == words)
    shared = (Counter(gold_words) & Counter(words)).total()
    if shared == 0:
        return 0.0
    precision, recall = shared / len(words), shared / len(gold_words)
    return 2 * precision * recall / (precision + recall)


def score_answer(golds: Sequence[str], predicted: str) -> Score:
    """The score of an answer to a question that several people answered.

    With n > 1 golds: the mean over i of the best score against all golds but the i-th, so that a model is
    judged by n − 1 answers, as a person is judged by those of the others. With one: the score against it.

    Raises:
        KvmapError: no golds.
    """
    if not golds:
        raise KvmapError("an answer is scored against at least one gold answer; got none")
    n = len(golds)
    subsets = [[*golds[:i], *golds[i + 1 :]] for i in range(n)] if n > 1 else [list(golds)]
    f1 = sum(max(word_f1(gold, predicted) for gold in subset) for subset in subsets)
    said = normalise_answer(predicted)
    same = sum(any(normalise_answer(gold) == said for gold in subset) for subset in subsets)
    return Score(f1 / n, same / n)


def coqa_conversations(
    path: str | Path, limit: int | None = None, seed: int = 0, max_turns: int | None = None
) -> list[Conversation]:
    """Conversations of a file; the task is the file's stem.

    Two layouts: JSON Lines of `{story, turns: [{question, answers: [text, ...]}]}`, and CoQA's own, one JSON
    object `{data: [{id, story, questions, answers, additional_answers}]}`, whose additional answers follow
    the answer of each turn.

    Args:
        path: the file.
        limit: keep so many, drawn by `seed`, in the file's order; None: all.
        seed: which. Equal seeds keep equal ones, and a smaller limit a subset of a larger one's.
        max_turns: keep the first so many turns of each; None: all.

    Raises:
        UnreadableCorpus: no such file, or a conversation that is malformed; names the file and where in it.
        KvmapError: a limit below 1.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise UnreadableCorpus(
            f"path={str(path)!r}: expected a file of conversations; found none (seen from {Path.cwd()})"
        )
    for name, value in (("limit", limit), ("max_turns", max_turns)):
        if value is not None and value < 1:
            raise KvmapError(f"{name}={value} for {file}: expected at least 1, or null for all")
    found = [
        Conversation(file.stem, str(row.get("id", place)), _story(row, file, place), _turns(row, file, place))
        for place, row in _rows(file)
    ]
    if not found:
        raise UnreadableCorpus(f"{file}: no conversations in it; expected {{story, turns}} on each line")
    order = list(range(len(found)))
    random.Random(seed).shuffle(order)
    return [found[index].first(max_turns) for index in sorted(order[:limit])]


def _rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where each conversation stands, and its fields, in either layout."""
    try:
        whole = json.loads(file.read_bytes())
    except ValueError:  # lines, or damaged: reading line by line says where
        whole = None
    if isinstance(whole, dict) and isinstance(whole.get("data"), list):
        for number, row in enumerate(whole["data"], start=1):
            place = f"conversation {number}"
            if not isinstance(row, dict):
                raise _malformed(file, place, "data", row, "objects with a story and questions")
            yield place, row
        return
    for number, row in read_json_lines(file):
        yield f"line {number}", row


def _story(row: dict[str, Any], file: Path, place: str) -> str:
    story = row.get("story")
    if not isinstance(story, str) or not story.strip():
        raise _malformed(file, place, "story", story, "text that is not blank")
    return story.strip()


def _turns(row: dict[str, Any], file: Path, place: str) -> tuple[Turn, ...]:
    raw = row.get("turns") if "turns" in row else _official_turns(row, file, place)
    if not isinstance(raw, list) or not raw:
        raise _malformed(file, place, "turns", raw, "one or more turns")
    turns = []
    for number, turn in enumerate(raw, start=1):
        here = f"{place}, turn {number}"
        turn = turn if isinstance(turn, dict) else {}
        question, answers = turn.get("question"), turn.get("answers")
        if not isinstance(question, str) or not question.strip():
            raise _malformed(file, here, "question", question, "text that is not blank")
        if (
            not isinstance(answers, list)
            or not answers
            or not all(isinstance(answer, str) for answer in answers)
        ):
            raise _malformed(file, here, "answers", answers, "one or more texts")
        turns.append(Turn(question.strip(), tuple(answers)))
    return tuple(turns)


def _official_turns(row: dict[str, Any], file: Path, place: str) -> list[dict[str, Any]]:
    """CoQA's parallel lists as turns; each list must name the same turns in the same order."""
    more = row.get("additional_answers") or {}
    lists = {"questions": row.get("questions"), "answers": row.get("answers")}
    lists |= {f"additional_answers.{name}": entries for name, entries in dict(more).items()}
    texts: dict[str, list[str]] = {}
    for name, entries in lists.items():
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise _malformed(file, place, name, entries, "a list of objects with input_text")
        numbers = [entry.get("turn_id") for entry in entries]
        if numbers != list(range(1, len(entries) + 1)) or len(entries) != len(lists["questions"] or ()):
            raise _malformed(file, place, f"turn_id of {name}", numbers, "those of the questions, from 1")
        texts[name] = [entry.get("input_text", "") for entry in entries]
    asked = texts.pop("questions")
    return [
        {"question": question, "answers": list(answers)}
        for question, answers in zip(asked, zip(*texts.values(), strict=True), strict=True)
    ]


def _malformed(file: Path, place: str, key: str, value: object, expected: str) -> UnreadableCorpus:
    got = repr(value)
    got = got if len(got) <= 60 else got[:57] + "..."
    return UnreadableCorpus(f"{file}, {place}: {key}={got}, expected {expected}; mend or drop it")
