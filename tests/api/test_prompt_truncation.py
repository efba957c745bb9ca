"""vLLM's truncate_prompt_tokens: which tokens of a prompt are left, where, and what is counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.api.harness import Served, serving
from tests.fakes.backend import FakeBackend, vector_of
from tests.fakes.model import EOS_ID, fake_spec, write_fake_model

CONTEXT = 64
CHAT = "/v1/chat/completions"


def submitted(api: Served) -> list[bytes]:
    """The prompts that the backend got."""
    return [bytes(request.prompt_ids) for request in api.backend.submitted]


@pytest.mark.parametrize(
    ("prompt", "fields", "left"),
    [
        ("hello world", {"truncate_prompt_tokens": 5}, b"world"),
        ("hello world", {"truncate_prompt_tokens": 5.0}, b"world"),
        ("hello world", {"truncate_prompt_tokens": 5, "truncation_side": "right"}, b"hello"),
        (list(b"hello world"), {"truncate_prompt_tokens": 5}, b"world"),
        ("hello", {"truncate_prompt_tokens": 5}, b"hello"),
        ("hello", {"truncate_prompt_tokens": 50}, b"hello"),
        ("hello", {"truncation_side": "right"}, b"hello"),
        ("x" * 40_000 + "hello", {"truncate_prompt_tokens": 5}, b"hello"),
        (list(b"x" * 4000 + b"hello"), {"truncate_prompt_tokens": 5}, b"hello"),
    ],
    ids=["text", "float", "right", "ids", "as long", "shorter", "no truncation", "long text", "long ids"],
)
async def test_a_completion_s_prompt_keeps_its_last_tokens(
    api: Served, prompt: Any, fields: dict[str, Any], left: bytes
) -> None:
    answer = await api.post("/v1/completions", prompt=prompt, max_tokens=2, echo=True, return_token_ids=True, **fields)
    assert submitted(api) == [left]
    assert answer["choices"][0]["text"].encode().startswith(left)
    assert answer["choices"][0]["prompt_token_ids"] == list(left)
    assert answer["usage"]["prompt_tokens"] == len(left)


async def test_each_of_several_prompts_is_cut(api: Served) -> None:
    await api.post("/v1/completions", prompt=["hello", "worlds", "x"], truncate_prompt_tokens=3, max_tokens=1)
    assert submitted(api) == [b"llo", b"lds", b"x"]


async def test_log_probabilities_are_those_of_the_tokens_that_are_left(api: Served) -> None:
    body = {"prompt": "hello world", "truncate_prompt_tokens": 5, "max_tokens": 1}
    [choice] = (await api.post("/v1/completions", **body, echo=True, logprobs=0))["choices"]
    assert "".join(choice["logprobs"]["tokens"][:5]) == "world"
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4, 5]
    [choice] = (await api.post("/v1/completions", **body, prompt_logprobs=0))["choices"]
    assert len(choice["prompt_logprobs"]) == 5


async def test_a_conversation_keeps_its_last_tokens(api: Served) -> None:
    body = {"messages": [{"role": "user", "content": "hello " * 2000}], "max_tokens": 2, "truncate_prompt_tokens": 19}
    answer = await api.post(CHAT, **body, return_token_ids=True)
    assert submitted(api) == [b"hello \nassistant: "[-19:].rjust(19)]
    assert answer["usage"]["prompt_tokens"] == 19
    events = await api.events(CHAT, **body, stream_options={"include_usage": True})
    assert events[-2]["usage"]["prompt_tokens"] == 19
    rendered = await api.post("/v1/chat/template", **body)
    assert (rendered["prompt"].encode(), rendered["count"]) == (submitted(api)[0], 19)


async def test_minus_one_keeps_what_the_context_and_the_answer_leave(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeBackend(max_model_len=CONTEXT)) as api:
        text = "x" * 500
        await api.post("/v1/completions", prompt=text, truncate_prompt_tokens=-1, max_tokens=10)
        await api.post(CHAT, messages=[{"role": "user", "content": text}], truncate_prompt_tokens=-1, max_tokens=10)
        await api.post(CHAT, messages=[{"role": "user", "content": text}], truncate_prompt_tokens=-1)
        await api.post(CHAT, messages=[{"role": "user", "content": text}], truncate_prompt_tokens=CONTEXT)
        await api.post("/v1/embeddings", input=text, truncate_prompt_tokens=-1)
        assert list(map(len, submitted(api))) == [54, 54, 63, 63, 63]


async def test_embeddings_keep_the_first_tokens_as_vllm_s_pooling_models_do(api: Served) -> None:
    first = await api.post("/v1/embeddings", input=["hello world", "x"], truncate_prompt_tokens=5)
    assert [each["embedding"] for each in first["data"]] == [vector_of(b"hello"), vector_of(b"x")]
    assert first["usage"]["prompt_tokens"] == 6
    last = await api.post("/v1/embeddings", input="hello world", truncate_prompt_tokens=5, truncation_side="left")
    assert last["data"][0]["embedding"] == vector_of(b"world")


async def test_a_start_token_stays(tmp_path: Path) -> None:
    async with serving(tmp_path, spec=fake_spec(write_fake_model(tmp_path, starts=True))) as api:
        for tokens in (1, 2, 4):
            await api.post("/v1/completions", prompt="hello", truncate_prompt_tokens=tokens, max_tokens=1)
        prompts = [list(request.prompt_ids) for request in api.backend.submitted]
    assert prompts == [[EOS_ID], [EOS_ID, *b"o"], [EOS_ID, *b"llo"]]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "max_tokens": 10}),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 10}),
        ("/v1/embeddings", {"input": "x"}),
    ],
)
@pytest.mark.parametrize("tokens", [0, -2, CONTEXT + 1, 1.5, "5"])
async def test_what_cannot_be_kept_is_refused_by_name(
    tmp_path: Path, path: str, body: dict[str, Any], tokens: object
) -> None:
    async with serving(tmp_path, FakeBackend(max_model_len=CONTEXT)) as api:
        assert (await api.refusal(path, **body, truncate_prompt_tokens=tokens))["param"] == "truncate_prompt_tokens"


async def test_tokens_to_keep_and_an_answer_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeBackend(max_model_len=CONTEXT)) as api:
        await api.post("/v1/completions", prompt="x", truncate_prompt_tokens=54, max_tokens=10)
        error = await api.refusal("/v1/completions", prompt="x", truncate_prompt_tokens=55, max_tokens=10)
        assert error["message"] == (
            "truncate_prompt_tokens is 55; of the 64 tokens of the context, max_tokens leaves 54"
        )


async def test_as_many_as_fit_are_no_more_than_prompts_may_have(tmp_path: Path) -> None:
    async with serving(tmp_path, spec=fake_spec(tmp_path, max_input_len=20)) as api:
        await api.post("/v1/completions", prompt="x" * 50, truncate_prompt_tokens=-1, max_tokens=1)
        assert submitted(api) == [b"x" * 20]
