"""RemoteLink: an EngineLink on an engine elsewhere, over HTTP. A loop of its own reads, so no screen ever waits."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from typing import Any, TypeVar

from console.called import CalledGroup, CalledLink
from console.calls import Call
from console.deltas import MAX_TEXT, plain, shaped
from console.feed import Feed, told
from console.foreign_values import num_values
from console.link import ApiStatus
from console.links.conversation import ChatDelta, ChatMessage
from console.loops import LoopThread
from console.remote.address import Address
from console.remote.chat import chat_body, deltas
from console.remote.connection import Connection
from console.remote.errors import OutOfReach
from console.remote.http import Instance
from console.remote.polled import Polled
from console.standing import Standing
from engine.config import SamplingParams
from engine.errors import EngineBusy
from engine.snapshot import LogEntry, Snapshot

T = TypeVar("T")

DEFAULT_HZ = 2.0
_LONG_TEXTS = frozenset({"requests.detail"})
"""Calls whose answer holds more than names and sentences: what was asked and answered."""


class RemoteLink(CalledLink):
    """Connects at once and for as long as it is open. loop: where it lives; several links may share one.

    tls: as Instance has it.
    """

    def __init__(
        self,
        address: Address,
        *,
        loop: LoopThread,
        api_key: str | None = None,
        hz: float = DEFAULT_HZ,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(self)
        self._loop = loop
        self._connection = Connection(address.name, hz)
        self._polled = Polled(loop.submit)
        self._instance = loop.submit(_opened(address, api_key, tls)).result()
        self._following = loop.submit(self._connection.follow(self._instance))
        self.conversation = RemoteConversation(self)

    def close(self) -> None:
        """Disconnect."""
        self._following.cancel()
        self._loop.submit(self._instance.__aexit__()).result()

    def snapshot(self) -> Snapshot:
        """The last one that came."""
        return self._connection.frame.snapshot

    def api_status(self) -> ApiStatus:
        """As it was with the last snapshot."""
        return self._connection.frame.api

    def logs(self, after: int = 0) -> tuple[int, Sequence[LogEntry]]:
        """What came of the log, counted on over every start of the instance."""
        return self._connection.log.after(after)

    def standing(self) -> Standing:
        """How the connection is."""
        return self._connection.standing()

    async def start_api(self) -> None:
        """It is on, or nothing would come from there."""
        self._connection.check()

    async def stop_api(self, *, finish: bool = False) -> None:
        """Refused: nobody could switch it on again from here."""
        name = self.standing().name
        raise EngineBusy(f"The API of {name} carries this console; it can be switched off on that machine alone")

    def at_once(self, call: Call, arguments: Mapping[str, object]) -> object:
        """The last answer that came."""
        blank = call.blank(**arguments)
        given = tuple(sorted(arguments.items()))
        if self.standing().stale:
            return self._polled.known(call.name, given, blank)
        return self._polled.get(call.name, given, lambda: self._answer(call, arguments), blank)

    async def ask(self, call: Call, arguments: Mapping[str, object]) -> object:
        """The answer of the instance; what it would refuse is not even sent."""
        call.check(**arguments)
        self._connection.check()
        return await self.run(self._answer(call, arguments))

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something on the link's loop."""
        return await asyncio.wrap_future(self._loop.submit(work))

    def converse(self, body: Mapping[str, Any], feed: Feed) -> Future[None]:
        """Have an answer forwarded; a future of its end."""
        self._connection.check()
        return self._loop.submit(_forward(self._instance, body, feed))

    async def _answer(self, call: Call, arguments: Mapping[str, object]) -> object:
        path = f"/admin/call/{call.name}"
        if call.scope == "watch":
            query = {name: _as_text(value) for name, value in arguments.items() if value is not None}
            document = await self._instance.get(path, query)
        else:
            body = {name: plain(value) for name, value in arguments.items()}
            document = await self._only_event(path, body)
            self._polled.forget()
        try:
            if call.name not in _LONG_TEXTS:
                num_values(document, MAX_TEXT)
            return shaped(document["result"], call.result)
        except (ValueError, KeyError, TypeError):  # msgspec's errors are ValueErrors
            raise OutOfReach(f"{self.standing().name} is of another version than this console") from None

    async def _only_event(self, path: str, body: Mapping[str, object]) -> Any:
        async with aclosing(self._instance.events(path, body=body)) as events:
            async for event in events:
                return event
        raise OutOfReach(f"{self.standing().name} ended the connection before it was done")


class RemoteConversation(CalledGroup):
    """Implements ConversationLink; answers come the way that any client gets them."""

    def __init__(self, link: RemoteLink) -> None:
        super().__init__(link, "conversation")
        self._link = link

    def chat(
        self, messages: Sequence[ChatMessage], params: SamplingParams, model: str = "", *, continue_answer: bool = False
    ) -> AsyncIterator[ChatDelta]:
        """Stream an answer; closing the iterator cancels the request."""

        def begin(feed: Feed) -> Future[None]:
            return self._link.converse(chat_body(messages, params, model, continue_answer=continue_answer), feed)

        return told(begin)


async def _opened(address: Address, api_key: str | None, tls: ssl.SSLContext | None) -> Instance:
    return Instance(address, api_key, tls)


async def _forward(instance: Instance, body: Mapping[str, Any], feed: Feed) -> None:
    finished = False
    async with aclosing(deltas(instance, body)) as answer:
        async for delta in answer:
            finished = delta.finish is not None
            feed.put(delta)
    if not finished:
        raise OutOfReach(f"{instance.address.name} ended the connection before the answer was complete")


def _as_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
