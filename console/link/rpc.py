"""Every call that may be made of an engine from elsewhere: one table, which server and client both go by.

`name` is "<group>.<method>"; the group "engine" is EngineLink itself, the others are its attributes. What a call takes
and gives is read off the protocol, so a new call is one line here.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, Protocol, cast, get_type_hints

import msgspec

from console.link.api import ApiLink, ApiReport
from console.link.benches import BenchesLink, BenchReport, refuse_from_elsewhere
from console.link.chat import ChatDelta, ChatMessage, ConversationLink
from console.link.protocol import EngineLink, InsightLink, ModelsLink, RequestsLink
from console.link.settings import SettingsLink
from console.link.status import CHAT
from console.link.tuning import TuningLink, TuningReport, refuse_trace_from_elsewhere
from console.settings.load_options import LoadOptions
from engine.config import SamplingParams
from engine.errors import EngineError

ENGINE = "engine"
GROUPS: Mapping[str, type] = {
    ENGINE: EngineLink,
    "api": ApiLink,
    "conversation": ConversationLink,
    "insight": InsightLink,
    "models": ModelsLink,
    "requests": RequestsLink,
    "settings": SettingsLink,
    "tuning": TuningLink,
    "benches": BenchesLink,
}

Scope = Literal["watch", "admin"]
Names = Literal["model", "adapter", "setting", "options"]
"""Kind of what an argument names on the engine's machine: a folder must be one that is open to others, a setting one
that names no folder; options of a load may name folders too."""


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """An endpoint of a call besides /admin/call: its arguments are the path's, else the query's or the body's.

    summary: a sentence for /openapi.json.  about: the fields, likewise.
    renamed: names in the path, and the arguments that they are.  fixed: arguments that a client does not give.
    any_of: arguments of which one must be given.
    """

    method: Literal["GET", "POST", "DELETE"]
    path: str
    summary: str
    about: str = ""
    renamed: dict[str, str] = {}
    fixed: dict[str, Any] = {}
    any_of: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Call:
    """One call. scope: watch changes nothing, admin may, or costs the engine's machine something.

    arguments: a struct of what it takes; signature: of the method.  result: the type of what it gives.
    changes: whether it changes anything.
    at_once: a screen polls it and cannot wait; blank: what it gives, by its arguments, while nothing is known yet.
    named: those of its arguments that name something on the engine's machine.
    check: raises EngineError for arguments that are taken in the engine's process alone.
    route: an endpoint of its own, None for most.
    """

    name: str
    scope: Scope
    arguments: type[msgspec.Struct]
    signature: inspect.Signature
    result: Any
    changes: bool
    at_once: bool
    blank: Callable[..., object]
    named: Mapping[str, Names]
    check: Callable[..., None]
    route: Route | None

    @property
    def group(self) -> str:
        """Whose method it is."""
        return self.name.partition(".")[0]

    @property
    def method(self) -> str:
        """The name of the method."""
        return self.name.partition(".")[2]

    def on(self, link: EngineLink) -> Callable[..., Any]:
        """The method of that link."""
        found: Callable[..., Any] = attrgetter(self.method if self.group == ENGINE else self.name)(link)
        return found

    def bound(self, args: tuple[object, ...], named: Mapping[str, object]) -> dict[str, object]:
        """Arguments as they are given to the method, by their names; raises TypeError where they do not fit."""
        given = self.signature.bind(None, *args, **named).arguments
        return {name: value for name, value in given.items() if name != "self"}


def _call(
    name: str,
    scope: Scope,
    /,
    *,
    looks: bool = False,
    blank: Callable[..., object] = lambda **_: None,
    check: Callable[..., None] = lambda **_: None,
    route: Route | None = None,
    **named: Names,
) -> Call:
    group, _, method = name.partition(".")
    function = getattr(GROUPS[group], method)
    hints, signature = get_type_hints(function, include_extras=True), inspect.signature(function)
    fields: list[Any] = [
        (each.name, hints[each.name]) + (() if each.default is inspect.Parameter.empty else (each.default,))
        for each in signature.parameters.values()
        if each.name != "self"
    ]
    return Call(
        name=name,
        scope=scope,
        arguments=msgspec.defstruct(
            "".join(map(str.title, name.replace(".", "_").split("_"))),
            fields,
            frozen=True,
            kw_only=True,
            forbid_unknown_fields=True,
        ),
        signature=signature,
        result=hints["return"],
        changes=scope == "admin" and not looks,
        at_once=not inspect.iscoroutinefunction(function),
        blank=blank,
        named=named,
        check=check,
        route=route,
    )


_LOAD_FIELDS = """model: a name as for --model. Omitted fields use the settings and current values.

name: name for clients, the model's own if empty.  beside: load in addition to the loaded models."""

_TABLE = (
    _call("engine.logs", "watch", blank=lambda after=0: (after, ())),
    _call("engine.list_models", "watch"),
    _call("engine.sampling_defaults", "watch", blank=lambda **_: SamplingParams()),
    _call("engine.diagnose", "admin", looks=True),
    _call(
        "engine.cancel_load",
        "admin",
        route=Route(method="POST", path="/admin/cancel-load", summary="Cancel the current load"),
    ),
    _call(
        "engine.unload",
        "admin",
        route=Route(
            method="POST",
            path="/admin/unload",
            summary="Unload a model",
            about="model: the first if empty.  drain_seconds: grace period for running requests.",
        ),
    ),
    _call(
        "engine.reconfigure",
        "admin",
        route=Route(
            method="POST",
            path="/admin/reconfigure",
            summary="Change a model's settings while it serves",
            about="model: the first if empty. Omitted fields are not changed.",
            any_of=("num_workers", "max_prompts", "step_tokens", "threads", "idle_unload_s"),
        ),
    ),
    _call(
        "engine.restart_worker",
        "admin",
        route=Route(
            method="POST",
            path="/admin/workers/{id}/restart",
            summary="Restart a worker",
            renamed={"id": "worker_id"},
        ),
    ),
    _call("engine.drain_worker", "admin"),
    _call(
        "engine.drain",
        "admin",
        route=Route(method="POST", path="/admin/drain", summary="Drain: refuse new requests, finish running ones"),
    ),
    _call(
        "engine.resume",
        "admin",
        route=Route(method="POST", path="/admin/resume", summary="Accept new requests again after a drain"),
    ),
    _call(
        "engine.attach",
        "admin",
        path="adapter",
        route=Route(
            method="POST",
            path="/admin/adapters",
            summary="Attach an adapter to a model",
            about="name: name for requests.  path: its folder, or its name in the models folders.",
        ),
    ),
    _call(
        "engine.detach",
        "admin",
        route=Route(
            method="DELETE",
            path="/admin/adapters/{name:.+}",
            summary="Detach an adapter",
            about="its model (default: the first)",
        ),
    ),
    _call("engine.cancel_request", "admin"),
    _call("conversation.count_tokens", "admin", looks=True),
    _call("models.defaults", "watch", blank=lambda **_: LoadOptions()),
    _call("models.fetching", "watch"),
    _call(
        "models.load",
        "admin",
        model="model",
        changes="options",
        route=Route(
            method="POST",
            path="/admin/load",
            summary="Load a model; continues if the client disconnects. With Accept: text/event-stream, its states",
            about=_LOAD_FIELDS,
            fixed={"rename": False},
        ),
    ),
    _call("models.download", "admin", model="model"),
    _call(
        "models.estimate",
        "admin",
        looks=True,
        model="model",
        changes="options",
        route=Route(
            method="POST",
            path="/admin/estimate",
            summary="Estimate the memory of a load on each device",
            about=_LOAD_FIELDS,
        ),
    ),
    _call("models.remembered", "watch"),
    _call("models.forget", "admin"),
    _call("requests.finished", "watch", blank=lambda after=0: (after, ())),
    _call("requests.detail", "admin", looks=True),  # it may hold what was asked and answered
    _call("requests.cancel_queued", "admin"),
    _call("api.report", "watch", blank=lambda **_: ApiReport()),
    _call("api.listen", "admin"),
    _call("api.make_key", "admin"),
    _call("api.revoke_key", "admin"),
    _call("api.switch_dialect", "admin"),
    _call("insight.reset", "admin"),
    _call("insight.measure", "admin"),
    _call("settings.rows", "watch", blank=lambda **_: ()),
    _call("settings.path", "watch", blank=lambda **_: ""),
    _call("settings.save", "admin", name="setting"),
    _call("tuning.report", "watch", blank=lambda **_: TuningReport()),
    _call("tuning.start", "admin", check=refuse_trace_from_elsewhere),
    _call("tuning.start_load", "admin"),
    _call("tuning.stop_load", "admin"),
    _call("tuning.cancel", "admin"),
    _call("tuning.use_best", "admin"),
    _call("benches.report", "watch", blank=lambda **_: BenchReport()),
    _call("benches.forms", "watch"),
    _call("benches.start", "admin", check=refuse_from_elsewhere),
    _call("benches.cancel", "admin"),
    _call("benches.history", "watch"),
    _call("benches.result", "watch"),
    _call("benches.forget", "admin"),
)
CALLS: Mapping[str, Call] = {call.name: call for call in _TABLE}

LOCAL_CALLS: Mapping[str, Call] = {
    call.name: call
    for call in (
        _call(
            "engine.snapshot",  # a console elsewhere gets them as events
            "watch",
            route=Route(method="GET", path="/admin/snapshot", summary="Snapshot of all that the console shows"),
        ),
        _call("engine.api_status", "watch"),
        _call("engine.start_api", "admin"),  # carries the calls themselves
        _call("engine.stop_api", "admin"),
    )
}
"""Calls that only a console in the engine's process makes."""

STREAMS = frozenset({CHAT})
"""Methods that are no calls: chats go to /v1/chat/completions."""

LOOKS = frozenset(name for name, call in CALLS.items() if not call.changes)
"""Calls that change nothing."""


async def invoke(call: Call, link: EngineLink, arguments: Mapping[str, object]) -> object:
    """Return the answer of a link to a call. Raises EngineError."""
    found = call.on(link)(**arguments)
    return await found if isinstance(found, Awaitable) else found


# RpcLink: an EngineLink whose every call goes to one place, by its name. What is elsewhere is reached so.


class Caller(Protocol):
    """Where calls go. Arguments come by their names, those left out not among them."""

    def at_once(self, call: Call, arguments: Mapping[str, object]) -> object:
        """Return the answer to a poll, as far as it is known."""

    async def ask(self, call: Call, arguments: Mapping[str, object]) -> object:
        """The answer; raises EngineError."""


class RpcLink:
    """The methods of EngineLink and of its attributes, as `console.link.rpc` has them; subclasses have what is no
    call."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name != ENGINE and name in GROUPS:
            return RpcGroup(self._caller, name)
        return _method(self._caller, f"{ENGINE}.{name}")


class RpcGroup:
    """One attribute of an EngineLink."""

    def __init__(self, caller: Caller, group: str) -> None:
        self._caller = caller
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return _method(self._caller, f"{self._group}.{name}")


class NullConversation(RpcGroup):
    """A ConversationLink that answers nothing."""

    def __init__(self, caller: Caller, refusal: Callable[[], EngineError]) -> None:
        super().__init__(caller, "conversation")
        self._refusal = refusal

    def chat(
        self,
        messages: Sequence[ChatMessage],
        params: SamplingParams,
        model: str = "",
        *,
        continue_answer: bool = False,
        enable_thinking: bool | None = None,
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


def as_link(link: RpcLink) -> EngineLink:
    """By the type that screens know; a test holds the table of calls to it."""
    return cast(EngineLink, link)


def _method(caller: Caller, name: str) -> Callable[..., Any]:
    call = CALLS.get(name) or LOCAL_CALLS.get(name)
    if call is None:
        raise AttributeError(name)

    def at_once(*args: object, **named: object) -> object:
        return caller.at_once(call, call.bound(args, named))

    def ask(*args: object, **named: object) -> Coroutine[Any, Any, object]:
        return caller.ask(call, call.bound(args, named))

    return at_once if call.at_once else ask
