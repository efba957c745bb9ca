"""The actor that runs a worker on a node, without Ray: it is a plain class."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from engine.cluster.models import place_of
from engine.cluster.node import WorkerActor
from engine.cluster.wire import dial, new_token
from engine.config import ModelSpec
from engine.worker_process.hosts import ChannelHost, WorkerExit
from engine.worker_process.protocol import Event, Loaded, LoadFailed, Progress, Shutdown
from tests.fakes.backend import expected_text
from tests.fakes.hub import FakeRepo, serve_hub
from tests.fakes.model import fake_spec, write_fake_model
from tests.fakes.worker import Probe, load_command, submit_command

pytestmark = pytest.mark.slow
COMMIT = "c" * 40
WEIGHTS = (2).to_bytes(8, "little") + b"{}"


@pytest.fixture(autouse=True)
def fake_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the actors' processes compute with."""
    monkeypatch.setenv("ERICLLM_BACKEND_FACTORY", "tests.fakes.backend_factories:make")


class ActorHost(ChannelHost):
    """The engine's end of an actor in this process."""

    def __init__(self, spec: ModelSpec, path: str | None = None) -> None:
        super().__init__("w0")
        self.token = new_token()
        place = place_of(spec)
        place = msgspec.structs.replace(place, path=path or place.path)
        self.actor = WorkerActor("w0", node="box", token=self.token, gpus=(), model=place)
        self.path = ""

    async def start(self, on_event: Callable[[Event], None], on_exit: Callable[[WorkerExit], None]) -> None:
        """Connect to it."""
        self._listen(on_event, on_exit)
        opened = self.actor.open("127.0.0.1")
        self.path = opened.path
        await self._connect(await asyncio.to_thread(dial, "127.0.0.1", opened.port, self.token, 10.0))

    def lose_connection(self) -> None:
        """As when the engine dies."""
        assert self._channel is not None
        self._channel.abort()

    async def stop_worker(self) -> None:
        """Have it leave."""
        self.send(Shutdown())
        await self.exit()

    async def exit(self) -> WorkerExit:
        """How its worker ended."""
        while (output := await asyncio.to_thread(self.actor.output)).exit is None:
            pass
        return output.exit


async def test_it_runs_the_worker_that_a_local_host_would(tmp_path: Path) -> None:
    host = ActorHost(fake_spec(tmp_path))
    probe = await Probe(host).start()
    await probe.load(tmp_path)
    probe.send(submit_command("r", "hello", max_tokens=20))
    assert (await probe.answer("r"))[0] == expected_text(b"hello", 20)
    host.actor.kill()
    assert (await host.exit()).signal == "SIGKILL"


async def test_a_worker_leaves_when_the_engine_closes_its_end(tmp_path: Path) -> None:
    host = ActorHost(fake_spec(tmp_path))
    await Probe(host).start()
    host.lose_connection()
    assert (await host.exit()).code == 0


async def test_a_node_without_the_model_fails_the_load_in_one_sentence(tmp_path: Path) -> None:
    host = ActorHost(fake_spec(tmp_path), path="/not/here")
    probe = Probe(host)
    await host.start(probe._on_event, probe._on_exit)
    failed = await probe.wait_for(LoadFailed)
    assert failed.error.message.startswith("box has no folder /not/here: copy it there")
    assert (await host.exit()).code == 1


async def test_a_model_of_the_hub_is_fetched_to_the_node_with_progress_and_loaded_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = write_fake_model(tmp_path / "engine" / "models--org--name" / "snapshots" / COMMIT)
    (ours / "model.safetensors").write_bytes(WEIGHTS)
    spec = fake_spec(ours)
    with serve_hub() as hub:
        hub.repos["org/name"] = FakeRepo({file.name: file.read_bytes() for file in ours.iterdir()})
        for name, value in (("HF_ENDPOINT", hub.url), ("HF_HUB_CACHE", str(tmp_path / "node"))):
            monkeypatch.setenv(name, value)
        host = ActorHost(spec, path=str(Path("/not/here/models--org--name/snapshots") / COMMIT))
        probe = await Probe(host).start()
        there = Path(host.path)
        probe.send(load_command(there))
        await probe.wait_for(Loaded)
    assert there.is_relative_to(tmp_path / "node")
    assert (there / "model.safetensors").read_bytes() == WEIGHTS
    assert any(event.progress.phase == "download" for event in probe.events if isinstance(event, Progress))
    await host.stop_worker()
