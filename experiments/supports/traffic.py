"""Calibration text that knows the questions' kind: prose, then questions and conversations not asked.

    python experiments/supports/traffic.py TEXT.jsonl QUESTIONS.jsonl --asked 200 --prose 848 > TRAFFIC.jsonl

A run with `evaluation.jsonl.limit=<asked>` asks a part of each file's questions, one with
`evaluation.conversation.limit=<asked>` a part of the conversations; those parts are left out here.
"""

from __future__ import annotations

import argparse
import json
from itertools import islice
from pathlib import Path

from kvmap.evaluation.coqa import coqa_conversations
from kvmap.evaluation.items import jsonl_items


def other_questions(path: Path, asked: int, seed: int, limit: int | None) -> list[str]:
    """Questions of a file that are not asked, each with its right answer."""
    known = {item.id for item in jsonl_items(path, asked, seed)}
    others = [item for item in jsonl_items(path) if item.id not in known][:limit]
    return [item.context + item.choices[item.answer] for item in others]


def other_conversations(path: Path, asked: int, seed: int, limit: int | None) -> list[str]:
    """Conversations of a file that are not held, with people's answers."""
    known = {conversation.id for conversation in coqa_conversations(path, asked, seed)}
    texts = []
    for conversation in coqa_conversations(path):
        if conversation.id not in known:
            form = conversation.form
            text = conversation.story
            for turn in conversation.turns:
                text += f"{form.before_question}{turn.question}{form.before_answer} {turn.answers[0]}"
                text += form.after_answer
            texts.append(text)
    return texts[:limit]


def main() -> None:
    """Print one JSON object a line, {"text": ...}."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path, help="JSON Lines of {text}")
    parser.add_argument("questions", type=Path, nargs="+", help="JSON Lines of {context, choices, answer}")
    parser.add_argument("--asked", type=int, required=True, help="evaluation.jsonl.limit of the run")
    parser.add_argument("--seed", type=int, default=0, help="evaluation.jsonl.seed of the run")
    parser.add_argument("--others", type=int, help="questions of each file to take; all, if not given")
    parser.add_argument("--prose", type=int, required=True, help="documents of TEXT to take, from its start")
    parser.add_argument("--conversations", type=Path, help="CoQA's conversations")
    parser.add_argument("--held", type=int, help="evaluation.conversation.limit of the run")
    parser.add_argument("--other-conversations", type=int, help="how many to take; all, if not given")
    args = parser.parse_args()
    if args.conversations and args.held is None:
        parser.error("--conversations needs --held, so that those of the run are left out")

    traffic = []
    for path in args.questions:
        traffic += other_questions(path, args.asked, args.seed, args.others)
    if args.conversations:
        traffic += other_conversations(args.conversations, args.held, args.seed, args.other_conversations)
    with args.text.open(encoding="utf-8") as lines:
        prose = [json.loads(line)["text"] for line in islice(lines, args.prose)]
    for text in prose + traffic:
        print(json.dumps({"text": text}))


if __name__ == "__main__":
    main()
