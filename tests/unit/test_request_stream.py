"""The reader's end of a request."""

from __future__ import annotations

import asyncio

import pytest

from engine.errors import ErrorInfo
from engine.requests.stream import RequestStream


class Cancelled:
    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> None:
        self.times += 1


def push(stream: RequestStream, text: str, *token_ids: int) -> None:
    stream.push(text, token_ids, (), cached_tokens=1, ttft_s=0.5)


async def test_a_slow_reader_gets_merged_deltas() -> None:
    stream = RequestStream("r", 3, Cancelled())
    push(stream, "He", 1)
    push(stream, "llo", 2, 3)
    delta = await anext(stream)
    assert (delta.text, delta.token_ids, delta.output_tokens, delta.prompt_tokens) == ("Hello", [1, 2, 3], 3, 3)
    push(stream, "!", 4)
    delta = await anext(stream)
    assert (delta.text, delta.token_ids, delta.output_tokens) == ("!", [4], 4)


async def test_what_came_with_the_end_is_in_the_last_delta() -> None:
    stream = RequestStream("r", 3, Cancelled())
    push(stream, "bye", 1)
    stream.end("stop")
    deltas = [delta async for delta in stream]
    assert [(delta.text, delta.finish) for delta in deltas] == [("bye", "stop")]


async def test_a_failure_ends_the_stream_with_its_error() -> None:
    stream = RequestStream("r", 3, Cancelled())
    stream.end("error", ErrorInfo(code="request_timeout", message="too slow"))
    [delta] = [delta async for delta in stream]
    assert delta.finish == "error"
    assert delta.error is not None
    assert delta.error.code == "request_timeout"


async def test_leaving_early_cancels_once() -> None:
    cancelled = Cancelled()
    stream = RequestStream("r", 3, cancelled)
    async with stream:
        push(stream, "x", 1)
        await anext(stream)
    stream.end("cancelled")
    await stream.aclose()
    assert cancelled.times == 1
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_closing_a_finished_stream_cancels_nothing() -> None:
    cancelled = Cancelled()
    stream = RequestStream("r", 3, cancelled)
    stream.end("stop")
    await stream.aclose()
    assert cancelled.times == 0


async def test_a_waiting_reader_is_woken_by_the_end() -> None:
    stream = RequestStream("r", 3, Cancelled())
    reader = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    stream.end("length")
    assert (await reader).finish == "length"


async def test_a_reader_that_gave_up_waiting_takes_nothing_from_the_next() -> None:
    stream = RequestStream("r", 3, Cancelled())
    impatient = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    impatient.cancel()
    patient = asyncio.ensure_future(anext(stream))
    await asyncio.gather(impatient, return_exceptions=True)
    push(stream, "for the patient", 1)
    assert (await asyncio.wait_for(patient, 60)).text == "for the patient"
