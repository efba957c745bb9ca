"""Ollama's dialect: /api/generate and /api/chat."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from console.api.server import ApiSettings
from engine.config import EngineConfig
from tests.api.harness import Served, serving
from tests.api.ollama_calls import HELLO, chat, generate, refusal
from tests.fakes.backend import FakeBackend, Gate, expected_text, saying
from tests.fakes.model import write_fake_model

HELLO_PROMPT = "user: hello\nassistant: "
FIGURES = {
    "total_duration",
    "load_duration",
    "prompt_eval_count",
    "prompt_eval_duration",
    "eval_count",
    "eval_duration",
}


def answer_to(prompt: str, count: int) -> str:
    """What the fake model answers to a rendered prompt."""
    return expected_text(list(prompt.encode()), count)


async def lines(api: Served, path: str, **body: Any) -> list[dict[str, Any]]:
    """The lines of a streamed answer."""
    async with api.http.post(path, json=body) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "application/x-ndjson"
        return [json.loads(line) for line in (await response.text()).splitlines()]


def prompt_of(api: Served) -> str:
    """The prompt that the backend got last."""
    return bytes(api.backend.submitted[-1].prompt_ids).decode()


def without(answer: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name not in names}


async def test_the_answer_to_a_prompt_has_ollama_s_shape(api: Served) -> None:
    answer = await generate(api, model="fake", options={"num_predict": 5})
    assert answer.pop("created_at").endswith("Z")
    assert without(answer, FIGURES) == {
        "model": "fake",
        "response": answer_to(HELLO_PROMPT, 5),
        "done": True,
        "done_reason": "length",
        "context": list((HELLO_PROMPT + answer_to(HELLO_PROMPT, 5)).encode()),
    }
    assert set(answer) >= FIGURES


async def test_the_answer_to_a_conversation_has_ollama_s_shape(api: Served) -> None:
    answer = await chat(api, model="fake:latest", options={"num_predict": 5})
    assert answer.pop("created_at").endswith("Z")
    assert without(answer, FIGURES) == {
        "model": "fake:latest",
        "message": {"role": "assistant", "content": answer_to(HELLO_PROMPT, 5)},
        "done": True,
        "done_reason": "length",
    }


async def test_answers_are_streamed_as_lines_unless_told_otherwise(api: Served) -> None:
    spoken = await lines(api, "/api/chat", messages=HELLO, options={"num_predict": 8})
    assert "".join(line["message"]["content"] for line in spoken) == answer_to(HELLO_PROMPT, 8)
    assert [line["done"] for line in spoken] == [False] * (len(spoken) - 1) + [True]
    assert set(spoken[-1]) >= FIGURES
    assert not FIGURES & set(spoken[0])
    written = await lines(api, "/api/generate", prompt="hello", options={"num_predict": 8})
    assert "".join(line["response"] for line in written) == answer_to(HELLO_PROMPT, 8)
    assert (written[-1]["done_reason"], len(written[-1]["context"])) == ("length", len(HELLO_PROMPT) + 8)


async def test_durations_are_measured_by_the_engine_and_add_up(api: Served) -> None:
    answer = await generate(api, options={"num_predict": 5})
    [row] = [row for row in api.engine.publish().requests if row.state == "finished"]
    assert row.ttft_s is not None
    assert row.itl_s is not None
    assert answer["prompt_eval_count"] == len(HELLO_PROMPT)
    assert answer["eval_count"] == 5
    assert answer["prompt_eval_duration"] == round((row.ttft_s - row.queued_s) * 1e9)
    assert answer["eval_duration"] == round(row.itl_s * 4 * 1e9)
    spent = answer["load_duration"] + answer["prompt_eval_duration"] + answer["eval_duration"]
    assert 0 < spent <= answer["total_duration"]


async def test_system_is_told_by_the_model_s_own_template(api: Served) -> None:
    await generate(api, system="be kind", options={"num_predict": 1})
    assert prompt_of(api) == "system: be kind\nuser: hello\nassistant: "


async def test_a_raw_prompt_is_taken_as_it_is_and_gives_no_context(api: Served) -> None:
    answer = await generate(api, raw=True, options={"num_predict": 1})
    assert prompt_of(api) == "hello"
    assert "context" not in answer
    assert "system" in await refusal(api, "/api/generate", prompt="x", raw=True, system="y")


async def test_a_context_is_gone_on_from(api: Served) -> None:
    first = await generate(api, options={"num_predict": 3})
    await generate(api, prompt="more", context=first["context"], options={"num_predict": 1})
    assert prompt_of(api) == HELLO_PROMPT + answer_to(HELLO_PROMPT, 3) + "user: more\nassistant: "
    assert "context" in await refusal(api, "/api/generate", prompt="x", context=[10**6])


async def test_an_answer_begun_goes_on(api: Served) -> None:
    await chat(api, messages=[*HELLO, {"role": "assistant", "content": "Well,"}], options={"num_predict": 1})
    assert prompt_of(api) == "user: hello\nassistant: Well,"


async def test_no_prompt_only_waits_for_the_model(api: Served) -> None:
    loaded = await api.post("/api/generate", model="fake", keep_alive="5m")
    assert (loaded["done"], loaded["done_reason"], loaded["response"]) == (True, "load", "")
    assert (await api.post("/api/chat", model="fake"))["message"] == {"role": "assistant", "content": ""}
    assert api.backend.submitted == []


async def test_options_reach_the_engine_under_ollama_s_names(api: Served) -> None:
    options = {
        "temperature": 0.3,
        "top_k": 7,
        "top_p": 0.5,
        "min_p": 0.1,
        "typical_p": 0.7,
        "tfs_z": 0.9,
        "repeat_penalty": 1.3,
        "repeat_last_n": 32,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "seed": 5,
        "stop": ["x"],
        "num_predict": 9,
        "dry_multiplier": 0.8,
        "num_thread": 4,
        "use_mmap": True,
    }
    await generate(api, options=options)
    params = api.backend.submitted[0].params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.3, 7, 0.5, 0.1)
    assert (params.typical_p, params.tfs, params.repetition_penalty, params.repetition_range) == (0.7, 0.9, 1.3, 32)
    assert (params.presence_penalty, params.frequency_penalty, params.seed) == (0.1, 0.2, 5)
    assert (params.stop, params.max_tokens, params.dry_multiplier) == (("x",), 9, 0.8)


async def test_defaults_are_ollama_s_where_the_model_s_makers_recommend_nothing(tmp_path: Path) -> None:
    folder = write_fake_model(tmp_path / "m")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 256, "temperature": 0.6, "top_k": 20}))
    async with serving(folder) as api:
        await generate(api, options={"num_predict": 1, "seed": -1})
        params = api.backend.submitted[0].params
    assert (params.temperature, params.top_k, params.top_p) == (0.6, 20, 0.9)
    assert (params.repetition_penalty, params.repetition_range) == (1.1, 64)
    assert params.seed != -1


async def test_repeat_last_n_zero_is_off_and_minus_one_is_all(api: Served) -> None:
    await generate(api, options={"num_predict": 1, "repeat_last_n": 0, "frequency_penalty": 1})
    await generate(api, options={"num_predict": 1, "repeat_last_n": -1})
    off, everything = (request.params for request in api.backend.submitted)
    assert (off.repetition_penalty, off.frequency_penalty) == (1.0, 0.0)
    assert (everything.repetition_penalty, everything.repetition_range) == (1.1, 0)


async def test_num_ctx_limits_prompt_and_answer_together(api: Served) -> None:
    for num_predict, tokens in ((-1, 4), (2, 2), (100, 4)):
        options = {"num_ctx": len(HELLO_PROMPT) + 4, "num_predict": num_predict}
        assert (await generate(api, options=options))["eval_count"] == tokens
    assert "num_ctx" in await refusal(api, "/api/generate", prompt="hello", options={"num_ctx": 4})
    assert (await generate(api, options={"num_ctx": 10**6, "num_predict": 3}))["eval_count"] == 3


async def test_a_stop_string_ends_the_answer(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeBackend(reply=saying("one two three"))) as api:
        answer = await generate(api, options={"stop": [" three"]})
    assert (answer["response"], answer["done_reason"]) == ("one two", "stop")


async def test_logprobs_come_with_the_tokens(api: Served) -> None:
    answer = await generate(api, logprobs=True, top_logprobs=1, options={"num_predict": 3})
    assert "".join(entry["token"] for entry in answer["logprobs"]) == answer["response"]
    assert api.backend.submitted[0].params.logprobs == 1
    spoken = await lines(api, "/api/chat", messages=HELLO, logprobs=True, options={"num_predict": 3})
    entries = [entry for line in spoken for entry in line.get("logprobs", [])]
    assert "".join(entry["token"] for entry in entries) == answer_to(HELLO_PROMPT, 3)


async def test_a_failure_in_a_stream_is_its_last_line(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeBackend(fail_at_steps=range(4, 1000))) as api:
        assert set((await lines(api, "/api/generate", prompt="hello"))[-1]) == {"error"}


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/api/generate", {"suffix": "x"}, "suffix"),
        ("/api/generate", {"format": "xml"}, "format"),
        ("/api/generate", {"format": {"type": "x"}}, "format"),
        ("/api/chat", {"messages": HELLO, "tools": [{"type": "function"}]}, "tools[0].function"),
        ("/api/generate", {"template": "{{ .Prompt }}"}, "template"),
        ("/api/generate", {"images": ["aGk="]}, "images"),
        ("/api/generate", {"think": True}, "think"),
        ("/api/generate", {"think": "high"}, "think"),
        ("/api/generate", {"prompt": "", "keep_alive": 0}, "keep_alive"),
        ("/api/generate", {"prompt": "", "keep_alive": "0s"}, "keep_alive"),
        ("/api/chat", {"messages": [], "keep_alive": 0}, "keep_alive"),
        ("/api/generate", {"keep_alive": "soon"}, "keep_alive"),
        ("/api/generate", {"width": 512}, "width"),
        ("/api/generate", {"truncate": True}, "truncate"),
        ("/api/generate", {"top_logprobs": 2}, "top_logprobs"),
        ("/api/generate", {"temperature": 1}, "temperature"),
        ("/api/generate", {"options": {"temprature": 1}}, "temprature"),
        ("/api/generate", {"options": {"temperature": -1}}, "temperature"),
        ("/api/generate", {"options": {"repeat_penalty": 0}}, "repeat_penalty"),
        ("/api/generate", {"options": {"tfs_z": 2}}, "tfs_z"),
        ("/api/generate", {"options": {"num_predict": -3}}, "num_predict"),
        ("/api/generate", {"options": {"penalize_newline": False}}, "penalize_newline"),
        ("/api/generate", {"options": {"n": 2}}, "n is not an option"),
        ("/api/generate", {"options": {"stream": True}}, "stream is not an option"),
        ("/api/generate", {"options": 3}, "options"),
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "messages[0].images"),
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood"),
        ("/api/chat", {"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ("/api/chat", {"messages": [{"role": "tool", "content": "x"}]}, "messages[0]"),
        ("/api/chat", {"messages": ["x"]}, "messages[0]"),
        ("/api/embed", {"input": [3]}, "input"),
        ("/api/embed", {"input": "x", "dimensions": 3}, "dimensions"),
        ("/api/embed", {}, "input"),
    ],
)
async def test_what_is_not_honoured_is_refused_by_name(
    api: Served, path: str, body: dict[str, object], named: str
) -> None:
    usual = {"prompt": "x"} if path == "/api/generate" else {}
    assert named in await refusal(api, path, **{**usual, **body})


async def test_what_changes_nothing_is_taken(api: Served) -> None:
    await generate(api, keep_alive=-1, think=False, images=[], suffix="", template="", options={"num_predict": 1})
    await chat(api, keep_alive="1h30m", tools=[], options={"num_predict": 1, "num_gpu": 99, "seed": None})


async def test_errors_are_one_sentence(tmp_path: Path) -> None:
    settings = ApiSettings(port=0, api_key="sesame")
    config = EngineConfig(worker_host="thread", max_prompts=1, max_queue=0)
    async with serving(tmp_path, FakeBackend(gate=Gate(1)), settings=settings, config=config) as api:
        await refusal(api, "/api/chat", 401, messages=HELLO)
        api.http.headers["Authorization"] = "Bearer sesame"
        assert "available: fake" in await refusal(api, "/api/chat", 404, model="llama3", messages=HELLO)
        async with api.http.post("/api/chat", json={"messages": HELLO}):
            await refusal(api, "/api/chat", 429, messages=HELLO)
        await api.server.switch_dialect("ollama", False)
        assert "is off" in await refusal(api, "/api/chat", 404, messages=HELLO)


@pytest.mark.parametrize("field", ["num_predict", "num_ctx", "seed", "top_k", "temperature", "repeat_last_n", "tfs_z"])
async def test_a_number_beyond_all_bounds_is_no_server_error(api: Served, field: str) -> None:
    body = f'{{"prompt": "x", "stream": false, "options": {{"num_predict": 1, "{field}": 1{"0" * 400}}}}}'
    async with api.http.post(
        "/api/generate", data=body.replace('"num_predict": 1, "num_predict"', '"num_predict"')
    ) as it:
        assert it.status == (200 if field == "num_ctx" else 400)
        answer = await it.json()
    assert field == "num_ctx" or field in answer["error"]


@pytest.mark.parametrize("keep_alive", ["9" * 10**6, "1" * 60 + "h", [], {}, True, "-", "5", "5m5", "1h1h"])
async def test_a_duration_of_any_shape_is_no_server_error(api: Served, keep_alive: object) -> None:
    async with api.http.post("/api/generate", json={"prompt": "", "keep_alive": keep_alive}) as response:
        assert response.status in (200, 400)


@pytest.mark.parametrize("content", [3, [], {}, [{"type": "text", "text": "x"}]])
async def test_content_that_is_no_text_is_refused(api: Served, content: object) -> None:
    assert "messages[0].content" in await refusal(api, "/api/chat", messages=[{"role": "user", "content": content}])


async def test_a_model_without_a_chat_template_goes_on_with_the_prompt(tmp_path: Path) -> None:
    folder = write_fake_model(tmp_path / "m")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    async with serving(folder) as api:
        await generate(api, options={"num_predict": 1})
        assert prompt_of(api) == "hello"
        assert "system" in await refusal(api, "/api/generate", prompt="x", system="y")
        assert "chat template" in await refusal(api, "/api/chat", messages=HELLO)
        assert (await api.post("/api/show", model="fake"))["template"] == ""


async def test_limits_of_the_server_are_told_in_ollama_s_words(tmp_path: Path) -> None:
    async with serving(tmp_path, settings=ApiSettings(port=0, max_output_tokens=3)) as api:
        told = await refusal(api, "/api/generate", prompt="x", options={"num_predict": 4})
    assert told == "num_predict is 4; the limit is 3"


async def test_an_unknown_option_is_named_as_it_was_sent(api: Served) -> None:
    told = await refusal(api, "/api/generate", prompt="x", options={"max_tokens": 4})
    assert told == "max_tokens is not a field of this endpoint"
