"""Requests that come while a model is replaced or asleep wait for it; those that give up leave no trace."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.snapshot import DeviceReading
from tests.api.harness import Served, serving, until
from tests.api.operators import named_spec
from tests.api.test_api_disconnects import RawClient
from tests.fakes.backend import FakeBackend, Gate, saying
from tests.fakes.engines import Backends, StillProbe

_KEPT_FREE_BYTES = 600 * 2**20
_WORKER_BYTES = 300 * 2**20
"""A little more than placement keeps free, and than it gives a worker with the fake model."""


class OneAtATime(StillProbe):
    """A machine with room for one fake model; `engine` is looked at to see whether there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.engine: Engine | None = None

    def read(self, pids: Collection[int] = ()) -> Sequence[DeviceReading]:
        """The CPU with what is left of it."""
        taken = self.engine is not None and bool(self.engine.snapshot().workers)
        free = _KEPT_FREE_BYTES + (0 if taken else _WORKER_BYTES)
        return [msgspec.structs.replace(self.readings[0], free_bytes=free)]


class Swap:
    """The model `old` serves, and `new` is to replace it: its load waits at a gate."""

    def __init__(self, api: Served, folder: Path, gate: Gate) -> None:
        self.api = api
        self.gate = gate
        self._folder = folder
        self.loading: asyncio.Task[object] | None = None

    async def begin(self) -> None:
        """Load `new`; returns once `old` is gone and `new` on its way."""
        self.loading = asyncio.create_task(self.api.engine.load(named_spec(self._folder, "new")))
        await until(lambda: [model.name for model in self.api.engine.publish().models] == ["new"])

    async def complete(self) -> None:
        """Let the load end."""
        self.gate.open()
        assert self.loading is not None
        await self.loading

    async def ask(self, path: str = "/generate", **fields: object) -> str:
        """The text of an answer to ">"; its prompt left out."""
        answer = await self.api.post(path, prompt=">", max_tokens=2, **fields)
        return str(answer["text"]).removeprefix(">")


@asynccontextmanager
async def swapping(folder: Path, config: EngineConfig) -> AsyncIterator[Swap]:
    """A machine with room for one of two models: `old` says o, `new` says n."""
    probe, gate = OneAtATime(), Gate()
    async with serving(
        folder,
        FakeBackend(reply=saying("o")),
        spec=named_spec(folder, "old"),
        others=Backends(FakeBackend(reply=saying("n"), load_gate=gate)),
        probe=probe,
        config=config,
    ) as api:
        probe.engine = api.engine
        yield Swap(api, folder, gate)


@pytest.fixture
async def swap(tmp_path: Path) -> AsyncIterator[Swap]:
    """The same with plain settings."""
    async with swapping(tmp_path, EngineConfig(worker_host="thread")) as each:
        yield each


def held(api: Served) -> int:
    """Requests that wait for a model."""
    return api.engine._models.num_waiting


async def test_a_request_without_a_name_waits_for_the_model_that_comes(swap: Swap) -> None:
    await swap.begin()
    asking = [asyncio.create_task(swap.ask()) for _ in range(3)]
    await until(lambda: held(swap.api) == 3)
    await swap.complete()
    assert await asyncio.gather(*asking) == ["nn"] * 3


async def test_a_request_for_the_model_that_comes_waits_for_it(swap: Swap) -> None:
    await swap.begin()
    asking = asyncio.create_task(swap.ask(model="new"))
    await until(lambda: held(swap.api) == 1)
    await swap.complete()
    assert await asking == "nn"


async def test_a_request_for_the_model_that_went_is_a_404_with_what_there_is(swap: Swap) -> None:
    await swap.begin()
    await swap.complete()
    error = await swap.api.refusal("/generate", status=404, prompt="x", model="old")
    assert error["message"].endswith("available: new")


async def test_what_waits_for_the_old_model_goes_to_the_new_one_tokenized_again(tmp_path: Path) -> None:
    async with swapping(tmp_path, EngineConfig(worker_host="thread", max_prompts=1)) as swap:
        api = swap.api
        pace = Gate()
        api.backend.gate = pace
        running = asyncio.create_task(swap.ask())
        await api.until_row(state="prefill")
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        waiting = asyncio.create_task(api.post("/v1/chat/completions", **chat))
        tied = asyncio.create_task(swap.ask(logit_bias={"65": 1.0}))
        named = asyncio.create_task(swap.ask(model="old"))
        ids = asyncio.create_task(api.post("/v1/completions", prompt=[62], max_tokens=2))
        await until(lambda: api.engine.publish().queued == 4)
        loading = asyncio.create_task(swap.begin())
        await until(lambda: {model.status.state for model in api.engine.publish().models} == {"draining", "loading"})
        pace.open()
        await loading
        assert await running == "oo"
        assert [await tied, await named] == ["oo", "oo"]
        assert (await ids)["choices"][0]["text"] == "oo"
        await swap.complete()
        assert (await waiting)["choices"][0]["message"]["content"] == "nn"


async def test_a_client_that_leaves_while_it_waits_for_a_model_frees_its_place(tmp_path: Path) -> None:
    async with swapping(tmp_path, EngineConfig(worker_host="thread", max_queue=1)) as swap:
        await swap.begin()
        leaving = await RawClient.post(swap.api.url, "/generate", {"prompt": ">"})
        await until(lambda: held(swap.api) == 1)
        error = await swap.api.refusal("/generate", status=429, prompt="x")
        assert error["code"] == "queue_full"
        leaving.leave()
        await until(lambda: held(swap.api) == 0)
        asking = asyncio.create_task(swap.ask())
        await until(lambda: held(swap.api) == 1)
        await swap.complete()
        assert await asking == "nn"


async def test_who_waits_for_a_model_is_told_when_the_server_stops(swap: Swap) -> None:
    await swap.begin()
    asking = asyncio.create_task(swap.api.refusal("/generate", status=503, prompt="x"))
    await until(lambda: held(swap.api) == 1)
    await swap.api.server.stop(drain_s=0.0)
    assert (await asking)["code"] == "engine_closed"
    assert held(swap.api) == 0
    await swap.complete()


async def test_who_waits_longer_than_requests_may_gets_a_504_with_the_number(tmp_path: Path) -> None:
    async with swapping(tmp_path, EngineConfig(worker_host="thread", timeout_s=0.2)) as swap:
        await swap.begin()
        error = await swap.api.refusal("/generate", status=504, prompt="x")
        assert error["code"] == "request_timeout"
        assert "0.2 s" in error["message"]
        await swap.complete()


async def test_a_model_that_loads_for_the_first_time_is_a_503_that_says_when_to_come_back(tmp_path: Path) -> None:
    backend = FakeBackend(load_gate=Gate())
    async with serving(tmp_path, backend, load=False) as api:
        loading = asyncio.create_task(api.engine.load(named_spec(tmp_path, "fake")))
        await until(lambda: api.engine.status.state == "loading")
        async with api.http.post("/generate", json={"prompt": "x"}) as response:
            assert response.status == 503
            assert int(response.headers["Retry-After"]) > 1
            assert "fake is still loading" in (await response.json())["error"]["message"]
        assert backend.load_gate is not None
        backend.load_gate.open()
        await loading


async def test_many_requests_for_a_sleeping_model_wake_it_once(tmp_path: Path) -> None:
    config = EngineConfig(worker_host="thread", idle_unload_s=0.01)
    woken = Backends(FakeBackend(reply=saying("w")), FakeBackend(reply=saying("again")))
    async with serving(tmp_path, config=config, others=woken) as api:
        await until(lambda: api.engine.status.state == "idle")
        await api.engine.reconfigure(idle_unload_s=600.0)
        texts = await asyncio.gather(*(api.post("/generate", prompt=">", max_tokens=2) for _ in range(5)))
        assert [answer["text"] for answer in texts] == [">ww"] * 5
        assert len(woken.made) == 1
