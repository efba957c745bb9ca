"""The admin endpoints: what an operator may do over HTTP, and who is taken for one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.web_request import BaseRequest

from console.api.admin.calls import AdminOperations
from console.api.admin.endpoints import Admin
from console.api.context import ApiContext
from console.api.server import ApiSettings
from tests.api.harness import PATIENCE_S, Served, serving, until
from tests.api.operators import FolderOperator, named_spec
from tests.api.test_api_disconnects import RawClient
from tests.fakes.backend import FakeBackend, Gate, saying
from tests.fakes.engines import Backends

KEY = "open sesame"
BEARER = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture
async def admin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    """A server without a key that has loaded `one`, and can load `two`. However late a refusal comes, it is the answer
    to the load."""
    monkeypatch.setattr("console.api.admin.endpoints._REFUSAL_S", 60.0)
    operator = FolderOperator(tmp_path, "one", "two")
    async with serving(tmp_path, operator=operator, spec=named_spec(tmp_path, "one")) as api:
        yield api


async def models(api: Served) -> dict[str, dict[str, Any]]:
    """GET /admin/models, by name."""
    return {model["name"]: model for model in (await api.get("/admin/models"))["models"]}


async def test_a_model_s_whole_life_over_http(tmp_path: Path) -> None:
    operator = FolderOperator(tmp_path, "one", "two")
    settings = ApiSettings(port=0, api_key=KEY)
    second = Backends(FakeBackend(reply=saying("2")))
    async with serving(tmp_path, FakeBackend(), settings=settings, operator=operator, load=False, others=second) as api:
        async with api.http.post("/admin/load", json={"model": "one"}) as response:
            assert response.status == 401
        assert operator.orders == []
        async with aiohttp.ClientSession(api.url, headers=BEARER) as http:
            api.http = http
            report = await api.load(model="one", workers=2, max_prompts=5, idle_unload_s=600)
            assert (report["model"], report["state"]) == ("one", "ready")
            one = (await models(api))["one"]
            assert (one["status"]["state"], one["target_workers"]) == ("ready", 2)
            assert (one["max_prompts"], one["idle_unload_s"]) == (5, 600)
            assert (await api.load(model="two", beside=True, max_model_len=64))["state"] == "ready"
            assert (await models(api))["two"]["status"]["model"]["max_model_len"] == 64
            await api.post("/admin/reconfigure", model="two", max_prompts=7, workers=3)
            await api.post("/admin/reconfigure", model="two", step_tokens=64, threads=2, idle_unload=90)
            two = (await models(api))["two"]
            assert (two["max_prompts"], two["target_workers"]) == (7, 3)
            assert (two["step_tokens"], two["threads"], two["idle_unload_s"]) == (64, 2, 90)
            await api.post("/admin/adapters", model="two", name="poet", path="poet-v1", scale=0.5)
            assert [adapter["name"] for adapter in (await models(api))["two"]["adapters"]] == ["poet"]
            assert (await api.post("/v1/completions", model="poet", prompt="x", max_tokens=1))["model"] == "poet"
            async with http.delete("/admin/adapters/poet", params={"model": "two"}) as response:
                assert response.status == 200
            assert (await models(api))["two"]["adapters"] == []
            await api.post("/admin/unload", model="one", drain_seconds=0)
            assert list(await models(api)) == ["two"]
            assert (await api.get("/admin/snapshot"))["status"]["spec"]["name"] == "two"
            async with http.post("/admin/unload") as response:
                assert (await response.json())["models"] == []


async def test_a_request_that_ended_says_what_its_time_went_into_and_nothing_of_its_text(admin: Served) -> None:
    answer = await admin.post("/v1/completions", prompt="a secret", max_tokens=5)
    found = await admin.get(f"/admin/requests/{answer['id']}")
    assert found["request"]["output_tokens"] == 5
    assert sum(found["why"]["causes"].values()) == pytest.approx(found["why"]["total_s"], rel=0.01)
    assert found["why"]["total_s"] >= 0.99 * found["request"]["age_s"]
    assert "secret" not in str(found)
    assert (await admin.get("/admin/requests/nobody", status=404))["error"]["code"] == "request_not_found"


async def test_the_id_of_an_answer_with_several_requests_gives_the_first_and_the_ids_of_the_others(
    admin: Served,
) -> None:
    answer = await admin.post("/v1/completions", prompt="x", max_tokens=2, n=3)
    found = await admin.get(f"/admin/requests/{answer['id']}")
    assert found["request"]["id"] == f"{answer['id']}-0"
    assert found["others"] == [f"{answer['id']}-{choice}" for choice in (1, 2)]
    assert found["why"]["total_s"] > 0
    assert (await admin.get(f"/admin/requests/{found['others'][0]}"))["others"] == []


async def test_the_time_of_all_requests_is_summed_by_cause_and_by_worker(admin: Served) -> None:
    await admin.post("/v1/completions", prompt="x", max_tokens=5)
    await until(lambda: bool(admin.engine.publish().why.causes))
    found = await admin.get("/admin/why")
    assert found["all"]["total_s"] >= found["workers"]["w0"]["total_s"] > 0
    assert "decode" in found["workers"]["w0"]["causes"]


async def test_a_client_that_is_refused_again_and_again_is_an_alert(admin: Served) -> None:
    assert (await admin.get("/admin/alerts"))["alerts"] == []
    for _ in range(10):
        async with admin.http.post("/admin/unload", headers={"X-Forwarded-For": "203.0.113.7"}) as response:
            assert response.status == 403
    (alert,) = (await admin.get("/admin/alerts"))["alerts"]
    assert (alert["cause"], alert["level"]) == ("client_refused_403", "warning")
    assert "10 requests refused" in alert["text"] and alert["advice"]


@pytest.mark.parametrize(
    ("headers", "host"),
    [
        ({"Origin": "http://evil.example"}, None),
        ({"Origin": "http://localhost"}, "localhost"),
        ({"X-Forwarded-For": "203.0.113.7"}, None),
        ({"Forwarded": "for=203.0.113.7"}, None),
        ({}, "evil.example"),
        ({}, "localhost:port"),
    ],
    ids=["a page from elsewhere", "a page", "a proxy", "a modern proxy", "a name pointed at this address", "no host"],
)
async def test_without_a_key_admin_requests_are_taken_from_this_machine_alone(
    admin: Served, headers: dict[str, str], host: str | None
) -> None:
    headers = {**headers, **({"Host": host} if host else {})}
    for method, path in (("GET", "/admin/models"), ("GET", "/admin/snapshot"), ("POST", "/admin/unload")):
        async with admin.http.request(method, path, headers=headers) as response:
            error = (await response.json())["error"]
            assert (response.status, error["code"]) in ((403, "forbidden"), (421, "misdirected"))
    assert admin.engine.status.state == "ready"


@pytest.mark.parametrize("remote", [False, True])
async def test_admin_requests_from_elsewhere_are_taken_with_a_key_where_they_were_switched_on(
    tmp_path: Path, remote: bool
) -> None:
    settings = ApiSettings(port=0, api_key=KEY, admin_remote=remote)
    async with serving(tmp_path, settings=settings, operator=FolderOperator(tmp_path)) as api:
        answer = await api.get(
            "/admin/models", status=200 if remote else 403, headers={**BEARER, "X-Forwarded-For": "203.0.113.7"}
        )
        assert remote or "--admin-remote" in answer["error"]["message"]
        await api.get("/admin/models", headers=BEARER)
        for path in ("/admin/models", "/admin/snapshot", "/admin/load"):
            await api.get(path, status=401)


@pytest.mark.parametrize("remote", [False, True])
async def test_admin_is_off_for_other_machines_unless_it_was_switched_on_and_never_without_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remote: bool
) -> None:
    settings = ApiSettings(port=0, host="0.0.0.0", no_auth=True, admin_remote=remote)
    async with serving(tmp_path, settings=settings, operator=FolderOperator(tmp_path)) as api:
        monkeypatch.setattr(BaseRequest, "remote", "203.0.113.7")
        await api.get("/v1/models")
        for path in ("/admin/models", "/admin/snapshot"):
            refused = await api.get(path, status=403)
            assert refused["error"]["message"].startswith("Without an API key, admin requests are accepted from this")
        made = await api.server.make_key("boss", ("admin",))
        weak = await api.server.make_key("app", ("use",))
        for path in ("/admin/models", "/admin/snapshot"):
            answer = await api.get(path, status=200 if remote else 403, headers={"X-API-Key": made.key})
            assert remote or "--admin-remote allows others" in answer["error"]["message"]
            refused = await api.get(path, status=403, headers={"X-API-Key": weak.key})
            assert "needs the scope watch" in refused["error"]["message"]


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8000", "[::1]:8000", "[::ffff:127.0.0.1]"])
async def test_every_way_to_name_this_machine_is_taken(admin: Served, host: str) -> None:
    named = await admin.get("/admin/models", headers={"Host": host})
    assert named == await admin.get("/admin/models")
    async with admin.http.get("/admin/models", headers={"Host": f"not-{host.strip('[]')}.example"}) as response:
        assert response.status == 421


async def test_every_admin_endpoint_is_in_the_manual(admin: Served) -> None:
    manual = (Path(__file__).parents[2] / "docs/admin-api.md").read_text(encoding="utf-8")
    operator = FolderOperator(Path())
    context = ApiContext(admin.engine, ApiSettings())
    for route in Admin(context, AdminOperations(operator.link, operator.admit)).routes():
        path = route.path.replace(":.+", "")
        assert f"## {route.method} {path}\n" in manual


async def test_a_server_without_an_operator_has_no_admin_endpoints(api: Served) -> None:
    for path in ("/admin/models", "/admin/snapshot", "/admin/load", "/admin/events"):
        assert (await api.get(path, status=404))["error"]["message"] == f"Not found: {path}"
    admin_paths = [route for route in (await api.get("/openapi.json"))["paths"] if route.startswith("/admin")]
    assert admin_paths == []


async def test_a_load_that_takes_long_is_a_202_and_can_be_looked_at(tmp_path: Path) -> None:
    backend = FakeBackend(load_gate=Gate(2))
    async with serving(tmp_path, backend, operator=FolderOperator(tmp_path, "one"), load=False) as api:
        await api.get("/admin/load", status=404)
        async with api.http.post("/admin/load", json={"model": "one"}) as response:
            assert response.status == 202
            report = await response.json()
        assert response.headers["Location"] == report["see"] == "/admin/load"
        assert (report["model"], report["state"]) == ("one", "loading")
        phase = ""
        async with asyncio.timeout(PATIENCE_S):
            while phase != "weights":  # the first report may come before the worker's
                report = await api.get("/admin/load")
                assert report["state"] == "loading"
                phase = (report["progress"] or {"phase": ""})["phase"]
        error = await api.refusal("/admin/load", status=409, model="one")
        assert error["code"] == "engine_busy"
        assert backend.load_gate is not None
        backend.load_gate.open()
        assert (await api.load_ended())["state"] == "ready"


async def test_a_load_can_be_cancelled(tmp_path: Path) -> None:
    backend = FakeBackend(load_gate=Gate())
    async with serving(tmp_path, backend, operator=FolderOperator(tmp_path, "one"), load=False) as api:
        async with api.http.post("/admin/load", json={"model": "one"}) as response:
            assert response.status == 202
        answer = await api.post("/admin/cancel-load")
        assert answer["load"]["state"] == "cancelled"
        assert answer["load"]["error"]["code"] == "load_cancelled"
        assert answer["models"] == []


async def test_a_load_that_fails_later_says_why_where_it_can_be_looked_at(tmp_path: Path) -> None:
    backend = FakeBackend(load_gate=Gate(1), load_error=RuntimeError("bad weights"))
    async with serving(tmp_path, backend, operator=FolderOperator(tmp_path, "one"), load=False) as api:
        async with api.http.post("/admin/load", json={"model": "one"}) as response:
            assert response.status == 202
        assert backend.load_gate is not None
        backend.load_gate.open()
        report = await api.load_ended()
        assert report["state"] == "failed"
        assert "bad weights" in report["error"]["message"]


async def test_what_forbids_a_load_is_the_answer_to_it(admin: Served) -> None:
    error = await admin.refusal("/admin/load", status=404, model="three")
    assert error["message"] == "no model is called three; available: one, two"
    error = await admin.refusal("/admin/load", model="one", beside=True)
    assert "give this one another name" in error["message"]


async def test_a_load_s_progress_can_be_streamed_to_its_end(tmp_path: Path) -> None:
    backend = FakeBackend(load_gate=Gate(2))
    async with serving(tmp_path, backend, operator=FolderOperator(tmp_path, "one"), load=False) as api:
        headers = {"Accept": "text/event-stream"}
        async with api.http.post("/admin/load", json={"model": "one"}, headers=headers) as response:
            assert response.content_type == "text/event-stream"
            unit = ""
            while unit != "bytes":  # the first report may come before the worker's
                told = json.loads((await response.content.readline()).removeprefix(b"data: "))
                assert await response.content.readline() == b"\n"
                assert told["state"] == "loading"
                unit = (told["progress"] or {"unit": ""})["unit"]
            assert backend.load_gate is not None
            backend.load_gate.open()
            rest = (await response.text()).split("\n\n")
        assert json.loads(rest[-2].strip().removeprefix("data: "))["state"] == "ready"


async def test_a_load_goes_on_when_the_client_that_watches_it_leaves(tmp_path: Path) -> None:
    backend = FakeBackend(load_gate=Gate())
    async with serving(tmp_path, backend, operator=FolderOperator(tmp_path, "one"), load=False) as api:
        client = await RawClient.post(api.url, "/admin/load", {"model": "one"})
        await until(lambda: api.engine.status.state == "loading")
        client.leave()
        await until(lambda: api.server.status().connections == 0)
        assert backend.load_gate is not None
        backend.load_gate.open()
        await until(lambda: api.engine.status.state == "ready")


async def test_who_watches_a_load_is_let_go_when_the_server_stops(tmp_path: Path) -> None:
    backend = FakeBackend(load_gate=Gate(2))
    async with serving(tmp_path, backend, operator=FolderOperator(tmp_path, "one"), load=False) as api:
        headers = {"Accept": "text/event-stream"}
        async with api.http.post("/admin/load", json={"model": "one"}, headers=headers) as response:
            await response.content.readline()
            stopping = asyncio.create_task(api.server.stop(drain_s=20))
            assert '"code":"engine_closed"' in await response.text()
        await stopping


async def test_a_replacement_lets_running_requests_of_the_old_model_end(tmp_path: Path) -> None:
    operator = FolderOperator(tmp_path, "one", "two")
    backend = FakeBackend(reply=saying("1"), gate=Gate())
    second = Backends(FakeBackend(reply=saying("2")))
    async with serving(tmp_path, backend, operator=operator, spec=named_spec(tmp_path, "one"), others=second) as api:
        asking = asyncio.create_task(api.post("/generate", prompt=">", max_tokens=3))
        await api.until_row(state="prefill")
        await api.load(model="two")
        assert (await api.post("/generate", prompt=">", max_tokens=3))["text"] == ">222"
        assert backend.gate is not None
        backend.gate.open()
        assert (await asking)["text"] == ">111"
        await until(lambda: [model.name for model in api.engine.publish().models] == ["two"])


async def test_a_worker_can_be_restarted_and_its_requests_go_on(paced_admin: Served) -> None:
    api = paced_admin
    asking = asyncio.create_task(api.post("/generate", prompt=">", max_tokens=4))
    await api.until_row(state="prefill")
    assert api.backend.gate is not None
    api.backend.gate.allow(2)
    await api.until_row(output_tokens=2)
    await api.post("/admin/workers/w0/restart")
    api.backend.gate.open()
    assert len((await asking)["text"]) == 5
    assert [(worker["id"], worker["restarts"]) for worker in (await api.get("/health"))["workers"]] == [("w0", 1)]


@pytest.fixture
async def paced_admin(tmp_path: Path) -> AsyncIterator[Served]:
    """A server whose backend steps only as often as the test allows."""
    async with serving(tmp_path, FakeBackend(gate=Gate()), operator=FolderOperator(tmp_path)) as api:
        yield api


async def test_an_unknown_worker_is_a_404_with_those_there_are(admin: Served) -> None:
    error = await admin.refusal("/admin/workers/w9/restart", status=404)
    assert error["message"] == "There is no worker w9; available: w0"


async def test_an_unknown_adapter_cannot_be_detached(admin: Served) -> None:
    async with admin.http.delete("/admin/adapters/poet", params={"model": "one"}) as response:
        assert response.status == 404
        assert "poet" in (await response.json())["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/admin/load", {}, "model"),
        ("/admin/load", {"model": ""}, "model"),
        ("/admin/load", {"model": 3}, "model"),
        ("/admin/load", {"model": "one", "workers": 0}, "workers"),
        ("/admin/load", {"model": "one", "workers": 65}, "workers"),
        ("/admin/load", {"model": "one", "max_prompts": 5000}, "max_prompts"),
        ("/admin/load", {"model": "one", "max_model_len": 0}, "max_model_len"),
        ("/admin/load", {"model": "one", "cache_bits": 5}, "cache_bits"),
        ("/admin/load", {"model": "one", "weights": "int3"}, "weights"),
        ("/admin/load", {"model": "one", "deterministic": "yes"}, "deterministic"),
        ("/admin/load", {"model": "one", "gpu_split": [16, -1]}, "gpu_split[1]"),
        ("/admin/load", {"model": "one", "gpu_split": "16,24"}, "gpu_split"),
        ("/admin/load", {"model": "one", "idle_unload_s": -1}, "idle_unload_s"),
        ("/admin/load", {"model": "one", "beside": "yes"}, "beside"),
        ("/admin/load", {"model": "one", "num_workers": 65}, "num_workers"),
        ("/admin/load", {"model": "one", "num_workers": 2, "workers": 3}, "workers"),
        ("/admin/load", {"model": "one", "worker": 2}, "worker"),
        ("/admin/load", {"model": "one", "dtype": "int8"}, "dtype"),
        ("/admin/unload", {"drain_seconds": -1}, "drain_seconds"),
        ("/admin/unload", {"name": "one"}, "name"),
        ("/admin/reconfigure", {}, None),
        ("/admin/reconfigure", {"model": "one"}, None),
        ("/admin/reconfigure", {"workers": 1.5}, "workers"),
        ("/admin/reconfigure", {"num_workers": 2, "workers": 3}, "workers"),
        ("/admin/reconfigure", {"step_tokens": 1}, "step_tokens"),
        ("/admin/reconfigure", {"threads": -1}, "threads"),
        ("/admin/adapters", {"name": "poet"}, "path"),
        ("/admin/adapters", {"path": "poet"}, "name"),
        ("/admin/adapters", {"name": "poet", "path": "p", "scale": 1e9}, "scale"),
        ("/admin/estimate", {"workers": 2}, "model"),
    ],
)
async def test_a_bad_order_is_refused_by_its_field_s_name(
    admin: Served, path: str, body: dict[str, Any], param: str | None
) -> None:
    assert (await admin.refusal(path, **body))["param"] == param
    assert [model.name for model in admin.engine.publish().models] == ["one"]


async def test_an_unknown_model_cannot_be_unloaded_or_reconfigured(admin: Served) -> None:
    for path, body in (("/admin/unload", {}), ("/admin/reconfigure", {"workers": 2})):
        error = await admin.refusal(path, status=404, model="three", **body)
        assert error["message"].endswith("available: one")


async def test_drain_finishes_what_runs_and_refuses_what_comes_until_resume(tmp_path: Path) -> None:
    operator = FolderOperator(tmp_path, "one")
    backend = FakeBackend(gate=Gate())
    async with serving(tmp_path, backend, operator=operator, spec=named_spec(tmp_path, "one")) as api:
        running = asyncio.create_task(api.post("/generate", prompt="x", max_tokens=3))
        await api.until_row(state="prefill")
        assert (await api.post("/admin/drain"))["models"][0]["name"] == "one"
        async with api.http.post("/v1/completions", json={"prompt": "x"}) as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "30")
            assert (await response.json())["error"]["code"] == "draining"
        async with api.http.get("/ready") as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "30")
            assert (await response.json())["error"]["message"].startswith("Draining for 0 s: 1 unfinished")
        health = await api.get("/health")
        assert (health["status"], health["unfinished"]) == ("draining", 1)
        assert "ericllm_draining 1.0" in await (await api.http.get("/metrics")).text()
        backend.gate.open()  # type: ignore[union-attr]
        await running
        await until(lambda: api.engine.snapshot().running == 0)
        assert (await api.get("/health"))["unfinished"] == 0
        await api.post("/admin/resume")
        assert (await api.get("/ready"))["status"] == "ready"
        assert (await api.get("/health"))["status"] == "ok"
        await api.post("/generate", prompt="x", max_tokens=3)
        assert "ericllm_draining 0.0" in await (await api.http.get("/metrics")).text()
