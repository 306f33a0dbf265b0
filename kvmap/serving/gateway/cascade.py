"""Asks the engines in turn until one has answered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, Self, TypeAlias, TypeVar

from kvmap.serving.gateway.case import Case
from kvmap.serving.gateway.counting import Counting
from kvmap.serving.gateway.engine import Engine, EngineFailed, Role
from kvmap.serving.gateway.estimate import PrefillEstimate
from kvmap.serving.gateway.handing_over import HandingOver
from kvmap.serving.gateway.prompts import Prompts
from kvmap.serving.gateway.refusals import Refusal
from kvmap.serving.gateway.routing import Route, Why, route
from kvmap.serving.gateway.settings import ConfidenceSettings, Settings


class Reply(Protocol):
    """An answer, whole or begun."""

    @property
    def confidence(self) -> float | None:
        """Of the source, where it was judged."""

    @property
    def n_judged(self) -> int:
        """Tokens it was judged by."""

    def note(self, case: Case) -> None:
        """Put down what is known of it."""

    async def withhold(self) -> Self | None:
        """It is not sent; itself where it still could be."""


R = TypeVar("R", bound=Reply)
Ask: TypeAlias = Callable[[Engine, Case, dict[str, Any], ConfidenceSettings | None], Awaitable[R]]

#: reasons for which a session is the target's from then on
_ESCALATING: tuple[Why, ...] = ("request", "rule", "confidence")


class Cascade:
    """Source and target, and what was learnt of them."""

    def __init__(self, settings: Settings, engines: Mapping[Role, Engine], counting: Counting) -> None:
        """Args: all settings; both engines; what counts."""
        self.settings, self.engines, self.counting = settings, engines, counting
        self.prompts = Prompts(engines, counting)
        self.handing_over = HandingOver(settings, engines, self.prompts, counting)
        self.estimate = PrefillEstimate()

    async def reply(self, case: Case, ask: Ask[R]) -> R:
        """The answer that stands: of the engine the request is routed to, else of the other.

        Args:
            case: the request; its report is filled in.
            ask: how an engine is asked: `ask_whole` or `ask_stream`.

        Raises:
            Refusal: neither engine answered.
        """
        chosen = await self._route(case)
        failures: list[EngineFailed] = []
        withheld: R | None = None
        if chosen.by == "source":
            try:
                reply = await self._of_source(case, ask, judged=chosen.judged)
            except EngineFailed as error:
                chosen = Route("target", "source_failed", self._failed(case, error, failures))
            else:
                if not self._is_low(case, reply):
                    return self._stands(case, reply, chosen)
                withheld = await reply.withhold()
                threshold = self.settings.confidence.threshold
                chosen = Route("target", "confidence", f"{reply.confidence:.3f} is under {threshold:g}")
        try:
            return self._stands(case, await self._of_target(case, ask), chosen)
        except EngineFailed as error:
            fallen = Route("source", "target_failed", self._failed(case, error, failures))
        if withheld is not None:
            case.report.withheld_tokens = 0
            return self._stands(case, withheld, fallen)
        if not case.source_failed:
            await self.handing_over.reads.give_up(case)  # its own answer reads the same prompt
            try:
                return self._stands(case, await self._of_source(case, ask, judged=False), fallen)
            except EngineFailed as error:
                self._failed(case, error, failures)
        raise _nobody(failures)

    async def _route(self, case: Case) -> Route:
        asked, settings = case.asked, self.settings
        case.report.turn = case.turn
        named = await self._named(asked.body.get("model"))
        counted = settings.rules.prompt_tokens is not None and asked.wish.escalate is None
        n_tokens = await case.n_tokens() if counted else None
        return route(settings, asked, case.session, named, case.turn, n_tokens)

    async def _named(self, model: str | None) -> Role | None:
        """Whose model a request names; None: the cascade's, or one that cannot be told.

        Raises:
            Refusal: 404, it is nobody's.
        """
        if model is None or model == self.settings.model:
            return None
        names: dict[Role, str] = {}
        for role, engine in self.engines.items():
            try:
                names[role] = (await engine.served()).model
            except EngineFailed:
                continue
        roles = [role for role, name in names.items() if name == model]
        if not roles and len(names) == len(self.engines):
            known = ", ".join([self.settings.model, *names.values()])
            raise Refusal(
                404, f"model: there is no {model[:200]!r}; known: {known}", "model_not_found", "model"
            )
        return roles[0] if len(roles) == 1 else None

    async def _of_source(self, case: Case, ask: Ask[R], *, judged: bool) -> R:
        case.report.of_source()
        body = await self._within_limits(case, "source", self.handing_over.source_body(case))
        return await ask(self.engines["source"], case, body, self.settings.confidence if judged else None)

    async def _of_target(self, case: Case, ask: Ask[R]) -> R:
        body = await self.handing_over.target_body(case)
        body = await self._within_limits(case, "target", body)
        return await ask(self.engines["target"], case, body, None)

    async def _within_limits(self, case: Case, role: Role, body: dict[str, Any]) -> dict[str, Any]:
        """Bound the answer of a chat that does not say how long it may be."""
        if case.asked.kind == "completion":
            body.setdefault("max_tokens", min(16, self.settings.limits.max_tokens))
            return body
        if body.get("max_tokens") is not None or body.get("max_completion_tokens") is not None:
            return body
        most = self.settings.limits.max_tokens
        longest = (await self.engines[role].served()).max_model_len
        if longest is None or longest > most:
            n_tokens = await case.n_tokens()
            room = most if longest is None or n_tokens is None else longest - n_tokens
            body["max_completion_tokens"] = max(1, min(most, room))
        return body

    def _is_low(self, case: Case, reply: Reply) -> bool:
        case.report.confidence = reply.confidence
        low = reply.confidence is not None and reply.confidence < self.settings.confidence.threshold
        if low:
            case.report.withheld_tokens = reply.n_judged
        return low

    def _failed(self, case: Case, error: EngineFailed, failures: list[EngineFailed]) -> str:
        failures.append(error)
        case.report.failed(error)
        case.source_failed = case.source_failed or error.role == "source"
        self.counting.engine_failed(error)
        return str(error)

    def _stands(self, case: Case, reply: R, chosen: Route) -> R:
        report = case.report
        report.answered_by, report.why, report.because = chosen.by, chosen.why, chosen.because
        if chosen.by == "source":
            report.of_source()
        if chosen.by == "target" and chosen.why in _ESCALATING:
            case.session.escalate()
        reply.note(case)
        return reply

    def conclude(self, case: Case) -> None:
        """All of an answer is there: what it says of hand-offs, times and the session is put down."""
        report, session = case.report, case.session
        case.concluded = True
        self.handing_over.learn(case)
        self._learn_prefill(case)
        report.seconds_saved = self._seconds_saved(case)
        tokens = (report.prompt_tokens or 0) + (report.completion_tokens or 0)
        session.answered(
            by_target=report.answered_by == "target",
            tokens=tokens,
            stay_turns=self.settings.sessions.stay_turns,
        )
        if case.asked.session is not None:
            report.escalated = session.escalated

    def _learn_prefill(self, case: Case) -> None:
        """Only a prompt that the target has read by itself says how long that takes."""
        report = case.report
        if report.answered_by != "target" or report.mode != "reprefill":
            return
        seconds, n_tokens = report.engine_seconds, report.prompt_tokens
        if seconds is None or n_tokens is None:
            return
        if report.cached_tokens is not None:
            self.estimate.add(n_tokens - report.cached_tokens, seconds)
        elif case.turn == 1:  # whether it had any of it in its cache is not known; of a first turn, hardly
            self.estimate.add(n_tokens, seconds)

    def _seconds_saved(self, case: Case) -> float | None:
        """Its own prefill, estimated, less what the hand-off took up to the first token."""
        report, outcome = case.report, case.report.outcome
        seconds = report.engine_seconds
        if outcome is None or outcome.outcome != "applied" or seconds is None:
            return None
        alone = self.estimate.seconds(outcome.n_prompt - outcome.n_own_prefix)
        return None if alone is None else alone - report.seconds_before - seconds


def _nobody(failures: list[EngineFailed]) -> Refusal:
    """What is said where no engine answered: that the request is wrong, where one said so."""
    words = "; ".join(str(failure) for failure in failures)
    for failure in failures:
        if failure.kind == "refused":
            error = failure.body["error"] if failure.body else {}
            param = error.get("param")
            message = str(error.get("message") or failure.reason)
            code = str(error.get("code") or "refused")
            return Refusal(failure.status or 400, message, code, param if isinstance(param, str) else None)
    kinds = {failure.kind for failure in failures}
    if kinds == {"busy"}:
        return Refusal(503, words, "engines_busy", headers={"Retry-After": "1"})
    if kinds == {"timeout"}:
        return Refusal(504, words, "engines_timed_out")
    return Refusal(502, words, "engines_failed")
