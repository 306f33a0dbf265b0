"""Calibration text that knows the questions' kind: prose, and then questions that are not asked.

    python experiments/supports/traffic.py TEXT.jsonl QUESTIONS.jsonl --asked 200 --prose 848 > TRAFFIC.jsonl

A run with `evaluation.jsonl.limit=<asked>` asks a part of each file's questions; that part is left out here.
"""

from __future__ import annotations

import argparse
import json
from itertools import islice
from pathlib import Path

from kvmap.evaluation.items import jsonl_items


def main() -> None:
    """Print one JSON object a line, {"text": ...}."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path, help="JSON Lines of {text}")
    parser.add_argument("questions", type=Path, nargs="+", help="JSON Lines of {context, choices, answer}")
    parser.add_argument("--asked", type=int, required=True, help="evaluation.jsonl.limit of the run")
    parser.add_argument("--seed", type=int, default=0, help="evaluation.jsonl.seed of the run")
    parser.add_argument("--others", type=int, help="questions of each file to take; all, if not given")
    parser.add_argument("--prose", type=int, required=True, help="documents of TEXT to take, from its start")
    args = parser.parse_args()

    questions = []
    for path in args.questions:
        asked = {item.id for item in jsonl_items(path, args.asked, args.seed)}
        others = [item for item in jsonl_items(path) if item.id not in asked][: args.others]
        questions += [item.context + item.choices[item.answer] for item in others]
    with args.text.open(encoding="utf-8") as lines:
        prose = [json.loads(line)["text"] for line in islice(lines, args.prose)]
    for text in prose + questions:
        print(json.dumps({"text": text}))


if __name__ == "__main__":
    main()
