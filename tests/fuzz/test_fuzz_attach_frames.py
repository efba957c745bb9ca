"""What an instance sends, changed at random: a console shows it or refuses it in a sentence, and stays."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from console.link.bounded_decode import decode_json
from console.link.frames import Frame, FrameEvent, diff, from_plain, to_plain
from console.link.remote.frame_reader import Connection
from console.link.remote.http import OutOfReach, address_of
from console.link.rpc import CALLS, Call, NullConversation, RpcLink, as_link
from console.tui.app import EricApp
from console.tui.modes import MODES
from engine.snapshot import LogEntry, Snapshot
from tests.fakes import bench_scenes, scenes
from tests.fakes.bounds import outcome, within_bounds
from tests.fakes.link import FakeLink
from tests.fakes.mutations import changed, damaged

pytestmark = pytest.mark.long

INTEGERS = (0, -1, 2**31, 2**53 + 1, 2**63 - 1, -(2**63), 2**64)
FLOATS = (0.0, -1.0, 1e-308, 1e18, -1e19, 1e300)
SCENES = ("busy", "loading", "failed", "empty", "eight_gpus")


def stream() -> list[Any]:
    """The events of an instance that goes from scene to scene."""
    frames = [Frame(snapshot=getattr(scenes, name)()) for name in SCENES]
    changes = [FrameEvent(delta=diff(old, new)) for old, new in itertools.pairwise(frames)]
    return [msgspec.to_builtins(event) for event in (FrameEvent(full=to_plain(frames[0])), *changes)]


class Sending:
    """An instance that sends these events, and then is gone."""

    address = address_of("gpu1")

    def __init__(self, events: list[bytes]) -> None:
        self._events = events

    async def events(self, path: str, **_: Any) -> AsyncIterator[Any]:
        for event in self._events:
            try:
                yield decode_json(event)
            except ValueError:
                raise OutOfReach("Invalid data from gpu1") from None
        raise OutOfReach("gpu1 cannot be reached: connection refused")

    async def get(self, path: str, query: Any = None) -> Any:
        return {"result": [3, []]}


async def shown(events: list[bytes]) -> tuple[Frame, str]:
    """What a connection shows when the events have come, and why it broke off."""

    async def pause(seconds: float) -> None:
        if connection.standing().reach == "lost":
            raise asyncio.CancelledError

    connection = Connection("gpu1:8000", 2.0, lambda: 0.0, pause)
    with suppress(asyncio.CancelledError):
        await connection.follow(Sending(events))  # type: ignore[arg-type]
    return connection.frame, connection.standing().reason


@pytest.mark.parametrize("seed", range(100))
def test_any_events_are_shown_or_end_the_connection_with_one_sentence(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    dice = random.Random(seed)
    events = [json.dumps(changed(event, dice, dice.choice((0, 1, 4)))).encode() for event in stream()]
    if dice.random() < 0.3:
        place = dice.randrange(len(events))
        events[place] = damaged(events[place], dice)
    found = outcome(lambda: asyncio.run(shown(events)), sum(map(len, events)))
    assert isinstance(found, tuple)
    assert isinstance(found[0], Frame)
    assert found[1].startswith(("Invalid data from gpu1", "gpu1"))
    assert all(record.exc_info is None and record.getMessage().isprintable() for record in caplog.records)


@pytest.mark.parametrize("name", sorted(name for name, call in CALLS.items() if call.at_once))
def test_any_answer_to_what_a_screen_polls_is_one_or_of_another_version(name: str) -> None:
    right = to_plain(CALLS[name].on(FakeLink(scenes.busy()))())
    for seed in range(60):
        dice = random.Random(f"{name} {seed}")
        body = json.dumps(changed(json.loads(msgspec.json.encode(right)), dice, 2)).encode()
        with within_bounds(len(body)), suppress(ValueError):
            from_plain(decode_json(body), CALLS[name].result)


def with_numbers(value: Any, dice: random.Random, share: float) -> Any:
    """A plain value with a share of its numbers replaced by others of their types."""
    if isinstance(value, dict):
        return {name: with_numbers(each, dice, share) for name, each in value.items()}
    if isinstance(value, list):
        return [with_numbers(each, dice, share) for each in value]
    others = {int: INTEGERS, float: FLOATS}.get(type(value))
    return dice.choice(others) if others and dice.random() < share else value


KEYS = {**{mode.name: [f"f{mode.digit}"] for mode in MODES}, "workload": ["f5", "v", "v"], "devices": ["f1", "d"]}


@pytest.mark.parametrize("mode", KEYS)
async def test_numbers_of_any_size_end_no_screen(mode: str) -> None:
    whole = [to_plain(getattr(scenes, name)()) for name in SCENES]
    link = FakeLink(scenes.busy())
    app = EricApp(as_link(link))
    async with app.run_test(size=(140, 44)) as pilot:
        await pilot.press(*KEYS[mode])
        await pilot.pause()
        for seed in range(25):
            dice = random.Random(f"{mode} {seed}")
            document = with_numbers(dice.choice(whole), dice, dice.choice([0.02, 0.2, 1.0]))
            try:
                link.show(from_plain(decode_json(msgspec.json.encode(document)), Snapshot))
            except ValueError:  # as a console refuses it
                continue
            app.refresh_screen()
            await pilot.pause()
    assert app.return_code == 0 or app.return_code is None


class Answering(RpcLink):
    """A link whose every answer has other numbers than the fake's behind it."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__(self)
        self.conversation = NullConversation(self, lambda: OutOfReach("it does not chat"))
        self._fake = FakeLink(scenes.busy())
        self._fake.benches.results = bench_scenes.results()
        self._dice = dice
        self.snapshot, self.api_status = self._fake.snapshot, self._fake.api_status

    def logs(self, after: int = 0) -> tuple[int, Sequence[LogEntry]]:
        """The fake's, logged at other times."""
        found: tuple[int, Sequence[LogEntry]] = self._other(CALLS["engine.logs"], self._fake.logs(after))
        return len(self._fake.lines), found[1]

    def at_once(self, call: Call, arguments: Mapping[str, object]) -> object:
        return self._other(call, call.on(self._fake)(**arguments))

    async def ask(self, call: Call, arguments: Mapping[str, object]) -> object:
        return self._other(call, await call.on(self._fake)(**arguments))

    def _other(self, call: Call, answer: object) -> Any:
        document = with_numbers(to_plain(answer), self._dice, self._dice.choice([0.1, 0.5, 1.0]))
        try:
            return from_plain(decode_json(msgspec.json.encode(document)), call.result)
        except ValueError:  # as a console refuses it
            return answer


SCREENS = [mode.name for mode in MODES] + ["benches", "doctor", "autotune"]


@pytest.mark.parametrize("screen", SCREENS)
async def test_numbers_of_any_size_in_answers_end_no_screen(screen: str) -> None:
    for seed in range(2):
        app = EricApp(as_link(Answering(random.Random(f"{screen} {seed}"))))
        async with app.run_test(size=(140, 44)) as pilot:
            if screen in ("benches", "doctor", "autotune"):
                await app.run_action(screen)
            else:
                app.action_open(screen)
            for key in ("down", "enter", "tab", "enter", "escape"):
                await pilot.pause()
                app.refresh_screen()
                await pilot.press(key)
