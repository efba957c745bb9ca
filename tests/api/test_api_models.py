"""Several models and their adapters: which one answers, how they are listed, and what an unknown name is told."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engine.config import AdapterSpec, EngineConfig
from tests.api.harness import Served, serving, until
from tests.api.operators import named_spec
from tests.fakes.backend import FakeBackend, saying
from tests.fakes.engines import Backends, worker

PATHS = ("/generate", "/v1/completions", "/v1/chat/completions")


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[Served]:
    """Two models: `one` says 1, and has the adapters `poet` and `critic`; `two` says 2."""
    second = Backends(FakeBackend(reply=saying("2")))
    spec = named_spec(tmp_path, "one")
    async with serving(tmp_path, FakeBackend(reply=saying("1")), spec=spec, others=second) as api:
        await api.engine.load(named_spec(tmp_path, "two"), beside=True)
        for name in ("poet", "critic"):
            await api.engine.attach(AdapterSpec(name=name, path=tmp_path / f"{name}-v1"), "one")
        yield api


def asking(path: str, **fields: Any) -> dict[str, Any]:
    """A body for any of the dialects."""
    said = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": ">"}
    return {**said, "max_tokens": 3, **fields}


def text_in(answer: dict[str, Any]) -> str:
    """What was generated, in any of the dialects."""
    if "text" in answer:
        return str(answer["text"]).removeprefix(">")
    choice = answer["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def used_adapter(api: Served) -> str:
    """The name of the adapter that the first model's last request was computed with."""
    return api.backend.submitted[-1].adapter.partition("\0")[0]


@pytest.mark.parametrize("path", PATHS)
async def test_the_model_field_chooses_who_answers(two: Served, path: str) -> None:
    assert text_in(await two.post(path, **asking(path, model="one"))) == "111"
    assert text_in(await two.post(path, **asking(path, model="two"))) == "222"
    assert text_in(await two.post(path, **asking(path))) == "111"
    assert text_in(await two.post(path, **asking(path, model=""))) == "111"


@pytest.mark.parametrize("path", PATHS)
async def test_an_unknown_model_is_a_404_with_all_that_can_be_named(two: Served, path: str) -> None:
    error = await two.refusal(path, status=404, **asking(path, model="gpt-4"))
    assert (error["code"], error["param"], error["type"]) == ("model_not_found", "model", "not_found_error")
    for name in ("gpt-4", "one", "two", "poet", "critic"):
        assert name in error["message"]


@pytest.mark.parametrize("path", PATHS)
async def test_an_adapter_s_name_as_the_model_is_its_model_with_it(two: Served, path: str) -> None:
    answer = await two.post(path, **asking(path, model="critic"))
    assert used_adapter(two) == "critic"
    assert answer.get("model", "critic") == "critic"


async def test_tgi_s_adapter_id_is_an_adapter_and_its_model_a_model(two: Served) -> None:
    parameters = {"adapter_id": "poet", "max_new_tokens": 3}
    assert await two.post("/generate", inputs=">", parameters=parameters) == {"generated_text": "111"}
    assert used_adapter(two) == "poet"
    answer = await two.post("/generate", inputs=">", model="two", parameters={"max_new_tokens": 3})
    assert answer == {"generated_text": "222"}


@pytest.mark.parametrize("name", ["tgi", "dummy"])
async def test_names_that_clients_of_one_model_send_are_the_first_model_s(two: Served, name: str) -> None:
    assert text_in(await two.post("/v1/completions", prompt=">", max_tokens=3, model=name)) == "111"


@pytest.mark.parametrize("path", PATHS)
async def test_the_lora_field_chooses_an_adapter_of_the_model(two: Served, path: str) -> None:
    for body in ({"lora": "poet"}, {"lora": "poet", "model": "one"}, {"lora": "poet", "model": "poet"}):
        await two.post(path, **asking(path, **body))
        assert used_adapter(two) == "poet"
    await two.post(path, **asking(path, lora=""))
    assert used_adapter(two) == ""


@pytest.mark.parametrize("path", PATHS)
async def test_an_unknown_adapter_is_a_404_with_those_of_the_model(two: Served, path: str) -> None:
    error = await two.refusal(path, status=404, **asking(path, lora="painter"))
    assert error["param"] == "lora"
    assert error["message"] == "one has no adapter 'painter'; available: poet, critic"
    error = await two.refusal(path, status=404, **asking(path, model="two", lora="poet"))
    assert error["message"] == "two has no adapter 'poet'; available: none"


async def test_two_different_adapters_in_one_request_are_refused(two: Served) -> None:
    error = await two.refusal("/generate", prompt="x", model="poet", lora="critic")
    assert error["param"] == "lora"


async def test_a_backend_that_takes_no_adapter_per_request_says_what_it_does_instead(tmp_path: Path) -> None:
    spec = named_spec(tmp_path, "one", lora=tmp_path / "baked-in")
    async with serving(tmp_path, FakeBackend(adapters_per_request=False), spec=spec) as api:
        error = await api.refusal("/generate", prompt="x", lora="poet")
    assert error["param"] == "lora"
    assert "fake backend has no adapters per request" in error["message"]
    assert "baked-in" in error["message"]


async def test_all_models_and_their_adapters_are_listed(two: Served) -> None:
    cards = {card["id"]: card for card in (await two.get("/v1/models"))["data"]}
    assert list(cards) == ["one", "poet", "critic", "two"]
    assert {card["state"] for card in cards.values()} == {"ready"}
    assert (cards["one"]["parent"], cards["one"]["root"]) == (None, "one")
    assert (cards["poet"]["parent"], cards["poet"]["root"]) == ("one", "poet-v1")
    assert cards["poet"]["max_model_len"] == cards["one"]["max_model_len"] == 4096
    for name, card in cards.items():
        assert await two.get(f"/v1/models/{name}") == card


async def test_asking_for_an_unknown_model_s_card_is_a_404_with_the_list(two: Served) -> None:
    error = (await two.get("/v1/models/org/other", status=404))["error"]
    assert error["message"] == "There is no model 'org/other'; available: one, poet, critic, two"


async def test_a_model_that_sleeps_is_listed_as_such_and_asking_wakes_it(tmp_path: Path) -> None:
    config = EngineConfig(worker_host="thread", idle_unload_s=0.01)
    backend = FakeBackend(reply=saying("1"))
    async with serving(tmp_path, backend, config=config, others=Backends(backend)) as api:
        await until(lambda: api.engine.status.state == "idle")
        assert [card["state"] for card in (await api.get("/v1/models"))["data"]] == ["idle"]
        assert await api.get("/ready") == {"status": "idle", "model": "fake"}
        assert (await api.get("/health"))["status"] == "ok"
        assert api.engine.status.state == "idle"
        await api.engine.reconfigure(idle_unload_s=600.0)
        assert (await api.post("/generate", prompt=">", max_tokens=2))["text"] == ">11"


async def test_the_request_table_knows_who_asks_for_what_and_how_urgently(two: Served) -> None:
    answer = await two.post("/v1/completions", prompt="x", model="poet", priority=-3, max_tokens=1)
    row = two.engine.publish().requests[0]
    assert (row.id, row.model, row.client, row.priority) == (answer["id"], "poet", "127.0.0.1", 3)


async def test_metrics_are_by_model(two: Served) -> None:
    await two.post("/generate", prompt="x", model="two", max_tokens=1)
    async with two.http.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    for name in ("one", "two"):
        assert f'vllm:num_requests_running{{engine="0",model_name="{name}"}} 0.0' in lines
        assert f'vllm:num_requests_waiting{{engine="0",model_name="{name}"}} 0.0' in lines
        used = 1.0 if name == "two" else 0.0
        for counter in ("prompt_tokens_total", "generation_tokens_total", "e2e_request_latency_seconds_count"):
            assert f'vllm:{counter}{{engine="0",model_name="{name}"}} {used}' in lines
        assert f'ericllm_model_state{{model_name="{name}",state="ready"}} 1.0' in lines
        assert f'ericllm_workers_wanted{{model_name="{name}"}} 1.0' in lines
    assert 'ericllm_worker_deaths_in_a_row{model_name="two",worker="w1"} 0.0' in lines
    assert 'ericllm_worker_prompts_limit{model_name="one",worker="w0"} 0.0' in lines


async def test_health_tells_of_every_model_and_worker(two: Served) -> None:
    health = await two.get("/health")
    assert [(model["name"], model["state"], model["workers"]) for model in health["models"]] == [
        ("one", "ready", 1),
        ("two", "ready", 1),
    ]
    assert [(each["id"], each["model"], each["deaths"], each["stalled"]) for each in health["workers"]] == [
        ("w0", "one", 0, False),
        ("w1", "two", 0, False),
    ]
    assert worker(two.engine, "w1").model == "two"
