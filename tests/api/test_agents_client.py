"""openai-agents with its defaults against the server: it speaks the Responses API, and calls tools until it is done."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import openai
import pytest
from agents import Agent, ModelSettings, OpenAIProvider, OpenAIResponsesModel, RunConfig, Runner, function_tool
from agents.models import default_models
from openai.types.responses import ResponseTextDeltaEvent
from pydantic import BaseModel

from tests.api.harness import Served, serving
from tests.api.test_api_thinking import THINKS, prompt_of
from tests.api.test_api_tools import PARIS, serving_tools
from tests.fakes.backend import FakeBackend, Reply, saying
from tests.fakes.model import EOS_ID, fake_spec
from tests.fakes.tool_templates import CODER, HERMES, LLAMA, published_template, write_tool_model

pytestmark = pytest.mark.usefixtures("only_loopback")

QUIET = RunConfig(tracing_disabled=True)
LLAMA_CALL = '{"name": "get_weather", "parameters": {"city": "Paris"}}'
CODER_CALL = "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"


class Report(BaseModel):
    """What an agent finds out."""

    city: Literal["Paris", "Oslo"]
    rain: bool


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


def calling_then_saying(call: str, answer: str) -> Reply:
    """The call first; the answer once the prompt has its result."""

    def reply(prompt_ids: Sequence[int], index: int) -> int:
        text = (answer if b"rain in Paris" in bytes(prompt_ids) else call).encode()
        return text[index] if index < len(text) else EOS_ID

    return reply


calls_then_answers = calling_then_saying(PARIS, "It rains.")


async def test_an_agent_calls_its_tool_and_answers_with_what_came_of_it(tmp_path: Path) -> None:
    async with serving_tools(tmp_path, HERMES, calls_then_answers) as api:
        result = await Runner.run(agent_at(api), "How is the weather in Paris?", run_config=QUIET)
        assert prompt_of(api).count("rain in Paris") == 1
    assert result.final_output == "It rains."


@pytest.mark.parametrize(
    ("template", "call"),
    [(LLAMA, LLAMA_CALL), (published_template("llama3_1").source, LLAMA_CALL), (CODER, CODER_CALL)],
    ids=["Llama", "Llama 3.1 as published", "Qwen3-Coder"],
)
async def test_an_agent_s_strict_tools_are_called_in_other_formats_with_and_without_an_output_type(
    tmp_path: Path, template: str, call: str
) -> None:
    report = '{"city": "Paris", "rain": true}'
    async with serving_tools(tmp_path, template, calling_then_saying(call, report)) as api:
        for output_type, expected in ((None, report), (Report, Report(city="Paris", rain=True))):
            agent = agent_at(api).clone(output_type=output_type)
            result = await Runner.run(agent, "How is the weather in Paris?", run_config=QUIET)
            assert result.final_output == expected
            assert prompt_of(api).count("rain in Paris") == 1


async def test_an_agent_with_an_output_type_and_tools_is_held_to_a_call_or_that_type(tmp_path: Path) -> None:
    async with serving_tools(tmp_path, HERMES, calling_then_saying(PARIS, "It rains a lot.")) as api:
        agent = agent_at(api).clone(output_type=Report)
        result = await Runner.run(agent, "How is the weather in Paris?", run_config=QUIET, max_turns=2)
    assert isinstance(result.final_output, Report)


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


@pytest.mark.parametrize("name", ["gpt-5.6-luna", "gpt-5", "gpt-5-mini", "gpt-4.1"])
async def test_an_agent_without_a_model_runs_on_one_of_its_default_s_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The default settings go by that name: an effort, a verbosity, both or neither."""
    monkeypatch.setenv(default_models.OPENAI_DEFAULT_MODEL_ENV_VARIABLE_NAME, name)
    write_tool_model(tmp_path, HERMES)
    spec = fake_spec(tmp_path, aliases=(name,))
    async with serving(tmp_path, FakeBackend(reply=calls_then_answers), spec=spec) as api:
        client = openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0)
        provider = OpenAIProvider(openai_client=client)
        agent = Agent[None](name="meteorologist", tools=[get_weather])
        result = await Runner.run(
            agent, "How is the weather in Paris?", run_config=RunConfig(model_provider=provider, tracing_disabled=True)
        )
    assert result.final_output == "It rains."


@pytest.mark.parametrize("follows", [False, True], ids=["sends items", "follows a response"])
@pytest.mark.parametrize("streams", [False, True])
async def test_an_agent_goes_on_after_a_call_that_ended_early(tmp_path: Path, streams: bool, follows: bool) -> None:
    """Its output says that the arguments are broken, and the model calls again. A strict tool's call ends late."""
    again = b"error"
    lenient = function_tool(lambda city: f"rain in {city}", name_override="get_weather", strict_mode=False)

    def breaks_off_once(prompt_ids: Sequence[int], index: int) -> int:
        if again in bytes(prompt_ids):
            return calls_then_answers(prompt_ids, index)
        text = PARIS[: PARIS.index("ris")].encode()
        return text[index] if index < len(text) else EOS_ID

    async with serving_tools(tmp_path, HERMES, breaks_off_once) as api:
        agent, question = agent_at(api).clone(tools=[lenient]), "How is the weather in Paris?"
        if streams:
            run = Runner.run_streamed(agent, question, run_config=QUIET, auto_previous_response_id=follows)
            async for _ in run.stream_events():
                pass
            output = run.final_output
        else:
            ended = await Runner.run(agent, question, run_config=QUIET, auto_previous_response_id=follows)
            output = ended.final_output
        assert again in prompt_of(api).encode()
    assert output == "It rains."
