"""Sampling fields as clients of TabbyAPI, text-generation-webui and vLLM send them, and what the engine is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.backends.base import BackendRequest, LoadedModel, TokenMask
from engine.config import SamplingParams
from tests.api.harness import Served, serving, text_of
from tests.fakes.backend import FakeBackend, saying
from tests.fakes.model import EOS_ID

PATHS = pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])


def question(path: str) -> dict[str, Any]:
    """The least that the endpoint takes."""
    return {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}


async def told(api: Served, path: str = "/v1/completions", **body: Any) -> SamplingParams:
    """What the backend was asked for."""
    await api.post(path, max_tokens=1, **(question(path) | body))
    return api.backend.submitted[-1].params


EVERYTHING = {
    "top_a": 0.2,
    "tfs": 0.9,
    "min_temp": 0.5,
    "max_temp": 1.5,
    "temp_exponent": 0.8,
    "smoothing_factor": 0.3,
    "temperature_last": True,
    "xtc_probability": 0.4,
    "xtc_threshold": 0.2,
    "mirostat_tau": 4.0,
    "mirostat_eta": 0.2,
    "repetition_range": 64,
    "repetition_decay": 16,
    "dry_multiplier": 0.8,
    "dry_base": 2.0,
    "dry_allowed_length": 3,
    "dry_range": 100,
}


@PATHS
async def test_every_dialect_hands_every_sampler_to_the_engine(api: Served, path: str) -> None:
    params = await told(
        api, path, **EVERYTHING, mirostat_mode=2, cfg_scale=1.5, negative_prompt="bad", banned_strings=["no", "No"]
    )
    assert {name: getattr(params, name) for name in EVERYTHING} == EVERYTHING
    assert (params.mirostat, params.cfg_scale, params.banned_strings) == (2, 1.5, ("no", "No"))
    assert params.negative_prompt_ids


@PATHS
async def test_what_nobody_asks_for_is_neutral(api: Served, path: str) -> None:
    params = await told(api, path)
    named = [*EVERYTHING, "mirostat", "cfg_scale", "negative_prompt_ids", "banned_strings", "dry_breaker_ids"]
    assert [getattr(params, name) for name in named] == [getattr(SamplingParams(), name) for name in named]


async def test_other_names_mean_the_same(api: Served) -> None:
    params = await told(
        api,
        typical=0.9,
        dynatemp_low=0.5,
        dynatemp_high=2.0,
        dynatemp_exponent=2.0,
        mirostat=2,
        penalty_range=7,
        dry_penalty_last_n=9,
        guidance_scale=2.0,
        negative_prompt="no",
        bad_words=["worse"],
        banned_strings=["bad"],
    )
    assert (params.typical_p, params.min_temp, params.max_temp, params.temp_exponent) == (0.9, 0.5, 2.0, 2.0)
    assert (params.mirostat, params.repetition_range, params.dry_range, params.cfg_scale) == (2, 7, 9, 2.0)
    assert params.banned_strings == ("bad", "worse")


@pytest.mark.parametrize(
    "body",
    [
        {"min_temp": 1.0, "max_temp": 1.0},
        {"dynatemp_low": 0.5, "dynatemp_high": 2.0, "dynamic_temperature": False},
        {"repetition_range": -1, "dry_range": -1},
        {"negative_prompt": "unused", "cfg_scale": 1.0},
        {"dry_sequence_breakers": ["\n"]},
        {"smoothing_curve": 1.0, "skew": 0, "do_sample": True, "num_beams": 1, "no_repeat_ngram_size": 0},
    ],
    ids=str,
)
async def test_what_those_clients_send_for_off_is_off(api: Served, body: dict[str, Any]) -> None:
    plain = await told(api, seed=1)
    assert await told(api, seed=1, **body) == plain


@pytest.mark.parametrize(
    ("breakers", "text"),
    [
        (None, '\n:"*'),
        (["\n", "so"], "\no"),
        ('["\\n", "!"]', "\n!"),
        ('"\\n", ":"', "\n:"),
        ([], ""),
    ],
)
async def test_breakers_are_the_last_token_of_each_string(api: Served, breakers: object, text: str) -> None:
    params = await told(api, dry_multiplier=1.0, dry_sequence_breakers=breakers)
    assert params.dry_breaker_ids == tuple(text.encode())


async def test_a_completion_is_guided_away_from_the_negative_prompt(api: Served) -> None:
    assert (await told(api, cfg_scale=2.0, negative_prompt="bad")).negative_prompt_ids == tuple(b"bad")


async def test_a_chat_is_guided_away_from_itself_under_another_system_message(api: Served) -> None:
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    for negative, prompt in (
        ("Be rude.", "system: Be rude.\nuser: Hi\nassistant: "),
        ("", "user: Hi\nassistant: "),
    ):
        params = await told(api, "/v1/chat/completions", messages=messages, cfg_scale=2.0, negative_prompt=negative)
        assert bytes(params.negative_prompt_ids).decode() == prompt
        assert bytes(api.backend.submitted[-1].prompt_ids).decode().startswith("system: Be kind.")


async def test_generate_takes_a_top_a_but_the_default_that_ericllm_s_clients_send_is_off(api: Served) -> None:
    assert (await told(api, "/generate", top_a=0.3)).top_a == 0.3
    assert (await told(api, "/generate", top_a=1.0)).top_a == 0.0
    assert (await told(api, top_a=1.0)).top_a == 1.0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"mirostat_mode": 1}, "mirostat"),
        ({"dynatemp_low": "hot"}, "dynatemp_low"),
        ({"min_temp": 2.0, "max_temp": 1.0}, "max_temp"),
        ({"dynamic_temperature": True}, "dynamic_temperature"),
        ({"guidance_scale": 2.0, "cfg_scale": 3.0}, "cfg_scale"),
        ({"cfg_scale": 2.0}, "negative_prompt"),
        ({"banned_strings": "bad"}, "banned_strings"),
        ({"banned_strings": [""]}, "banned_strings"),
        ({"bad_words": ["x" * 201]}, "banned_strings"),
        ({"dry_multiplier": 1, "dry_sequence_breakers": ["x", ""]}, "dry_sequence_breakers"),
        ({"dry_multiplier": 1, "dry_sequence_breakers": '["x"'}, "dry_sequence_breakers"),
        ({"dry_multiplier": 1, "dry_sequence_breakers": ["x"] * 257}, "dry_sequence_breakers"),
        ({"smoothing_curve": 2.0}, "smoothing_curve"),
        ({"repetition_range": -2}, "repetition_range"),
    ],
    ids=str,
)
async def test_what_cannot_be_honoured_is_refused_by_name(api: Served, body: dict[str, Any], param: str) -> None:
    error = await api.refusal("/v1/completions", prompt="x", **body)
    assert error["param"] == param
    assert param in error["message"]


async def test_a_chat_of_a_system_message_alone_needs_a_negative_prompt(api: Served) -> None:
    messages = [{"role": "system", "content": "Be kind."}]
    error = await api.refusal("/v1/chat/completions", messages=messages, cfg_scale=2.0)
    assert error["param"] == "negative_prompt"


@PATHS
async def test_a_parameter_that_the_backend_lacks_is_refused(tmp_path: Path, path: str) -> None:
    class AsTorch(FakeBackend):
        def load(self, *args: Any, **settings: Any) -> LoadedModel:
            return msgspec.structs.replace(super().load(*args, **settings), backend="torch")

    async with serving(tmp_path, AsTorch()) as api:
        error = await api.refusal(path, mirostat_mode=2, **question(path))
        assert error["param"] == "mirostat"
        assert "torch backend" in error["message"]


async def test_banned_strings_never_show_streamed_or_whole_and_usage_counts_what_was_kept(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeBackend(reply=saying("a bad day", then=EOS_ID))) as api:
        body = {"prompt": "x", "max_tokens": 40, "banned_strings": ["BAD"], "logprobs": 1}
        whole = await api.post("/v1/completions", **body)
        assert whole["choices"][0]["text"] == "a cad day"
        assert len(whole["choices"][0]["logprobs"]["tokens"]) == whole["usage"]["completion_tokens"] == 10
        events = await api.events("/v1/completions", **body)
        assert text_of(events) == "a cad day"


async def test_banned_strings_with_no_way_on_are_an_error_that_names_them(tmp_path: Path) -> None:
    class Stubborn(FakeBackend):
        def submit(self, request: BackendRequest, mask: TokenMask | None = None) -> None:
            super().submit(msgspec.structs.replace(request, banned_next=()))

    async with serving(tmp_path, Stubborn(reply=saying("bad"))) as api:
        error = await api.refusal("/v1/completions", prompt="x", banned_strings=["bad"])
        assert error["param"] == "banned_strings"
