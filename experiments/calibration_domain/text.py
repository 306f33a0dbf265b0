"""Calibration texts that drift away from what a hand-off carries, all in the words of the shipped world.

    python experiments/calibration_domain/text.py > TEXTS.jsonl

One {"text", "domain", "seed"} a line. Domains: `world` (stories, and questions on them), its `statements`
and its `questions` alone, its words `shuffled` in each document, and words drawn at `random`.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator

from kvmap.zoo import world

QUESTION = re.compile(r"question : .*? answer : .*? \.(?= |$)")
DOMAINS = ("world", "statements", "questions", "shuffled", "random")


def texts(seed: int, n: int, n_words: int) -> Iterator[tuple[str, str]]:
    """Domain and text; every document has at least so many words in every domain."""
    rng = random.Random(f"domains/{seed}")
    # a part of a document must be long enough too
    documents = list(world.documents(seed, n, min_words=6 * n_words))
    words = sorted({word for document in documents for word in document.split()})
    for document in documents:
        asked = " ".join(QUESTION.findall(document))
        told = " ".join(QUESTION.sub("", document).split())
        mixed = document.split()[:n_words]
        rng.shuffle(mixed)
        drawn = rng.choices(words, k=n_words)
        found = (document, told, asked, " ".join(mixed), " ".join(drawn))
        for domain, text in zip(DOMAINS, found, strict=True):
            yield domain, " ".join(text.split()[:n_words])


def main() -> None:
    """Print the texts of every seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1000, 1001, 1002])
    parser.add_argument("--documents", type=int, default=120)
    parser.add_argument("--words", type=int, default=280, help="of each text; one is one token")
    given = parser.parse_args()
    for seed in given.seeds:
        for domain, text in texts(seed, given.documents, given.words):
            print(json.dumps({"text": text, "domain": domain, "seed": seed}))


if __name__ == "__main__":
    main()
