"""Several dialects on one server: whose a request is, in whose shape it is refused, and what is off."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from console.api.context import ApiContext
from console.api.dialects.base import Dialect, Example
from console.api.dialects.registry import discover
from console.api.http.errors import json_response
from console.api.http.request_body import body_bytes
from console.api.requests.stream import ChunkStream
from console.api.server import ApiSettings
from engine.errors import EngineError, InvalidRequest
from tests.api.harness import Served, serving


class Shouted:
    """Endpoints of a dialect that shares /generate with another and has /shout of its own."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    def routes(self) -> list[web.RouteDef]:
        """Where they are found."""
        return [web.post("/generate", self._post), web.post("/shout", self._post), web.get("/v1/models", self._post)]

    async def _post(self, request: web.Request) -> web.StreamResponse:
        match request.method, body_bytes(request).decode():
            case "GET", _:
                return json_response("SHOUTED MODELS")
            case _, body if "bad" in body:
                raise InvalidRequest("that is bad", param="loud")
            case _, body if "stream" in body:
                async with ChunkStream(request, self._context.settings) as chunks:
                    raise InvalidRequest("it went wrong")
                return chunks.response
            case _:
                return json_response("SHOUTED")


def shouts(error: EngineError) -> object:
    """Its own shape of errors."""
    return {"oops": error.message.upper(), "code": error.code}


def is_loud(body: Mapping[str, object]) -> bool:
    """What is this dialect's of what it shares."""
    return "loud" in body


@pytest.fixture(autouse=True)
def with_shouting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table with one dialect more, which comes last."""
    own = {dialect.name: dialect for dialect in discover()}
    shout = Dialect(
        name="shout",
        title="Shouting",
        endpoints=(Shouted,),
        example=Example("/shout", {}),
        format_error=shouts,
        claims=is_loud,
    )
    monkeypatch.setattr("console.api.server.discover", lambda: (own["openai"], own["generate"], shout))


@pytest.fixture
async def keyed(tmp_path: Path) -> AsyncIterator[Served]:
    """A server that wants a key."""
    async with serving(tmp_path, settings=ApiSettings(port=0, api_key="sesame")) as served:
        yield served


async def asked(api: Served, path: str, status: int, data: bytes, method: str = "POST") -> Any:
    """The answer to some bytes."""
    async with api.http.request(method, path, data=data) as response:
        answer = await response.json()
        assert response.status == status, answer
        return answer


async def test_where_two_dialects_share_a_path_the_body_decides(api: Served) -> None:
    assert await asked(api, "/generate", 200, b'{"loud": 1}') == "SHOUTED"
    assert set(await api.post("/generate", prompt="x", max_tokens=1)) == {"text"}
    counts = {reading.name: reading.requests for reading in api.server.report().dialects}
    assert counts == {"openai": 0, "generate": 1, "shout": 1}


async def test_each_of_them_names_the_shared_path_among_its_routes(api: Served) -> None:
    routes = {reading.name: reading.routes for reading in api.server.report().dialects}
    assert "/generate" in routes["generate"]
    assert routes["shout"] == ("/generate", "/shout", "/v1/models")


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"\xff"])
async def test_what_is_no_json_object_is_refused_by_the_first_of_them(api: Served, data: bytes) -> None:
    assert set(await asked(api, "/generate", 400, data)) == {"error"}


async def test_an_error_has_the_shape_of_the_dialect_that_was_asked(api: Served) -> None:
    told = {"oops": "THAT IS BAD", "code": "invalid_request"}
    assert await asked(api, "/generate", 400, b'{"loud": "bad"}') == told
    assert await asked(api, "/shout", 400, b"bad") == told


async def test_a_stream_that_fails_says_so_in_the_shape_of_its_dialect(api: Served) -> None:
    async with api.http.post("/shout", data=b"stream") as response:
        assert await response.text() == 'data: {"oops":"IT WENT WRONG","code":"invalid_request"}\n\n'


async def test_a_missing_key_is_told_in_the_shape_of_the_dialect(keyed: Served) -> None:
    assert (await asked(keyed, "/shout", 401, b""))["code"] == "invalid_api_key"
    assert (await asked(keyed, "/generate", 401, b'{"loud": 1}'))["error"]["code"] == "invalid_api_key"


async def test_a_wrong_method_is_told_in_the_shape_of_the_dialect(api: Served) -> None:
    assert (await asked(api, "/shout", 405, b"", method="GET"))["code"] == "method_not_allowed"


async def test_a_body_too_large_is_told_in_the_shape_of_the_dialect(tmp_path: Path) -> None:
    async with serving(tmp_path, settings=ApiSettings(port=0, max_body_bytes=100)) as api:
        assert (await asked(api, "/shout", 413, b"x" * 200))["code"] == "body_too_large"
        assert (await asked(api, "/generate", 413, b"x" * 200))["error"]["code"] == "body_too_large"


async def test_a_stopping_server_says_so_in_the_shape_of_the_dialect(api: Served) -> None:
    api.server._traffic.closing = True
    assert (await asked(api, "/shout", 503, b""))["code"] == "engine_closed"


async def test_one_of_them_can_be_switched_off_and_says_so_in_its_own_shape(api: Served) -> None:
    await api.server.switch_dialect("shout", False)
    off = await asked(api, "/generate", 404, b'{"loud": 1}')
    assert off["code"] == "dialect_off"
    assert off["oops"] == "/GENERATE IS OFF: THE SHOUTING DIALECT IS DISABLED ON THIS SERVER"
    await api.post("/generate", prompt="x", max_tokens=1)
    await api.server.switch_dialect("generate", False)
    await api.server.switch_dialect("shout", True)
    assert await asked(api, "/generate", 200, b'{"loud": 1}') == "SHOUTED"
    assert (await api.refusal("/generate", status=404, prompt="x"))["code"] == "dialect_off"


async def test_what_has_no_body_is_answered_by_the_first_of_them_that_is_on(api: Served) -> None:
    assert (await api.get("/v1/models"))["object"] == "list"
    await api.server.switch_dialect("openai", False)
    assert await asked(api, "/v1/models", 200, b"", method="GET") == "SHOUTED MODELS"
    await api.server.switch_dialect("shout", False)
    assert (await asked(api, "/v1/models", 404, b"", method="GET"))["error"]["code"] == "dialect_off"


async def test_the_settings_switch_dialects_off_from_the_start_and_no_more_than_once(tmp_path: Path) -> None:
    async with serving(tmp_path, settings=ApiSettings(port=0, dialects_off=("shout",)), load=False) as api:
        assert (await asked(api, "/shout", 404, b""))["code"] == "dialect_off"
        await api.server.switch_dialect("shout", True)
        await api.server.stop()
        await api.server.start()
        assert all(dialect.on for dialect in api.server.report().dialects)


async def test_a_dialect_that_there_is_not_is_told_by_its_name_at_the_start(tmp_path: Path) -> None:
    settings = ApiSettings(port=0, dialects_off=("shoot",))
    with pytest.raises(InvalidRequest, match="Unknown dialect shoot; available: openai, generate, shout"):
        async with serving(tmp_path, settings=settings, load=False):
            pass
