"""POST /v1/completions."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from console.api.requests import served_model
from engine.text.tokenizer import Tokenizer
from tests.api.harness import Served, serving, text_of
from tests.fakes.backend import FakeBackend, expected_text, saying


def completion(prompt: str, count: int) -> str:
    """What the fake model answers."""
    return expected_text(list(prompt.encode()), count)


USER = [{"role": "user", "content": "hi"}]


async def test_the_answer_has_openai_s_shape(api: Served) -> None:
    answer = await api.post("/v1/completions", model="fake", prompt="Once", max_tokens=5)
    assert answer.pop("id").startswith("cmpl-")
    assert answer.pop("created") > 1_700_000_000
    assert answer.pop("system_fingerprint").startswith("fp_")
    assert answer == {
        "object": "text_completion",
        "model": "fake",
        "choices": [
            {
                "index": 0,
                "text": completion("Once", 5),
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 4,
            "completion_tokens": 5,
            "total_tokens": 9,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


async def test_sixteen_tokens_come_where_no_limit_is_given(api: Served) -> None:
    answer = await api.post("/v1/completions", prompt="Once")
    assert answer["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([97, 98], ["ab"]),
        ([[97, 98], [99]], ["ab", "c"]),
        (["ab", [99]], ["ab", "c"]),
    ],
)
async def test_prompts_may_be_text_or_ids_one_or_several(api: Served, prompt: object, texts: list[str]) -> None:
    answer = await api.post("/v1/completions", prompt=prompt, max_tokens=3, echo=True)
    assert [choice["text"] for choice in answer["choices"]] == [text + completion(text, 3) for text in texts]


async def test_n_answers_to_each_prompt_are_numbered_through_and_the_prompt_counts_once(api: Served) -> None:
    answer = await api.post("/v1/completions", prompt=["ab", "c"], n=2, max_tokens=3)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == [completion("ab", 3)] * 2 + [completion("c", 3)] * 2
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (3, 12)


async def test_answers_to_one_prompt_have_seeds_of_their_own_and_each_prompt_the_same(api: Served) -> None:
    await api.post("/v1/completions", prompt=["ab", "c"], n=2, seed=7, max_tokens=1)
    seeds = {(bytes(request.prompt_ids), request.params.seed) for request in api.backend.submitted}
    assert seeds == {(b"ab", 7), (b"ab", 8), (b"c", 7), (b"c", 8)}


async def test_a_seed_at_the_end_of_its_range_wraps_around(api: Served) -> None:
    await api.post("/v1/completions", prompt="a", n=2, seed=2**63 - 1, max_tokens=1)
    assert {request.params.seed for request in api.backend.submitted} == {2**63 - 1, -(2**63)}


async def test_a_stream_adds_up_to_the_answer_and_says_why_it_ended_once(api: Served) -> None:
    events = await api.events("/v1/completions", prompt="Once", max_tokens=20)
    assert events.pop() == "[DONE]"
    assert text_of(events) == completion("Once", 20)
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons == [None] * (len(events) - 1) + ["length"]
    assert len({event["id"] for event in events}) == 1
    assert not any("usage" in event for event in events)


async def test_a_stream_with_usage_ends_with_it_and_is_null_before(api: Served) -> None:
    events = await api.events("/v1/completions", prompt="Once", max_tokens=4, stream_options={"include_usage": True})
    *pieces, last, done = events
    assert done == "[DONE]"
    assert all(piece["usage"] is None for piece in pieces)
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 8


@pytest.mark.parametrize(
    ("path", "asked"), [("/v1/completions", {"prompt": "Once"}), ("/v1/chat/completions", {"messages": USER})]
)
async def test_an_answer_says_in_its_usage_what_its_time_went_into_where_requested(
    api: Served, path: str, asked: dict[str, Any]
) -> None:
    answer = await api.post(path, **asked, max_tokens=4, n=2, why=True)
    *pieces, last, done = await api.events(path, **asked, max_tokens=4, why=True, stream=True)
    for usage in (answer["usage"], last["usage"]):
        why = usage["why"]
        assert sum(why["causes_ms"].values()) == pytest.approx(why["total_ms"], rel=0.01) and why["total_ms"] > 0
        assert set(why) == {"total_ms", "causes_ms"}
    assert done == "[DONE]" and not any(piece.get("usage") for piece in pieces)
    assert "why" not in (await api.post(path, **asked, max_tokens=4))["usage"]


async def test_a_stream_with_continuous_usage_counts_in_every_chunk(api: Served) -> None:
    for path, asked in (("/v1/completions", {"prompt": "Once"}), ("/v1/chat/completions", {"messages": USER})):
        options = {"continuous_usage_stats": True, "include_obfuscation": False}
        events = await api.events(path, **asked, max_tokens=4, stream_options=options)
        counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
        assert counts == sorted(counts)
        assert counts[-1] == 4
        assert events[0]["usage"]["prompt_tokens"] > 0


async def test_a_stream_echoes_its_prompts_first(api: Served) -> None:
    events = await api.events("/v1/completions", prompt="Once", max_tokens=4, echo=True)
    assert events[0]["choices"][0]["text"] == "Once"
    assert text_of(events) == "Once" + completion("Once", 4)


async def test_streamed_choices_each_add_up_to_their_own_answer(api: Served) -> None:
    events = await api.events("/v1/completions", prompt=["ab", "c", "de"], max_tokens=30)
    texts = ["", "", ""]
    for event in events[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [completion(prompt, 30) for prompt in ("ab", "c", "de")]


async def test_a_stop_string_ends_the_answer_and_is_left_out_unless_asked_for(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeBackend(reply=saying("one two three"))) as api:
        plain = await api.post("/v1/completions", prompt=">", stop=["two", "four"])
        kept = await api.post("/v1/completions", prompt=">", stop="two", include_stop_str_in_output=True)
    assert (plain["choices"][0]["text"], plain["choices"][0]["finish_reason"]) == ("one ", "stop")
    assert kept["choices"][0]["text"] == "one two"


async def test_logprobs_come_as_parallel_lists_with_offsets(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeBackend(reply=saying("né"))) as api:
        answer = await api.post("/v1/completions", prompt=">", max_tokens=3, logprobs=0)
        events = await api.events("/v1/completions", prompt=">", max_tokens=3, logprobs=0)
    whole = answer["choices"][0]["logprobs"]
    assert whole == {
        "tokens": ["n", "�", "�"],
        "token_logprobs": [-0.5, -0.5, -0.5],
        "top_logprobs": [],
        "text_offset": [0, 1, 1],  # the last two are one character
    }
    streamed = [choice["logprobs"] for event in events[:-1] for choice in event["choices"] if choice["logprobs"]]
    assert [offset for piece in streamed for offset in piece["text_offset"]] == [0, 1, 1]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "x", "temperature": "warm"}, "temperature"),
        ({"prompt": "x", "temperature": -1}, "temperature"),
        ({"prompt": "x", "top_p": 0}, "top_p"),
        ({"prompt": "x", "top_k": -2}, "top_k"),
        ({"prompt": "x", "min_p": 1.5}, "min_p"),
        ({"prompt": "x", "max_tokens": 1.5}, "max_tokens"),
        ({"prompt": "x", "max_tokens": True}, "max_tokens"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "min_tokens": 20}, "min_tokens"),
        ({"prompt": "x", "frequency_penalty": 3}, "frequency_penalty"),
        ({"prompt": "x", "presence_penalty": -3}, "presence_penalty"),
        ({"prompt": "x", "repetition_penalty": 0}, "repetition_penalty"),
        ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias"),
        ({"prompt": "x", "logit_bias": {"3": 101}}, "logit_bias"),
        ({"prompt": "x", "logit_bias": {"999": 1}}, "logit_bias"),
        ({"prompt": "x", "stop": 3}, "stop"),
        ({"prompt": "x", "stop": ["a", 3]}, "stop"),
        ({"prompt": "x", "stop": [""]}, "stop"),
        ({"prompt": "x", "stop": [str(number) for number in range(17)]}, "stop"),
        ({"prompt": "x", "stop_token_ids": [999]}, "stop_token_ids"),
        ({"prompt": "x", "seed": 2**63}, "seed"),
        ({"prompt": "x", "n": 0}, "n"),
        ({"prompt": "x", "n": 129}, "n"),
        ({"prompt": "x", "best_of": 0}, "best_of"),
        ({"prompt": "x", "best_of": 1, "n": 2}, "best_of"),
        ({"prompt": "x", "best_of": 2, "stream": True}, "best_of"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "max_tokens": -1, "echo": True}, "max_tokens"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "logprobs": True}, "logprobs"),
        ({"prompt": "x", "prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt": "x", "prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt": "x", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt": "x", "suffix": "end"}, "suffix"),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "x", "stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
        ({"prompt": "x", "stream": "yes"}, "stream"),
        ({"prompt": "x", "colour": "red"}, "colour"),
        ({"prompt": "x", "priority": 1.5}, "priority"),
        ({"prompt": "x", "priority": 10**7}, "priority"),
        ({"prompt": "x", "lora": 1}, "lora"),
        ({"prompt": ["x"] * 513}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": [97, "x"]}, "prompt"),
        ({"prompt": [97, 257]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({}, "prompt"),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_a_bad_value_is_refused_by_its_field_s_name(api: Served, body: dict[str, object], param: str) -> None:
    error = await api.refusal("/v1/completions", **body)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert param.split("[")[0] in error["message"]
    assert api.backend.submitted == []


@pytest.mark.parametrize(
    "body",
    [
        {"suffix": None, "best_of": 1, "logit_bias": None, "stop": None, "user": "me", "metadata": {"a": "b"}},
        {"suffix": "", "response_format": {"type": "text"}, "use_beam_search": False, "length_penalty": 1.0},
        {"seed": None, "logprobs": None, "echo": None, "stream_options": None, "service_tier": "auto", "priority": 0},
        {
            "cache_salt": "",
            "kv_transfer_params": {},
            "logits_processors": [],
            "mm_processor_kwargs": {},
            "prompt_cache_retention": "24h",
            "return_token_ids": False,
            "return_tokens_as_token_ids": False,
            "vllm_xargs": {},
        },
    ],
    ids=["nulls", "neutral", "inert", "vllm's defaults"],
)
async def test_neutral_values_of_what_is_not_honoured_are_fine(api: Served, body: dict[str, object]) -> None:
    answer = await api.post("/v1/completions", prompt="x", max_tokens=2, **body)
    assert answer["choices"][0]["text"] == completion("x", 2)


async def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(api: Served) -> None:
    error = await api.refusal("/v1/completions", prompt="x" * 5000)
    assert error["code"] == "context_length_exceeded"
    assert "5000" in error["message"]
    assert "4096" in error["message"]


@pytest.mark.parametrize("body", ['{"prompt": "x"', "", "[]", '"x"', '{"prompt": "\\ud800"}', '{"a":' * 5000])
async def test_a_body_that_is_no_json_object_is_a_400(api: Served, body: str) -> None:
    async with api.http.post("/v1/completions", data=body) as response:
        answer = await response.json()
    assert response.status == 400
    assert "body" in answer["error"]["message"]


async def test_an_unknown_model_is_a_404_that_lists_what_there_is(api: Served) -> None:
    error = await api.refusal("/v1/completions", status=404, prompt="x", model="gpt-4")
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "gpt-4" in error["message"]
    assert "fake" in error["message"]


async def test_more_token_ids_than_fit_are_refused_before_they_are_read(
    api: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "decode", None)
    error = await api.refusal("/v1/completions", prompt=[7] * 5000)
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    assert "5000 tokens" in error["message"]


async def test_many_token_ids_are_read_beside_the_event_loop(api: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, decode = [], Tokenizer.decode

    def noted(self: Tokenizer, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        threads.append(threading.current_thread())
        return decode(self, ids, skip_special_tokens=skip_special_tokens)

    monkeypatch.setattr(Tokenizer, "decode", noted)
    monkeypatch.setattr(served_model, "MANY_TOKENS", 3)
    await api.post("/v1/completions", prompt=[79, 110], max_tokens=1)
    await api.post("/v1/completions", prompt=[79, 110, 99, 101], max_tokens=1)
    assert [thread is threading.current_thread() for thread in threads] == [True, False]


async def test_token_ids_come_where_they_are_requested(api: Served) -> None:
    body = {"prompt": "one", "max_tokens": 4, "return_token_ids": True}
    [choice] = (await api.post("/v1/completions", **body))["choices"]
    assert bytes(choice["prompt_token_ids"]) == b"one"
    assert bytes(choice["token_ids"]).decode() == choice["text"]
    events = [event for event in await api.events("/v1/completions", **body) if event != "[DONE]"]
    pieces = [event["choices"][0] for event in events]
    assert [token for piece in pieces for token in piece["token_ids"]] == choice["token_ids"]
    assert ["prompt_token_ids" in piece for piece in pieces] == [True] + [False] * (len(pieces) - 1)


async def test_token_ids_of_a_chat_come_where_they_are_requested(api: Served) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "return_token_ids": True}
    answer = await api.post("/v1/chat/completions", **body)
    [choice] = answer["choices"]
    assert bytes(answer["prompt_token_ids"]) == b"user: hello\nassistant: "
    assert bytes(choice["token_ids"]).decode() == choice["message"]["content"]
    events = [event for event in await api.events("/v1/chat/completions", **body) if event != "[DONE]"]
    pieces = [piece for event in events for piece in event["choices"]]
    assert [token for piece in pieces for token in piece.get("token_ids", [])] == choice["token_ids"]
    assert ["prompt_token_ids" in event for event in events] == [True] + [False] * (len(events) - 1)
