"""Prompt and answer of a tokenizer that writes spaces as parts of words: an answer that goes on with a text has its
first space in every dialect, one that is a turn of its own has not, and log-probabilities spell what the text says."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from console.link.chat import ChatMessage
from console.link.local_chat import LocalConversation
from console.runtime.loops import CurrentLoop
from engine.config import SamplingParams
from tests.api.harness import Served, serving
from tests.fakes import tiny_tokenizers
from tests.fakes.backend import FakeBackend
from tests.fakes.model import fake_spec

TOKENIZER = tiny_tokenizers.byte_fallback()
THE = TOKENIZER.token_to_id("▁the")
IN = TOKENIZER.token_to_id("in")
EOS = TOKENIZER.token_to_id("</s>")
ANSWER = " thein the"
"""What the model says to everything: ▁the, in, ▁the."""


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Served]:
    """A server whose model has a tokenizer like Llama 2's."""
    said = (THE, IN, THE, EOS)
    backend = FakeBackend(reply=lambda prompt, index: said[index] if index < len(said) else EOS, vocab_size=512)
    spec = fake_spec(tmp_path)
    tiny_tokenizers.save(TOKENIZER, tmp_path, generation_config={"eos_token_id": EOS})
    async with serving(tmp_path, backend, spec=spec) as served:
        yield served


async def texts_of(api: Served, path: str, **body: Any) -> list[str]:
    """The answer's text to `body`, whole and put together from a stream."""
    whole = await api.post(path, **body)
    pieces = await api.events(path, **body)
    return [whole["choices"][0]["text"], "".join(e["choices"][0]["text"] for e in pieces if e != "[DONE]")]


@pytest.mark.parametrize("prompt", ["how", "how </s> in", [THE, IN]])
async def test_a_completion_begins_with_the_space_that_its_first_token_has(api: Served, prompt: object) -> None:
    assert await texts_of(api, "/v1/completions", prompt=prompt, max_tokens=9) == [ANSWER, ANSWER]


async def test_a_completion_of_nothing_begins_with_a_word(api: Served) -> None:
    assert await texts_of(api, "/v1/completions", prompt="", max_tokens=9) == [ANSWER[1:]] * 2
    assert await texts_of(api, "/v1/completions", prompt="how</s>", max_tokens=9) == [ANSWER[1:]] * 2


async def test_an_echoed_prompt_and_its_answer_read_as_one_text(api: Served) -> None:
    body = {"prompt": "how", "max_tokens": 9, "echo": True}
    assert await texts_of(api, "/v1/completions", **body) == [f"how{ANSWER}"] * 2
    assert await texts_of(api, "/v1/completions", logprobs=1, **body) == [f"how{ANSWER}"] * 2


async def test_the_logprobs_of_a_completion_spell_its_text_at_their_offsets(api: Served) -> None:
    for prompt in ("how", ""):
        [choice] = (await api.post("/v1/completions", prompt=prompt, max_tokens=3, logprobs=1, echo=True))["choices"]
        found = choice["logprobs"]
        shown = [token for token in found["tokens"] if token != "<s>"]
        assert "".join(shown) == choice["text"] == (f"how{ANSWER}" if prompt else ANSWER[1:])
        for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
            assert token == "<s>" or choice["text"].startswith(token, offset)


@pytest.mark.parametrize("before", [[], [{"role": "assistant", "content": "how"}]])
async def test_only_a_continued_turn_of_a_chat_begins_with_the_space(api: Served, before: list[dict[str, str]]) -> None:
    expected = ANSWER if before else ANSWER[1:]
    messages = [{"role": "user", "content": "x"}, *before]
    body = {"messages": messages, "max_tokens": 3, "logprobs": True, "continue_final_message": bool(before)}
    [choice] = (await api.post("/v1/chat/completions", **body))["choices"]
    assert choice["message"]["content"] == expected
    assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == expected
    assert b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"]).decode() == expected
    chunks = [event["choices"][0] for event in await api.events("/v1/chat/completions", **body) if event != "[DONE]"]
    assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == expected
    entries = [entry for chunk in chunks for entry in (chunk["logprobs"] or {"content": []})["content"]]
    assert "".join(entry["token"] for entry in entries) == expected


async def test_the_demo_endpoint_gives_prompt_and_answer_as_one_text(api: Served) -> None:
    answer = await api.post("/generate", prompt="how", max_tokens=9)
    assert answer["text"] in (f"how{ANSWER}", [f"how{ANSWER}"])
    async with api.http.post("/generate", json={"prompt": "how", "max_tokens": 9, "stream": True}) as response:
        last = json.loads((await response.text()).splitlines()[-1])
    assert last["text"] == [f"how{ANSWER}"]


async def test_koboldai_and_textgen_go_on_with_the_text(api: Served) -> None:
    for path, length in (("/api/v1/generate", "max_length"), ("/api/latest/generate", "max_length")):
        answer = await api.post(path, prompt="how", **{length: 9})
        assert [result["text"] for result in answer["results"]] == [ANSWER]
    async with api.http.post("/api/extra/generate/stream", json={"prompt": "how", "max_length": 9}) as response:
        frames = [json.loads(line[6:]) for line in (await response.text()).splitlines() if line.startswith("data: ")]
    assert "".join(frame["token"] for frame in frames) == ANSWER


async def test_tgi_goes_on_with_the_text_and_its_tokens_spell_it(api: Served) -> None:
    for inputs, expected in (("how", ANSWER), ("<s>", ANSWER[1:])):
        parameters = {"details": True, "max_new_tokens": 3, "decoder_input_details": True, "top_n_tokens": 1}
        answer = await api.post("/generate", inputs=inputs, parameters=parameters)
        assert answer["generated_text"] == expected
        assert "".join(token["text"] for token in answer["details"]["tokens"]) == expected
        prefill = [token["text"] for token in answer["details"]["prefill"]]
        assert "".join(prefill).replace("<s>", "") == inputs.replace("<s>", "")
        body = {"inputs": inputs, "parameters": {"max_new_tokens": 3}}
        async with api.http.post("/generate_stream", json=body) as response:
            events = [json.loads(line[5:]) for line in (await response.text()).splitlines() if line.startswith("data:")]
        assert "".join(event["token"]["text"] for event in events) == events[-1]["generated_text"] == expected


async def test_ollama_goes_on_with_a_raw_prompt_and_a_begun_answer_alone(api: Served) -> None:
    for raw, expected in ((True, ANSWER), (False, ANSWER[1:])):
        body = {"prompt": "how", "raw": raw, "stream": False, "logprobs": True}
        answer = await api.post("/api/generate", **body)
        assert answer["response"] == expected
        assert "".join(entry["token"] for entry in answer["logprobs"][:3]) == expected
    begun = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "how"}]
    for messages, expected in ((begun, ANSWER), (begun[:1], ANSWER[1:])):
        answer = await api.post("/api/chat", messages=messages, stream=False)
        assert answer["message"]["content"] == expected


async def test_anthropic_goes_on_with_a_prefilled_answer_alone(api: Served) -> None:
    begun = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "how"}]
    for messages, expected in ((begun, ANSWER), (begun[:1], ANSWER[1:])):
        answer = await api.post("/v1/messages", messages=messages, max_tokens=9, model="fake")
        assert answer["content"][0]["text"] == expected


async def test_an_answer_held_to_a_grammar_has_every_character_that_the_grammar_says(api: Served) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "guided_choice": [" the"], "logprobs": True}
    [choice] = (await api.post("/v1/chat/completions", **body))["choices"]
    assert choice["message"]["content"] == " the"
    assert choice["logprobs"]["content"][0]["token"] == " the"


async def test_the_console_goes_on_with_a_begun_answer_alone(api: Served) -> None:
    conversation = LocalConversation(api.engine, CurrentLoop())
    question, begun = ChatMessage(role="user", content="x"), ChatMessage(role="assistant", content="how")
    params = SamplingParams(max_tokens=3)
    for messages, expected in (([question, begun], ANSWER), ([question], ANSWER[1:])):
        deltas = conversation.chat(messages, params, continue_answer=len(messages) > 1)
        assert "".join([delta.text async for delta in deltas]) == expected
