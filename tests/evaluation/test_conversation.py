from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvmap.data import prompt_prefix
from kvmap.errors import KvmapError
from kvmap.evaluation.answers import Answers
from kvmap.evaluation.arms import ARMS
from kvmap.evaluation.choices import cut_at
from kvmap.evaluation.conversation import ConversationSettings, TurnResult, evaluate_conversations
from kvmap.evaluation.conversation_encoding import encode_conversation
from kvmap.evaluation.conversation_items import Conversation, Form, Turn, world_conversations
from kvmap.evaluation.conversation_speakers import Reader, Replying, as_batch, go_on
from kvmap.evaluation.conversation_summary import drift_rows, drift_slope, summarise_conversations
from kvmap.figures.conversation import conversation_lines
from kvmap.mappers import Unavailable
from kvmap.models.capture import prefill
from kvmap.models.pair import LoadedModel
from kvmap.transfer import TransferOptions, transfer
from kvmap.zoo import world
from tests.tiny_random_models import FAMILIES, ORIGINAL_MAX, random_ids

OPTIONS = TransferOptions()
SETTINGS = ConversationSettings(max_new_tokens=3)
N_TURNS = 3


def quiet(iterable, total=None, description=""):
    return iterable


def hold(pair, arms, conversations, settings=SETTINGS, options=OPTIONS, **more):
    return evaluate_conversations(
        pair, arms, conversations, options=options, settings=settings, progress=quiet, **more
    )


def said(results, arm):
    return [(r.id, r.turn, r.answer) for r in results if r.arm == arm]


@pytest.fixture(scope="module")
def conversations():
    return world_conversations(seed=3, n=2, n_turns=N_TURNS)


@pytest.fixture(scope="module")
def results(pair, arms, conversations):
    return hold(pair, arms, conversations)


# the oracle: plain transformers on the text that a person would write down


def text_so_far(conversation, answers):
    """The whole text up to where the next answer begins."""
    form = conversation.form
    text = conversation.story
    for number, turn in enumerate(conversation.turns[: len(answers) + 1]):
        text += form.before_question + turn.question + form.before_answer
        if number < len(answers):
            text += (f" {answers[number]}" if answers[number] else "") + form.after_answer
    return text


def plain_answer(model, tokenizer, ids, stop, max_new_tokens=3):
    """Greedy decoding by transformers' own generate, cut afterwards."""
    batch = torch.tensor([ids])
    out = model.generate(
        batch, attention_mask=torch.ones_like(batch), max_new_tokens=max_new_tokens, do_sample=False
    )
    return cut_at(tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True).lstrip(), stop).strip()


def plain_conversation(model, tokenizer, conversation, feed):
    answers, fed = [], []
    for turn in conversation.turns:
        ids = tokenizer(text_so_far(conversation, fed))["input_ids"]
        answers.append(plain_answer(model, tokenizer, ids, conversation.form.stop))
        fed.append(turn.answers[0] if feed == "gold" else answers[-1])
    return answers


@pytest.mark.parametrize("feed", ["generated", "gold"])
@pytest.mark.parametrize("arm", ["target", "source"])
def test_native_arms_answer_as_transformers_does_on_the_written_text(
    pair, arms, models, tokenizer, conversations, arm, feed
):
    found = hold(pair, {"target": None, arm: None}, conversations, replace(SETTINGS, feed=feed))
    for conversation in conversations:
        expected = plain_conversation(models[arm], tokenizer, conversation, feed)
        mine = [r for r in found if (r.arm, r.id) == (arm, conversation.id)]
        assert [r.answer for r in mine] == expected
        assert {r.answered_by for r in mine} == {arm}


def test_no_context_answers_without_the_story(pair, models, tokenizer, conversations):
    found = hold(pair, {"no_context": None}, conversations)
    for conversation in conversations:
        expected = plain_conversation(
            models["target"], tokenizer, replace(conversation, story=""), "generated"
        )
        assert [r.answer for r in found if r.id == conversation.id] == expected


def test_content_names_what_was_asked_whatever_was_answered(results, conversations):
    by_turn = {}
    for found in results:
        by_turn.setdefault((found.id, found.turn), set()).add(found.content)
    assert all(len(contents) == 1 for contents in by_turn.values())
    assert len({content for contents in by_turn.values() for content in contents}) == len(by_turn)


def test_random_models_answer_with_something(results):
    # else equal answers would prove nothing
    assert len({r.answer for r in results}) > 10


# the identity map


@pytest.mark.parametrize("feed", ["generated", "gold"])
@pytest.mark.parametrize(("mode", "turn"), [("every_turn", 1), ("at_turn", 1), ("at_turn", 2)])
def test_the_identity_map_answers_as_the_target_itself(
    identity_pair, identity_arms, conversations, mode, turn, feed
):
    settings = replace(SETTINGS, mode=mode, turn=turn, feed=feed)
    for options in (OPTIONS, TransferOptions(hold_back=5, native_head=0)):
        found = hold(identity_pair, identity_arms, conversations, settings, options)
        assert said(found, "mapped") == said(found, "target") == said(found, "source")
        mapped = [r for r in found if r.arm == "mapped" and r.turn >= turn]
        assert all(r.n_mapped > 0 and r.answered_by == "target" for r in mapped)


# mapped arms against a transfer made by hand


def by_hand(target, hand_off, fresh_ids):
    """Logits after more tokens on a hand-off's cache, by transformers' own model and cache."""
    from transformers.cache_utils import DynamicCache

    kv = hand_off.kv
    cache = DynamicCache(list(zip(kv.keys, kv.values, strict=True)))
    batch = torch.tensor([fresh_ids])
    positions = torch.arange(kv.n_tokens, kv.n_tokens + len(fresh_ids))[None]
    out = target.model(input_ids=batch, position_ids=positions, **{argument(target): cache}, use_cache=True)
    return out.logits[0, -1]


def argument(loaded):
    from kvmap.models.cache import cache_argument

    return cache_argument(loaded.model)


def greedy_by_hand(target, tokenizer, hand_off, read, stop, n=3):
    """Greedy tokens on the hand-off, all that follow it run anew for each."""
    ends = {target.model.generation_config.eos_token_id, tokenizer.eos_token_id}
    written: list[int] = []
    while len(written) < n:
        fresh = [*read, *written]
        logits = by_hand(target, hand_off, fresh) if fresh else hand_off.logits[0]
        token = int(logits.argmax())
        if token in ends:
            break
        written.append(token)
    return cut_at(tokenizer.decode(written, skip_special_tokens=True).lstrip(), stop).strip()


@pytest.mark.parametrize("arm", ["mapped", "random"])
def test_a_hand_off_at_every_turn_maps_the_whole_conversation_anew(
    pair, arms, tokenizer, conversations, results, arm
):
    for conversation in conversations:
        answers = []
        for _ in conversation.turns:
            ids = torch.tensor([tokenizer(text_so_far(conversation, answers))["input_ids"]])
            hand_off = transfer(prefill(pair.source, ids), arms[arm], pair.target, ids)
            answers.append(greedy_by_hand(pair.target, tokenizer, hand_off, [], conversation.form.stop))
        mine = [r for r in results if (r.arm, r.id) == (arm, conversation.id)]
        assert [r.answer for r in mine] == answers
        lengths = [
            len(tokenizer(text_so_far(conversation, answers[:n]))["input_ids"]) for n in range(N_TURNS)
        ]
        assert [r.n_context for r in mine] == lengths
        assert [r.n_mapped for r in mine] == [n - 2 for n in lengths]  # the first and the last are its own


@pytest.mark.parametrize("feed", ["generated", "gold"])
def test_a_hand_off_at_a_turn_is_mapped_once_and_then_grows(
    pair, arms, models, tokenizer, conversations, feed
):
    settings = replace(SETTINGS, mode="at_turn", turn=2, feed=feed)
    found = hold(pair, arms, conversations, settings)
    for conversation in conversations:
        stop = conversation.form.stop
        gold = [turn.answers[0] for turn in conversation.turns]
        answers = plain_conversation(models["source"], tokenizer, conversation.first(1), feed)
        fed = gold[:1] if feed == "gold" else answers[:1]
        ids = tokenizer(text_so_far(conversation, fed))["input_ids"]
        batch = torch.tensor([ids])
        hand_off = transfer(prefill(pair.source, batch), arms["mapped"], pair.target, batch)
        answers.append(greedy_by_hand(pair.target, tokenizer, hand_off, [], stop))
        fed = gold[:2] if feed == "gold" else answers[:2]
        later = tokenizer(text_so_far(conversation, fed))["input_ids"][len(ids) :]
        answers.append(greedy_by_hand(pair.target, tokenizer, hand_off, later, stop))
        mine = [r for r in found if (r.arm, r.id) == ("mapped", conversation.id)]
        assert [r.answer for r in mine] == answers
        assert [r.answered_by for r in mine] == ["source", "target", "target"]
        assert [r.n_mapped for r in mine] == [0, len(ids) - 2, len(ids) - 2]
    first = [r.answer for r in found if r.arm == "source" and r.turn == 1]
    assert first == [r.answer for r in found if r.arm == "random" and r.turn == 1]


# one reading of the source, whatever the arms


def test_a_growing_cache_is_that_of_reading_anew():
    model = LoadedModel.from_model(FAMILIES["qwen3"](seed=4))
    segments = [tuple(random_ids(1, n, seed=n)[0].tolist()) for n in (12, 5, 1, 7)]
    reader = Reader(model)
    for n in range(1, len(segments) + 1):
        grown = reader.read(segments[:n])
        anew = prefill(model, as_batch(sum(segments[:n], ())))
        for mine, theirs in zip((*grown.kv.keys, *grown.kv.values), (*anew.keys, *anew.values), strict=True):
            # float32 sums in another order
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    assert grown.kv.exact
    assert grown.kv.owner == model.identity


def test_another_branch_does_not_show_what_was_read_before_it():
    model = LoadedModel.from_model(FAMILIES["llama"](seed=4))
    a, b, c, d = (tuple(random_ids(1, n, seed=n)[0].tolist()) for n in (12, 5, 6, 7))
    reader = Reader(model)
    reader.read([a, b, d])
    branch, fresh = reader.read([a, c]), Reader(model).read([a, c])
    assert torch.equal(branch.logits, fresh.logits)
    assert all(torch.equal(x, y) for x, y in zip(branch.kv.keys, fresh.kv.keys, strict=True))
    again = reader.read([a])
    assert torch.equal(again.logits, Reader(model).read([a]).logits)
    assert again.kv.n_tokens == len(a)


@pytest.mark.parametrize("name", ["llama_dynamic", "phi3_longrope"])
def test_a_cache_whose_frequencies_depend_on_its_length_is_read_anew(name):
    model = LoadedModel.from_model(FAMILIES[name]())
    segments = [tuple(random_ids(1, n, seed=n)[0].tolist()) for n in (ORIGINAL_MAX - 4, 9, 9)]
    reader = Reader(model)
    for n in range(1, 4):
        grown = reader.read(segments[:n])
        anew = prefill(model, as_batch(sum(segments[:n], ())))
        assert not grown.kv.mixed
        assert all(a.matches(b) for a, b in zip(grown.kv.rotations, anew.rotations, strict=True))
        for mine, theirs in zip(grown.kv.strip().keys, anew.strip().keys, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def test_the_source_reads_gold_conversations_once_for_all_arms(pair, arms, conversations, tokenizer):
    run = []
    hook = pair.source.body.register_forward_pre_hook(
        lambda _, args, kwargs: run.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    mapping = {arm: arms[arm] for arm in ("target", "mapped", "bias_only", "raw", "random")}
    try:
        hold(pair, mapping, conversations[:1], replace(SETTINGS, feed="gold"))
    finally:
        hook.remove()
    gold = [turn.answers[0] for turn in conversations[0].turns[:-1]]
    # the first piece's last token is run once more, for its logits
    assert sum(run) == len(tokenizer(text_so_far(conversations[0], gold))["input_ids"]) + 1


def test_answers_do_not_depend_on_the_other_arms_or_conversations(pair, arms, conversations, results):
    for arm in ("mapped", "raw", "source"):
        alone = hold(pair, {arm: arms[arm]}, conversations[1:2])
        assert alone == [r for r in results if r.arm == arm and r.id == conversations[1].id]
    turned = hold(pair, dict(reversed(arms.items())), conversations[::-1])
    assert sorted(turned, key=repr) == sorted(results, key=repr)


# truncation


def test_a_long_story_loses_its_beginning_under_every_arm_alike(pair, arms, tokenizer, conversations):
    limit = 150
    found = hold(pair, arms, conversations, max_tokens=limit)
    for conversation in conversations:
        ids = encode_conversation(tokenizer, conversation, limit, max_new_tokens=3, feed_gold=False)
        whole = tokenizer(conversation.story)["input_ids"]
        assert ids.prefix == tuple(prompt_prefix(tokenizer)) == tuple(whole[:1])
        assert ids.n_truncated > 0
        assert list(ids.story) == whole[1 + ids.n_truncated :]
        mine = [r for r in found if r.id == conversation.id]
        assert {r.n_truncated for r in mine} == {ids.n_truncated}
        assert max(r.n_context for r in mine) + 3 <= limit
        expected = 1 + len(ids.story) + len(ids.questions[0])
        assert {r.n_context for r in mine if r.turn == 1 and r.arm != "no_context"} == {expected}
        cut = replace(conversation, story=tokenizer.decode(ids.story))
        again = hold(pair, {"mapped": arms["mapped"]}, [cut])
        assert [r.answer for r in again] == [r.answer for r in mine if r.arm == "mapped"]
    _, rows = summarise_conversations(found)
    assert [row["value"] for row in rows if row["metric"] == "n_truncated"] == [2.0]


def test_room_is_kept_for_gold_answers_that_are_longer_than_generated_ones(tokenizer):
    long = "anna is in the kitchen and the ball is red and the key is blue"
    talk = Conversation("t", "1", "ben is in paris .", (Turn("where is ben ?", (long,)),) * 2)
    settings = {"max_new_tokens": 2, "max_tokens": 64}
    generated = encode_conversation(tokenizer, talk, **settings, feed_gold=False)
    with pytest.raises(KvmapError, match=r"t, 1: 2 questions.*no room for the story within 30"):
        encode_conversation(tokenizer, talk, **(settings | {"max_tokens": 30}), feed_gold=True)
    gold = encode_conversation(tokenizer, talk, **settings, feed_gold=True)
    assert gold.questions == generated.questions
    assert len(gold.gold[0]) == len(long.split())


def test_a_form_without_an_end_adds_nothing_after_an_answer(tokenizer):
    talk = Conversation("t", "1", "ben is in paris .", (Turn("where is ben ?", (" paris ",)),), Form())
    ids = encode_conversation(tokenizer, talk, 64, max_new_tokens=2, feed_gold=True)
    assert ids.gold == (tuple(tokenizer(" paris", add_special_tokens=False)["input_ids"]),)


# stops


def test_an_answer_ends_before_its_stop(pair, conversations):
    gold = replace(SETTINGS, feed="gold")  # so that no answer depends on the one before
    free = hold(pair, {"target": None}, conversations, gold)
    words = next(r.answer.split() for r in free if len(r.answer.split()) == 3)
    stop = f" {words[1]}"
    stopped = hold(pair, {"target": None}, conversations, replace(gold, stop=(stop,)))
    assert [r.answer for r in stopped] == [cut_at(r.answer, [stop]) for r in free] != [r.answer for r in free]


def test_white_space_before_an_answer_does_not_end_it():
    class Spelled:
        eos_token_id = 9

        def decode(self, ids, skip_special_tokens):
            return "".join({1: "\n", 2: " two", 3: "\n\nQ", 4: "x"}[token] for token in ids)

    class Scripted:
        """A reply loop fed with given tokens."""

        def __init__(self, tokens):
            self.tokens = list(tokens)

    class Config:
        eos_token_id = 9

    def reply(tokens, n=8):
        replying = Replying(Spelled(), n, ("\n",))
        script = Scripted(tokens)
        logits = [torch.nn.functional.one_hot(torch.tensor([t]), 10).float() for t in script.tokens]
        steps = iter(range(1, len(logits)))
        hand_off = type("HandOff", (), {"logits": logits[0]})()
        model = type("Model", (), {"model": type("Inner", (), {"generation_config": Config})()})()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "kvmap.evaluation.conversation_speakers.go_on",
                lambda *_: type("HandOff", (), {"logits": logits[next(steps)]})(),
            )
            return replying.reply(model, hand_off)

    assert reply([1, 2, 3, 4]) == "two"  # the stop inside a longer token, and nothing after it is asked for
    assert reply([2, 9]) == "two"
    assert reply([1, 9]) == ""
    assert reply([2, 2, 2, 2], n=2) == "two two"


def test_going_on_leaves_the_hand_off_as_it_was(pair):
    ids = random_ids(1, 8)
    hand_off = Reader(pair.target).read([tuple(ids[0].tolist())])
    before = [key.clone() for key in hand_off.kv.keys]
    first = go_on(pair.target, hand_off, (5, 6)).logits
    assert torch.equal(go_on(pair.target, hand_off, (5, 6)).logits, first)
    assert hand_off.kv.n_tokens == 8
    assert all(torch.equal(x, y) for x, y in zip(before, hand_off.kv.keys, strict=True))


# kept answers


def test_an_interrupted_evaluation_goes_on_where_it_was(pair, arms, conversations, results, tmp_path):
    def books():
        return {arm: Answers.open(tmp_path, {"arm": arm}) for arm in arms}

    def interrupt(found):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hold(pair, arms, conversations, answers=books(), on_conversation=interrupt)
    second, heard = books(), []
    found = hold(pair, arms, conversations, answers=second, on_conversation=heard.append)
    assert found == results
    assert {arm: book.n_reused for arm, book in second.items()} == dict.fromkeys(arms, 1)
    assert [r for one in heard for r in one] == results
    third = books()
    hold(pair, arms, conversations, answers=third)
    assert {book.n_reused for book in third.values()} == {len(conversations)}


def test_only_arms_that_are_mapped_depend_on_the_hand_off(pair, arms, conversations, tmp_path):
    def reused(settings):
        books = {arm: Answers.open(tmp_path, {"arm": arm}) for arm in arms}
        hold(pair, arms, conversations[:1], settings, answers=books)
        return {arm for arm, book in books.items() if book.n_reused}

    assert reused(SETTINGS) == set()
    assert reused(replace(SETTINGS, mode="at_turn", turn=2)) == {"target", "source", "no_context"}
    assert reused(replace(SETTINGS, feed="gold")) == set()
    assert reused(replace(SETTINGS, max_new_tokens=2)) == set()
    assert reused(replace(SETTINGS, mode="at_turn", turn=2)) == set(arms)


# refusals


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"mode": "sometimes"}, "mode='sometimes': expected one of every_turn, at_turn"),
        ({"feed": "nothing"}, "feed='nothing'"),
        ({"turn": 0}, "turn=0"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
    ],
)
def test_settings_that_cannot_be_held_are_refused(setting, message):
    with pytest.raises(KvmapError, match=message):
        ConversationSettings(**setting)


def test_what_cannot_be_compared_is_refused(pair, arms, conversations):
    with pytest.raises(KvmapError, match="two conversations of task 'world_conversation' have the id"):
        hold(pair, arms, [conversations[0]] * 2)
    with pytest.raises(KvmapError, match="3 turns, and the hand-off is at turn 4"):
        hold(pair, arms, conversations, replace(SETTINGS, mode="at_turn", turn=4))
    with pytest.raises(KvmapError, match="would map nothing"):
        hold(pair, arms, conversations, options=TransferOptions(hold_back=400))


def test_nothing_asked_is_nothing_answered(pair, arms):
    assert hold(pair, arms, []) == []


# the world's conversations


def test_questions_of_a_world_conversation_are_different_and_of_the_evaluation_split():
    talks = world_conversations(seed=1, n=4, n_turns=8)
    assert talks == world_conversations(seed=1, n=6, n_turns=8)[:4]
    for talk in talks:
        assert world.split_of(talk.story) == "evaluation"
        assert len({turn.question for turn in talk.turns}) == 8
    with pytest.raises(KvmapError, match="5000 turns"):
        world_conversations(seed=1, n=1, n_turns=5000)


# summaries


def result(arm, name, turn, f1, **more):
    fields = {"task": "t", "id": name, "arm": arm, "turn": turn, "answered_by": "target", "question": "?"}
    counts = {"n_context": 9, "n_truncated": 0, "n_mapped": 0, "content": ""}
    return TurnResult(**fields, answer="", f1=f1, exact_match=float(f1 == 1), **(counts | more))


@pytest.fixture(scope="module")
def made_up():
    """Scores of 12 conversations of 6 turns: the mapped arm loses three points a turn, with noise."""
    random = np.random.default_rng(0)
    made = []
    for name in range(12):
        for turn in range(1, 7):
            native = random.uniform(0.6, 0.9)
            mapped = native - 0.03 * turn + random.normal(0, 0.02)
            made += [result("target", str(name), turn, native), result("mapped", str(name), turn, mapped)]
            made.append(result("source", str(name), turn, native - 0.3))
    return made


def drifts_of(results):
    by = {(r.arm, r.id, r.turn): r.f1 for r in results}
    names = sorted({r.id for r in results})
    turns = sorted({r.turn for r in results})
    return [{t: 100 * (by["target", n, t] - by["mapped", n, t]) for t in turns} for n in names]


def test_the_slope_is_polyfit_s_where_conversations_are_of_one_length(made_up):
    drifts = drifts_of(made_up)
    points = [(turn, value) for drift in drifts for turn, value in drift.items()]
    expected = np.polyfit(*np.array(points).T, 1)[0]
    slope = drift_slope(drifts)
    assert slope.value == pytest.approx(expected, rel=1e-9)
    assert slope.n == 12
    assert slope.low < 3.0 < slope.high
    metrics, rows = summarise_conversations(made_up)
    found = metrics["evaluate/t/mapped/drift_slope_points_per_turn"]
    assert found.value == pytest.approx(expected, rel=1e-9)
    assert next(r for r in rows if r["arm"] == "mapped" and r["metric"] == "drift_points")[
        "value"
    ] == pytest.approx(np.mean([value for _, value in points]))


def test_the_slope_lets_conversations_of_other_lengths_have_other_levels(made_up):
    random = np.random.default_rng(1)
    drifts = [
        {turn: 20.0 * n + 2.0 * turn + random.normal() for turn in range(1, 3 + 2 * n)} for n in range(5)
    ]
    rows, values = [], []
    for n, drift in enumerate(drifts):
        for turn, value in drift.items():
            rows.append([turn, *np.eye(5)[n]])
            values.append(value)
    expected = np.linalg.lstsq(np.array(rows), np.array(values), rcond=None)[0][0]
    assert drift_slope(drifts).value == pytest.approx(expected, rel=1e-9)


def test_the_interval_of_the_slope_resamples_whole_conversations(made_up):
    drifts = drifts_of(made_up)
    random = np.random.default_rng(7)
    slopes = []
    for _ in range(2000):
        drawn = [drifts[i] for i in random.integers(0, len(drifts), len(drifts))]
        slopes.append(np.polyfit(*np.array([(t, v) for d in drawn for t, v in d.items()]).T, 1)[0])
    slope = drift_slope(drifts)
    # two bootstraps of 2,000 draws: their ends differ by some percent of the width
    assert slope.low == pytest.approx(np.quantile(slopes, 0.025), abs=0.1 * (slope.high - slope.low))
    assert slope.high == pytest.approx(np.quantile(slopes, 0.975), abs=0.1 * (slope.high - slope.low))


def test_one_turn_has_no_slope():
    slope = drift_slope([{1: 3.0}, {1: 4.0}])
    assert np.isnan(slope.value)
    assert "spread of turns" in slope.note


def test_drift_is_paired_turn_by_turn(made_up):
    rows = drift_rows(made_up)
    drifts = drifts_of(made_up)
    assert [row["arm"] for row in rows[::6]] == ["target", "mapped", "source"]
    for row in (row for row in rows if row["arm"] == "mapped"):
        values = np.array([drift[row["turn"]] for drift in drifts])
        assert (row["n"], row["drift_points"]) == (12, pytest.approx(values.mean()))
        error = values.std(ddof=1) / np.sqrt(12)
        assert row["drift_low"] == pytest.approx(values.mean() - 1.959964 * error)
        assert row["drift_standard_error"] == pytest.approx(error)
    assert all("drift_points" not in row for row in rows if row["arm"] == "target")


def test_turns_count_alike_and_only_conversations_that_every_arm_held():
    made = [result("target", "a", turn, 1.0) for turn in (1, 2, 3)]
    made += [result("mapped", "a", turn, f1) for turn, f1 in ((1, 0.0), (2, 0.5), (3, 1.0))]
    made += [result("target", "b", 1, 0.5), result("mapped", "b", 1, 0.5)]
    made += [result("target", "c", 1, 1.0)]  # interrupted before the mapped arm
    metrics, rows = summarise_conversations(made, unavailable={"raw": "shapes differ"})
    assert metrics["evaluate/t/mapped/f1"].value == pytest.approx((0.0 + 0.5 + 1.0 + 0.5) / 4)
    assert metrics["evaluate/t/mapped/f1"].n == 2
    assert metrics["evaluate/t/mapped/retention"].value == pytest.approx(2.0 / 3.5)
    assert metrics["evaluate/t/mapped/exact_match"].value == pytest.approx(1 / 4)
    assert any(row["arm"] == "raw" and row["note"] == "unavailable: shapes differ" for row in rows)
    late, _ = summarise_conversations(made[:6], first_turn=3)
    assert late["evaluate/t/mapped/f1"].value == 1.0


def test_gain_recovered_is_of_the_lead_over_the_source(made_up):
    metrics, _ = summarise_conversations(made_up)
    f1 = {arm: metrics[f"evaluate/t/{arm}/f1"].value for arm in ("target", "source", "mapped")}
    expected = (f1["mapped"] - f1["source"]) / (f1["target"] - f1["source"])
    assert metrics["evaluate/t/mapped/gain_recovered"].value == pytest.approx(expected)


def test_an_arm_that_cannot_be_had_is_left_out(pair, arms, conversations):
    broken = {"target": None, "raw": Unavailable("shapes differ"), "mapped": arms["mapped"]}
    found = hold(pair, broken, conversations[:1])
    assert {r.arm for r in found} == {"target", "mapped"}
    assert {r.arm for r in hold(pair, arms, conversations[:1])} == set(ARMS)


def test_the_figure_shows_every_arm_and_the_drift_of_the_mapped_one(made_up):
    _, rows = summarise_conversations(made_up)
    figure = conversation_lines(drift_rows(made_up), rows, first_turn=3)
    above, below = figure.axes
    assert [line.get_label() for line in above.lines[:3]] == ["target", "source", "mapped"]
    assert list(above.lines[0].get_xdata()) == [1, 2, 3, 4, 5, 6]
    assert list(below.lines[0].get_xdata()) == [3, 4, 5, 6]  # before the hand-off nothing is mapped
    slope = next(r for r in rows if r["metric"] == "drift_slope_points_per_turn" and r["arm"] == "mapped")
    assert f"{slope['value']:+.2f}" in below.get_title()
    assert above.get_title() == "n = 12 conversations"
