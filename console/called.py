"""CalledLink: an EngineLink whose every call goes to one place, by its name. What is elsewhere is reached so."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, cast

from console.calls import CALLS, ENGINE, GROUPS, Call
from console.link import EngineLink
from console.links.conversation import ChatDelta, ChatMessage
from engine.config import SamplingParams
from engine.errors import EngineError


class Caller(Protocol):
    """Where calls go. Arguments come by their names, those left out not among them."""

    def at_once(self, call: Call, arguments: Mapping[str, object]) -> object:
        """What a screen polls: the answer as far as it is known."""

    async def ask(self, call: Call, arguments: Mapping[str, object]) -> object:
        """The answer; raises EngineError."""


class CalledLink:
    """The methods of EngineLink and of its attributes, as `console.calls` has them; subclasses have what is no call."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name != ENGINE and name in GROUPS:
            return CalledGroup(self._caller, name)
        return _method(self._caller, f"{ENGINE}.{name}")


class CalledGroup:
    """One attribute of an EngineLink."""

    def __init__(self, caller: Caller, group: str) -> None:
        self._caller = caller
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return _method(self._caller, f"{self._group}.{name}")


class MuteConversation(CalledGroup):
    """A ConversationLink that answers nothing."""

    def __init__(self, caller: Caller, refusal: Callable[[], EngineError]) -> None:
        super().__init__(caller, "conversation")
        self._refusal = refusal

    def chat(
        self, messages: Sequence[ChatMessage], params: SamplingParams, model: str = "", *, continue_answer: bool = False
    ) -> AsyncIterator[ChatDelta]:
        """Refused once it is listened to."""
        return _Refused(self._refusal())


class _Refused(AsyncIterator[ChatDelta]):
    """An answer that never begins."""

    def __init__(self, error: EngineError) -> None:
        self._error = error

    async def __anext__(self) -> ChatDelta:
        raise self._error

    async def aclose(self) -> None:
        """Nothing to close."""


def as_link(link: CalledLink) -> EngineLink:
    """By the type that screens know; a test holds the table of calls to it."""
    return cast(EngineLink, link)


def _method(caller: Caller, name: str) -> Callable[..., Any]:
    call = CALLS.get(name)
    if call is None:
        raise AttributeError(name)

    def at_once(*args: object, **named: object) -> object:
        return caller.at_once(call, call.bound(args, named))

    def ask(*args: object, **named: object) -> Coroutine[Any, Any, object]:
        return caller.ask(call, call.bound(args, named))

    return at_once if call.at_once else ask
