"""Requests through the whole engine and the loop of its workers on virtual time: the first cause named is the one that
was arranged, and the causes add up to the latency that the client measured."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

from engine.backends.base import StepLimit
from engine.config import EngineConfig, Grammar, SamplingParams
from engine.engine import Engine, GenerateRequest, RequestStream
from engine.requests.causes import OWN_WORK, Cause, Why
from engine.simulation.step_costs import StepCosts
from engine.snapshot import Snapshot
from engine.text import grammar
from engine.text.tokenizer import Tokenizer
from engine.worker_process.hosts import WorkerExit
from tests.fakes.model import fake_spec
from tests.fakes.timed_workers import TimedMachine, compile_later
from tests.fakes.virtual_time import VirtualLoop, run

STEP_S = 0.05
COSTS = StepCosts(fixed_s=STEP_S, prompt_token_s=0.01)


@pytest.fixture(autouse=True)
def _no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is waited for by the real clock: no process of a chat template's, and no thread of a grammar's."""
    monkeypatch.setattr(Tokenizer, "warm_up", lambda self: None)
    monkeypatch.setattr(grammar, "in_deep_thread", compile_later)


@dataclass
class Measured:
    """A request of which its client measured the latency."""

    latency_s: float
    why: Why
    request: str


class Stage:
    """An engine on a machine, with its model loaded, and its clients."""

    def __init__(self, loop: VirtualLoop, machine: TimedMachine, folder: Path, settings: dict[str, float]) -> None:
        self.loop = loop
        self.machine = machine
        self.folder = folder
        self.snapshot = Snapshot(at=0.0)
        self.engine = Engine(
            EngineConfig(
                worker_host="thread",
                restart_backoff_s=0.0,
                timeout_s=0.0,
                hang_s=0.0,
                **{"max_prompts": 8, "step_tokens": 512, **settings},  # type: ignore[arg-type]
            ),
            new_host=machine.new_host,
            probe=machine,
        )
        self._numbers = iter(range(256))
        self._others: list[asyncio.Task[None]] = []

    async def submit(self, prompt: int, answer: int, *, grammar: bool = False) -> RequestStream:
        """Wait for the model and send a request, as the API does."""
        serving = await self.engine.serving()
        params = SamplingParams(max_tokens=answer, ignore_eos=True)
        if grammar:
            params = SamplingParams(max_tokens=answer, ignore_eos=True, grammar=Grammar(kind="regex", source="a+"))
        prompt_ids = [next(self._numbers)] * prompt
        return self.engine.submit(
            GenerateRequest(prompt_ids=prompt_ids, params=params, key=serving.key, waited=serving.waited)
        )

    async def other(self, prompt: int, answer: int) -> str:
        """Send a request that is in the way; returns its id."""
        stream = await self.submit(prompt, answer)
        self._others.append(asyncio.ensure_future(_read(stream)))
        return stream.request_id

    async def measure(self, prompt: int, answer: int, *, grammar: bool = False, pause_s: float = 0.0) -> Measured:
        """Send a request and read it to its end. pause_s: until its client begins to read."""
        began = self.loop.now
        stream = await self.submit(prompt, answer, grammar=grammar)
        await asyncio.sleep(pause_s)
        await _read(stream)
        latency_s = self.loop.now - began
        why = self.engine._tracker.detail(stream.request_id, 0, texts=False).why
        assert why is not None
        await asyncio.sleep(1.5)
        self.snapshot = self.engine.publish()
        return Measured(latency_s, why, stream.request_id)

    async def until_state(self, *states: str) -> None:
        """Wait until the model is in one of these states."""
        while self.engine.publish().status.state not in states:  # noqa: ASYNC110 - virtual time, and no event says so
            await asyncio.sleep(0.1)

    async def close(self) -> None:
        """End everything."""
        await asyncio.gather(*self._others)
        await self.engine.close(0.0)


async def _read(stream: RequestStream) -> None:
    async for _ in stream:
        pass


Scene = Callable[[Stage], Awaitable[Measured]]


def play(
    scene: Scene, folder: Path, *, kv_tokens: int = 8192, workers: int = 1, nodes: int = 0, **settings: float
) -> tuple[Measured, Stage]:
    """Play a scene to its end."""
    machine = TimedMachine(COSTS, kv_tokens=kv_tokens, nodes=nodes, slower={"w1": 4.0})
    stages: list[Stage] = []

    async def main(loop: VirtualLoop) -> Measured:
        stage = Stage(loop, machine, folder, settings)
        stages.append(stage)
        await stage.engine.start()
        loop.after_each.append(stage.engine.check)
        await stage.engine.load(fake_spec(folder), num_workers=workers)
        measured = await scene(stage)
        await stage.close()
        return measured

    return run(main, Random(1), limit_s=500.0), stages[0]


async def waits_for_a_slot(stage: Stage) -> Measured:
    """The only slot is another's."""
    await stage.other(16, 200)
    return await stage.measure(16, 10)


async def waits_for_pages(stage: Stage) -> Measured:
    """Another holds most of the pages."""
    await stage.other(160, 60)
    await asyncio.sleep(0.1)
    return await stage.measure(100, 4)


async def waits_for_step_tokens(stage: Stage) -> Measured:
    """A long prompt takes all tokens of every step."""
    await stage.other(1500, 1)
    await asyncio.sleep(0.1)
    return await stage.measure(32, 4)


async def answers_while_others_prompts_are_computed(stage: Stage) -> Measured:
    """Prompts come while it is answered, each of which makes a step long."""

    async def prompts() -> None:
        for _ in range(6):
            await asyncio.sleep(3.0)
            await stage.other(256, 1)

    coming = asyncio.ensure_future(prompts())
    measured = await stage.measure(16, 160)
    await coming
    return measured


async def shares_the_steps_of_its_prompt(stage: Stage) -> Measured:
    """Its prompt and a larger one are computed in the same step."""
    await stage.other(400, 1)
    return await stage.measure(100, 1)


async def is_preempted(stage: Stage) -> Measured:
    """Two answers grow until the pages do not hold both; the younger one has to wait."""
    await stage.other(96, 150)
    await asyncio.sleep(1.2)
    return await stage.measure(96, 40)


async def has_a_slow_worker(stage: Stage) -> Measured:
    """Both workers have been at work for a while; the faster one is busy."""
    await stage.other(16, 1000)
    await stage.measure(16, 100)
    return await stage.measure(16, 100)


async def is_read_late(stage: Stage) -> Measured:
    """Its client does other things first."""
    return await stage.measure(16, 20, pause_s=30.0)


async def has_a_grammar(stage: Stage) -> Measured:
    """Its grammar takes long to compile."""
    return await stage.measure(16, 20, grammar=True)


async def wakes_the_model(stage: Stage) -> Measured:
    """The model gave its memory back for want of requests."""
    stage.machine.load_s = 8.0
    await stage.until_state("idle")
    return await stage.measure(16, 20)


async def comes_while_the_model_is_replaced(stage: Stage) -> Measured:
    """Another model takes the place of the first one, which has left already."""
    stage.machine.load_s = 8.0
    stage.machine.room = 1
    loading = asyncio.ensure_future(stage.engine.load(fake_spec(stage.folder, max_model_len=2048), num_workers=1))
    await stage.until_state("unloading", "loading")
    measured = await stage.measure(16, 20)
    await loading
    return measured


async def loses_its_worker(stage: Stage) -> Measured:
    """Its worker dies in the middle of the answer."""
    stage.machine.load_s = 8.0

    async def die() -> None:
        await asyncio.sleep(0.8)
        stage.machine.hosts[-1].die(WorkerExit(signal="SIGKILL"))

    dying = asyncio.ensure_future(die())
    measured = await stage.measure(16, 40)
    await dying
    return measured


async def has_a_long_prompt(stage: Stage) -> Measured:
    """Its prompt takes several steps, and the answer hardly any."""
    return await stage.measure(1500, 2)


async def has_a_long_answer(stage: Stage) -> Measured:
    """It is alone, and its answer is long."""
    return await stage.measure(16, 200)


SCENES: list[tuple[Scene, Cause, dict[str, float]]] = [
    (waits_for_a_slot, "slot", {"max_prompts": 1}),
    (waits_for_pages, "pages", {"kv_tokens": 256}),
    (waits_for_step_tokens, "step_tokens", {"step_tokens": 64}),
    (answers_while_others_prompts_are_computed, "prompts", {}),
    (shares_the_steps_of_its_prompt, "prompts", {}),
    (is_preempted, "preempted", {"kv_tokens": 256}),
    (has_a_slow_worker, "slow_worker", {"max_prompts": 1, "workers": 2, "nodes": 2}),
    (is_read_late, "client", {}),
    (has_a_grammar, "grammar", {}),
    (wakes_the_model, "load", {"idle_unload_s": 5.0}),
    (comes_while_the_model_is_replaced, "swap", {}),
    (loses_its_worker, "lost_worker", {}),
    (has_a_long_prompt, "prefill", {}),
    (has_a_long_answer, "decode", {}),
]


@pytest.mark.parametrize(("scene", "cause", "settings"), SCENES, ids=lambda each: getattr(each, "__name__", ""))
def test_the_cause_that_was_arranged_is_named_first_and_the_parts_add_up_to_the_measured_latency(
    scene: Scene, cause: Cause, settings: dict[str, float], tmp_path: Path
) -> None:
    measured, _ = play(scene, tmp_path, **settings)  # type: ignore[arg-type]
    assert next(iter(measured.why.causes)) == cause, measured.why
    assert sum(measured.why.causes.values()) == pytest.approx(measured.latency_s, rel=0.01)
    assert bool(measured.why.sentence) == (cause not in OWN_WORK)


def test_the_request_whose_prompt_was_in_the_way_is_named(tmp_path: Path) -> None:
    measured, stage = play(waits_for_step_tokens, tmp_path, step_tokens=64)
    other = next(row.id for row in stage.snapshot.requests if row.id != measured.request)
    assert measured.why.behind == other
    assert f"mostly of {other}: add workers, or raise step tokens (now 64)" in measured.why.sentence


@pytest.mark.parametrize(
    ("scene", "limit", "settings"),
    [
        (waits_for_a_slot, "max_prompts", {"max_prompts": 1}),
        (waits_for_pages, "kv_pages", {"kv_tokens": 256}),
        (waits_for_step_tokens, "step_tokens", {"step_tokens": 64}),
        (is_read_late, "none", {}),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_the_limit_of_the_seconds_is_what_kept_the_request_waiting(
    scene: Scene, limit: StepLimit, settings: dict[str, float], tmp_path: Path
) -> None:
    _, stage = play(scene, tmp_path, **settings)  # type: ignore[arg-type]
    limits = Counter(second.limit for second in stage.snapshot.history if second.running)
    assert limits.most_common(1)[0][0] == limit
    assert stage.snapshot.history[-1].limit == "none"


def test_the_causes_of_the_last_minute_add_up_to_the_time_of_all_requests(tmp_path: Path) -> None:
    measured, stage = play(waits_for_a_slot, tmp_path, max_prompts=1)
    ended = sum(row.age_s for row in stage.snapshot.requests)
    assert stage.snapshot.why.total_s == pytest.approx(ended, rel=0.01)
    assert stage.snapshot.why.causes["slot"] == pytest.approx(measured.why.causes["slot"], rel=0.01)
    (worker,) = stage.snapshot.workers
    on_worker_s = ended - stage.snapshot.why.causes["slot"]
    assert worker.why.total_s == pytest.approx(on_worker_s, rel=0.01)
    assert stage.snapshot.why.sentence.endswith("for a slot: raise max prompts (now 1).")
