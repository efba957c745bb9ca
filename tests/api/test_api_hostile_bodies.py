"""Bodies made to break a server: each gets a sentence, and nobody else waits for it."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.api.harness import Served, serving
from tests.api.operators import FolderOperator

HUGE = "1" + "0" * 400


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/completions", "seed"),
        ("/v1/completions", "max_tokens"),
        ("/v1/completions", "min_tokens"),
        ("/v1/completions", "logprobs"),
        ("/v1/completions", "n"),
        ("/v1/completions", "best_of"),
        ("/v1/completions", "temperature"),
        ("/generate", "top_k"),
        ("/v1/chat/completions", "top_logprobs"),
    ],
)
async def test_a_number_beyond_all_bounds_is_a_400_that_names_its_field(api: Served, path: str, field: str) -> None:
    prompt = '"messages": [{"role": "user", "content": "x"}]' if "chat" in path else '"prompt": "x"'
    async with api.http.post(path, data=f'{{{prompt}, "{field}": {HUGE}}}') as response:
        error = (await response.json())["error"]
    assert (response.status, error["param"]) == (400, field)
    assert len(error["message"]) < 200


async def test_a_limit_is_told_exactly(api: Served) -> None:
    error = await api.refusal("/v1/completions", prompt="x", seed=2**63)
    assert error["message"] == f"seed is {2**63}; it must be between {-(2**63)} and {2**63 - 1}"
    error = await api.refusal("/v1/completions", prompt="x", top_p=0)
    assert error["message"] == "top_p is 0.0; it must be more than 0, up to 1.0"


@pytest.mark.parametrize("key", ["05", " 5", "5_0", "+5", "٥", "5.0", "", "9" * 30])
async def test_only_the_usual_spelling_of_a_token_id_is_a_key_of_logit_bias(api: Served, key: str) -> None:
    error = await api.refusal("/v1/completions", prompt="x", logit_bias={key: 1})
    assert error["param"] == "logit_bias"


@pytest.mark.parametrize("name", ["self", "cls", "raise_exception", "a b"])
async def test_any_name_of_a_template_variable_is_harmless(api: Served, name: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    answer = await api.post("/v1/chat/completions", messages=messages, max_tokens=1, chat_template_kwargs={name: 1})
    assert answer["usage"]["completion_tokens"] == 1


async def test_a_message_s_name_and_role_must_be_text(api: Served) -> None:
    for turn, param in (
        ({"role": "user", "content": "x", "name": 5}, "messages[0].name"),
        ({"role": 5, "content": "x"}, "messages[0].role"),
    ):
        assert (await api.refusal("/v1/chat/completions", messages=[turn]))["param"] == param


async def test_an_error_does_not_send_back_the_megabytes_it_quotes(api: Served) -> None:
    error = await api.refusal("/v1/completions", status=404, prompt="x", model="m" * 100_000)
    assert len(error["message"]) <= 1000
    error = await api.refusal("/v1/completions", prompt="x", **{"f" * 100_000: 1})
    assert len(error["message"]) + len(error["param"]) <= 2000


async def test_too_many_prompts_are_refused_before_any_is_tokenized(
    api: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = api.engine.tokenizer_of()
    monkeypatch.setattr(type(tokenizer), "encode_all", lambda *_, **__: pytest.fail("a prompt was tokenized"))
    for path in ("/generate", "/v1/completions"):
        error = await api.refusal(path, prompt=["x"] * 600)
        assert "600 answers" in error["message"]


async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    api: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = api.engine.tokenizer_of()
    assert tokenizer is not None
    monkeypatch.setattr(type(tokenizer), "encode_all", lambda *_, **__: pytest.fail("the text was tokenized"))
    text = "x" * (tokenizer.longest_token * 4097)
    for body in ({"prompt": text}, {"prompt": ["x", text]}):
        error = await api.refusal("/v1/completions", **body)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
        assert "at least 4097 tokens" in error["message"]
        assert "4096" in error["message"]


async def test_a_long_conversation_is_rendered_whole(api: Served) -> None:
    messages = [{"role": "user", "content": "x"}] * 300
    answer = await api.post("/v1/chat/completions", messages=messages, max_tokens=1)
    assert answer["usage"]["prompt_tokens"] == len("user: x\n") * 300 + len("assistant: ")


@pytest.mark.parametrize("path", ["/" + "a" * 8000, "http://[" + "a" * 8000], ids=["path", "no address"])
async def test_a_path_does_not_fill_the_log(api: Served, caplog: pytest.LogCaptureFixture, path: str) -> None:
    caplog.set_level(logging.INFO)
    reader, writer = await asyncio.open_connection("127.0.0.1", api.server.status().port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    await reader.read()
    writer.close()
    assert "aaa" in caplog.text
    assert len(caplog.text) < 500


async def test_a_path_cannot_write_into_the_log(api: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "api")
    async with api.http.get("/nowhere%0aERROR%1b[2J"):
        pass
    assert "\n" not in caplog.text.removesuffix("\n")
    assert "\x1b" not in caplog.text


async def test_what_is_wrong_with_a_shape_is_said_in_json_s_words(api: Served) -> None:
    error = await api.refusal("/v1/completions", prompt="x", stream=True, stream_options=[1])
    assert error["message"] == "stream_options should be an object, not an array"


TALK = [{"role": "user", "content": "x"}]
TOOL = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize(
    ("path", "fields", "sentence"),
    [
        (
            "/v1/completions",
            {"response_format": {"type": "zzz"}},
            "response_format.type should be 'text', 'json_object' or 'json_schema', not \"zzz\"",
        ),
        (
            "/v1/chat/completions",
            {"messages": TALK, "tools": [{**TOOL, "type": "x" * 100}]},
            f"tools[0].type should be 'function', not \"{'x' * 40}...\"",
        ),
        ("/v1/completions", {"temperature": "hot"}, "temperature should be a valid number, not a string"),
        ("/v1/completions", {"stop_token_ids": 3}, "stop_token_ids should be an array, not 3"),
        ("/v1/completions", {"max_tokens": 2.5}, "max_tokens should be a valid integer, not 2.5"),
        ("/v1/completions", {"n": 0}, "n should be greater than or equal to 1, not 0"),
        ("/v1/completions", {"n": True}, "n should be a valid integer, not a boolean"),
        ("/admin/load", {"model": ""}, 'model should have at least 1 character, not ""'),
    ],
)
async def test_a_wrong_value_is_named_and_a_wrong_kind_by_its_kind(
    tmp_path: Path, path: str, fields: dict[str, Any], sentence: str
) -> None:
    async with serving(tmp_path, operator=FolderOperator(tmp_path)) as api:
        prompt = {"prompt": "x"} if path == "/v1/completions" else {}
        assert (await api.refusal(path, **prompt, **fields))["message"] == sentence


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", '{"prompt": "x", "max_tokens": 2.0, "seed": 7e0, "n": 1.0, "stop_token_ids": [3.0]}'),
        ("/v1/completions", '{"prompt": [120.0], "max_tokens": 2, "logprobs": 1.0}'),
        ("/api/v1/generate", '{"prompt": "x", "max_length": 2.0}'),
        ("/api/generate", '{"model": "fake", "prompt": "x", "stream": false, "options": {"num_predict": 2.0}}'),
        ("/generate", '{"inputs": "x", "parameters": {"max_new_tokens": 2.0}}'),
        ("/detokenize", '{"tokens": [120.0]}'),
    ],
)
async def test_a_whole_number_is_an_integer_however_it_is_written(api: Served, path: str, body: str) -> None:
    async with api.http.post(path, data=body, headers={"Content-Type": "application/json"}) as response:
        assert response.status == 200, await response.text()


@pytest.mark.parametrize(
    "head",
    [
        "FOO /health HTTP/1.1",
        "GET /health HTTP/1.1\r\nContent-Length: -5",
        f"GET /{'a' * 9000} HTTP/1.1",
        f"GET / HTTP/1.1\r\nX-Long: {'a' * 9000}",
        "GET / HTTP/1.1\r\nExpect: miracles",
    ],
    ids=["method", "header", "long line", "long header", "expectation"],
)
async def test_what_is_no_http_is_an_error_in_json_and_at_most_one_line_in_the_log(
    api: Served, caplog: pytest.LogCaptureFixture, head: str
) -> None:
    caplog.set_level(logging.INFO)
    reader, writer = await asyncio.open_connection("127.0.0.1", api.server.status().port)
    writer.write(f"{head}\r\nHost: localhost\r\n\r\n".encode())
    status, _, headers = (await reader.readuntil(b"\r\n\r\n")).decode().partition("\r\n")
    answer = json.loads(await reader.read())
    writer.close()
    assert status.split()[1] == ("431" if len(head) > 9000 else "417" if "Expect" in head else "400")
    assert "x-request-id: " in headers.lower()
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert "\n" not in answer["error"]["message"]
    assert "Traceback" not in str(answer)
    assert len(caplog.text.splitlines()) <= 1
