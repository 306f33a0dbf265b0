"""A conversation on a pair: the source answers until it is handed over, the target from then on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvmap.data import prompt_prefix
from kvmap.demo.answering import Reply, reply
from kvmap.demo.events import Answered, Ended, Event, HandedOver, Note, Ready, Told, WentBack
from kvmap.demo.handing import hand_over, mapped_bytes, timed, watching_gate
from kvmap.demo.settings import AUTO, Rule, Talking
from kvmap.demo.wording import Wording, plain_question
from kvmap.errors import KvmapError
from kvmap.evaluation.arms import placed, tokenizer_of
from kvmap.evaluation.conversation_encoding import Ids, encode, encode_answer, joined
from kvmap.evaluation.conversation_items import Conversation
from kvmap.evaluation.conversation_speakers import Reader, Replying, go_on
from kvmap.evaluation.limits import context_limit
from kvmap.mappers import Mapper
from kvmap.models.pair import ModelPair
from kvmap.transfer import Gate, HandOff, TransferOptions

WARM_UP_TOKENS = 16


class NotNow(KvmapError):
    """A command that asks for what the conversation has not got to, or is past."""


@dataclass
class _Turn:
    """A question, what stands as its answer, and whose that is."""

    question: str
    answer: str = ""
    by: str = ""


@dataclass
class _State:
    """One conversation: what was said, whose caches hold it."""

    conversation: Conversation
    opening: Ids
    gold: Mapping[str, str]
    replying: Replying
    source: Reader
    target: Reader
    segments: list[Ids] = field(default_factory=list)
    turns: list[_Turn] = field(default_factory=list)
    held: HandOff | None = None
    n_read_by_source: int = 0
    wanted: bool = False


class Session:
    """Holds a conversation turn by turn; every method yields what happens as it happens."""

    def __init__(
        self,
        pair: ModelPair,
        mapper: Mapper,
        wording: Wording,
        *,
        options: TransferOptions,
        rule: Rule | None = None,
        talking: Talking | None = None,
        gate: Gate | None = None,
    ) -> None:
        """A session without a story.

        Args:
            pair: source and target, both in memory as soon as they are needed.
            mapper: from the one's cache to the other's.
            wording: how the pair's stories and questions are written.
            options: how a cache is transferred.
            rule: when the conversation is handed over; None: the defaults.
            talking: how answers are made; None: the defaults.
            gate: what a hand-off must pass; None: `watching_gate` of the mapper.
        """
        self.pair, self.wording, self.options = pair, wording, options
        self.rule, self.talking = rule or Rule(), talking or Talking()
        self.gate = gate or watching_gate(mapper)
        self.totals = Ended()
        self._tokenizer: Any = tokenizer_of(pair)
        self._mapper = mapper
        self._state = self._begun("", {})

    @property
    def speaker(self) -> str:
        """Who answers the next question: `source` or `target`."""
        return "source" if self._state.held is None else "target"

    def ready(self, *, fitted: bool, seconds: float) -> Ready:
        """What the session has; see `Ready`."""
        verdict = self._mapper.verdict
        return Ready(
            source=self.pair.source_identity.name,
            target=self.pair.target_identity.name,
            mapper=self._mapper.kind,
            mapper_bytes=self._mapper.nbytes,
            fitted=fitted,
            seconds=seconds,
            verdict=None if verdict is None else verdict.words,
            escalation=str(self.rule),
        )

    def warm_up(self) -> None:
        """Run both models and the map once on a short text, so that no time shown is that of a first call."""
        ids = (*prompt_prefix(self._tokenizer), *encode(self._tokenizer, self.wording.form.before_question))
        context = (ids * WARM_UP_TOKENS)[:WARM_UP_TOKENS]
        if context:
            kv = Reader(self.pair.source).read([context]).kv
            hand_over(kv, self._target_mapper(), self.pair.target, context, self.options, self.gate)

    def tell(self, text: str, gold: Mapping[str, str] | None = None) -> Iterator[Event]:
        """Begin anew, on the source, with a story; all caches are given up.

        Args:
            text: the story as it was typed.
            gold: right answers by question, as the models read it.

        Raises:
            KvmapError: words that the pair does not have, or a story that leaves no room for a question.
        """
        state = self._begun(self.wording.story(text), gold or {})
        self._check_room(len(state.opening))
        state.wanted = self._state.wanted  # asked for before the story
        self._state = state
        suggestions = tuple(plain_question(question) for question in state.gold)
        yield Told(state.conversation.story, len(state.opening), suggestions)

    def ask(self, text: str) -> Iterator[Event]:
        """Ask a question: whoever speaks answers; the source may be relieved by the rule.

        Raises:
            KvmapError: words that the pair does not have, or no room left in the context.
        """
        state, form = self._state, self.wording.form
        question = self.wording.question(text)
        segment = self._fed() + encode(self._tokenizer, form.before_question + question + form.before_answer)
        self._check_room(len(joined(state.segments)) + len(segment))
        state.segments.append(segment)
        state.turns.append(_Turn(question))
        self.totals = replace(self.totals, n_questions=self.totals.n_questions + 1)
        if state.held is not None:
            yield from self._target_goes_on(state.held)
        elif state.wanted or self.rule.escalate == len(state.turns):
            why = "on request" if state.wanted else f"turn {len(state.turns)}"
            yield from self._hand_over(why)
        else:
            yield from self._source_answers()

    def escalate(self) -> Iterator[Event]:
        """Hand the conversation over: the target answers the last question anew, or else the next one.

        Raises:
            NotNow: the target answers already.
        """
        if self._state.held is not None:
            raise NotNow("the target answers already; /back gives the conversation back to the source")
        if self._state.turns:
            yield from self._hand_over("on request")
        else:
            self._state.wanted = True
            yield Note("nothing was asked yet: the target takes the next question")

    def back(self) -> Iterator[Event]:
        """Back to the source, which reads what it missed onto its own cache; nothing is mapped.

        Raises:
            NotNow: the source answers already.
        """
        state = self._state
        if state.held is None:
            raise NotNow("the source answers already; /escalate hands the conversation over")
        state.held = None
        _, seconds = timed(self.pair.source, lambda: state.source.read(state.segments))
        n_tokens = len(joined(state.segments[state.n_read_by_source :]))
        state.n_read_by_source = len(state.segments)
        yield WentBack(n_tokens, seconds)

    def native(self) -> Iterator[Event]:
        """The target's own answer to the last question, from its own cache, beside the one that stands.

        Raises:
            NotNow: nothing was asked yet.
        """
        if not self._state.turns:
            raise NotNow("nothing was asked yet: ask a question first")
        yield self._native()

    def _begun(self, story: str, gold: Mapping[str, str]) -> _State:
        conversation = Conversation("demo", "0", story, (), self.wording.form)
        stop = (*self.wording.form.stop, *self.talking.stop)
        return _State(
            conversation,
            tuple(prompt_prefix(self._tokenizer)) + (encode(self._tokenizer, story) if story else ()),
            gold,
            Replying(self._tokenizer, self.talking.max_new_tokens, stop),
            Reader(self.pair.source),
            Reader(self.pair.target),
        )

    @property
    def _limit(self) -> int:
        limit, asked = context_limit(self.pair), self.talking.max_tokens
        return limit if asked is None else min(limit, asked)

    def _check_room(self, n_tokens: int) -> None:
        needed = n_tokens + self.talking.max_new_tokens
        if needed > self._limit:
            raise NotNow(
                f"{n_tokens} tokens and an answer of up to {self.talking.max_new_tokens} do not fit into "
                f"{self._limit}, which is what both models take; /story begins a shorter conversation"
            )

    def _fed(self) -> Ids:
        """What stands before the next question: the last answer, or what the conversation begins with."""
        state = self._state
        if not state.turns:
            return state.opening
        answer = state.turns[-1].answer
        return encode_answer(self._tokenizer, state.conversation, answer, self.talking.max_new_tokens)

    def _target_mapper(self) -> Mapper:
        mapper = placed({"mapped": self._mapper}, self.pair.target)["mapped"]
        assert mapper is not None, "one was given"
        self._mapper = mapper
        return mapper

    def _source_answers(self) -> Iterator[Event]:
        state, source = self._state, self.pair.source

        def answer() -> Reply:
            return reply(source, state.source.read(state.segments), state.replying)

        said, seconds = timed(source, answer)
        state.n_read_by_source = len(state.segments)
        yield self._answered(said, seconds, "source", 0)
        confidence = said.confidence(self.rule.confidence)
        if self.rule.escalate == AUTO and confidence < self.rule.threshold:
            yield from self._hand_over(f"confidence {confidence:.2f} is under {self.rule.threshold:g}")

    def _hand_over(self, why: str) -> Iterator[Event]:
        state, target = self._state, self.pair.target
        ids = joined(state.segments)
        source_kv = state.source.read(state.segments).kv
        state.n_read_by_source = len(state.segments)
        handed = hand_over(source_kv, self._target_mapper(), target, ids, self.options, self.gate)
        hand_off = handed.hand_off
        event = HandedOver(
            turn=len(state.turns),
            why=why,
            status=handed.status,
            cause=handed.cause,
            reason=handed.reason,
            n_context=len(ids),
            n_mapped=hand_off.n_mapped,
            n_native_layers=hand_off.n_native_layers,
            n_layers=hand_off.kv.n_layers,
            mapped_bytes=mapped_bytes(hand_off),
            seconds=handed.seconds,
            prefill_seconds=handed.prefill_seconds,
            canary_kl_nats=handed.canary_kl_nats,
        )
        state.held, state.wanted = hand_off, False
        self._count(event)
        yield event
        yield from self._target_answers(hand_off, 0.0)

    def _target_goes_on(self, held: HandOff) -> Iterator[Event]:
        state, target = self._state, self.pair.target
        hand_off, seconds = timed(target, lambda: go_on(target, held, state.segments[-1]))
        state.held = hand_off
        yield from self._target_answers(hand_off, seconds)

    def _target_answers(self, hand_off: HandOff, reading: float) -> Iterator[Event]:
        """The answer that stands; reading: seconds that the question took to read."""
        target, replying = self.pair.target, self._state.replying
        said, seconds = timed(target, lambda: reply(target, hand_off, replying))
        yield self._answered(said, reading + seconds, "target", hand_off.n_mapped)
        if self.talking.compare and hand_off.n_mapped:
            yield self._native()

    def _native(self) -> Answered:
        state, target = self._state, self.pair.target

        def answer() -> Reply:
            return reply(target, state.target.read(state.segments), state.replying)

        said, seconds = timed(target, answer)
        last = state.turns[-1]
        if last.by == "target" and state.held is not None and state.held.n_mapped:
            self.totals = replace(
                self.totals,
                n_compared=self.totals.n_compared + 1,
                n_agreed=self.totals.n_agreed + (said.text == last.answer),
            )
        return self._event(said, seconds, "target", 0, stands=False)

    def _answered(self, said: Reply, seconds: float, by: str, n_mapped: int) -> Answered:
        """The event of an answer that stands from now on."""
        turn = self._state.turns[-1]
        more = int(by == "target") - int(turn.by == "target")
        self.totals = replace(self.totals, n_by_target=self.totals.n_by_target + more)
        turn.answer, turn.by = said.text, by
        return self._event(said, seconds, by, n_mapped, stands=True)

    def _event(self, said: Reply, seconds: float, by: str, n_mapped: int, *, stands: bool) -> Answered:
        state = self._state
        question = state.turns[-1].question
        return Answered(
            turn=len(state.turns),
            question=question,
            answer=said.text,
            by=by,
            cache="mapped" if n_mapped else "own",
            first_token_probability=said.first,
            mean_probability=said.mean,
            seconds=seconds,
            n_context=len(joined(state.segments)),
            n_mapped=n_mapped,
            gold=state.gold.get(question),
            stands=stands,
        )

    def _count(self, event: HandedOver) -> None:
        totals, applied = self.totals, event.status == "applied"
        self.totals = replace(
            totals,
            n_hand_offs=totals.n_hand_offs + 1,
            n_applied=totals.n_applied + applied,
            n_mapped=totals.n_mapped + event.n_mapped,
            seconds=totals.seconds + event.seconds * applied,
            prefill_seconds=totals.prefill_seconds + event.prefill_seconds * applied,
        )
