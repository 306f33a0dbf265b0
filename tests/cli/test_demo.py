"""The cascade one can watch: who answers, from whose cache; and how it reads on a terminal and in a pipe."""

from __future__ import annotations

import io
import json
import math
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvmap.demo.__main__ import EXIT_INTERRUPTED, EXIT_REFUSED, follow, main
from kvmap.demo.commands import Commands
from kvmap.demo.events import Answered, Event, HandedOver, Told, WentBack
from kvmap.demo.handing import watching_gate
from kvmap.demo.opening import composed, opened
from kvmap.demo.session import NotNow, Session
from kvmap.demo.settings import Rule, Talking
from kvmap.demo.wording import NotUnderstood, PlainWording, WorldWording, wording_of, world_stories
from kvmap.demo.writing import JsonWriter, TextWriter, Writer
from kvmap.evaluation.conversation import ConversationSettings, evaluate_conversations
from kvmap.evaluation.conversation_items import Conversation, world_conversations
from kvmap.mappers import Mapper, Verdict
from kvmap.run import EXIT_CONFIG, EXIT_FAILED
from kvmap.stages.context import Context

SMALL = ("experiment=debug", "calibration.n_sequences=15", "calibration.sequence_length=96")
N_TURNS, ESCAPE = 4, "\x1b["


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("outputs")


@pytest.fixture(scope="module")
def ctx(outputs: Path) -> Iterator[Context]:
    """A small run's models and mapper, had as the demo has them."""
    with opened(composed([*SMALL, f"outputs={outputs}"])) as context:
        yield context


@pytest.fixture(scope="module")
def conversation() -> Conversation:
    return world_conversations(0, 1, N_TURNS)[0]


def session_of(ctx: Context, mapper: Mapper | None = None, **settings: Any) -> Session:
    """A session on the shipped pair; settings: those of `Rule`, and `compare` and `gate`."""
    talking = Talking(compare=settings.pop("compare", False))
    gate = settings.pop("gate", None)
    rule = Rule(**settings)
    used = ctx.mapper if mapper is None else mapper
    return Session(ctx.pair, used, WorldWording(), options=ctx.options, rule=rule, talking=talking, gate=gate)


def held(session: Session, conversation: Conversation) -> list[Event]:
    """What happens when a conversation's questions are asked in turn."""
    events = list(session.tell(conversation.story))
    for turn in conversation.turns:
        events += session.ask(turn.question)
    return events


def standing(events: Sequence[Event]) -> list[Answered]:
    """The last answer of each turn that stands."""
    return list({e.turn: e for e in events if isinstance(e, Answered) and e.stands}.values())


def shown(session: Session, *lines: str, json_lines: bool = False, echoes: bool = True) -> tuple[int, str]:
    """Exit status, and what is written, of a script."""
    stream = io.StringIO()
    writer: Writer = JsonWriter(stream) if json_lines else TextWriter(stream)
    return follow(Commands(session, 0), writer, iter(lines), echoes=echoes), stream.getvalue()


class TestSession:
    @pytest.mark.parametrize("turn", [1, 3])
    def test_answers_as_the_evaluation_of_conversations_does(
        self, ctx: Context, conversation: Conversation, turn: int
    ) -> None:
        settings = ConversationSettings(mode="at_turn", turn=turn)
        found = evaluate_conversations(
            ctx.pair, {"mapped": ctx.mapper}, [conversation], options=ctx.options, settings=settings
        )
        answers = standing(held(session_of(ctx, escalate=turn), conversation))
        assert [(a.answer, a.by, a.n_context, a.n_mapped) for a in answers] == [
            (r.answer, r.answered_by, r.n_context, r.n_mapped) for r in found
        ]
        assert any(a.cache == "mapped" for a in answers)

    def test_without_a_hand_off_it_is_the_source_alone(
        self, ctx: Context, conversation: Conversation
    ) -> None:
        found = evaluate_conversations(ctx.pair, {"source": None}, [conversation], options=ctx.options)
        events = held(session_of(ctx, escalate="never"), conversation)
        assert [a.answer for a in standing(events)] == [r.answer for r in found]
        assert not any(isinstance(e, HandedOver) for e in events)

    def test_what_is_shown_beside_is_what_the_target_alone_says(
        self, ctx: Context, conversation: Conversation
    ) -> None:
        found = evaluate_conversations(ctx.pair, {"target": None}, [conversation], options=ctx.options)
        events = held(session_of(ctx, escalate=1, compare=True), conversation.first(1))
        (beside,) = [e for e in events if isinstance(e, Answered) and not e.stands]
        assert (beside.answer, beside.cache, beside.by) == (found[0].answer, "own", "target")

    def test_confidence_is_the_probability_of_the_answer(
        self, ctx: Context, conversation: Conversation
    ) -> None:
        session, source = session_of(ctx, escalate="never"), ctx.pair.source
        answer = standing(held(session, conversation.first(1)))[0]
        tokenizer, text = ctx.pair.tokenizer, f"{conversation.story} {conversation.turns[0].question}"
        context, whole = (tokenizer(t)["input_ids"] for t in (text, f"{text} {answer.answer}"))
        with torch.no_grad():
            logits = source.model(torch.tensor([whole])).logits[0].double()
        log_probs = [
            float(logits[at - 1].log_softmax(-1)[whole[at]]) for at in range(len(context), len(whole))
        ]
        # float32 forwards of other lengths agree to about 1e-6 in a logit
        assert answer.first_token_probability == pytest.approx(math.exp(log_probs[0]), rel=1e-4)
        mean = math.exp(sum(log_probs) / len(log_probs))
        assert answer.mean_probability == pytest.approx(mean, rel=1e-4)

    @pytest.mark.parametrize(("threshold", "n_hand_offs"), [(0.0, 0), (1.0, 1)])
    def test_low_confidence_hands_over_once(
        self, ctx: Context, conversation: Conversation, threshold: float, n_hand_offs: int
    ) -> None:
        events = held(session_of(ctx, threshold=threshold), conversation)
        assert sum(isinstance(e, HandedOver) for e in events) == n_hand_offs
        assert [a.by for a in standing(events)] == [("source", "target")[n_hand_offs]] * N_TURNS

    def test_a_hand_off_says_what_was_mapped(self, ctx: Context, conversation: Conversation) -> None:
        events = held(session_of(ctx, escalate=1), conversation.first(1))
        (hand_off,) = [e for e in events if isinstance(e, HandedOver)]
        shapes = [(layer.n_kv_heads, layer.head_dim) for layer in ctx.pair.target_geometry.layers]
        per_token = sum(2 * heads * width * 4 for heads, width in shapes)  # float32
        kept = ctx.options.native_head + ctx.options.hold_back
        assert (hand_off.status, hand_off.cause, hand_off.n_native_layers) == ("applied", None, 0)
        assert hand_off.n_mapped == hand_off.n_context - kept
        assert hand_off.mapped_bytes == hand_off.n_mapped * per_token
        assert hand_off.canary_kl_nats is not None
        assert hand_off.canary_kl_nats > 0
        assert hand_off.record()["seconds_saved"] == hand_off.prefill_seconds - hand_off.seconds

    def test_on_request_the_target_answers_the_last_question_anew(
        self, ctx: Context, conversation: Conversation
    ) -> None:
        session = session_of(ctx, escalate="never")
        held(session, conversation.first(2))
        later = [*session.escalate()]
        expected = standing(held(session_of(ctx, escalate="never"), conversation.first(1)))
        assert [type(e) for e in later] == [HandedOver, Answered]
        assert standing(later)[0].turn == 2
        assert session.speaker == "target"
        assert session.totals.n_by_target == 1
        assert expected[0].by == "source"

    def test_asked_for_before_any_question_it_waits_for_one(
        self, ctx: Context, conversation: Conversation
    ) -> None:
        session = session_of(ctx, escalate="never")
        list(session.escalate())
        events = held(session, conversation.first(1))
        assert [type(e) for e in events] == [Told, HandedOver, Answered]

    def test_back_on_the_source_nothing_is_mapped(self, ctx: Context, conversation: Conversation) -> None:
        session = session_of(ctx, escalate=1)
        said = standing(held(session, conversation.first(2)))
        (back,) = session.back()
        assert isinstance(back, WentBack)
        assert back.n_tokens == said[1].n_context - said[0].n_context
        answer = standing([*session.ask(conversation.turns[2].question)])[0]
        text = conversation.story
        for turn, past in zip(conversation.turns, said, strict=False):
            text += f" {turn.question} {past.answer} ."
        ids = ctx.pair.tokenizer(f"{text} {conversation.turns[2].question}", return_tensors="pt")["input_ids"]
        with torch.no_grad():
            best = int(ctx.pair.source.model(ids).logits[0, -1].argmax())
        assert (answer.by, answer.n_mapped, answer.n_context) == ("source", 0, ids.shape[1])
        assert answer.answer.split()[0] == ctx.pair.tokenizer.decode([best]).strip()

    def test_what_is_out_of_turn_is_refused(self, ctx: Context, conversation: Conversation) -> None:
        session = session_of(ctx, escalate=1)
        with pytest.raises(NotNow, match="source answers already"):
            list(session.back())
        with pytest.raises(NotNow, match="ask a question first"):
            list(session.native())
        held(session, conversation.first(1))
        with pytest.raises(NotNow, match="target answers already"):
            list(session.escalate())

    def test_a_full_context_is_refused_and_nothing_changes(
        self, ctx: Context, conversation: Conversation
    ) -> None:
        session = session_of(ctx, escalate="never")
        held(session, conversation.first(1))
        session.talking = replace(session.talking, max_tokens=100)
        with pytest.raises(NotNow, match="do not fit into 100"):
            list(session.ask(conversation.turns[1].question))
        session.talking = replace(session.talking, max_tokens=None)
        assert standing([*session.ask(conversation.turns[1].question)])[0].turn == 2


class TestGate:
    def test_a_hand_off_over_the_canary_falls_back_to_native_answers(
        self, ctx: Context, conversation: Conversation
    ) -> None:
        gate = watching_gate(ctx.mapper, max_kl_nats=0.0)
        events = held(session_of(ctx, escalate=1, gate=gate), conversation)
        (hand_off,) = [e for e in events if isinstance(e, HandedOver)]
        found = evaluate_conversations(ctx.pair, {"target": None}, [conversation], options=ctx.options)
        assert (hand_off.status, hand_off.cause, hand_off.mapped_bytes) == ("fell_back", "canary", 0)
        assert hand_off.seconds_saved == 0
        assert [a.answer for a in standing(events)] == [r.answer for r in found]

    def test_a_verdict_is_heeded_unless_allowed(self, ctx: Context, conversation: Conversation) -> None:
        judged = ctx.mapper.to(dtype=torch.float32)
        judged.verdict = Verdict("no_go", 0.3, 0.1, 0.5, 0.9, ("planted",))
        for allow, status in (((), "fell_back"), (("no_go",), "applied")):
            session = session_of(ctx, judged, escalate=1, gate=watching_gate(judged, allow=allow))
            events = held(session, conversation.first(1))
            (hand_off,) = [e for e in events if isinstance(e, HandedOver)]
            assert hand_off.status == status
            assert session.ready(fitted=False, seconds=0.0).verdict == "no-go"


class TestLines:
    def test_a_transcript_without_a_terminal_has_no_colour(
        self, ctx: Context, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FORCE_COLOR", "1")
        question = "where is anna ?"
        status, out = shown(session_of(ctx, threshold=1.0, compare=True), "# a comment", "", question)
        assert status == 0
        assert "source> where is anna ?\n" in out
        assert "hand-off (confidence" in out
        assert "target, beside it: " in out
        assert out.rstrip().splitlines()[-1].endswith("equal the native ones")
        assert ESCAPE not in out

    def test_json_has_one_event_a_line(self, ctx: Context) -> None:
        lines = ("/story", "where is anna", "/escalate", "/native", "/back", "/help", "/quit", "never read")
        status, out = shown(session_of(ctx, escalate="never"), *lines, json_lines=True)
        events = [json.loads(line) for line in out.splitlines()]
        assert status == 0
        names = "story answer hand_off answer answer back note end"
        assert [e["event"] for e in events] == names.split()
        assert (events[-1]["n_hand_offs"], events[-1]["n_questions"]) == (1, 1)
        assert events[-1]["n_compared"] == 1
        assert all(line.split()[0] in events[-2]["text"] for line in lines if line.startswith("/"))

    def test_a_story_of_ones_own(self, ctx: Context, tmp_path: Path) -> None:
        (tmp_path / "story.txt").write_text("The key is in Oslo.\nAnna is in Rome.")
        for told in ("/story The key is in Oslo. Anna is in Rome.", f"/story @{tmp_path / 'story.txt'}"):
            _, out = shown(session_of(ctx, escalate="never"), told, "Where is the key?", json_lines=True)
            story, answer, _ = map(json.loads, out.splitlines())
            assert story["text"] == "the key is in oslo . anna is in rome ."
            assert answer["question"] == "question : where is the key ? answer : the key is in"
            assert answer["answer"]

    @pytest.mark.parametrize(
        ("line", "message"),
        {
            "/esc": "Did you mean '/escalate'?",
            "/escalate now": "expected nothing",
            "/back": "the source answers already",
            "/native": "ask a question first",
            "/story @/no/such/file": "No such file",
            "/story a dragon": "no word 'dragon'",
        }.items(),
    )
    def test_a_line_that_cannot_be_done_is_refused_and_the_talk_goes_on(
        self, ctx: Context, line: str, message: str
    ) -> None:
        lines = ("/story", line, "where is anna ?")
        status, out = shown(session_of(ctx, escalate="never"), *lines, json_lines=True)
        _, refused, answer, _ = map(json.loads, out.splitlines())
        assert status == EXIT_REFUSED
        assert (refused["event"], refused["line"]) == ("refused", line)
        assert message in refused["message"]
        assert answer["event"] == "answer"

    def test_ctrl_c_ends_it_with_its_sums(self, ctx: Context) -> None:
        def lines() -> Iterator[str]:
            yield "where is anna ?"
            raise KeyboardInterrupt

        stream = io.StringIO()
        commands = Commands(session_of(ctx, escalate="never"), 0)
        assert follow(commands, TextWriter(stream), lines(), echoes=True) == EXIT_INTERRUPTED
        assert stream.getvalue().splitlines()[-1] == "interrupted: 1 questions, 0 answered by the target"


class TestWording:
    @pytest.mark.parametrize(
        ("typed", "read"),
        {
            "where is anna": "question : where is anna ? answer : anna is in",
            "Where is the KEY?": "question : where is the key ? answer : the key is in",
            "what colour is key ?": "question : what colour is the key ? answer : the key is",
            "who has the cup?": "question : who has the cup ? answer : the cup is with",
            "how many things does leo have": "question : how many things does leo have ? answer : leo has",
            "question : where is ben ? answer : ben is in": "question : where is ben ? answer : ben is in",
        }.items(),
    )
    def test_questions_are_put_as_the_models_learnt_them(self, typed: str, read: str) -> None:
        assert WorldWording().question(typed) == read

    @pytest.mark.parametrize(
        ("typed", "message"),
        [("is anna in rome ?", "taught"), ("where is rome", "nobody"), ("where is zeus", "'zeus'")],
    )
    def test_others_are_refused(self, typed: str, message: str) -> None:
        with pytest.raises(NotUnderstood, match=message):
            WorldWording().question(typed)

    def test_other_models_read_what_is_typed(self) -> None:
        assert isinstance(wording_of("zoo:tiny-small", "zoo:tiny-large"), WorldWording)
        plain = wording_of("zoo:tiny-small", "Qwen/Qwen3-0.6B")
        assert isinstance(plain, PlainWording)
        assert plain.question(" Who is Zeus? ") == "Who is Zeus?"

    def test_stories_are_those_of_the_evaluation(self) -> None:
        stories = world_stories(3)
        told = [next(stories) for _ in range(2)]
        expected = world_conversations(3, 2, len(told[0][1]))
        assert [story for story, _ in told] == [one.story for one in expected]
        assert told[1][1] == {turn.question: turn.answers[0] for turn in expected[1].turns}


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--escalate", "0"], EXIT_FAILED, "escalate=0: expected auto, never"),
        (["--escalate", "sometimes"], EXIT_FAILED, "escalate=sometimes"),
        (["--threshold", "2"], EXIT_FAILED, "threshold=2.0: expected a probability"),
        (["--confidence", "last"], EXIT_FAILED, "unknown confidence 'last'"),
        (["--max-new-tokens", "0"], EXIT_FAILED, "max-new-tokens=0"),
        (["--script", "/no/such/file"], EXIT_FAILED, "No such file"),
        (["mapper.topk=3"], EXIT_CONFIG, "topk"),
        (["pair=tinny"], EXIT_CONFIG, "Did you mean pair=tiny?"),
        (["mapper.top_k=0", "direction=sideways"], EXIT_CONFIG, "2 mistakes"),
    ],
)
def test_bad_input_gets_one_message_and_a_status(
    capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, message: str
) -> None:
    assert main(arguments) == status
    err = capsys.readouterr().err
    assert message in err
    assert err.count("kvmap: ") == 1


@pytest.mark.slow
def test_downwards_through_the_command_line(
    outputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.txt"
    script.write_text("where is anna ?\n")
    command = [*SMALL, f"outputs={outputs}", "direction=down", "--script", str(script)]
    assert main([*command, "--escalate", "1", "--json"]) == 0
    ready, *rest = map(json.loads, capsys.readouterr().out.splitlines())
    assert (ready["source"], ready["target"]) == ("zoo:tiny-large", "zoo:tiny-small")
    assert [e["event"] for e in rest] == ["story", "hand_off", "answer", "end"]
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0])["fitted"] is False


class Terminal:
    """A process on a pseudo-terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self.master, slave = pty.openpty()
        command = [sys.executable, "-m", "kvmap.demo", *arguments]
        environment = os.environ | {"TERM": "xterm", "OMP_NUM_THREADS": "1"}
        environment.pop("NO_COLOR", None)
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True, env=environment
        )
        os.close(slave)
        self.seen = ""

    def until(self, text: str, seconds: float = 100) -> str:
        """What is shown up to a text, which must come."""
        deadline = time.monotonic() + seconds
        while text not in self.seen:
            assert time.monotonic() < deadline, f"no {text!r} in {self.seen!r}"
            if select.select([self.master], [], [], 0.1)[0]:
                self.seen += self._read()
        before, _, self.seen = self.seen.partition(text)
        return before

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def interrupt(self) -> None:
        """Ctrl-C, and again where it came between prompt and wait for keys: Python then sees it late."""
        self.process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=10)
            return
        self.process.send_signal(signal.SIGINT)

    def end(self) -> tuple[int, str]:
        """Exit status, and what else is shown."""
        status = self.process.wait(timeout=100)
        while select.select([self.master], [], [], 0.1)[0] and (more := self._read()):
            self.seen += more
        os.close(self.master)
        return status, self.seen

    def _read(self) -> str:
        try:
            return os.read(self.master, 65536).decode(errors="replace")
        except OSError:  # how Linux says that the other end is closed
            return ""


@pytest.mark.slow
class TestTerminal:
    def test_a_conversation_typed_on_a_terminal(self, outputs: Path) -> None:
        terminal = Terminal(*SMALL, f"outputs={outputs}", "--escalate", "never")
        before = terminal.until("source> ")
        assert "it answers: " in before
        assert ESCAPE in before
        terminal.type("where is anna ?\n")
        assert "source: " in terminal.until("source> ")
        terminal.type("/escalate\n")
        assert "hand-off (on request): applied" in terminal.until("target> ")
        terminal.type("/back\n")
        terminal.until("source> ")
        terminal.type("\x04")
        status, rest = terminal.end()
        assert status == 0
        assert "ended: 1 questions, 1 answered by the target" in rest
        assert "Traceback" not in rest

    def test_a_reader_that_has_gone_ends_it_without_a_word(self, outputs: Path) -> None:
        command = [sys.executable, "-m", "kvmap.demo", *SMALL, f"outputs={outputs}", "--json"]
        read, write = os.pipe()
        os.close(read)
        done = subprocess.run(
            command, input="where is anna ?\n", stdout=write, stderr=subprocess.PIPE, text=True, check=False
        )
        os.close(write)
        assert (done.returncode, done.stderr) == (EXIT_REFUSED, "")

    @pytest.mark.parametrize("at", ["the prompt", "the start"])
    def test_ctrl_c(self, outputs: Path, tmp_path: Path, at: str) -> None:
        if at == "the prompt":
            terminal = Terminal(*SMALL, f"outputs={outputs}")
            terminal.until("source> ")
        else:
            terminal = Terminal(*SMALL, f"outputs={tmp_path}", "calibration.n_sequences=2000")
            terminal.until("calibrate")  # the bar of what is interrupted
        terminal.interrupt()
        status, rest = terminal.end()
        assert status == EXIT_INTERRUPTED
        assert "interrupted" in rest
        assert "Traceback" not in rest
