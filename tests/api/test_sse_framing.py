"""Streams as bytes: however they are cut on their way, and wherever a token ends within a character."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from console.api.dialects.anthropic.messages import EVENTS
from console.api.requests.stream import DONE, JSON_LINES, SSE, Framing
from tests.api.harness import Served, serving
from tests.fakes.backend import FakeBackend, saying

ANY_TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=60)
"""All of Unicode that UTF-8 has: line ends of every kind, controls, and characters of one to four bytes."""

DOCUMENTS = st.lists(st.dictionaries(ANY_TEXT, ANY_TEXT, max_size=3), min_size=1, max_size=6)


def cut(raw: bytes, places: Sequence[int]) -> Iterator[bytes]:
    """The same bytes in pieces, as a network hands them on."""
    begin = 0
    for end in sorted(place % (len(raw) + 1) for place in places):
        yield raw[begin:end]
        begin = end
    yield raw[begin:]


def read_events(pieces: Iterator[bytes]) -> list[str]:
    """The data of each event, read as the standard has it (WHATWG HTML, 9.2.6), a piece at a time."""
    found: list[str] = []
    data: list[str] = []
    rest = b""
    for piece in pieces:
        rest += piece
        *lines, rest = re.split(rb"\r\n|\r(?!$)|\n", rest)
        for line in lines:
            name, _, value = line.decode().partition(":")
            if not line and data:
                found.append("\n".join(data))
                data = []
            elif name == "data":
                data.append(value.removeprefix(" "))
    assert rest == b"", "the stream ends within an event"
    return found


@pytest.mark.parametrize("framing", [SSE, EVENTS], ids=["plain", "named"])
@given(DOCUMENTS, st.lists(st.integers(0, 10_000), max_size=12), st.booleans())
def test_events_are_the_same_however_they_are_cut(
    framing: Framing, documents: list[Any], places: list[int], pinged: bool
) -> None:
    documents = [{**document, "type": "said"} for document in documents]
    between = SSE.ping if pinged and SSE.ping is not None else b""
    raw = between.join(framing.frame(msgspec.json.encode(document)) for document in documents)
    assert [json.loads(event) for event in read_events(cut(raw, places))] == documents


@given(DOCUMENTS, st.lists(st.integers(0, 10_000), max_size=12))
def test_json_lines_are_one_a_line_whatever_they_hold(documents: list[Any], places: list[int]) -> None:
    raw = b"".join(JSON_LINES.frame(msgspec.json.encode(document)) for document in documents)
    *lines, rest = b"".join(cut(raw, places)).split(b"\n")
    assert rest == b""
    assert [json.loads(line) for line in lines] == documents


@settings(max_examples=12)
@given(st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=24), st.integers(1, 3))
async def test_characters_whose_bytes_are_tokens_of_their_own_come_whole(text: str, n: int) -> None:
    """In every dialect that streams, each piece is whole characters and the pieces are the text."""
    talk = {"messages": [{"role": "user", "content": "say it"}]}
    with tempfile.TemporaryDirectory() as folder:
        async with serving(Path(folder), FakeBackend(reply=saying(text, then=256))) as api:
            chat = await _streamed(api, "/v1/chat/completions", **talk, n=n)
            plain = await _streamed(api, "/v1/completions", prompt="say it", n=n, max_tokens=200)
            said = await _streamed(api, "/v1/messages", **talk, max_tokens=200)
            told = await _streamed(api, "/api/chat", **talk)
            typed = await _streamed(api, "/api/extra/generate/stream", prompt="say it")
    for choice in range(n):
        mine = [each for event in chat for each in event["choices"] if each["index"] == choice]
        _check([each["delta"].get("content") or "" for each in mine], text)
        _check([each["text"] for event in plain for each in event["choices"] if each["index"] == choice], text)
    _check([event["delta"]["text"] for event in said if event["type"] == "content_block_delta"], text)
    _check([event["message"]["content"] for event in told], text)
    _check([event["token"] for event in typed], text)


async def _streamed(api: Served, path: str, **body: Any) -> list[Any]:
    """The documents of a stream."""
    stream = {} if path.startswith("/api/extra") else {"stream": True}
    async with api.http.post(path, json={**body, **stream}) as response:
        raw = await response.read()
        assert response.status == 200, raw
    lines = raw.decode().split("\n") if response.content_type == JSON_LINES.content_type else read_events(iter([raw]))
    return [json.loads(line) for line in lines if line and line.encode() != DONE]


def _check(pieces: list[str], text: str) -> None:
    assert "".join(pieces) == text
    assert "\N{REPLACEMENT CHARACTER}" in text or not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
