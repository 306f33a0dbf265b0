"""Training: the same weights from the same seed, the right tokens weighted, the right text read."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from kvmap.errors import UnknownName
from kvmap.zoo import family, train
from kvmap.zoo.family import MAX_POSITIONS, RECIPES, Recipe, Stage
from kvmap.zoo.initial import recall_from_the_start
from kvmap.zoo.tokenizer import build_tokenizer
from kvmap.zoo.world import split_of

MICRO = Recipe(
    hidden_size=48,
    n_layers=2,
    n_heads=2,
    n_kv_heads=1,
    head_dim=16,
    mlp_size=32,
    steps=3,
    learning_rate=1e-3,
    warm_up=1,
    tokens_per_step=128,
    curriculum=(Stage(32, 0.2, 0.5, plain=True), Stage(64, 1.0, 0.5)),
)
TOKENIZER = build_tokenizer(MAX_POSITIONS)


def test_training_is_fixed_by_its_seed() -> None:
    first, again, other = (train.train_model(MICRO, seed, TOKENIZER).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_training_moves_every_weight() -> None:
    untrained = train.train_model(dataclasses.replace(MICRO, steps=0), 0, TOKENIZER).state_dict()
    trained = train.train_model(MICRO, 0, TOKENIZER).state_dict()
    assert all(not torch.equal(trained[name], untrained[name]) for name in trained)


def test_answers_and_nothing_else_are_weighted() -> None:
    text = (
        "anna is in rome . question : where is anna ? answer : anna is in rome . "
        "question : how many things does anna have ? answer : anna has zero . the ball is red ."
    )
    input_ids = torch.tensor([TOKENIZER(text)["input_ids"]])
    mask = train.answer_mask(input_ids, TOKENIZER)
    assert TOKENIZER.decode(input_ids[mask]) == "rome zero"


def test_loss_is_the_weighted_mean_of_each_token() -> None:
    """Against one token at a time in float64; float32 sums of 11 terms agree to 1e-5."""
    torch.manual_seed(0)
    logits, input_ids, weights = torch.randn(2, 6, 9), torch.randint(9, (2, 6)), torch.rand(2, 6)
    log_probabilities = logits.double().log_softmax(-1)
    total = sum(
        -weights[row, place + 1].double() * log_probabilities[row, place, input_ids[row, place + 1]]
        for row in range(2)
        for place in range(5)
    )
    torch.testing.assert_close(
        train.weighted_loss(logits, input_ids, weights).double(),
        total / weights[:, 1:].double().sum(),
        rtol=1e-5,
        atol=0,
    )


def test_rows_are_full_start_with_bos_and_come_from_the_training_split() -> None:
    rows = train.train_rows(random.Random(0), TOKENIZER, Stage(96, 1.0, 1.0))
    for _ in range(10):
        row = next(rows)
        assert len(row) == 96
        assert row[0] == TOKENIZER.bos_token_id
        documents = TOKENIZER.decode(row).split("<eos>")
        first = documents[0].removeprefix("<bos>").strip()
        assert split_of(first) == "train"


@pytest.mark.parametrize("name", list(RECIPES))
def test_each_curriculum_can_fill_all_steps(name: str) -> None:
    assert sum(stage.at_most for stage in RECIPES[name].curriculum) == pytest.approx(1)


def test_a_stage_ends_when_it_is_learnt_and_at_the_latest_when_its_share_is_used_up() -> None:
    easy, hard, last = Stage(32, 0.2, 0.5, until=0.8), Stage(64, 0.5, 0.3), Stage(96, 1.0, 0.2)
    recipe = dataclasses.replace(MICRO, steps=200, curriculum=(easy, hard, last))
    course = train.Course(recipe)
    stages = []
    for step in range(recipe.steps):
        stages.append(course.stage)
        course.record(0.9 if step < 60 else 0.1)
    assert stages.count(easy) == train.Course.WINDOW
    assert stages.count(hard) == 60
    assert stages.count(last) == recipe.steps - 60 - train.Course.WINDOW
    assert stages == sorted(stages, key=[easy, hard, last].index)


def test_the_learning_rate_warms_up_and_falls_to_a_tenth() -> None:
    recipe = RECIPES["tiny-large"]
    factors = [train.learning_rate_factor(step, recipe) for step in range(recipe.steps + 1)]
    assert max(factors) == pytest.approx(1)
    assert factors.index(max(factors)) in (recipe.warm_up - 1, recipe.warm_up)
    assert factors[-1] == pytest.approx(0.1)


def test_the_command_trains_reports_and_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(family.RECIPES, "tiny-small", MICRO)
    train.main(["--model", "tiny-small", "--seed", "0", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "step 3/3" in printed
    assert "to go" in printed
    stored = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    trained = train.train_model(MICRO, 0, TOKENIZER).to(torch.bfloat16)
    for name, weight in stored.state_dict().items():
        assert torch.equal(weight, trained.state_dict()[name])


def test_an_unknown_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="tiny-large"):
        train.main(["--model", "tiny-larg", "--out", str(tmp_path)])


def _initial(head_dim: int = 32) -> LlamaForCausalLM:
    recipe = dataclasses.replace(RECIPES["tiny-medium"], n_layers=2, head_dim=head_dim)
    torch.manual_seed(0)
    config = family.model_config(recipe, TOKENIZER)
    model = LlamaForCausalLM._from_config(config, attn_implementation="eager").eval()
    recall_from_the_start(model)
    return model


@pytest.mark.parametrize("head_dim", [24, 32])
def test_first_layer_starts_looking_one_two_and_three_tokens_back(head_dim: int) -> None:
    """Most of the attention: the neighbours at a distance of one are 3 nats lower, the noise about 0.3."""
    input_ids = torch.randint(4, len(TOKENIZER), (2, 60), generator=torch.Generator().manual_seed(0))
    attention = _initial(head_dim)(input_ids=input_ids, output_attentions=True).attentions[0]
    for head in range(attention.shape[1]):
        looked_at = attention[:, head].diagonal(-(1 + head % 3), dim1=-2, dim2=-1)
        assert looked_at[:, 3:].mean() > 0.7


def test_second_layer_starts_attending_to_the_answer_above_all_other_colours() -> None:
    text = "the cup is red . the ball is blue . the key is green . question : what colour is the ball ?"
    input_ids = TOKENIZER(text + " answer : the ball is")["input_ids"]
    output = _initial()(input_ids=torch.tensor([input_ids]), output_attentions=True)
    from_last = output.attentions[1][0, 0, -1]
    colours = {
        colour: from_last[input_ids.index(TOKENIZER.convert_tokens_to_ids(colour))].item()
        for colour in ("red", "blue", "green")
    }
    assert max(colours, key=lambda colour: colours[colour]) == "blue"
