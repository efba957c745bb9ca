"""Thinking over the links of the console's chat: apart from the answer, sent back, switched, continued."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from console.link.chat import ChatDelta, ChatMessage
from console.link.local_chat import LocalConversation
from console.link.remote.chat import chat_body, deltas
from console.link.remote.http import Instance, address_of
from console.runtime.loops import CurrentLoop
from engine.config import SamplingParams
from engine.errors import InvalidRequest
from tests.api.harness import Served
from tests.api.test_api_thinking import ENDED, THINKS, THOUGHT, WITH_EFFORT, prompt_of, thinking_of
from tests.api.test_api_tools import serving_tools
from tests.fakes.backend import saying
from tests.fakes.model import EOS_ID
from tests.fakes.tool_templates import HERMES

PARAMS = SamplingParams(max_tokens=64)
HI = ChatMessage(role="user", content="hi")
Link = Callable[..., AsyncIterator[ChatDelta]]


@asynccontextmanager
async def local(api: Served) -> AsyncIterator[Link]:
    yield LocalConversation(api.engine, CurrentLoop()).chat


@asynccontextmanager
async def remote(api: Served) -> AsyncIterator[Link]:
    async with Instance(address_of(api.url)) as instance:
        yield lambda messages, params, **asked: deltas(instance, chat_body(messages, params, "", **asked))


LINKS = pytest.mark.parametrize("link", [local, remote], ids=lambda link: link.__name__)


async def said(api: Served, link: Any, *messages: ChatMessage, **asked: Any) -> tuple[str, str]:
    """Return the thinking and the text of an answer."""
    thinking, text = "", ""
    async with link(api) as chat, aclosing(chat([HI, *messages], PARAMS, **asked)) as answer:
        async for delta in answer:
            assert not (text and delta.thinking)
            thinking, text = thinking + delta.thinking, text + delta.text
    return thinking, text


@LINKS
async def test_thinking_comes_before_the_answer_and_apart_from_it(tmp_path: Path, link: Any) -> None:
    async with serving_tools(tmp_path, THINKS, ENDED) as api:
        assert await said(api, link) == (THOUGHT, "Yes.")


@LINKS
async def test_thinking_goes_back_to_the_template(tmp_path: Path, link: Any) -> None:
    async with serving_tools(tmp_path, THINKS, ENDED) as api:
        await said(api, link, ChatMessage(role="assistant", content="No.", thinking="Hm."), HI)
        assert "assistant: <think>Hm.</think>No.\n" in prompt_of(api)


@LINKS
async def test_thinking_is_switched_off(tmp_path: Path, link: Any) -> None:
    async with serving_tools(tmp_path, THINKS, saying("Yes.", then=EOS_ID)) as api:
        assert await said(api, link, enable_thinking=False) == ("", "Yes.")
        assert prompt_of(api).endswith("<think>\n\n</think>\n\n")


@LINKS
@pytest.mark.parametrize("template", [THINKS, WITH_EFFORT], ids=["opened by the model", "opened by the template"])
async def test_thinking_that_was_stopped_goes_on_inside(tmp_path: Path, link: Any, template: str) -> None:
    stopped = ChatMessage(role="assistant", content="", thinking="Is it")
    async with serving_tools(tmp_path, template, saying(" noon?</think>Yes.", then=EOS_ID)) as api:
        assert await said(api, link, stopped, continue_answer=True) == (" noon?", "Yes.")
        assert prompt_of(api).endswith("assistant: <think>Is it")


@LINKS
async def test_an_answer_after_thinking_goes_on_as_text(tmp_path: Path, link: Any) -> None:
    begun = ChatMessage(role="assistant", content="Yes,", thinking="Hm.")
    async with serving_tools(tmp_path, THINKS, saying(" it is.", then=EOS_ID)) as api:
        assert await said(api, link, begun, continue_answer=True) == ("", " it is.")
        assert prompt_of(api).endswith("assistant: <think>Hm.</think>Yes,")
        assert thinking_of(api) is None


@LINKS
async def test_thinking_cannot_be_continued_by_a_model_that_does_not_think(tmp_path: Path, link: Any) -> None:
    stopped = ChatMessage(role="assistant", content="", thinking="Is it")
    async with serving_tools(tmp_path, HERMES, ENDED) as api:
        with pytest.raises(InvalidRequest, match="cannot be continued"):
            await said(api, link, stopped, continue_answer=True)
