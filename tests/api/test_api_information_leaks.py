"""What leaves the server of what it knows: no path of the machine, no prompt, no traceback; and each request's id."""

from __future__ import annotations

import gzip
import json
import logging
import zlib
from pathlib import Path
from typing import Any

import pytest

from console.api.server import ApiSettings
from engine.errors import EngineError, ModelLoadFailed, UnsupportedModel, WorkerFailed
from tests.api.harness import Served, serving
from tests.api.operators import FolderOperator
from tests.fakes.backend import FakeBackend
from tests.fakes.link import FakeLink

SECRET = "a prompt that nobody else may see"
PLACES = "tiny cannot be read: [Errno 2] No such file: '/srv/models/tiny/config.json' (log in /var/log/ericllm/w0.log)"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": SECRET, "max_tokens": 2}),
        ("/v1/completions", {"prompt": SECRET, "max_tokens": 2, "stream": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 2}),
        ("/generate", {"prompt": SECRET, "max_tokens": 2}),
        ("/v1/completions", {"prompt": SECRET, "temperature": SECRET}),
        ("/v1/completions", {"prompt": {"text": SECRET}}),
        (f"/v1/completions?prompt={SECRET}", {"prompt": SECRET, "nonsense": SECRET}),
    ],
)
async def test_no_prompt_is_logged_nor_kept_for_the_operator(
    api: Served, caplog: pytest.LogCaptureFixture, path: str, body: dict[str, Any]
) -> None:
    with caplog.at_level(logging.DEBUG):
        async with api.http.post(path, json=body) as response:
            await response.read()
    assert SECRET not in caplog.text
    assert "nobody" not in caplog.text
    assert SECRET not in repr(api.server.report())
    assert SECRET not in repr(api.engine.publish())


async def test_a_prompt_is_in_no_log_where_the_answer_breaks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        async with serving(tmp_path, FakeBackend(fail_at_steps=range(2, 1000))) as api:
            await api.refusal("/v1/completions", status=500, prompt=SECRET)
    assert SECRET not in caplog.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", [ModelLoadFailed, UnsupportedModel, WorkerFailed])
async def test_clients_are_told_no_path_of_the_machine_and_operators_are(
    api: Served, monkeypatch: pytest.MonkeyPatch, stream: bool, kind: type[EngineError]
) -> None:
    def broken(*_: object) -> None:
        raise kind(PLACES)

    monkeypatch.setattr(api.engine, "submit", broken)
    error = await api.refusal("/v1/completions", status=kind.http_status, prompt="x", stream=stream)
    assert error["message"] == ("tiny cannot be read: [Errno 2] No such file: 'config.json' (log in w0.log)")
    assert api.server.report().failures[0].message == PLACES


@pytest.mark.parametrize("name", ["/etc/passwd", "../../etc", "~/models/x", "org/name", "demo"])
async def test_a_model_that_a_request_names_is_one_that_is_loaded_and_never_a_path(api: Served, name: str) -> None:
    for field in ("model", "lora"):
        async with api.http.post("/v1/completions", json={"prompt": "x", field: name}) as response:
            error = (await response.json())["error"]
            assert response.status in (400, 404)
            assert error["param"] == field
    assert [model.name for model in api.engine.publish().models] == ["fake"]


async def test_the_id_of_a_request_is_in_its_answer_and_where_the_shape_has_room_for_it_in_its_error(
    api: Served,
) -> None:
    for path, body in (("/v1/completions", {"prompt": 3}), ("/v1/messages", {"model": 3}), ("/nowhere", {})):
        async with api.http.post(path, json=body, headers={"X-Request-Id": "mine-1"}) as response:
            assert response.status >= 400
            assert response.headers["X-Request-Id"] == "mine-1"
            answer = await response.json()
            if "messages" in path:
                assert answer["request_id"] == "mine-1"


async def test_no_answer_says_what_the_server_is_made_with(api: Served) -> None:
    for path in ("/health", "/nowhere"):
        async with api.http.get(path) as response:
            assert response.headers["Server"] == "ericllm"


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_a_body_that_unpacks_to_more_than_the_limit_is_a_413(tmp_path: Path, encoding: str) -> None:
    packed = {"gzip": gzip.compress, "deflate": zlib.compress}[encoding](b" " * 10**7)
    async with serving(tmp_path, settings=ApiSettings(port=0, max_body_bytes=10**6)) as api:
        headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
        async with api.http.post("/generate", data=packed, headers=headers) as response:
            assert response.status == 413
            assert json.loads(await response.read())["error"]["code"] == "body_too_large"


async def test_limits_of_a_key_are_checked_where_one_is_made_from_elsewhere(tmp_path: Path) -> None:
    fake = FakeLink()
    async with serving(tmp_path, operator=FolderOperator(tmp_path), link=lambda: fake) as api:
        order = {"name": "ci", "scopes": ["use"], "limits": {"requests_per_min": 60}}
        assert (await api.post("/admin/call/api.make_key", **order))["result"]["name"] == "ci"
        for wrong in ({"requests_per_min": -1}, {"nonsense": 1}, 60):
            error = await api.refusal("/admin/call/api.make_key", **{**order, "name": "x", "limits": wrong})
            assert error["code"] == "invalid_request"
