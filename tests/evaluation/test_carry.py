"""What the target goes on from at the one hand-off of a conversation."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kvmap.config import schema
from kvmap.errors import KvmapError
from kvmap.evaluation import conversation_settings
from kvmap.evaluation.answers import Answers
from kvmap.evaluation.conversation import TurnResult, evaluate_conversations
from kvmap.evaluation.conversation_carry import carried_text, carry_rows, flop_shares
from kvmap.evaluation.conversation_items import Conversation, Form, Turn, world_conversations
from kvmap.evaluation.conversation_settings import ConversationSettings
from kvmap.mappers import IdentityMapper
from kvmap.models.capture import prefill
from kvmap.models.pair import LoadedModel, ModelPair
from kvmap.transfer import TransferOptions, native, transfer
from tests.evaluation.test_conversation import (
    greedy_by_hand,
    hold,
    plain_answer,
    plain_conversation,
    said,
    text_so_far,
)
from tests.tiny_random_models import FAMILIES

TURN, N_TURNS = 3, 4
SETTINGS = ConversationSettings(mode="at_turn", turn=TURN, max_new_tokens=3, re_prefill=True)
SHORTER = ("artifacts", "fresh")


@pytest.fixture(scope="module")
def conversations():
    return world_conversations(seed=3, n=2, n_turns=N_TURNS)


@pytest.fixture(scope="module")
def results(pair, arms, conversations):
    chosen = {name: arms[name] for name in ("target", "source", "mapped")}
    return {
        carry: hold(pair, chosen, conversations, replace(SETTINGS, carry=carry))
        for carry in conversation_settings.CARRIES
    }


def of(found, arm, conversation):
    return [result for result in found if (result.arm, result.id) == (arm, conversation.id)]


def handed_by_hand(conversation, carry, answers):
    """The text that a person would hand over before turn `TURN`, given the answers before it."""
    if carry == "everything":
        return text_so_far(conversation, answers)
    form, turn = conversation.form, conversation.turns[TURN - 1]
    artifact = f"{form.before_answer} {answers[-1]}{form.after_answer}" if carry == "artifacts" else ""
    return conversation.story + artifact + form.before_question + turn.question + form.before_answer


@pytest.mark.parametrize("carry", conversation_settings.CARRIES)
def test_the_target_goes_on_from_the_text_that_is_carried(
    pair, arms, models, tokenizer, conversations, results, carry
):
    for conversation in conversations:
        stop = conversation.form.stop
        before = plain_conversation(models["source"], tokenizer, conversation.first(TURN - 1), "generated")
        ids = tokenizer(handed_by_hand(conversation, carry, before))["input_ids"]
        batch = torch.tensor([ids])
        for arm, start in (
            ("mapped", transfer(prefill(pair.source, batch), arms["mapped"], pair.target, batch)),
            ("re_prefill", native(pair.target, batch)),
        ):
            answers = [*before, greedy_by_hand(pair.target, tokenizer, start, [], stop)]
            after = len(tokenizer(text_so_far(conversation, before))["input_ids"])
            later = tokenizer(text_so_far(conversation, answers))["input_ids"][after:]
            answers.append(greedy_by_hand(pair.target, tokenizer, start, later, stop))
            mine = of(results[carry], arm, conversation)
            assert [result.answer for result in mine] == answers
            assert [result.answered_by for result in mine] == ["source", "source", "target", "target"]
            assert [result.n_context for result in mine[2:]] == [len(ids), len(ids) + len(later)]
            assert [result.n_handed for result in mine] == [0, 0, len(ids), 0]
            left = [0, 0] + [len(tokenizer(text_so_far(conversation, before))["input_ids"]) - len(ids)] * 2
            assert [result.n_left_out for result in mine] == left
            # the first and the last token of what is mapped are the target's own
            mapped = len(ids) - 2 if arm == "mapped" else 0
            assert [result.n_mapped for result in mine] == [0, 0, mapped, mapped]


def test_less_is_handed_over_and_what_is_not_read_yet_is_read(results, conversations, tokenizer):
    for conversation in conversations:
        story = 1 + len(tokenizer(conversation.story, add_special_tokens=False)["input_ids"])
        by_carry = {carry: of(found, "mapped", conversation)[TURN - 1] for carry, found in results.items()}
        lengths = [by_carry[carry].n_handed for carry in ("fresh", "artifacts", "everything")]
        assert lengths == sorted(set(lengths))
        for carry in SHORTER:
            # of the question's last token, which is held back, no column is asked for
            assert by_carry[carry].n_source_read == by_carry[carry].n_handed - story - 1
        whole = of(results["everything"], "source", conversation)
        read = whole[TURN - 1].n_context - whole[TURN - 2].n_context - 1
        assert by_carry["everything"].n_source_read == read
        for found in results.values():
            assert {r.n_source_read for r in of(found, "re_prefill", conversation)} == {0}
            assert {r.n_handed for r in of(found, "target", conversation)} == {0}


def test_arms_that_are_handed_nothing_do_not_know_what_is_carried(results):
    for arm in ("target", "source"):
        answers = [said(found, arm) for found in results.values()]
        assert answers[0] == answers[1] == answers[2]
    assert len({str(said(found, "mapped")) for found in results.values()}) == 3


@pytest.mark.parametrize("carry", conversation_settings.CARRIES)
@pytest.mark.parametrize(("feed", "hold_back", "native_head"), [("generated", 1, 1), ("gold", 5, 0)])
def test_the_identity_map_answers_as_the_target_that_reads_the_text(
    identity_pair, identity_arms, conversations, carry, feed, hold_back, native_head
):
    settings = replace(SETTINGS, carry=carry, feed=feed)
    options = TransferOptions(hold_back=hold_back, native_head=native_head)
    found = hold(identity_pair, identity_arms, conversations[:1], settings, options)
    assert said(found, "mapped") == said(found, "re_prefill")
    same = said(found, "mapped") == said(found, "target")
    assert same == (carry == "everything")  # the source is the target: only what is left out differs


def test_the_gold_answer_is_the_artifact_where_gold_is_fed(pair, arms, models, tokenizer, conversations):
    found = hold(pair, {}, conversations, replace(SETTINGS, carry="artifacts", feed="gold"))
    assert found == []  # nobody to hold them but the arm that reads, which needs another to be held against
    found = hold(pair, {"target": None}, conversations, replace(SETTINGS, carry="artifacts", feed="gold"))
    for conversation in conversations:
        gold = [turn.answers[0] for turn in conversation.turns]
        ids = tokenizer(handed_by_hand(conversation, "artifacts", gold[: TURN - 1]))["input_ids"]
        expected = plain_answer(models["target"], tokenizer, ids, conversation.form.stop)
        assert of(found, "re_prefill", conversation)[TURN - 1].answer == expected


def test_an_answer_is_carried_with_what_stands_before_it(tokenizer):
    form = Form(before_question=" question :", before_answer=" answer :", after_answer=" .")
    turns = (Turn(" where is ben ?", ("paris",)), Turn(" where is anna ?", ("rome",)))
    talk = Conversation("t", "1", "ben is in paris .", turns, form)
    pieces = {
        name: tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        for name, text in (
            ("story", talk.story),
            ("first", " question : where is ben ? answer :"),
            ("answer", " paris ."),
            ("question", " question : where is anna ? answer :"),
            ("lead", " answer :"),
        )
    }
    segments = [pieces["story"] + pieces["first"], pieces["answer"] + pieces["question"]]
    found = {
        carry: carried_text(carry, segments, pieces["story"], pieces["question"], pieces["lead"])
        for carry in conversation_settings.CARRIES
    }
    assert found["everything"].ids == segments[0] + segments[1]
    assert found["everything"].n_known == len(segments[0])
    text = "ben is in paris . answer : paris . question : where is anna ? answer :"
    assert list(found["artifacts"].ids) == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert found["fresh"].ids == pieces["story"] + pieces["question"]
    assert {found[carry].n_known for carry in SHORTER} == {len(pieces["story"])}
    with pytest.raises(KvmapError, match="carry='all': expected everything, artifacts or fresh"):
        carried_text("all", segments, pieces["story"], pieces["question"], ())


def test_a_source_whose_frequencies_depend_on_length_reads_all_anew(tokenizer, conversations):
    settings = {"vocab_size": len(tokenizer), "max_position_embeddings": 320}
    model = LoadedModel.from_model(FAMILIES["llama_dynamic"](seed=1, **settings), tokenizer, name="both")
    shape = tuple((layer.n_kv_heads, layer.head_dim) for layer in model.geometry.layers)
    arms = {"target": None, "mapped": IdentityMapper(shape)}
    for carry in ("everything", "fresh"):
        talk = replace(SETTINGS, carry=carry)
        found = hold(ModelPair(model, model), arms, conversations[:1], talk)
        at_turn = of(found, "mapped", conversations[0])[TURN - 1]
        assert at_turn.n_source_read == at_turn.n_handed - 1
        assert said(found, "mapped") == said(found, "re_prefill")


def test_only_arms_that_are_handed_something_depend_on_what_is_carried(pair, arms, conversations, tmp_path):
    chosen = {name: arms[name] for name in ("target", "source", "mapped", "no_context")}

    def reused(settings):
        books = {arm: Answers.open(tmp_path, {"arm": arm}) for arm in (*chosen, "re_prefill")}
        hold(pair, chosen, conversations[:1], settings, answers=books)
        return {arm for arm, book in books.items() if book.n_reused}

    assert reused(SETTINGS) == set()
    assert reused(replace(SETTINGS, carry="fresh")) == {"target", "source", "no_context"}
    assert reused(replace(SETTINGS, carry="fresh")) == {*chosen, "re_prefill"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"carry": "all"}, "carry='all': expected one of everything, artifacts, fresh"),
        ({"carry": "fresh"}, "expected mode='at_turn' and a turn after the first, got mode='every_turn'"),
        ({"carry": "fresh", "mode": "at_turn"}, "turn=1"),
        ({"re_prefill": True}, "re_prefill=True: at every turn"),
    ],
)
def test_what_leaves_nothing_out_is_refused(settings, message):
    with pytest.raises(KvmapError, match=message):
        ConversationSettings(**settings)


def test_the_configuration_knows_the_same_names():
    assert schema.CARRIES == conversation_settings.CARRIES
    assert schema.CONVERSATION_MODES == conversation_settings.MODES
    assert schema.FEEDS == conversation_settings.FEEDS


# what it costs


def made(arm, name, turn, f1, n_handed=0, n_mapped=0, n_source_read=0, n_left_out=0):
    return TurnResult(
        "t",
        name,
        arm,
        turn,
        "target",
        "q",
        "a",
        f1,
        f1,
        0,
        0,
        n_mapped,
        "c",
        n_handed,
        n_left_out,
        n_source_read,
    )


def test_the_table_has_means_over_conversations_at_the_hand_off():
    results = [
        made("source", "a", 2, 1.0),
        made("mapped", "a", 1, 1.0),
        made("mapped", "a", 2, 0.5, 20, 18, 4, 10),
        made("mapped", "a", 3, 1.0, n_mapped=18),
        made("mapped", "b", 2, 1.0, 30, 28, 8, 20),
        made("mapped", "b", 3, 0.0, n_mapped=28),
        made("mapped", "b", 4, 0.5, n_mapped=28),
    ]
    (row,) = carry_rows(results, 2, "fresh", lambda arm, result: (result.n_handed / 100, 0.25))
    assert row == {
        "task": "t",
        "arm": "mapped",
        "carry": "fresh",
        "turn": 2,
        "n": 2,
        "f1": 0.75,
        "f1_after": 0.5,
        "context_tokens": 25.0,
        "left_out_tokens": 15.0,
        "mapped_tokens": 23.0,
        "source_tokens": 6.0,
        "target_tokens": 2.0,
        "target_flop_share": 0.25,
        "source_flop_share": 0.25,
    }
    (last,) = carry_rows(results[:3], 2, "fresh")
    assert math.isnan(last["f1_after"])
    assert math.isnan(last["target_flop_share"])


def test_flop_shares_are_of_reading_all_that_was_said(pair, arms):
    options = TransferOptions(hold_back=2)
    everything, shorter = made("x", "a", 2, 1.0, 60, 57, 9, 0), made("x", "a", 2, 1.0, 20, 17, 6, 40)
    assert flop_shares(pair, None, everything, options) == (1.0, 0.0)

    def read(model, first, last):
        """Every weight once a token, and attention's two products with each column it sees."""
        weights = sum(
            parameter.numel()
            for name, parameter in model.body.named_parameters()
            if parameter.ndim == 2 and "layers." in name
        )
        layer = model.geometry.layers[0]
        width = model.geometry.n_heads * layer.head_dim
        seen = sum(range(first, last + 1))
        return 2 * weights * (last - first + 1) + 4 * width * seen * model.geometry.n_layers

    logits = 2 * pair.target.geometry.hidden_size * pair.target.geometry.vocab_size
    whole = read(pair.target, 1, 60) + logits
    target, source = flop_shares(pair, None, shorter, options)
    assert (target, source) == (pytest.approx((read(pair.target, 1, 20) + logits) / whole), 0.0)
    target, source = flop_shares(pair, arms["mapped"], shorter, options)
    assert source == pytest.approx(
        read(pair.source, 13, 18) / whole
    )  # of 20, two are held back; 12 are known
    own = read(pair.target, 1, 1) + read(pair.target, 19, 20) + 2 * logits
    weights = sum(tensor.numel() for name, tensor in arms["mapped"].tensors().items() if "weight" in name)
    assert target == pytest.approx((own + 2 * 17 * weights) / whole)
    nothing = replace(shorter, n_source_read=0)
    assert flop_shares(pair, arms["mapped"], nothing, options)[1] == 0.0


def test_the_hand_off_is_refused_without_a_turn_after_the_first(pair, arms, conversations):
    with pytest.raises(KvmapError, match="hand-off is at turn 9"):
        evaluate_conversations(
            pair, arms, conversations, options=TransferOptions(), settings=replace(SETTINGS, turn=9)
        )
