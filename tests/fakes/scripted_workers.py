"""Workers that are played on the loop: they load, answer and die when chance has it. No thread, no process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from random import Random

import msgspec

from engine.backends.base import BackendRequest, BackendStats, LoadedModel, LoadProgress
from engine.config import ModelSpec
from engine.errors import InvalidRequest, UnsupportedModel, WorkerFailed
from engine.snapshot import DeviceReading
from engine.worker import protocol
from engine.worker.hosts import WorkerExit
from tests.fakes.engines import StillProbe

KEPT_FREE_BYTES = 600 * 2**20
WORKER_BYTES = 300 * 2**20
"""A little more than placement keeps free of 16 GiB, and than it gives a worker with the fake model."""


def answer_of(prompt_ids: Sequence[int], count: int) -> list[int]:
    """The tokens of an answer: they depend on the prompt alone, so that none can be lost or said twice unseen."""
    return [(sum(prompt_ids) * 31 + index * 7) % 256 for index in range(count)]


class Machine(StillProbe):
    """The workers that there are, and the memory that they take. room: how many of them fit.

    broken: names of models whose loads fail.
    """

    def __init__(self, random: Random, room: int) -> None:
        super().__init__()
        self.random = random
        self.room = room
        self.step_s = random.choice((0.01, 0.01, 2.0))
        self.broken: set[str] = set()
        self.hosts: list[ScriptedHost] = []

    def read(self, pids: Collection[int] = ()) -> Sequence[DeviceReading]:
        """The CPU, with the memory that loaded workers leave."""
        free = KEPT_FREE_BYTES + max(0, self.room - len(self.alive)) * WORKER_BYTES
        return [msgspec.structs.replace(self.readings[0], free_bytes=free)]

    @property
    def alive(self) -> list[ScriptedHost]:
        """Workers that have not ended."""
        return [host for host in self.hosts if host.alive]

    def new_host(self, worker_id: str, spec: ModelSpec) -> ScriptedHost:
        """Engine's new_host."""
        host = ScriptedHost(self, worker_id, spec)
        self.hosts.append(host)
        return host


class ScriptedHost:
    """WorkerHost."""

    def __init__(self, machine: Machine, worker_id: str, spec: ModelSpec) -> None:
        self.pid: int | None = None
        self.alive = False
        self.spec = spec
        self._machine = machine
        self._id = worker_id
        self._requests: dict[str, tuple[BackendRequest, int]] = {}
        self._over = asyncio.Event()
        self._model: LoadedModel | None = None
        self._stepping: asyncio.TimerHandle | None = None

    def _soon(self, call: Callable[..., object], *args: object) -> None:
        delay = self._machine.random.choice((0.0, 0.001, 0.02, 0.3))
        asyncio.get_running_loop().call_later(delay, self._if_alive, call, *args)

    def _if_alive(self, call: Callable[..., object], *args: object) -> None:
        if self.alive:
            call(*args)

    async def start(self, on_event: Callable[[protocol.Event], None], on_exit: Callable[[WorkerExit], None]) -> None:
        """It runs, or cannot be started."""
        await asyncio.sleep(self._machine.random.choice((0.0, 0.01)))
        if self._machine.random.random() < 0.02:
            raise WorkerFailed(f"worker {self._id} could not be started", worker=self._id)
        self._on_event, self._on_exit = on_event, on_exit
        self.alive = True
        self._soon(self._on_event, protocol.Hello(pid=1))

    def send(self, command: protocol.Command) -> None:
        """Do it, some time."""
        if not self.alive:
            return
        match command:
            case protocol.Load():
                self._soon(self._progress)
            case protocol.Submit(request=request):
                self._soon(self._take, request)
            case protocol.Cancel(request_id=request_id):
                self._requests.pop(request_id, None)
            case protocol.Attach(adapter=adapter):
                refused = InvalidRequest("no").info if self._machine.random.random() < 0.2 else None
                self._soon(self._on_event, protocol.Attached(key=adapter.key, error=refused))
            case protocol.CancelLoad() | protocol.Shutdown():
                self._soon(self.die, WorkerExit(code=0))
            case _:
                pass

    async def stop(self, timeout_s: float) -> None:
        """It ends."""
        if self.alive:
            self._soon(self.die, WorkerExit(code=0))
            await self._over.wait()

    def kill(self) -> None:
        """It ends at once."""
        asyncio.get_running_loop().call_soon(self.die, WorkerExit(signal="SIGKILL"))

    def die(self, how: WorkerExit) -> None:
        """Its end, told once."""
        if self.alive:
            self.alive = False
            self._requests.clear()
            self._over.set()
            self._on_exit(how)

    def _progress(self) -> None:
        self._on_event(protocol.Progress(progress=LoadProgress(phase="weights", done=1, total=2)))
        self._soon(self._load)

    def _load(self) -> None:
        chance = self._machine.random.random()
        if self.spec.name in self._machine.broken:
            self._on_event(protocol.LoadFailed(error=UnsupportedModel("it is broken").info))
        elif chance < 0.03:
            self.die(WorkerExit(code=1))
        else:
            self._model = LoadedModel(
                backend="fake",
                architecture="FakeForCausalLM",
                dtype="float32",
                devices=("cpu",),
                vocab_size=257,
                max_model_len=self.spec.max_model_len or 4096,
                kv_tokens=4096,
                page_tokens=16,
                weights_bytes=1,
                kv_bytes=1,
                parameters=1,
                adapters_per_request=True,
            )
            self._on_event(protocol.Loaded(model=self._model, load_s=0.1))

    def _take(self, request: BackendRequest) -> None:
        self._on_event(protocol.Taken(request_id=request.id))
        self._requests[request.id] = (request, len(request.generated))
        if self._stepping is None:
            self._stepping = asyncio.get_running_loop().call_later(self._machine.step_s, self._if_alive, self._step)

    def _step(self) -> None:
        self._stepping = None
        outputs = []
        for request_id, (request, done) in list(self._requests.items()):
            most = request.params.max_tokens or 0
            token = answer_of(request.prompt_ids, done + 1)[-1]
            ended = done + 1 >= most
            outputs.append(
                protocol.RequestOutput(
                    request_id=request_id,
                    token_ids=[token],
                    text=chr(97 + token % 26),
                    finish="length" if ended else None,
                    cached_tokens=0 if done == len(request.generated) else None,
                )
            )
            if ended:
                del self._requests[request_id]
            else:
                self._requests[request_id] = (request, done + 1)
        self._on_event(protocol.StepBatch(outputs=outputs, stats=BackendStats(), step_s=self._machine.step_s))
        if self._requests and self.alive:
            self._stepping = asyncio.get_running_loop().call_later(self._machine.step_s, self._if_alive, self._step)
