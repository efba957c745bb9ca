"""What reads vLLM's metrics reads ours: its example dashboards, our own dashboard, Prometheus itself, and vllmstat."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from console.api.status_endpoints import Operations
from engine.config import EngineConfig
from tests.api.harness import PATIENCE_S, Served, serving, until
from tests.fakes.backend import FakeBackend, Gate
from tests.fakes.model import fake_spec
from tests.fakes.ports import free_port

pytestmark = pytest.mark.long

DASHBOARDS = sorted((Path(__file__).parents[2] / "docs" / "grafana").glob("*.json"))
ALERTS = DASHBOARDS[0].with_name("alerts.yaml")
OPENMETRICS = "application/openmetrics-text"
ACCEPTS = {
    "Prometheus 2": f"{OPENMETRICS};version=1.0.0,{OPENMETRICS};version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5",
    "Prometheus 3": f"{OPENMETRICS};version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=1.0.0;q=0.3,*/*;q=0.1",
    "dots": f"{OPENMETRICS};version=1.0.0;escaping=dots",
    "text 1.0.0": "text/plain;version=1.0.0;escaping=underscores",
    "text 0.0.4": "text/plain;version=0.0.4",
    "anything": "*/*",
}
"""What clients of /metrics accept, by who they are."""
NAME = re.compile(r"\b(?:vllm:|ericllm_|http_)\w+")
SPARSE = {"vllm:spec_decode_num_accepted_tokens_per_pos_total"}
"""There are samples only where tokens are guessed ahead."""

# fmt: off
VLLM_DASHBOARDS = [
    "vllm:e2e_request_latency_seconds_bucket", "vllm:e2e_request_latency_seconds_sum",
    "vllm:e2e_request_latency_seconds_count", "vllm:prompt_tokens_total", "vllm:generation_tokens_total",
    "vllm:time_per_output_token_seconds_bucket", "vllm:time_per_output_token_seconds_sum",
    "vllm:time_per_output_token_seconds_count", "vllm:inter_token_latency_seconds_bucket",
    "vllm:inter_token_latency_seconds_sum", "vllm:inter_token_latency_seconds_count", "vllm:num_requests_running",
    "vllm:num_requests_waiting", "vllm:time_to_first_token_seconds_bucket", "vllm:time_to_first_token_seconds_sum",
    "vllm:time_to_first_token_seconds_count", "vllm:gpu_cache_usage_perc", "vllm:kv_cache_usage_perc",
    "vllm:request_prompt_tokens_bucket", "vllm:request_generation_tokens_bucket", "vllm:request_success_total",
    "vllm:request_queue_time_seconds_sum", "vllm:request_prefill_time_seconds_sum",
    "vllm:request_decode_time_seconds_sum", "vllm:request_max_num_generation_tokens_sum",
    "vllm:iteration_tokens_total_count", "vllm:spec_decode_num_accepted_tokens_total",
    "vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total", "http_requests_total",
]
# fmt: on
"""What the queries of vLLM's examples (grafana.json of several releases, performance_statistics.json,
query_statistics.json, vllm_speculative_decoding.json) ask Prometheus for."""

VLLM_BUCKETS = {
    "vllm:time_to_first_token_seconds": "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 "
    "80 160 640 2560",
    "vllm:inter_token_latency_seconds": "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80",
    "vllm:request_time_per_output_token_seconds": "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 "
    "20 40 80",
    **dict.fromkeys(
        (
            "vllm:e2e_request_latency_seconds",
            "vllm:request_queue_time_seconds",
            "vllm:request_inference_time_seconds",
            "vllm:request_prefill_time_seconds",
            "vllm:request_decode_time_seconds",
        ),
        "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680",
    ),
    **dict.fromkeys(
        (
            "vllm:request_prompt_tokens",
            "vllm:request_prefill_kv_computed_tokens",
            "vllm:request_generation_tokens",
            "vllm:request_max_num_generation_tokens",
            "vllm:request_params_max_tokens",
        ),
        "1 2 5 10 20 50 100 200 500 1000 2000",
    ),
    "vllm:request_params_n": "1 2 5 10 20",
    "vllm:iteration_tokens_total": "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384",
}
"""vLLM's, those of lengths for a context of 4096 tokens."""


async def families(api: Served, accept: str = "text/plain") -> list[Metric]:
    """All metric families in the format that is accepted."""
    async with api.http.get("/metrics", headers={"Accept": accept}) as response:
        is_openmetrics = response.content_type == OPENMETRICS
        parse = openmetrics.text_string_to_metric_families if is_openmetrics else text_string_to_metric_families
        return list(parse(await response.text()))


async def scraped(api: Served, accept: str = "text/plain") -> dict[str, list[tuple[dict[str, str], float]]]:
    """The samples by name: (labels, value)."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in await families(api, accept):
        found.setdefault(family.name + ("_total" if family.type == "counter" else ""), [])
        for sample in family.samples:
            found.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return found


async def worked(api: Served) -> dict[str, list[tuple[dict[str, str], float]]]:
    """What a server tells that has answered something."""
    await api.post("/v1/completions", prompt="four", max_tokens=5, n=2)
    return await scraped(api)


async def test_vllm_s_example_dashboards_find_what_they_ask_for(api: Served) -> None:
    found = await worked(api)
    assert not [name for name in VLLM_DASHBOARDS if not found.get(name) and name not in SPARSE]
    for name in VLLM_DASHBOARDS:
        for labels, _ in found[name]:
            assert name.startswith("http_") or (labels["model_name"], labels["engine"]) == ("fake", "0")


async def test_buckets_are_vllm_s(api: Served) -> None:
    found = await worked(api)
    for name, bounds in VLLM_BUCKETS.items():
        told = [labels["le"] for labels, _ in found[f"{name}_bucket"]]
        assert [float(each) for each in told] == [*map(float, bounds.split()), float("inf")], name


async def test_what_was_done_is_counted_where_vllm_counts_it(api: Served) -> None:
    found = await worked(api)
    values = {name: samples[0][1] for name, samples in found.items() if len(samples) == 1}
    assert (values["vllm:prompt_tokens_total"], values["vllm:generation_tokens_total"]) == (8, 10)
    assert (values["vllm:request_params_n_sum"], values["vllm:request_params_n_count"]) == (2, 1)
    assert values["vllm:request_max_num_generation_tokens_sum"] == 5
    assert (values["vllm:request_params_max_tokens_sum"], values["vllm:request_params_max_tokens_count"]) == (10, 2)
    assert values["vllm:iteration_tokens_total_sum"] == 10
    assert values["vllm:request_time_per_output_token_seconds_count"] == 2
    reasons = {labels["finished_reason"]: value for labels, value in found["vllm:request_success_total"]}
    assert reasons == {"stop": 0, "length": 2, "abort": 0, "error": 0}
    sources = {labels["source"]: value for labels, value in found["vllm:prompt_tokens_by_source_total"]}
    assert sources == {"local_compute": 8, "local_cache_hit": 0}
    (labels, _), *others = found["vllm:cache_config_info"]
    assert not others
    assert labels == {
        "model_name": "fake",
        "engine": "0",
        "block_size": "16",
        "num_gpu_blocks": str(api.engine.publish().workers[0].kv_tokens // 16),
        "cache_dtype": "auto",
        "kv_cache_memory_bytes": labels["kv_cache_memory_bytes"],
        "enable_prefix_caching": "True",
    }


async def test_a_model_that_was_unloaded_or_is_loaded_again_keeps_its_numbers(tmp_path: Path) -> None:
    async with serving(tmp_path) as api:
        await api.post("/generate", prompt="x", max_tokens=3)
        await api.engine.unload()
        assert (await scraped(api))["vllm:generation_tokens_total"] == [({"model_name": "fake", "engine": "0"}, 3)]
        await api.engine.load(fake_spec(tmp_path))
        await api.post("/generate", prompt="x", max_tokens=4)
        assert (await scraped(api))["vllm:generation_tokens_total"] == [({"model_name": "fake", "engine": "0"}, 7)]


async def test_http_requests_are_counted_by_route_and_kind_of_status_but_probes_are_not(api: Served) -> None:
    for probe in ("/health", "/ready"):
        await api.get(probe)
    await api.refusal("/v1/completions", prompt="x", max_tokens=-1)
    async with api.http.get("/nowhere/at/all") as response:
        assert response.status == 404
    found = await worked(api)
    counted = {
        (labels["handler"], labels["method"], labels["status"]): value for labels, value in found["http_requests_total"]
    }
    assert counted == {
        ("/v1/completions", "POST", "2xx"): 1,
        ("/v1/completions", "POST", "4xx"): 1,
        ("none", "GET", "4xx"): 1,
    }
    assert sum(value for _, value in found["http_request_duration_seconds_count"]) == 3


def queries(node: Any) -> Iterator[str]:
    """Every query of a dashboard, those of its variables too."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key in ("expr", "definition") and isinstance(value, str):
                yield value
            else:
                yield from queries(value)
    elif isinstance(node, list):
        for each in node:
            yield from queries(each)


def asked_for() -> set[str]:
    """The names of all series that our dashboards ask Prometheus for."""
    asked = {
        name for path in DASHBOARDS for query in queries(json.loads(path.read_bytes())) for name in NAME.findall(query)
    }
    asked |= set(NAME.findall(ALERTS.read_text(encoding="utf-8"))) - {"ericllm_"}
    for noun in ("device", "worker", "queue", "spec_decode", "vllm:"):
        assert any(noun in name for name in asked), noun
    return asked


@pytest.mark.parametrize("accept", ACCEPTS.values(), ids=ACCEPTS)
async def test_our_dashboards_ask_for_nothing_that_is_not_there(api: Served, accept: str) -> None:
    await worked(api)
    assert sorted(asked_for() - set(await scraped(api, accept))) == []


@pytest.mark.parametrize("accept", ACCEPTS.values(), ids=ACCEPTS)
async def test_every_sample_belongs_to_a_family_that_was_declared(api: Served, accept: str) -> None:
    await worked(api)
    assert [family.name for family in await families(api, accept) if family.type == "unknown"] == []


@pytest.mark.parametrize("version", ["1.0.0", "2.0.0", "1.0.0.9", "99.0"])
async def test_metrics_say_the_version_that_they_are_written_in(api: Served, version: str) -> None:
    async with api.http.get("/metrics", headers={"Accept": f"{OPENMETRICS};version={version}"}) as response:
        assert response.headers["Content-Type"] == f"{OPENMETRICS}; version=1.0.0; charset=utf-8"


@asynccontextmanager
async def prometheus(folder: Path, targets: dict[str, str]) -> AsyncIterator[aiohttp.ClientSession]:
    """A real Prometheus that scrapes; a client of its HTTP API, once every target was scraped. targets: host and port
    by job."""
    program = shutil.which("prometheus")
    assert program is not None, (
        "metrics are tested with a real Prometheus: apt-get install --no-install-recommends prometheus"
    )
    jobs = [{"job_name": job, "static_configs": [{"targets": [address]}]} for job, address in targets.items()]
    config = {"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, "scrape_configs": jobs}
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    address = f"127.0.0.1:{free_port()}"
    running = await asyncio.create_subprocess_exec(
        *(program, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"),
        *(f"--web.listen-address={address}", "--log.level=error"),
    )
    try:
        async with aiohttp.ClientSession(f"http://{address}") as http, asyncio.timeout(PATIENCE_S):
            while not await _all_scraped(http, len(targets)):
                assert running.returncode is None
                await asyncio.sleep(0.1)
            yield http
    finally:
        running.terminate()
        await running.wait()


async def _all_scraped(http: aiohttp.ClientSession, targets: int) -> bool:
    try:
        async with http.get("/api/v1/query", params={"query": "up == 1"}) as response:
            return response.status == 200 and len((await response.json())["data"]["result"]) == targets
    except aiohttp.ClientConnectionError:
        return False


@asynccontextmanager
async def as_text(api: Served) -> AsyncIterator[str]:
    """Host and port of a relay that asks for the older format, which no setting of Prometheus 2.42 does."""

    async def relay(_: web.Request) -> web.Response:
        async with api.http.get("/metrics", headers={"Accept": "text/plain;version=0.0.4"}) as response:
            return web.Response(body=await response.read(), headers={"Content-Type": response.headers["Content-Type"]})

    app = web.Application()
    app.add_routes([web.get("/metrics", relay)])
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield "{}:{}".format(*runner.addresses[0][:2])
    finally:
        await runner.cleanup()


FAULTS: dict[str, dict[str, str]] = {
    "EricLLMDown": {"up": "1 0x20"},
    "EricLLMWorkersMissing": {
        'ericllm_workers_wanted{model_name="m"}': "2x20",
        'ericllm_worker_up{model_name="m"}': "1x20",
    },
    "EricLLMWorkersRestart": {"ericllm_worker_restarts_total": "0+1x20"},
    "EricLLMQueueFull": {"vllm:num_requests_waiting": "900x20", "ericllm_queue_limit": "1000x20"},
    "EricLLMErrors": {'http_requests_total{status="5xx"}': "0+1x20", 'http_requests_total{status="2xx"}': "0+9x20"},
}
"""What an alert is raised by: values of series, a minute each."""

CALM: dict[str, str] = {
    "up": "1x20",
    'ericllm_workers_wanted{model_name="m"}': "2x20",
    'ericllm_worker_up{model_name="m",worker="w0"}': "1x20",
    'ericllm_worker_up{model_name="m",worker="w1"}': "1x20",
    'ericllm_workers_wanted{model_name="asleep"}': "1x20",
    'ericllm_model_state{model_name="asleep",state="idle"}': "1x20",
    "ericllm_worker_restarts_total": "0 1 1x20",
    "vllm:num_requests_waiting": "100x20",
    "ericllm_queue_limit": "1000x20",
    'http_requests_total{status="5xx"}': "0+1x20",
    'http_requests_total{status="2xx"}': "0+99x20",
}


@pytest.mark.parametrize("fault", [*FAULTS, "none", "no worker at all"])
def test_an_alert_is_raised_by_its_fault_alone(tmp_path: Path, fault: str) -> None:
    series = FAULTS.get(fault, CALM if fault == "none" else {'ericllm_workers_wanted{model_name="m"}': "1x20"})
    raised = fault if fault in FAULTS else "EricLLMWorkersMissing" if fault != "none" else ""
    rules = json.loads(json.dumps(yaml.safe_load(ALERTS.read_text(encoding="utf-8"))))
    names = [rule["alert"] for group in rules["groups"] for rule in group["rules"]]
    assert names == list(FAULTS)
    told = [{"series": _of_job(name), "values": values} for name, values in series.items()]
    cases = [{"eval_time": "15m", "alertname": name, "exp_alerts": []} for name in names if name != raised]
    test = {"interval": "1m", "input_series": told, "alert_rule_test": cases}
    assert _promtool(tmp_path, test) == 0
    if raised:
        test["alert_rule_test"] = [{"eval_time": "15m", "alertname": raised, "exp_alerts": []}]
        assert _promtool(tmp_path, test) == 1, "it was not raised"


def _of_job(series: str) -> str:
    name, _, labels = series.partition("{")
    return f'{name}{{job="ericllm",instance="i",{labels or "}"}'


def _promtool(folder: Path, test: dict[str, Any]) -> int:
    """The exit status of the alerts' test by Prometheus's own tool."""
    file = folder / "test.json"
    file.write_text(json.dumps({"rule_files": [str(ALERTS)], "tests": [test]}))
    return subprocess.run(["promtool", "test", "rules", file], check=False, capture_output=True).returncode


async def test_prometheus_stores_both_formats_under_the_names_that_dashboards_ask_for(
    api: Served, tmp_path: Path
) -> None:
    """A name without samples, as of a device that tells no temperature, is one that Prometheus knows the meaning of."""
    await worked(api)
    named = {name for name, samples in (await scraped(api)).items() if samples}
    async with as_text(api) as relay, prometheus(tmp_path, {"own": api.url[len("http://") :], "text": relay}) as http:
        async with http.get("/api/v1/query", params={"query": "vllm:num_requests_running"}) as response:
            found = (await response.json())["data"]["result"]
        assert {(each["metric"]["job"], each["metric"]["model_name"]) for each in found} == {
            ("own", "fake"),
            ("text", "fake"),
        }
        for job in ("own", "text"):
            mine = f'{{job="{job}"}}'
            async with http.get("/api/v1/label/__name__/values", params={"match[]": mine}) as response:
                stored = set((await response.json())["data"])
            assert sorted(named - stored) == [], job
            async with http.get("/api/v1/targets/metadata", params={"match_target": mine}) as response:
                declared = {each["metric"].removesuffix("_total") for each in (await response.json())["data"]}
            assert sorted(name for name in asked_for() - stored if name.removesuffix("_total") not in declared) == [], (
                job
            )


def test_our_dashboards_have_panels_that_do_not_overlap() -> None:
    for path in DASHBOARDS:
        check_panels(json.loads(path.read_bytes())["panels"])


def check_panels(panels: list[dict[str, Any]]) -> None:
    """Fail where two of them share a place, or a number."""
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in panels}) == len(panels)


def tokens(api: Served) -> int:
    return api.engine.publish().totals.output_tokens


async def both_have_begun(api: Served, gate: Gate) -> int:
    """Let steps through until one is of two requests, which may reach the worker one by one; return the tokens."""
    while True:
        before = tokens(api)
        gate.allow(1)
        await until(lambda before=before: tokens(api) > before)  # type: ignore[misc]
        if tokens(api) == before + 2:
            return before + 2


async def test_vllmstat_reads_us_as_it_reads_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its two looks, two running requests get ten tokens each while a third waits."""
    scrapes, produced, scrape = 0, asyncio.Event(), Operations._metrics

    async def after_the_tokens(self: Operations, request: web.Request) -> web.Response:
        nonlocal scrapes
        if scrapes:
            await produced.wait()
        answer = await scrape(self, request)
        scrapes += 1
        return answer

    monkeypatch.setattr(Operations, "_metrics", after_the_tokens)
    gate = Gate()
    config = EngineConfig(worker_host="thread", max_prompts=2)
    async with serving(tmp_path, FakeBackend(gate=gate), config=config) as api:
        gate.allow(4)
        await api.post("/v1/completions", prompt="hello", max_tokens=4)
        asking = asyncio.create_task(api.post("/generate", prompt="x", n=3, max_tokens=500))
        before = await both_have_begun(api, gate)
        looking = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "vllmstat", "--once", "--json", "--no-gpu", "--url", api.url),
            stdout=asyncio.subprocess.PIPE,
            env={"XDG_CONFIG_HOME": str(tmp_path), "PATH": ""},
        )
        await until(lambda: scrapes >= 1)
        gate.allow(10)
        await until(lambda: tokens(api) == before + 20)
        produced.set()
        out, _ = await asyncio.wait_for(looking.communicate(), PATIENCE_S)
        capacity = api.engine.publish().workers[0].kv_tokens
        gate.open()
        await asking
    seen = json.loads(out)
    assert (seen["connected"], seen["model_names"], seen["engine_count"]) == (True, ["fake"], 1)
    assert (seen["running"], seen["waiting"], seen["max_model_len"]) == (2, 1, 4096)
    assert seen["gen_tps"] == pytest.approx(0.3 * 20), "the weight of its first difference is 0.3"
    assert (seen["session_gen_tokens"], seen["finish_reasons"]["length"]) == (20, 1.0)
    assert (seen["kv"]["capacity_tokens"], seen["kv"]["dtype"], seen["kv"]["ratio"]) == (capacity, "auto", 1.0)
    assert seen["kv"]["used_tokens"] == 2 * 16
    assert seen["prefix_caching_enabled"] is True
    assert (seen["prompt_len"]["mean"], seen["gen_len"]["mean"]) == (5, 4)
    assert (seen["max_prompt_tokens"], seen["max_output_tokens"]) == (5, 5)
    assert (seen["src_compute"], seen["src_cache_hit"], seen["spec_active"]) == (1.0, 0.0, False)
    for phase in ("ttft", "tpot", "e2e", "queue", "prefill", "decode"):
        assert 0 <= seen[phase]["p50"] <= seen[phase]["p99"], phase
    alone = before - 6  # steps before one was of both
    assert seen["tokens_per_iter"] == pytest.approx((26 + alone) / (15 + alone))
