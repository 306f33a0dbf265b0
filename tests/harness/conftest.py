"""Tiny random models of two families with a byte-level tokenizer, and local tasks."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from kvmap.harness.pool import Pool
from kvmap.mappers import IdentityMapper, Mapper
from kvmap.models.pair import LoadedModel, ModelPair
from kvmap.transfer import TransferOptions
from kvmap.zoo import world
from tests.tiny_random_models import FAMILIES

MAX_LENGTH = 256
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def byte_tokenizer(*, adds_bos: bool) -> PreTrainedTokenizerFast:
    """A small byte-level BPE, as Llama's and Qwen's are: a stop may be several tokens, or part of one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [question.context + question.question for question in world.questions(1, 30, None)]
    tokenizer.train_from_iterator(texts, trainer)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>" if adds_bos else None,
        eos_token="</s>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        padding_side="left",
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


@dataclass(frozen=True)
class Family:
    """A model with its tokenizer, loaded as kvmap does."""

    name: str
    loaded: LoadedModel

    @property
    def tokenizer(self) -> Any:
        return self.loaded.tokenizer


def build_family(name: str, *, adds_bos: bool, seed: int = 3) -> Family:
    tokenizer = byte_tokenizer(adds_bos=adds_bos)
    model = FAMILIES[name](
        seed=seed,
        n_layers=2,
        vocab_size=len(tokenizer),
        max_position_embeddings=MAX_LENGTH,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return Family(name, LoadedModel.from_model(model, tokenizer, name=name))


@pytest.fixture(scope="session")
def llama() -> Family:
    return build_family("llama", adds_bos=True)


@pytest.fixture(scope="session")
def qwen() -> Family:
    return build_family("qwen3", adds_bos=False)


@pytest.fixture(scope="session", params=["llama", "qwen"])
def family(request: pytest.FixtureRequest) -> Family:
    found: Family = request.getfixturevalue(request.param)
    return found


def identity_pool(family: Family, *arms: str, **settings: Any) -> Pool:
    """A pool whose source is its target, all arms with a mapper by the identity map."""
    shape = tuple((layer.n_kv_heads, layer.head_dim) for layer in family.loaded.geometry.layers)
    mappers: dict[str, Mapper | None] = {
        arm: None if arm in ("target", "source", "no_context") else IdentityMapper(shape)
        for arm in arms or ("mapped",)
    }
    options = settings.pop("options", TransferOptions())
    settings.setdefault("progress", lambda iterable, *_: iterable)
    return Pool(ModelPair(family.loaded, family.loaded), mappers, options, **settings)


@dataclass(frozen=True)
class LocalTasks:
    """A folder of YAML tasks over JSON files, for lm-eval's include_path.

    `local_choices`: four choices of one to several tokens, with examples; `local_pairs`: two contexts and
    one continuation, as WinoGrande; `local_words`: generated answers with two filters; `local_texts`: whole
    texts.
    """

    folder: Path


@pytest.fixture(scope="session")
def local_tasks(tmp_path_factory: pytest.TempPathFactory) -> LocalTasks:
    folder = tmp_path_factory.mktemp("tasks")
    asked = world.questions(7, 12, None)
    rows = [
        {
            "context": question.context[-160:] + question.question,
            "choices": [*question.choices[:2], question.choices[2] + " and then", " of"],
            "answer": min(question.answer, 3),
            "word": question.choices[question.answer].strip(),
        }
        for question in asked
    ]
    _write(folder / "test.jsonl", rows[:7])
    _write(folder / "train.jsonl", rows[7:])
    base = {
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {name: str(folder / f"{name}.jsonl") for name in ("test", "train")},
            "cache_dir": str(folder / "cache"),
        },
        "test_split": "test",
        "fewshot_split": "train",
        "metadata": {"version": 3.0},
    }
    mean = {"aggregation": "mean", "higher_is_better": True}
    choices = {
        "task": "local_choices",
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", **mean}, {"metric": "acc_norm", **mean}],
    }
    pairs = {
        "task": "local_pairs",
        "output_type": "multiple_choice",
        "doc_to_text": "{{0}}",
        "doc_to_choice": "{{[context, context[40:]]}}",
        "doc_to_target": " and so it was",
        "metric_list": [{"metric": "acc", **mean}],
    }
    words = {
        "task": "local_words",
        "output_type": "generate_until",
        "doc_to_text": "{{context}}",
        "doc_to_target": "{{word}}",
        "generation_kwargs": {"until": [" is", "\n\n"], "do_sample": False, "max_gen_toks": 10},
        "filter_list": [
            {
                "name": "strict-match",
                "filter": [
                    {"function": "regex", "regex_pattern": "^ ([a-z]+) "},
                    {"function": "take_first"},
                ],
            },
            {
                "name": "flexible-extract",
                "filter": [
                    {"function": "regex", "regex_pattern": "([a-z]+)", "group_select": -1},
                    {"function": "take_first"},
                ],
            },
        ],
        "metric_list": [{"metric": "exact_match", **mean}],
    }
    texts = {
        "task": "local_texts",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{context}} {{context}} {{context}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    }
    for task in (choices, pairs, words, texts):
        (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump({**base, **task}))
    return LocalTasks(folder)


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def instances(
    kind: str, arguments: Sequence[tuple[Any, ...]], task: str = "t", seed: int | None = None
) -> list[Any]:
    """lm-eval requests, one document each; shuffled by a seed."""
    from lm_eval.api.instance import Instance

    asked = [Instance(kind, {}, args, 0, metadata=(task, n, 1)) for n, args in enumerate(arguments)]
    if seed is not None:
        random.Random(seed).shuffle(asked)
    return asked


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield
