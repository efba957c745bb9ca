"""What is clamped: each field of the tables in console.api.requests.parameters comes to what its line says."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from console.api.requests.body import Body
from console.api.requests.parameters import SAMPLING_CLAMPED
from console.api.server import ApiSettings
from tests.api.harness import Served, serving
from tests.fakes.backend import HIDDEN_SIZE, FakeBackend
from tools.docs_pages.parameters import bodies, bodies_within

CONTEXT = 64
ROOM = CONTEXT - 1
"""What the context leaves after a prompt of one token."""

CHAT_ROOM = CONTEXT - len("user: x\nassistant: ")
"""Likewise after a conversation of one message."""

FEWEST = 3
"""The most tokens of an answer, where the server has such a limit."""

CHAT = [{"role": "user", "content": "x"}]
LONG = "x" * 100
KOBOLD, COMPLETIONS, MESSAGES = "/api/v1/generate", "/v1/completions", "/v1/chat/completions"
RESPONSES, LLAMA = "/v1/responses", "/completion"

SAMPLING: dict[str, tuple[dict[str, Any], str, Any]] = {
    "top_k": ({"top_k": -1}, "top_k", 0),
    "repetition_range": ({"repetition_range": -1}, "repetition_range", 0),
    "dry_range": ({"dry_range": -1}, "dry_range", 0),
    "dynatemp_range": ({"dynatemp_range": 2.0, "temperature": 1.0}, "min_temp", 0),
    "min_tokens": ({"min_tokens": 500, "max_tokens": 500}, "min_tokens", ROOM),
}
"""Of each field: what is sent to /v1/completions, and which parameter of the engine then has which value."""

TO_ROOM: dict[tuple[str, str], tuple[str, dict[str, Any], str, Any]] = {
    ("CompletionBody", "max_tokens"): (COMPLETIONS, {"max_tokens": 500}, "max_tokens", ROOM),
    ("ChatBody", "max_tokens"): (MESSAGES, {"max_tokens": 500}, "max_tokens", CHAT_ROOM),
    ("ChatBody", "max_completion_tokens"): (MESSAGES, {"max_completion_tokens": 500}, "max_tokens", CHAT_ROOM),
    ("GenerateBody", "max_tokens"): ("/generate", {"max_tokens": 500}, "max_tokens", ROOM),
    ("LlamaBody", "n_predict"): (LLAMA, {"n_predict": 500}, "max_tokens", ROOM),
    ("LlamaBody", "temperature"): (LLAMA, {"temperature": -1}, "temperature", 0),
    ("GenerateBody", "top_a"): ("/generate", {"top_a": 1.0}, "top_a", 0),
    ("TgiParameters", "max_new_tokens"): ("/generate", {"parameters": {"max_new_tokens": 500}}, "max_tokens", ROOM),
    ("TgiParameters", "seed"): ("/generate", {"parameters": {"seed": 2**63 + 5}}, "seed", 5),
    ("KoboldBody", "max_context_length"): (KOBOLD, {"max_length": 9, "max_context_length": 500}, "max_tokens", 9),
    ("KoboldBody", "prompt"): (KOBOLD, {"max_length": 60, "prompt": LONG}, "max_tokens", 60),
    ("TextgenBody", "prompt"): (KOBOLD, {"max_new_tokens": 60, "prompt": LONG}, "max_tokens", 60),
    ("TextgenBody", "truncation_length"): (KOBOLD, {"max_new_tokens": 9, "truncation_length": 500}, "max_tokens", 9),
    ("ResponsesBody", "max_output_tokens"): (RESPONSES, {"max_output_tokens": 500}, "max_tokens", CHAT_ROOM),
    ("MessagesBody", "max_tokens"): ("/v1/messages", {"max_tokens": 500}, "max_tokens", CHAT_ROOM),
    ("Options", "num_ctx"): ("/api/generate", {"options": {"num_ctx": 500}}, "max_tokens", CHAT_ROOM),
    ("Options", "num_predict"): ("/api/generate", {"options": {"num_predict": 500}}, "max_tokens", CHAT_ROOM),
}
"""Of the fields of each body: where it is sent, what, and which parameter of the engine then has which value."""

DEFAULTS: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {
    ("CompletionBody", "max_tokens"): (COMPLETIONS, {}),
    ("ChatBody", "max_tokens"): (MESSAGES, {}),
    ("ResponsesBody", "max_output_tokens"): (RESPONSES, {}),
    ("GenerateBody", "max_tokens"): ("/generate", {}),
    ("TgiParameters", "max_new_tokens"): ("/generate", {"parameters": {}}),
    ("KoboldBody", "max_length"): (KOBOLD, {}),
    ("LlamaBody", "n_predict"): (LLAMA, {}),
    ("TextgenBody", "max_new_tokens"): (KOBOLD, {"do_sample": True}),
    ("Options", "num_predict"): ("/api/generate", {}),
}
"""Of the lengths of answers: what is sent where none is said."""

VECTORS = {("EmbedBody", "input"): "/api/embed", ("EmbeddingsBody", "prompt"): "/api/embeddings"}


@pytest.fixture
async def small(tmp_path: Path) -> AsyncIterator[Served]:
    """A server whose model has a small context."""
    async with serving(tmp_path, FakeBackend(max_model_len=CONTEXT)) as api:
        yield api


def prompted(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """A body with what it has to have."""
    if path == RESPONSES:
        return {"input": "x", **body}
    if "messages" in path or "chat" in path:
        return {"messages": CHAT, "max_tokens": 1, **body} if path == "/v1/messages" else {"messages": CHAT, **body}
    if "parameters" in body:
        return {"inputs": "x", **body}
    return {"prompt": "x", "stream": False, **body}


@pytest.mark.parametrize("field", SAMPLING)
async def test_a_sampling_field_is_brought_into_bounds(small: Served, field: str) -> None:
    sent, param, value = SAMPLING[field]
    await small.post(COMPLETIONS, prompt="x", **sent)
    assert getattr(small.backend.submitted[0].params, param) == value


@pytest.mark.parametrize("case", TO_ROOM, ids=".".join)
async def test_a_field_is_brought_to_what_there_is_room_for(small: Served, case: tuple[str, str]) -> None:
    path, sent, param, value = TO_ROOM[case]
    await small.post(path, **prompted(path, sent))
    [request] = small.backend.submitted
    assert getattr(request.params, param) == value
    assert len(request.prompt_ids) + (request.params.max_tokens or 0) <= CONTEXT


@pytest.mark.parametrize("case", DEFAULTS, ids=".".join)
async def test_a_length_that_is_left_out_is_no_more_than_any_may_be(tmp_path: Path, case: tuple[str, str]) -> None:
    path, sent = DEFAULTS[case]
    async with serving(tmp_path, settings=ApiSettings(port=0, max_output_tokens=FEWEST)) as api:
        await api.post(path, **prompted(path, sent))
        assert api.backend.submitted[0].params.max_tokens == FEWEST


@pytest.mark.parametrize("case", VECTORS, ids=".".join)
async def test_a_text_that_is_too_long_is_cut_to_its_beginning(small: Served, case: tuple[str, str]) -> None:
    answer = await small.post(VECTORS[case], **{case[1]: LONG})
    assert len(answer.get("embedding") or answer["embeddings"][0]) == HIDDEN_SIZE
    assert len(small.backend.submitted[0].prompt_ids) == ROOM


def test_every_field_that_is_said_to_be_clamped_is_tried_here() -> None:
    outer = list(bodies())
    every: list[type[Body]] = [*outer, *(inner for body in outer for _, inner in bodies_within(body))]
    own = {
        (body.__name__, name)
        for body in every
        for name, how in body.clamped.items()
        if SAMPLING_CLAMPED.get(name) != how
    }
    assert own == {*TO_ROOM, *DEFAULTS, *VECTORS}
    assert SAMPLING.keys() == SAMPLING_CLAMPED.keys()
