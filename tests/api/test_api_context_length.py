"""Prompts that do not fit: each dialect says so in the words that its clients look for, with the numbers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from tests.api.harness import Served, serving
from tests.fakes.model import fake_spec

LONG = "x" * 5000
ENDLESS = "x" * 500_000
"""It is refused by its characters, before it is tokenized."""

HELLO = [{"role": "user", "content": LONG}]
CONTEXT = 4096
LITELLM = (
    "exceed context limit",
    "this model's maximum context length is",
    "string too long. expected a string with maximum length",
    "model's maximum context limit",
    "is longer than the model's context length",
    "input tokens exceed the configured limit",
    "`inputs` tokens + `max_new_tokens` must be",
    "exceeds the available context size",
    "exceeds the maximum number of tokens allowed",
)
"""What LiteLLM 1.106 looks for in the lower-case text of an error, to try a model with a longer context."""


async def refused(api: Served, path: str, **body: Any) -> Any:
    """The JSON of a refusal."""
    async with api.http.post(path, json=body) as response:
        assert response.status == 400
        return await response.json()


@pytest.mark.parametrize(
    ("path", "body", "param", "tokens"),
    [
        ("/v1/chat/completions", {"messages": HELLO}, "messages", 5000 + len("user: \nassistant: ")),
        ("/v1/completions", {"prompt": LONG}, "prompt", 5000),
        ("/v1/completions", {"prompt": [7] * 5000}, "prompt", 5000),
        ("/v1/completions", {"prompt": "x", "negative_prompt": LONG, "cfg_scale": 2.0}, "negative_prompt", 5000),
        ("/generate", {"prompt": LONG}, "prompt", 5000),
        ("/v1/embeddings", {"input": LONG}, "input", 5000),
    ],
    ids=["chat", "text", "ids", "negative", "generate", "embeddings"],
)
async def test_openai_s_dialect_begins_as_openai_does_and_names_the_field_that_was_sent(
    api: Served, path: str, body: dict[str, Any], param: str, tokens: int
) -> None:
    error = (await refused(api, path, **body))["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert error["message"] == (
        f"This model's maximum context length is {CONTEXT} tokens. However, your {param} resulted in {tokens} tokens. "
        f"Input tokens exceed the configured limit of {CONTEXT - 1} tokens. Please reduce the length of the {param}."
    )
    assert any(phrase in error["message"].lower() for phrase in LITELLM)


async def test_a_text_that_is_too_long_to_be_tokenized_is_refused_in_the_same_words(api: Served) -> None:
    chat = (await refused(api, "/v1/chat/completions", messages=[{"role": "user", "content": ENDLESS}]))["error"]
    assert re.match(
        rf"This model's maximum context length is {CONTEXT} tokens\. However, your messages resulted in at least \d+ ",
        chat["message"],
    )
    assert chat["param"] == "messages"
    message = (await refused(api, "/v1/messages", messages=[{"role": "user", "content": ENDLESS}], max_tokens=1))[
        "error"
    ]
    assert re.match(rf"prompt is too long: \d+ tokens > {CONTEXT - 1} maximum \(at least ", message["message"])


async def test_a_limit_of_the_operator_s_is_told_as_one_of_prompts(tmp_path: Path) -> None:
    async with serving(tmp_path, spec=fake_spec(tmp_path, max_input_len=10)) as api:
        error = (await refused(api, "/v1/completions", prompt="x" * 11))["error"]
        tgi = await refused(api, "/generate", inputs="x" * 11)
    assert error["message"].startswith(
        f"This model's maximum context length is {CONTEXT} tokens. However, your prompt "
    )
    assert "11 tokens. Input tokens exceed the configured limit of 10 tokens." in error["message"]
    assert tgi["error"] == "Input validation error: `inputs` must have less than 11 tokens. Given: 11"


async def test_anthropic_s_dialect_says_it_in_anthropic_s_words(api: Served) -> None:
    tokens = 5000 + len("user: \nassistant: ")
    async with anthropic.AsyncAnthropic(base_url=api.url, api_key="x", max_retries=0) as client:
        with pytest.raises(anthropic.BadRequestError) as caught:
            await client.messages.create(model="fake", max_tokens=5, messages=[{"role": "user", "content": LONG}])
    body: Any = caught.value.body
    assert body["error"] == {
        "type": "invalid_request_error",
        "message": f"prompt is too long: {tokens} tokens > {CONTEXT - 1} maximum",
    }


@pytest.mark.parametrize(("parameters", "asked"), [({"max_new_tokens": 20}, 20), ({}, 1)])
async def test_tgi_s_dialect_says_it_in_tgi_s_words(api: Served, parameters: dict[str, int], asked: int) -> None:
    error = await refused(api, "/generate", inputs=LONG, parameters=parameters)
    assert error["error_type"] == "validation"
    assert error["error"] == (
        f"Input validation error: `inputs` tokens + `max_new_tokens` must be <= {CONTEXT}. "
        f"Given: 5000 `inputs` tokens and {asked} `max_new_tokens`"
    )
    assert any(phrase in error["error"].lower() for phrase in LITELLM)


async def test_openai_s_and_langchain_s_clients_know_what_is_wrong(api: Served, only_loopback: None) -> None:
    async with openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="x", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="fake", messages=[{"role": "user", "content": LONG}])
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    chat = ChatOpenAI(base_url=f"{api.url}/v1", api_key=SecretStr("x"), model="fake", max_retries=0)
    with pytest.raises(ContextOverflowError):
        await chat.ainvoke(LONG)
