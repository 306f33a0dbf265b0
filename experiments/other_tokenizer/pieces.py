"""Train a model of the shipped family on the same world, but with a tokenizer of word pieces.

python experiments/other_tokenizer/pieces.py --model tiny-medium --steps 350 --out DIR: one thread.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Metaspace
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from kvmap.zoo.family import MAX_POSITIONS, Recipe, model_config, recipe_of
from kvmap.zoo.initial import recall_from_the_start
from kvmap.zoo.tokenizer import SPECIAL
from kvmap.zoo.train import Course, learning_rate_factor, save, train_rows, weighted_loss
from kvmap.zoo.words import ANSWER_MARK, STOP
from kvmap.zoo.world import documents

BEGIN = "▁"  # of the first piece of a word
N_TOKENS = 160


def build_pieces(n_tokens: int = N_TOKENS) -> PreTrainedTokenizerFast:
    """Byte-pair merges within words, learnt on the world's training stories; every text starts with BOS."""
    tokenizer = Tokenizer(BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = BpeTrainer(vocab_size=n_tokens, special_tokens=list(SPECIAL), show_progress=False)
    tokenizer.train_from_iterator(documents(0, 400, min_words=64, split="train"), trainer)
    bos = SPECIAL[1]
    tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    pad, bos, eos, unknown = SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        unk_token=unknown,
        padding_side="left",
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def answer_pieces(input_ids: Tensor, tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """(batch, tokens), True at every piece of an answer: the last word of a sentence with `answer` in it."""
    mark, stop = tokenizer.convert_tokens_to_ids([BEGIN + ANSWER_MARK, BEGIN + STOP])
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    inner = torch.tensor([not token.startswith((BEGIN, "<")) for token in tokens])[input_ids]
    places = torch.arange(1, input_ids.shape[1] + 1).expand_as(input_ids)
    last_mark = torch.where(input_ids == mark, places, 0).cummax(dim=1).values
    last_stop = torch.where(input_ids == stop, places, 0).cummax(dim=1).values
    mask = torch.zeros_like(input_ids, dtype=torch.bool)
    mask[:, :-1] = (input_ids[:, 1:] == stop) & (last_mark > last_stop)[:, :-1]
    for column in range(input_ids.shape[1] - 1, 0, -1):
        mask[:, column - 1] |= mask[:, column] & inner[:, column]
    return mask


def train_pieces(recipe: Recipe, seed: int, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """The family's training, each answer's weight on all of its pieces."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(model_config(recipe, tokenizer)).train()
    recall_from_the_start(model)
    optimiser = torch.optim.AdamW(
        model.parameters(),
        recipe.learning_rate,
        betas=(0.9, 0.98),
        weight_decay=recipe.weight_decay,
        fused=True,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: learning_rate_factor(step, recipe))
    rng, course, begun = random.Random(f"train/{seed}"), Course(recipe), time.monotonic()
    for step in range(1, recipe.steps + 1):
        stage = course.stage
        rows = train_rows(rng, tokenizer, stage)
        input_ids = torch.tensor([next(rows) for _ in range(max(1, recipe.tokens_per_step // stage.length))])
        answers = answer_pieces(input_ids, tokenizer)
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
        if step % 25 == 0 or step == recipe.steps:
            print(
                f"step {step}/{recipe.steps} loss {loss.item():.3f} answers {course.answered:.2f} in rows of "
                f"{stage.length}; {time.monotonic() - begun:.0f} s gone",
                flush=True,
            )
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="whose geometry and recipe")
    parser.add_argument("--steps", type=int, help="of the optimiser (default: the recipe's)")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights and the text")
    parser.add_argument("--out", type=Path, required=True, help="folder for weights and tokenizer")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    recipe = recipe_of(asked.model)
    if asked.steps is not None:
        recipe = replace(recipe, steps=asked.steps)
    tokenizer = build_pieces()
    save(train_pieces(recipe, asked.seed, tokenizer), tokenizer, asked.out)


if __name__ == "__main__":
    main()
