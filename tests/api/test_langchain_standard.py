"""langchain-tests, the standard that LangChain's chat models are held to, with ChatOpenAI at this server."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.config import AdapterSpec
from tests.api.harness import Served
from tests.api.published_suites import Outcome, outcomes
from tests.api.test_api_tools import serving_tools
from tests.fakes.model import EOS_ID
from tests.fakes.published_sources import LANGCHAIN_TESTS, source_folder
from tests.fakes.tool_templates import HERMES

pytestmark = pytest.mark.long

SUITE = Path(__file__).parents[1] / "fakes/langchain_chat.py"
TEMPLATE = HERMES + "{# <think></think> #}"
ARGUMENTS: Mapping[str, Mapping[str, Any]] = {
    "magic_function": {"input": 3},
    "magic_function_no_args": {},
    "greeting_generator": {"answer_style": "Pirate"},
    "my_adder_tool": {"a": 3, "b": 4},
    "get_weather": {"location": "San Francisco, CA"},
}
JOKE = {"setup": "Why do cats purr?", "punchline": "Nobody asked."}
SKIPPED = {
    "test_image_inputs": "models here read text alone",
    "test_image_tool_message": "models here read text alone",
    "test_pdf_inputs": "models here read text alone",
    "test_pdf_tool_message": "models here read text alone",
    "test_audio_inputs": "models here read text alone",
    "test_anthropic_inputs": "their blocks belong to /v1/messages, which ChatOpenAI does not ask",
}
NOT_RUN = "test_stream_time"
"""It times a recording, with plugins that are not installed."""


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_chat_openai_passes_all_that_applies(tmp_path: Path) -> None:
    async with serving_tools(tmp_path / "model", TEMPLATE, replying) as api:
        await api.engine.attach(AdapterSpec(name="poet", path=tmp_path / "poet"), "fake")
        ended = await checked(api, tmp_path)
    assert [each for each in ended if each.status == "failed"] == []
    assert {each.name for each in ended if each.status == "skipped"} == SKIPPED.keys()
    assert sum(each.status == "passed" for each in ended) >= 100


async def checked(api: Served, folder: Path) -> list[Outcome]:
    """How all of its tests ended."""
    suite = Path(shutil.copy(SUITE, folder / "test_chat.py"))
    return await outcomes(
        folder,
        ["-W", "default", "-k", f"not {NOT_RUN}", str(suite)],
        rootdir=folder,
        path=[source_folder(LANGCHAIN_TESTS)],
        variables={"TEST_API_BASE_URL": f"{api.url}/v1", "LANGSMITH_TRACING": "false", "LANGCHAIN_TRACING_V2": "false"},
    )


def replying(prompt_ids: Sequence[int], index: int) -> int:
    """A scripted model: a call where there are tools and no result yet, a joke where one is asked for, else a greeting.
    It thinks first where it is told to."""
    text = said(bytes(prompt_ids).decode()).encode()
    return text[index] if index < len(text) else EOS_ID


def said(prompt: str) -> str:
    """The answer to a prompt."""
    first, _, conversation = prompt.partition("\n")
    if not first.startswith("tools: "):
        conversation = prompt
    elif not conversation.splitlines()[-2].startswith("result "):
        return called(json.loads(first.removeprefix("tools: "))[0]["function"]["name"], conversation)
    if "joke" in conversation:
        return json.dumps(JOKE)
    return "<think>Hm.</think>Hello." if "Think about it." in conversation else "Hello."


def called(name: str, conversation: str) -> str:
    """A call of this tool."""
    arguments = ARGUMENTS.get(name, JOKE)
    if name == "unicode_customer":
        [customer] = re.findall("named '(.*)'", conversation)
        arguments = {"customer_name": customer, "description": "a company"}
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"
