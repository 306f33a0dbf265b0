"""The application: routes, and one request from its arrival to its end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import Receive, Scope, Send

from kvmap.serving.gateway.admission import Admission, ClientGone, unless_gone
from kvmap.serving.gateway.asked import asked
from kvmap.serving.gateway.cascade import Cascade
from kvmap.serving.gateway.case import Case
from kvmap.serving.gateway.counting import MEDIA_TYPE, Counting
from kvmap.serving.gateway.engine import Engine, EngineFailed, Role
from kvmap.serving.gateway.fields import Kind
from kvmap.serving.gateway.refusals import Refusal, error_body
from kvmap.serving.gateway.sessions import Sessions
from kvmap.serving.gateway.settings import LOOPBACK, EngineSettings, Settings, is_loopback
from kvmap.serving.gateway.streaming import StreamReply, ask_stream
from kvmap.serving.gateway.whole import ask_whole

log = logging.getLogger("kvmap.gateway")

#: what nobody reads, for a client that has gone (nginx' word for it)
GONE = 499


class Gateway:
    """Both engines, the sessions, and the door before them."""

    def __init__(self, settings: Settings, environment: Mapping[str, str]) -> None:
        """Args: all settings; where API keys are."""
        self.settings = settings
        self.counting = Counting()
        engines: dict[Role, EngineSettings] = {"source": settings.source, "target": settings.target}
        self.engines: dict[Role, Engine] = {
            role: Engine(role, engine, settings.timeouts, environment.get(engine.api_key_env or ""))
            for role, engine in engines.items()
        }
        key = environment.get(settings.server.api_key_env)
        self.admission = Admission(key or None, settings.limits.in_flight, settings.limits.body_bytes)
        self.sessions = Sessions(
            settings.sessions, forgotten=lambda why: self.counting.sessions_forgotten.labels(why).inc()
        )
        self.counting.watch(lambda: len(self.sessions), lambda: self.admission.in_flight)
        self.cascade = Cascade(settings, self.engines, self.counting)
        self._started = int(time.time())

    async def aclose(self) -> None:
        """End what is still read, and close every connection to an engine."""
        await self.cascade.handing_over.reads.aclose()
        for engine in self.engines.values():
            await engine.aclose()

    async def answer(self, kind: Kind, request: Request) -> Response:
        """One request for a chat or a completion.

        Raises:
            Refusal: it gets none.
            ClientGone: nobody waits for it.
        """
        self.admission.check_key(request)
        async with AsyncExitStack() as closing:
            closing.enter_context(self.admission.place())
            body = await self.admission.body(request)
            wanted = asked(kind, body, request.headers, self.settings.limits)
            session = closing.enter_context(self.sessions.using(wanted.session))
            case = Case(wanted, session, self.cascade.prompts.count, closing)
            if not wanted.stream:
                return await self._whole(case, request)
            reply = await unless_gone(request, self.cascade.reply(case, ask_stream))
            return self._stream(case, reply, closing.pop_all())
        raise AssertionError("an exit stack of ours swallows nothing")

    async def _whole(self, case: Case, request: Request) -> Response:
        reply = await unless_gone(request, self.cascade.reply(case, ask_whole))
        self.cascade.conclude(case)
        self._told(case)
        content = {**reply.content, "kvmap": case.report.record()}
        return JSONResponse(content, headers=self._headers(case))

    def _stream(self, case: Case, reply: StreamReply, closing: AsyncExitStack) -> Response:
        def conclude() -> None:
            self.cascade.conclude(case)
            self._told(case)

        def broken(error: EngineFailed) -> None:
            self.counting.engine_failed(error)
            self.counting.not_answered("broke_off", case.report)

        async def close() -> None:
            await closing.aclose()
            if not reply.over:
                self.counting.not_answered("client_gone", case.report)

        events = reply.sent(conclude, broken)
        return EventStream(events, self._headers(case), close, self.settings.timeouts.total)

    def _told(self, case: Case) -> None:
        self.counting.answered(case.report)
        report = case.report
        log.info(
            "%s answered by %s (%s) mode=%s outcome=%s mapped=%s first_token=%s",
            case.request_id,
            report.answered_by,
            report.why,
            report.mode,
            report.outcome.outcome if report.outcome else None,
            report.outcome.n_mapped if report.outcome else 0,
            report.time_to_first_token,
        )

    @staticmethod
    def _headers(case: Case) -> dict[str, str]:
        return {**case.report.headers(), "x-request-id": case.request_id}

    async def models(self) -> dict[str, Any]:
        """The cascade under its own name, and each engine's model that can be reached."""
        owners = {self.settings.model: "kvmap"}
        for role, engine in self.engines.items():
            try:
                owners.setdefault((await engine.served()).model, f"kvmap-{role}")
            except EngineFailed as error:
                log.warning("%s", error)
        data = [
            {"id": name, "object": "model", "created": self._started, "owned_by": owner}
            for name, owner in owners.items()
        ]
        return {"object": "list", "data": data}

    async def health(self) -> tuple[int, dict[str, Any]]:
        """Status of HTTP, and the state of either engine."""
        source, target = await asyncio.gather(*(engine.healthy() for engine in self.engines.values()))
        agree = await self.cascade.prompts.agree() if source and target else None
        word = "ok" if source and target else "degraded" if source or target else "down"
        return (
            200 if source or target else 503,
            {
                "status": word,
                "source": "ok" if source else "unreachable",
                "target": "ok" if target else "unreachable",
                "templates_agree": agree,
                "in_flight": self.admission.in_flight,
                "sessions": len(self.sessions),
            },
        )


class EventStream(StreamingResponse):
    """A stream that closes what it hangs on however it ends, and does not outlast its time."""

    def __init__(
        self,
        events: AsyncIterator[bytes],
        headers: Mapping[str, str],
        close: Callable[[], Awaitable[None]],
        seconds: float,
    ) -> None:
        """Args: what is sent; headers; called at the end, once; how long it may take to be read."""
        kept = {**headers, "cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events, headers=kept, media_type="text/event-stream")
        self._close, self._seconds = close, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it. A client that reads too slowly, or is gone, ends it."""
        try:
            async with asyncio.timeout(self._seconds):
                await super().__call__(scope, receive, send)
        except TimeoutError:
            log.warning("a client did not read its answer within %g s", self._seconds)
        finally:
            with anyio.CancelScope(shield=True):
                await self._close()


def application(settings: Settings, environment: Mapping[str, str]) -> FastAPI:
    """The gateway as an ASGI application; `app.state.gateway` is the `Gateway` behind it."""
    gateway = Gateway(settings, environment)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await gateway.aclose()

    app = FastAPI(title="kvmap gateway", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.gateway = gateway
    server = settings.server
    hosts = [*LOOPBACK, "[::1]", server.host, *server.allowed_hosts]
    if not is_loopback(server.host) and not server.allowed_hosts:
        hosts = ["*"]  # a key is asked for there, which no page of a browser has
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)
    _routes(app, gateway)
    _errors(app, gateway)
    return app


def _routes(app: FastAPI, gateway: Gateway) -> None:
    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await gateway.answer("chat", request)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await gateway.answer("completion", request)

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        gateway.admission.check_key(request)
        return JSONResponse(await gateway.models())

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        gateway.admission.check_key(request)
        return Response(gateway.counting.text(), media_type=MEDIA_TYPE)

    @app.get("/health")
    async def health() -> Response:
        status, content = await gateway.health()
        return JSONResponse(content, status)


def _errors(app: FastAPI, gateway: Gateway) -> None:
    @app.exception_handler(Refusal)
    async def refused(_: Request, refusal: Refusal) -> Response:
        gateway.counting.not_answered(WHY_REFUSED.get(refusal.status, "refused"))
        return JSONResponse(refusal.body(), refusal.status, headers=refusal.headers)

    @app.exception_handler(ClientGone)
    async def gone(_: Request, error: ClientGone) -> Response:
        gateway.counting.not_answered("client_gone")
        return Response(status_code=GONE)

    @app.exception_handler(HTTPException)
    async def elsewhere(request: Request, error: HTTPException) -> Response:
        body = error_body(
            error.status_code, f"{request.method} {request.url.path}: {error.detail}", "no_route"
        )
        return JSONResponse(body, error.status_code, headers=error.headers)

    @app.exception_handler(Exception)
    async def unforeseen(_: Request, error: Exception) -> Response:
        gateway.counting.not_answered("failure")
        return JSONResponse(error_body(500, "the gateway failed; its log says how", "failure"), 500)


#: status: label of `kvmap_gateway_unanswered_total`
WHY_REFUSED = {
    400: "invalid",
    401: "key",
    404: "model",
    408: "slow_request",
    413: "too_large",
    415: "invalid",
    429: "busy",
    502: "engines",
    503: "engines",
    504: "engines",
}
