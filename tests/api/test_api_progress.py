"""Progress of a request until its first token: headers, comments, llama.cpp's reports, and refusals of a full queue."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
from huggingface_hub import AsyncInferenceClient

from console.api.requests import stream
from engine.config import EngineConfig
from engine.requests import forecast
from tests.api.harness import Served, serving, text_of, until
from tests.fakes.backend import FakeBackend, Gate, expected_text

LONG = "x" * 100
PROMPT_STEP = 30
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
CHAT_PROMPT = b"user: hello\nassistant: "


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comment on every change, as soon as it is there."""
    monkeypatch.setattr(stream, "COMMENT_S", 0.001)
    monkeypatch.setattr(forecast, "FRESH_S", 0.0)


@asynccontextmanager
async def one_at_a_time(folder: Path, *, busy: int = 1, **config: Any) -> AsyncIterator[tuple[Served, Gate]]:
    """A server whose worker takes one request, with some there already, of which the first has begun; and the gate of
    its steps, at the end of which all have ended."""
    gate = Gate()
    settings = EngineConfig(worker_host="thread", max_prompts=1, **config)
    async with serving(folder, FakeBackend(gate=gate, prompt_step=PROMPT_STEP), config=settings) as api:
        asked = []
        for number in range(busy):
            asked.append(asyncio.create_task(api.post("/v1/completions", prompt=f"busy {number}", max_tokens=40)))
            await until(lambda: len(api.engine._tracker.live) == len(asked))
        yield api, gate
        gate.open()
        await asyncio.gather(*asked)


async def comments_until(response: aiohttp.ClientResponse, last: str) -> list[str]:
    """The comments of a stream up to the first that matches."""
    found: list[str] = []
    while not (found and re.search(last, found[-1])):
        line = (await response.content.readline()).decode()
        assert line, found
        found += [line[2:-1]] if line.startswith(": ") and not line.startswith(": ping") else []
    return found


async def events_of(response: aiohttp.ClientResponse) -> list[Any]:
    """The rest of a stream's events."""
    lines = [line.removeprefix("data: ") for line in (await response.text()).split("\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


# -- headers ----------------------------------------------------------------------------------------------------------


async def test_a_stream_that_waits_says_its_place_with_its_headers(tmp_path: Path) -> None:
    async with one_at_a_time(tmp_path, busy=3) as (api, _):
        body = {"prompt": "x", "max_tokens": 2, "stream": True}
        async with api.http.post("/v1/completions", json=body) as response:
            assert response.headers["X-Queue-Position"] == "3"
            assert "X-Expected-Wait-Seconds" not in response.headers
            assert "X-Queue-Wait-Seconds" not in response.headers


async def test_a_stream_that_waits_says_its_expected_wait_once_that_is_known(tmp_path: Path) -> None:
    async with one_at_a_time(tmp_path) as (api, gate):
        gate.allow(10)
        await api.until_row(state="decode", output_tokens=10)
        [running] = api.engine._tracker.live.values()
        running.gaps_s, running.num_gaps = 90.0, 9
        for path in ("/v1/completions", "/generate"):
            body = {"prompt": "x", "max_tokens": 2, "stream": True}
            async with api.http.post(path, json=body) as response:
                assert response.headers["X-Queue-Position"] == "1"
                assert response.headers["X-Expected-Wait-Seconds"] == "300"
            await until(lambda: len(api.engine._tracker.live) == 1)


async def test_a_stream_that_begins_at_once_has_no_place(api: Served) -> None:
    body = {"prompt": "x", "max_tokens": 2, "stream": True}
    async with api.http.post("/v1/completions", json=body) as response:
        assert not {name for name in response.headers if "Queue" in name or "Wait" in name}
        assert ": queued" not in await response.text()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "max_tokens": 2}),
        ("/v1/chat/completions", CHAT),
        ("/v1/messages", CHAT),
        ("/api/chat", {"messages": CHAT["messages"], "stream": False, "options": {"num_predict": 2}}),
        ("/generate", {"prompt": "x", "max_tokens": 2}),
        ("/v1/embeddings", {"input": "x"}),
    ],
)
async def test_a_whole_answer_says_how_long_it_waited(api: Served, path: str, body: dict[str, Any]) -> None:
    async with api.http.post(path, json=body) as response:
        assert response.status == 200
        [row] = (row for row in api.engine.publish().requests if row.state == "finished")
        assert response.headers["X-Queue-Wait-Seconds"] == f"{row.queued_s:.3f}"


async def test_other_answers_have_no_such_header(api: Served) -> None:
    for path in ("/v1/models", "/health", "/nowhere"):
        async with api.http.get(path) as response:
            assert "X-Queue-Wait-Seconds" not in response.headers


# -- comments ---------------------------------------------------------------------------------------------------------


async def test_a_stream_says_where_it_waits_and_how_far_its_prompt_is_and_then_nothing(tmp_path: Path) -> None:
    async with one_at_a_time(tmp_path, busy=2) as (api, gate):
        body = {"prompt": LONG, "max_tokens": 4, "stream": True}
        async with api.http.post("/v1/completions", json=body) as response:
            assert await comments_until(response, "queued") == ["queued position=2"]
            gate.allow(40)
            await comments_until(response, "queued position=1")
            gate.allow(40)
            seen = await comments_until(response, "prompt")
            assert seen[-1] == "prompt processed=0 total=100"
            gate.allow(2)
            seen = await comments_until(response, "processed=60 ")
            assert set(seen) <= {"prompt processed=30 total=100", "prompt processed=60 total=100"}
            gate.open()
            rest = await response.text()
        assert not re.search(": (queued|prompt)", rest[rest.index("data: ") :])
        assert rest.endswith("data: [DONE]\n\n")


async def test_a_comment_says_the_expected_wait_and_comes_again_only_with_news(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with one_at_a_time(tmp_path) as (api, gate):
        gate.allow(10)
        await api.until_row(state="decode", output_tokens=10)
        [running] = api.engine._tracker.live.values()
        running.gaps_s, running.num_gaps = 90.0, 9
        body = {"prompt": "x", "max_tokens": 2, "stream": True}
        async with api.http.post("/v1/completions", json=body) as response:
            assert await comments_until(response, "queued") == ["queued position=1 expected_wait_s=300"]
            gate.allow(1)
            await api.until_row(state="decode", output_tokens=11)
            running.gaps_s, running.num_gaps = 100.0, 10
            seen = await comments_until(response, "=290")
            assert len(set(seen)) == len(seen)


async def test_json_lines_have_no_comments(tmp_path: Path) -> None:
    async with one_at_a_time(tmp_path) as (api, gate):
        body = {"prompt": LONG, "stream": True, "options": {"num_predict": 3}}
        async with api.http.post("/api/generate", json=body) as response:
            assert response.headers["X-Queue-Position"] == "1"
            gate.open()
            lines = (await response.text()).splitlines()
        assert all(json.loads(line) for line in lines)


async def test_clients_read_the_answer_through_comments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenAI's, Anthropic's and Hugging Face's clients, whose answers wait and whose prompts take several steps."""
    async with one_at_a_time(tmp_path) as (api, gate):

        async def chat() -> str:
            async with openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="k", max_retries=0) as client:
                chunks = await client.chat.completions.create(
                    model="fake", messages=[{"role": "user", "content": "hello"}], max_tokens=4, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

        async def message() -> str:
            async with (
                anthropic.AsyncAnthropic(base_url=api.url, api_key="k", max_retries=0) as client,
                client.messages.stream(
                    model="fake", max_tokens=4, messages=[{"role": "user", "content": "hello"}]
                ) as events,
            ):
                return "".join([text async for text in events.text_stream])

        async def text() -> str:
            async with AsyncInferenceClient(base_url=api.url) as client:
                stream = await client.text_generation("hello", max_new_tokens=4, stream=True)
                return "".join([token async for token in stream])

        commented = _count_comments(monkeypatch)
        asked = [asyncio.create_task(each()) for each in (chat, message, text)]
        await until(lambda: len(commented) >= 3)
        gate.open()
        said = expected_text(CHAT_PROMPT, 4)
        assert await asyncio.gather(*asked) == [said, said, expected_text(b"hello", 4)]


def _count_comments(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Comments that streams have from now on, as they come."""
    found: list[str] = []
    whole = stream.ChunkStream._due_comment

    def due(self: stream.ChunkStream, now: float) -> bytes:
        if comment := whole(self, now):
            found.append(comment.decode())
        return comment

    monkeypatch.setattr(stream.ChunkStream, "_due_comment", due)
    return found


# -- llama.cpp's return_progress --------------------------------------------------------------------------------------


async def test_completions_report_the_prompt_as_llama_cpp_does(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeBackend(prompt_step=PROMPT_STEP)) as api:
        events = await api.events("/v1/completions", prompt=LONG, max_tokens=3, return_progress=True)
    about = [event for event in events[:-1] if "prompt_progress" in event]
    assert about == events[: len(about)], "they come before the first token"
    assert all(event["choices"][0]["text"] == "" for event in about)
    reports = [event["prompt_progress"] for event in about]
    assert all(list(report) == ["total", "cache", "processed", "time_ms"] for report in reports)
    assert {report["total"] for report in reports} == {100}
    processed = [report["processed"] for report in reports]
    assert processed == sorted(set(processed)) and processed[-1] == 100
    assert set(processed) <= {30, 60, 90, 100}
    assert text_of(events) == expected_text(list(LONG.encode()), 3)


async def test_chats_report_each_step_of_the_prompt_in_an_empty_message(tmp_path: Path) -> None:
    gate = Gate()
    async with serving(tmp_path, FakeBackend(gate=gate, prompt_step=10)) as api:
        body = {**CHAT, "stream": True, "return_progress": True}
        async with api.http.post("/v1/chat/completions", json=body) as response:
            for processed in (10, 20):
                gate.allow(1)
                line = await response.content.readline()
                while not line.startswith(b"data: "):
                    line = await response.content.readline()
                event = json.loads(line.removeprefix(b"data: "))
                assert event["choices"] == [
                    {
                        "index": 0,
                        "delta": {"role": "assistant", "content": None},
                        "logprobs": None,
                        "finish_reason": None,
                    }
                ]
                assert event["prompt_progress"]["processed"] == processed
            gate.open()
            rest = await events_of(response)
    assert rest[0]["prompt_progress"]["processed"] == rest[0]["prompt_progress"]["total"] == len(CHAT_PROMPT)
    assert not any("prompt_progress" in event for event in rest[1:-1])
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in rest[:-1]) == expected_text(
        CHAT_PROMPT, 4
    )


async def test_every_choice_reports_its_own_prompt(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeBackend(prompt_step=PROMPT_STEP)) as api:
        events = await api.events("/v1/completions", prompt=[LONG, "y" * 40], n=2, max_tokens=2, return_progress=True)
    reported = [event for event in events[:-1] if "prompt_progress" in event]
    ended = {event["choices"][0]["index"]: event["prompt_progress"]["processed"] for event in reported}
    assert ended == {0: 100, 1: 100, 2: 40, 3: 40}


async def test_a_whole_answer_has_no_report_as_in_llama_cpp(api: Served) -> None:
    assert "prompt_progress" not in await api.post("/v1/chat/completions", **CHAT, return_progress=True)
    assert "prompt_progress" not in await api.post("/v1/completions", prompt="x", return_progress=True)


async def test_the_openai_client_reads_reports_and_the_answer(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, FakeBackend(prompt_step=10)) as api,
        openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="k", max_retries=0) as client,
    ):
        chunks = await client.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": "hello"}],
            max_tokens=4,
            stream=True,
            extra_body={"return_progress": True},
        )
        seen = [chunk async for chunk in chunks]
    assert getattr(seen[0], "prompt_progress")["total"] == len(CHAT_PROMPT)  # noqa: B009
    assert "".join(chunk.choices[0].delta.content or "" for chunk in seen) == expected_text(CHAT_PROMPT, 4)


# -- what operators see -----------------------------------------------------------------------------------------------


async def test_a_request_that_waits_has_its_place_in_the_table_and_one_whose_prompt_is_computed_its_share(
    tmp_path: Path,
) -> None:
    async with one_at_a_time(tmp_path) as (api, gate):
        asked = asyncio.create_task(api.post("/v1/completions", prompt=LONG, max_tokens=2))
        await api.until_row(state="queued", queue_position=1)
        gate.allow(40)
        await api.until_row(state="prefill", prompt_tokens=100, queue_position=None)
        gate.allow(2)
        await api.until_row(state="prefill", prompt_tokens=100, computed_tokens=60)
        [row] = (row for row in api.engine.publish().requests if row.state == "prefill")
        assert row.prompt_computed == 0.6
        assert api.engine.request_detail(row.id).row.computed_tokens == 60
        assert api.engine.request_row(row.id) is not None
        gate.open()
        await asked
        assert api.engine.request_row(row.id) is None


# -- a full queue -----------------------------------------------------------------------------------------------------


async def test_a_full_queue_says_the_expected_wait_and_when_to_come_again(tmp_path: Path) -> None:
    async with one_at_a_time(tmp_path, busy=2, max_queue=1) as (api, gate):
        gate.allow(10)
        await api.until_row(state="decode", output_tokens=10)
        running = next(iter(api.engine._tracker.live.values()))
        running.model_queue.forecast.add_prompt(10**9, 0.0)  # no time goes into prompts
        for gap_s, wait, retry in ((1.01, 71, "60"), (0.11, 8, "8")):
            running.gaps_s, running.num_gaps = 9 * gap_s, 9
            async with api.http.post("/v1/completions", json={"prompt": "x"}) as response:
                assert response.status == 429
                error = (await response.json())["error"]
                assert error["message"] == f"the queue is full: 1 of max 1 requests; the expected wait is {wait} s"
                assert response.headers["Retry-After"] == retry


async def test_a_full_queue_says_no_wait_where_none_is_foreseen(tmp_path: Path) -> None:
    async with (
        one_at_a_time(tmp_path, busy=2, max_queue=1) as (api, _),
        api.http.post("/v1/completions", json={"prompt": "x"}) as response,
    ):
        assert response.status == 429
        assert (await response.json())["error"]["message"].endswith("try again later")
        assert response.headers["Retry-After"] == "1"
