"""Values that ask for nothing, in every field that clients of OpenAI, Anthropic and Ollama send, change nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from console.api.requests.parameters import NOTHING
from tests.api.harness import Served, serving
from tests.fakes.backend import FakeBackend, saying
from tests.fakes.model import EOS_ID

HELLO = [{"role": "user", "content": "hello"}]
EMPTY = list(NOTHING)
NULL = [None]

TOKENS = {"frequency_penalty": [*NULL, 0, 0.0], "presence_penalty": [*NULL, 0], "seed": NULL, "top_p": [*NULL, 1]}
LABELS = dict.fromkeys(("metadata", "prompt_cache_key", "safety_identifier", "service_tier", "user"), EMPTY)
VLLM = {
    "allowed_token_ids": EMPTY,
    "bad_words": EMPTY,
    "cache_salt": EMPTY,
    "guided_choice": EMPTY,
    "guided_grammar": EMPTY,
    "guided_json": EMPTY,
    "guided_regex": EMPTY,
    "ignore_eos": [*NULL, False],
    "kv_transfer_params": EMPTY,
    "logits_processors": EMPTY,
    "min_tokens": [*NULL, 0, 0.0],
    "mm_processor_kwargs": EMPTY,
    "priority": [*NULL, 0, 0.0],
    "prompt_logprobs": NULL,
    "request_id": EMPTY,
    "return_token_ids": [*NULL, False],
    "return_tokens_as_token_ids": [*NULL, False],
    "stop_token_ids": EMPTY,
    "structured_outputs": EMPTY,
    "truncate_prompt_tokens": NULL,
    "truncation_side": EMPTY,
    "use_beam_search": [*NULL, False],
    "vllm_xargs": EMPTY,
}
"""Of vLLM's clients, besides OpenAI's."""

CHAT = {
    **TOKENS,
    **LABELS,
    **VLLM,
    "audio": EMPTY,
    "chat_template": EMPTY,
    "chat_template_kwargs": EMPTY,
    "documents": EMPTY,
    "echo": [*NULL, False],
    "function_call": [*EMPTY, "none"],
    "functions": EMPTY,
    "logit_bias": EMPTY,
    "logprobs": [*NULL, False],
    "max_completion_tokens": [*NULL, 64, 64.0],
    "max_tokens": [*NULL, 64, 64.0],
    "modalities": [*EMPTY, ["text"]],
    "n": [*NULL, 1, 1.0],
    "parallel_tool_calls": [*NULL, True],
    "prediction": EMPTY,
    "reasoning_effort": [*EMPTY, "none"],
    "response_format": [*EMPTY, {"type": "text"}],
    "stop": EMPTY,
    "store": [*NULL, False],
    "stream": [*NULL, False],
    "stream_options": [*EMPTY, {"include_usage": False}, {"include_usage": None}],
    "temperature": NULL,
    "tool_choice": [*EMPTY, "none", "auto"],
    "tools": EMPTY,
    "top_logprobs": [*NULL, 0, 0.0],
    "verbosity": [*EMPTY, "medium"],
    "web_search_options": [None, "", []],
}
COMPLETION = {
    **TOKENS,
    **LABELS,
    **VLLM,
    "best_of": [*NULL, 1, 1.0],
    "echo": [*NULL, False],
    "logit_bias": EMPTY,
    "logprobs": NULL,
    "max_tokens": [16, 16.0],
    "n": [*NULL, 1, 1.0],
    "stop": EMPTY,
    "stream": [*NULL, False],
    "stream_options": [*EMPTY, {"include_usage": False}],
    "suffix": EMPTY,
    "temperature": NULL,
}
EMBEDDING = {
    "cache_salt": EMPTY,
    "dimensions": [*NULL, 64, 64.0],
    "encoding_format": EMPTY,
    "messages": EMPTY,
    "priority": [*NULL, 0.0],
    "truncate_prompt_tokens": NULL,
    "user": EMPTY,
}
RESPONSES = {
    **{name: values for name, values in LABELS.items() if name != "metadata"},
    "background": [*NULL, False],
    "context_management": EMPTY,
    "conversation": EMPTY,
    "include": EMPTY,
    "instructions": EMPTY,
    "max_output_tokens": [*NULL, 64, 64.0],
    "metadata": EMPTY,
    "parallel_tool_calls": [*NULL, True],
    "previous_response_id": EMPTY,
    "prompt": EMPTY,
    "reasoning": [*EMPTY, {"effort": "none"}, {"effort": None}],
    "stream": [*NULL, False],
    "stream_options": EMPTY,
    "temperature": NULL,
    "text": [*EMPTY, {"format": {"type": "text"}}],
    "tool_choice": [*EMPTY, "none", "auto"],
    "tools": EMPTY,
    "top_logprobs": [*NULL, 0, 0.0],
    "truncation": [*EMPTY, "disabled"],
}
ANTHROPIC = {
    "container": EMPTY,
    "context_management": [*EMPTY, {"edits": []}],
    "mcp_servers": EMPTY,
    "metadata": [*EMPTY, {"user_id": None}],
    "output_config": EMPTY,
    "output_format": EMPTY,
    "service_tier": [*EMPTY, "auto"],
    "stop_sequences": EMPTY,
    "stream": [*NULL, False],
    "system": EMPTY,
    "temperature": NULL,
    "thinking": [*EMPTY, {"type": "disabled"}],
    "tool_choice": [*EMPTY, {"type": "none"}, {"type": "auto"}],
    "tools": EMPTY,
    "top_k": [*NULL, 0, 0.0],
    "top_p": NULL,
}
OLLAMA = {
    "format": [None, ""],
    "images": EMPTY,
    "keep_alive": EMPTY,
    "logprobs": [*NULL, False],
    "options": [*EMPTY, {"stop": [], "num_predict": -1.0, "seed": 0.0, "num_ctx": None, "mirostat": 0.0}],
    "suffix": EMPTY,
    "template": EMPTY,
    "think": EMPTY,
    "tools": EMPTY,
    "top_logprobs": [*NULL, 0, 0.0],
}
OLLAMA_GENERATE = {
    **{name: values for name, values in OLLAMA.items() if name != "tools"},
    "context": EMPTY,
    "raw": [*NULL, False],
    "system": EMPTY,
}
TGI = {"model": EMPTY, "parameters": NULL, "stream": [*NULL, False]}
TGI_PARAMETERS = {
    "adapter_id": EMPTY,
    "best_of": [*NULL, 1, 1.0],
    "decoder_input_details": [*NULL, False],
    "details": [*NULL, False],
    "do_sample": [*NULL, False],
    "frequency_penalty": [*NULL, 0],
    "grammar": NULL,
    "max_new_tokens": [*NULL, 64.0],
    "repetition_penalty": [*NULL, 1],
    "return_full_text": [*NULL, False],
    "seed": NULL,
    "stop": EMPTY,
    "temperature": [*NULL, 1],
    "top_k": [*NULL, 0, 0.0],
    "top_n_tokens": [*NULL, 0, 0.0],
    "top_p": [*NULL, 1],
    "truncate": NULL,
    "typical_p": [*NULL, 1],
    "watermark": [*NULL, False],
}
FRONTEND = {
    "banned_strings": EMPTY,
    "custom_token_bans": [*EMPTY, [2.0]],
    "dry_multiplier": [*NULL, 0],
    "grammar_string": EMPTY,
    "guidance_scale": [*NULL, 1],
    "logit_bias": EMPTY,
    "min_p": [*NULL, 0],
    "mirostat": [*NULL, 0, 0.0],
    "negative_prompt": EMPTY,
    "seed": [*NULL, -1, -1.0],
    "stop": EMPTY,
    "temperature": NULL,
    "top_a": [*NULL, 0],
    "top_k": [*NULL, 0, 0.0],
    "typical": [*NULL, 1],
}
"""Of KoboldAI's and text-generation-webui's clients."""

KOBOLD = {
    **FRONTEND,
    "genkey": EMPTY,
    "max_context_length": NULL,
    "max_length": [*NULL, 8.0],
    "memory": EMPTY,
    "n": [*NULL, 1, 1.0],
    "quiet": [*NULL, False, True],
    "rep_pen": [*NULL, 1],
    "sampler_order": EMPTY,
    "sampler_seed": [*NULL, -1],
    "stop_sequence": EMPTY,
    "stream": [*NULL, False],
    "tfs": [*NULL, 1],
    "use_default_badwordsids": [*NULL, False],
}
TEXTGEN = {
    **FRONTEND,
    "add_bos_token": [*NULL, True],
    "ban_eos_token": [*NULL, False],
    "do_sample": [*NULL, True],
    "early_stopping": [*NULL, False],
    "max_new_tokens": [*NULL, 8.0],
    "num_beams": [*NULL, 1, 1.0],
    "repetition_penalty": [*NULL, 1],
    "sampler_priority": EMPTY,
    "stopping_strings": EMPTY,
    "truncation_length": NULL,
}
LLAMACPP = {
    "cache_prompt": [*NULL, True, False],
    "custom_token_bans": [*EMPTY, [2.0]],
    "grammar": EMPTY,
    "id_slot": [*NULL, -1],
    "image_data": EMPTY,
    "json_schema": NULL,
    "logit_bias": EMPTY,
    "n_predict": [*NULL, 8.0],
    "n_probs": [*NULL, 0, 0.0],
    "response_fields": EMPTY,
    "return_tokens": [*NULL, False],
    "samplers": NULL,
    "seed": [*NULL, -1],
    "stop": EMPTY,
    "stream": [*NULL, False],
    "t_max_predict_ms": [*NULL, 0, 0.0],
    "timings_per_token": [*NULL, False],
}
ERICLLM = {
    **TOKENS,
    "best_of": [*NULL, 1],
    "ignore_eos": [*NULL, False],
    "lora": EMPTY,
    "max_tokens": [*NULL, 8.0],
    "n": [*NULL, 1, 1.0],
    "stop": EMPTY,
    "stream": [*NULL, False],
    "token_repetition_penalty": [*NULL, 1],
    "why": [*NULL, False],
}
RANKED = {
    "model": EMPTY,
    "priority": [*NULL, 0.0],
    "truncate_prompt_tokens": NULL,
    "user": EMPTY,
}
ENDPOINTS: dict[str, tuple[dict[str, Any], Any]] = {
    "/v1/chat/completions": ({"messages": HELLO}, CHAT),
    "/v1/completions": ({"prompt": "hello"}, COMPLETION),
    "/v1/embeddings": ({"input": "hello"}, EMBEDDING),
    "/v1/responses": ({"input": "hello", "store": False}, RESPONSES),
    "/v1/messages": ({"model": "fake", "max_tokens": 8, "messages": HELLO}, ANTHROPIC),
    "/api/chat": ({"model": "fake", "messages": HELLO, "stream": False}, OLLAMA),
    "/api/generate": ({"model": "fake", "prompt": "hello", "stream": False}, OLLAMA_GENERATE),
    "/generate": ({"prompt": "hello"}, ERICLLM),
    "/": ({"inputs": "hello"}, TGI),
    "/api/v1/generate": ({"prompt": "hello", "max_length": 8}, KOBOLD),
    "/api/extra/generate/stream": ({"prompt": "hello", "max_length": 8}, KOBOLD),
    "/completion": ({"prompt": "hello", "n_predict": 8}, LLAMACPP),
    "/rerank": ({"query": "hello", "documents": ["hello"]}, {**RANKED, "top_n": NULL}),
    "/score": ({"text_1": "hello", "text_2": "hello"}, RANKED),
}


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Served]:
    """A server whose model ends its answers by itself."""
    async with serving(tmp_path, FakeBackend(reply=saying("ok", then=EOS_ID))) as served:
        yield served


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_a_field_that_asks_for_nothing_passes_whatever_nothing_looks_like(api: Served, path: str) -> None:
    base, fields = ENDPOINTS[path]
    refused = []
    for field, values in fields.items():
        for value in values:
            async with api.http.post(path, json={**base, field: value}) as response:
                if response.status != 200:
                    refused.append((field, value, await response.text()))
    assert refused == []


async def test_a_parameter_of_tgi_that_asks_for_nothing_passes(api: Served) -> None:
    refused = []
    for field, values in TGI_PARAMETERS.items():
        for value in values:
            body = {"inputs": "hello", "parameters": {"max_new_tokens": 8, field: value}}
            async with api.http.post("/", json=body) as response:
                if response.status != 200:
                    refused.append((field, value, await response.text()))
    assert refused == []


async def test_a_field_of_text_generation_webui_that_asks_for_nothing_passes(api: Served) -> None:
    async with api.http.post("/api/v1/generate", json={"prompt": "hello", "max_new_tokens": 8}) as response:
        assert response.status == 200, await response.text()
    refused = []
    for field, values in TEXTGEN.items():
        for value in values:
            body = {"prompt": "hello", "max_new_tokens": 8, field: value}
            async with api.http.post("/api/v1/generate", json=body) as response:
                if response.status != 200:
                    refused.append((field, value, await response.text()))
    assert refused == []


MESSAGE_FIELDS = (
    "annotations",
    "audio",
    "function_call",
    "name",
    "reasoning",
    "reasoning_content",
    "refusal",
    "tool_call_id",
    "tool_calls",
)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/v1/chat/completions", {"role": "assistant", "content": None}),
        ("/v1/chat/completions", {"role": "assistant", "content": None, "tool_calls": []}),
        ("/v1/chat/completions", {"role": "user", "content": "hi", "tool_calls": []}),
        ("/api/chat", {"role": "user", "content": "hi", "tool_calls": [], "thinking": ""}),
        ("/api/chat", {"role": "assistant", "content": None, "tool_calls": []}),
        ("/v1/messages", {"role": "user", "content": "hi", "id": None}),
        ("/v1/messages", {"role": "user", "content": [{"type": "text", "text": "hi", "invented": None}]}),
        ("/v1/messages", {"role": "assistant", "content": [{"type": "text", "text": "hi", "citations": None}]}),
    ],
)
async def test_a_field_of_a_message_that_asks_for_nothing_passes(
    api: Served, path: str, message: dict[str, Any]
) -> None:
    base, _ = ENDPOINTS[path]
    async with api.http.post(path, json={**base, "messages": [*HELLO, message, *HELLO]}) as response:
        assert response.status == 200, await response.text()


@pytest.mark.parametrize("nothing", [None, ""], ids=str)
async def test_an_answer_is_sent_back_with_all_the_fields_that_clients_give_it(api: Served, nothing: object) -> None:
    answer = {"role": "assistant", "content": "hi", **dict.fromkeys(MESSAGE_FIELDS, nothing)}
    told = await api.post("/v1/chat/completions", messages=[*HELLO, answer, *HELLO])
    assert told["choices"][0]["message"]["content"] == "ok"


async def test_a_field_that_nobody_has_heard_of_may_be_null_and_nothing_else(api: Served) -> None:
    await api.post("/v1/completions", prompt="hello", invented=None)
    assert (await api.refusal("/v1/completions", prompt="hello", invented=""))["param"] == "invented"


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/chat/completions", "temperature", ""),
        ("/v1/chat/completions", "n", 1.5),
        ("/v1/chat/completions", "max_tokens", "64"),
        ("/v1/chat/completions", "function_call", {"name": "now"}),
        ("/v1/chat/completions", "functions", [{"name": "now"}]),
        ("/v1/chat/completions", "modalities", ["audio"]),
        ("/v1/chat/completions", "web_search_options", {}),
        ("/v1/chat/completions", "guided_whitespace_pattern", ""),
        ("/v1/chat/completions", "chat_template", "none"),
        ("/v1/chat/completions", "stream_options", {"include_usage": True}),
        ("/v1/chat/completions", "top_logprobs", 1),
        ("/v1/completions", "suffix", "none"),
        ("/v1/completions", "stop", [""]),
        ("/v1/responses", "background", True),
        ("/v1/responses", "conversation", "conv_1"),
        ("/v1/messages", "mcp_servers", [{"type": "url"}]),
        ("/api/generate", "images", ["aGk="]),
    ],
)
async def test_what_asks_for_something_is_refused_by_its_name(
    api: Served, path: str, field: str, value: object
) -> None:
    base, _ = ENDPOINTS[path]
    async with api.http.post(path, json={**base, field: value}) as response:
        assert response.status == 400
        assert field in await response.text()


async def test_an_empty_value_that_means_something_is_not_the_same_as_none(api: Served) -> None:
    await api.post("/v1/completions", prompt="hello", dry_multiplier=1, dry_sequence_breakers=[])
    await api.post("/v1/completions", prompt="hello", dry_multiplier=1)
    assert [bool(request.params.dry_breaker_ids) for request in api.backend.submitted] == [False, True]
    await api.post("/generate", inputs="hello", parameters={})
    await api.post("/generate", inputs="hello")
    greedy, sampled = api.backend.submitted[2:]
    assert (greedy.params.temperature, sampled.params.temperature) == (0.0, 1.0)
