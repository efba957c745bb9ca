"""`link.conversation` at a real runtime with the demo model: answers, answers gone on with, and drafts counted."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio

from console.link.chat import ChatMessage
from console.link.local import LocalLink
from console.link.local_chat import context_of
from console.link.protocol import EngineLink
from console.link.rpc import as_link
from console.runtime.loops import CurrentLoop
from console.runtime.runtime import Runtime
from console.settings.schema import Settings
from engine.config import SamplingParams
from engine.errors import InvalidRequest, NoModelLoaded
from tests.fakes import fleet_scenes, scenes

pytestmark = pytest.mark.asyncio(loop_scope="module")
QUESTION = ChatMessage(role="user", content="What does max prompts do?")
GREEDY = SamplingParams(temperature=0.0, max_tokens=48)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def link() -> AsyncIterator[EngineLink]:
    """A link to a runtime with the demo model."""
    runtime = Runtime(Settings(api=False, worker_host="thread"))
    await runtime.start()
    try:
        await runtime.load("demo")
        yield as_link(LocalLink(runtime, CurrentLoop()))
    finally:
        await runtime.close(drain_s=0.0)


async def said(link: EngineLink, messages: Sequence[ChatMessage], *, continue_answer: bool = False) -> str:
    stream = link.conversation.chat(messages, GREEDY, continue_answer=continue_answer)
    return "".join([delta.text async for delta in stream])


async def test_an_answer_gone_on_with_says_what_the_whole_answer_said(link: EngineLink) -> None:
    whole = await said(link, [QUESTION])
    words = whole.split(" ")
    assert len(words) > 8
    begun = " ".join(words[:5])
    rest = await said(link, [QUESTION, ChatMessage(role="assistant", content=begun)], continue_answer=True)
    assert begun + rest == whole


async def test_an_answer_without_words_cannot_be_gone_on_with(link: EngineLink) -> None:
    with pytest.raises(InvalidRequest, match="cannot be continued"):
        await said(link, [QUESTION, ChatMessage(role="assistant", content=" ")], continue_answer=True)


async def test_the_count_is_what_the_prompt_then_has(link: EngineLink) -> None:
    history = [QUESTION, ChatMessage(role="assistant", content="It is a limit.")]
    count = await link.conversation.count_tokens(history, "Of what, exactly?")
    asked = [*history, ChatMessage(role="user", content="Of what, exactly?")]
    stream = link.conversation.chat(asked, SamplingParams(temperature=0.0, max_tokens=1))
    prompt_tokens = [delta.prompt_tokens async for delta in stream][-1]
    assert count.history + count.draft == prompt_tokens
    assert count.context == link.snapshot().models[0].status.model.max_model_len  # type: ignore[union-attr]
    assert count.left == count.context - prompt_tokens


async def test_without_a_model_counting_says_so() -> None:
    runtime = Runtime(Settings(api=False, worker_host="thread"))
    await runtime.start()
    try:
        with pytest.raises(NoModelLoaded):
            await as_link(LocalLink(runtime, CurrentLoop())).conversation.count_tokens([], "x")
    finally:
        await runtime.close(drain_s=0.0)


async def test_the_context_is_that_of_the_model_a_name_means() -> None:
    snapshot = fleet_scenes.two_models()
    assert [context_of(snapshot, name) for name in ("", "demo", "nobody")] == [8192, 1024, 0]
    assert context_of(scenes.empty(), "") == 0
