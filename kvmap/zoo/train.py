"""Train one model of the family from a seed.

`python -m kvmap.zoo.train --model tiny-large --seed 0 --out DIR`: one thread, no data files, nothing random
but the seed. The same command on the same machine and library versions gives the same weights.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from kvmap.errors import KvmapError
from kvmap.zoo.evaluate import Accuracy, measure_accuracy
from kvmap.zoo.family import MAX_POSITIONS, RECIPES, Recipe, Stage, model_config, recipe_of
from kvmap.zoo.initial import recall_from_the_start
from kvmap.zoo.tokenizer import build_tokenizer
from kvmap.zoo.words import ANSWER_MARK, STOP
from kvmap.zoo.world import OPENING_WORDS, sample_document, split_of

WHOLE_ROW = 0.8  # share of the rows that hold one document; the others join several with EOS and BOS


def train_rows(rng: random.Random, tokenizer: PreTrainedTokenizerFast, stage: Stage) -> Iterator[list[int]]:
    """Endless rows of exactly `stage.length` token ids, each starting with BOS, from the training split."""
    while True:
        row: list[int] = []
        while len(row) < stage.length:
            whole = rng.random() < WHOLE_ROW
            text = sample_document(rng, stage.length if whole else OPENING_WORDS, stage.size, stage.plain)
            if split_of(text) == "train":
                row += [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        yield row[: stage.length]


def answer_mask(input_ids: Tensor, tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """True at each answer: the last word of a sentence with `answer` in it; (batch, tokens) bool."""
    mark, stop = tokenizer.convert_tokens_to_ids([ANSWER_MARK, STOP])
    places = torch.arange(1, input_ids.shape[1] + 1).expand_as(input_ids)
    last_mark = torch.where(input_ids == mark, places, 0).cummax(dim=1).values
    last_stop = torch.where(input_ids == stop, places, 0).cummax(dim=1).values
    mask = torch.zeros_like(input_ids, dtype=torch.bool)
    mask[:, :-1] = (input_ids[:, 1:] == stop) & (last_mark > last_stop)[:, :-1]
    return mask


def weighted_loss(logits: Tensor, input_ids: Tensor, weights: Tensor) -> Tensor:
    """Σ w·nll / Σ w over next-token predictions, in float32.

    Args:
        logits: (batch, tokens, vocabulary).
        input_ids: (batch, tokens).
        weights: (batch, tokens), of each token as a prediction; the first one's is not read.
    """
    nll = torch.nn.functional.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), input_ids[:, 1:].flatten(), reduction="none"
    )
    weights = weights[:, 1:].flatten()
    return (nll * weights).sum() / weights.sum()


def learning_rate_factor(step: int, recipe: Recipe) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    if step < recipe.warm_up:
        return (step + 1) / recipe.warm_up
    done = (step - recipe.warm_up) / max(1, recipe.steps - recipe.warm_up)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


class Course:
    """The stage of the curriculum training is in; the next comes when it is learnt, or has had its time."""

    WINDOW = 25  # steps over which the share of right answers is averaged

    def __init__(self, recipe: Recipe) -> None:
        """Args: the recipe, whose stages are gone through in order; the last one takes what steps remain."""
        self._stages = list(recipe.curriculum)
        self._n_steps = recipe.steps
        self._right: list[float] = []

    @property
    def stage(self) -> Stage:
        """The present stage."""
        return self._stages[0]

    @property
    def answered(self) -> float:
        """Share of right answers in the stage's last steps."""
        recent = self._right[-self.WINDOW :]
        return sum(recent) / max(1, len(recent))

    def record(self, right: float) -> None:
        """Count one step, with the share of its answers that were right."""
        self._right.append(right)
        learnt = len(self._right) >= self.WINDOW and self.answered >= self.stage.until
        if len(self._stages) > 1 and (learnt or len(self._right) >= self.stage.at_most * self._n_steps):
            del self._stages[0]
            self._right.clear()


def _optimiser(model: LlamaForCausalLM, recipe: Recipe) -> torch.optim.AdamW:
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    gains = [weight for weight in model.parameters() if weight.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": gains, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.98), fused=True)


def train_model(
    recipe: Recipe,
    seed: int,
    tokenizer: PreTrainedTokenizerFast,
    report: Callable[[int, float, Course, LlamaForCausalLM], None] | None = None,
) -> LlamaForCausalLM:
    """A trained model; float32 parameters, the forward pass in bfloat16 autocast.

    Args:
        recipe: geometry, steps and rates.
        seed: of the initial weights and of the text.
        tokenizer: the family's.
        report: called after every step with its number (from 1), the loss, the course and the model.
    """
    torch.manual_seed(seed)
    model = LlamaForCausalLM(model_config(recipe, tokenizer)).train()
    recall_from_the_start(model)
    optimiser = _optimiser(model, recipe)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: learning_rate_factor(step, recipe))
    rng = random.Random(f"train/{seed}")
    course = Course(recipe)
    for step in range(1, recipe.steps + 1):
        stage = course.stage
        rows = train_rows(rng, tokenizer, stage)
        n_rows = max(1, recipe.tokens_per_step // stage.length)
        input_ids = torch.tensor([next(rows) for _ in range(n_rows)])
        answers = answer_mask(input_ids, tokenizer)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(input_ids=input_ids, use_cache=False).logits
        loss = weighted_loss(logits, input_ids, 1 + (recipe.answer_weight - 1) * answers.float())
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        scheduler.step()
        right = logits.detach()[:, :-1].argmax(-1)[answers[:, 1:]] == input_ids[answers]
        course.record(right.float().mean().item() if len(right) else 0.0)
        if report is not None:
            report(step, loss.item(), course, model)
    return model.eval()


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write an ordinary transformers folder with bfloat16 weights; the weights in memory are rounded too."""
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


class _Log:
    """Plain progress lines: step, loss, time gone and to go, and now and then the accuracy."""

    def __init__(
        self,
        steps: int,
        every: int,
        measure_every: int,
        measure: Callable[[LlamaForCausalLM], dict[str, Accuracy]],
    ) -> None:
        self.steps, self.every, self.measure_every, self.measure = steps, every, measure_every, measure
        self.losses: list[float] = []
        self.start = time.monotonic()

    def __call__(self, step: int, loss: float, course: Course, model: LlamaForCausalLM) -> None:
        self.losses.append(loss)
        last = step == self.steps
        if step % self.every and not last:
            return
        gone = time.monotonic() - self.start
        line = f"step {step}/{self.steps} loss {sum(self.losses) / len(self.losses):.3f}"
        line += f" answers {course.answered:.2f} in rows of {course.stage.length}"
        line += f"; {gone:.0f} s gone, {gone / step * (self.steps - step):.0f} s to go"
        self.losses.clear()
        if last or step % self.measure_every == 0:
            model.eval()
            measured = self.measure(model)
            model.train()
            line += "; " + " ".join(f"{kind} {found.value:.2f}" for kind, found in measured.items())
        print(line, flush=True)


def main(arguments: list[str] | None = None) -> None:
    """Command line of `python -m kvmap.zoo.train`."""
    parser = argparse.ArgumentParser(prog="python -m kvmap.zoo.train", description=__doc__)
    parser.add_argument("--model", required=True, help=f"one of {', '.join(RECIPES)}")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights and the text (default 0)")
    parser.add_argument("--out", type=Path, required=True, help="folder for the weights and the tokenizer")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    recipe = recipe_of(options.model)
    tokenizer = build_tokenizer(MAX_POSITIONS)
    log = _Log(
        recipe.steps,
        50,
        250,
        lambda model: measure_accuracy(model, tokenizer, seed=options.seed, n=120, split="train"),
    )
    save(train_model(recipe, options.seed, tokenizer, log), tokenizer, options.out)
    print(f"saved {options.out}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except KvmapError as error:
        sys.exit(str(error))
