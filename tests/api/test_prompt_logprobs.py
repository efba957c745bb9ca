"""What /v1 tells of prompts: echo with logprobs as evaluation harnesses ask for it, and vLLM's prompt_logprobs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import openai
import pytest

from console.api.dialects.openai import chat
from console.api.dialects.openai import common as openai_dialect
from console.api.dialects.tgi import generate
from console.api.requests import generation
from engine.backends.base import TokenEvent
from tests.api.harness import Served, serving, text_of
from tests.fakes.backend import FakeBackend, Gate, expected_text, saying

PROMPT = "abc"
A, B, C = PROMPT.encode()
TOLD = {
    "tokens": ["a", "b", "c"],
    "token_logprobs": [None, -1.0, -2.0],
    "top_logprobs": [None, {"b": -1.0}, {"c": -2.0}],
    "text_offset": [0, 1, 2],
}


async def test_echo_with_logprobs_tells_of_the_prompt_before_the_answer(api: Served) -> None:
    answer = await api.post("/v1/completions", prompt=PROMPT, max_tokens=1, logprobs=1, echo=True)
    (choice,) = answer["choices"]
    text = expected_text(PROMPT.encode(), 1)
    assert choice["text"] == PROMPT + text
    assert choice["logprobs"] == {
        "tokens": [*PROMPT, text],
        "token_logprobs": [None, -1.0, -2.0, -0.5],
        "top_logprobs": [None, {"b": -1.0}, {"c": -2.0}, {text: -0.5}],
        "text_offset": [0, 1, 2, 3],
    }
    assert "prompt_logprobs" not in choice


async def test_echo_without_tokens_tells_of_the_prompt_alone(api: Served) -> None:
    answer = await api.post("/v1/completions", prompt=PROMPT, max_tokens=0, logprobs=1, echo=True)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == (PROMPT, "length", TOLD)
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 0


async def test_echo_without_tokens_and_logprobs_is_the_prompt(api: Served) -> None:
    answer = await api.post("/v1/completions", prompt=[A, B], max_tokens=0, echo=True)
    assert [(choice["text"], choice["logprobs"]) for choice in answer["choices"]] == [("ab", None)]


async def test_logprobs_of_no_alternatives_are_told_without_them(api: Served) -> None:
    answer = await api.post("/v1/completions", prompt=PROMPT, max_tokens=0, logprobs=0, echo=True)
    assert answer["choices"][0]["logprobs"] == {**TOLD, "top_logprobs": []}


async def test_several_prompts_and_answers_each_tell_of_their_own_prompt(api: Served) -> None:
    answer = await api.post("/v1/completions", prompt=["ab", "cde"], n=2, max_tokens=1, logprobs=1, echo=True)
    tokens = [choice["logprobs"]["tokens"][:-1] for choice in answer["choices"]]
    assert tokens == [["a", "b"], ["a", "b"], ["c", "d", "e"], ["c", "d", "e"]]
    assert [choice["logprobs"]["text_offset"] for choice in answer["choices"]][1:3] == [[0, 1, 2], [0, 1, 2, 3]]


async def test_a_stream_begins_with_the_prompt_and_its_logprobs(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeBackend(reply=saying("né"))) as api:
        events = await api.events("/v1/completions", prompt=PROMPT, max_tokens=3, logprobs=1, echo=True)
        (first, *_), *rest = [event["choices"] for event in events[:-1]]
        assert (first["text"], first["logprobs"]) == (PROMPT, TOLD)
        assert [at for (choice,) in rest if choice["logprobs"] for at in choice["logprobs"]["text_offset"]] == [3, 4, 4]
        assert text_of(events) == PROMPT + "né"
        events = await api.events("/v1/completions", prompt=PROMPT, max_tokens=0, logprobs=1, echo=True)
        assert [choice["finish_reason"] for event in events[:-1] for choice in event["choices"]] == [None, "length"]


async def test_prompt_logprobs_come_in_vllms_shape(api: Served) -> None:
    answer = await api.post("/v1/completions", prompt=PROMPT, max_tokens=1, prompt_logprobs=2)
    (choice,) = answer["choices"]
    assert choice["logprobs"] is None
    assert choice["prompt_logprobs"] == [
        None,
        {
            str(B): {"logprob": -1.0, "rank": 1, "decoded_token": "b"},
            str(C): {"logprob": -2.0, "rank": 2, "decoded_token": "c"},
        },
        {
            str(C): {"logprob": -2.0, "rank": 1, "decoded_token": "c"},
            str(C + 1): {"logprob": -3.0, "rank": 2, "decoded_token": "d"},
        },
    ]


async def test_each_field_gives_as_many_alternatives_as_it_was_asked_for(api: Served) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1, "echo": True}
    (choice,) = (await api.post("/v1/completions", **body, logprobs=3, prompt_logprobs=0))["choices"]
    assert [len(each) for each in choice["prompt_logprobs"][1:]] == [1, 1]
    assert [len(each) for each in choice["logprobs"]["top_logprobs"][1:3]] == [3, 3]


async def test_chat_has_prompt_logprobs_beside_its_choices(api: Served) -> None:
    messages = [{"role": "user", "content": "x"}]
    answer = await api.post("/v1/chat/completions", messages=messages, max_tokens=1, prompt_logprobs=0)
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    plain = await api.post("/v1/chat/completions", messages=messages, max_tokens=1)
    assert "prompt_logprobs" not in plain
    refused = await api.refusal("/v1/chat/completions", messages=messages, stream=True, prompt_logprobs=0)
    assert refused["param"] == "prompt_logprobs"


async def test_the_openai_client_reads_echoed_logprobs(api: Served) -> None:
    async with openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as client:
        answer = await client.completions.create(model="fake", prompt=PROMPT, max_tokens=0, logprobs=1, echo=True)
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.to_dict() == TOLD


async def test_a_client_that_leaves_before_its_prompt_is_computed_cancels(tmp_path: Path) -> None:
    gate = Gate()
    async with serving(tmp_path, FakeBackend(gate=gate)) as api:
        body = {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 1}
        asking = asyncio.create_task(api.post("/v1/completions", **body))
        await asyncio.to_thread(gate.wait_until_reached)
        asking.cancel()
        await api.until_row(finish="cancelled")


# --- best_of --------------------------------------------------------------------------------------------------------


class _Uneven(FakeBackend):
    """Each answer repeats one letter, which its seed chooses; some letters are likelier than others."""

    @staticmethod
    def token(seed: int) -> int:
        """The letter of a seed."""
        return ord("a") + seed * 7 % 26

    @staticmethod
    def likelihood(token_id: int) -> float:
        """The log-probability of a letter."""
        return -(token_id * 11 % 26) - 1.0

    def step(self) -> Sequence[TokenEvent]:
        """The same step, with letters and log-probabilities of its own."""
        seeds = {request.id: request.params.seed or 0 for request in self.submitted}
        return [self._changed(event, self.token(seeds[event.request_id])) for event in super().step()]

    def _changed(self, event: TokenEvent, token_id: int) -> TokenEvent:
        assert event.logprob is not None
        logprob = msgspec.structs.replace(event.logprob, token_id=token_id, logprob=self.likelihood(token_id))
        return msgspec.structs.replace(event, token_id=token_id, logprob=logprob)


async def test_best_of_gives_the_likeliest_answers_and_counts_all(tmp_path: Path) -> None:
    async with serving(tmp_path, _Uneven()) as api:
        answer = await api.post("/v1/completions", prompt=["a", "b"], n=2, best_of=4, max_tokens=2, seed=5)
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        likelihoods = [_Uneven.likelihood(ord(choice["text"][0])) for choice in answer["choices"]]
        made = sorted((_Uneven.likelihood(_Uneven.token(5 + choice)) for choice in range(4)), reverse=True)
        assert likelihoods == made[:2] * 2
        assert all(choice["logprobs"] is None for choice in answer["choices"])
        assert answer["usage"] == {
            "prompt_tokens": 2,
            "completion_tokens": 16,
            "total_tokens": 18,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }


async def test_best_of_ranks_by_the_mean_and_not_by_length(tmp_path: Path) -> None:
    async with serving(tmp_path, _Uneven()) as api:
        short, long = _Uneven.token(5), _Uneven.token(6)
        worse = min(short, long, key=_Uneven.likelihood)
        body = {"prompt": "a", "n": 1, "best_of": 2, "max_tokens": 8, "seed": 5, "stop": chr(worse)}
        answer = await api.post("/v1/completions", **body)
    # The worse answer ends after one token, so that the sum of its log-probabilities is the higher one.
    assert answer["choices"][0]["text"] == chr(max(short, long, key=_Uneven.likelihood)) * 8


async def test_chat_refuses_best_of(api: Served) -> None:
    messages = [{"role": "user", "content": "x"}]
    refused = await api.refusal("/v1/chat/completions", messages=messages, best_of=2)
    assert refused["param"] == "best_of"
    assert "/v1/completions" in refused["message"]


@pytest.mark.parametrize(
    ("module", "name", "path", "body"),
    [
        (
            chat,
            "prompt_logprobs_of",
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x" * 1100}], "prompt_logprobs": 0, "max_tokens": 1},
        ),
        (
            generate,
            "prefill",
            "/generate",
            {"inputs": "x" * 1100, "parameters": {"decoder_input_details": True, "max_new_tokens": 1}},
        ),
        (generation, "json_response", "/v1/completions", {"prompt": "x" * 1100, "prompt_logprobs": 0}),
        (openai_dialect, "unpack_logprobs", "/v1/completions", {"prompt": "x" * 1100, "prompt_logprobs": 0}),
    ],
    ids=["chat", "tgi", "writing", "unpacking"],
)
async def test_much_is_put_into_its_shape_beside_the_event_loop(
    api: Served, monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, path: str, body: dict[str, Any]
) -> None:
    threads, shape = [], getattr(module, name)

    def noted(*arguments: Any) -> Any:
        threads.append(threading.current_thread())
        return shape(*arguments)

    monkeypatch.setattr(module, name, noted)
    await api.post(path, **body)
    assert len(threads) == 1
    assert threading.current_thread() not in threads
