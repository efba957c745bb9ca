"""Why an answer ended, and by which stop: vLLM's `stop_reason`, Anthropic's `stop_sequence`; and what computed it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from console.api.http.serial_thread import SerialThread
from console.api.requests.served_model import ServedModel
from tests.api.harness import Served, serving
from tests.fakes.backend import FakeBackend, saying
from tests.fakes.model import EOS_ID

HELLO = [{"role": "user", "content": "hello"}]
PATHS = [("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": HELLO})]
CASES: list[tuple[dict[str, Any], str, Any]] = [
    ({}, "stop", None),
    ({"max_tokens": 3}, "length", None),
    ({"stop": ["ten", "END", "D"]}, "stop", "END"),
    ({"stop": "END", "include_stop_str_in_output": True}, "stop", "END"),
    ({"stop_token_ids": [ord("D")]}, "stop", ord("D")),
    ({"stop_token_ids": [EOS_ID]}, "stop", None),
    ({"stop_token_ids": [EOS_ID], "ignore_eos": True}, "stop", EOS_ID),
    ({"stop": "END", "min_tokens": 8}, "stop", None),
]


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Served]:
    """A server whose model ends its answer by itself."""
    async with serving(tmp_path, FakeBackend(reply=saying("one END", then=EOS_ID))) as served:
        yield served


@pytest.mark.parametrize(("path", "body"), PATHS, ids=["completions", "chat"])
@pytest.mark.parametrize(("asked", "finish", "stopped"), CASES)
async def test_the_stop_that_ended_an_answer_is_told_streamed_or_not(
    api: Served, path: str, body: dict[str, Any], asked: dict[str, Any], finish: str, stopped: Any
) -> None:
    given = {"max_tokens": 20, **body, **asked}
    [choice] = (await api.post(path, **given))["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == (finish, stopped)
    *pieces, last = [event["choices"][0] for event in (await api.events(path, **given))[:-1]]
    assert (last["finish_reason"], last["stop_reason"]) == (finish, stopped)
    assert not any("stop_reason" in piece for piece in pieces)


async def test_anthropic_names_the_stop_sequence_that_ended_an_answer_and_none_that_is_only_its_last_word(
    api: Served,
) -> None:
    body = {"messages": HELLO, "max_tokens": 20, "stop_sequences": ["END"]}
    ended = await api.post("/v1/messages", **body)
    assert (ended["stop_reason"], ended["stop_sequence"], ended["content"][0]["text"]) == (
        "stop_sequence",
        "END",
        "one ",
    )
    by_itself = await api.post("/v1/messages", **body, min_tokens=8)
    assert (by_itself["stop_reason"], by_itself["stop_sequence"]) == ("end_turn", None)
    assert by_itself["content"][0]["text"] == "one END"


@pytest.mark.parametrize(("path", "body"), PATHS, ids=["completions", "chat"])
async def test_every_answer_and_chunk_has_one_fingerprint(api: Served, path: str, body: dict[str, Any]) -> None:
    options = {"include_usage": True}
    events = (await api.events(path, **body, max_tokens=2, n=2, stream_options=options))[:-1]
    answers = [await api.post(path, **body, max_tokens=2, seed=seed) for seed in (1, 2)]
    [fingerprint] = {each["system_fingerprint"] for each in (*events, *answers)}
    assert fingerprint.startswith("fp_")


async def test_a_fingerprint_changes_with_what_computes_the_answer(api: Served) -> None:
    serving = await api.engine.serving()
    model = ServedModel(
        name=serving.name,
        requested_name="",
        key=serving.key,
        adapter=serving.adapter,
        loaded=serving.model,
        tokenizer=serving.tokenizer,
        thread=SerialThread("test"),
    )
    loaded = model.loaded
    others = [
        msgspec.structs.replace(loaded, dtype="bfloat16"),
        msgspec.structs.replace(loaded, attention="native"),
        msgspec.structs.replace(loaded, linear="onednn"),
        msgspec.structs.replace(loaded, backend="other"),
    ]
    prints = {replace(model, loaded=other).fingerprint for other in others}
    prints |= {replace(model, adapter="a").fingerprint, replace(model, key="other").fingerprint, model.fingerprint}
    assert len(prints) == 7
    assert replace(model, name="an alias").fingerprint == model.fingerprint
