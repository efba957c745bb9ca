"""RemoteLink: an EngineLink on an engine elsewhere, over HTTP. A loop of its own reads, so no screen ever waits."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass
from threading import Lock
from typing import Any, TypeVar

from console.link.bounded_decode import num_values
from console.link.chat import ChatDelta, ChatMessage, DeltaFeed, stream_deltas
from console.link.frames import MAX_TEXT, from_plain, to_plain
from console.link.protocol import ApiStatus
from console.link.remote.chat import chat_body, deltas
from console.link.remote.frame_reader import Connection
from console.link.remote.http import Address, Instance, OutOfReach
from console.link.rpc import Call, RpcGroup, RpcLink
from console.link.status import CHAT, LinkStatus
from console.runtime.loops import LoopThread
from engine.config import SamplingParams
from engine.errors import EngineBusy, EngineError
from engine.snapshot import LogEntry, Snapshot

# Polled: answers for screens that cannot wait. They get the last one known, and asking has the next one fetched.

log = logging.getLogger(__name__)

FRESH_S = 0.75
KEPT = 4
"""Questions of one call whose answers are kept, those asked last: each may be as long as another instance has it."""


@dataclass(slots=True)
class _Answer:
    value: object
    asked_at: float = float("-inf")
    under_way: bool = False


class Polled:
    """Nothing is fetched unasked. submit: runs a coroutine elsewhere, from any thread."""

    def __init__(
        self, submit: Callable[[Coroutine[Any, Any, None]], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._submit = submit
        self._clock = clock
        self._answers: dict[str, OrderedDict[Hashable, _Answer]] = {}
        self._lock = Lock()

    def get(
        self, call: str, arguments: Hashable, fetch: Callable[[], Coroutine[Any, Any, object]], blank: object
    ) -> object:
        """The last answer to a call with these arguments, `blank` before the first one."""
        now = self._clock()
        with self._lock:
            answers = self._answers.setdefault(call, OrderedDict())
            answer = answers.setdefault(arguments, _Answer(blank))
            answers.move_to_end(arguments)
            if len(answers) > KEPT:
                answers.popitem(last=False)
            due = not answer.under_way and now - answer.asked_at >= FRESH_S
            if due:
                answer.under_way, answer.asked_at = True, now
        if due:
            self._submit(self._fetch(answer, fetch))
        return answer.value

    def latest(self, call: str, arguments: Hashable, blank: object) -> object:
        """The last answer, and nothing is fetched."""
        with self._lock:
            answer = self._answers.get(call, OrderedDict[Hashable, _Answer]()).get(arguments)
        return blank if answer is None else answer.value

    def forget(self) -> None:
        """Have everything fetched again the next time; the last answers are shown until then."""
        with self._lock:
            for answers in self._answers.values():
                for answer in answers.values():
                    answer.asked_at = float("-inf")

    async def _fetch(self, answer: _Answer, fetch: Callable[[], Coroutine[Any, Any, object]]) -> None:
        try:
            answer.value = await fetch()
        except EngineError as error:  # a screen that polls shows the last answer; other calls raise the reason
            log.debug("not fetched: %s", error.message)
        finally:
            answer.under_way = False


T = TypeVar("T")

DEFAULT_HZ = 2.0
_LONG_TEXTS = frozenset({"requests.detail"})
"""Calls whose answer holds more than names and sentences: what was asked and answered."""


class RemoteLink(RpcLink):
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
        self._instance = loop.submit(_open(address, api_key, tls)).result()
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
        """Return received lines of the log, counted over every start of the instance."""
        return self._connection.log.after(after)

    def standing(self) -> LinkStatus:
        """How the connection is."""
        return self._connection.standing()

    async def start_api(self) -> None:
        """It is on, or nothing would come from there."""
        self._connection.check()

    async def stop_api(self, *, finish: bool = False) -> bool:
        """Refused: it could not be switched on again from here."""
        name = self.standing().name
        raise EngineBusy(f"This console uses the API of {name}; it can be switched off only on that machine")

    def at_once(self, call: Call, arguments: Mapping[str, object]) -> object:
        """The last answer that came."""
        blank = call.blank(**arguments)
        given = tuple(sorted(arguments.items()))
        if self.standing().stale:
            return self._polled.latest(call.name, given, blank)
        return self._polled.get(call.name, given, lambda: self._answer(call, arguments), blank)

    async def ask(self, call: Call, arguments: Mapping[str, object]) -> object:
        """The answer of the instance; what it would refuse is not even sent."""
        call.check(**arguments)
        self._connection.check(call.name, changes=call.changes)
        return await self.run(self._answer(call, arguments))

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something on the link's loop."""
        return await asyncio.wrap_future(self._loop.submit(work))

    def converse(self, body: Mapping[str, Any], feed: DeltaFeed) -> Future[None]:
        """Have an answer forwarded; a future of its end."""
        self._connection.check(CHAT, changes=True)
        return self._loop.submit(_forward(self._instance, body, feed))

    async def _answer(self, call: Call, arguments: Mapping[str, object]) -> object:
        path = f"/admin/call/{call.name}"
        if call.scope == "watch":
            query = {name: _as_text(value) for name, value in arguments.items() if value is not None}
            document = await self._instance.get(path, query)
        else:
            body = {name: to_plain(value) for name, value in arguments.items()}
            document = await self._only_event(path, body)
            self._polled.forget()
        try:
            if call.name not in _LONG_TEXTS:
                num_values(document, MAX_TEXT)
            return from_plain(document["result"], call.result)
        except (ValueError, KeyError, TypeError):  # msgspec's errors are ValueErrors
            raise OutOfReach(f"{self.standing().name} has a different version than this console") from None

    async def _only_event(self, path: str, body: Mapping[str, object]) -> Any:
        async with aclosing(self._instance.events(path, body=body)) as events:
            async for event in events:
                return event
        raise OutOfReach(f"{self.standing().name} closed the connection too early")


class RemoteConversation(RpcGroup):
    """Implements ConversationLink; answers come the way that any client gets them."""

    def __init__(self, link: RemoteLink) -> None:
        super().__init__(link, "conversation")
        self._link = link

    def chat(
        self,
        messages: Sequence[ChatMessage],
        params: SamplingParams,
        model: str = "",
        *,
        continue_answer: bool = False,
        enable_thinking: bool | None = None,
    ) -> AsyncIterator[ChatDelta]:
        """Stream an answer; closing the iterator cancels the request."""

        def begin(feed: DeltaFeed) -> Future[None]:
            body = chat_body(messages, params, model, continue_answer=continue_answer, enable_thinking=enable_thinking)
            return self._link.converse(body, feed)

        return stream_deltas(begin)


async def _open(address: Address, api_key: str | None, tls: ssl.SSLContext | None) -> Instance:
    return Instance(address, api_key, tls)


async def _forward(instance: Instance, body: Mapping[str, Any], feed: DeltaFeed) -> None:
    finished = False
    async with aclosing(deltas(instance, body)) as answer:
        async for delta in answer:
            finished = delta.finish is not None
            feed.put(delta)
    if not finished:
        raise OutOfReach(f"{instance.address.name} ended the connection before the answer was complete")


def _as_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
