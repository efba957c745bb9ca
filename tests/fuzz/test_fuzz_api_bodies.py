"""Any body at any endpoint is answered, or refused with one error in the dialect's form, at little cost."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from random import Random
from typing import Any, NamedTuple

import aiohttp
import pytest
import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from console.api.server import ApiServer, ApiSettings
from console.runtime.runtime import Runtime
from console.settings.schema import Settings
from engine.text.printable import printable
from tests.api.harness import Served, serving
from tests.api.operators import FolderOperator
from tests.fakes.backend import FakeBackend, saying
from tests.fakes.bounds import within_bounds
from tests.fakes.model import EOS_ID, fake_spec
from tests.fakes.mutations import changed, damaged
from tests.fakes.tool_templates import HERMES, write_tool_model

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]

CONTEXT = 512
FOLLOWED = 400
"""Bodies that are made of each endpoint's own."""

USER = {"role": "user", "content": "x"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "x"}], "name": "a"}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"enum": ["b", 1]}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "add", "description": "d", "parameters": SCHEMA, "strict": False}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": [1, {"b": "\\\\u0000"}]}'}}
SAMPLING: dict[str, Any] = {
    "max_tokens": 2,
    "temperature": 0.5,
    "top_k": 5,
    "top_p": 0.9,
    "min_p": 0.1,
    "typical_p": 0.9,
    "repetition_penalty": 1.1,
    "repetition_range": 5,
    "mirostat_mode": 0,
    "dry_multiplier": 0.5,
    "dry_sequence_breakers": ["\n", ":"],
    "cfg_scale": 1.5,
    "negative_prompt": "y",
    "banned_strings": ["z"],
    "logit_bias": {"65": 1.5},
    "custom_token_bans": "66, 67",
    "sampler_priority": ["top_k", "temperature"],
    "seed": 7,
    "min_tokens": 1,
    "stop": ["q"],
    "stop_token_ids": [70],
    "cache_salt": "s",
    "priority": 1,
}
FORMATS: tuple[dict[str, Any], ...] = (
    {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
    {"guided_json": json.dumps(SCHEMA)},
    {"structured_outputs": {"regex": "[ab]+"}},
    {"guided_choice": ["yes", "no"]},
    {"grammar_string": 'root ::= "yes"'},
)
OLLAMA = {"num_predict": 2, "num_ctx": 64, "repeat_last_n": 4, "stop": ["q"], "temperature": 0.5, "seed": 1}
TGI = {"max_new_tokens": 2, "details": True, "top_n_tokens": 2, "truncate": 4, "stop": ["q"], "best_of": 1, "seed": 3}

BODIES: Mapping[str, tuple[dict[str, Any], ...]] = {
    "/v1/completions": (
        {"prompt": "x", "logprobs": 2, "echo": True, "n": 2, "best_of": 3, "user": "u", **SAMPLING},
        {"prompt": [[65, 66], [67.0]], "max_tokens": 0, "prompt_logprobs": 1, "stream_options": None},
        {"prompt": ["a", "b"], "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 2},
        *({"prompt": "x", "max_tokens": 4, **each} for each in FORMATS),
    ),
    "/v1/chat/completions": (
        {"messages": [USER, {"role": "assistant", "content": "y"}], "continue_final_message": True, "max_tokens": 2},
        {
            "messages": [
                USER,
                {"role": "assistant", "tool_calls": [CALL]},
                {**USER, "role": "tool", "tool_call_id": "a"},
            ],
            "tools": [TOOL],
            "tool_choice": "auto",
            "max_tokens": 2,
        },
        {"messages": [PARTS], "logprobs": True, "top_logprobs": 2, "chat_template_kwargs": {"a": [1]}, **SAMPLING},
        {
            "messages": [PARTS],
            "stream": True,
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "add"}},
            "max_tokens": 4,
        },
    ),
    "/v1/embeddings": ({"input": ["a", "b"], "encoding_format": "base64", "dimensions": 64}, {"input": [65, 66]}),
    "/generate": (
        {"prompt": "x", "token_repetition_penalty": 1.1, **SAMPLING},
        {"prompt": ["a", [65]], "n": 2, "stream": True, "max_tokens": 2},
        {"inputs": "x", "parameters": TGI},
        {"inputs": "x", "parameters": {"grammar": {"type": "json", "value": SCHEMA}, "max_new_tokens": 4}},
    ),
    "/generate_stream": ({"inputs": "x", "parameters": TGI},),
    "/": (
        {"inputs": "x", "stream": True, "parameters": TGI},
        {"inputs": "x", "parameters": {"do_sample": True, "max_new_tokens": 2}},
    ),
    "/tokenize": ({"prompt": "x", "return_token_strs": True}, {"messages": [USER], "tools": [TOOL]}, {"inputs": "x"}),
    "/detokenize": ({"tokens": [65, 256]},),
    "/v1/chat/template": ({"messages": [USER, PARTS], "add_generation_prompt": False},),
    "/v1/messages": (
        {"max_tokens": 2, "messages": [USER, USER], "system": "s", "stop_sequences": ["q"], "temperature": 0.5},
        {
            "max_tokens": 4,
            "stream": True,
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "add", "input": {"a": 1}}]},
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "t", "content": "y", "is_error": True}],
                },
            ],
            "tools": [{"name": "add", "description": "d", "input_schema": SCHEMA}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        },
    ),
    "/v1/messages/count_tokens": ({"messages": [USER], "system": [{"type": "text", "text": "s"}]},),
    "/api/generate": (
        {"prompt": "x", "system": "s", "options": OLLAMA, "context": [65], "format": SCHEMA, "stream": False},
        {"model": "fake:latest", "prompt": "x", "raw": True, "keep_alive": "5m", "options": OLLAMA, "logprobs": True},
    ),
    "/api/chat": (
        {
            "messages": [
                USER,
                {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]},
                {"role": "tool", "content": "y", "tool_name": "add"},
            ],
            "tools": [TOOL],
            "options": OLLAMA,
            "think": False,
        },
        {"messages": [USER], "format": "json", "stream": False, "options": OLLAMA, "top_logprobs": 1, "logprobs": True},
    ),
    "/api/embed": ({"input": ["a", "b"], "truncate": True, "options": {"num_ctx": 8}},),
    "/api/embeddings": ({"prompt": "x"},),
    "/api/show": ({"model": "fake:latest", "verbose": True},),
    "/api/v1/generate": (
        {
            "prompt": "x",
            "max_length": 2,
            "max_context_length": 64,
            "memory": "m",
            "sampler_order": [6, 0, 1, 3, 4, 2, 5],
        },
        {"prompt": "x", "max_new_tokens": 2, "do_sample": False, "truncation_length": 64, "stopping_strings": ["q"]},
    ),
    "/api/extra/generate/stream": ({"prompt": "x", "max_length": 2, "genkey": "K1", "singleline": True},),
    "/api/extra/generate/check": ({"genkey": "K1"},),
    "/api/extra/abort": ({"genkey": "K1"},),
    "/api/extra/tokencount": ({"prompt": "x", "special": False},),
    "/api/v1/token-count": ({"prompt": "x"},),
    "/api/v1/model": ({"action": "info", "model_name": None, "args": {}, "settings": {}},),
}
ADMIN: Mapping[str, tuple[dict[str, Any], ...]] = {
    "/admin/load": ({"model": "none", "name": "n", "beside": True, "workers": 1, "gpu_split": [1.0, 2.5]},),
    "/admin/estimate": ({"model": "none", "max_model_len": 64, "cache_bits": 8, "weights": "int8"},),
    "/admin/adapters": ({"model": "", "name": "a", "path": "/nowhere", "scale": 0.5},),
    "/admin/reconfigure": ({"model": "", "workers": 1, "max_prompts": 4, "idle_unload_s": 0.0},),
    "/admin/unload": ({"model": "none", "drain_seconds": 0.0},),
    "/admin/cancel-load": ({},),
    "/admin/call/models.load": ({"name": "none"},),
    "/admin/call/api.make_key": ({"name": "k", "scopes": ["use"]},),
    "/admin/workers/none/restart": ({},),
}

TEXTS = (
    *('"\\ud800"', "NaN", "[" * 2000, '{"a": 1e999}', "[" + "1," * 5000 + "1]"),
    *("," * 5000, "9" * 5000, "a" * 100_000, "\x1b[2J"),
)
"""Some are JSON, or begin so, within JSON."""
LARGE: tuple[Any, ...] = ([65] * 20_000, ["a"] * 20_000, {str(i): 1 for i in range(5000)}, [[65]] * 600, [USER] * 600)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=40)
LEAVES |= st.sampled_from(TEXTS)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=20), inner, max_size=5),
    max_leaves=12,
)


class Asked(NamedTuple):
    """A client of a server, and the dialects of its paths."""

    http: aiohttp.ClientSession
    server: ApiServer


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """A server whose model knows tools and answers at once with a short word."""
    folder = tmp_path_factory.mktemp("model")
    write_tool_model(folder, HERMES)
    backend = FakeBackend(reply=saying("yes", then=EOS_ID), max_model_len=CONTEXT)
    settings = ApiSettings(port=0, max_choices=64)
    async with serving(
        folder,
        backend,
        settings=settings,
        spec=fake_spec(folder, max_model_len=CONTEXT),
        operator=FolderOperator(folder, "fake"),
    ) as served:
        yield served


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def operated(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Asked]:
    """A server whose operator is the program's own; no model is there to be loaded."""
    folder = tmp_path_factory.mktemp("models")
    runtime = Runtime(Settings(port=0, models_dir=(folder,), worker_host="thread"))
    await runtime.start()
    try:
        async with aiohttp.ClientSession(runtime.api_status().url) as http:
            yield Asked(http, runtime.api)
    finally:
        await runtime.close(drain_s=0.0)


@pytest.mark.parametrize("path", BODIES)
async def test_what_becomes_of_a_dialect_s_body_is_answered_or_refused(api: Served, path: str) -> None:
    random = Random(path)
    for _ in range(FOLLOWED // 4):
        body = random.choice(BODIES[path])
        await sent(api, path, json.dumps(changed(body, random, random.choice((1, 1, 2, 5)))).encode())
        await sent(api, path, damaged(json.dumps(body).encode(), random, random.choice((1, 3))))


@pytest.mark.parametrize("path", BODIES)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
async def test_any_value_in_any_field_is_answered_or_refused(api: Served, path: str, data: st.DataObject) -> None:
    body = dict(data.draw(st.sampled_from(BODIES[path])))
    for name in data.draw(st.lists(st.sampled_from(sorted(body)) | st.text(max_size=20), min_size=1, max_size=3)):
        body[name] = data.draw(VALUES | st.sampled_from(LARGE))
    await sent(api, path, json.dumps(body).encode(errors="surrogatepass"))


@pytest.mark.parametrize("path", ADMIN)
async def test_what_becomes_of_an_operator_s_body_is_carried_out_or_refused(operated: Asked, path: str) -> None:
    random = Random(path)
    for _ in range(FOLLOWED // 8):
        body = random.choice(ADMIN[path])
        await sent(operated, path, json.dumps(changed(body, random, random.choice((1, 1, 2)))).encode())
        await sent(operated, path, damaged(json.dumps(body).encode(), random, random.choice((1, 3))))


NAMES = ["\0", "x" * 4000, "a/" * 2000, "\ud800", "~nobody/x", "~" * 4000, "/", "", ".", "C:\\"]


@pytest.mark.parametrize("name", NAMES, ids=map(str, range(len(NAMES))))
@pytest.mark.parametrize("path", ["/admin/load", "/admin/estimate", "/admin/adapters", "/admin/call/models.load"])
async def test_any_name_of_a_model_or_folder_is_found_or_refused(operated: Asked, path: str, name: str) -> None:
    field = {"/admin/adapters": "path", "/admin/call/models.load": "name"}.get(path, "model")
    await sent(operated, path, json.dumps({"name": "n", field: name}).encode())


async def sent(api: Asked | Served, path: str, body: bytes) -> None:
    """Send a body within bounds, and look at the answer."""
    with within_bounds(len(body)):
        async with api.http.post(path, data=body, headers={"Content-Type": "application/json"}) as response:
            answer = await response.read()
    if response.status < 300:
        assert b"server log has the cause" not in answer
        return
    assert response.status < 500 or response.status == 503, answer
    assert response.content_type == "application/json"
    error = json.loads(answer)
    dialects = [dialect.name for dialect in api.server._dialects.at("POST", path)] or ["openai"]
    sentences = [sentence for name in dialects if (sentence := FORMS.get(name, envelope)(error)) is not None]
    assert sentences, error
    assert printable(sentences[0]) == sentences[0], error
    assert 0 < len(sentences[0]) <= 1000


def envelope(error: Any) -> str | None:
    """The sentence in OpenAI's form."""
    match error:
        case {"error": {"message": str(said), "type": str(), "param": str() | None, "code": str(), **more}, **others}:
            return None if more or others else said
        case _:
            return None


def kobold(error: Any) -> str | None:
    """Likewise in KoboldAI's."""
    match error:
        case {"detail": {"msg": str(said), "type": str(), **more}, **others}:
            return None if more or others else said
        case _:
            return None


def anthropic(error: Any) -> str | None:
    """Likewise in Anthropic's."""
    match error:
        case {"type": "error", "error": {"type": str(), "message": str(said), **more}, "request_id": str(), **others}:
            return None if more or others else said
        case _:
            return None


def ollama(error: Any) -> str | None:
    """Likewise in Ollama's."""
    match error:
        case {"error": str(said), **others}:
            return None if others else said
        case _:
            return None


def tgi(error: Any) -> str | None:
    """Likewise in TGI's."""
    match error:
        case {"error": str(said), "error_type": str(), **others}:
            return None if others else said
        case _:
            return None


FORMS: Mapping[str, Callable[[Any], str | None]] = {
    "kobold": kobold,
    "anthropic": anthropic,
    "ollama": ollama,
    "tgi": tgi,
}
