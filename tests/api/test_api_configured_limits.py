"""What one request may ask for: each limit is a setting, and what is beyond it a 400 that names the field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from console.api.server import ApiSettings
from console.runtime.loading import engine_config
from console.runtime.runtime import api_settings
from console.settings.schema import Settings
from engine.config import EngineConfig
from tests.api.harness import Served, serving
from tests.fakes.model import fake_spec

LIMITS = ApiSettings(
    port=0, max_json_depth=6, max_choices=4, max_output_tokens=8, max_stops=2, max_stop_length=5, max_header_bytes=1000
)
CHAT = [{"role": "user", "content": "x"}]


@pytest.fixture
async def capped(tmp_path: Path) -> Any:
    """A server with small limits, whose model takes prompts of 20 tokens."""
    async with serving(tmp_path, settings=LIMITS, spec=fake_spec(tmp_path, max_input_len=20)) as api:
        yield api


@pytest.mark.parametrize(
    ("path", "field", "limit", "body"),
    [
        ("/v1/completions", "n", 4, {"prompt": "x", "n": 5}),
        ("/v1/completions", "prompt", 4, {"prompt": ["x"] * 5}),
        ("/v1/chat/completions", "n", 4, {"messages": CHAT, "n": 5}),
        ("/generate", "n", 4, {"prompt": "x", "n": 5}),
        ("/v1/completions", "max_tokens", 8, {"prompt": "x", "max_tokens": 9}),
        ("/v1/chat/completions", "max_tokens", 8, {"messages": CHAT, "max_tokens": 9}),
        ("/generate", "max_tokens", 8, {"prompt": "x", "max_tokens": 9}),
        ("/v1/completions", "stop", 2, {"prompt": "x", "stop": ["a", "b", "c"]}),
        ("/v1/completions", "stop", 5, {"prompt": "x", "stop": "abcdef"}),
        ("/v1/chat/completions", "stop", 5, {"messages": CHAT, "stop": "abcdef"}),
        ("/v1/completions", "prompt", 20, {"prompt": "x" * 21, "max_tokens": 1}),
    ],
)
async def test_what_is_more_than_a_setting_allows_names_field_and_limit(
    capped: Served, path: str, field: str, limit: int, body: dict[str, Any]
) -> None:
    error = await capped.refusal(path, **{"max_tokens": 4, **body})
    assert (error["param"], str(limit) in error["message"]) == (field, True), error
    assert capped.engine.publish().totals.requests == 0


async def test_what_just_fits_is_answered(capped: Served) -> None:
    answer = await capped.post("/v1/completions", prompt="x" * 20, n=4, max_tokens=8, stop=["~~~~~", "~~~~^"])
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 4


async def test_an_answer_without_a_limit_of_its_own_has_that_of_the_settings(capped: Served) -> None:
    answer = await capped.post("/v1/chat/completions", messages=CHAT, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
async def test_a_default_length_is_no_more_than_the_server_allows(capped: Served, path: str) -> None:
    await capped.post(path, prompt="x", ignore_eos=True)
    assert capped.backend.submitted[0].params.max_tokens == 8


async def test_a_body_that_nests_too_deep_is_refused_before_it_is_read(capped: Served) -> None:
    deep: Any = "x"
    for _ in range(6):
        deep = [deep]
    error = await capped.refusal("/v1/completions", prompt=deep)
    assert error["message"] == "The body nests deeper than 6 levels"


async def test_a_header_that_is_too_long_is_a_431(capped: Served) -> None:
    async with capped.http.get("/health", headers={"X-Long": "x" * 1100}) as response:
        assert response.status == 431
        assert (await response.json())["error"]["code"] == "headers_too_large"


def test_every_limit_is_a_setting_with_a_default_that_the_server_is_told() -> None:
    by_default = api_settings(Settings(), None)
    for name in ("address_rate", "max_header_bytes", "max_body_bytes", "max_json_depth", "max_choices", "max_stops"):
        assert getattr(by_default, name) == getattr(ApiSettings(), name), name
    assert by_default.total_timeout_s == 600 + 75 + 30 + 60
    assert api_settings(Settings(timeout=0), None).total_timeout_s is None
    assert engine_config(Settings(max_queue=3), None).max_queue == 3
    assert engine_config(Settings(), None).max_queue == EngineConfig().max_queue
    changed = api_settings(Settings(max_body_kib=1, max_output_len=5, idle_timeout=3, body_timeout=4), None)
    assert (changed.max_body_bytes, changed.max_output_tokens) == (1024, 5)
    assert (changed.idle_timeout_s, changed.body_timeout_s) == (3, 4)
