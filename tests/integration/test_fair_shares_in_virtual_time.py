"""Clients share a worker fairly: requests through the whole engine and the loop of its worker on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest

from engine.config import EngineConfig, SamplingParams
from engine.engine import Engine, GenerateRequest
from engine.requests.causes import Cause
from engine.simulation.step_costs import StepCosts, StepShape
from engine.text.tokenizer import Tokenizer
from tests.fakes.model import fake_spec
from tests.fakes.timed_workers import TimedMachine
from tests.fakes.virtual_time import VirtualLoop, run

LONG_PROMPT = 100_000
SHORT_PROMPT = 50
STEP_TOKENS = 512
MAX_PROMPTS = 8
PAGES_FOR_ALL = 14 * LONG_PROMPT
PAGES_FOR_TWO = 5 * LONG_PROMPT // 2
COSTS = StepCosts(fixed_s=0.01, decode_s=0.0005, prompt_token_s=0.0001)
FULL_STEP_S = COSTS.seconds(StepShape(decodes=MAX_PROMPTS, chunks=2, prompt_tokens=STEP_TOKENS))


@pytest.fixture(autouse=True)
def _no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is waited for by the real clock."""
    monkeypatch.setattr(Tokenizer, "warm_up", lambda self: None)


@dataclass
class Stage:
    """An engine with a loaded model, and what its clients measured. ttft_steps: of the requests of each client, in the
    time of the largest step.  ended_s: of the last request of each.  causes: the first one of each of its requests."""

    loop: VirtualLoop
    engine: Engine
    ttft_steps: dict[str, list[float]] = field(default_factory=dict)
    ended_s: dict[str, float] = field(default_factory=dict)
    causes: dict[str, list[Cause]] = field(default_factory=dict)
    _numbers: count[int] = field(default_factory=count)

    async def ask(self, client: str, prompt: int, answer: int) -> None:
        """Send a request whose prompt no other has, and read it to its end."""
        serving, began, number = await self.engine.serving(), self.loop.now, next(self._numbers)
        prompt_ids = ([number // 200, number % 200] * prompt)[:prompt]
        params = SamplingParams(max_tokens=answer, ignore_eos=True)
        stream = self.engine.submit(
            GenerateRequest(prompt_ids=prompt_ids, params=params, key=serving.key, client=client)
        )
        first_s: float | None = None
        async for _ in stream:
            first_s = self.loop.now - began if first_s is None else first_s
        assert first_s is not None
        why = self.engine._tracker.detail(stream.request_id, 0, texts=False).why
        assert why is not None
        self.ttft_steps.setdefault(client, []).append(first_s / FULL_STEP_S)
        self.ended_s[client] = self.loop.now
        self.causes.setdefault(client, []).append(next(iter(why.causes)))

    async def ask_until(self, done: asyncio.Future[None], client: str, prompt: int, answer: int) -> None:
        """Send one request after the other, with pauses in between, until something else is done."""
        while not done.done():
            await asyncio.sleep(self.loop.random.uniform(0.1, 0.5))
            await self.ask(client, prompt, answer)


Scene = Callable[[Stage], Coroutine[Any, Any, None]]


async def one_after_the_other(stage: Stage) -> None:
    """Long prompts, one after the other."""
    for _ in range(3):
        await stage.ask("long", LONG_PROMPT, 50)


async def at_once(stage: Stage) -> None:
    """As many long prompts at once as there are slots."""
    await asyncio.gather(*(stage.ask("long", LONG_PROMPT, 50) for _ in range(MAX_PROMPTS)))


async def more_than_slots(stage: Stage) -> None:
    """More long prompts at once than there are slots."""
    await asyncio.gather(*(stage.ask("long", LONG_PROMPT, 50) for _ in range(MAX_PROMPTS + 4)))


async def of_two_clients(stage: Stage) -> None:
    """Long prompts of two clients at once."""
    each = [stage.ask(client, LONG_PROMPT, 50) for client in ("long", "other") for _ in range(2)]
    await asyncio.gather(*each)


def play(scene: Scene, folder: Path, *, kv_tokens: int = PAGES_FOR_ALL, short: bool = True) -> Stage:
    """Play a scene to its end. short: while another client sends short prompts, one after the other."""
    machine = TimedMachine(COSTS, kv_tokens=kv_tokens, max_model_len=2 * LONG_PROMPT)
    config = EngineConfig(
        worker_host="thread", timeout_s=0.0, hang_s=0.0, max_prompts=MAX_PROMPTS, step_tokens=STEP_TOKENS
    )

    async def main(loop: VirtualLoop) -> Stage:
        stage = Stage(loop, Engine(config, new_host=machine.new_host, probe=machine))
        await stage.engine.start()
        loop.after_each.append(stage.engine.check)
        await stage.engine.load(fake_spec(folder), num_workers=1)
        long = asyncio.ensure_future(scene(stage))
        if short:
            await stage.ask_until(long, "short", SHORT_PROMPT, 20)
        await long
        await stage.engine.close(0.0)
        return stage

    return run(main, Random(1))


@pytest.mark.parametrize(
    ("scene", "kv_tokens"),
    [
        (one_after_the_other, PAGES_FOR_ALL),
        (at_once, PAGES_FOR_ALL),
        (at_once, PAGES_FOR_TWO),
        (more_than_slots, PAGES_FOR_TWO),
        (of_two_clients, PAGES_FOR_ALL),
    ],
)
def test_short_prompts_wait_for_a_step_and_not_for_long_prompts_of_others(
    scene: Scene, kv_tokens: int, tmp_path: Path
) -> None:
    """The step that runs, and one with their prompt in it."""
    stage = play(scene, tmp_path, kv_tokens=kv_tokens)
    assert len(stage.ttft_steps["short"]) > 20
    assert max(stage.ttft_steps["short"]) < 2.5
    assert not {"slot", "pages", "step_tokens"} & set(stage.causes["short"])


@pytest.mark.parametrize("scene", [one_after_the_other, at_once])
def test_long_prompts_take_hardly_longer_for_the_short_ones_between_them(scene: Scene, tmp_path: Path) -> None:
    alone = play(scene, tmp_path, short=False)
    beside = play(scene, tmp_path)
    assert len(beside.ttft_steps["long"]) == len(alone.ttft_steps["long"])
    assert beside.ended_s["long"] < 1.03 * alone.ended_s["long"]


def test_places_that_are_kept_for_others_cost_a_client_alone_no_time(tmp_path: Path) -> None:
    """Its prompts fill every step until the last one is computed."""
    stage = play(more_than_slots, tmp_path, short=False)
    steps = (MAX_PROMPTS + 4) * LONG_PROMPT / STEP_TOKENS
    assert max(stage.ttft_steps["long"]) < 1.01 * steps + 1


def test_clients_with_long_prompts_are_served_at_the_same_rate(tmp_path: Path) -> None:
    """Theirs end at the same time, and none is computed before the other client's."""
    stage = play(of_two_clients, tmp_path, short=False)
    for mine, others in zip(stage.ttft_steps["long"], stage.ttft_steps["other"], strict=True):
        assert mine == pytest.approx(others, rel=0.02)
