"""openai-agents with its defaults against the server: it speaks the Responses API, and calls tools until it is done."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import openai
import pytest
from agents import Agent, ModelSettings, OpenAIResponsesModel, RunConfig, Runner, function_tool
from openai.types.responses import ResponseTextDeltaEvent

from tests.api.harness import Served
from tests.api.test_api_thinking import THINKS, prompt_of
from tests.api.test_api_tools import PARIS, serving_tools
from tests.fakes.backend import saying
from tests.fakes.model import EOS_ID
from tests.fakes.tool_templates import HERMES

pytestmark = pytest.mark.usefixtures("only_loopback")

QUIET = RunConfig(tracing_disabled=True)


@function_tool
def get_weather(city: str) -> str:
    """Tell the weather in a city."""
    return f"rain in {city}"


def agent_at(api: Served, *, tools: bool = True) -> Agent[None]:
    """An agent whose model is the server's."""
    client = openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0)
    return Agent(
        name="meteorologist",
        instructions="Be brief.",
        model=OpenAIResponsesModel(model="fake", openai_client=client),
        model_settings=ModelSettings(),
        tools=[get_weather] if tools else [],
    )


def calls_then_answers(prompt_ids: Sequence[int], index: int) -> int:
    """The call first; the answer once the prompt has its result."""
    text = b"It rains." if b"rain in Paris" in bytes(prompt_ids) else PARIS.encode()
    return text[index] if index < len(text) else EOS_ID


async def test_an_agent_calls_its_tool_and_answers_with_what_came_of_it(tmp_path: Path) -> None:
    async with serving_tools(tmp_path, HERMES, calls_then_answers) as api:
        result = await Runner.run(agent_at(api), "How is the weather in Paris?", run_config=QUIET)
        assert prompt_of(api).count("rain in Paris") == 1
    assert result.final_output == "It rains."


async def test_an_agent_streams(tmp_path: Path) -> None:
    async with serving_tools(tmp_path, HERMES, calls_then_answers) as api:
        result = Runner.run_streamed(agent_at(api), "How is the weather in Paris?", run_config=QUIET)
        text = [
            event.data.delta
            async for event in result.stream_events()
            if event.type == "raw_response_event" and isinstance(event.data, ResponseTextDeltaEvent)
        ]
    assert ("".join(text), result.final_output) == ("It rains.", "It rains.")


async def test_what_an_agent_s_model_thought_goes_along(tmp_path: Path) -> None:
    async with serving_tools(tmp_path, THINKS, saying("<think>Hm.</think>Hello.", then=EOS_ID)) as api:
        agent = agent_at(api, tools=False)
        first = await Runner.run(agent, "hello", run_config=QUIET)
        assert first.final_output == "Hello."
        items = [*first.to_input_list(), {"role": "user", "content": "again"}]
        await Runner.run(agent, items, run_config=QUIET)  # type: ignore[arg-type]
        assert "<think>Hm.</think>Hello." in prompt_of(api)
