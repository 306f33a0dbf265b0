"""Measure a model of the family: `python -m kvmap.zoo.evaluate --model tiny-large`.

Accuracy on held-out questions (the choice whose word the model finds likeliest after the prompt) and
perplexity on held-out documents, both from the evaluation split, with the weights exactly as stored.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from kvmap.errors import KvmapError
from kvmap.zoo import NAMES, weights_folder
from kvmap.zoo.world import CHOICES, KINDS, ONE_HOP, Question, Split, documents, questions


@dataclass(frozen=True)
class Accuracy:
    """Share of right answers, how many were asked, the binomial standard error, and a blind guess's share."""

    value: float
    n: int
    standard_error: float
    chance: float


@dataclass(frozen=True)
class Perplexity:
    """exp of the mean negative log-likelihood, that mean (nats a token), its standard error by document."""

    value: float
    nll_nats: float
    standard_error_nats: float
    n_tokens: int
    n_documents: int


def _accuracy(right: list[bool], chance: float) -> Accuracy:
    n = len(right)
    value = sum(right) / n if n else math.nan
    return Accuracy(value, n, math.sqrt(value * (1 - value) / n) if n else math.nan, chance)


@torch.no_grad()
def answer_questions(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, asked: list[Question], batch_size: int = 16
) -> list[int]:
    """Index of the likeliest choice for each question; every choice of the world is one token.

    Prompts are batched in order of length and padded on the right, which a causal model's earlier tokens
    do not see, so the answer is read at each prompt's own last token.
    """
    prompts = [tokenizer(question.context + question.question)["input_ids"] for question in asked]
    chosen = [0] * len(asked)
    order = sorted(range(len(asked)), key=lambda row: len(prompts[row]))
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        longest = max(len(prompts[row]) for row in rows)
        padded = [prompts[row] + [tokenizer.pad_token_id] * (longest - len(prompts[row])) for row in rows]
        logits = model(input_ids=torch.tensor(padded), use_cache=False).logits.float()
        for place, row in enumerate(rows):
            choices = tokenizer.convert_tokens_to_ids([choice.strip() for choice in asked[row].choices])
            chosen[row] = int(logits[place, len(prompts[row]) - 1, choices].argmax())
    return chosen


def measure_accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    n: int,
    split: Split = "evaluation",
) -> dict[str, Accuracy]:
    """Accuracy of each question kind, and of the one-hop kinds together, on `n` questions in all."""
    asked = questions(seed, n, split=split)
    chosen = answer_questions(model, tokenizer, asked)
    right: dict[str, list[bool]] = {kind: [] for kind in KINDS}
    for question, choice in zip(asked, chosen, strict=True):
        right[question.kind].append(choice == question.answer)
    table = {kind: _accuracy(right[kind], 1 / len(CHOICES[kind])) for kind in KINDS}
    one_hop = [found for kind in ONE_HOP for found in right[kind]]
    return table | {"one_hop": _accuracy(one_hop, 1 / len(CHOICES[ONE_HOP[0]]))}


@torch.no_grad()
def measure_perplexity(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    n: int,
    length: int = 256,
    split: Split = "evaluation",
) -> Perplexity:
    """Perplexity of the first `length` tokens (BOS among them, not predicted) of `n` documents."""
    means = []
    for text in documents(seed, n, min_words=length, split=split):
        input_ids = torch.tensor([tokenizer(text)["input_ids"][:length]])
        logits = model(input_ids=input_ids, use_cache=False).logits.float()
        means.append(torch.nn.functional.cross_entropy(logits[0, :-1], input_ids[0, 1:]).double())
    nll = torch.stack(means)
    mean = float(nll.mean())
    error = float(nll.std() / math.sqrt(n)) if n > 1 else math.nan
    return Perplexity(math.exp(mean), mean, error, n * (length - 1), n)


def main(arguments: list[str] | None = None) -> None:
    """Command line of `python -m kvmap.zoo.evaluate`: a table, and the same as JSON where asked."""
    parser = argparse.ArgumentParser(prog="python -m kvmap.zoo.evaluate", description=__doc__)
    parser.add_argument("--model", required=True, help=f"one of {', '.join(NAMES)}, or a folder of weights")
    parser.add_argument("--seed", type=int, default=0, help="of the held-out text (default 0)")
    parser.add_argument(
        "--questions", type=int, default=1200, help="in all, the kinds in turn (default 1200)"
    )
    parser.add_argument("--documents", type=int, default=100, help="for perplexity (default 100)")
    parser.add_argument("--length", type=int, default=256, help="tokens of each document (default 256)")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    named = Path(options.model)
    folder = named if named.is_dir() else weights_folder(options.model)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    accuracy = measure_accuracy(model, tokenizer, seed=options.seed, n=options.questions)
    perplexity = measure_perplexity(
        model, tokenizer, seed=options.seed, n=options.documents, length=options.length
    )
    for kind, found in accuracy.items():
        error = found.standard_error
        print(f"{kind:8} {found.value:.3f} ± {error:.3f} (n {found.n}, chance {found.chance:.3f})")
    print(
        f"perplexity {perplexity.value:.3f}"
        f" (nll {perplexity.nll_nats:.4f} ± {perplexity.standard_error_nats:.4f} nats a token,"
        f" {perplexity.n_documents} documents of {options.length} tokens)"
    )
    if options.json is not None:
        table = {kind: asdict(found) for kind, found in accuracy.items()}
        text = json.dumps({"accuracy": table, "perplexity": asdict(perplexity)}, indent=2)
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    try:
        main()
    except KvmapError as error:
        sys.exit(str(error))
