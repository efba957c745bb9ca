"""Chaos: workers are killed at random under load, and every token of every request is accounted for."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from engine.config import EngineConfig, ModelSpec
from engine.engine import Engine
from engine.system.log import RingHandler
from tests.chaos.faults import Saboteur
from tests.chaos.load import Tally, assortment, client, undisturbed
from tests.fakes.engines import StillProbe
from tests.fakes.model import write_fake_model
from tests.fakes.tiny_models import make_tiny_model

_DISTINCT_REQUESTS = 48
_RECOVERY_S = 120.0
_ENDING_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """seconds: of faults, one about every `fault_every_s`.  torch: a real model in float32 in place of the fake one.
    hang_s: short, so that stopped workers are found while it runs."""

    seconds: float
    torch: bool = False
    workers: int = 3
    clients: int = 32
    max_prompts: int = 12
    fault_every_s: float = 0.5
    hang_s: float = 4.0
    longest: int = 400
    seed: int = 0


def fake_plan(seconds: float, seed: int = 0) -> Plan:
    """Many faults and many requests."""
    return Plan(seconds=seconds, seed=seed)


def torch_plan(seconds: float, seed: int = 0) -> Plan:
    """Fewer faults: a worker that loads a real model takes a while to come back."""
    return Plan(seconds=seconds, torch=True, workers=2, hang_s=6.0, fault_every_s=1.5, longest=200, seed=seed)


@dataclass
class Report:
    """What there was, and what is left that should not be."""

    tally: Tally
    struck: dict[str, int]
    processes_struck: int = 0
    restarts: int = 0
    requeued: int = 0
    seconds: float = 0.0
    leaks: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """For a person."""
        return [
            f"{self.seconds:.0f} s, {sum(self.tally.ends.values())} requests: {dict(self.tally.ends)}",
            f"{self.tally.tokens} tokens, each as in the undisturbed answer but in {len(self.tally.wrong)} answers",
            f"faults: {self.struck} on {self.processes_struck} processes; {self.restarts} restarts, "
            f"{self.requeued} times a request was given to another worker",
            f"left over: {self.leaks or 'nothing'}",
            *self.tally.wrong[:5],
        ]


async def run(plan: Plan, folder: Path) -> Report:
    """Make a model in `folder`, serve it, and see it through `plan.seconds` of faults and its recovery."""
    with _environment(torch=plan.torch):
        before = _resources()
        engine = Engine(_config(plan), probe=StillProbe())
        errors = RingHandler(engine.log, logging.ERROR)
        logging.getLogger("engine").addHandler(errors)
        await engine.start()
        try:
            report = await _chaos(engine, plan, folder)
        finally:
            await engine.close(drain_s=0.0)
            logging.getLogger("engine").removeHandler(errors)
        report.leaks += await _left_over(before)
        return report


async def _chaos(engine: Engine, plan: Plan, folder: Path) -> Report:
    await engine.load(_spec(plan, folder))
    await _recovered(engine, plan)
    requests = assortment(_DISTINCT_REQUESTS, longest=plan.longest)
    answers = await undisturbed(engine, requests)
    submitted = engine.publish().totals.requests
    tally, saboteur = Tally(), Saboteur(engine, every_s=plan.fault_every_s, seed=plan.seed)
    started = time.monotonic()
    faults = asyncio.create_task(saboteur.run())
    asyncio.get_running_loop().call_later(plan.seconds, faults.cancel)
    async with asyncio.timeout(plan.seconds + _RECOVERY_S):
        await asyncio.gather(
            *(
                client(engine, requests, answers, tally, until=started + plan.seconds, seed=number)
                for number in range(plan.clients)
            )
        )
        with contextlib.suppress(asyncio.CancelledError):
            await faults
    await _recovered(engine, plan, saboteur.pids)
    report = Report(tally, dict(saboteur.struck), len(saboteur.pids), seconds=time.monotonic() - started)
    report.leaks = _held(engine, submitted, tally)
    report.restarts, report.requeued = _counts(engine)
    return report


def _counts(engine: Engine) -> tuple[int, int]:
    totals = engine.publish().totals
    return totals.worker_restarts, totals.requeued


async def _recovered(engine: Engine, plan: Plan, struck: Collection[int] = ()) -> None:
    """Wait until all workers are ready, and idle by their own account; those that were struck are to be replaced, which
    takes a while to be noticed of one that stands still without a request."""

    def well() -> bool:
        workers = engine.publish().workers
        return len(workers) == plan.workers and all(
            each.state == "ready" and each.pid not in struck and each.stats.pages_total > 0 and not each.stats.sequences
            for each in workers
        )

    async with asyncio.timeout(_RECOVERY_S):
        while not well():  # noqa: ASYNC110 - processes change it
            await asyncio.sleep(0.01)


def _held(engine: Engine, submitted: int, tally: Tally) -> list[str]:
    """What the engine and its workers hold although nothing is asked of them."""
    snapshot = engine.publish()
    held = [
        f"{each.id} holds {each.stats.pages_total - each.stats.pages_free} pages"
        for each in snapshot.workers
        if each.stats.pages_free != each.stats.pages_total
    ]
    held += [f"{each.id} works on {each.active} requests" for each in snapshot.workers if each.active]
    if snapshot.running or snapshot.queued:
        held.append(f"{snapshot.running} requests run and {snapshot.queued} wait")
    asked, ended = snapshot.totals.requests - submitted, sum(tally.ends.values())
    if asked != ended or sum(snapshot.totals.finished.values()) != snapshot.totals.requests:
        held.append(f"{asked} requests were asked and {ended} ended; the books have {snapshot.totals.finished}")
    return held + [each.message for each in engine.log.after(0)[1] if "do not add up" in each.message]


@dataclass(frozen=True)
class _Resources:
    children: dict[int, str]
    descriptors: int
    threads: frozenset[str]


def _resources() -> _Resources:
    gc.collect()
    process = psutil.Process()
    return _Resources(
        {child.pid: _describe(child) for child in process.children(recursive=True)},
        process.num_fds(),
        frozenset(thread.name for thread in threading.enumerate()),
    )


def _describe(process: psutil.Process) -> str:
    """What it is, for who has to find out why it is there."""
    try:
        return f"{process.status()}, child of {process.ppid()}: {' '.join(process.cmdline())[-200:]}"
    except psutil.NoSuchProcess:
        return "gone meanwhile"


async def _left_over(before: _Resources) -> list[str]:
    """What there is beyond `before`, once what is ending has ended: a chat template that is being rendered is not
    waited for when its model goes."""
    until = time.monotonic() + _ENDING_S
    while (left := _beyond(before, _resources())) and time.monotonic() < until:  # noqa: ASYNC110 - processes change it
        await asyncio.sleep(0.1)
    return left


def _beyond(before: _Resources, now: _Resources) -> list[str]:
    left = [f"process {pid} ({now.children[pid]})" for pid in now.children.keys() - before.children.keys()]
    left += [f"thread {name}" for name in now.threads - before.threads if name.startswith(("reap-", "worker-"))]
    if now.descriptors > before.descriptors:
        left.append(f"{now.descriptors - before.descriptors} file descriptors")
    return left


def _config(plan: Plan) -> EngineConfig:
    return EngineConfig(
        num_workers=plan.workers,
        max_prompts=plan.max_prompts,
        timeout_s=0.0,
        hang_s=plan.hang_s,
        max_deaths=1000,
        restart_backoff_s=0.05,
        max_restart_backoff_s=0.2,
    )


def _spec(plan: Plan, folder: Path) -> ModelSpec:
    if not plan.torch:
        return ModelSpec(path=write_fake_model(folder), name="fake")
    model = make_tiny_model(folder, max_position_embeddings=1024)
    return ModelSpec(path=model, name="tiny", threads=1, kv_cache_tokens=8192, dtype="float32")


@contextlib.contextmanager
def _environment(*, torch: bool) -> Iterator[None]:
    """Which backend the workers take."""
    name = "ERICLLM_BACKEND_FACTORY"
    before = os.environ.pop(name, None)
    if not torch:
        os.environ[name] = "tests.chaos.backend:make"
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before
