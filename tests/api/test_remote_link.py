"""RemoteLink over HTTP on a server that shows a fake: what goes in and what comes out is what the fake itself gives."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from console.api.requests.chat_body import ChatBody
from console.api.server import ApiServer, ApiSettings
from console.link.api import ApiStopping, Scope
from console.link.benches import BenchOrder
from console.link.chat import ChatMessage
from console.link.frames import Frame, FrameEvent, to_plain
from console.link.readonly import ReadOnly, ReadOnlyLink
from console.link.remote.chat import chat_body
from console.link.remote.frame_reader import Connection
from console.link.remote.http import NotAllowed, OutOfReach, address_of
from console.link.remote.link import Polled, RemoteLink
from console.link.rpc import CALLS, as_link
from console.link.status import CHAT
from console.link.tuning import TuneOrder
from console.runtime.loops import LoopThread
from console.settings.load_options import LoadOptions
from engine.config import EngineConfig, SamplingParams
from engine.engine import Engine
from engine.errors import InvalidRequest, ModelLoadFailed
from engine.requests.history import RequestText
from tests.api.operators import FolderOperator
from tests.fakes import bench_scenes, request_scenes, scenes
from tests.fakes.link import MODELS, FakeLink

pytestmark = pytest.mark.long

HI = [ChatMessage(role="user", content="hi")]
ARGUMENTS: dict[str, dict[str, Any]] = {
    "engine.reconfigure": {"num_workers": 3, "max_prompts": 5, "step_tokens": 256, "threads": 2, "idle_unload_s": 60},
    "engine.restart_worker": {"worker_id": "w0"},
    "engine.drain_worker": {"worker_id": "w0"},
    "engine.attach": {"name": "poet", "path": "poet"},
    "engine.detach": {"name": "poet"},
    "engine.cancel_request": {"request_id": "req-00000000"},
    "conversation.count_tokens": {"messages": HI, "draft": "and then?"},
    "models.load": {"model": "demo", "changes": LoadOptions(max_model_len=4096)},
    "models.download": {"model": "org/name"},
    "models.estimate": {"model": "demo", "changes": LoadOptions(cache_bits=8)},
    "models.remembered": {"model": "demo"},
    "models.forget": {"model": "demo"},
    "requests.detail": {"request_id": "req-00000000"},
    "api.listen": {"host": "127.0.0.1", "port": 8001},
    "api.make_key": {"name": "prometheus", "scopes": ("watch",)},
    "api.revoke_key": {"name": "grafana"},
    "api.switch_dialect": {"name": "generate", "on": False},
    "settings.save": {"name": "theme", "value": "ericllm-light"},
    "tuning.start": {"order": TuneOrder(minutes=2, slo_itl_s=0.05)},
    "benches.start": {"order": BenchOrder(bench="users", settings={"users": "1,2"})},
    "benches.result": {"number": 1},
    "benches.forget": {"number": 1},
}
"""What a call is made with; nothing where it is not here."""


def remembering() -> FakeLink:
    """A busy engine with results of benches."""
    link = FakeLink(scenes.busy())
    link.benches.results = bench_scenes.results()
    return link


class Served:
    """A fake behind a real server, and a link to it."""

    def __init__(self, folder: Path) -> None:
        self.fake = remembering()
        self.engine = Engine(EngineConfig(worker_host="thread"))
        admit = FolderOperator(folder, "demo").admit
        self.server = ApiServer(self.engine, ApiSettings(port=0), admit, lambda: self.fake)
        self.loop = LoopThread("remote")
        self.link: RemoteLink | None = None

    async def start(self) -> RemoteLink:
        await self.engine.start()
        await self.server.start()
        self.link = RemoteLink(address_of(self.server.status().url), loop=self.loop, hz=10)
        await until(lambda: self.standing == "live")
        return self.link

    @property
    def standing(self) -> str:
        assert self.link is not None
        return self.link.standing().reach

    async def close(self) -> None:
        if self.link is not None:
            self.link.close()
        self.loop.stop()
        await self.server.stop(drain_s=0.0)
        await self.engine.close(drain_s=0.0)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    made = Served(tmp_path)
    await made.start()
    yield made
    await made.close()


async def until(met: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not met():  # noqa: ASYNC110 - another thread does it
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("name", sorted(CALLS))
async def test_every_call_gives_elsewhere_what_it_gives_here(served: Served, tmp_path: Path, name: str) -> None:
    call, arguments = CALLS[name], ARGUMENTS.get(name, {})
    assert served.link is not None
    here = remembering()
    answer = call.on(as_link(served.link))(**arguments)
    expected = call.on(here)(**arguments)
    if not call.at_once:
        got, wanted = await answer, await expected
        assert _normal(got) == _normal(wanted)
        return
    await until(lambda: _normal(call.on(as_link(served.link))(**arguments)) == _normal(expected))


def _normal(value: Any) -> Any:
    """Lists and tuples are the same to a screen."""
    return [_normal(each) for each in value] if isinstance(value, list | tuple) else value


async def test_what_is_shown_is_what_there_is_and_follows_it(served: Served) -> None:
    assert served.link is not None
    link = served.link
    assert link.snapshot() == served.fake.current
    assert link.api_status() == served.fake.api_status()
    served.fake.log("a new line")
    served.fake.show(msgspec.structs.replace(scenes.failed(), log_total=len(served.fake.lines)))
    await until(lambda: link.snapshot() == served.fake.current)
    assert _normal(link.logs(0)) == _normal(served.fake.logs(0))


async def test_the_log_goes_on_over_a_start_of_the_instance(served: Served) -> None:
    assert served.link is not None
    link = served.link
    served.fake.show(msgspec.structs.replace(scenes.busy(), log_total=3))
    await until(lambda: link.snapshot().log_total == 3)
    served.fake.lines[:] = served.fake.lines[:1]
    served.fake.show(msgspec.structs.replace(scenes.busy(), log_total=1))
    await until(lambda: link.snapshot().log_total == 4)
    assert [line.message for line in link.logs(3)[1]] == [served.fake.lines[0].message]


async def test_why_a_command_failed_comes_back_as_its_own_error(served: Served) -> None:
    served.fake.failures["load"] = ModelLoadFailed("the weights are cut off")
    with pytest.raises(ModelLoadFailed, match="the weights are cut off"):
        await as_link(served.link).models.load("demo")  # type: ignore[arg-type]


async def test_a_command_that_takes_long_is_waited_for(served: Served) -> None:
    served.fake.hold("load")
    loading = asyncio.create_task(as_link(served.link).models.load("demo"))  # type: ignore[arg-type]
    await until(lambda: served.link is not None and served.link.snapshot().status.state == "loading")
    assert not loading.done()
    served.fake.release("load")
    await loading


async def test_a_server_that_stops_is_lost_and_found_again(served: Served) -> None:
    link = as_link(served.link)  # type: ignore[arg-type]
    port = served.server.status().port
    await served.server.stop(drain_s=0.0)
    await until(lambda: served.standing == "lost")
    with pytest.raises(OutOfReach, match="is lost"):
        await link.reconfigure(num_workers=2)
    with pytest.raises(OutOfReach):
        async for _ in link.conversation.chat(HI, SamplingParams()):
            pass
    assert link.snapshot() == served.fake.current
    again = ApiServer(served.engine, ApiSettings(port=port), FolderOperator(Path()).admit, lambda: served.fake)
    await again.start()
    await until(lambda: served.standing == "live")
    await link.reconfigure(num_workers=2)
    await again.stop(drain_s=0.0)


@pytest.mark.parametrize("scopes", [("watch",), ("use", "watch"), ("admin",)], ids="+".join)
async def test_a_link_knows_what_its_key_may_do_and_sends_nothing_else(
    tmp_path: Path, scopes: tuple[Scope, ...]
) -> None:
    engine, loop = Engine(EngineConfig(worker_host="thread")), LoopThread("remote")
    server = ApiServer(engine, ApiSettings(port=0), FolderOperator(tmp_path, "demo").admit, remembering)
    await engine.start()
    await server.start()
    key = (await server.make_key("k", scopes)).key
    link = RemoteLink(address_of(server.status().url), loop=loop, hz=10, api_key=key)
    try:
        await until(lambda: link.standing().reach == "live")
        status, is_admin = link.standing(), "admin" in scopes
        assert status.read_only == (not is_admin)
        assert {name for name, call in CALLS.items() if status.allows(name) and call.scope == "admin"} == (
            {name for name, call in CALLS.items() if call.scope == "admin"} if is_admin else set()
        )
        assert status.allows(CHAT) == (scopes != ("watch",))
        refused = server.report().failures
        for name in [] if is_admin else ["requests.detail", "models.estimate", "engine.diagnose"]:
            with pytest.raises(NotAllowed, match="needs scope admin"):
                await CALLS[name].on(as_link(link))(**ARGUMENTS.get(name, {}))
        if scopes == ("watch",):
            with pytest.raises(NotAllowed, match="read-only"):
                await anext(aiter(link.conversation.chat(HI, SamplingParams())))
        assert server.report().failures == refused
    finally:
        link.close()
        loop.stop()
        await server.stop(drain_s=0.0)
        await engine.close(drain_s=0.0)


async def test_read_only_forwards_what_changes_nothing_alone(served: Served) -> None:
    link = as_link(ReadOnlyLink(as_link(served.link)))  # type: ignore[arg-type]
    assert [entry.name for entry in await link.list_models()] == [entry.name for entry in MODELS]
    assert (await link.models.estimate("demo")) == served.fake.script["models.estimate"]
    for name, call in CALLS.items():
        if call.changes:
            with pytest.raises(ReadOnly, match="read-only"):
                await call.on(link)(**ARGUMENTS.get(name, {}))
    assert served.fake.commands == []


@pytest.mark.parametrize(
    ("status", "body", "error", "said"),
    [
        (200, b"<html>\n", OutOfReach, "ended the connection"),
        (404, b"not here", OutOfReach, "not EricLLM"),
        (302, b"over there", OutOfReach, "not EricLLM"),
        (401, b'{"error": {"message": "This server needs a key"}}', NotAllowed, "needs a key"),
        (200, b"data: {}\n\n", OutOfReach, "a different version"),
        (200, b"data: <html>\n\n", OutOfReach, "invalid JSON"),
    ],
)
async def test_what_answers_but_is_no_instance_of_ours_is_said(
    status: int, body: bytes, error: type[Exception], said: str
) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=status, body=body)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    loop = LoopThread("remote")
    link = RemoteLink(address_of(f"127.0.0.1:{site.port}"), loop=loop)
    await until(lambda: link.standing().reach in ("lost", "refused"))
    assert said in link.standing().reason
    with pytest.raises(error):
        await as_link(link).unload()
    link.close()
    loop.stop()
    await runner.cleanup()


# -- parts ----


class NoInstance:
    """Answers nothing, but once after `fails` attempts."""

    address = address_of("gpu1")

    def __init__(self, fails: int) -> None:
        self.fails = fails

    async def events(self, path: str, **_: Any) -> AsyncIterator[Any]:
        self.fails -= 1
        if self.fails == 0:
            yield to_plain(FrameEvent(full=to_plain(Frame(snapshot=scenes.busy()))))
        raise OutOfReach("gpu1 cannot be reached: connection refused")

    async def get(self, path: str, query: Any = None) -> Any:
        return {"result": [3, []]}


async def test_what_is_lost_is_tried_again_later_each_time_and_soon_after_it_was_there() -> None:
    waited: list[float] = []

    async def pause(seconds: float) -> None:
        waited.append(seconds)
        assert connection.standing().retry_in_s == seconds
        if len(waited) == 10:
            raise asyncio.CancelledError

    connection = Connection("gpu1:8000", 2.0, lambda: 0.0, pause)
    with pytest.raises(asyncio.CancelledError):
        await connection.follow(NoInstance(fails=8))  # type: ignore[arg-type]
    assert waited == [0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 0.5, 1.0, 2.0]
    assert connection.standing().reach == "lost"
    assert connection.frame.snapshot.status == scenes.busy().status


class StoppingInstance(NoInstance):
    """Its API is switched off: it says so once, then nothing answers."""

    async def events(self, path: str, **_: Any) -> AsyncIterator[Any]:
        self.fails -= 1
        if self.fails == 0:
            yield to_plain(FrameEvent(full=to_plain(Frame(snapshot=scenes.busy()))))
            raise ApiStopping("The API is being switched off, new requests are refused")
        raise OutOfReach("gpu1 cannot be reached: connection refused")


async def test_an_api_that_is_switched_off_there_is_the_reason_also_once_nothing_answers() -> None:
    reasons: list[str] = []

    async def pause(seconds: float) -> None:
        reasons.append(connection.standing().reason)
        if len(reasons) == 4:
            raise asyncio.CancelledError

    connection = Connection("gpu1:8000", 2.0, lambda: 0.0, pause)
    with pytest.raises(asyncio.CancelledError):
        await connection.follow(StoppingInstance(fails=2))  # type: ignore[arg-type]
    unreachable, off = "gpu1 cannot be reached: connection refused", "the API there is switched off"
    assert reasons == [unreachable, off, off, off]


@pytest.mark.parametrize(
    ("text", "url", "name"),
    [
        ("gpu1", "http://gpu1:8000", "gpu1:8000"),
        ("gpu1:9000", "http://gpu1:9000", "gpu1:9000"),
        ("http://gpu1:8000/", "http://gpu1:8000", "gpu1:8000"),
        ("https://llm.example.org/east/", "https://llm.example.org:443/east", "llm.example.org:443/east"),
        ("http://[::1]:8000", "http://[::1]:8000", "[::1]:8000"),
    ],
)
def test_an_address_is_what_people_write(text: str, url: str, name: str) -> None:
    address = address_of(text)
    assert (address.url, address.name) == (url, name)


@pytest.mark.parametrize(
    "text", ["", "ftp://x", "http://", "gpu1:port", "http://u:p@x", "http://x?y=1", "http://x:99999"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        address_of(text)


def test_every_sampling_parameter_is_sent_as_the_api_calls_it_or_refused() -> None:
    for name in SamplingParams().__struct_fields__:
        value = {"logit_bias": {5: 1.0}, "stop": ("x",), "banned_strings": ("y",), "stop_token_ids": (3,)}.get(name)
        default = getattr(SamplingParams(), name)
        if value is None:
            value = (1,) if isinstance(default, tuple) else (not default) if isinstance(default, bool) else 2
        params = SamplingParams(**{name: value})
        try:
            body = chat_body(HI, params, "m", continue_answer=True)
        except InvalidRequest as error:
            assert name in (
                "dry_breaker_ids",
                "negative_prompt_ids",
                "shown_token_ids",
                "logprobs",
                "grammar",
                "thinking",
            )
            assert name in error.message
            continue
        ChatBody.from_document(json.loads(json.dumps(body)))


def test_what_screens_poll_is_fetched_once_at_a_time_and_only_when_it_is_old() -> None:
    now, asked = [0.0], []
    polled = Polled(asked.append, lambda: now[0])

    async def fetch() -> object:
        return "an answer"

    def get() -> object:
        return polled.get("engine.logs", (), fetch, "nothing yet")

    assert get() == "nothing yet"
    now[0] = 10.0
    assert get() == "nothing yet"
    assert len(asked) == 1
    asyncio.run(asked[0])
    assert get() == "an answer"
    assert len(asked) == 2
    asyncio.run(asked[1])
    assert get() == "an answer"
    assert len(asked) == 2
    polled.forget()
    assert get() == "an answer"
    assert len(asked) == 3
    asked[2].close()


def test_of_what_screens_poll_only_the_last_answers_of_each_call_are_kept() -> None:
    polled = Polled(asyncio.run, lambda: 0.0)

    async def fetch() -> object:
        return "an answer"

    for after in range(100):
        polled.get("requests.finished", (after,), fetch, "nothing yet")
    polled.get("api.report", (), fetch, "nothing yet")
    kept = [polled.latest("requests.finished", (after,), None) for after in range(100)]
    assert kept == [None] * 96 + ["an answer"] * 4
    assert polled.latest("api.report", (), None) == "an answer"


async def test_a_name_is_no_book_and_a_prompt_may_be_one(served: Served) -> None:
    link = as_link(served.link)  # type: ignore[arg-type]
    served.fake.script["engine.list_models"] = [msgspec.structs.replace(MODELS[0], name="n" * 20_000)]
    with pytest.raises(OutOfReach):
        await link.list_models()
    text = RequestText(prompt="p" * 200_000, answer="a")
    served.fake.requests.details = {"r": msgspec.structs.replace(request_scenes.with_text(), text=text)}
    assert (await link.requests.detail("r")).text == text
