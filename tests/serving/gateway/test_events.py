"""Events come out the same however their bytes were cut."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmap.serving.gateway import events
from kvmap.serving.gateway.events import EventTooLong, event, payloads


def taken_apart(*chunks: bytes) -> list[str]:
    async def source() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    async def collect() -> list[str]:
        return [payload async for payload in payloads(source())]

    with pytest.raises(StopIteration) as stopped:
        collect().send(None)  # nothing in it waits, so no event loop is needed
    return list(stopped.value.value)


@given(st.lists(st.text(max_size=20), min_size=1, max_size=5), st.lists(st.integers(0, 300), max_size=8))
def test_whatever_is_put_together_comes_apart_again(texts: list[str], cuts: list[int]) -> None:
    content = b"".join(event({"text": text}) for text in texts)
    places = [0, *sorted(min(cut, len(content)) for cut in cuts), len(content)]
    chunks = [content[start:end] for start, end in pairwise(places)]
    assert [json.loads(payload)["text"] for payload in taken_apart(*chunks)] == texts


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3)
    )
)
def test_an_event_is_one_line_of_ascii_and_a_blank_one(content: Any) -> None:
    written = event(content)
    assert written.isascii()
    assert written.endswith(b"\n\n")
    assert b"\n" not in written[:-2]
    assert b"\r" not in written


def test_line_ends_inside_a_text_that_only_python_takes_for_such_are_kept() -> None:
    text = "a\u2028b\x85c\x1cd\x0be"
    written = f'data: {{"a": "{text}"}}\n\n'.encode()
    assert taken_apart(written) == [f'{{"a": "{text}"}}']


def test_comments_other_fields_and_carriage_returns_are_passed_over() -> None:
    assert taken_apart(b": ping\r\n\r\nevent: x\r\nid: 7\r\ndata:a\r\ndata:  b\r\n\r\n") == ["a\n b"]


def test_half_an_event_is_none() -> None:
    assert taken_apart(b"data: a\n\ndata: b\n") == ["a"]


@pytest.mark.parametrize("chunk", [b"data: aaaaaaaa", b"data: aaaaaa\n"])
def test_an_event_that_does_not_end_is_an_error(monkeypatch: pytest.MonkeyPatch, chunk: bytes) -> None:
    monkeypatch.setattr(events, "MAX_EVENT_BYTES", 100)
    with pytest.raises(EventTooLong):
        taken_apart(*[chunk] * 40)
