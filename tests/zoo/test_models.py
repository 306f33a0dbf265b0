"""The shipped models: ordinary folders, one tokenizer, small, and able to do what the model card says."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from kvmap import zoo
from kvmap.errors import UnknownName
from kvmap.zoo import evaluate
from kvmap.zoo.family import MAX_POSITIONS, RECIPES
from kvmap.zoo.tokenizer import build_tokenizer
from kvmap.zoo.world import ONE_HOP, documents, questions

MATCHED = ("tiny-small", "tiny-medium", "tiny-large")


def test_all_weights_together_stay_below_16_megabytes() -> None:
    folder = Path(zoo.__file__).parent / "weights"
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) <= 16_000_000


def test_every_recipe_is_shipped() -> None:
    assert tuple(RECIPES) == zoo.NAMES
    assert all(zoo.weights_folder(name).is_dir() for name in zoo.NAMES)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(UnknownName, match="tiny-large"):
        zoo.weights_folder("tiny-huge")


@pytest.mark.parametrize("name", zoo.NAMES)
def test_a_folder_loads_as_any_transformers_folder(name: str) -> None:
    started = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(zoo.weights_folder(name), dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(zoo.weights_folder(name))
    assert time.perf_counter() - started < 5  # takes about 0.05 s alone; the rest is room for a busy machine
    assert model.dtype == torch.bfloat16
    assert 400_000 < model.num_parameters() < 4_000_000
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.num_hidden_layers == RECIPES[name].n_layers


def test_kv_matches_among_three_and_not_in_the_fourth() -> None:
    configs = {name: AutoConfig.from_pretrained(zoo.weights_folder(name)) for name in zoo.NAMES}
    kv = {name: (config.num_key_value_heads, config.head_dim) for name, config in configs.items()}
    assert len({kv[name] for name in MATCHED}) == 1
    assert all(ours != theirs for ours, theirs in zip(kv["tiny-wide"], kv["tiny-large"], strict=True))
    assert len({configs[name].num_hidden_layers for name in MATCHED}) == 3
    assert len({configs[name].hidden_size for name in MATCHED}) == 3


@pytest.mark.parametrize("name", zoo.NAMES)
def test_tokenizers_agree_by_ids(name: str) -> None:
    built = build_tokenizer(MAX_POSITIONS)
    shipped = AutoTokenizer.from_pretrained(zoo.weights_folder(name))
    assert shipped.get_vocab() == built.get_vocab()
    for text in documents(seed=0, n=3):
        assert shipped(text)["input_ids"] == built(text)["input_ids"]
    for special in ("pad_token_id", "bos_token_id", "eos_token_id", "unk_token_id"):
        assert getattr(shipped, special) == getattr(built, special)


def test_text_comes_back_and_no_word_is_unknown() -> None:
    tokenizer = AutoTokenizer.from_pretrained(zoo.weights_folder("tiny-small"))
    texts = [*documents(seed=0, n=10)]
    for question in questions(seed=0, n=12):
        texts += [question.context + question.question + choice for choice in question.choices]
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        assert ids[0] == tokenizer.bos_token_id
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
        assert len(ids) == len(text.split()) + 1


def test_a_choice_is_one_token_after_its_prompt() -> None:
    tokenizer = AutoTokenizer.from_pretrained(zoo.weights_folder("tiny-small"))
    for question in questions(seed=0, n=12):
        prompt = tokenizer(question.context + question.question)["input_ids"]
        for choice in question.choices:
            joined = tokenizer(question.context + question.question + choice)["input_ids"]
            assert joined[:-1] == prompt


def test_the_large_model_answers_one_hop_questions() -> None:
    """At least nine in ten of 60: the card's share is higher by more than three binomial standard errors."""
    model = AutoModelForCausalLM.from_pretrained(zoo.weights_folder("tiny-large"), dtype="auto").eval()
    tokenizer = AutoTokenizer.from_pretrained(zoo.weights_folder("tiny-large"))
    asked = questions(seed=1, n=60, kinds=ONE_HOP)
    chosen = evaluate.answer_questions(model, tokenizer, asked)
    right = sum(choice == question.answer for choice, question in zip(chosen, asked, strict=True))
    assert right >= 54


def test_evaluation_counts_every_kind_and_reads_the_weights_as_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "numbers.json"
    evaluate.main(
        [
            "--model",
            "tiny-small",
            "--questions",
            "12",
            "--documents",
            "2",
            "--length",
            "64",
            "--json",
            str(out),
        ]
    )
    printed = capsys.readouterr().out
    assert "two_hop" in printed
    assert "perplexity" in printed
    assert out.is_file()


def test_padding_in_a_batch_changes_no_answer() -> None:
    model = AutoModelForCausalLM.from_pretrained(zoo.weights_folder("tiny-small"), dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(zoo.weights_folder("tiny-small"))
    asked = questions(seed=4, n=12)
    together = evaluate.answer_questions(model, tokenizer, asked, batch_size=12)
    assert together == evaluate.answer_questions(model, tokenizer, asked, batch_size=1)
