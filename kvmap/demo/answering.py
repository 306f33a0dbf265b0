"""One answer, and how sure of it the model that gave it is."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvmap.evaluation.conversation_encoding import encode
from kvmap.evaluation.conversation_speakers import Replying
from kvmap.models.loaded import LoadedModel
from kvmap.transfer import HandOff, score_continuations

CONFIDENCES = ("first", "mean")


@dataclass(frozen=True)
class Reply:
    """An answer with its probability.

    ``first = p(a_1 | context)``, ``mean = exp(1/n Σ_i log p(a_i | context, a_<i))`` over the n tokens of the
    answer as it stands in the text, which later turns read. Both are 0 of an answer without a token.

    Attributes:
        text: the answer.
        first: probability of its first token.
        mean: geometric mean over its tokens.
    """

    text: str
    first: float
    mean: float

    def confidence(self, kind: str) -> float:
        """The one of `CONFIDENCES`."""
        return {"first": self.first, "mean": self.mean}[kind]


def reply(model: LoadedModel, hand_off: HandOff, replying: Replying) -> Reply:
    """The model's greedy answer from a hand-off, which stays as it is."""
    text = replying.reply(model, hand_off)
    ids = encode(replying.tokenizer, f" {' '.join(text.split())}") if text else ()
    if not ids:
        return Reply(text, 0.0, 0.0)
    log_probs = score_continuations(model, hand_off, [ids])[0].double()
    return Reply(text, math.exp(float(log_probs[0])), math.exp(float(log_probs.mean())))
