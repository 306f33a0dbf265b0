"""Who may ask, how much at a time, and how large."""

from __future__ import annotations

import asyncio
import hmac
import json
import math
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from fastapi import Request

from kvmap.serving.gateway.refusals import Refusal

T = TypeVar("T")

#: a client may take to send its request
BODY_SECONDS = 30.0


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


class Admission:
    """The door: a key, a bound on requests at a time, a bound on each one's size."""

    def __init__(self, key: str | None, in_flight: int, body_bytes: int) -> None:
        """Args: what clients must send, None: nothing; the bounds."""
        self._key, self._most, self._body_bytes = key, in_flight, body_bytes
        self.in_flight = 0

    def check_key(self, request: Request) -> None:
        """Refuse who does not know the key.

        Raises:
            Refusal: 401.
        """
        if self._key is None:
            return
        sent = request.headers.get("authorization", "").encode("utf-8", errors="replace")
        if not hmac.compare_digest(sent, f"Bearer {self._key}".encode()):
            raise Refusal(
                401, "a wrong API key, or none", "invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
            )

    @contextmanager
    def place(self) -> Iterator[None]:
        """One of the places for requests under way.

        Raises:
            Refusal: 429, all are taken.
        """
        if self.in_flight >= self._most:
            raise Refusal(
                429,
                f"{self._most} requests are under way, as many as are taken at a time; try again",
                "too_many_requests",
                headers={"Retry-After": "1"},
            )
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    async def body(self, request: Request) -> Any:
        """A request's body, as JSON.

        That it must say so keeps pages of a browser out, which can send other types to any address unasked.

        Raises:
            Refusal: 415, 413, 408 or 400.
            ClientGone: it ended in the middle.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise Refusal(415, "content-type: expected application/json", "unsupported_media_type")
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._body_bytes:
            raise self._too_large()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                content = await self._read(request)
        except TimeoutError:
            raise Refusal(408, f"no whole body within {BODY_SECONDS:g} s", "request_timeout") from None
        return _strict(content)

    async def _read(self, request: Request) -> bytes:
        content = bytearray()
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            content += message.get("body", b"")
            if len(content) > self._body_bytes:
                raise self._too_large()
            if not message.get("more_body", False):
                return bytes(content)

    def _too_large(self) -> Refusal:
        return Refusal(413, f"the body: more than the {self._body_bytes} bytes taken", "request_too_large")


def _strict(content: bytes) -> Any:
    """JSON that can be written down again: finite numbers, and text that is text.

    Raises:
        Refusal: 400.
    """
    try:
        body = json.loads(content, parse_constant=_finite, parse_float=_finite)
        if b"\\u" in content:
            json.dumps(body, ensure_ascii=False).encode()  # half a surrogate pair has no UTF-8
    except (ValueError, RecursionError):
        raise Refusal(400, "the body: expected JSON, with finite numbers", "invalid_json") from None
    return body


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What work gives, cancelled where the client goes away before. Its body must have been read.

    Raises:
        ClientGone: it went.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
