"""Tokens reach their readers when their step is over: engine, worker's loop, outbox and streams on virtual time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from engine.backends.scheduler.step_pacing import StepPacing
from engine.config import EngineConfig, Grammar, SamplingParams
from engine.engine import Engine, GenerateRequest
from engine.simulation.step_costs import StepCosts, StepShape
from engine.text import grammar
from engine.text.tokenizer import Tokenizer
from tests.fakes.model import fake_spec
from tests.fakes.timed_workers import TimedHost, TimedMachine, compile_later
from tests.fakes.virtual_time import VirtualLoop, run

STREAMS = 16
TOKENS = 60
STEP_S = 0.03


@pytest.fixture(autouse=True)
def _no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is waited for by the real clock."""
    monkeypatch.setattr(Tokenizer, "warm_up", lambda self: None)
    monkeypatch.setattr(grammar, "in_deep_thread", compile_later)


class Stage:
    """An engine with its model loaded, and what arrived at the readers: for each request when, and how many tokens.
    begun: set once STREAMS have a token."""

    def __init__(self, loop: VirtualLoop, engine: Engine) -> None:
        self.loop = loop
        self.engine = engine
        self.arrived: dict[str, list[tuple[float, int]]] = {}
        self.begun = asyncio.Event()

    async def read(self, name: str, prompt: int = 10, tokens: int = TOKENS, **params: object) -> None:
        """Send a request, and read it to its end."""
        serving, chunks = await self.engine.serving(), self.arrived.setdefault(name, [])
        wanted = SamplingParams(max_tokens=tokens, ignore_eos=True, **params)  # type: ignore[arg-type]
        request = GenerateRequest(prompt_ids=[len(self.arrived)] * prompt, params=wanted, key=serving.key, client=name)
        async for delta in self.engine.submit(request):
            if delta.token_ids:
                chunks.append((self.loop.now, len(delta.token_ids)))
                if len(self.arrived) >= STREAMS and all(self.arrived.values()):
                    self.begun.set()

    def gaps(self, name: str) -> list[float]:
        """Between the chunks of a request."""
        return [later - earlier for (earlier, _), (later, _) in pairwise(self.arrived[name])]


Scene = Callable[[Stage], Awaitable[object]]


def play(
    scene: Scene, folder: Path, costs: StepCosts, host: type[TimedHost] = TimedHost, *, kv_tokens: int = 65_536
) -> Stage:
    """Play a scene to its end."""
    machine = TimedMachine(costs, kv_tokens=kv_tokens)
    config = EngineConfig(worker_host="thread", timeout_s=0.0, hang_s=0.0, max_prompts=2 * STREAMS)

    async def main(loop: VirtualLoop) -> Stage:
        engine = Engine(config, new_host=lambda name, _: host(machine, name), probe=machine)
        stage = Stage(loop, engine)
        await engine.start()
        await engine.load(fake_spec(folder), num_workers=1)
        await scene(stage)
        await engine.close(0.0)
        return stage

    return run(main, Random(1))


async def streams(stage: Stage) -> None:
    """As many at once."""
    await asyncio.gather(*(stage.read(f"r{number}") for number in range(STREAMS)))


def test_each_token_of_a_slow_step_reaches_its_reader_when_the_step_is_over(tmp_path: Path) -> None:
    stage = play(streams, tmp_path, StepCosts(fixed_s=STEP_S))
    for number in range(STREAMS):
        assert [tokens for _, tokens in stage.arrived[f"r{number}"]] == [1] * TOKENS
        assert stage.gaps(f"r{number}") == pytest.approx([STEP_S] * (TOKENS - 1), abs=1e-6)


class Uneven(TimedHost):
    """A worker whose steps take from 10% less to 10% more."""

    random = Random(3)

    @property
    def slower(self) -> float:
        """Of the next step."""
        return self.random.uniform(0.9, 1.1)

    @slower.setter
    def slower(self, _: float) -> None:
        pass


def test_steps_of_some_more_than_what_is_batched_are_sent_by_themselves_the_shorter_ones_too(tmp_path: Path) -> None:
    stage = play(streams, tmp_path, StepCosts(fixed_s=0.0215), Uneven)
    gaps = [gap for number in range(STREAMS) for gap in stage.gaps(f"r{number}")]
    assert min(gaps) < 0.02 < max(gaps)
    assert max(gaps) <= 1.1 * 0.0215 + 1e-6
    assert {tokens for chunks in stage.arrived.values() for _, tokens in chunks} == {1}


SHORT = StepCosts(fixed_s=0.008, prompt_token_s=0.001)
LONG_PROMPT = 400
LONG_S = SHORT.seconds(StepShape(chunks=1, prompt_tokens=LONG_PROMPT))


async def with_one_that_waits(stage: Stage) -> None:
    """A long prompt waits in the worker for the pages of answers that end."""
    short = [asyncio.ensure_future(stage.read(f"r{each}", prompt=44, tokens=20 + each)) for each in range(STREAMS)]
    await stage.begun.wait()
    await stage.read("long", prompt=LONG_PROMPT, tokens=2)
    await asyncio.gather(*short)


async def with_a_grammar(stage: Stage) -> None:
    """Long prompts begin once their grammars are compiled, some steps apart."""
    reads = [asyncio.ensure_future(stage.read(f"r{each}", tokens=1200)) for each in range(STREAMS)]
    for number in range(4):
        wanted = Grammar(kind="regex", source="a*")
        reads.append(asyncio.ensure_future(stage.read(f"l{number}", LONG_PROMPT, 2, grammar=wanted)))
        await asyncio.sleep(1.5 + SHORT.fixed_s)
    await asyncio.gather(*reads)


@pytest.mark.parametrize(("scene", "kv_tokens"), [(with_one_that_waits, 80 * 16), (with_a_grammar, 65_536)])
def test_tokens_that_are_held_go_before_a_prompt_that_was_waiting_makes_a_step_a_long_one(
    scene: Scene, kv_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepPacing, "prompt_s", lambda self, plan: math.inf)  # a long prompt takes one step
    stage = play(scene, tmp_path, SHORT, kv_tokens=kv_tokens)
    assert any(tokens > 1 for chunks in stage.arrived.values() for _, tokens in chunks), "short steps are sent together"
    over_long = [
        (gap, tokens)
        for name, chunks in stage.arrived.items()
        for gap, (_, tokens) in zip(stage.gaps(name), chunks[1:], strict=True)
        if gap > 0.1
    ]
    assert any(gap == pytest.approx(LONG_S, abs=1e-6) for gap, _ in over_long)
    assert {tokens for _, tokens in over_long} == {1}, over_long
