"""GET /, /health, /ready, /metrics and /v1/models."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from console.api.metrics import SnapshotCollector
from console.api.server import ApiSettings
from console.api.status_endpoints import is_stalled
from engine.engine import Engine
from engine.snapshot import DeviceSensors, Snapshot, WorkerReading
from tests.api.harness import Served, serving
from tests.api.operators import FolderOperator
from tests.fakes import scenes
from tests.fakes.backend import FakeBackend, Gate

VLLM_NAMES = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prompt_tokens",
    "vllm:generation_tokens",
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:request_success",
    "vllm:num_preemptions",
    "vllm:spec_decode_num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
}


async def samples(api: Served) -> dict[tuple[str, str], float]:
    """(name, finished_reason or le or "") -> value, of everything that /metrics gives."""
    async with api.http.get("/metrics") as response:
        families = list(text_string_to_metric_families(await response.text()))
    return {
        (sample.name, sample.labels.get("finished_reason") or sample.labels.get("le", "")): sample.value
        for family in families
        for sample in family.samples
    }


async def test_metrics_have_vllm_s_names(api: Served) -> None:
    async with api.http.get("/metrics") as response:
        assert response.content_type == "text/plain"
        names = {family.name for family in text_string_to_metric_families(await response.text())}
    assert names >= VLLM_NAMES
    assert {"ericllm_device_memory_bytes", "ericllm_worker_up", "ericllm_model_state"} <= names


async def test_metrics_come_as_openmetrics_for_who_asks(api: Served) -> None:
    async with api.http.get("/metrics", headers={"Accept": "application/openmetrics-text"}) as response:
        assert {family.name for family in parse_openmetrics(await response.text())} >= VLLM_NAMES


@pytest.mark.parametrize("kind", ["application/openmetrics-text", "text/plain"])
async def test_metrics_are_told_as_usual_where_the_version_that_is_wanted_is_none(api: Served, kind: str) -> None:
    async with api.http.get("/metrics", headers={"Accept": f"{kind}; version=new"}) as response:
        assert response.status == 200
        assert response.content_type == "text/plain"


async def test_metrics_count_what_was_done(api: Served) -> None:
    await api.post("/v1/completions", prompt="four", max_tokens=5)
    found = await samples(api)
    assert found["vllm:prompt_tokens_total", ""] == 4
    assert found["vllm:generation_tokens_total", ""] == 5
    assert found["vllm:request_success_total", "length"] == 1
    assert found["vllm:time_to_first_token_seconds_count", ""] == 1
    assert found["vllm:inter_token_latency_seconds_count", ""] == 4
    assert found["vllm:e2e_request_latency_seconds_bucket", "+Inf"] == 1


async def test_metrics_show_requests_running_and_waiting(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeBackend(gate=Gate())) as api:
        asking = asyncio.create_task(api.post("/generate", prompt="x", n=20, max_tokens=1))
        await api.until_row(state="queued")
        found = await samples(api)
        api.backend.gate.open()  # type: ignore[union-attr]
        await asking
    assert found["vllm:num_requests_running", ""] == 16
    assert found["vllm:num_requests_waiting", ""] == 4


async def test_metrics_are_given_without_a_model_too(tmp_path: Path) -> None:
    async with serving(tmp_path, load=False) as api:
        assert (await samples(api))["vllm:num_requests_running", ""] == 0


async def test_two_servers_in_one_process_keep_their_metrics_apart(tmp_path: Path) -> None:
    async with serving(tmp_path) as one, serving(tmp_path) as other:
        await one.post("/generate", prompt="x", max_tokens=3)
        assert (await samples(one))["vllm:generation_tokens_total", ""] == 3
        assert (await samples(other))["vllm:generation_tokens_total", ""] == 0


async def test_ready_says_which_model_answers(api: Served) -> None:
    async with api.http.get("/ready") as response:
        assert response.status == 200
        assert await response.json() == {"status": "ready", "model": "fake"}


async def test_not_ready_is_a_503_with_the_state(tmp_path: Path) -> None:
    async with serving(tmp_path, load=False) as api, api.http.get("/ready") as response:
        assert response.status == 503
        assert "Retry-After" in response.headers
        assert (await response.json())["error"]["code"] == "no_model_loaded"


async def test_health_is_ok_without_a_model_and_with_one(tmp_path: Path) -> None:
    async with serving(tmp_path, load=False) as api, api.http.get("/health") as response:
        assert response.status == 200
        assert (await response.json())["model_state"] == "unloaded"
    async with serving(tmp_path) as api, api.http.get("/health") as response:
        assert response.status == 200
        assert (await response.json())["workers"][0]["state"] == "ready"


async def test_health_and_readiness_fail_while_a_worker_is_silent(tmp_path: Path) -> None:
    gate = Gate(1)
    async with serving(tmp_path, FakeBackend(gate=gate), settings=ApiSettings(port=0, stall_s=0.0)) as api:
        asking = asyncio.create_task(api.post("/generate", prompt="x", max_tokens=5))
        await api.until_row(state="decode")
        async with api.http.get("/health") as response:
            assert response.status == 503
            assert (await response.json())["status"] == "stalled"
        async with api.http.get("/ready") as response:
            assert response.status == 503
        gate.open()
        await asking


@pytest.mark.parametrize(
    ("worker", "stalled"),
    [
        (WorkerReading(id="w0", state="ready", active=1, last_step_age_s=61), True),
        (WorkerReading(id="w0", state="ready", active=1, last_step_age_s=59), False),
        (WorkerReading(id="w0", state="ready", active=0, last_step_age_s=61), True),
        (WorkerReading(id="w0", state="draining", active=1, last_step_age_s=61), True),
        (WorkerReading(id="w0", state="ready", active=0, last_step_age_s=None), False),
        (WorkerReading(id="w0", state="loading", active=1, last_step_age_s=600), False),
    ],
    ids=["old step", "young step", "hung after its requests left", "draining", "new", "loading"],
)
def test_a_worker_is_stalled_when_it_was_silent_for_too_long(worker: WorkerReading, stalled: bool) -> None:
    assert is_stalled(worker, stall_s=60) is stalled


async def test_the_loaded_model_is_listed(api: Served) -> None:
    async with api.http.get("/v1/models") as response:
        listed = await response.json()
    async with api.http.get("/v1/models/fake") as response:
        card = await response.json()
    assert listed == {"object": "list", "data": [card]}
    assert (card["id"], card["object"], card["max_model_len"]) == ("fake", "model", 4096)


async def test_other_models_are_404(api: Served) -> None:
    async with api.http.get("/v1/models/org/other") as response:
        assert response.status == 404
        assert "org/other" in (await response.json())["error"]["message"]


async def test_no_model_is_an_empty_list(tmp_path: Path) -> None:
    async with serving(tmp_path, load=False) as api:
        async with api.http.get("/v1/models") as response:
            assert await response.json() == {"object": "list", "data": []}
        async with api.http.get("/v1/models/fake") as response:
            assert response.status == 404


async def test_the_root_says_what_this_is(api: Served) -> None:
    async with api.http.get("/") as response:
        about = await response.json()
    assert (about["name"], about["model"], about["state"]) == ("EricLLM Console", "fake", "ready")
    assert "/v1/chat/completions" in about["endpoints"]


POLLED = (
    "/health",
    "/ready",
    "/metrics",
    "/v1/models",
    "/v1/models/fake",
    "/api/tags",
    "/api/ps",
    "/api/v1/model",
    "/info",
    "/admin/models",
    "/admin/snapshot",
)


async def test_who_polls_reads_the_snapshot_that_was_published_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Building one takes the longer the more requests there are, and some of these need no key."""
    async with serving(tmp_path, operator=FolderOperator(tmp_path)) as api:
        built: list[str] = []

        def publish(engine: Engine) -> Snapshot:
            built.append("one more")
            return engine.snapshot()

        monkeypatch.setattr(Engine, "publish", publish)
        for path in POLLED:
            async with api.http.get(path) as response:
                assert response.status == 200, path
            assert not built, path
        await api.post("/api/show", model="fake")
        await api.post("/api/v1/model", action="list")
        assert not built


def test_readings_of_a_device_are_gauges_and_an_absent_one_has_no_sample() -> None:
    device = msgspec.structs.replace(scenes.gpu(0), sensors=DeviceSensors(sm_clock_mhz=1695, xid_errors=(79,), fan=0.5))
    collector = SnapshotCollector(lambda: scenes.busy(devices=(device, scenes.cpu())), lambda: ())
    found = {
        family.name: [(sample.labels["device"], sample.value) for sample in family.samples]
        for family in collector.collect()
        if family.name.startswith("ericllm_device_")
    }
    assert found["ericllm_device_sm_clock_mhz"] == [(device.id, 1695)]
    assert found["ericllm_device_xid_errors"] == [(device.id, 1)]
    assert found["ericllm_device_fan_ratio"] == [(device.id, 0.5)]
    assert found["ericllm_device_ecc_errors"] == []
