"""SillyTavern's requests, as its public source makes them: with its default settings and with others, for each kind of
server that it knows."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.api.harness import Served, text_of
from tests.fakes.backend import expected_text, letters
from tests.fakes.sampler_orders import KOBOLD_ORDER, OOBA_ORDER
from tests.fakes.sillytavern import COUNT, LLAMA_NAMES, PROMPT, SEQUENCE_BREAKERS, SHARED

COMPLETION = expected_text(list(PROMPT.encode()), COUNT, letters)

OOBA = {
    **SHARED,
    **LLAMA_NAMES,
    "api_type": "ooba",
    "legacy_api": False,
    "min_length": 0,
    "num_beams": 1,
    "length_penalty": 1,
    "early_stopping": False,
    "sampler_priority": OOBA_ORDER,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "encoder_repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "penalty_alpha": 0,
    "temperature_last": True,
    "do_sample": True,
}
KOBOLDCPP = {
    **SHARED,
    **LLAMA_NAMES,
    "api_type": "koboldcpp",
    "sampler_order": KOBOLD_ORDER,
    "grammar": "",
    "trim_stop": True,
    "dry_sequence_breakers": SEQUENCE_BREAKERS,
}
TABBY = {
    **SHARED,
    **LLAMA_NAMES,
    "api_type": "tabby",
    "n": 1,
    "repetition_decay": 0,
    "temperature_last": True,
    "speculative_ngram": False,
    "json_schema": {},
}
APHRODITE = {
    **SHARED,
    "api_type": "aphrodite",
    "model": "fake",
    "n": 1,
    "temperature_last": True,
    "eta_cutoff": 0,
    "epsilon_cutoff": 0,
    "ignore_eos": False,
    "spaces_between_special_tokens": True,
    "guided_grammar": "",
    "guided_json": {},
    "early_stopping": False,
    "include_stop_str_in_output": False,
    "custom_token_bans": [],
    "no_repeat_ngram_size": 0,
}
HUGGINGFACE = {**SHARED, **LLAMA_NAMES, "api_type": "huggingface", "model": "tgi", "seed": 12345, "stop": ["\nUser:"]}
VLLM = {
    "model": "fake",
    "prompt": PROMPT,
    "best_of": 1,
    "frequency_penalty": 0,
    "max_tokens": COUNT,
    "n": 1,
    "presence_penalty": 0,
    "stop": ["\nUser:"],
    "temperature": 0.7,
    "top_p": 0.5,
    "top_k": 40,
    "min_p": 0,
    "repetition_penalty": 1.2,
    "ignore_eos": False,
    "min_tokens": 0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
}
GENERIC = {
    "model": "fake",
    "prompt": PROMPT,
    "max_tokens": COUNT,
    "temperature": 0.7,
    "top_p": 0.5,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "stop": ["\nUser:"],
}
COMPLETIONS = {
    "ooba": OOBA,
    "koboldcpp": KOBOLDCPP,
    "tabby": TABBY,
    "aphrodite": APHRODITE,
    "huggingface": HUGGINGFACE,
    "vllm": VLLM,
    "generic": GENERIC,
}

KOBOLD = {
    "prompt": PROMPT,
    "use_story": False,
    "use_memory": False,
    "use_authors_note": False,
    "use_world_info": False,
    "max_context_length": 2048,
    "max_length": COUNT,
    "rep_pen": 1,
    "rep_pen_range": 0,
    "rep_pen_slope": 0.9,
    "temperature": 1,
    "tfs": 1,
    "top_a": 1,
    "top_k": 0,
    "top_p": 1,
    "min_p": 0,
    "typical": 1,
    "sampler_order": [0, 1, 2, 3, 4, 5, 6],
    "singleline": False,
    "use_default_badwordsids": False,
    "mirostat": 0,
    "mirostat_eta": 0.1,
    "mirostat_tau": 5.0,
    "grammar": "",
    "stop_sequence": ["\nUser:"],
}
"""With SillyTavern's own defaults."""


@pytest.mark.parametrize("kind", COMPLETIONS)
async def test_a_completion_for_each_kind_of_server(api: Served, kind: str) -> None:
    answer = await api.post("/v1/completions", **COMPLETIONS[kind])
    assert answer["choices"][0]["text"] == COMPLETION
    params = api.backend.submitted[0].params
    assert (params.max_tokens, params.temperature, params.stop) == (COUNT, 0.7, ("\nUser:",))
    assert params.seed == 12345 if kind == "huggingface" else params.seed != -1


@pytest.mark.parametrize("kind", COMPLETIONS)
async def test_a_stream_for_each_kind_of_server(api: Served, kind: str) -> None:
    assert text_of(await api.events("/v1/completions", **COMPLETIONS[kind])) == COMPLETION


async def test_the_temperature_is_where_sillytavern_puts_it(api: Served) -> None:
    await api.post("/v1/completions", **OOBA)
    await api.post("/v1/completions", **{**OOBA, "temperature_last": False})
    await api.post("/v1/completions", **KOBOLDCPP)
    assert [request.params.temperature_last for request in api.backend.submitted] == [True, False, True]


async def test_a_dynamic_temperature_and_token_probabilities(api: Served) -> None:
    dynamic = {
        "temperature": 1.0,
        "dynamic_temperature": True,
        "dynatemp_low": 0.5,
        "dynatemp_high": 1.5,
        "dynatemp_range": 0.5,
        "dynatemp_exponent": 1.0,
    }
    answer = await api.post("/v1/completions", **{**OOBA, **dynamic, "logprobs": 10, "n_probs": 10})
    assert answer["choices"][0]["logprobs"]["tokens"] == list(COMPLETION)
    params = api.backend.submitted[0].params
    assert (params.min_temp, params.max_temp, params.logprobs) == (0.5, 1.5, 10)


async def test_kobold_whole_and_in_a_stream(api: Served) -> None:
    answer = await api.post("/api/v1/generate", **KOBOLD)
    assert answer["results"][0]["text"] == COMPLETION
    async with api.http.post("/api/extra/generate/stream", json=KOBOLD) as response:
        frames = (await response.text()).removesuffix("\n\n").split("\n\n")
    told = [json.loads(frame.removeprefix("event: message\ndata: ")) for frame in frames]
    assert "".join(event["token"] for event in told) == COMPLETION


async def test_kobold_with_its_recommended_order_and_a_penalty(api: Served) -> None:
    body = {
        **KOBOLD,
        "rep_pen": 1.1,
        "rep_pen_slope": 1,
        "sampler_order": KOBOLD_ORDER,
        "temperature": 0.7,
        "top_p": 0.9,
    }
    await api.post("/api/v1/generate", **{**body, "top_a": 0})
    params = api.backend.submitted[0].params
    assert (params.repetition_penalty, params.temperature_last) == (1.1, True)


async def test_text_generation_webui_s_legacy_api(api: Served) -> None:
    legacy = {key: value for key, value in OOBA.items() if key not in ("max_tokens", "stop")}
    answer = await api.post("/api/v1/generate", **{**legacy, "legacy_api": True})
    assert answer == {"results": [{"text": COMPLETION}]}


async def test_ollama(api: Served) -> None:
    body: dict[str, Any] = {
        "model": "fake",
        "prompt": PROMPT,
        "stream": False,
        "keep_alive": -1,
        "raw": True,
        "options": {
            "num_predict": COUNT,
            "num_ctx": 4096,
            "temperature": 0.7,
            "repeat_penalty": 1.2,
            "presence_penalty": 0,
            "frequency_penalty": 0,
            "top_k": 40,
            "top_p": 0.5,
            "tfs_z": 1,
            "repeat_last_n": 0,
            "mirostat": 0,
            "mirostat_tau": 5,
            "mirostat_eta": 0.1,
            "min_p": 0,
            "seed": -1,
            "stop": ["\nUser:"],
            "typical_p": 1,
        },
    }
    assert (await api.post("/api/generate", **body))["response"] == COMPLETION


@pytest.mark.parametrize(
    ("path", "body", "count"),
    [
        ("/api/extra/tokencount", {"prompt": PROMPT}, lambda told: told["value"]),
        ("/api/v1/token-count", {"prompt": PROMPT}, lambda told: told["results"][0]["tokens"]),
    ],
)
async def test_tokens_are_counted_where_sillytavern_asks(
    api: Served, path: str, body: dict[str, str], count: Any
) -> None:
    assert count(await api.post(path, **body)) == len(PROMPT)
