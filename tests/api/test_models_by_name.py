"""Requests that name a model which is not loaded: who may have it loaded, and what its client sees meanwhile."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import ollama
import openai
import pytest
from yarl import URL

from console.api.server import ApiSettings
from console.link.api import Scope
from engine.config import EngineConfig, ModelSpec
from engine.engine import LoadOrder
from engine.errors import UnsupportedModel
from engine.models.residency import Residency
from engine.placement.load_history import PlacementPlanner
from tests.api.harness import Served, bearer, serving, text_of, until
from tests.fakes.backend import FakeBackend, Gate
from tests.fakes.engines import Backends
from tests.fakes.several import named, states
from tests.fakes.tool_templates import HERMES, write_tool_model

ELSEWHERE = {"X-Forwarded-For": "203.0.113.7"}
"""Headers of a request that a proxy forwards for a client that is not on this machine."""

X = {"prompt": "x", "max_tokens": 1}


class Folder:
    """Loadable: models of a folder. keep_s: how long they stay."""

    def __init__(self, folder: Path, *names: str, keep_s: float = 0.0, **fields: object) -> None:
        self._specs = {name: named(folder, name, **fields) for name in names}
        self._keep_s = keep_s

    async def find(self, name: str) -> LoadOrder | None:
        spec = self._specs.get(name)
        return None if spec is None else LoadOrder(spec=spec, knobs={"idle_unload_s": self._keep_s})

    async def listed(self) -> list[ModelSpec]:
        return list(self._specs.values())


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(tmp_path / "fake", loadable=Folder(tmp_path, "a", "b", aliases=("gpt",))) as served:
        yield served


async def listed(api: Served, **headers: str) -> dict[str, str]:
    answer = await api.get("/v1/models", headers=headers)
    return {model["id"]: model["state"] for model in answer["data"]}


async def test_a_model_that_a_request_names_is_loaded_and_answers(api: Served) -> None:
    answer = await api.post("/v1/completions", model="a", prompt="x", max_tokens=2)
    assert answer["model"] == "a"
    assert (await listed(api))["a"] == "ready"


async def test_the_list_has_every_model_that_can_be_loaded_with_its_state(api: Served) -> None:
    assert await listed(api) == {"fake": "ready", "a": "unloaded", "b": "unloaded", "gpt": "unloaded"}
    assert (await api.get("/v1/models/b"))["state"] == "unloaded"
    anthropic_list = await api.get("/v1/models", headers={"anthropic-version": "2023-06-01"})
    assert {model["id"] for model in anthropic_list["data"]} == {"fake", "a", "b", "gpt"}


async def test_ollama_lists_and_shows_models_that_can_be_loaded(api: Served) -> None:
    tags = {model["name"] for model in (await api.get("/api/tags"))["models"]}
    assert tags == {"fake:latest", "a:latest", "b:latest", "gpt:latest"}
    assert "completion" in (await api.post("/api/show", model="a"))["capabilities"]
    assert {model["name"] for model in (await api.get("/api/ps"))["models"]} == {"fake:latest"}
    elsewhere = {model["name"] for model in (await api.get("/api/tags", headers=ELSEWHERE))["models"]}
    assert elsewhere == {"fake:latest"}


async def test_ollama_shows_what_a_model_can_do_before_it_is_loaded(tmp_path: Path) -> None:
    loadable = Folder(tmp_path, "a", "b")
    write_tool_model(tmp_path / "a", HERMES + "{# <think></think> #}")
    async with serving(tmp_path / "fake", loadable=loadable) as api:
        assert (await api.post("/api/show", model="a"))["capabilities"] == ["completion", "tools", "thinking"]
        assert (await api.post("/api/show", model="b"))["capabilities"] == ["completion"]
        assert [model.name for model in api.engine.models()] == ["fake"]


async def test_from_another_machine_no_model_is_loaded_or_listed(api: Served) -> None:
    assert await listed(api, **ELSEWHERE) == {"fake": "ready"}
    async with api.http.post("/v1/completions", json={"model": "a", "prompt": "x"}, headers=ELSEWHERE) as response:
        assert response.status == 404
        assert (await response.json())["error"]["message"] == "There is no model 'a'; available: fake"


@pytest.mark.parametrize(("scopes", "status"), [(("use",), 404), (("use", "load"), 200), (("admin",), 200)])
async def test_from_another_machine_a_key_may_have_models_loaded(
    api: Served, scopes: tuple[str, ...], status: int
) -> None:
    headers = ELSEWHERE | await bearer(api, "theirs", *scopes)  # type: ignore[arg-type]
    body = {"model": "a", "prompt": "x", "max_tokens": 2}
    async with api.http.post("/v1/completions", json=body, headers=headers) as response:
        assert response.status == status, await response.text()


@pytest.fixture
def comments(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that waits begins at once, and says what it waits for."""
    monkeypatch.setattr("console.api.requests.stream.COMMENT_S", 0.01)


@pytest.mark.usefixtures("comments")
async def test_a_stream_says_what_it_waits_for_while_the_model_is_loaded(tmp_path: Path) -> None:
    gate = Gate()
    others = Backends(FakeBackend(load_gate=gate))
    async with serving(tmp_path / "fake", others=others, loadable=Folder(tmp_path, "a")) as api:
        body = {"model": "a", "prompt": "x", "max_tokens": 2, "stream": True}
        async with api.http.post("/v1/completions", json=body) as response:
            assert (response.status, response.content_type) == (200, "text/event-stream")
            first = (await response.content.readline()).decode()
            assert first.startswith(': loading model="a"')
            gate.open()
            lines = (await response.text()).splitlines()
        events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert events.pop() == "[DONE]"
        assert len(text_of(list(map(json.loads, events)))) == 2


@pytest.mark.usefixtures("comments")
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
async def test_a_load_that_fails_ends_a_stream_that_began_with_the_error(tmp_path: Path, path: str) -> None:
    gate = Gate()
    broken = FakeBackend(load_gate=gate, load_error=UnsupportedModel("it is broken"))
    async with serving(tmp_path / "fake", others=Backends(broken), loadable=Folder(tmp_path, "a")) as api:
        say = [{"role": "user", "content": "x"}]
        body = {"model": "a", "prompt": "x", "messages": say, "input": "x", "max_tokens": 2, "stream": True}
        fields = {"/v1/completions": "prompt", "/v1/responses": "input"}.get(path, "messages")
        sent = {name: body[name] for name in ("model", "stream", fields)} | (
            {"max_tokens": 2} if path != "/v1/responses" else {}
        )
        async with api.http.post(path, json=sent) as response:
            assert response.status == 200
            await response.content.readline()
            gate.open()
            frames = [frame for frame in (await response.text()).split("\n\n") if "data: " in frame]
        assert len(frames) == 1
        assert "it is broken" in json.loads(frames[0].partition("data: ")[2])["error"]["message"]
        assert (await api.get("/v1/models/fake"))["state"] == "ready"


@pytest.mark.usefixtures("comments")
async def test_the_sdks_of_openai_and_anthropic_read_streams_that_wait_for_a_load(tmp_path: Path) -> None:
    gates = Gate(), Gate()
    others = Backends(*(FakeBackend(load_gate=gate) for gate in gates))
    async with serving(tmp_path / "fake", others=others, loadable=Folder(tmp_path, "a", "b")) as api:
        async with openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none") as one:
            stream = await one.chat.completions.create(
                model="a", messages=[{"role": "user", "content": "x"}], max_tokens=2, stream=True
            )  # returns with the headers, which the stream sends before the load ends
            assert states(api.engine)["a"] == "loading"
            gates[0].open()
            assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        async with (
            anthropic.AsyncAnthropic(base_url=api.url, api_key="none") as other,
            other.messages.stream(model="b", max_tokens=2, messages=[{"role": "user", "content": "x"}]) as answer,
        ):
            assert states(api.engine)["b"] == "loading"
            gates[1].open()
            assert await answer.get_final_text()


LINE_STREAMS: dict[str, dict[str, Any]] = {
    "/api/generate": {"prompt": "x", "options": {"num_predict": 2}},
    "/api/chat": {"messages": [{"role": "user", "content": "x"}], "options": {"num_predict": 2}},
    "/generate": {"prompt": "x", "max_tokens": 2, "stream": True},
}
"""A request of every endpoint that streams lines of JSON."""


@asynccontextmanager
async def loading_slowly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, error: Exception | None = None
) -> AsyncIterator[tuple[Served, Gate]]:
    """A server that pings often, and the gate of the load of its model `a`."""
    monkeypatch.setattr("console.api.requests.stream.COMMENT_S", 0.01)
    gate = Gate()
    others = Backends(FakeBackend(load_gate=gate, load_error=error))
    settings = ApiSettings(port=0, ping_s=0.01)
    async with serving(tmp_path / "fake", settings=settings, others=others, loadable=Folder(tmp_path, "a")) as api:
        yield api, gate


@pytest.mark.parametrize("path", LINE_STREAMS)
async def test_lines_begin_and_are_kept_open_by_white_space_while_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    async with loading_slowly(tmp_path, monkeypatch) as (api, gate):
        async with api.http.post(path, json={"model": "a", **LINE_STREAMS[path]}) as response:
            assert (response.status, response.content_type) == (200, "application/x-ndjson")
            assert await response.content.readexactly(3) == b"   "
            assert states(api.engine)["a"] == "loading"
            gate.open()
            text = await response.text()
        lines = text.split("\n")
        assert lines.pop() == ""
        assert lines and all(isinstance(json.loads(line), dict) for line in lines)


@pytest.mark.parametrize("path", LINE_STREAMS)
async def test_a_load_that_fails_ends_lines_that_began_with_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    async with loading_slowly(tmp_path, monkeypatch, error=UnsupportedModel("it is broken")) as (api, gate):
        async with api.http.post(path, json={"model": "a", **LINE_STREAMS[path]}) as response:
            assert response.status == 200
            gate.open()
            [line] = (await response.text()).splitlines()
        assert "it is broken" in json.dumps(json.loads(line)["error"])


async def test_ollamas_client_reads_streams_that_wait_for_a_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with loading_slowly(tmp_path, monkeypatch) as (api, gate):
        client = ollama.AsyncClient(host=api.url)
        parts = await client.chat("a", [{"role": "user", "content": "x"}], stream=True, options={"num_predict": 2})
        first = asyncio.ensure_future(anext(parts))
        await until(lambda: states(api.engine).get("a") == "loading" and api.server.report().under_way == 1)
        gate.open()
        assert (await first).message.content
        assert [part.done_reason async for part in parts][-1] == "length"


async def test_ollamas_client_raises_the_error_of_a_load_that_it_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with loading_slowly(tmp_path, monkeypatch, error=UnsupportedModel("it is broken")) as (api, gate):
        parts = await ollama.AsyncClient(host=api.url).generate("a", "x", stream=True)
        first = asyncio.ensure_future(anext(parts))
        await until(lambda: states(api.engine).get("a") == "loading")
        gate.open()
        with pytest.raises(ollama.ResponseError, match="it is broken"):
            await first


@pytest.mark.parametrize("path", ["/api/generate", "/api/chat"])
async def test_a_request_that_only_loads_is_one_line_of_a_stream_that_began_and_a_whole_answer_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    async with loading_slowly(tmp_path, monkeypatch) as (api, gate):
        async with api.http.post(path, json={"model": "a"}) as response:
            assert response.content_type == "application/x-ndjson"
            gate.open()
            [line] = (await response.text()).splitlines()
        assert (json.loads(line)["done"], json.loads(line)["done_reason"]) == (True, "load")
        assert (await api.post(path, model="a"))["done_reason"] == "load"


async def test_a_request_without_a_stream_has_its_status_after_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with loading_slowly(tmp_path, monkeypatch, error=UnsupportedModel("it is broken")) as (api, gate):
        body = {"model": "a", "prompt": "x", "stream": False}
        asked = asyncio.create_task(api.http.post("/api/generate", json=body))
        await until(lambda: states(api.engine).get("a") == "loading")
        gate.open()
        assert (await asked).status == 400


EVENT_STREAMS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/v1/responses": {"input": "x", "max_output_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/completion": {"prompt": "x", "n_predict": 2},
    "/generate_stream": {"inputs": "x", "parameters": {"max_new_tokens": 2}},
    "/": {"inputs": "x", "parameters": {"max_new_tokens": 2}},
    "/api/extra/generate/stream": {"prompt": "x", "max_length": 2},
}
"""A request of every endpoint that streams server-sent events."""


@pytest.fixture
def loads_take_100_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every load is expected to take 100 s, however long earlier ones took, and streams begin and comment at once."""
    monkeypatch.setattr(PlacementPlanner, "expected_seconds", lambda self, placements: 100.0)
    monkeypatch.setattr(Residency, "protected_s", lambda self, now: 0.0)
    monkeypatch.setattr("console.api.requests.stream.COMMENT_S", 0.001)


async def until_load(api: Served) -> None:
    """Wait until room is made and the load itself is under way."""
    await until(lambda: (plan := api.engine.load_plan("a")) is not None and plan.loading)


async def line_with(text: str, response: aiohttp.ClientResponse) -> str:
    """The first of the next lines that has a text."""
    while text not in (line := (await response.content.readline()).decode()):
        assert line, "the stream ended"
    return line


@pytest.mark.parametrize("path", EVENT_STREAMS)
@pytest.mark.usefixtures("loads_take_100_s")
async def test_every_event_stream_that_waits_for_a_load_says_what_leaves_memory_and_the_expected_wait(
    tmp_path: Path, path: str
) -> None:
    first, gate = Gate(), Gate()
    others, config = Backends(FakeBackend(load_gate=gate)), EngineConfig(worker_host="thread", max_models=1)
    one = FakeBackend(gate=first)
    async with serving(tmp_path / "fake", one, config=config, others=others, loadable=Folder(tmp_path, "a")) as api:
        running = asyncio.create_task(api.post("/v1/completions", model="fake", prompt="x", max_tokens=2))
        await until(lambda: len(api.engine._tracker.live) == 1)
        body = {"model": "a", "stream": True, **EVENT_STREAMS[path]}
        async with api.http.post(path, json=body) as response:
            assert (response.status, response.content_type) == (200, "text/event-stream")
            assert await line_with("unloads", response) == ': loading model="a" unloads=["fake"]\n'
            first.open()
            await running
            await until_load(api)
            loading = await line_with("expected_wait_s", response)
            assert re.fullmatch(r': loading model="a" expected_wait_s=\d+\n', loading)
            async with api.http.post(path, json=body) as late:
                assert late.headers["X-Unloads"] == '["fake"]'
                assert 0 < int(late.headers["X-Expected-Wait-Seconds"]) <= 100
                gate.open()
                assert "data:" in await late.text()
            assert "data:" in await response.text()


async def test_an_answer_that_waited_for_a_load_says_what_left_memory_for_it(tmp_path: Path) -> None:
    config = EngineConfig(worker_host="thread", max_models=1)
    async with serving(tmp_path / "fake", config=config, loadable=Folder(tmp_path, "a")) as api:
        for path, body in {
            "/v1/completions": {"prompt": "x", "max_tokens": 2},
            "/api/generate": {"prompt": "x", "options": {"num_predict": 2}},
        }.items():
            for headers in ({"X-Unloads": '["fake"]'}, {}):
                async with api.http.post(path, json={"model": "a", **body}) as response:
                    await response.read()
                    assert {name: value for name, value in response.headers.items() if name == "X-Unloads"} == headers
            await api.post("/v1/completions", model="fake", prompt="x", max_tokens=2)


async def test_a_stream_of_a_model_that_is_ready_begins_with_its_answer(api: Served) -> None:
    body = {"model": "fake", "prompt": "x", "max_tokens": 2, "stream": True}
    async with api.http.post("/v1/completions", json=body) as response:
        assert (await response.text()).startswith("data: ")


async def test_keep_alive_holds_for_a_model_that_a_request_has_loaded(api: Served) -> None:
    body = {"model": "a", "prompt": "x", "stream": False, "options": {"num_predict": 1}}
    await api.post("/api/generate", **body, keep_alive="10m")
    assert {model.name: model.idle_unload_s for model in api.engine.publish().models} == {"fake": 0.0, "a": 600.0}
    await api.post("/api/generate", **body, keep_alive=-1)
    assert {model.name: model.idle_unload_s for model in api.engine.publish().models}["a"] == 0.0
    await api.post("/api/generate", **body, keep_alive=0)
    await until(lambda: {model.name: model.status.state for model in api.engine.publish().models}["a"] == "idle")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/generate", {"prompt": "x", "stream": False, "options": {"num_predict": 1}}),
        (
            "/api/chat",
            {"messages": [{"role": "user", "content": "x"}], "stream": False, "options": {"num_predict": 1}},
        ),
        ("/api/embed", {"input": "x"}),
    ],
)
async def test_a_request_for_an_answer_gets_it_whatever_its_keep_alive_could_unload(
    api: Served, path: str, body: dict[str, Any]
) -> None:
    await api.post(path, model="fake", keep_alive=0, **body)
    assert states(api.engine)["fake"] == "ready"
    await api.post(path, model="a", keep_alive=600, **body)
    sent = {"model": "a", "keep_alive": 0, **body}
    async with api.http.post(path, json=sent, headers=ELSEWHERE) as response:
        assert response.status == 200, await response.text()
    assert {model.name: model.idle_unload_s for model in api.engine.publish().models}["a"] == 600.0


async def test_a_client_that_may_not_load_models_may_not_stop_one_either(api: Served) -> None:
    await api.post("/v1/completions", model="a", prompt="x", max_tokens=1)
    async with api.http.post("/api/generate", json={"model": "a", "keep_alive": 0}, headers=ELSEWHERE) as response:
        assert response.status == 400
        assert "needs a key with the scope load" in (await response.json())["error"]


@pytest.mark.parametrize(("path", "nothing"), [("/api/generate", {"prompt": ""}), ("/api/chat", {"messages": []})])
async def test_stopping_a_model_that_is_not_in_memory_loads_nothing(
    api: Served, path: str, nothing: dict[str, Any]
) -> None:
    """As `ollama stop` does."""
    stopped = await api.post(path, model="a:latest", keep_alive=0, **nothing)
    assert (stopped["model"], stopped["done_reason"]) == ("a:latest", "unload")
    assert [model.name for model in api.engine.models()] == ["fake"]
    assert (await api.post(path, model="a", **nothing))["done_reason"] == "load"
    assert (await api.post(path, model="a", keep_alive=0, **nothing))["done_reason"] == "unload"
    await until(lambda: {model.name: model.status.state for model in api.engine.publish().models}["a"] == "idle")
    assert (await api.post(path, model="a", keep_alive=0, **nothing))["done_reason"] == "unload"
    assert {model.name: model.status.state for model in api.engine.models()}["a"] == "idle"
    async with api.http.post(path, json={"model": "nobody", "keep_alive": 0, **nothing}) as response:
        assert response.status == 404


async def test_stopping_the_model_that_an_operator_loaded_is_refused_where_none_is_named_asleep_or_not(
    tmp_path: Path,
) -> None:
    config = EngineConfig(worker_host="thread", idle_unload_s=0.01)
    async with serving(tmp_path, config=config) as api:
        for _ in range(2):
            await until(lambda: states(api.engine)["fake"] == "idle")
            async with api.http.post("/api/generate", json={"prompt": "", "keep_alive": 0}) as response:
                assert response.status == 400
                assert "an operator loaded" in (await response.json())["error"]


async def running(api: Served, **headers: str) -> dict[str, str]:
    answer = await api.get("/running", headers=headers)
    return {model["model"]: model["state"] for model in answer["running"]}


async def test_llama_swaps_clients_see_what_is_in_memory(tmp_path: Path) -> None:
    gate = Gate()
    others = Backends(FakeBackend(load_gate=gate))
    async with serving(tmp_path / "fake", others=others, loadable=Folder(tmp_path, "a", "b")) as api:
        assert await running(api) == {"fake": "ready"}
        asked = asyncio.create_task(api.post("/v1/completions", model="a", prompt="x", max_tokens=1))
        await until(lambda: states(api.engine).get("a") == "loading")
        assert await running(api) == {"fake": "ready", "a": "starting"}
        assert await running(api, **ELSEWHERE) == {"fake": "ready"}
        gate.open()
        await asked
        assert await running(api, **ELSEWHERE) == {"fake": "ready", "a": "ready"}


@pytest.mark.parametrize(
    ("method", "path", "stopped"),
    [
        ("GET", "/unload", {"a", "b"}),
        ("POST", "/api/models/unload", {"a", "b"}),
        ("POST", "/api/models/unload/a", {"a"}),
        ("POST", "/api/models/unload/gpt", {"a"}),
    ],
)
async def test_llama_swaps_clients_unload_what_requests_have_loaded(
    tmp_path: Path, method: str, path: str, stopped: set[str]
) -> None:
    loadable = Folder(tmp_path, "a", "b")
    loadable._specs["a"] = named(tmp_path, "a", aliases=("gpt",))
    async with serving(tmp_path / "fake", loadable=loadable) as api:
        for name in "ab":
            await api.post("/v1/completions", model=name, prompt="x", max_tokens=1)
        async with api.http.request(method, path) as response:
            assert (response.status, await response.text()) == (200, "OK")
        await until(lambda: {name for name, state in states(api.engine).items() if state == "idle"} == stopped)
        assert await running(api) == dict.fromkeys({"fake", "a", "b"} - stopped, "ready")


async def test_a_model_that_an_operator_loaded_is_not_unloaded_by_name(api: Served) -> None:
    async with api.http.post("/api/models/unload/fake") as response:
        assert response.status == 400
        assert "an operator loaded" in (await response.json())["error"]["message"]
    async with api.http.post("/api/models/unload/nobody") as response:
        assert response.status == 404


@pytest.mark.parametrize(
    "headers", [ELSEWHERE, {"Sec-Fetch-Site": "cross-site"}, {"Origin": "https://elsewhere.example"}]
)
async def test_nothing_is_unloaded_for_clients_that_may_not_load_nor_for_pages(
    api: Served, headers: dict[str, str]
) -> None:
    await api.post("/v1/completions", model="a", prompt="x", max_tokens=1)
    for method, path in (("GET", "/unload"), ("POST", "/api/models/unload"), ("POST", "/api/models/unload/a")):
        async with api.http.request(method, path, headers=headers) as response:
            assert response.status == 403, await response.text()
    assert states(api.engine)["a"] == "ready"


@pytest.mark.parametrize(("scopes", "status"), [(("use",), 403), (("use", "load"), 200)])
async def test_a_key_unloads_models_with_the_scope_load(api: Served, scopes: tuple[str, ...], status: int) -> None:
    await api.post("/v1/completions", model="a", prompt="x", max_tokens=1)
    headers = ELSEWHERE | await bearer(api, "theirs", *scopes)  # type: ignore[arg-type]
    for method, path in (("GET", "/unload"), ("POST", "/api/models/unload"), ("POST", "/api/models/unload/a")):
        async with api.http.request(method, path, headers=headers) as response:
            assert response.status == status, await response.text()


UPSTREAM_CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "x", "max_tokens": 1}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
    ("/api/generate", {"prompt": "x", "stream": False, "options": {"num_predict": 1}}),
    ("/completion", {"prompt": "x", "n_predict": 1}),
]


@pytest.mark.parametrize("named", [{}, {"model": "b"}])
@pytest.mark.parametrize(("path", "body"), UPSTREAM_CALLS, ids=[path for path, _ in UPSTREAM_CALLS])
async def test_llama_swaps_upstream_is_the_endpoint_for_the_model_of_the_path_whatever_the_body_names(
    api: Served, path: str, body: dict[str, Any], named: dict[str, str]
) -> None:
    answer = await api.post(f"/upstream/a{path}", **body, **named)
    assert answer["model"] == "a"
    assert (await listed(api))["a"] == "ready"
    assert (await listed(api))["b"] == "unloaded"


async def test_an_upstream_stream_comes_through_the_openai_client(api: Served) -> None:
    async with openai.AsyncOpenAI(base_url=f"{api.url}/upstream/a/v1", api_key="k", max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == ["a", "gpt"]
        chunks = await client.completions.create(model="ignored", prompt="x", max_tokens=3, stream=True)
        seen = [chunk async for chunk in chunks]
    assert {chunk.model for chunk in seen} == {"a"}
    assert len("".join(chunk.choices[0].text for chunk in seen)) == 3


@pytest.mark.parametrize("name", ["org/a", "org%2Fa"])
async def test_an_upstream_model_may_have_slashes_in_its_name(tmp_path: Path, name: str) -> None:
    folder = Folder(tmp_path, "a")
    folder._specs["org/a"] = named(tmp_path, "a")
    async with serving(tmp_path / "fake", loadable=folder) as api:
        path = URL(f"{api.url}/upstream/{name}/v1/completions", encoded=True)
        assert (await (await api.http.post(path, json=X)).json())["model"] == "org/a"


async def test_upstream_queries_are_for_the_model_of_the_path(api: Served) -> None:
    await api.post("/v1/completions", model="a", **X)
    assert (await api.get("/upstream/a/props"))["model_alias"] == "a"
    assert (await api.get("/upstream/fake/props?model=a"))["model_alias"] == "fake"
    assert [slot["is_processing"] for slot in await api.get("/upstream/a/slots")] != []
    assert (await api.get("/upstream/a/health"))["status"] == "ok"


async def test_an_unknown_upstream_model_is_a_404_that_lists_the_names_in_the_shape_of_the_endpoint(
    api: Served,
) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    async with api.http.post("/upstream/nobody/v1/messages", json=UPSTREAM_CALLS[2][1], headers=headers) as response:
        error = await response.json()
        assert response.status == 404
        assert error["type"] == "error" and "available: fake" in error["error"]["message"]
        assert response.headers["request-id"] == response.headers["X-Request-Id"] == error["request_id"]


@pytest.mark.parametrize(
    "path",
    [
        "/upstream",
        "/upstream/",
        "/upstream/a",
        "/upstream/a/nothing",
        "/upstream//v1/completions",
        "/upstream/a/admin/status",
        "/upstream/a/metrics",
        "/upstream/a/unload",
        "/upstream/a/chat",
        "/upstream/a/api/extra/tokencount",
    ],
)
async def test_upstream_passes_on_only_what_takes_a_model(api: Served, path: str) -> None:
    for method in ("GET", "POST"):
        async with api.http.request(method, path) as response:
            assert response.status == 404, await response.text()
            assert "/upstream/MODEL/v1/chat/completions" in (await response.json())["error"]["message"]


async def test_an_upstream_method_that_the_endpoint_does_not_support_is_a_405(api: Served) -> None:
    async with api.http.get("/upstream/a/v1/completions") as response:
        assert response.status == 405
        assert response.headers["Allow"] == "POST"


async def test_upstream_loads_nothing_for_clients_that_may_not_load(api: Served) -> None:
    async with api.http.post("/upstream/a/v1/completions", json=X, headers=ELSEWHERE) as response:
        assert response.status == 404
    assert "a" not in states(api.engine)


@pytest.mark.parametrize(("scopes", "status"), [((), 401), (("watch",), 403), (("use",), 404), (("use", "load"), 200)])
async def test_an_upstream_request_needs_the_scope_of_its_endpoint(
    api: Served, scopes: tuple[Scope, ...], status: int
) -> None:
    other = await bearer(api, "other", "admin")
    headers = ELSEWHERE | (await bearer(api, "theirs", *scopes) if scopes else {})
    async with api.http.post("/upstream/a/v1/completions", json=X, headers=headers) as response:
        assert response.status == status, await response.text()
    async with api.http.get("/upstream/a/health", headers=ELSEWHERE) as response:
        assert response.status == 200, "health needs no key"
    async with api.http.get("/upstream/a/admin/status", headers=ELSEWHERE | other) as response:
        assert response.status == 404


async def test_sampling_of_the_operator_holds_where_a_request_leaves_it_open(tmp_path: Path) -> None:
    async with serving(tmp_path / "fake", loadable=Folder(tmp_path, "a", sampling={"temperature": 0.25})) as api:
        for body, wanted in (({}, 0.25), ({"temperature": 0.5}, 0.5)):
            await api.post("/v1/completions", model="a", prompt="x", max_tokens=1, **body)
            row = api.engine.publish().requests[0]
            assert api.engine.request_detail(row.id).sampling["temperature"] == wanted
