"""One engine over HTTP: what it serves, how it reads a prompt, and its answers, whole or as a stream."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import anyio
import httpx

from kvmap.serving.gateway.events import EventTooLong, payloads
from kvmap.serving.gateway.fields import Kind
from kvmap.serving.gateway.settings import EngineSettings, TimeoutSettings

Role: TypeAlias = Literal["source", "target"]
PATHS: dict[Kind, str] = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}

#: fields of a chat on which it depends how it is read
_READ_BY = {
    *("messages", "tools", "chat_template_kwargs"),
    *("add_generation_prompt", "continue_final_message", "add_special_tokens"),
}
#: an answer that is not streamed, in bytes
MAX_ANSWER_BYTES = 64 << 20
#: seconds that what an engine says of itself is taken for true
REMEMBERED_SECONDS = 30.0


class EngineFailed(Exception):
    """An engine gave no answer.

    Attributes:
        role: which one.
        kind: `unreachable`, `timeout`, `refused` (it said that the request is wrong), `busy` (429, 503),
            `failed` (any other status, or an error in a stream), `broken` (an answer that is none).
        reason: one line.
        status: of HTTP, where it came to one.
        body: what it said, where that is an error as OpenAI's clients know it.
    """

    def __init__(
        self, role: Role, kind: str, reason: str, status: int | None = None, body: Any = None
    ) -> None:
        """Args: the attributes."""
        super().__init__(f"{role}: {reason}")
        self.role, self.kind, self.reason, self.status, self.body = role, kind, reason, status, body


@dataclass(frozen=True)
class Served:
    """What an engine says that it serves.

    Attributes:
        model: name to ask for.
        max_model_len: tokens of a prompt and its answer; None: it does not say.
    """

    model: str
    max_model_len: int | None


class Engine:
    """A client of one engine. Its addresses are set, never a client's."""

    def __init__(
        self, role: Role, settings: EngineSettings, timeouts: TimeoutSettings, key: str | None = None
    ) -> None:
        """Args: which one, where it is, how long it may take, its API key."""
        self.role: Role = role
        self.settings, self.timeouts = settings, timeouts
        self._served: tuple[float, Served] | None = None
        self._client = httpx.AsyncClient(
            base_url=settings.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(timeouts.total, connect=timeouts.connect, pool=timeouts.connect),
            # engines close idle connections after 5 s: one that they are just closing must not be reused
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=3.0),
            follow_redirects=False,
            trust_env=False,
        )

    async def aclose(self) -> None:
        """Close every connection."""
        await self._client.aclose()

    async def served(self) -> Served:
        """What it serves, asked for again now and then.

        Raises:
            EngineFailed: it does not say, or does not serve the model that is set.
        """
        if self._served and time.monotonic() - self._served[0] < REMEMBERED_SECONDS:
            return self._served[1]
        listed = await self._json("GET", "/v1/models", None, self.timeouts.connect)
        cards = [card for card in listed.get("data") or () if isinstance(card, Mapping)]
        wanted = self.settings.model
        for card in cards:
            name, length = card.get("id"), card.get("max_model_len")
            if isinstance(name, str) and (wanted is None or name == wanted):
                served = Served(name, length if isinstance(length, int) else None)
                self._served = time.monotonic(), served
                return served
        names = ", ".join(str(card.get("id")) for card in cards) or "none"
        raise EngineFailed(self.role, "broken", f"it serves {names}, not {wanted or 'any model'}")

    async def healthy(self) -> bool:
        """Whether it says that it is well."""
        try:
            response = await self._client.get("/health", timeout=self.timeouts.connect)
        except httpx.HTTPError:
            return False
        return response.status_code == 200

    async def token_ids(self, kind: Kind, body: Mapping[str, Any]) -> list[int]:
        """The prompt as it reads it: messages, a text, or ids, which are themselves.

        Raises:
            EngineFailed: it does not say.
        """
        prompt = body.get("prompt")
        if isinstance(prompt, list):
            return prompt
        asked = (
            {name: body[name] for name in _READ_BY if name in body} if kind == "chat" else {"prompt": prompt}
        )
        answer = await self._json(
            "POST", "/tokenize", {"model": (await self.served()).model, **asked}, self.timeouts.connect
        )
        tokens = answer.get("tokens")
        if not isinstance(tokens, list):
            raise EngineFailed(self.role, "broken", "/tokenize gave no tokens")
        return tokens

    async def answer(
        self, kind: Kind, body: Mapping[str, Any], request_id: str, seconds: float | None = None
    ) -> dict[str, Any]:
        """A whole answer.

        Args:
            kind: chat or completion.
            body: the request, without the model's name.
            request_id: a name of the gateway's own.
            seconds: it may take; None: as set.

        Raises:
            EngineFailed: there is none.
        """
        asked = {**body, "model": (await self.served()).model, "stream": False}
        asked.pop("stream_options", None)
        answer = await self._json("POST", PATHS[kind], asked, seconds or self.timeouts.total, request_id)
        if not answer.get("choices") or not are_choices(answer["choices"]):
            raise EngineFailed(self.role, "broken", "its answer has no choices")
        return answer

    async def open(self, kind: Kind, body: Mapping[str, Any], request_id: str) -> EngineStream:
        """An answer event by event. Whoever opens it closes it.

        Raises:
            EngineFailed: there is none.
        """
        deadline = time.monotonic() + self.timeouts.total
        options = body.get("stream_options") or {}
        # usage is asked for in any case; with it come other options, which the client may not have meant
        options = (
            {**options, "include_usage": True} if options.get("include_usage") else {"include_usage": True}
        )
        asked = {**body, "model": (await self.served()).model, "stream": True, "stream_options": options}
        headers = {"X-Request-Id": request_id}
        request = self._client.build_request("POST", PATHS[kind], json=asked, headers=headers)
        try:
            async with asyncio.timeout(self.timeouts.first_token):
                response = await self._client.send(request, stream=True)
        except TimeoutError:
            seconds = self.timeouts.first_token
            raise EngineFailed(self.role, "timeout", f"no answer within {seconds:g} s") from None
        except httpx.HTTPError as error:
            raise self.failed(error) from error
        stream = EngineStream(self, response, deadline)
        if response.status_code != 200:
            try:
                raise self._refused(response.status_code, await stream.error_content())
            finally:
                await stream.aclose()
        return stream

    async def _json(
        self, method: str, path: str, body: Any, seconds: float, request_id: str | None = None
    ) -> dict[str, Any]:
        headers = {"X-Request-Id": request_id} if request_id else {}
        try:
            async with asyncio.timeout(seconds):
                async with self._client.stream(method, path, json=body, headers=headers) as response:
                    content = await _bounded(response, MAX_ANSWER_BYTES)
        except TimeoutError:
            raise EngineFailed(self.role, "timeout", f"{path}: no answer within {seconds:g} s") from None
        except httpx.HTTPError as error:
            raise self.failed(error) from error
        if response.status_code != 200:
            raise self._refused(response.status_code, content)
        answer = parsed(content)
        if not isinstance(answer, dict):
            raise EngineFailed(self.role, "broken", f"{path}: its answer is no JSON object")
        return answer

    def failed(self, error: httpx.HTTPError) -> EngineFailed:
        """What a failure of the connection comes to."""
        if isinstance(error, httpx.TimeoutException):
            return EngineFailed(self.role, "timeout", f"no answer in time ({type(error).__name__})")
        kind = "unreachable" if isinstance(error, httpx.ConnectError) else "broken"
        return EngineFailed(self.role, kind, f"{type(error).__name__}: {error}"[:200])

    def _refused(self, status: int, content: bytes) -> EngineFailed:
        body = parsed(content)
        error = body.get("error") if isinstance(body, dict) else None
        message = error.get("message") if isinstance(error, dict) else None
        kind = "busy" if status in (429, 503) else "refused" if status in (400, 413, 422) else "failed"
        if status == 404:
            self._served = None  # it serves another model now
        reason = f"HTTP {status}: {str(message or 'no message')[:300]}"
        return EngineFailed(self.role, kind, reason, status, body if isinstance(error, dict) else None)


class EngineStream:
    """An answer under way: the data of each event, up to and with `[DONE]`."""

    def __init__(self, engine: Engine, response: httpx.Response, deadline: float) -> None:
        """Args: whose; the open response; when it must be over, in seconds of the monotonic clock."""
        self.role: Role = engine.role
        self._engine, self._response, self._deadline = engine, response, deadline
        self._payloads = payloads(response.aiter_bytes())
        self._begun = False

    async def next(self) -> str:
        """The data of the next event. The first one may take longer than the others.

        Raises:
            EngineFailed: the stream broke off, or was silent for too long.
        """
        role, timeouts = self._engine.role, self._engine.timeouts
        seconds = timeouts.between_tokens if self._begun else timeouts.first_token
        seconds = min(seconds, max(0.0, self._deadline - time.monotonic()))
        try:
            async with asyncio.timeout(seconds):
                payload = await anext(self._payloads, None)
        except TimeoutError:
            raise EngineFailed(role, "timeout", f"no event of its stream for {seconds:g} s") from None
        except EventTooLong:
            raise EngineFailed(role, "broken", "an event of its stream does not end") from None
        except httpx.HTTPError as error:
            raise self._engine.failed(error) from error
        if payload is None:
            raise EngineFailed(role, "broken", "its stream broke off before [DONE]")
        self._begun = True
        return payload

    async def error_content(self) -> bytes:
        """What came in place of a stream, as far as it came."""
        try:
            async with asyncio.timeout(self._engine.timeouts.connect):
                return await _bounded(self._response, 1 << 16)
        except (TimeoutError, httpx.HTTPError):
            return b""

    async def aclose(self) -> None:
        """End it, at the engine too. May be called more than once, and while cancelled."""
        with anyio.CancelScope(shield=True), suppress(httpx.HTTPError):
            await self._response.aclose()


async def _bounded(response: httpx.Response, most: int) -> bytes:
    content = bytearray()
    async for chunk in response.aiter_bytes():
        content += chunk
        if len(content) > most:
            raise httpx.RemoteProtocolError(f"more than {most} bytes")
    return bytes(content)


def are_choices(value: Any) -> bool:
    """Whether something is the choices of an answer, or of a part of one."""
    return isinstance(value, list) and all(isinstance(choice, dict) for choice in value)


def parsed(content: bytes | str) -> Any:
    """JSON, or None where it is none; NaN and infinities, which JSON has not, become null."""
    try:
        return json.loads(content, parse_constant=lambda _: None)
    except ValueError:
        return None
