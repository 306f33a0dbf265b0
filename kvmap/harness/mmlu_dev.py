"""MMLU questions without a network: the 282 development items that lm-eval's own package carries.

They stand there as worked examples of the chain-of-thought prompts of MMLU (`tasks/mmlu/flan_cot_fewshot`),
five a subject: a question with its lettered choices, and an answer that ends in one letter. Read at run time;
nothing of them is kept here. The task (`mmlu_dev.yaml`) asks them as MMLU is asked, with up to four others of
the same subject before them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import lm_eval
import yaml
from lm_eval.api.samplers import ContextSampler

from kvmap.errors import KvmapError

FOLDER = Path("tasks") / "mmlu" / "flan_cot_fewshot"
LETTERS = "ABCDE"
_ANSWER = re.compile(r"answer is \(([A-E])\)")


class Documents(list[dict[str, Any]]):
    """Items as lm-eval reads a data set's split: a list that knows its columns."""

    @property
    def features(self) -> dict[str, None]:
        """The columns, by name."""
        return dict.fromkeys(self[0])


class SameSubject(ContextSampler):
    """The first n other items of a question's own subject, so that no answer stands in its own prompt."""

    def sample(
        self, n: int, eval_doc: Mapping[str, Any] | None = None, df: Any = None, **_: Any
    ) -> Sequence[dict[str, Any]]:
        """lm-eval's signature; `eval_doc` is the question.

        Raises:
            KvmapError: more examples than the subject has.
        """
        if eval_doc is None:
            return list(self.df[:n])
        others = [doc for doc in self.df if doc["subject"] == eval_doc["subject"] and doc != eval_doc]
        if n > len(others):
            raise KvmapError(
                f"mmlu_dev: num_fewshot={n}, and {eval_doc['subject']} has {len(others)} other items; "
                "expected at most 4, or at most 3 for all of the 57 subjects"
            )
        return others[:n]


def dataset(**_: Any) -> dict[str, Documents]:
    """The one split, `test`, as lm-eval asks for a task's data: every subject's first item, then every
    subject's second, and so on, so that the first so many documents cover the subjects evenly.

    Raises:
        KvmapError: an installed lm-eval that carries no such items.
    """
    folder = Path(lm_eval.__file__).parent / FOLDER
    subjects = [_items(file) for file in sorted(folder.glob("mmlu_*.yaml"))]
    rounds = zip_longest(*subjects)
    items = [item for one in rounds for item in one if item is not None]
    if not items:
        raise KvmapError(
            f"mmlu_dev: {folder} holds no items; this lm-eval does not carry them. Install lm-eval 0.4.13, "
            "or take the task mmlu, which reads the hub"
        )
    return {"test": Documents(items)}


def _items(file: Path) -> list[dict[str, Any]]:
    """A subject's items; one whose text has another form is left out, as no such item is known."""
    config = yaml.load(file.read_text(encoding="utf-8"), Loader=_Loader)
    subject = config["dataset_name"].replace("_", " ")
    parsed = (parse(sample) for sample in config["fewshot_config"]["samples"])
    return [{"subject": subject, **item} for item in parsed if item is not None]


def parse(sample: Mapping[str, str]) -> dict[str, Any] | None:
    """Question, choices, their letters and the right one's index, of a worked example; None if it is none.

    Args:
        sample: `question`, which ends in `(A) ... (B) ... (C) ...`, and `target`, which ends in
            `answer is (B).`
    """
    question, rest = sample["question"].rsplit("(A) ", 1) if "(A) " in sample["question"] else ("", "")
    choices = []
    for letter in LETTERS[1:]:
        choice, mark, after = rest.partition(f"({letter}) ")
        choices.append(choice.strip())
        if not mark:
            break
        rest = after
    else:
        choices.append(rest.strip())
    answers = _ANSWER.findall(sample["target"])
    if not answers or not question.strip() or LETTERS.index(answers[-1]) >= len(choices):
        return None
    return {
        "question": question.strip(),
        "choices": choices,
        "letters": list(LETTERS[: len(choices)]),
        "answer": LETTERS.index(answers[-1]),
    }


class _Loader(yaml.SafeLoader):
    """lm-eval's files name functions; the items need none of them."""


_Loader.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))
