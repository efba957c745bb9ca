"""A console on an engine elsewhere: a real headless instance, asked over HTTP for all that its own console asks."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from console.link.chat import ChatDelta, ChatMessage
from console.link.protocol import EngineLink
from console.link.remote.http import NotAllowed, OutOfReach, address_of
from console.link.remote.link import RemoteLink
from console.link.rpc import as_link
from console.link.status import link_status
from console.runtime.loops import LoopThread
from console.settings.load_options import LoadOptions
from engine.config import SamplingParams
from engine.errors import EngineBusy, EngineError, InvalidRequest, ModelNotFound
from tests.fakes.held import Hold
from tests.fakes.ports import free_port
from tests.fakes.tiny_models import make_tiny_model
from tests.integration.headless import Headless

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
HELLO = [ChatMessage(role="user", content="hello")]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_tiny_model(folder / "tiny")
    make_tiny_model(folder / "other")
    return folder


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread("remote")
    yield thread
    thread.stop()


class Instance:
    """A headless server on one port, that can be started again."""

    def __init__(self, models: Path, home: Path, *flags: str) -> None:
        self.port = free_port()
        self._flags = ("--headless", "--model", str(models / "tiny"), "--models-dir", str(models), *flags)
        self._home = home
        self.server: Headless | None = None

    def start(self) -> None:
        self.server = Headless(*self._flags, "--port", str(self.port), home=self._home)
        self.server.wait_for("is ready")

    def kill(self) -> None:
        assert self.server is not None
        self.server.process.kill()
        self.server.process.wait()


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hold:
    """Holds up the workers of the instance."""
    return Hold(monkeypatch, tmp_path, "make_torch")


@pytest.fixture
def instance(tmp_path: Path, models: Path, hold: Hold) -> Iterator[Instance]:
    made = Instance(models, tmp_path)
    made.start()
    yield made
    made.kill()


@pytest.fixture
def remote(instance: Instance, loop: LoopThread) -> Iterator[EngineLink]:
    link = RemoteLink(address_of(f"127.0.0.1:{instance.port}"), loop=loop, hz=10)
    yield as_link(link)
    link.close()


async def until(met: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not met():  # noqa: ASYNC110 - what is waited for comes from another process
            await asyncio.sleep(0.02)


async def test_all_that_a_console_asks_for_can_be_asked_from_elsewhere(remote: EngineLink) -> None:
    await until(lambda: link_status(remote).reach == "live")
    assert remote.snapshot().status.state == "ready"
    assert remote.api_status().running
    await until(lambda: any("ready" in line.message for line in remote.logs(0)[1]))
    assert {"tiny", "other"} <= {entry.name for entry in await remote.list_models()}

    deltas = [delta async for delta in _chat(remote, 8)]
    assert deltas[-1].finish == "length"
    assert deltas[-1].output_tokens == 8
    assert deltas[-1].ttft_s is not None
    assert deltas[-1].prompt_tokens > 0
    counted = await remote.conversation.count_tokens(HELLO, "and then?")
    assert counted.draft > 0

    await remote.reconfigure(max_prompts=3)
    await until(lambda: remote.snapshot().max_prompts == 3)
    found = await remote.models.estimate("other", LoadOptions(num_workers=1))
    assert found.can_load
    await remote.models.load("other")
    await until(lambda: remote.snapshot().status.spec is not None and remote.snapshot().status.spec.name == "other")
    remote.settings.rows()
    await until(lambda: any(row.name == "num_workers" for row in remote.settings.rows()))
    remote.api.report()
    await until(lambda: remote.api.report().requests > 0)
    with pytest.raises(EngineBusy, match="This console uses the API"):
        await remote.stop_api()
    with pytest.raises(InvalidRequest, match="none of the models folders"):
        await remote.models.load("/etc")
    with pytest.raises(ModelNotFound):
        await remote.unload("nobody")
    await remote.unload()
    await until(lambda: remote.snapshot().status.state == "unloaded")


async def test_a_chat_that_is_closed_and_a_request_that_is_cancelled_end_over_there(
    remote: EngineLink, hold: Hold
) -> None:
    await until(lambda: link_status(remote).reach == "live")
    hold.begin()
    answer = _chat(remote, 400)
    await anext(answer)
    await until(lambda: remote.snapshot().running == 1)
    await answer.aclose()
    await until(lambda: remote.snapshot().running == 0)

    async def listen() -> None:
        async for _ in _chat(remote, 400):
            pass

    reading = asyncio.create_task(listen())
    await until(lambda: remote.snapshot().running == 1)
    live = next(row for row in remote.snapshot().requests if row.state != "finished")
    await remote.cancel_request(live.id)
    with pytest.raises(EngineError, match="cancelled"):
        await reading


async def test_a_lost_connection_is_told_and_comes_back_by_itself(instance: Instance, remote: EngineLink) -> None:
    await until(lambda: link_status(remote).reach == "live")
    instance.kill()
    await until(lambda: link_status(remote).reach == "lost")
    last = remote.snapshot()
    assert last.status.state == "ready"
    with pytest.raises(OutOfReach, match="is lost"):
        await remote.reconfigure(num_workers=2)
    instance.start()
    await until(lambda: link_status(remote).reach == "live")
    await until(lambda: remote.snapshot().at > last.at)
    await remote.reconfigure(max_prompts=5)


async def test_what_the_key_does_not_allow_is_one_sentence(tmp_path: Path, models: Path, loop: LoopThread) -> None:
    made = Instance(models, tmp_path, "--api-key", "sesame")
    made.start()
    link = RemoteLink(address_of(f"127.0.0.1:{made.port}"), loop=loop, hz=10)
    allowed = RemoteLink(address_of(f"127.0.0.1:{made.port}"), loop=loop, api_key="sesame", hz=10)
    try:
        await until(lambda: link.standing().reach == "refused")
        assert link.standing().reason == "This server needs an API key: send it as Authorization: Bearer KEY"
        await until(lambda: allowed.standing().reach == "live")
        key = await as_link(allowed).api.make_key("watcher", ("watch",))
        watching = RemoteLink(address_of(f"127.0.0.1:{made.port}"), loop=loop, api_key=key.key, hz=10)
        await until(lambda: watching.standing().reach == "live")
        with pytest.raises(NotAllowed, match="This console is read-only"):
            await as_link(watching).reconfigure(num_workers=2)
        watching.close()
    finally:
        link.close()
        allowed.close()
        made.kill()


def _chat(link: EngineLink, tokens: int) -> AsyncIterator[ChatDelta]:
    return link.conversation.chat(HELLO, SamplingParams(max_tokens=tokens, ignore_eos=True))


def test_a_link_elsewhere_loads_no_terminal_toolkit() -> None:
    code = "import sys, console.link.remote.link; sys.exit('textual' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_settings_are_saved_from_elsewhere_but_for_those_about_files(remote: EngineLink, tmp_path: Path) -> None:
    await until(lambda: link_status(remote).reach == "live")
    row = await remote.settings.save("num_workers", "2")
    assert row.saved == "2"
    for name in ("models_dir", "model", "lora", "record"):
        with pytest.raises(InvalidRequest, match="change it there"):
            await remote.settings.save(name, "/")
