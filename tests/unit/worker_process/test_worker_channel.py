"""The engine's end of a worker's channel, against a worker that dies badly."""

from __future__ import annotations

import asyncio

from engine.worker_process.channel import EngineChannel, socket_pair
from engine.worker_process.protocol import Codec, Event, RequestStarted, Shutdown


async def test_what_a_worker_said_before_it_died_is_heard_although_it_was_being_written_to() -> None:
    ours, theirs = socket_pair()
    heard: list[Event] = []
    closed = asyncio.Event()
    channel = await EngineChannel.connect(ours, heard.append, closed.set)
    channel.send(Shutdown())
    said = [RequestStarted(request_id=str(number)) for number in range(3)]
    for event in said:
        theirs.sendall(Codec().frame(event))
    theirs.close()
    channel.send(Shutdown())
    await closed.wait()
    assert heard == said


async def test_an_aborted_channel_hears_nothing_more() -> None:
    ours, theirs = socket_pair()
    heard: list[Event] = []
    closed = asyncio.Event()
    channel = await EngineChannel.connect(ours, heard.append, closed.set)
    theirs.sendall(Codec().frame(RequestStarted(request_id="late")))
    channel.abort()
    await closed.wait()
    theirs.close()
    assert heard == []


async def test_commands_of_one_turn_arrive_together() -> None:
    ours, theirs = socket_pair()
    closed = asyncio.Event()
    channel = await EngineChannel.connect(ours, lambda event: None, closed.set)
    for _ in range(3):
        channel.send(Shutdown())
    arrived = await asyncio.to_thread(theirs.recv, 1 << 16)
    assert arrived == 3 * Codec().frame(Shutdown())
    theirs.close()
    await closed.wait()
