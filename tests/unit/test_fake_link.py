"""The fake of EngineLink: it takes every call of the table, and one that is added to the table as any other."""

from __future__ import annotations

import asyncio
import inspect
from typing import Protocol

import pytest
from msgspec.structs import fields

from console.link import rpc
from console.link.rpc import CALLS, ENGINE, GROUPS, LOCAL_CALLS
from console.link.tuning import TuningLink
from engine.errors import EngineBusy
from tests.fakes.link import FakeLink

ALL = {**CALLS, **LOCAL_CALLS}


class _MoreTuning(TuningLink, Protocol):
    """A protocol with two calls more."""

    def paused_s(self, since: float = 0.0) -> float:
        """Seconds, at once."""

    async def pause(self, minutes: float = 1.0, reason: str = "") -> int:
        """Rest for a while."""


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> FakeLink:
    """A fake link of a table with two calls more."""
    monkeypatch.setitem(GROUPS, "tuning", _MoreTuning)  # type: ignore[arg-type]
    monkeypatch.setitem(CALLS, "tuning.pause", rpc._call("tuning.pause", "admin"))  # type: ignore[arg-type]
    shown = rpc._call("tuning.paused_s", "watch", blank=lambda since=0.0: since)
    monkeypatch.setitem(CALLS, "tuning.paused_s", shown)  # type: ignore[arg-type]
    return FakeLink()


async def test_a_call_that_is_added_is_written_down_and_answered_by_the_script(added: FakeLink) -> None:
    assert (await added.tuning.pause(), added.tuning.paused_s(2.5)) == (None, 2.5)
    added.script |= {"tuning.pause": 3, "tuning.paused_s": 60.0}
    assert (await added.tuning.pause(5, reason=""), added.tuning.paused_s()) == (3, 60.0)
    assert added.commands == [("pause", {}), ("pause", {"minutes": 5})]


async def test_a_call_that_is_added_can_fail_and_be_held(added: FakeLink) -> None:
    added.failures["pause"] = EngineBusy("it rests already")
    with pytest.raises(EngineBusy, match="it rests already"):
        await added.tuning.pause()
    added.hold("pause")
    pausing = asyncio.create_task(added.tuning.pause())
    await asyncio.sleep(0)
    assert (added.names(), pausing.done()) == (["pause", "pause"], False)
    added.release("pause")
    await pausing


@pytest.mark.parametrize(
    "name", [name for name, call in ALL.items() if not any(field.required for field in fields(call.arguments))]
)
async def test_a_call_waits_where_the_protocol_does(name: str) -> None:
    call = ALL[name]
    found = call.on(FakeLink())()
    assert inspect.isawaitable(found) != call.at_once
    if not call.at_once:
        await found


def test_what_the_fake_does_by_itself_are_calls_of_the_table_with_its_arguments() -> None:
    link = FakeLink()
    for group in GROUPS:
        owner = link if group == ENGINE else getattr(link, group)
        for name in (name.removeprefix("on_") for name in dir(type(owner)) if name.startswith("on_")):
            inspect.signature(getattr(owner, f"on_{name}")).bind(
                **dict.fromkeys(ALL[f"{group}.{name}"].arguments.__struct_fields__)
            )
