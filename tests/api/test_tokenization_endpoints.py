"""/tokenize, /detokenize, /v1/chat/template and /version."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from console.api.dialects.tgi import generate
from console.api.http.errors import json_response
from engine.text.tokenizer import Tokenizer
from tests.api.harness import Served
from tests.api.test_api_tools import HELLO, NOW, serving_tools
from tests.fakes.backend import saying
from tests.fakes.model import EOS_ID
from tests.fakes.tool_templates import HERMES

HELLO_PROMPT = "user: hello\nassistant: "


async def test_a_text_s_tokens_have_vllm_s_shape(api: Served) -> None:
    assert await api.post("/tokenize", model="fake", prompt="hé") == {
        "count": 3,
        "max_model_len": 4096,
        "tokens": [104, 195, 169],
        "token_strs": None,
    }


async def test_token_strings_are_the_vocabulary_s(api: Served) -> None:
    answer = await api.post("/tokenize", prompt="a b", return_token_strs=True, add_special_tokens=False)
    assert answer["token_strs"] == ["a", "Ġ", "b"]


async def test_a_conversation_s_tokens_are_those_of_its_prompt(api: Served) -> None:
    answer = await api.post("/tokenize", messages=HELLO)
    assert bytes(answer["tokens"]).decode() == HELLO_PROMPT
    without = await api.post("/tokenize", messages=HELLO, add_generation_prompt=False, user="me")
    assert bytes(without["tokens"]).decode() == "user: hello\n"
    begun = [*HELLO, {"role": "assistant", "content": "Well"}]
    going_on = await api.post("/tokenize", messages=begun, continue_final_message=True)
    assert bytes(going_on["tokens"]).decode() == "user: hello\nassistant: Well"


async def test_a_conversation_is_rendered_without_generating(api: Served) -> None:
    answer = await api.post("/v1/chat/template", model="fake", messages=HELLO, temperature=0.5, max_tokens=5)
    assert answer == {
        "object": "chat.template",
        "model": "fake",
        "prompt": HELLO_PROMPT,
        "count": len(HELLO_PROMPT),
        "max_model_len": 4096,
    }
    assert api.backend.submitted == []


async def test_what_is_rendered_is_what_a_chat_completion_submits(tmp_path: Path) -> None:
    async with serving_tools(tmp_path, HERMES, saying("ok", then=EOS_ID)) as api:
        body: dict[str, Any] = {"messages": HELLO, "tools": [NOW]}
        rendered = await api.post("/v1/chat/template", **body)
        tokens = await api.post("/tokenize", **body)
        await api.post("/v1/chat/completions", **body)
        submitted = list(api.backend.submitted[-1].prompt_ids)
    assert rendered["prompt"].startswith("tools: ")
    assert rendered["prompt"].encode() == bytes(submitted)
    assert tokens["tokens"] == submitted


async def test_tokens_become_text_again_control_tokens_too(api: Served) -> None:
    assert (await api.post("/detokenize", tokens=[104, 195, 169, EOS_ID]))["prompt"] == "hé<eos>"
    many = [97] * 4096
    assert (await api.post("/detokenize", tokens=many))["prompt"] == "a" * 4096


async def test_no_more_tokens_become_text_than_the_context_holds(api: Served) -> None:
    error = await api.refusal("/detokenize", tokens=[97] * 4097)
    assert error["param"] == "tokens"
    assert error["message"] == "tokens has 4097 entries; the model's context holds 4096 tokens"


async def test_the_version_is_told(api: Served) -> None:
    assert set(await api.get("/version")) == {"version"}


async def test_the_body_decides_whose_tokenize_it_is(api: Served) -> None:
    async with api.http.post("/tokenize", json={"inputs": "hi"}) as response:
        answer = await response.json()
    assert [token["id"] for token in answer] == [104, 105]
    assert (await api.post("/tokenize", prompt="hi"))["tokens"] == [104, 105]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": HELLO}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": HELLO, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": HELLO, "chat_template": "x"}, "chat_template"),
        ("/detokenize", {"tokens": [300]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {}, "tokens"),
        ("/v1/chat/template", {}, "messages"),
        ("/v1/chat/template", {"messages": HELLO, "shape": "round"}, "shape"),
    ],
    ids=str,
)
async def test_a_bad_value_is_refused_by_its_name(api: Served, path: str, body: dict[str, Any], param: str) -> None:
    assert (await api.refusal(path, **body))["param"] == param


async def test_many_tokens_of_a_short_text_are_written_beside_the_event_loop(
    api: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, write = [], json_response

    def noted(body: object) -> web.Response:
        threads.append(threading.current_thread())
        return write(body)

    monkeypatch.setattr(generate, "json_response", noted)
    async with api.http.post("/tokenize", json={"inputs": "x" * 5000}) as response:
        assert len(await response.json()) == 5000
    assert len(threads) == 1
    assert threading.current_thread() not in threads


async def test_names_of_many_tokens_are_looked_up_beside_the_event_loop(
    api: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, look_up = set(), Tokenizer.id_to_token

    def noted(self: Tokenizer, token_id: int) -> str:
        threads.add(threading.current_thread())
        return look_up(self, token_id)

    monkeypatch.setattr(Tokenizer, "id_to_token", noted)
    answer = await api.post("/tokenize", prompt="x" * 20_000, return_token_strs=True)
    assert answer["count"] == len(answer["token_strs"]) == 20_000
    assert len(threads) == 1
    assert threading.current_thread() not in threads
