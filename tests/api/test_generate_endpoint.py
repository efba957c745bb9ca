"""POST /generate, as EricLLM's and vLLM's clients use it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from engine.config import EngineConfig
from tests.api.harness import Served, serving
from tests.fakes.backend import FakeBackend, expected_text, letters, saying


def completion(prompt: str, count: int) -> str:
    """What the fake model answers."""
    return expected_text(list(prompt.encode()), count, letters)


async def test_the_answer_is_prompt_and_completion_as_one_string(api: Served) -> None:
    assert await api.post("/generate", prompt="Once", max_tokens=5) == {"text": "Once" + completion("Once", 5)}


async def test_defaults_are_those_of_ericllm(api: Served) -> None:
    await api.post("/generate", prompt="Once")
    params = api.backend.submitted[0].params
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (128, 0.7, 40, 0.5)
    assert (params.repetition_penalty, params.min_p, params.stop) == (1.0, 0.0, ())


async def test_a_body_with_every_default_that_ericllm_has_is_accepted(api: Served) -> None:
    body = {
        "max_tokens": 4,
        "temperature": 0.7,
        "top_k": 40,
        "top_p": 0.5,
        "token_repetition_penalty": 1.0,
        "stop": [],
        "skip_special_tokens": True,
        "n": 1,
        "model": "",
        "top_a": 1.0,
        "min_p": 0,
        "filters": [],
    }
    assert await api.post("/generate", prompt="Once", **body) == {"text": "Once" + completion("Once", 4)}


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1, "temperature": 0.0, "max_tokens": 3, "stream": False},
        {"n": 1, "use_beam_search": False, "temperature": 0.0, "max_tokens": 3, "stream": False},
        {"n": 1, "best_of": 1, "use_beam_search": False, "top_p": 1.0, "ignore_eos": True, "max_tokens": 3},
        {"n": 1, "max_tokens": 3},
        {"stream": False, "max_tokens": 3},
    ],
    ids=["demo client", "older demo client", "benchmark", "n", "stream"],
)
async def test_vllm_s_demo_clients_get_a_list(api: Served, fields: dict[str, object]) -> None:
    assert await api.post("/generate", prompt="Once", **fields) == {"text": ["Once" + completion("Once", 3)]}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.7, "top_k": 40, "top_p": 0.5},
        {"token_repetition_penalty": 1.0, "n": 1, "stop": [], "skip_special_tokens": True, "model": ""},
    ],
    ids=["prompt alone", "sampling", "all that EricLLM knows"],
)
async def test_ericllm_s_clients_get_a_string(api: Served, fields: dict[str, object]) -> None:
    answer = await api.post("/generate", prompt="Once", max_tokens=3, **fields)
    assert answer == {"text": "Once" + completion("Once", 3)}


async def test_ericllm_s_name_for_the_repetition_penalty_reaches_the_engine(api: Served) -> None:
    await api.post("/generate", prompt="Once", max_tokens=1, token_repetition_penalty=1.2)
    assert api.backend.submitted[0].params.repetition_penalty == 1.2


async def test_n_answers_come_as_a_list(api: Served) -> None:
    answer = await api.post("/generate", prompt="Once", n=2, max_tokens=3)
    assert answer == {"text": ["Once" + completion("Once", 3)] * 2}


async def test_several_prompts_come_back_in_their_order(api: Served) -> None:
    answer = await api.post("/generate", prompt=["one", "two"], max_tokens=3)
    assert answer == {"text": ["one" + completion("one", 3), "two" + completion("two", 3)]}


async def test_vllm_s_parameters_are_understood(api: Served) -> None:
    await api.post(
        "/generate",
        prompt="x",
        max_tokens=2,
        top_k=-1,
        repetition_penalty=1.1,
        ignore_eos=True,
        stop_token_ids=[7],
        min_tokens=1,
        use_beam_search=False,
        best_of=1,
        seed=3,
    )
    params = api.backend.submitted[0].params
    assert (params.top_k, params.repetition_penalty, params.ignore_eos) == (0, 1.1, True)
    assert (params.stop_token_ids, params.min_tokens, params.seed) == ((7,), 1, 3)


async def test_a_stream_is_lines_of_all_texts_so_far_as_vllm_s_demo_server_sends_them(api: Served) -> None:
    async with api.http.post("/generate", json={"prompt": "Once", "max_tokens": 6, "stream": True}) as response:
        lines = [json.loads(line) for line in (await response.text()).splitlines()]
    texts = [line["text"][0] for line in lines]
    assert texts[-1] == "Once" + completion("Once", 6)
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))


async def test_an_answer_says_what_its_time_went_into_where_requested(
    api: Served,
) -> None:
    answer = await api.post("/generate", prompt="Once", max_tokens=6, why=True)
    body = {"prompt": "Once", "max_tokens": 6, "stream": True, "why": True}
    async with api.http.post("/generate", json=body) as response:
        *lines, last = [json.loads(line) for line in (await response.text()).splitlines()]
    for found in (answer["why"], last["why"]):
        assert sum(found["causes_ms"].values()) == pytest.approx(found["total_ms"], rel=0.01)
    assert isinstance(answer["text"], str) and not any("why" in line for line in lines)


async def test_a_failure_in_a_stream_is_its_last_line(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, FakeBackend(fail_at_steps=range(4, 1000)), config=EngineConfig(worker_host="thread")) as api,
        api.http.post("/generate", json={"prompt": "Once", "stream": True}) as response,
    ):
        lines = [json.loads(line) for line in (await response.text()).splitlines()]
    assert lines[0]["text"][0].startswith("Once")
    assert lines[-1]["error"]["type"] == "server_error"


async def test_an_answer_ends_before_a_stop_string(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeBackend(reply=saying("one two three"))) as api:
        assert await api.post("/generate", prompt=">", stop=[" two"]) == {"text": ">one"}
        assert await api.post("/generate", prompt=">", stop="three", max_tokens=40) == {"text": ">one two "}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"top_a": 1.1}, "top_a"),
        ({"filters": ["</s>"]}, "filters"),
        ({"best_of": 3}, "best_of"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"token_repetition_penalty": 1.2, "repetition_penalty": 1.3}, "token_repetition_penalty"),
        ({"token_repetition_penalty": 0}, "token_repetition_penalty"),
        ({"logprobs": 2}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temprature": 1}, "temprature"),
    ],
)
async def test_what_is_not_honoured_is_refused_by_name(api: Served, body: dict[str, object], param: str) -> None:
    error = await api.refusal("/generate", prompt="x", **body)
    assert error["param"] == param
    assert param in error["message"]


async def test_a_request_that_names_no_model_is_listed_with_the_one_that_answers(api: Served) -> None:
    await api.post("/generate", prompt="x", max_tokens=1)
    spec = api.engine.status.spec
    assert spec is not None
    assert [row.model for row in api.engine.publish().requests] == [spec.name]
