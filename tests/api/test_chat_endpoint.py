"""POST /v1/chat/completions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.api.harness import Served, serving
from tests.fakes.backend import FakeBackend, expected_text, saying
from tests.fakes.model import write_fake_model

HELLO = [{"role": "user", "content": "hello"}]
HELLO_PROMPT = "user: hello\nassistant: "


def answer_to(prompt: str, count: int) -> str:
    """What the fake model answers to a rendered prompt."""
    return expected_text(list(prompt.encode()), count)


async def prompt_of(api: Served, **body: Any) -> str:
    """The prompt that the backend got."""
    await api.post("/v1/chat/completions", max_tokens=1, **body)
    return bytes(api.backend.submitted[-1].prompt_ids).decode()


async def test_the_answer_has_openai_s_shape(api: Served) -> None:
    answer = await api.post("/v1/chat/completions", model="fake", messages=HELLO, max_tokens=5)
    assert answer.pop("id").startswith("chatcmpl-")
    assert answer.pop("created") > 1_700_000_000
    assert answer.pop("system_fingerprint").startswith("fp_")
    assert answer == {
        "object": "chat.completion",
        "model": "fake",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": answer_to(HELLO_PROMPT, 5),
                    "refusal": None,
                    "annotations": [],
                },
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": len(HELLO_PROMPT),
            "completion_tokens": 5,
            "total_tokens": len(HELLO_PROMPT) + 5,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


async def test_messages_become_the_prompt_that_the_model_s_template_makes(api: Served) -> None:
    messages = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "three", "tool_calls": None},
        {"role": "user", "content": "four", "name": "me"},
    ]
    prompt = await prompt_of(api, messages=messages)
    assert prompt == "system: be kind\nuser: one\ntwo\nassistant: three\nuser: four\nassistant: "


async def test_a_final_message_can_be_continued(api: Served) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Well,"}]
    assert await prompt_of(api, messages=messages, continue_final_message=True) == "user: hello\nassistant: Well,"
    assert await prompt_of(api, messages=HELLO, add_generation_prompt=False) == "user: hello\n"


@pytest.mark.parametrize("begun", ["Well,\n\n", "Well ", "\tWell", "user", ": ", "n"])
async def test_an_answer_goes_on_exactly_where_the_begun_one_ends(api: Served, begun: str) -> None:
    messages = [*HELLO, {"role": "assistant", "content": begun}]
    expected = f"user: hello\nassistant: {begun}"
    assert await prompt_of(api, messages=messages, continue_final_message=True) == expected


async def test_either_name_of_the_token_limit_is_honoured(api: Served) -> None:
    for body in ({"max_tokens": 3}, {"max_completion_tokens": 3}, {"max_tokens": 3, "max_completion_tokens": 3}):
        answer = await api.post("/v1/chat/completions", messages=HELLO, **body)
        assert answer["usage"]["completion_tokens"] == 3


async def test_the_model_s_own_sampling_defaults_stand_where_the_client_sends_none(tmp_path: Path) -> None:
    folder = write_fake_model(tmp_path / "m")
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": 256, "do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.9})
    )
    async with serving(folder) as api:
        await api.post("/v1/chat/completions", messages=HELLO, max_tokens=1, top_p=0.5)
        await api.post("/v1/chat/completions", messages=HELLO, max_tokens=1, dynatemp_range=0.5)
        params, around = (request.params for request in api.backend.submitted)
    assert (params.temperature, params.top_k, params.top_p) == (0.6, 20, 0.5)
    assert (around.min_temp, around.max_temp) == pytest.approx((0.1, 1.1))


async def test_a_stream_gives_the_role_then_the_text_then_the_reason(api: Served) -> None:
    events = await api.events("/v1/chat/completions", messages=HELLO, max_tokens=8)
    assert events.pop() == "[DONE]"
    choices = [event["choices"][0] for event in events]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(choice["delta"].get("content", "") for choice in choices) == answer_to(HELLO_PROMPT, 8)
    assert choices[-1]["delta"] == {}
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert {event["object"] for event in events} == {"chat.completion.chunk"}


async def test_an_end_token_ends_with_stop(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeBackend(reply=saying("bye", then=256))) as api:
        answer = await api.post("/v1/chat/completions", messages=HELLO)
    assert answer["choices"][0]["message"]["content"] == "bye"
    assert answer["choices"][0]["finish_reason"] == "stop"


async def test_logprobs_carry_the_bytes_of_tokens_that_split_a_character(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeBackend(reply=saying("é"))) as api:
        body = {"messages": HELLO, "max_tokens": 2, "logprobs": True, "top_logprobs": 0}
        whole = (await api.post("/v1/chat/completions", **body))["choices"][0]
        events = await api.events("/v1/chat/completions", **body)
    assert whole["message"]["content"] == "é"
    assert [entry["bytes"] for entry in whole["logprobs"]["content"]] == [[0xC3], [0xA9]]
    assert [entry["logprob"] for entry in whole["logprobs"]["content"]] == [-0.5, -0.5]
    pieces = [choice["logprobs"] for event in events[:-1] for choice in event["choices"] if choice["logprobs"]]
    assert [byte for piece in pieces for entry in piece["content"] for byte in entry["bytes"]] == [0xC3, 0xA9]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "content": "", "function_call": {"x": 1}}]}, "messages[0].function_call"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": "x", "mood": "x"}]}, "messages[0].mood"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"echo": True}, "echo"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"shape": "round"}, "shape"),
    ],
    ids=lambda value: str(value)[:60],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_bad_value_is_refused_by_its_field_s_name_before_any_event(
    api: Served, body: dict[str, object], param: str, stream: bool
) -> None:
    error = await api.refusal("/v1/chat/completions", **{"messages": HELLO, "stream": stream, **body})
    assert error["param"] == param
    assert api.backend.submitted == []


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [], "tool_choice": "none", "parallel_tool_calls": True, "modalities": ["text"]},
        {"response_format": {"type": "text"}, "store": False, "user": "me", "metadata": {}, "service_tier": "auto"},
    ],
    ids=["tools", "openai"],
)
async def test_neutral_values_of_what_is_not_honoured_are_fine(api: Served, body: dict[str, object]) -> None:
    answer = await api.post("/v1/chat/completions", messages=HELLO, max_tokens=2, **body)
    assert answer["choices"][0]["message"]["content"] == answer_to(HELLO_PROMPT, 2)


async def test_a_model_without_a_chat_template_says_so(tmp_path: Path) -> None:
    folder = write_fake_model(tmp_path / "m")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    async with serving(folder) as api:
        error = await api.refusal("/v1/chat/completions", messages=HELLO)
    assert "chat template" in error["message"]


LLAMACPP = {
    "backend_sampling": False,
    "cache_prompt": True,
    "id_slot": -1,
    "n_keep": 0,
    "n_predict": -1,
    "n_probs": 0,
    "parse_tool_calls": True,
    "reasoning_format": "auto",
    "return_progress": True,
    "return_tokens": False,
    "samplers": "edskypmxt",
    "timings_per_token": False,
    "top_n_sigma": -1,
}
"""Fields of llama.cpp's clients that ask for what is done anyway."""


async def test_fields_of_llamacpps_clients_that_ask_for_what_is_done_anyway_pass(api: Served) -> None:
    hello = [{"role": "user", "content": "hello"}]
    await api.post("/v1/chat/completions", messages=hello, max_tokens=2, **LLAMACPP)
    names = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]
    sampling = {"temperature": 0.7, "top_p": 0.9, "presence_penalty": 0.5}
    await api.post("/v1/chat/completions", messages=hello, max_tokens=2, samplers=names, **sampling)
    assert api.backend.submitted[-1].params.temperature_last
    await api.post("/v1/chat/completions", messages=hello, max_tokens=2, samplers="et", temperature=0.7)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"reasoning_format": "none"}, "reasoning_format is not supported: thinking is always apart from the answer"),
        ({"timings_per_token": True}, "timings_per_token is not supported: use why, or /completion"),
        ({"n_probs": 3}, "n_probs is not supported: use logprobs and top_logprobs"),
        ({"samplers": "t", "temperature": 0.7, "top_p": 0.5}, "samplers leaves out top_p, which this request uses"),
        ({"samplers": ["dance"]}, "samplers holds 'dance', which is not a sampler"),
        ({"samplers": "te", "temperature": 0.7, "presence_penalty": 1}, "samplers puts temperature before"),
    ],
)
async def test_fields_of_llamacpps_clients_that_would_change_the_answer_are_refused(
    api: Served, fields: dict[str, Any], sentence: str
) -> None:
    refused = await api.refusal("/v1/chat/completions", messages=[{"role": "user", "content": "hello"}], **fields)
    assert refused["message"].startswith(sentence)
    assert refused["param"] in fields
