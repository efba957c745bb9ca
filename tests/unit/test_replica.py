"""One worker as the engine sees it: hung, dying, left dead and revived. Its host is played."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import fields
from itertools import count
from pathlib import Path

import msgspec
import pytest

from engine.backends.base import BackendStats, LoadProgress
from engine.config import ModelSpec, SamplingParams
from engine.errors import EngineError, ErrorInfo, NodeGone, WorkerFailed
from engine.requests.request import Request
from engine.requests.stream import RequestStream
from engine.snapshot import WorkerReading
from engine.worker_process import protocol
from engine.worker_process.hosts import WorkerExit
from engine.worker_process.protocol import Event, Hello, LogLine, Progress
from engine.workers.health import Backoff, CrashCounter
from engine.workers.replica import Replica
from tests.fakes.hosts import MODEL, PlayedHost

HANG_S = 60.0
MAX_TURNS = 10_000
_orders = count()


class Owner:
    """A ReplicaOwner that keeps what it is told."""

    def __init__(self) -> None:
        self.lost: list[tuple[str, list[Request], ErrorInfo]] = []

    def placed(self, replica: Replica, spec: ModelSpec) -> ModelSpec:
        """It stays where it is."""
        return spec

    def replica_changed(self, replica: Replica) -> None:
        """Nothing to do."""

    def replica_stepped(self, replica: Replica, batch: protocol.StepBatch, before: BackendStats) -> None:
        """Take the tokens."""
        for output in batch.outputs:
            replica.active[output.request_id].generated.extend(output.token_ids)

    def replica_lost(self, replica: Replica, requests: list[Request], error: ErrorInfo) -> None:
        """Keep it, with the state in which it was told."""
        self.lost.append((replica.state, requests, error))


class RefusedHost(PlayedHost):
    """One that cannot start."""

    def __init__(self, error: EngineError) -> None:
        super().__init__()
        self._error = error

    async def start(self, on_event: Callable[[Event], None], on_exit: Callable[[WorkerExit], None]) -> None:
        """It raises the error."""
        raise self._error


class Stage:
    """A replica whose hosts are played, and a clock that is moved by hand: the test's loop has no other, so timers that
    are not due at once are never due. refusal: why new hosts cannot start."""

    def __init__(self, *, max_deaths: int = 5, hang_s: float = HANG_S) -> None:
        self.hosts: list[PlayedHost] = []
        self.refusal: EngineError | None = None
        self.owner = Owner()
        self.now = 0.0
        asyncio.get_running_loop().time = lambda: self.now  # type: ignore[method-assign]
        self.replica = Replica(
            "w0",
            protocol.Load(
                spec=ModelSpec(path=Path("m"), name="m"), max_prompts=4, step_tokens=64, page_tokens=16, threads=1
            ),
            device="cpu",
            new_host=self._new_host,
            owner=self.owner,
            backoff=Backoff(0.0, 30.0),
            max_deaths=max_deaths,
            hang_s=hang_s,
        )

    def _new_host(self, worker_id: str, spec: ModelSpec) -> PlayedHost:
        self.hosts.append(PlayedHost() if self.refusal is None else RefusedHost(self.refusal))
        return self.hosts[-1]

    @property
    def host(self) -> PlayedHost:
        """The newest."""
        return self.hosts[-1]

    async def until(self, condition: Callable[[], object]) -> None:
        """Let the loop turn until it is so."""
        for _ in range(MAX_TURNS):
            if condition():
                return
            await asyncio.sleep(0)
        pytest.fail(f"not so after {MAX_TURNS} turns of the loop")

    async def started(self) -> Stage:
        """A process that runs and has said nothing."""
        self.replica.start()
        await self.until(lambda: hasattr(self.host, "_on_event"))
        return self

    async def ready(self) -> Stage:
        """A worker with its model."""
        await self.started()
        self.host.load()
        return self

    async def die(self) -> None:
        """It is killed, and another one is ready if there is to be one."""
        before = self.host
        before.end(WorkerExit(signal="SIGKILL", log_tail="one\ntwo"))
        if self.replica.state != "failed":
            await self.until(lambda: self.host is not before and hasattr(self.host, "_on_event"))
            self.host.load()

    def pass_s(self, seconds: int) -> None:
        """Checks, a second apart."""
        for _ in range(seconds):
            self.now += 1.0
            self.replica.check(self.now)

    def reading(self) -> WorkerReading:
        """What a panel sees."""
        return self.replica.reading(self.now)


def request() -> Request:
    order = next(_orders)
    values = {
        "id": f"r{order}",
        "source": "test",
        "priority": 0,
        "order": order,
        "prompt_ids": [1, 2],
        "params": SamplingParams(),
        "requested_params": SamplingParams(),
        "end_token_ids": (),
        "timeout_s": 0,
        "created": 0.0,
        "model_queue": None,
        "stream": RequestStream(f"r{order}", 2, lambda: None),
    }
    known = {field.name for field in fields(Request)}
    return Request(**{name: value for name, value in values.items() if name in known})


# -- hung ---------------------------------------------------------------------------------------------------------


async def test_a_worker_that_reports_no_step_is_killed_and_its_requests_go_back_at_once() -> None:
    stage = await Stage().ready()
    asked = [request() for _ in range(8)]
    for each in asked:
        stage.replica.submit(each)
    stage.pass_s(60)
    assert not stage.host.killed
    stage.pass_s(1)
    hung = stage.hosts[0]
    assert hung.killed
    assert [(state, lost) for state, lost, _ in stage.owner.lost] == [("restarting", asked)]
    assert stage.reading().last_error is not None
    assert "no report for 61 s while it ran 8 requests" in stage.reading().last_error.message
    await stage.until(lambda: len(stage.hosts) == 2 and hasattr(stage.host, "_on_event"))
    assert stage.reading().log_tail == ("last words",)
    assert "no report" in stage.reading().last_error.message


async def test_a_worker_with_requests_that_makes_no_step_stalls_after_a_quarter_of_the_time_until_it_is_hung() -> None:
    stage = await Stage().ready()
    stage.replica.submit(request())
    stage.pass_s(15)
    assert stage.replica.stalled_s(stage.now) is None
    stage.host.say(protocol.StepBatch(outputs=[], stats=BackendStats(), steps=0))
    stage.pass_s(1)
    assert stage.replica.stalled_s(stage.now) == 16


async def test_a_worker_that_is_never_replaced_stalls_after_ten_seconds_and_slow_steps_are_no_stall() -> None:
    stage = await Stage(hang_s=0).ready()
    stage.replica.submit(request())
    stage.pass_s(11)
    assert stage.replica.stalled_s(stage.now) is not None
    stage.host.step(step_s=20.0)
    stage.pass_s(11)
    assert stage.replica.stalled_s(stage.now) is None
    stage.replica.active.clear()
    stage.pass_s(600)
    assert stage.replica.stalled_s(stage.now) is None


async def test_an_idle_worker_that_falls_silent_is_replaced_too() -> None:
    stage = await Stage().ready()
    stage.pass_s(121)
    assert stage.hosts[0].killed
    assert "while it was idle" in stage.owner.lost[0][2].message


async def test_a_worker_whose_only_request_is_cancelled_in_a_long_step_is_not_hung() -> None:
    stage = await Stage(hang_s=1.5).ready()
    asked = request()
    stage.replica.submit(asked)
    stage.host.say(protocol.StepBatch(outputs=[], stats=BackendStats(), step_s=6.0))
    stage.replica.forget(asked)
    stage.pass_s(17)
    assert not stage.host.killed
    stage.pass_s(3)
    assert stage.host.killed


async def test_a_worker_that_found_kv_pages_is_given_the_time_of_the_step_that_the_one_before_computed() -> None:
    stage = await Stage().started()
    slow, found = (msgspec.structs.replace(MODEL, step_s=seconds) for seconds in (100.0, 0.0))
    stage.host.say(Hello(pid=1), protocol.Loaded(model=slow, load_s=1.0))
    for number in (2, 3):
        stage.host.end(WorkerExit(signal="SIGKILL"))
        await stage.until(lambda number=number: len(stage.hosts) == number and hasattr(stage.host, "_on_event"))
        warm_up = LoadProgress(phase="warm_up", done=0, total=1, unit="steps")
        stage.host.say(Hello(pid=number), Progress(progress=warm_up), protocol.Loaded(model=found, load_s=1.0))
    stage.replica.submit(request())
    stage.pass_s(280)
    assert not stage.host.killed
    stage.pass_s(30)
    assert stage.host.killed


async def test_lines_of_output_are_no_steps() -> None:
    stage = await Stage().ready()
    stage.replica.submit(request())
    for _ in range(61):
        stage.pass_s(1)
        stage.host.say(LogLine(level=20, logger="native", message="still spinning"))
    assert stage.hosts[0].killed


async def test_a_stopped_engine_kills_no_healthy_worker() -> None:
    stage = await Stage().ready()
    stage.replica.submit(request())
    stage.pass_s(58)
    stage.now += 3600.0
    stage.replica.check(stage.now)
    assert not stage.host.killed


async def test_hang_s_0_lets_a_worker_be_silent_for_ever() -> None:
    stage = await Stage(hang_s=0.0).ready()
    stage.replica.submit(request())
    stage.pass_s(10_000)
    assert not stage.host.killed


@pytest.mark.parametrize(("phase", "patience"), [("weights", 300), ("kernels", 1800), ("warm_up", 600)])
async def test_a_load_that_stands_still_fails_after_the_patience_of_its_phase(phase, patience) -> None:
    stage = await Stage().started()
    stage.host.say(Hello(pid=1), Progress(progress=LoadProgress(phase=phase, done=0, total=2)))
    stage.pass_s(patience)
    assert not stage.host.killed
    stage.pass_s(1)
    assert stage.host.killed
    assert stage.replica.state == "failed"


async def test_a_process_that_never_says_hello_is_hung() -> None:
    stage = await Stage().started()
    stage.pass_s(301)
    assert stage.host.killed
    assert "while it started" in stage.owner.lost[0][2].message


async def test_no_more_requests_go_to_a_worker_than_its_memory_was_found_to_allow() -> None:
    stage = await Stage().ready()
    assert stage.replica.places(8) == 8
    stage.host.say(protocol.StepBatch(outputs=[], stats=BackendStats(prompts_limit=3)))
    assert (stage.replica.places(8), stage.replica.places(2)) == (3, 2)
    await stage.die()
    assert stage.replica.places(8) == 8


# -- dying --------------------------------------------------------------------------------------------------------


async def test_a_worker_that_dies_five_times_in_a_row_is_left_dead_with_the_reason() -> None:
    stage = await Stage().ready()
    for death in range(1, 5):
        await stage.die()
        assert (stage.replica.state, stage.reading().deaths_in_a_row) == ("ready", death)
    await stage.die()
    reading = stage.reading()
    assert (reading.state, reading.restarts, len(stage.hosts)) == ("failed", 4, 5)
    assert reading.last_error is not None
    assert reading.last_error.message == (
        "worker w0 crashed 5 times in a row; not restarted. "
        "Last error: worker w0 was killed by SIGKILL (probably out of memory): two"
    )
    assert reading.log_tail == ("one", "two")
    assert stage.owner.lost[-1][0] == "failed"


async def test_a_worker_whose_machine_is_away_is_started_when_that_is_back() -> None:
    refusal = NodeGone("w0 cannot run on left")
    stage = await Stage().ready()
    stage.refusal = refusal
    stage.host.end(WorkerExit(signal="SIGKILL"))
    await stage.until(lambda: len(stage.hosts) > 20)
    assert (stage.replica.state, stage.reading().deaths_in_a_row) in {("starting", 1), ("restarting", 1)}
    assert stage.reading().last_error == refusal.info
    stage.refusal = None
    await stage.until(lambda: hasattr(stage.host, "_on_event"))
    stage.host.load()
    assert (stage.replica.state, stage.reading().deaths_in_a_row, stage.replica.restarts) == ("ready", 1, 1)


async def test_stopping_a_worker_does_not_wait_for_a_start_that_waits_for_its_machine() -> None:
    class WaitingHost(PlayedHost):
        async def start(self, on_event: Callable[[Event], None], on_exit: Callable[[WorkerExit], None]) -> None:
            """It waits until it is killed."""
            while not self.killed:  # noqa: ASYNC110 - there is nothing else to wait for
                await asyncio.sleep(0)
            raise NodeGone("w0 cannot run on left")

        def kill(self) -> None:
            """It has no process yet."""
            self.killed = True

    stage = Stage()
    stage.replica._new_host = lambda worker_id, spec: WaitingHost()
    stage.replica.start()
    await asyncio.sleep(0)
    await stage.replica.stop()
    assert stage.replica.state == "stopping"


async def test_a_worker_that_cannot_start_five_times_in_a_row_is_left_dead() -> None:
    stage = await Stage().ready()
    stage.refusal = WorkerFailed("no interpreter")
    stage.host.end(WorkerExit(signal="SIGKILL"))
    await stage.until(lambda: stage.replica.state == "failed")
    assert len(stage.hosts) == 5


async def test_a_worker_left_dead_comes_back_when_an_operator_wants_it() -> None:
    stage = await Stage(max_deaths=1).ready()
    await stage.die()
    stage.replica.restart()
    await stage.until(lambda: len(stage.hosts) == 2 and hasattr(stage.host, "_on_event"))
    stage.host.load()
    assert (stage.replica.state, stage.reading().deaths_in_a_row) == ("ready", 0)


async def test_restarting_a_worker_at_work_gives_its_requests_back_and_blames_none() -> None:
    stage = await Stage().ready()
    asked = request()
    stage.replica.submit(asked)
    stage.host.take()
    stage.replica.restart()
    assert stage.hosts[0].killed
    assert [lost for _, lost, _ in stage.owner.lost] == [[asked]]
    assert asked.deaths == 0
    await stage.until(lambda: hasattr(stage.host, "_on_event"))
    stage.host.load()
    assert stage.replica.state == "ready"


async def test_a_worker_that_waits_to_be_started_again_says_how_long() -> None:
    stage = await Stage().ready()
    stage.replica._deaths = CrashCounter(Backoff(20.0, 30.0), 5, restarts=1)
    stage.host.end(WorkerExit(signal="SIGSEGV"))
    reading = stage.reading()
    assert (reading.state, reading.deaths_in_a_row) == ("restarting", 1)
    assert reading.retry_in_s == 20
    assert reading.last_error is not None
    assert reading.last_error.details["signal"] == "SIGSEGV"
    await stage.replica.stop()


# -- who is to blame ----------------------------------------------------------------------------------------------


async def test_a_death_counts_for_requests_the_worker_had_begun_and_for_no_others() -> None:
    stage = await Stage().ready()
    begun, on_its_way = request(), request()
    stage.replica.submit(begun)
    stage.host.take()
    stage.replica.submit(on_its_way)
    await stage.die()
    assert (begun.deaths, on_its_way.deaths) == (1, 0)


async def test_a_request_that_came_further_is_not_to_blame() -> None:
    stage = await Stage().ready()
    stuck, moving = request(), request()
    for deaths in (1, 2):
        stage.replica.submit(stuck)
        stage.replica.submit(moving)
        stage.host.take()
        stage.host.step(protocol.RequestOutput(request_id=moving.wire_id, token_ids=[5]))
        await stage.die()
        assert (stuck.deaths, moving.deaths) == (deaths, 0)
    assert stuck.is_quarantined
    stage.replica.submit(stuck)
    stage.host.take()
    stage.host.step(protocol.RequestOutput(request_id=stuck.wire_id, token_ids=[5]))
    await stage.die()
    assert not stuck.is_quarantined
