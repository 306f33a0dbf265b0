"""An engine without a model: vLLM's routes, kvmap's fields, and every way in which they can go wrong.

A token of a prompt is a character, an answer is what the test says. Caches are prefixes of token ids in a set
that source and target share.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse


@dataclass
class Storage:
    """Prefixes whose caches were published, and those that are being written."""

    prefixes: set[tuple[int, ...]] = field(default_factory=set)
    announced: list[tuple[int, ...]] = field(default_factory=list)

    def longest(self, ids: tuple[int, ...]) -> int:
        """Tokens that ids shares with the best of them."""
        return max((_shared(ids, prefix) for prefix in self.prefixes), default=0)

    def longest_announced(self, ids: tuple[int, ...]) -> int:
        """The same of those that are being written."""
        return max((_shared(ids, prefix) for prefix in self.announced), default=0)


def _shared(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    shared = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        shared += 1
    return shared


class FakeEngine:
    """What it does is set by its attributes, at any time.

    Attributes:
        pieces: texts of the tokens of every answer.
        odds: log p of each of them.
        pause: seconds before each.
        prefill: seconds a token of a prompt that is not mapped.
        deaf: seconds until it looks at a request at all.
        publishes: what it says of a publication, in place of the truth; nothing is published then.
        status: other than 200: what it answers to requests for answers.
        message: of its errors.
        error_after, hang_after, break_after: tokens of a stream after which it sends an error, falls silent,
            or closes the connection.
        outcome: what it says of a hand-off, in place of the truth.
        details: whether usage tells cached tokens, as with --enable-prompt-tokens-details.
        metrics: of a whole answer, as with --enable-per-request-metrics.
        template: what stands around a message's role.
        requests: bodies of all requests for answers; `ids` their names.
        aborted: answers that nobody waited for.
        reads_begun, reads_over: prompts that it has begun to read, and has read.
    """

    url: str

    def __init__(self, name: str) -> None:
        self.name = name
        self.reset(Storage())

    def reset(self, storage: Storage) -> None:
        self.storage = storage
        self.pieces = [f"{self.name} ", "says ", "yes."]
        self.odds = [math.log(0.9)] * 3
        self.pause = self.prefill = self.deaf = 0.0
        self.publishes: dict[str, Any] | None = None
        self.status, self.message = 200, "out of order"
        self.error_after: int | None = None
        self.hang_after: int | None = None
        self.break_after: int | None = None
        self.outcome: dict[str, Any] | None = None
        self.details = self.healthy = True
        self.metrics: dict[str, Any] | None = None
        self.template = "<{role}>"
        self.max_model_len, self.max_logprobs = 100_000, 20
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.tokenized = 0
        self.aborted = self.reads_begun = self.reads_over = 0

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/health")
        async def health() -> Response:
            return Response(status_code=200 if self.healthy else 503)

        @app.get("/v1/models")
        async def models() -> Any:
            card = {"id": self.name, "object": "model", "max_model_len": self.max_model_len}
            return {"object": "list", "data": [card]}

        @app.post("/tokenize")
        async def tokenize(request: Request) -> Any:
            ids = self.read(await request.json())
            self.tokenized += 1
            return {"tokens": list(ids), "count": len(ids), "max_model_len": self.max_model_len}

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> Response:
            return await self.answer("chat", request)

        @app.post("/v1/completions")
        async def completions(request: Request) -> Response:
            return await self.answer("completion", request)

        return app

    def read(self, body: dict[str, Any]) -> tuple[int, ...]:
        """Token ids of a prompt."""
        if "messages" in body:
            turns = [self.template.format(role=m["role"]) + (m["content"] or "") for m in body["messages"]]
            return tuple(map(ord, "".join(turns) + self.template.format(role="assistant")))
        prompt = body["prompt"]
        return tuple(prompt) if isinstance(prompt, list) else tuple(map(ord, prompt))

    async def answer(self, kind: str, request: Request) -> Response:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        if self.status != 200:
            await asyncio.sleep(self.deaf)
            error = {"message": self.message, "type": "Error", "param": None, "code": self.status}
            return JSONResponse({"error": error}, self.status)
        making = _Answer(self, kind, body, request)
        if body.get("stream"):
            return StreamingResponse(making.events(), media_type="text/event-stream")
        return await making.whole()


def _others(odds: float) -> list[tuple[str, float]]:
    """Less likely tokens."""
    return [(f"~{number}", odds - 3 - number) for number in range(20)]


class _Answer:
    """One answer of an engine as it is when the request comes."""

    def __init__(self, engine: FakeEngine, kind: str, body: dict[str, Any], request: Request) -> None:
        self.engine, self.kind, self.body, self.request = engine, kind, body, request
        self.ids = engine.read(body)
        most = body.get("max_completion_tokens") or body.get("max_tokens") or 10**6
        self.tokens = list(zip(engine.pieces, engine.odds, strict=True))[:most]
        self.asked = (body.get("kv_transfer_params") or {}).get("kvmap") or {}
        self.n_mapped = 0
        self.told: dict[str, Any] | None = None

    def _told(self) -> dict[str, Any] | None:
        """What it says of hand-offs."""
        told: dict[str, Any] = {}
        if self.asked.get("publish") and self.engine.publishes is not None:
            told |= self.engine.publishes
        elif self.asked.get("publish"):
            self.engine.storage.prefixes.add(self.ids)
            told |= {"published": len(self.ids), "bytes": 100 * len(self.ids), "seconds": 0.001}
            if self.asked.get("publish_output"):
                output = tuple(map(ord, "".join(piece for piece, _ in self.tokens)))
                self.engine.storage.prefixes.add(self.ids + output)
                told["output_pending"] = len(self.ids) + len(output)
        if self.asked.get("take"):
            told |= self.engine.outcome or self._taken()
        return told or None

    def _taken(self) -> dict[str, Any]:
        found, n_prompt = self.engine.storage.longest(self.ids), len(self.ids)
        n_mapped = min(found, n_prompt - 1) - 1
        common = {"n_prompt": n_prompt, "n_mapped": 0}
        if found == 0:
            return {"outcome": "fell_back", "cause": "not_found", "reason": "no cache of it", **common}
        if n_mapped < self.asked.get("min_tokens", 1):
            return {"outcome": "fell_back", "cause": "too_short", "reason": f"{n_mapped}", **common}
        self.n_mapped, held_back = n_mapped, n_prompt - n_mapped - 1
        counts = {"n_mapped": n_mapped, "n_native_head": 1, "n_own_prefix": 0, "n_held_back": held_back}
        costs = {"bytes": 100 * n_mapped, "load_seconds": 0.001, "map_seconds": 0.002}
        return {"outcome": "applied", "cause": None, "reason": "mapped", **common, **counts, **costs}

    async def _prefill(self) -> None:
        """Read the prompt, what can be taken of it from the storage left out."""
        engine = self.engine
        await asyncio.sleep(engine.deaf)
        if self.asked.get("take"):
            if engine.outcome is None:
                await self._wait_for_a_cache()
            self.told = self._told()
        engine.reads_begun += 1
        announces = self.asked.get("publish") and engine.publishes is None
        if announces:
            engine.storage.announced.append(self.ids)
        try:
            await self._slept(engine.prefill * (len(self.ids) - self.n_mapped))
            self.told = self.told or self._told()
        finally:
            if announces:
                engine.storage.announced.remove(self.ids)
        engine.reads_over += 1

    async def _wait_for_a_cache(self) -> None:
        """A grace until one is announced that is longer than what is there, and then until it is written."""
        storage, since = self.engine.storage, time.monotonic()
        while True:
            waited, found = time.monotonic() - since, storage.longest(self.ids)
            written = storage.longest_announced(self.ids) <= found
            if found >= len(self.ids) or waited >= self.asked["wait_seconds"]:
                return
            if written and waited >= self.asked.get("grace_seconds", 0):
                return
            await self._slept(0.005)

    async def _slept(self, seconds: float) -> None:
        """Sleep, unless nobody waits any more; streams are told so by themselves."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            await asyncio.sleep(min(left, 0.01))
            if not self.body.get("stream") and await self.request.is_disconnected():
                raise asyncio.CancelledError

    @property
    def _usage(self) -> dict[str, Any]:
        n, m = len(self.ids), len(self.tokens)
        usage: dict[str, Any] = {"prompt_tokens": n, "completion_tokens": m, "total_tokens": n + m}
        if self.engine.details:
            usage["prompt_tokens_details"] = {"cached_tokens": self.n_mapped}
        return usage

    @property
    def _head(self) -> dict[str, Any]:
        kind = "chat.completion" if self.kind == "chat" else "text_completion"
        return {"id": "cmpl-1", "object": kind, "created": 1790000000, "model": self.engine.name}

    def _logprobs(self, tokens: list[tuple[str, float]]) -> Any:
        top = self.body.get("top_logprobs") or 0 if self.kind == "chat" else self.body.get("logprobs")
        if self.engine.max_logprobs == 0:
            return None
        if not self.body.get("logprobs") and not (self.kind == "completion" and top == 0):
            return None
        if self.kind == "chat":
            tops = [[(token, odds), *_others(odds)][: top or 0] for token, odds in tokens]
            named = [[{"token": token, "logprob": odds} for token, odds in each] for each in tops]
            pairs = zip(tokens, named, strict=True)
            return {"content": [{"token": t, "logprob": p, "top_logprobs": each} for (t, p), each in pairs]}
        dicts = [{token: odds, **dict(_others(odds)[: top or 0])} for token, odds in tokens]
        return {
            "tokens": [token for token, _ in tokens],
            "token_logprobs": [odds for _, odds in tokens],
            "top_logprobs": dicts,
            "text_offset": [0] * len(tokens),
        }

    async def whole(self) -> Response:
        try:
            await self._prefill()
            for _ in self.tokens:
                await self._slept(self.engine.pause)
        except asyncio.CancelledError:
            self.engine.aborted += 1
            return Response(status_code=499)
        text = "".join(piece for piece, _ in self.tokens)
        said: dict[str, Any] = {"message": {"role": "assistant", "content": text}}
        choice = {"index": 0, "finish_reason": "stop", "logprobs": self._logprobs(self.tokens)}
        choice |= said if self.kind == "chat" else {"text": text}
        content = {**self._head, "choices": [choice] * int(self.body.get("n") or 1), "usage": self._usage}
        if self.told is not None:
            content["kv_transfer_params"] = {"kvmap": self.told}
        if self.engine.metrics is not None:
            content["metrics"] = self.engine.metrics
        return JSONResponse(content)

    def _chunk(self, choices: list[Any], **more: Any) -> str:
        kind = "chat.completion.chunk" if self.kind == "chat" else "text_completion"
        chunk = {**self._head, "object": kind, "choices": choices, **more}
        return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"

    async def events(self) -> AsyncIterator[str]:
        over = False
        try:
            async for sent in self._events():
                yield sent
            over = True
        finally:
            self.engine.aborted += not over

    async def _events(self) -> AsyncIterator[str]:
        engine = self.engine
        yield ": a comment, to keep the connection\n\n"
        await self._prefill()
        if self.kind == "chat":
            yield self._chunk([{"index": 0, "delta": {"role": "assistant", "content": ""}}])
        for number, (piece, odds) in enumerate(self.tokens):
            await asyncio.sleep(engine.pause)
            if number == engine.break_after:
                raise ConnectionResetError("a test wants it so")
            if number == engine.hang_after:
                await asyncio.sleep(30)
            if number == engine.error_after:
                yield f"data: {json.dumps({'error': {'message': engine.message, 'code': 500}})}\n\n"
                yield "data: [DONE]\n\n"
                return
            last = number == len(self.tokens) - 1
            choice = {"index": 0, "finish_reason": "stop" if last else None}
            choice |= {"delta": {"content": piece}} if self.kind == "chat" else {"text": piece}
            yield self._chunk([{**choice, "logprobs": self._logprobs([(piece, odds)])}])
        if (self.body.get("stream_options") or {}).get("include_usage"):
            yield self._chunk([], usage=self._usage)
        if self.told is not None:
            yield self._chunk([], object="kvmap.outcome", kv_transfer_params={"kvmap": self.told})
        yield "data: [DONE]\n\n"
