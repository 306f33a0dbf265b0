"""Recall by depth, perplexity by length and growth, each against plain transformers or by construction."""

from __future__ import annotations

import collections
import math

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvmap.config.schema import NEEDLE_KINDS as CONFIG_KINDS
from kvmap.data import read_texts, token_blocks
from kvmap.data.texts import TextSpec
from kvmap.errors import KvmapError, UnknownName
from kvmap.evaluation import long_context_windows
from kvmap.evaluation.answers import Answers
from kvmap.evaluation.arms import ARMS
from kvmap.evaluation.choices import evaluate_items
from kvmap.evaluation.growth import evaluate_growth
from kvmap.evaluation.long_context import context_lengths, first_tokens
from kvmap.evaluation.long_context_summary import growth_layer_rows, growth_rows, length_rows, needle_rows
from kvmap.evaluation.long_context_windows import Growth, pieces_of, window_edges
from kvmap.evaluation.needle import NEEDLE_KINDS, draw_needles, longest_answer
from kvmap.evaluation.perplexity import evaluate_perplexity
from kvmap.figures.long_context import growth_lines, length_lines, needle_heat_maps
from kvmap.models.capture import forward, prefill
from kvmap.models.pair import LoadedModel, ModelPair
from kvmap.transfer import ROPE_STRATEGIES, TransferOptions
from kvmap.zoo import world
from kvmap.zoo.words import FILLERS
from tests.evaluation.test_choices import count_prefills, quiet
from tests.tiny_random_models import FAMILIES

OPTIONS = TransferOptions()
LONGEST_SENTENCE = max(
    12, *(len(form.split()) for forms in world.SENTENCES.values() for form in (*forms, *FILLERS))
)
PREFIX, ADDED = 40, 24


@pytest.fixture(scope="module")
def letters() -> PreTrainedTokenizerFast:
    """Another tokenizer: a letter a token, a space one too, nothing before the text."""
    alphabet = {letter: number for number, letter in enumerate(" abcdefghijklmnopqrstuvwxyz.,:?¿")}
    tokenizer = Tokenizer(models.WordLevel(alphabet, unk_token="¿"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="¿")


# Needles.


@pytest.mark.parametrize("depth", [0, 0.25, 0.5, 0.8, 1])
@pytest.mark.parametrize("n_tokens", [72, 300])
def test_the_fact_stands_at_the_depth_asked_for(tokenizer, n_tokens, depth):
    for needle in draw_needles(tokenizer, n_tokens=n_tokens, depth=depth, n=6, seed=1):
        ids = tokenizer(needle.item.context)["input_ids"]
        assert len(ids) == needle.n_context
        assert n_tokens - LONGEST_SENTENCE < len(ids) <= n_tokens
        fact = tokenizer.decode(ids[needle.start : needle.stop])
        assert needle.subject in fact
        assert fact.endswith(".")
        before = tokenizer.decode(ids[1 : needle.start])
        assert not before or before.endswith(".")
        question = len(tokenizer(needle.item.context.split("question")[1])["input_ids"])
        story = len(ids) - 1 - question - (needle.stop - needle.start)
        assert needle.depth_found == pytest.approx((needle.start - 1) / story)
        # between sentences, so off by half of the longest one at most
        assert abs(needle.depth_found - depth) <= LONGEST_SENTENCE / 2 / story
        assert depth not in (0, 1) or needle.depth_found == depth


def test_any_tokenizer_counts_its_own_tokens(letters):
    for needle in draw_needles(letters, n_tokens=700, depth=0.5, n=3):
        ids = letters(needle.item.context)["input_ids"]
        assert len(ids) == needle.n_context
        assert 700 - 80 < len(ids) <= 700
        text = "".join(letters.convert_ids_to_tokens(ids[needle.start : needle.stop]))
        assert text.strip().endswith(".")
        assert needle.subject in text
        assert abs(needle.depth_found - 0.5) < 0.07
    assert longest_answer(letters) == len(" purple") == longest_answer(letters, ["colour"])


@pytest.mark.parametrize("kind", NEEDLE_KINDS)
def test_only_the_fact_gives_the_answer(tokenizer, kind):
    """Read as a person would: of all sentences, the fact alone names the subject, and it says the answer."""
    for needle in draw_needles(tokenizer, n_tokens=200, depth=0.5, n=8, kinds=[kind], seed=2):
        story, question = needle.item.context.split(" question : ")
        about = [
            sentence
            for sentence in story.split(" . ")
            if needle.subject in sentence.removesuffix(" .").split()
        ]
        assert len(about) == 1
        answer = needle.item.choices[needle.item.answer]
        assert answer.strip() in about[0]
        assert needle.subject in question.split("?")[0].split()
        assert [choice.strip() for choice in needle.item.choices] == list(world.CHOICES[kind])
        assert sum(choice.strip() in about[0] for choice in needle.item.choices) == 1
        assert world.split_of(needle.item.context) == "evaluation"


def test_chance_is_one_in_twelve_whatever_one_always_guesses(tokenizer):
    drawn = draw_needles(tokenizer, n_tokens=60, depth=0.5, n=360, seed=5)
    by_kind = collections.Counter(needle.kind for needle in drawn)
    assert by_kind == dict.fromkeys(NEEDLE_KINDS, 120)
    counts = collections.Counter((needle.kind, needle.item.answer) for needle in drawn)
    assert len(counts) == 36
    # 10 expected of each answer; binomial(120, 1/12) exceeds 22 once in 3,000
    assert max(counts.values()) <= 22


def test_questions_are_the_same_in_every_process_and_others_in_every_cell(tokenizer):
    def contexts(**settings):
        asked = {"n_tokens": 80, "depth": 0.5, "seed": 3} | settings
        return [needle.item.context for needle in draw_needles(tokenizer, n=12, **asked)]

    assert contexts() == contexts()
    cells = [contexts(), contexts(depth=1), contexts(n_tokens=81), contexts(seed=4)]
    assert len({context for cell in cells for context in cell}) == 4 * 12
    # Facts too: of 12 pairs drawn from 32 names and 12 answers, few can be alike.
    drawn = [draw_needles(tokenizer, n_tokens=80, depth=depth, n=12) for depth in (0, 1)]
    facts = [[(needle.subject, needle.item.answer) for needle in of_depth] for of_depth in drawn]
    assert sum(one == other for one, other in zip(*facts, strict=True)) <= 2


def test_kinds_of_needles_are_the_configurations():
    assert NEEDLE_KINDS == CONFIG_KINDS


def test_what_cannot_be_drawn_is_refused(tokenizer):
    with pytest.raises(UnknownName, match="kind of needle"):
        draw_needles(tokenizer, n_tokens=80, depth=0, n=1, kinds=["where", "wehre"])
    with pytest.raises(KvmapError, match=r"depth=1\.5"):
        draw_needles(tokenizer, n_tokens=80, depth=1.5, n=1)
    for n_tokens in (2, 20, 30):
        with pytest.raises(KvmapError, match=rf"{n_tokens} tokens leaves .* expected at least 16"):
            draw_needles(tokenizer, n_tokens=n_tokens, depth=0, n=1)


# Lengths.


def test_lengths_are_multiples_cut_to_what_the_pair_takes():
    assert context_lengths(256, [1, 2, 4, 8], limit=4096, room=65) == ((256, 512, 1024, 2048), ())
    lengths, notes = context_lengths(256, [8, 4, 2, 1, 16], limit=2048, room=65)
    assert lengths == (256, 512, 1024, 1983)
    assert len(notes) == 2
    assert "8 x the calibration length is 2048 tokens; the pair takes 2048, less 65" in notes[0]
    assert notes[0].endswith("1983 are read instead")
    assert notes[1].endswith("left out")
    assert context_lengths(100, [0.5], limit=200, room=1)[0] == (50,)


@pytest.mark.parametrize(("multiples", "room"), [([0, 1], 1), ([math.inf], 1), ([1], 64)])
def test_lengths_that_cannot_be_are_refused(multiples, room):
    with pytest.raises(KvmapError):
        context_lengths(32, multiples, limit=64, room=room)


# The identity is native at every length and depth; every arm is asked the same.


@pytest.fixture(scope="module")
def long_blocks(tokenizer):
    texts = read_texts(TextSpec("world", split="evaluation", min_words=300))
    return token_blocks(texts, tokenizer, n_sequences=3, length=240, packing="document")


@pytest.mark.parametrize("rope", ROPE_STRATEGIES[:2])
def test_the_identity_recalls_as_native_does_at_every_length_and_depth(identity_pair, identity_arms, rope):
    tokenizer = identity_pair.tokenizer
    drawn = [
        needle
        for n_tokens in (48, 256)
        for depth in (0, 0.5, 1)
        for needle in draw_needles(tokenizer, n_tokens=n_tokens, depth=depth, n=3)
    ]
    results = evaluate_items(
        identity_pair,
        identity_arms,
        [needle.item for needle in drawn],
        options=TransferOptions(rope=rope),
        generate=False,
        progress=quiet,
        batch_size=4,
    )
    by_arm = {arm: [r for r in results if r.arm == arm] for arm in identity_arms}
    for native, mapped in zip(by_arm["target"], by_arm["mapped"], strict=True):
        # float32: keys are turned back and forth
        assert mapped.logliks == pytest.approx(native.logliks, abs=1e-4)
        assert mapped.predicted == native.predicted
    found = [
        (needle, result) for needle, of in zip(drawn, _grouped(results, 4), strict=True) for result in of
    ]
    rows, arms = needle_rows(found, calibration_tokens=48, n_resamples=50)
    cells = {(r["n_tokens"], r["depth"], r["arm"]): r for r in rows if r["metric"] == "accuracy"}
    assert len(cells) == 2 * (3 + 1) * 4
    for n_tokens in (48, 256):
        for depth in (None, 0, 0.5, 1):
            one, other = (cells[n_tokens, depth, arm] for arm in ("target", "mapped"))
            assert one["value"] == other["value"]
            assert one["n"] == (9 if depth is None else 3)
            assert one["chance"] == pytest.approx(1 / 12)
            assert one["multiple"] == n_tokens / 48
    assert {row["task"] for row in arms} == {"needle_48", "needle_256"}


def _grouped(results, n_arms):
    return [results[start : start + n_arms] for start in range(0, len(results), n_arms)]


def test_perplexity_by_length_is_native_for_the_identity_and_scores_what_follows(
    identity_pair, identity_arms, long_blocks
):
    found = {
        length: evaluate_perplexity(
            identity_pair,
            identity_arms,
            first_tokens(long_blocks, length + 16),
            prefix_tokens=length,
            options=OPTIONS,
            progress=quiet,
            batch_size=3,
        )
        for length in (30, 60, 220)
    }
    rows, arms = length_rows(found, calibration_tokens=30, n_resamples=50)
    assert all(row["task"].startswith("length_") for row in arms)
    model = identity_pair.target.model
    for length, results in found.items():
        log_probs = model(input_ids=long_blocks.input_ids).logits.log_softmax(-1)
        true = long_blocks.input_ids[:, length + 1 : length + 16]
        plain = -log_probs[:, length : length + 15].gather(-1, true.unsqueeze(-1)).sum((1, 2))
        assert results["target"].nll == pytest.approx(plain.tolist(), abs=1e-3)
        assert results["mapped"].nll == pytest.approx(results["target"].nll, abs=1e-3)
        of_length = {(r["arm"], r["metric"]): r for r in rows if r["n_tokens"] == length}
        assert abs(of_length["mapped", "kl_nats"]["value"]) < 1e-6
        assert of_length["mapped", "top1_agreement"]["value"] == 1
        assert of_length["mapped", "nll_nats"]["multiple"] == length / 30


def test_first_tokens_are_those_of_the_rows_asked_for(long_blocks):
    cut = first_tokens(long_blocks, 50, [2, 0])
    assert torch.equal(cut.input_ids, long_blocks.input_ids[[2, 0], :50])
    assert cut.documents == (long_blocks.documents[2], long_blocks.documents[0])
    with pytest.raises(KvmapError, match="length=241"):
        first_tokens(long_blocks, 241)


# Growth.


@pytest.fixture(scope="module")
def grown_blocks(long_blocks):
    return first_tokens(long_blocks, PREFIX + ADDED + 1)


def grow(pair, arms, blocks, **settings):
    settings = {"prefix_tokens": PREFIX, "n_windows": 3, "options": OPTIONS, "progress": quiet} | settings
    return evaluate_growth(pair, arms, blocks, **settings)


@pytest.fixture(scope="module")
def grown(pair, arms, grown_blocks):
    return grow(pair, arms, grown_blocks, batch_size=2)


@pytest.mark.parametrize("rope", ROPE_STRATEGIES[:2])
def test_growth_on_the_identity_has_no_gap(identity_pair, identity_arms, grown_blocks, rope):
    found = grow(identity_pair, identity_arms, grown_blocks, options=TransferOptions(rope=rope))
    rows, _ = growth_rows(found, n_resamples=50)
    by = {(row["window"], row["arm"], row["metric"]): row["value"] for row in rows}
    for window in (None, 0, 1, 2):
        # float32 rounding of keys that were turned back and forth
        assert by[window, "mapped", "nll_minus_target_nats"] == pytest.approx(0, abs=1e-4)
        assert by[window, "source", "nll_minus_target_nats"] == pytest.approx(0, abs=1e-4)
        assert by[window, "mapped", "kl_nats"] == pytest.approx(0, abs=1e-6)
        assert by[window, "mapped", "top1_agreement"] == 1
        for metric in ("key_r2", "value_r2", "key_cosine", "value_cosine"):
            assert by[window, "mapped", metric] == pytest.approx(1, abs=1e-5)
        assert (window, "source", "key_r2") not in by
        assert (window, "target", "key_r2") not in by


@pytest.mark.parametrize("arm", ["target", "source"])
def test_native_growth_is_a_plain_full_forward(grown, models, grown_blocks, arm):
    log_probs = models[arm](input_ids=grown_blocks.input_ids).logits.log_softmax(-1)
    per_token = -log_probs[:, PREFIX:-1].gather(-1, grown_blocks.input_ids[:, PREFIX + 1 :, None])[..., 0]
    for row, growth in enumerate(grown[arm]):
        for window in growth.windows:
            expected = float(per_token[row, window.start : window.stop].sum())
            assert window.nll == pytest.approx(expected, abs=1e-3)


def test_windows_add_up_to_the_whole(pair, arms, grown_blocks, grown):
    whole = grow(pair, arms, grown_blocks, n_windows=1, batch_size=2)
    assert tuple(grown) == ARMS
    for arm, sequences in grown.items():
        for parts, one in zip(sequences, whole[arm], strict=True):
            assert [(w.start, w.stop) for w in parts.windows] == [(0, 8), (8, 16), (16, 24)]
            assert sum(w.nll for w in parts.windows) == pytest.approx(one.windows[0].nll, abs=1e-3)
            assert sum(w.kl for w in parts.windows) == pytest.approx(one.windows[0].kl, abs=1e-3)
            assert sum(w.n_tokens for w in parts.windows) == one.windows[0].n_tokens == ADDED
            assert sum(w.agreement for w in parts.windows) == one.windows[0].agreement
            if arm != "source":
                errors = np.sum([w.drift["key"].error for w in parts.windows], axis=0)
                assert errors == pytest.approx(one.windows[0].drift["key"].error, rel=1e-4, abs=1e-6)
    rows, _ = growth_rows(grown, n_resamples=50)
    nll = {
        row["window"]: row["value"] for row in rows if (row["arm"], row["metric"]) == ("mapped", "nll_nats")
    }
    assert nll[None] == pytest.approx(np.mean([nll[0], nll[1], nll[2]]))


@pytest.mark.parametrize("rope", ROPE_STRATEGIES)
def test_own_columns_are_compared_as_plain_arrays_would_be(pair, arms, grown_blocks, rope):
    """R² and cosine of one sequence by numpy, from caches of plain forwards on the same hand-off."""
    from kvmap.transfer import transfer

    options = TransferOptions(rope=rope)
    some = {arm: arms[arm] for arm in ("target", "mapped", "no_context")}
    one = first_tokens(grown_blocks, grown_blocks.length, [1])
    found = grow(pair, some, one, n_windows=2, options=options)
    prefix, added = one.input_ids[:, :PREFIX], one.input_ids[:, PREFIX:-1]
    kv = prefill(pair.source, prefix)
    hand_off = transfer(kv, arms["mapped"], pair.target, prefix, rope=rope)
    native = prefill(pair.target, one.input_ids[:, :-1]).strip()
    bos = torch.tensor([[pair.tokenizer.bos_token_id]])
    ours = {"no_context": prefill(pair.target, torch.cat([bos, added], 1)).strip().slice_tokens(1, None)}
    grown_kv = forward(pair.target, added, hand_off.kv)[1]
    for arm, start in (("mapped", PREFIX), ("no_context", 0)):
        for kind, number in (("key", 0), ("value", 1)):
            for layer in range(3):
                true = (native.keys, native.values)[number][layer][0, :, PREFIX:]
                if arm == "mapped":
                    cached = (grown_kv.keys, grown_kv.values)[number][layer][0, :, start:]
                    # rotation keeps lengths and angles, so rotated keys have the same errors and cosines
                    rotated = prefill(pair.target, one.input_ids[:, :-1])
                    compared = (rotated.keys, rotated.values)[number][layer][0, :, PREFIX:]
                else:
                    cached, compared = (ours[arm].keys, ours[arm].values)[number][layer][0], true
                for window, part in zip(found[arm][0].windows, (slice(0, 12), slice(12, 24)), strict=True):
                    x, y, content = (t[:, part].double().numpy() for t in (cached, compared, true))
                    drift = window.drift[kind]
                    assert drift.error[layer] == pytest.approx(((x - y) ** 2).sum(), rel=1e-3, abs=1e-6)
                    spread = ((content - content.mean(1, keepdims=True)) ** 2).sum()
                    assert drift.spread[layer] == pytest.approx(spread, rel=1e-4)
                    lengths = np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1)
                    assert drift.cosine[layer] == pytest.approx(((x * y).sum(-1) / lengths).mean(), abs=1e-5)
    rows, whole = growth_rows(found, n_resamples=20)
    layers = [row for row in growth_layer_rows(found) if row["window"] == 0]
    for kind in ("key", "value"):
        mean = np.mean([r["r2"] for r in layers if (r["arm"], r["kind"]) == ("mapped", kind)])
        row = next(r for r in rows if (r["window"], r["arm"], r["metric"]) == (0, "mapped", f"{kind}_r2"))
        assert row["value"] == pytest.approx(mean)
    assert {row["task"] for row in whole} == {"growth"}


def test_the_first_layers_keys_and_values_depend_on_the_token_alone(grown):
    for row in growth_layer_rows(grown):
        if row["layer"] == 0:
            assert row["r2"] == pytest.approx(1, abs=1e-6)
            assert row["cosine"] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_pieces_change_nothing(monkeypatch, pair, arms, grown_blocks, grown, chunk):
    monkeypatch.setattr(long_context_windows, "CHUNK_TOKENS", chunk)
    some = {arm: arms[arm] for arm in ("target", "source", "mapped")}
    again = grow(pair, some, grown_blocks, batch_size=3)
    for arm, sequences in again.items():
        for one, other in zip(sequences, grown[arm], strict=True):
            for a, b in zip(one.windows, other.windows, strict=True):
                assert a.nll == pytest.approx(b.nll, abs=1e-3)
                assert a.kl == pytest.approx(b.kl, abs=1e-3)
                assert (a.start, a.stop, a.agreement) == (b.start, b.stop, b.agreement)


def test_one_model_after_the_other_gives_the_same_growth(pair, arms, grown_blocks, grown, monkeypatch):
    monkeypatch.setattr(ModelPair, "release", lambda self, role: None)  # models in memory have no other home
    again = grow(pair, arms, grown_blocks, batch_size=2, sequential=True)
    for arm, sequences in again.items():
        assert [g.row() for g in sequences] == [g.row() for g in grown[arm]]


@pytest.mark.parametrize(("n", "n_windows"), [(24, 3), (25, 4), (7, 7), (256, 8)])
def test_window_edges_part_all_tokens_and_none_is_empty(n, n_windows):
    edges = window_edges(n, n_windows)
    assert (edges[0], edges[-1], len(edges)) == (0, n, n_windows + 1)
    assert min(np.diff(edges)) >= 1
    pieces = pieces_of(edges)
    assert [token for piece in pieces for token in range(piece.start, piece.stop)] == list(range(n))


def test_answers_that_are_kept_are_not_asked_again(pair, arms, grown_blocks, grown, tmp_path, monkeypatch):
    def books():
        return {arm: Answers.open(tmp_path, {"arm": arm}) for arm in arms}

    first = first_tokens(grown_blocks, grown_blocks.length, [0, 1])
    grow(pair, arms, first, batch_size=2, answers=books())
    readers = count_prefills(monkeypatch)
    again = books()
    found = grow(pair, arms, grown_blocks, batch_size=2, answers=again)
    assert readers.count("source") == 1
    assert {arm: book.n_reused for arm, book in again.items()} == dict.fromkeys(arms, 2)
    readers.clear()
    assert grow(pair, arms, grown_blocks, batch_size=2, answers=books()) == found
    assert not readers
    for arm, sequences in found.items():
        for one, other in zip(sequences, grown[arm], strict=True):
            assert one.windows[0].nll == pytest.approx(other.windows[0].nll, abs=1e-3)


def test_a_new_arm_is_read_beside_native_and_added_alone(pair, arms, grown_blocks, tmp_path):
    old = {arm: arms[arm] for arm in ("target", "no_context")}
    grow(pair, old, grown_blocks, answers={arm: Answers.open(tmp_path, {"arm": arm}) for arm in old})
    books = {arm: Answers.open(tmp_path, {"arm": arm}) for arm in (*old, "mapped")}
    found = grow(pair, old | {"mapped": arms["mapped"]}, grown_blocks, answers=books)
    assert [books[arm].n_reused for arm in books] == [3, 3, 0]
    assert found["mapped"][0].windows[0].kl > 0


def test_a_growth_without_kl_is_not_kept(grown):
    whole = grown["mapped"][0]
    assert whole.is_whole
    assert Growth.from_row(whole.row(), whole.content) == whole
    whole.windows[0].kl, kept = math.nan, whole.windows[0].kl
    assert not whole.is_whole
    whole.windows[0].kl = kept


def test_growth_that_cannot_be_is_refused(pair, arms, grown_blocks, tokenizer, models):
    target = {"target": None}
    with pytest.raises(KvmapError, match="'target' is needed"):
        grow(pair, {"source": None}, grown_blocks)
    with pytest.raises(KvmapError, match="prefix_tokens=64"):
        grow(pair, target, grown_blocks, prefix_tokens=64)
    with pytest.raises(KvmapError, match="n_windows=25 of 24"):
        grow(pair, target, grown_blocks, n_windows=25)
    with pytest.raises(KvmapError, match="batch_size=0"):
        grow(pair, target, grown_blocks, batch_size=0)
    with pytest.raises(KvmapError, match=r"has 2 tokens\): bias_only"):
        grow(pair, target | {"bias_only": arms["bias_only"]}, grown_blocks, prefix_tokens=2)
    small = FAMILIES["llama"](seed=1, vocab_size=len(tokenizer), max_position_embeddings=60)
    both = ModelPair(*(LoadedModel.from_model(model, tokenizer) for model in (small, models["target"])))
    with pytest.raises(KvmapError, match=r"65 tokens do not fit a pair that takes 60"):
        grow(both, target, grown_blocks)


def test_a_window_of_one_token_has_no_r2_and_says_why(identity_pair, identity_arms, grown_blocks):
    found = grow(identity_pair, identity_arms, grown_blocks, n_windows=ADDED)
    rows, _ = growth_rows(found, n_resamples=20)
    row = next(r for r in rows if (r["window"], r["arm"], r["metric"]) == (3, "mapped", "value_r2"))
    assert math.isnan(row["value"])
    assert "do not vary" in row["note"]


# Figures.


def _rows(metric, arms, **columns):
    """One row for each arm and each combination given, with numbers that tell them apart."""
    rows = []
    for place, arm in enumerate(arms):
        for values in zip(*columns.values(), strict=True):
            value = 0.1 * (1 + place)
            rows.append({"arm": arm, "metric": metric, **dict(zip(columns, values, strict=True)), "n": 4})
            rows[-1] |= {"value": value, "low": value - 0.05, "high": value + 0.05, "chance": 1 / 12}
    return rows


def test_the_heat_map_has_a_panel_an_arm_a_cell_a_length_and_depth_and_marks_the_calibration():
    rows = _rows(
        "accuracy",
        ARMS,
        n_tokens=[64, 64, 512, 512, 512],
        multiple=[1, 1, 8, 8, 8],
        depth=[0.0, 1.0, 0.0, 1.0, None],
    )
    rows = [row for row in rows if (row["arm"], row["n_tokens"], row["depth"]) != ("raw", 512, 1.0)]
    figure = needle_heat_maps(rows)
    panels = {axis.get_title(): axis for axis in figure.axes if axis.images and axis.get_title()}
    assert list(panels) == [arm.replace("_", " ") for arm in ARMS]
    for arm, axis in panels.items():
        assert axis.images[0].get_array().shape == (2, 2)
        assert [line.get_xdata()[0] for line in axis.lines] == [0.5]
        assert len(axis.texts) == (3 if arm == "raw" else 4)
    assert [text.get_text() for text in panels["source"].texts] == [".20"] * 4


def test_lines_leave_out_what_is_undefined_and_say_what_lies_above():
    lengths = {"n_tokens": [64, 512]}
    rows = [*_rows("nll_nats", ARMS, **lengths), *_rows("context_carried", ("mapped", "source"), **lengths)]
    for row in rows:
        if (row["arm"], row["metric"]) == ("random", "nll_nats"):
            row["value"] = 50.0
        if (row["arm"], row["metric"], row["n_tokens"]) == ("mapped", "context_carried", 512):
            row["value"] = None
    figure = length_lines(rows, 64)
    nll, carried = figure.axes
    assert [text.get_text() for text in nll.texts] == ["above: random"]
    drawn = {line.get_label(): list(line.get_xdata()) for line in carried.lines}
    assert drawn["mapped"] == [64]
    assert drawn["source"] == [64, 512]
    windows = {"window": [0, 1, None], "start": [0, 8, 0], "stop": [8, 16, 16]}
    rows = [
        *_rows("nll_minus_target_nats", ARMS[1:], **windows),
        *_rows("key_r2", ("mapped",), **windows),
        *_rows("value_r2", ("mapped",), **windows),
    ]
    gap, r2 = growth_lines(rows, 64).axes
    assert all(list(line.get_xdata()) in ([4, 12], [0, 1]) for line in gap.lines)
    assert len([line for line in r2.lines if list(line.get_xdata()) == [4, 12]]) == 2
