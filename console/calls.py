"""Every call that may be made of an engine from elsewhere: one table, which server and client both go by.

`name` is "<group>.<method>"; the group "engine" is EngineLink itself, the others are its attributes. What a call takes
and gives is read off the protocol, so a new call is one line here.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, get_type_hints

import msgspec

from console.link import EngineLink
from console.links.api import ApiLink, ApiReport
from console.links.benches import BenchesLink, BenchReport, refuse_from_elsewhere
from console.links.conversation import ConversationLink
from console.links.insight import InsightLink
from console.links.models import LoadSettings, ModelsLink
from console.links.requests import RequestsLink
from console.links.settings import SettingsLink
from console.links.tuning import TuningLink, TuningReport, refuse_trace_from_elsewhere
from engine.config import SamplingParams

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
Names = Literal["model", "adapter", "setting"]
"""What an argument names on the engine's machine: what may be a folder there must be one of those that are open to
others, and a setting one that names no folder."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call. scope: watch changes nothing, admin may, or costs the engine's machine something.

    arguments: a struct of what it takes.  result: the type of what it gives.
    changes: whether it changes anything.
    at_once: a screen polls it and cannot wait; blank: what it gives, by its arguments, while nothing is known yet.
    named: those of its arguments that name something on the engine's machine.
    check: raises EngineError for arguments that are taken in the engine's process alone.
    """

    name: str
    scope: Scope
    arguments: type[msgspec.Struct]
    result: Any
    changes: bool
    at_once: bool
    blank: Callable[..., object]
    named: Mapping[str, Names]
    check: Callable[..., None]

    @property
    def group(self) -> str:
        """Whose method it is."""
        return self.name.partition(".")[0]

    @property
    def method(self) -> str:
        """What it is called there."""
        return self.name.partition(".")[2]

    def on(self, link: EngineLink) -> Callable[..., Any]:
        """The method of that link."""
        found: Callable[..., Any] = attrgetter(self.method if self.group == ENGINE else self.name)(link)
        return found

    def bound(self, args: tuple[object, ...], named: Mapping[str, object]) -> dict[str, object]:
        """Arguments as they are given to the method, by their names; raises TypeError where they do not fit."""
        given = inspect.signature(getattr(GROUPS[self.group], self.method)).bind(None, *args, **named).arguments
        return {name: value for name, value in given.items() if name != "self"}


def _call(
    name: str,
    scope: Scope,
    /,
    *,
    looks: bool = False,
    blank: Callable[..., object] = lambda **_: None,
    check: Callable[..., None] = lambda **_: None,
    **named: Names,
) -> Call:
    group, _, method = name.partition(".")
    function = getattr(GROUPS[group], method)
    hints = get_type_hints(function)
    fields: list[Any] = [
        (each.name, hints[each.name]) + (() if each.default is inspect.Parameter.empty else (each.default,))
        for each in inspect.signature(function).parameters.values()
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
        result=hints["return"],
        changes=scope == "admin" and not looks,
        at_once=not inspect.iscoroutinefunction(function),
        blank=blank,
        named=named,
        check=check,
    )


_TABLE = (
    _call("engine.logs", "watch", blank=lambda after=0: (after, ())),
    _call("engine.list_models", "watch"),
    _call("engine.sampling_defaults", "watch", blank=lambda **_: SamplingParams()),
    _call("engine.diagnose", "admin", looks=True),
    _call("engine.load", "admin", model="model"),
    _call("engine.cancel_load", "admin"),
    _call("engine.unload", "admin"),
    _call("engine.reconfigure", "admin"),
    _call("engine.restart_worker", "admin"),
    _call("engine.drain_worker", "admin"),
    _call("engine.estimate", "admin", looks=True, model="model"),
    _call("engine.attach", "admin", path="adapter"),
    _call("engine.detach", "admin"),
    _call("engine.cancel_request", "admin"),
    _call("conversation.count_tokens", "admin", looks=True),
    _call("models.defaults", "watch", blank=lambda **_: LoadSettings()),
    _call("models.fetching", "watch"),
    _call("models.load", "admin", model="model"),
    _call("models.download", "admin", model="model"),
    _call("models.estimate", "admin", looks=True, model="model"),
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

KEPT_AT_HOME = frozenset(
    {
        "engine.snapshot",  # they come as events
        "engine.api_status",
        "conversation.chat",  # goes to /v1/chat/completions
        "engine.start_api",  # carries the calls themselves
        "engine.stop_api",
    }
)
"""Methods of the protocols that are no calls, each for its own reason."""


async def carried_out(call: Call, link: EngineLink, arguments: Mapping[str, object]) -> object:
    """What the link gives for a call. Raises EngineError."""
    found = call.on(link)(**arguments)
    return await found if isinstance(found, Awaitable) else found
