"""Workers that are played on the loop: they load, answer and die when chance has it. No thread, no process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from random import Random

import msgspec

from engine.backends.base import BackendRequest, BackendStats, LoadedModel, LoadProgress
from engine.config import AdapterSpec, ModelSpec
from engine.errors import InvalidRequest, UnsupportedModel, WorkerFailed
from engine.snapshot import DeviceReading
from engine.worker_process import protocol
from engine.worker_process.hosts import WorkerExit
from tests.fakes.engines import StillProbe

KEPT_FREE_BYTES = 600 * 2**20
WORKER_BYTES = 300 * 2**20
"""A little more than placement keeps free of 16 GiB, and than it gives a worker with the fake model."""


def answer_of(prompt_ids: Sequence[int], count: int, adapter: str = "") -> list[int]:
    """The tokens of an answer: they depend on the prompt and the version of the adapter alone, so that none can be
    lost, said twice or computed with another version unseen."""
    begin = sum(prompt_ids) * 31 + sum(adapter.encode()) * 13
    return [(begin + index * 7) % 256 for index in range(count)]


class Machine(StillProbe):
    """The workers that there are, and the memory that they take. room: how many of them fit.

    load_s: seconds that a load takes, as chance has it if None.  broken: names of models whose loads fail.
    flaky: workers also fail to start, die as they load, and refuse adapters.
    stuck: what does not come to its end as long as it is in here: loads of these names, adapters of these names.
    wrongs: what workers were asked for that no engine may ask.
    """

    def __init__(self, random: Random, room: int) -> None:
        super().__init__()
        self.random = random
        self.room = room
        self.step_s = random.choice((0.01, 0.2, 2.0))
        self.load_s: float | None = None
        self.flaky = False
        self.broken: set[str] = set()
        self.stuck: set[str] = set()
        self.wrongs: list[str] = []
        self.hosts: list[ScriptedHost] = []

    def read(self, pids: Collection[int] = ()) -> Sequence[DeviceReading]:
        """The CPU, with the memory that loaded workers leave."""
        free = KEPT_FREE_BYTES + max(0, self.room - len(self.alive)) * WORKER_BYTES
        return [msgspec.structs.replace(self.readings[0], free_bytes=free)]

    def fails(self, share: float) -> bool:
        """Whether something goes wrong that does so in this share of all cases, where things go wrong at all."""
        return self.flaky and self.random.random() < share

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
        self._submitted: dict[str, BackendRequest] = {}
        self._requests: dict[str, tuple[BackendRequest, int]] = {}
        self._adapters: dict[str, bool] = {}
        self._leaving: set[str] = set()
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
        if self._machine.fails(0.04):
            raise WorkerFailed(f"worker {self._id} could not be started", worker=self._id)
        self._on_event, self._on_exit = on_event, on_exit
        self.alive = True
        self._soon(self._on_event, protocol.Hello(pid=1))

    def send(self, command: protocol.Command) -> None:
        """Do it, some time."""
        if not self.alive:
            return
        match command:
            case protocol.Load(adapters=adapters):
                self._soon(self._progress, adapters)
            case protocol.Submit(request=request):
                self._submitted[request.id] = request
                self._soon(self._take, request.id)
            case protocol.Cancel(request_id=request_id):
                self._submitted.pop(request_id, None)
                self._requests.pop(request_id, None)
            case protocol.Attach(adapter=adapter):
                self._attach(adapter)
            case protocol.Detach(key=key):
                self._leaving.add(key)
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
            self._submitted.clear()
            self._requests.clear()
            self._over.set()
            self._on_exit(how)

    def _attach(self, adapter: AdapterSpec) -> None:
        """Commands are obeyed in order: what is submitted from now on finds it."""
        refused = self._machine.fails(0.2)
        self._leaving.discard(adapter.key)
        self._adapters[adapter.key] = refused
        error = InvalidRequest("no").info if refused else None
        self._soon(self._attached, adapter.name, protocol.Attached(key=adapter.key, error=error))

    def _attached(self, name: str, answer: protocol.Attached) -> None:
        if name in self._machine.stuck:
            self._soon(self._attached, name, answer)
        else:
            self._on_event(answer)

    def _progress(self, adapters: Sequence[AdapterSpec]) -> None:
        self._on_event(protocol.Progress(progress=LoadProgress(phase="weights", done=1, total=2)))
        if (load_s := self._machine.load_s) is None:
            self._soon(self._load, adapters)
        else:
            asyncio.get_running_loop().call_later(load_s, self._if_alive, self._load, adapters)

    def _load(self, adapters: Sequence[AdapterSpec]) -> None:
        if self.spec.name in self._machine.stuck:
            asyncio.get_running_loop().call_later(0.5, self._if_alive, self._load, adapters)
        elif self.spec.name in self._machine.broken:
            self._on_event(protocol.LoadFailed(error=UnsupportedModel("it is broken").info))
        elif self._machine.fails(0.06):
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
            for adapter in adapters:
                if adapter.key not in self._leaving:  # detached meanwhile
                    self._attach(adapter)

    def _take(self, request_id: str) -> None:
        request = self._submitted.pop(request_id, None)
        if request is None:
            return
        self._on_event(protocol.RequestStarted(request_id=request.id))
        assert self._model is not None
        most = request.params.max_tokens or 0
        known = len(request.prompt_ids) + len(request.generated)
        if len(request.generated) >= most or known >= self._model.max_model_len:
            self._machine.wrongs.append(f"{request.id} has {known} tokens: {most}, {self._model.max_model_len}")
        if self._adapters.get(request.adapter, bool(request.adapter)):
            if request.adapter not in self._adapters:
                self._machine.wrongs.append(f"{request.id} wants {request.adapter!r} of {list(self._adapters)}")
            failed = protocol.RequestOutput(
                request_id=request.id, finish="error", error=WorkerFailed("the adapter could not be attached").info
            )
            self._on_event(protocol.StepBatch(outputs=[failed], stats=BackendStats(), step_s=0.0))
            return
        self._requests[request.id] = (request, len(request.generated))
        if self._stepping is None:
            self._stepping = asyncio.get_running_loop().call_later(self._machine.step_s, self._if_alive, self._step)

    def _step(self) -> None:
        self._stepping = None
        outputs = []
        for request_id, (request, done) in list(self._requests.items()):
            most = request.params.max_tokens or 0
            token = answer_of(request.prompt_ids, done + 1, request.adapter)[-1]
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
        at_work = [*self._submitted.values(), *(request for request, _ in self._requests.values())]
        for key in self._leaving - {request.adapter for request in at_work}:
            self._adapters.pop(key, None)
            self._leaving.discard(key)
        if self._requests and self.alive:
            self._stepping = asyncio.get_running_loop().call_later(self._machine.step_s, self._if_alive, self._step)
