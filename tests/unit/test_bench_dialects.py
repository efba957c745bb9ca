"""What a bench asks servers of every kind, and what it reads off their answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

import console.bench.dialects
from console.bench.dialects import DIALECTS, find_dialects
from console.bench.dialects.base import first_model
from console.bench.http_target import HttpTarget
from console.bench.kinds.latency import Latency
from console.bench.run import run_bench
from console.bench.target import Chunk, TargetFailed
from console.bench.workload import Item, Prompt
from engine.simulation.lengths import fixed
from tests.fakes.bench_server import Server

TEXT = Item(number=0, prompt=Prompt(2, text="two words"), output_tokens=5)
IDS = Item(number=0, prompt=Prompt(2, ids=(7, 8)), output_tokens=5)


def read(dialect: str, *events: object) -> list[Chunk]:
    """What the events say."""
    reader = DIALECTS[dialect].reader()
    return [chunk for event in events if (chunk := reader(json.dumps(event).encode())) is not None]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_lengths_are_forced_where_a_server_can_be_told(dialect: str) -> None:
    body = json.dumps(DIALECTS[dialect].body(TEXT, "m", plain=False))
    assert ("eos" in body) == DIALECTS[dialect].forces
    assert "5" in body and "two words" in body
    assert "eos" not in json.dumps(DIALECTS[dialect].body(TEXT, "m", plain=True))


@pytest.mark.parametrize("dialect", [name for name, each in DIALECTS.items() if each.takes_ids])
def test_prompts_are_ids_where_they_may_be(dialect: str) -> None:
    assert DIALECTS[dialect].body(IDS, "", plain=False)["prompt"] == [7, 8]


@pytest.mark.parametrize("dialect", ["openai", "tabby"])
def test_openai_counts_are_its_usage(dialect: str) -> None:
    assert read(
        dialect,
        {"choices": [{"text": "a"}], "usage": {"prompt_tokens": 2, "completion_tokens": 3}},
        {"choices": [{"text": "b"}]},
        {"choices": [{"text": "", "finish_reason": "length"}]},
        {
            "choices": [],
            "usage": {"prompt_tokens": 2, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 1}},
        },
    ) == [
        Chunk(tokens=1, output_tokens=3, prompt_tokens=2),
        Chunk(tokens=1),
        Chunk(output_tokens=5, prompt_tokens=2, cached_tokens=1),
    ]


def test_a_chat_counts_what_is_said_or_thought() -> None:
    assert read(
        "chat",
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"reasoning_content": "hm"}}]},
        {"choices": [{"delta": {"content": "a"}}], "usage": None},
    ) == [Chunk(tokens=1), Chunk(tokens=1)]


def test_tgi_tells_every_token_and_at_the_end_how_many() -> None:
    token = {"id": 4, "text": "a", "logprob": -1.0, "special": False}
    assert read(
        "tgi",
        {"index": 1, "token": token, "generated_text": None, "details": None},
        {"index": 2, "token": token, "generated_text": "aa", "details": {"generated_tokens": 2, "input_length": 9}},
    ) == [Chunk(tokens=1), Chunk(tokens=1, output_tokens=2, prompt_tokens=9)]


def test_llamacpp_tells_ids_as_they_come_and_counts_at_the_end() -> None:
    assert read(
        "llamacpp",
        {"index": 0, "content": "a", "tokens": [5, 6], "stop": False},
        {"content": "b", "stop": False},
        {"content": "", "tokens": [], "stop": False},
        {
            "content": "",
            "stop": True,
            "tokens_predicted": 3,
            "tokens_evaluated": 9,
            "timings": {"cache_n": 4, "prompt_n": 5},
        },
    ) == [Chunk(tokens=2), Chunk(tokens=1), Chunk(output_tokens=3, prompt_tokens=9, cached_tokens=4)]


def test_ollama_counts_at_the_end() -> None:
    assert read(
        "ollama",
        {"response": "a", "done": False},
        {"response": "", "done": True, "prompt_eval_count": 9, "eval_count": 3},
    ) == [Chunk(tokens=1), Chunk(output_tokens=3, prompt_tokens=9)]


def test_an_ollama_chat_counts_what_is_said_or_thought() -> None:
    assert read(
        "ollama-chat",
        {"message": {"role": "assistant", "content": "", "thinking": "hm"}, "done": False},
        {"message": {"role": "assistant", "content": "a"}, "done": False},
        {"message": {"role": "assistant", "content": ""}, "done": True, "prompt_eval_count": 9, "eval_count": 2},
    ) == [Chunk(tokens=1), Chunk(tokens=1), Chunk(output_tokens=2, prompt_tokens=9)]


def test_anthropic_counts_the_answer_at_its_end_and_the_prompt_with_what_was_cached() -> None:
    assert read(
        "anthropic",
        {
            "type": "message_start",
            "message": {"usage": {"input_tokens": 4, "cache_read_input_tokens": 5, "output_tokens": 1}},
        },
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "ping"},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "hm"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}},
        {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}, "usage": {"output_tokens": 3}},
        {"type": "message_stop"},
    ) == [
        Chunk(prompt_tokens=9, cached_tokens=5),
        Chunk(tokens=1),
        Chunk(tokens=1),
        Chunk(output_tokens=3),
    ]


def test_a_key_is_sent_as_each_dialect_has_it() -> None:
    assert DIALECTS["openai"].headers("k") == {"Authorization": "Bearer k"}
    assert DIALECTS["anthropic"].headers("k") == {"anthropic-version": "2023-06-01", "x-api-key": "k"}
    assert [DIALECTS[name].headers("") for name in ("openai", "anthropic")] == [{}, {"anthropic-version": "2023-06-01"}]


def test_kobold_and_textgen_tell_pieces_of_text_alone() -> None:
    assert read("kobold", {"token": "a", "finish_reason": None}, {"token": "", "finish_reason": "length"}) == [
        Chunk(tokens=1)
    ]
    said = [{"event": "text_stream", "message_num": 0, "text": "a"}, {"event": "stream_end", "message_num": 1}]
    assert read("textgen", *said) == [Chunk(tokens=1), Chunk(last=True)]


def test_kobold_tells_an_error_in_a_shape_of_its_own() -> None:
    with pytest.raises(TargetFailed, match="the server sent an error: no room"):
        read("kobold", {"detail": {"msg": "no room", "type": "bad_input"}})


def test_generate_counts_lines_whose_text_grew() -> None:
    said = [{"text": ["a"]}, {"text": ["ab"]}, {"text": ["ab"]}, {"text": "abc"}]
    assert len(read("generate", *said)) == 3


@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_error_in_a_stream_is_told_with_its_words(dialect: str) -> None:
    error = "no room" if dialect in ("ollama", "tgi") else {"message": "no room", "code": 500}
    with pytest.raises(TargetFailed, match="no room"):
        read(dialect, {"error": error})


@pytest.mark.parametrize(
    ("listed", "name"),
    [
        ('{"data": [{"id": "a"}, {"id": "b"}]}', "a"),
        ('{"models": [{"name": "c"}]}', "c"),
        ('{"data": []}', ""),
        ("not JSON", ""),
    ],
)
def test_the_first_model_is_named(listed: str, name: str) -> None:
    assert first_model(listed.encode()) == name


PLAN = Latency(prompts=2, prompt_tokens=fixed(3), output_tokens=fixed(2))


async def test_a_llamacpp_server_is_measured() -> None:
    said = [{"content": "a", "tokens": [1]}, {"content": "b", "tokens": [2]}, {"stop": True, "tokens_predicted": 2}]
    kind = Server("/completion", said)
    async with kind.server, HttpTarget(str(kind.server.make_url("")), dialect="llamacpp") as target:
        result = await run_bench(PLAN, target)
    assert (result.rows[0].median("answer_tokens"), result.target.counted_by) == (2, "usage")
    assert kind.bodies[-1]["ignore_eos"] is True and kind.bodies[-1]["n_predict"] == 2


@pytest.mark.parametrize("status", [400, 422])
async def test_a_server_that_cannot_force_a_length_is_asked_plainly_and_that_is_told(status: int) -> None:
    said = [{"choices": [{"text": "a"}]}]
    kind = Server("/v1/completions", said, refuses=("ignore_eos",), status=status)
    async with kind.server, HttpTarget(str(kind.server.make_url("/v1/")), model="m") as target:
        result = await run_bench(PLAN, target)
    assert "ignore_eos" in kind.bodies[0]
    assert all("ignore_eos" not in body for body in kind.bodies[1:])
    assert (result.target.forces_length, result.target.counted_by) == (False, "chunks")
    assert len(result.notes) == 2


async def test_a_server_that_answers_in_another_dialect_is_one_sentence() -> None:
    kind = Server("/v1/completions", [{"choices": 3}])
    async with kind.server, HttpTarget(str(kind.server.make_url("")), model="m") as target:
        with pytest.raises(
            TargetFailed, match=r"/v1/completions sent an unreadable answer: Expected `array`, got `int`"
        ):
            await run_bench(PLAN, target)


async def test_a_server_that_says_nothing_is_one_sentence() -> None:
    kind = Server("/v1/completions", [])
    async with kind.server, HttpTarget(str(kind.server.make_url("")), model="m") as target:
        with pytest.raises(TargetFailed, match="the answer had no tokens"):
            await run_bench(PLAN, target)


DEEP = b'data: {"other": ' + b"[" * 100_000


@pytest.mark.parametrize(
    ("dialect", "event", "said"),
    [
        ("openai", b'data: {"choices": [{"te', "Input data was truncated"),
        ("openai", b'data: {"choices": [{"text": "\xff"}]}', "codec can't decode byte 0xff"),
        ("openai", b'data: {"choices": [{"text": {"a": 1}}]}', "got `object`"),
        ("openai", b'data: {"choices": [], "usage": {"completion_tokens": 1%s}}' % (b"0" * 30), "Expected `int` <= "),
        ("openai", b'data: {"choices": [], "usage": {"completion_tokens": -1}}', "Expected `int` >= 0"),
        ("openai", DEEP, "recursion"),
        ("chat", b'data: {"choices": [{"delta": {"content": [{"type": "text", "text": "a"}]}}]}', "got `array`"),
    ],
    ids=("cut", "no text", "an object for a text", "too large", "less than none", "too deep", "parts for a text"),
)
async def test_an_event_that_cannot_be_read_is_a_request_that_failed(dialect: str, event: bytes, said: str) -> None:
    path, good = DIALECTS[dialect].path, {"text": "a", "delta": {"content": "a"}}
    events = [{"choices": [good], "usage": {"completion_tokens": 2}}]
    kind = Server(path, events, broken={2: event + b"\n\n"})
    async with kind.server, HttpTarget(kind.url, dialect=dialect, model="m") as target:
        result, where = await run_bench(PLAN, target), f"{kind.url}{path}"
    assert result.complete
    assert (result.rows[0].median("completed"), result.rows[0].median("failed")) == (1, 1)
    assert f"1 of 2 requests failed: {where} sent an unreadable answer" in result.notes[0]
    assert said in result.notes[0]


@pytest.mark.parametrize("status", [200, 404])
async def test_a_server_that_never_ends_what_it_says_is_read_no_further_than_it_is_of_use(status: int) -> None:
    sent = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        said = web.StreamResponse(status=status)
        await said.prepare(request)
        while True:
            await said.write(b"x" * 2**20)
            sent += 1

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server, HttpTarget(str(server.make_url(""))) as target:
        with pytest.raises(TargetFailed) as refused:
            await target.greet()
    assert sent < 100
    assert len(str(refused.value)) < 500


def test_an_error_of_a_server_is_quoted_as_far_as_a_person_reads() -> None:
    with pytest.raises(TargetFailed) as failed:
        read("openai", {"error": {"message": "no\n\x1b[2J" + "x" * 10**6}})
    assert str(failed.value).startswith(r"the server sent an error: no\n\x1b[2Jxxx")
    assert len(str(failed.value)) < 400


def spoken(*messages: object) -> TestServer:
    """A server of text-generation-webui's websocket that says this and leaves."""

    async def answer(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.receive()
        for message in messages:
            await socket.send_json(message)
        return socket

    app = web.Application()
    app.router.add_get("/api/v1/stream", answer)
    return TestServer(app)


@pytest.mark.parametrize("ends", [True, False])
async def test_an_answer_over_a_websocket_is_whole_only_with_its_end(ends: bool) -> None:
    said = [{"event": "text_stream", "text": "a"}, {"event": "text_stream", "text": "b"}]
    async with (
        spoken(*said, *([{"event": "stream_end"}] if ends else [])) as server,
        HttpTarget(str(server.make_url("")), dialect="textgen") as target,
    ):
        if ends:
            result = await run_bench(PLAN, target)
            assert (result.rows[0].median("answer_tokens"), result.target.counted_by) == (2, "asked")
        else:
            with pytest.raises(TargetFailed, match="closed the connection before the end of the answer"):
                await run_bench(PLAN, target)


async def test_a_websocket_that_is_not_there_is_one_sentence() -> None:
    kind = Server()
    async with kind.server, HttpTarget(kind.url, dialect="textgen") as target:
        with pytest.raises(TargetFailed, match=r"/api/v1/stream answered 404") as refused:
            await target.greet()
    assert refused.value.details["param"] == "dialect"


def test_a_dialect_is_found_in_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "added_bench_dialect.py").write_text(
        "from console.bench.dialects.base import Dialect\n"
        "from console.bench.dialects.openai import read_event\n"
        "ADDED = Dialect(name='added', order=15, path='/added', extras=lambda item: {}, reader=lambda: read_event,\n"
        "    request=lambda item, model: {'text': item.prompt.text})\n"
    )
    monkeypatch.setattr("console.bench.dialects.__path__", [*console.bench.dialects.__path__, str(tmp_path)])
    found = find_dialects()
    assert list(found)[:3] == ["openai", "chat", "added"]
    assert found["added"].body(TEXT, "", plain=False) == {"text": "two words"}
