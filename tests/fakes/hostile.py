"""A link to an engine whose every text is hostile: all that a client, a model folder or a remote instance can write."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import cache
from pathlib import Path, PurePath
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from console.link.chat import ChatDelta, ChatMessage
from console.link.protocol import ApiStatus
from console.link.rpc import Call, RpcGroup, RpcLink, invoke
from console.link.status import LinkStatus, link_status
from engine.config import SamplingParams
from engine.errors import EngineError
from engine.snapshot import LogEntry, Snapshot
from tests.fakes.link import FakeLink

STEERS = "\x1b]52;c;QQ==\x1b\\\x9d0;t\x9c\x1b[6n\x9b6n\x07\r\u202e\u2066\u200f\u061c\u2028\u2029\x85\x00\x7f"
MARKUP = "[/x][bold][@click=app.quit]Q[link=http:e]["
HOSTILE = f"{STEERS}{MARKUP}"
"""Copies to the clipboard, sets the title, asks the terminal for an answer, turns the text around; and markup that
cannot be parsed, that is a link to the address of somebody, and one that ends the console."""

_TIMES = frozenset({"started"})
"""Fields that hold a time as text, which screens read as one."""


def hostile(value: Any, as_type: Any = Any) -> Any:
    """`value` with HOSTILE before every string in it whose type is no Literal. as_type: as it is declared."""
    if isinstance(value, str):
        return HOSTILE + value if _is_free(as_type) else value
    if isinstance(value, PurePath):
        return Path(f"{HOSTILE}{value}")
    if isinstance(value, msgspec.Struct):
        declared = _types(type(value))
        texts = [name for name in value.__struct_fields__ if name not in _TIMES]
        return msgspec.structs.replace(value, **{name: hostile(getattr(value, name), declared[name]) for name in texts})
    if isinstance(value, dict):
        keys, of = _inner(as_type, (Any, Any))
        return {hostile(key, keys): hostile(each, of) for key, each in value.items()}
    if isinstance(value, list | tuple):
        inner = _inner(as_type, (Any,))
        types = inner if len(inner) == len(value) and Ellipsis not in inner else (inner[0],) * len(value)
        return type(value)(hostile(each, of) for each, of in zip(value, types, strict=True))
    return value


def innocent(value: Any) -> Any:
    """Without what `hostile` added."""
    if isinstance(value, str):
        return value.replace(HOSTILE, "")
    if isinstance(value, PurePath):
        return Path(str(value).replace(HOSTILE, ""))
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.replace(
            value, **{name: innocent(getattr(value, name)) for name in value.__struct_fields__}
        )
    return type(value)(map(innocent, value)) if isinstance(value, list | tuple) else value


class HostileLink(RpcLink):
    """`link` as somebody hostile would have it; commands go to it as they were meant."""

    def __init__(self, link: FakeLink) -> None:
        super().__init__(self)
        self.conversation = _Conversation(self, link)
        self._link = link
        self._snapshots: tuple[Snapshot, Snapshot] | None = None

    def snapshot(self) -> Snapshot:
        """The same one as long as the other's is."""
        now = self._link.snapshot()
        if self._snapshots is None or self._snapshots[0] is not now:
            self._snapshots = now, hostile(now)
        return self._snapshots[1]

    def api_status(self) -> ApiStatus:
        """Of the HTTP server."""
        return hostile(self._link.api_status())  # type: ignore[no-any-return]

    def logs(self, after: int = 0) -> tuple[int, Sequence[LogEntry]]:
        """Lines of anybody."""
        total, lines = self._link.logs(after)
        return total, [hostile(line) for line in lines]

    def standing(self) -> LinkStatus:
        """Of a name that somebody gave."""
        return hostile(link_status(self._link))  # type: ignore[no-any-return]

    def at_once(self, call: Call, arguments: Mapping[str, object]) -> object:
        """What a screen polls."""
        return hostile(call.on(self._link)(**{name: innocent(each) for name, each in arguments.items()}), call.result)

    async def ask(self, call: Call, arguments: Mapping[str, object]) -> object:
        """The answer, or a hostile refusal."""
        given = {name: innocent(each) for name, each in arguments.items()}
        try:
            return hostile(await invoke(call, self._link, given), call.result)
        except EngineError as error:
            raise _hostile_error(error) from None

    async def start_api(self) -> None:
        """It refuses."""
        raise EngineError(f"{HOSTILE} is taken")

    async def stop_api(self, *, finish: bool = False) -> bool:
        """It does."""
        return await self._link.stop_api(finish=finish)


class _Conversation(RpcGroup):
    """A model that says hostile things."""

    def __init__(self, caller: HostileLink, link: FakeLink) -> None:
        super().__init__(caller, "conversation")
        self._link = link

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        params: SamplingParams,
        model: str = "",
        *,
        continue_answer: bool = False,
        enable_thinking: bool | None = None,
    ) -> AsyncIterator[ChatDelta]:
        """Its words, each with a hostile one; a link and a block of code, too."""
        yield ChatDelta(text=f"[a](http:e{HOSTILE}) `{HOSTILE}`\n```python\n{HOSTILE}\n```\n", output_tokens=1)
        async for delta in self._link.conversation.chat(messages, params, innocent(model)):
            yield hostile(delta)


def _hostile_error(error: EngineError) -> EngineError:
    found = copy.copy(error)
    found.message = HOSTILE + error.message
    return found


@cache
def _types(struct: type) -> dict[str, Any]:
    return get_type_hints(struct)


def _is_free(declared: Any) -> bool:
    """Whether a string of any contents is of that type."""
    if get_origin(declared) is Literal:
        return False
    if get_origin(declared) in (Union, UnionType):
        return any(_is_free(each) for each in get_args(declared))
    return declared in (str, object, Any)


def _inner(declared: Any, default: tuple[Any, ...]) -> tuple[Any, ...]:
    """The types of what is in a collection of that type."""
    if get_origin(declared) in (Union, UnionType):
        return next((_inner(each, default) for each in get_args(declared) if get_args(each)), default)
    return get_args(declared) or default
