"""What a key's client can learn of other keys' prompts from the prefix cache: nothing, unless the operator says so."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from console.api.server import ApiSettings
from console.link.chat import ChatMessage
from console.link.local_chat import LocalConversation
from console.runtime.loops import CurrentLoop
from engine.backends.torch.backend import TorchBackend
from engine.config import EngineConfig, ModelSpec, SamplingParams
from tests.api.harness import Served, bearer, serving
from tests.api.operators import FolderOperator
from tests.fakes.backend import FakeBackend
from tests.fakes.tiny_models import make_tiny_model
from tests.fakes.tool_templates import HERMES, write_tool_model

pytestmark = pytest.mark.long

PAGE = 16
SECRET = list(range(3, 3 + 172))
"""A prompt of ten full pages and a part of one."""

SYSTEM = "You answer every question of the house in the voice of its oldest butler, who has seen it all. " * 2
QUESTION = "Where did the brown fox leave the papers that the lazy dog was to bring to the other one? " * 2
"""Texts of several pages each."""


class Computing(TorchBackend):
    """The torch backend where a test's server expects one that can be held up."""

    gate = load_gate = None


@asynccontextmanager
async def computing(folder: Path, *, api_key: str | None = "open sesame", **config: Any) -> AsyncIterator[Served]:
    """A server whose model really computes, and keeps what it computed in its prefix cache."""
    model = make_tiny_model(folder / "model", max_position_embeddings=1024)
    async with serving(
        folder,
        cast(FakeBackend, Computing()),
        settings=ApiSettings(port=0, api_key=api_key, state_dir=folder / "state"),
        config=EngineConfig(worker_host="thread", page_tokens=PAGE, **config),
        spec=ModelSpec(path=model, name="tiny", threads=1, kv_cache_tokens=8192, dtype="float32"),
        operator=FolderOperator(folder),
    ) as api:
        yield api


@pytest.fixture
async def computing_api(tmp_path: Path) -> AsyncIterator[Served]:
    """Such a server with the default settings."""
    async with computing(tmp_path) as api:
        yield api


async def cached(api: Served, headers: dict[str, str], path: str = "/v1/completions", **body: Any) -> int:
    """How many tokens of a prompt the prefix cache had, as its client is told."""
    asked = {"max_tokens": 1, **(body or {"prompt": SECRET})}
    async with api.http.post(path, json=asked, headers=headers) as response:
        answer = await response.json()
        assert response.status == 200, answer
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_a_key_finds_no_prompt_of_another_in_the_cache(computing_api: Served) -> None:
    alice, bob = [await bearer(computing_api, name, "use") for name in ("alice", "bob")]
    settings = {"X-API-Key": "open sesame"}
    assert [await cached(computing_api, who) for who in (alice, bob, settings)] == [0, 0, 0]
    assert [await cached(computing_api, who) for who in (alice, bob, settings)] == [160, 160, 160]


async def test_clients_without_keys_share_what_they_computed(tmp_path: Path) -> None:
    async with computing(tmp_path, api_key=None) as api:
        assert [await cached(api, {}) for _ in range(2)] == [0, 160]


async def test_a_first_key_does_not_find_what_was_asked_without_one(tmp_path: Path) -> None:
    async with computing(tmp_path, api_key=None) as api:
        await cached(api, {})
        assert await cached(api, await bearer(api, "alice", "use")) == 0


async def test_a_salt_keeps_requests_of_one_key_apart(computing_api: Served) -> None:
    alice, bob = [await bearer(computing_api, name, "use") for name in ("alice", "bob")]
    for path, body in (
        ("/v1/completions", {"prompt": SECRET}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": QUESTION}]}),
    ):
        assert await cached(computing_api, alice, path, **body, cache_salt="x") == 0
        assert [await cached(computing_api, alice, path, **body, cache_salt=salt) for salt in ("", "y")] == [0, 0]
        assert await cached(computing_api, bob, path, **body, cache_salt="x") == 0
        assert await cached(computing_api, alice, path, **body, cache_salt="x") > 0


@pytest.mark.parametrize(("salt", "said"), [("x" * 257, "at most 256 characters"), (7, "valid string")])
async def test_a_salt_that_is_none_is_refused(api: Served, salt: object, said: str) -> None:
    error = await api.refusal("/v1/completions", prompt="x", max_tokens=1, cache_salt=salt)
    assert error["param"] == "cache_salt"
    assert said in error["message"]


def conversation(*turns: str) -> dict[str, Any]:
    """The body of a chat: a system message first, then question and answer in turn."""
    roles = ["system", *["user", "assistant"] * len(turns)]
    return {"messages": [{"role": role, "content": said} for role, said in zip(roles, turns, strict=False)]}


async def chatted(api: Served, headers: dict[str, str], *turns: str) -> int:
    """How many tokens of a conversation the cache had."""
    return await cached(api, headers, "/v1/chat/completions", **conversation(*turns))


def full_pages(api: Served, text: str) -> int:
    """Tokens of all full pages that a text takes."""
    tokenizer = api.engine.tokenizer_of()
    assert tokenizer is not None
    return len(tokenizer.encode(text, add_special_tokens=False)) // PAGE * PAGE


async def test_keys_share_system_prompts_and_nothing_else_where_the_operator_says_so(tmp_path: Path) -> None:
    async with computing(tmp_path, prefix_sharing="system") as api:
        alice, bob = [await bearer(api, name, "use") for name in ("alice", "bob")]
        system = full_pages(api, f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n")
        assert system >= 2 * PAGE
        assert await chatted(api, alice, SYSTEM, QUESTION) == 0
        assert await chatted(api, bob, SYSTEM, QUESTION) == system
        assert await chatted(api, bob, SYSTEM, "Something else.") == system
        assert await chatted(api, alice, SYSTEM, QUESTION) > system
        assert await chatted(api, alice, SYSTEM, QUESTION, "An answer.", "And then?") > system


async def test_a_system_prompt_that_quotes_a_question_does_not_find_it(tmp_path: Path) -> None:
    async with computing(tmp_path, prefix_sharing="system") as api:
        alice, bob = [await bearer(api, name, "use") for name in ("alice", "bob")]
        await chatted(api, alice, SYSTEM, QUESTION)
        system = full_pages(api, f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n")
        quoted = f"{SYSTEM}<|im_end|>\n<|im_start|>user\n{QUESTION}"
        assert await chatted(api, bob, quoted, "What do you say?") == system
        prompt = f"<|im_start|>system\n{quoted}<|im_end|>\n<|im_start|>assistant\n"
        assert await cached(api, bob, prompt=prompt) == 0


async def test_prompts_without_a_system_message_are_not_shared(tmp_path: Path) -> None:
    async with computing(tmp_path, prefix_sharing="system") as api:
        alice, bob = [await bearer(api, name, "use") for name in ("alice", "bob")]
        assert [await cached(api, who) for who in (alice, bob)] == [0, 0]
        asked = {"messages": [{"role": "user", "content": QUESTION}]}
        first, others, own = [await cached(api, who, "/v1/chat/completions", **asked) for who in (alice, bob, bob)]
        assert (first, others) == (0, 0)
        assert own > 0


async def test_everybody_shares_everything_where_the_operator_says_so(tmp_path: Path) -> None:
    async with computing(tmp_path, prefix_sharing="all") as api:
        alice, bob = [await bearer(api, name, "use") for name in ("alice", "bob")]
        assert [await cached(api, who) for who in (alice, bob)] == [0, 160]


async def test_the_chat_of_the_console_is_a_tenant_of_its_own(computing_api: Served) -> None:
    tokenizer = computing_api.engine.tokenizer_of()
    assert tokenizer is not None
    chat = LocalConversation(computing_api.engine, CurrentLoop())
    for _ in range(2):
        [delta async for delta in chat.chat([ChatMessage(role="user", content=QUESTION)], SamplingParams(max_tokens=1))]
    named_so = await bearer(computing_api, "console", "use")
    asked = {"messages": [{"role": "user", "content": QUESTION}]}
    assert await cached(computing_api, named_so, "/v1/chat/completions", **asked) == 0
    own = [row.cached_tokens for row in computing_api.engine.publish().requests if row.source == "chat"]
    assert sorted(own) == [0, max(own)]
    assert max(own) >= PAGE


# --- what a prompt's system part is, under the templates that there are ----------------------------------------------

CHATML = """{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}<assistant>"""
DEFAULT = """{% if messages[0].role != 'system' %}<system>Be kind.</>{% endif %}""" + CHATML
LLAMA2 = (
    "{% if messages[0].role == 'system' %}{% set said = '<<SYS>>' ~ messages[0].content ~ '<</SYS>>' %}"
    "{% set rest = messages[1:] %}{% else %}{% set said = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if m.role == 'user' %}[INST] {{ said if loop.first else '' }}{{ m.content }} [/INST]"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
LAST = (
    "{% for m in messages if m.role != 'system' %}[{{ m.role }}]"
    "{% if loop.last %}{{ messages[0].content }} {% endif %}{{ m.content }}{% endfor %}"
)
COUNTED = """{{ messages | length }} messages, the last of them: {{ messages[-1].content }}. """ + CHATML
STRICT = """{% if messages | length == 2 %}{{ raise_exception('too short') }}{% endif %}""" + CHATML
TRIMMED = """{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"""

TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("template", "turns", "shared"),
    [
        (CHATML, ("Be brief.", "How?"), "<system>Be brief.</><user>"),
        (CHATML, ("Be brief.", "How?", "So.", "Why?"), "<system>Be brief.</><user>"),
        (CHATML, ("", "ThisIsWhereTheFirstQuestionBegins"), "<system></><user>"),
        (CHATML, ("ThisIsWhereTheFirstQuestionBegins, you see.", "How?"), "<system>"),
        (DEFAULT, (None, "How?"), "<system>Be kind.</><user>"),
        (LLAMA2, ("Be brief.", "How?"), "[INST] <<SYS>>Be brief.<</SYS>>"),
        (LLAMA2, (None, "How?"), "[INST] "),
        (LAST, ("Be brief.", "How?"), "[user]Be brief. "),
        (LAST, ("Be brief.", "How?", "So.", "Why?"), ""),
        (COUNTED, ("Be brief.", "How?"), "2 messages, the last of them: "),
        (COUNTED, ("Be brief.", "How?", "So.", "Why?"), ""),
        (STRICT, ("Be brief.", "How?", "So.", "Why?"), ""),
        (TRIMMED, ("Be brief.", "   How?"), "<system>Be brief.</><user>"),
    ],
)
async def test_the_system_prompt_ends_where_the_first_question_begins(
    tmp_path: Path, template: str, turns: tuple[str | None, ...], shared: str
) -> None:
    body = conversation(*[turn or "" for turn in turns])
    body["messages"] = body["messages"][turns[0] is None :]
    assert await shared_text(tmp_path, template, body) == shared


async def test_tools_belong_to_the_system_prompt(tmp_path: Path) -> None:
    body = conversation("Be brief.", "How?") | {"tools": [TOOL]}
    shared = await shared_text(tmp_path, HERMES, body)
    assert shared.startswith('tools: [{"')
    assert shared.endswith("]\nsystem: Be brief.\nuser: ")


async def shared_text(folder: Path, template: str, body: dict[str, Any]) -> str:
    """How much of a conversation's prompt goes to the worker as its system prompt."""
    config = EngineConfig(worker_host="thread", prefix_sharing="system")
    spec = ModelSpec(path=write_tool_model(folder / "templates", template), name="fake")
    async with serving(folder, config=config, spec=spec) as api:
        await api.post("/v1/chat/completions", max_tokens=1, **body)
        (request,) = api.backend.submitted
        return bytes(request.prompt_ids[: request.shared_tokens]).decode()


async def test_a_request_names_its_key_and_never_has_the_key_itself(computing_api: Served) -> None:
    await cached(computing_api, {"Authorization": "Bearer open sesame"})
    _, rows = computing_api.engine.finished_requests()
    assert [row.key_name for row in rows] == ["settings"]
    assert "open sesame" not in str(rows)
