"""Server-sent events: taken apart as bytes arrive, and put together again."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

MAX_EVENT_BYTES = 8 << 20
DONE = b"data: [DONE]\n\n"


class EventTooLong(Exception):
    """An event that does not end."""


async def payloads(chunks: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """The data of each event, as soon as its blank line is there.

    Lines end in LF or CRLF and nothing else: a text inside the JSON may hold U+2028, which `str.splitlines`
    and what is built upon it take for an end of line. Comments (keep-alives) and other fields are passed
    over. What comes after the last blank line is no whole event and is dropped, as the standard has it.

    Raises:
        EventTooLong: more than `MAX_EVENT_BYTES` without an end.
    """
    buffer, data = bytearray(), bytearray()
    async for chunk in chunks:
        buffer += chunk
        while (end := buffer.find(b"\n")) >= 0:
            line = bytes(buffer[:end]).removesuffix(b"\r")
            del buffer[: end + 1]
            if not line:
                if data:
                    yield data[:-1].decode("utf-8", errors="replace")
                data = bytearray()
            elif line.startswith(b"data:"):
                data += line[5:].removeprefix(b" ") + b"\n"
            if len(data) > MAX_EVENT_BYTES:
                raise EventTooLong
        if len(buffer) > MAX_EVENT_BYTES:
            raise EventTooLong


def event(content: Any) -> bytes:
    """JSON as an event. It is ASCII on one line, so nothing in it can end the event."""
    return b"data: " + json.dumps(content, separators=(",", ":"), allow_nan=False).encode() + b"\n\n"
