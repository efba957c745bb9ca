"""The nodes as the driver of a cluster sees them, with a Ray of a few lists and a clock that is set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from engine.cluster import driver
from engine.cluster.driver import Agents
from engine.cluster.messages import NodeView
from engine.cluster.node import own_version

ABOUT = (own_version(), 4)


class Call:
    """One call of an actor: what it gave, once it has given anything."""

    def __init__(self) -> None:
        self.outcome: Any = None


class Method:
    """A method of an actor, which keeps every call of it."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def remote(self, *_: object) -> Call:
        """The call, which is not answered yet."""
        self.calls.append(Call())
        return self.calls[-1]


class Actor:
    """An agent that answers when a test says so."""

    def __init__(self) -> None:
        self.about = Method()
        self.read = Method()

    def answer(self, about: object = None, read: object = None) -> None:
        """Answer the calls that wait."""
        for method, outcome in ((self.about, about), (self.read, read)):
            if outcome is not None:
                for call in method.calls:
                    call.outcome = call.outcome if call.outcome is not None else outcome


class FakeRay:
    """One node, "n", beside this machine's own, which has no agent to speak of."""

    def __init__(self) -> None:
        self.actors: list[Actor] = []

    def own_node(self) -> str:
        """This machine is none of it."""
        return ""

    def nodes(self) -> list[NodeView]:
        """The node that Ray lists."""
        return [NodeView(id="n", label="n", hostname="n", address="10.0.0.1")]

    def actor_on(self, node_id: str, kind: type, *arguments: object) -> Actor:
        """A new agent."""
        self.actors.append(Actor())
        return self.actors[-1]

    def wait(self, references: Sequence[Call], patience_s: float) -> set[Call]:
        """Those that are answered."""
        return {each for each in references if each.outcome is not None}

    def get(self, reference: Call, patience_s: float) -> Any:
        """The answer; raises it if it is an error."""
        if isinstance(reference.outcome, BaseException):
            raise reference.outcome
        return reference.outcome

    def is_passing(self, error: BaseException) -> bool:
        """Errors of the network pass."""
        return isinstance(error, ConnectionError)


class Clock:
    """Time as the driver reads it."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        """The time that was set."""
        return self.now_s


@pytest.fixture
def ray() -> FakeRay:
    """A cluster."""
    return FakeRay()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The driver's clock."""
    clock = Clock()
    monkeypatch.setattr(driver, "time", clock)
    return clock


@pytest.fixture
def look(ray: FakeRay, clock: Clock) -> Callable[..., list[str] | None]:
    """Look at the nodes every second for so many: the problems of those that are listed then."""
    agents = Agents(ray, ())  # type: ignore[arg-type]

    def after(seconds: float = 0.0) -> list[str]:
        for _ in range(int(seconds)):
            agents.look({})
            clock.now_s += 1.0
        return [node.problem for node in agents.look({}).nodes]

    return after


def test_a_node_is_listed_once_its_agent_has_answered(ray: FakeRay, look: Callable[..., list[str]]) -> None:
    assert look() == []
    ray.actors[0].answer(about=ABOUT, read=())
    assert look(1.0) == [""]


def test_an_agent_that_takes_long_to_start_is_not_silent(ray: FakeRay, look: Callable[..., list[str]]) -> None:
    look()
    assert look(40.0) == []
    ray.actors[0].answer(about=ABOUT)
    look(5.0)
    ray.actors[0].answer(read=())
    assert look(5.0) == [""]
    assert len(ray.actors) == 1


def test_a_node_whose_agent_fails_to_start_says_so_and_gets_another(
    ray: FakeRay, look: Callable[..., list[str]]
) -> None:
    look()
    ray.actors[0].answer(about=RuntimeError("no python"), read=RuntimeError("no python"))
    assert look(1.0) == ["EricLLM does not start there: no python"]
    assert look(31.0) == ["EricLLM does not start there: no python"]
    assert len(ray.actors) == 2
    ray.actors[1].answer(about=ABOUT, read=())
    assert look(1.0) == [""]
    assert len(ray.actors) == 2


def test_an_agent_that_never_answers_is_replaced(ray: FakeRay, look: Callable[..., list[str]]) -> None:
    look()
    assert look(61.0) == ["EricLLM does not start there: no answer for 60 s"]
    look(31.0)
    ray.actors[1].answer(about=ABOUT, read=())
    assert look(1.0) == [""]


def test_a_node_that_falls_silent_is_gone_and_looked_for_again(ray: FakeRay, look: Callable[..., list[str]]) -> None:
    look()
    ray.actors[0].answer(about=ABOUT, read=())
    assert look() == [""]
    assert look(1.0) == [""]
    assert look(11.0) == []
    assert look(31.0) == []
    ray.actors[1].answer(about=ABOUT, read=())
    assert look(1.0) == [""]


def test_a_failure_that_passes_is_no_problem_of_the_node(ray: FakeRay, look: Callable[..., list[str]]) -> None:
    look()
    ray.actors[0].answer(about=ConnectionError("away"))
    assert look(1.0) == []
    look(31.0)
    ray.actors[1].answer(about=ABOUT, read=())
    assert look(1.0) == [""]


def test_a_node_is_awaited_until_its_agent_has_answered(ray: FakeRay, clock: Clock) -> None:
    agents = Agents(ray, ())  # type: ignore[arg-type]
    assert agents.look({}).awaits
    ray.actors[0].answer(about=ABOUT, read=())
    assert not agents.look({}).awaits


def test_an_engine_that_stood_still_takes_no_node_for_silent(
    ray: FakeRay, clock: Clock, look: Callable[..., list[str]]
) -> None:
    look()
    ray.actors[0].answer(about=ABOUT, read=())
    assert look(2.0) == [""]
    clock.now_s += 60.0
    assert look() == [""]
    assert look(11.0) == []
