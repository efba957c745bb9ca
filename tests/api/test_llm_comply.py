"""llm-comply, which checks an API against its published specification: what it passes, and why it misses the rest."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.api.harness import Served
from tests.api.test_api_tools import serving_tools
from tests.fakes.model import EOS_ID
from tests.fakes.tool_templates import HERMES

pytestmark = pytest.mark.long

TEXT_ONLY = "models here read text alone: an image is refused"
ONE_MODEL = "a request without a model is answered by the one that is loaded"
MISSES: Mapping[str, Mapping[str, str]] = {
    "open-responses": {"image-input": TEXT_ONLY, "error-handling": ONE_MODEL},
    "openai-chat": {"chat-image-input": TEXT_ONLY, "chat-error-handling": ONE_MODEL},
    "anthropic": {"anth-image-input": TEXT_ONLY},
}
"""What is not passed, by its format, and why."""


def hello_or_call(prompt_ids: Any, index: int) -> int:
    """A call where the prompt has tools, else a short answer."""
    called = b'<tool_call>\n{"name": "get_weather", "arguments": {"location": "San Francisco"}}\n</tool_call>'
    text = called if b"get_weather" in bytes(prompt_ids) else b"Hello there, friend."
    return text[index] if index < len(text) else EOS_ID


@pytest.mark.parametrize("spec", MISSES)
async def test_every_miss_is_explained(tmp_path: Path, spec: str) -> None:
    async with serving_tools(tmp_path, HERMES, hello_or_call) as api:
        results = await checked(api, spec)
    failed = {each["id"]: each["errors"] for each in results if each["status"] == "failed"}
    assert failed.keys() == MISSES[spec].keys(), failed
    assert sum(each["status"] == "passed" for each in results) >= 4


async def checked(api: Served, spec: str) -> list[dict[str, Any]]:
    """The results of all its checks of one format."""
    process = await asyncio.create_subprocess_exec(
        str(Path(sys.executable).with_name("llm-comply")),
        *("-u", f"{api.url}/v1", "-k", "none", "-m", "fake", "--format", spec, "--json"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    found: list[dict[str, Any]] = json.loads(output)["results"]
    return found
