"""What shares a prefill, what is cut, where an answer ends: each request against plain transformers."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from typing import Any

import pytest
import torch
import transformers
from lm_eval import utils
from transformers import GenerationConfig

from kvmap.errors import KvmapError
from kvmap.evaluation import arms as evaluation_arms
from kvmap.evaluation.answers import Answers
from kvmap.harness.adapter import KvmapLM
from kvmap.harness.arguments import pool_from_arguments
from kvmap.harness.pool import Pool
from kvmap.harness.windows import rolling_windows
from kvmap.models.pair import LoadedModel
from kvmap.transfer import TransferOptions
from tests.harness.conftest import Family, identity_pool, instances

CONTEXTS = [
    "anna is in the kitchen . question : where is anna ? answer :",
    "bob has the red ball and carl has the box . who has the ball ?",
    "the garden is far away",
]
CHOICES = [" garden", " in the kitchen", " bob has it", " the box is grey"]


@pytest.fixture
def prefills(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every prefill of the source."""
    rows: list[int] = []
    plain = evaluation_arms.prefill

    def counted(model: LoadedModel, ids: torch.Tensor, *rest: Any, **more: Any) -> Any:
        rows.append(ids.shape[0])
        return plain(model, ids, *rest, **more)

    monkeypatch.setattr(evaluation_arms, "prefill", counted)
    return rows


class TestGrouping:
    def test_four_choices_of_one_context_take_one_source_prefill_in_any_order(
        self, llama: Family, prefills: list[int]
    ) -> None:
        asked = instances("loglikelihood", [(c, choice) for c in CONTEXTS for choice in CHOICES], seed=4)
        pool = identity_pool(llama, batch_size=2)
        model = KvmapLM(pool, "mapped")
        answers = model.loglikelihood(asked)
        assert sum(prefills) == len(CONTEXTS)
        assert (pool.reading.n_contexts, pool.reading.n_source) == (3, 3)
        alone = KvmapLM(identity_pool(llama), "mapped")
        for request, answer in zip(asked, answers, strict=True):
            (wanted,) = alone.loglikelihood([request])
            assert answer[0] == pytest.approx(wanted[0], abs=1e-4)  # float32, another batch
            assert answer[1] == wanted[1]

    def test_all_arms_answer_in_the_pass_that_the_first_is_asked_in(
        self, llama: Family, prefills: list[int]
    ) -> None:
        asked = instances("loglikelihood", [(CONTEXTS[0], choice) for choice in CHOICES])
        pool = identity_pool(llama, "target", "source", "mapped", "raw", "no_context")
        first = KvmapLM(pool, "target").loglikelihood(asked)
        assert prefills == [1]
        for arm in ("source", "mapped", "raw"):
            for answer, wanted in zip(KvmapLM(pool, arm).loglikelihood(asked), first, strict=True):
                assert answer[0] == pytest.approx(wanted[0], abs=1e-4)
        without = KvmapLM(pool, "no_context").loglikelihood(asked)
        assert abs(without[1][0] - first[1][0]) > 0.01
        assert prefills == [1]

    def test_equal_requests_are_asked_once(self, llama: Family) -> None:
        asked = instances("loglikelihood", [(CONTEXTS[0], CHOICES[0])] * 3)
        pool = identity_pool(llama)
        assert len(set(KvmapLM(pool, "mapped").loglikelihood(asked))) == 1
        assert pool.reading.n_contexts == 1

    def test_one_model_in_memory_at_a_time_gives_the_same(self, llama: Family) -> None:
        asked = instances("loglikelihood", [(c, choice) for c in CONTEXTS for choice in CHOICES])
        arms = ("target", "source", "mapped")
        beside = identity_pool(llama, *arms, batch_size=2)
        after = identity_pool(llama, *arms, batch_size=2, sequential=True)
        for arm in arms:
            assert KvmapLM(after, arm).loglikelihood(asked) == KvmapLM(beside, arm).loglikelihood(asked)


class TestAnswers:
    def test_what_was_answered_before_is_not_asked_again(
        self, llama: Family, prefills: list[int], tmp_path: Any
    ) -> None:
        asked = instances("loglikelihood", [(c, choice) for c in CONTEXTS for choice in CHOICES])
        written = instances("generate_until", [(c, {"max_gen_toks": 3}) for c in CONTEXTS])
        first = KvmapLM(identity_pool(llama), "mapped", answers=str(tmp_path))
        # interrupted after the first context's requests and one answer
        before = first.loglikelihood(asked[:4]), first.generate_until(written[:1])
        del prefills[:]
        pool = identity_pool(llama)
        again = KvmapLM(pool, "mapped", answers=str(tmp_path))
        assert again.loglikelihood(asked)[:4] == before[0]
        assert again.generate_until(written)[:1] == before[1]
        assert sum(prefills) == 4
        del prefills[:]
        third = KvmapLM(identity_pool(llama), "mapped", answers=str(tmp_path))
        assert third.loglikelihood(asked) == again.loglikelihood(asked)
        assert prefills == []

    def test_only_the_arms_that_lack_an_answer_are_run(self, llama: Family, prefills: list[int]) -> None:
        asked = instances("loglikelihood", [(CONTEXTS[0], CHOICES[1])])
        kept = {"target": Answers.in_memory()}
        KvmapLM(identity_pool(llama, "target", answers=kept), "target").loglikelihood(asked)
        assert prefills == []  # the target needs no source
        pool = identity_pool(llama, "target", "mapped", answers=kept)
        KvmapLM(pool, "target").loglikelihood(asked)
        assert prefills == [1]
        assert kept["target"].n_reused == 0  # of this very process

    @pytest.mark.parametrize("change", [{"hold_back": 2}, {"native_head": 0}, {"rope": "coupled"}])
    def test_other_options_are_other_answers(self, llama: Family, change: dict[str, Any]) -> None:
        other = identity_pool(llama, options=TransferOptions(**change))
        assert other.conditions("mapped") != identity_pool(llama).conditions("mapped")


class TestConditions:
    """Answers kept under these are found again only by whoever would answer the same."""

    @pytest.mark.parametrize("change", ["end_of_text_ids", "repetition_penalty", "attention"])
    def test_what_else_changes_an_answer_is_among_them(self, qwen: Family, change: str) -> None:
        model = copy.deepcopy(qwen.loaded.model)
        if change == "end_of_text_ids":
            model.generation_config.eos_token_id = [7, 8]
        elif change == "repetition_penalty":
            model.generation_config.repetition_penalty = 1.3
        else:
            model.set_attn_implementation("eager")
        other = Family("other", LoadedModel.from_model(model, qwen.tokenizer, name="other"))
        ours, theirs = (identity_pool(one).conditions("mapped")["target"] for one in (qwen, other))
        assert change in ours
        assert {name for name in ours if ours[name] != theirs[name]} == {change}
        assert (ours["torch"], ours["device"]) == (torch.__version__, "cpu")
        assert ours["transformers"] == transformers.__version__

    def test_files_say_the_same_as_the_loaded_models(self) -> None:
        """`lm_eval --model kvmap` reads no weights for them."""
        pool = pool_from_arguments("raw", source="zoo:tiny-small", target="zoo:tiny-medium", device="cpu")
        loaded = Pool(pool.pair, pool.arms, pool.options)
        assert loaded.conditions("raw") == pool.conditions("raw")


class TestNothingMapped:
    @pytest.mark.parametrize("asker", ["target", "mapped"])
    def test_a_task_of_which_nothing_would_be_mapped_is_refused_before_any_model_reads(
        self, llama: Family, prefills: list[int], asker: str
    ) -> None:
        options = TransferOptions(native_head=60, hold_back=4)
        pool = identity_pool(llama, "target", "mapped", "raw", options=options)
        complaint = r"task t: native_head=60 and hold_back=4 cover every context .* mapped, raw would map"
        model = KvmapLM(pool, asker)
        with pytest.raises(KvmapError, match=complaint):
            model.loglikelihood(instances("loglikelihood", [(text, " garden") for text in CONTEXTS]))
        with pytest.raises(KvmapError, match=complaint):
            model.generate_until(
                instances("generate_until", [(text, {"max_gen_toks": 4}) for text in CONTEXTS])
            )
        assert prefills == []

    def test_one_context_that_is_mapped_is_enough_for_a_task_and_for_no_other(self, llama: Family) -> None:
        model = KvmapLM(identity_pool(llama), "mapped")
        long, short = instances("loglikelihood", [(CONTEXTS[0], " garden"), ("", " garden")])
        assert len(model.loglikelihood([long, short])) == 2
        assert [model.facts["t", n].n_mapped > 0 for n in (0, 1)] == [True, False]
        (other,) = instances("loglikelihood", [("", " garden")], task="other")
        with pytest.raises(KvmapError, match="task other: native_head=1"):
            model.loglikelihood([long, short, other])

    def test_arms_without_a_mapper_map_nothing_and_may(self, llama: Family) -> None:
        pool = identity_pool(llama, "target", "source")
        assert KvmapLM(pool, "target").loglikelihood(instances("loglikelihood", [("", " garden")]))


class TestTruncation:
    def test_is_counted_by_request_and_document_and_said(
        self, llama: Family, caplog: pytest.LogCaptureFixture
    ) -> None:
        pool = identity_pool(llama, "target", "mapped", max_tokens=24)
        asked = instances("loglikelihood", [(text, " garden") for text in CONTEXTS], task="quiz")
        lengths = [len(llama.tokenizer(text)["input_ids"]) for text in CONTEXTS]
        room = 24 + 1 - len(llama.tokenizer(" garden", add_special_tokens=False)["input_ids"])
        with caplog.at_level(logging.WARNING):
            for arm in ("target", "mapped"):
                model = KvmapLM(pool, arm)
                model.loglikelihood(asked)
                cut = [model.facts["quiz", n].n_truncated for n in range(3)]
                assert cut == [max(0, length - room) for length in lengths]
                assert model.get_model_info()["kvmap"]["n_truncated_requests"] == {
                    "quiz": sum(length > room for length in lengths)
                }
        assert 0 < sum(length > room for length in lengths) < 3
        assert "quiz: 2 requests are longer than the 24 tokens both models take" in caplog.text

    def test_both_models_limit_what_is_read(self, llama: Family, qwen: Family) -> None:
        assert identity_pool(llama).limit == 256
        assert KvmapLM(identity_pool(llama, max_tokens=100), "mapped").max_length == 100
        assert identity_pool(llama, max_tokens=10_000).limit == 256

    def test_a_continuation_that_leaves_no_context_is_refused(self, llama: Family) -> None:
        model = KvmapLM(identity_pool(llama, max_tokens=4), "mapped")
        with pytest.raises(KvmapError, match=r"leaves no room for a context in max_length=4"):
            model.loglikelihood(instances("loglikelihood", [("anna", " a b c d e f g h")]))
        with pytest.raises(KvmapError, match=r"a continuation of 4 tokens leaves no room"):
            model.generate_until(instances("generate_until", [("anna", {"max_gen_toks": 4})]))


def log_probs(family: Family, ids: list[int]) -> torch.Tensor:
    """Plain transformers: log p of every id after the first."""
    logits = family.loaded.model(torch.tensor([ids])).logits[0].double()
    return logits.log_softmax(-1)[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]


class TestRefused:
    def test_a_continuation_without_a_token(self, qwen: Family) -> None:
        """lm-eval takes the first token of a continuation for the context where there is none."""
        model = KvmapLM(identity_pool(qwen), "mapped")
        with pytest.raises(KvmapError, match="a continuation without a token"):
            model.loglikelihood(instances("loglikelihood", [("", "</s>")]))

    def test_several_processes(self, qwen: Family, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(KvmapError, match="WORLD_SIZE=2: kvmap answers in one process"):
            KvmapLM(identity_pool(qwen), "mapped")

    def test_an_arm_that_is_not_in_the_pool(self, qwen: Family) -> None:
        with pytest.raises(KvmapError, match="arm='source': expected one of those in the pool, mapped"):
            KvmapLM(identity_pool(qwen), "source")

    @pytest.mark.parametrize(
        "given",
        [
            {"source": "zoo:tiny-small"},
            {"max_length": 64},
            {"batch_size": 1},
            {"device": "cpu"},
            {"hold_back": 2, "max_length": 64},
        ],
    )
    def test_what_a_pool_has_settled_beside_a_pool(self, qwen: Family, given: dict[str, Any]) -> None:
        with pytest.raises(KvmapError, match=f"{', '.join(given)}: a pool is given"):
            KvmapLM(identity_pool(qwen), "mapped", **given)


class TestRolling:
    def test_two_and_a_half_windows_by_hand(self, qwen: Family) -> None:
        """Each token once: two windows of 16 after a single token, and 8 that follow 9 others."""
        text = " ".join(CONTEXTS) * 3
        ids = qwen.tokenizer(text)["input_ids"][:40]
        text = qwen.tokenizer.decode(ids)
        assert qwen.tokenizer(text)["input_ids"] == ids
        prefix = qwen.tokenizer.eos_token_id
        by_hand = (
            log_probs(qwen, [prefix, *ids[:16]]).sum()
            + log_probs(qwen, ids[15:32]).sum()
            + log_probs(qwen, ids[23:40])[-8:].sum()
        )
        model = KvmapLM(identity_pool(qwen, batch_size=2, max_tokens=16), "mapped")
        (total,) = model.loglikelihood_rolling(instances("loglikelihood_rolling", [(text,)]))
        assert total == pytest.approx(float(by_hand), abs=1e-3)  # float32 against float64 over 40 tokens

    def test_with_a_context_of_eight_each_later_window_follows_eight_mapped_ones(self, qwen: Family) -> None:
        text = " ".join(CONTEXTS)
        ids = qwen.tokenizer(text)["input_ids"][:30]
        text = qwen.tokenizer.decode(ids)
        by_hand = (
            log_probs(qwen, [qwen.tokenizer.eos_token_id, *ids[:8]]).sum()
            + log_probs(qwen, ids[:17])[-9:].sum()
            + log_probs(qwen, ids[9:26])[-9:].sum()
            + log_probs(qwen, ids[18:30])[-4:].sum()
        )
        model = KvmapLM(identity_pool(qwen, max_tokens=16), "mapped", rolling_context=8)
        (total,) = model.loglikelihood_rolling(instances("loglikelihood_rolling", [(text,)]))
        assert total == pytest.approx(float(by_hand), abs=1e-3)
        assert model.facts["t", 0].n_mapped == 3 * 6  # of eight, one is the native head and one held back

    @pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 32, 33, 40, 41])
    def test_windows_are_lm_evals_own_and_score_each_id_once(self, n: int) -> None:
        ids = list(range(100, 100 + n))
        theirs = map(
            utils.make_disjoint_window,
            utils.get_rolling_token_windows(ids, prefix_token=7, max_seq_len=16, context_len=1),
        )
        assert list(rolling_windows(ids, 7, 16)) == list(theirs)
        for context in (1, 5, 15):
            windows = list(rolling_windows(ids, 7, 16, context))
            assert [token for _, scored in windows for token in scored] == ids
            for read, scored in windows:
                assert read
                assert len(read) + len(scored) - 1 <= 16

    def test_says_where_nothing_was_mapped(self, qwen: Family, caplog: pytest.LogCaptureFixture) -> None:
        model = KvmapLM(identity_pool(qwen), "mapped")
        model.loglikelihood_rolling(instances("loglikelihood_rolling", [("anna is in the garden",)]))
        assert "these numbers are the target's own; set rolling_context" in caplog.text

    def test_a_context_as_long_as_the_window_is_refused(self, qwen: Family) -> None:
        with pytest.raises(KvmapError, match="rolling_context=16: expected less than max_length=16"):
            KvmapLM(identity_pool(qwen, max_tokens=16), "mapped", rolling_context=16)


def greedy_text(family: Family, prompt: str, n: int) -> str:
    """Plain transformers, without any stop."""
    text: str = family.tokenizer.decode(greedy_ids(family, prompt, n), skip_special_tokens=True)
    return text


def greedy_ids(family: Family, prompt: str, n: int, **settings: Any) -> list[int]:
    """Plain transformers; the end of text ends nothing."""
    ids = torch.tensor([family.tokenizer(prompt)["input_ids"]])
    config = GenerationConfig(max_new_tokens=n, do_sample=False, **settings)
    out = family.loaded.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    found: list[int] = out[0, ids.shape[1] :].tolist()
    return found


def first_of_its_kind(family: Family) -> tuple[str, int, int]:
    """A prompt, and the place and id of a token of its answer that is not among those before it."""
    for prompt in CONTEXTS:
        ids = greedy_ids(family, prompt, 8)
        for place in range(2, 8):
            if ids[place] not in ids[:place]:
                return prompt, place, ids[place]
    raise AssertionError("every answer repeats one token")


class TestStops:
    @pytest.mark.parametrize("batch_size", [1, 3, 8])
    def test_each_row_ends_at_its_own_stop_and_stops_no_other(self, family: Family, batch_size: int) -> None:
        """Stops taken from the texts themselves: at the start, in the middle, across tokens, and none."""
        n = 24
        free = [greedy_text(family, prompt, n) for prompt in CONTEXTS]
        stops = {
            "early": lambda text: text[1:3],
            "middle": lambda text: text[len(text) // 2 :][:5],
            "never": lambda text: "\x00 no text has this",
        }
        asked, wanted = [], []
        for prompt, text in zip(CONTEXTS, free, strict=True):
            for pick in stops.values():
                asked.append((prompt, {"until": [pick(text)], "max_gen_toks": n}))
                wanted.append(text.split(pick(text))[0])
        model = KvmapLM(identity_pool(family, batch_size=batch_size), "mapped")
        assert model.generate_until(instances("generate_until", asked, seed=None)) == wanted
        assert len({len(text) for text in wanted}) > 3

    def test_a_row_that_ends_leaves_the_batch(self, qwen: Family, monkeypatch: pytest.MonkeyPatch) -> None:
        from kvmap.harness import generation

        rows: Counter[int] = Counter()
        plain = generation.forward

        def counted(model: Any, ids: torch.Tensor, *rest: Any) -> Any:
            rows[ids.shape[0]] += 1
            return plain(model, ids, *rest)

        monkeypatch.setattr(generation, "forward", counted)
        asked = [(prompt, {"max_gen_toks": n}) for prompt, n in zip(CONTEXTS, (2, 6, 4), strict=True)]
        texts = KvmapLM(identity_pool(qwen, batch_size=3), "mapped").generate_until(
            instances("generate_until", asked)
        )
        assert texts == [greedy_text(qwen, prompt, n["max_gen_toks"]) for prompt, n in asked]
        assert rows == {3: 1, 2: 2, 1: 2}

    def test_a_special_token_as_a_stop_ends_an_answer_though_it_has_no_text(self, qwen: Family) -> None:
        """As `<|im_end|>` does: here the model is made to say it where it says another token."""
        prompt, place, token = first_of_its_kind(qwen)
        end = qwen.tokenizer.convert_tokens_to_ids("<|im_end|>")
        model = KvmapLM(identity_pool(_with_swapped_ids(qwen, token, end)), "mapped")
        asked = [(prompt, {"until": ["<|im_end|>"], "max_gen_toks": 8})]
        (text,) = model.generate_until(instances("generate_until", asked))
        assert text == greedy_text(qwen, prompt, place)

    def test_the_end_of_text_is_the_models_and_the_tokenizers(self, qwen: Family) -> None:
        prompt, place, token = first_of_its_kind(qwen)
        asked = instances("generate_until", [(prompt, {"max_gen_toks": 8})])
        end = qwen.tokenizer.eos_token_id
        by_tokenizer = KvmapLM(identity_pool(_with_swapped_ids(qwen, token, end)), "mapped")
        assert by_tokenizer.generate_until(asked) == [greedy_text(qwen, prompt, place)]
        by_model = _with_swapped_ids(qwen, token, token)
        by_model.loaded.model.generation_config.eos_token_id = [token]
        model = KvmapLM(identity_pool(by_model), "mapped")
        assert model.generate_until(asked) == [greedy_text(qwen, prompt, place)]

    def test_a_repetition_penalty_is_transformers_own(self, qwen: Family) -> None:
        ids = greedy_ids(qwen, CONTEXTS[1], 12, repetition_penalty=1.7)
        asked = [(CONTEXTS[1], {"max_gen_toks": 12, "repetition_penalty": 1.7})]
        model = KvmapLM(identity_pool(qwen), "mapped")
        (text,) = model.generate_until(instances("generate_until", asked))
        assert text == qwen.tokenizer.decode(ids, skip_special_tokens=True)
        assert text != greedy_text(qwen, CONTEXTS[1], 12)

    @pytest.mark.parametrize(
        ("settings", "complaint"),
        [
            ({"do_sample": True, "temperature": 0.8}, "ask for sampling"),
            ({"temperature": 0.8}, "ask for sampling"),
            ({"num_beams": 4}, r"\{'num_beams': 4\}: kvmap knows until"),
            ({"max_gen_toks": 0}, r"\{'max_gen_toks': 0\}"),
        ],
    )
    def test_what_greedy_decoding_cannot_heed_is_refused(
        self, qwen: Family, settings: dict[str, Any], complaint: str
    ) -> None:
        model = KvmapLM(identity_pool(qwen), "mapped")
        with pytest.raises(KvmapError, match=f"task t: generation settings .*{complaint}"):
            model.generate_until(instances("generate_until", [("anna", settings)]))


def _with_swapped_ids(family: Family, one: int, other: int) -> Family:
    """The model with the rows of two ids exchanged in embedding and head: it says the one for the other."""
    model = copy.deepcopy(family.loaded.model)
    model.generation_config.eos_token_id = None
    for weight in {id(w): w for w in (model.get_input_embeddings().weight, model.lm_head.weight)}.values():
        weight[[one, other]] = weight[[other, one]]
    return Family("swapped", LoadedModel.from_model(model, family.tokenizer, name="swapped"))


class TestThinking:
    @pytest.mark.parametrize("as_id", [False, True])
    def test_what_comes_before_its_end_is_no_answer(self, qwen: Family, as_id: bool) -> None:
        free = greedy_text(qwen, CONTEXTS[0], 12)
        ids = qwen.tokenizer(free)["input_ids"]
        end: Any = ids[3] if as_id else free[4:7]
        model = KvmapLM(identity_pool(qwen), "mapped", think_end_token=end)
        (text,) = model.generate_until(instances("generate_until", [(CONTEXTS[0], {"max_gen_toks": 12})]))
        if not as_id:
            assert text == free.split(end)[-1].lstrip()
        else:
            assert len(text) < len(free)
            assert free.endswith(text)


class TestChat:
    def test_templates_give_one_bos_and_what_transformers_gives(self, llama: Family) -> None:
        model = KvmapLM(identity_pool(llama), "mapped")
        history = [
            {"role": "system", "content": "answer briefly"},
            {"role": "user", "content": "where is anna ?"},
        ]
        text = model.apply_chat_template(history)
        assert text == llama.tokenizer.apply_chat_template(
            history, tokenize=False, add_generation_prompt=True
        )
        assert text.endswith("<|im_start|>assistant\n")
        bos = llama.tokenizer.bos_token_id
        assert model.tok_encode(text).count(bos) == 1
        assert model.tok_encode("<s>" + text).count(bos) == 1
        assert model.chat_template(True) == llama.tokenizer.chat_template


def test_every_request_of_a_batch_reads_the_same_ids_in_both_models(
    llama: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[list[int]]] = []
    plain = evaluation_arms.transfer

    def watched(
        cache: Any, mapper: Any, target: Any, ids: torch.Tensor, mask: torch.Tensor, **more: Any
    ) -> Any:
        seen.append([row[keep].tolist() for row, keep in zip(ids, mask, strict=True)])
        assert torch.equal(cache.mask, mask)
        return plain(cache, mapper, target, ids, mask, **more)

    monkeypatch.setattr(evaluation_arms, "transfer", watched)
    model = KvmapLM(identity_pool(llama, batch_size=3), "mapped")
    model.loglikelihood(instances("loglikelihood", [(text, " garden") for text in CONTEXTS]))
    read = sorted(row for batch in seen for row in batch)
    assert read == sorted(llama.tokenizer(text)["input_ids"] for text in CONTEXTS)
