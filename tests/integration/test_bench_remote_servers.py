"""Benches that a console puts to a server, and those with lengths of a trace: what is asked, kept and refused."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from pathlib import Path

import pytest

from console.bench.bench_runs import MAX_TRACE_BYTES, Benches
from console.link.benches import BenchOrder, BenchServer
from engine.engine import Engine
from engine.errors import EngineError, InvalidRequest
from tests.fakes.bench_server import Server
from tests.fakes.engines import serving, started, until

SHORT = {"prompt_tokens": "8", "output_tokens": "2"}


def benches(engine: Engine, folder: Path | None) -> Benches:
    return Benches(engine, folder, lambda: False)


def order(url: str, bench: str = "latency", key: str = "", dialect: str = "openai", **settings: str) -> BenchOrder:
    server = BenchServer(url=url, key=key, dialect=dialect)
    return BenchOrder(bench=bench, settings={**SHORT, **settings}, server=server)


def clients() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "bench"]


def everything_in(folder: Path) -> str:
    return "".join(file.read_text(errors="replace") for file in folder.rglob("*") if file.is_file())


def trace_file(
    folder: Path, asked: str = "what is it all about?", answered: str = "six times seven, I was told"
) -> Path:
    file = folder / "trace.json"
    turns = [{"from": "human", "value": asked}, {"from": "gpt", "value": answered}]
    file.write_text(json.dumps([{"conversations": turns}]))
    return file


async def test_a_server_is_measured_with_its_key_and_kept_under_its_address(tmp_path: Path) -> None:
    kind = Server(key="secret", lists=("theirs",))
    async with started() as engine, kind.server:
        found = benches(engine, tmp_path)
        await found.start(order(kind.url, key="secret", prompts="3"))
        assert found.report().model == "theirs"
        await found.finished()
        assert found.report().state == "done"
        [entry] = await found.history()
        assert (entry.model, entry.target) == ("theirs", kind.url)
        assert "secret" not in everything_in(tmp_path)
        assert {body["model"] for body in kind.bodies} == {"theirs"}
        assert clients() == []


@pytest.mark.parametrize(
    ("wrong", "param", "said"),
    [
        ({"url": "ftp://x"}, "url", "is not a server URL"),
        ({"url": "http://[::1"}, "url", "is not a server URL"),
        ({"url": "http://me:pw@x"}, "url", "use --key-file"),
        ({"url": "http://127.0.0.1:9"}, "url", "cannot be reached: connection refused"),
        ({"dialect": "morse"}, "dialect", "unknown dialect morse"),
        ({"dialect": "ollama"}, "dialect", "/api/generate answered 404"),
        ({"key": "another"}, "key", "answered 401: that key is none of ours"),
        ({"bench": "grid"}, "bench", "changes engine settings"),
        ({"bench": "users", "users": "0"}, "users", "users must be 1 or more"),
    ],
)
async def test_a_server_that_cannot_be_asked_is_one_sentence_before_anything_begins(
    wrong: dict[str, str], param: str, said: str
) -> None:
    kind = Server(key="secret")
    async with started() as engine, kind.server:
        found = benches(engine, None)
        with pytest.raises(EngineError, match=said) as refused:
            await found.start(order(**{"url": kind.url, "key": "secret", **wrong}))
        assert refused.value.details["param"] == param
        assert found.report().state == "none"


async def test_a_server_that_answers_no_more_ends_the_bench_with_its_reason() -> None:
    kind = Server()
    async with started() as engine:
        found = benches(engine, None)
        async with kind.server:
            await found.start(order(kind.url, bench="users", users="1", requests="1", repeats="1000"))
            await until(lambda: len(kind.bodies) > 5)
        await found.finished()
        assert found.report().state == "cancelled"
        assert found.report().outcome.startswith("Ended early")
        assert clients() == []


async def test_a_bench_of_a_server_is_cancelled_while_an_answer_is_awaited() -> None:
    kind = Server()
    async with started() as engine, kind.server:
        found = benches(engine, None)
        await found.start(order(kind.url))
        kind.stays.clear()
        await found.cancel()
        assert found.report().state == "cancelled"
        kind.stays.set()


async def test_the_end_of_the_program_ends_a_bench_of_a_server() -> None:
    kind = Server()
    async with started() as engine, kind.server:
        found = benches(engine, None)
        await found.start(order(kind.url))
        kind.stays.clear()
        async with asyncio.timeout(60):
            await found.close()
        assert not found.report().under_way
        assert clients() == []
        kind.stays.set()


@pytest.mark.parametrize("place", ["engine", "server"])
async def test_lengths_of_a_trace_are_asked_for(tmp_path: Path, place: str) -> None:
    kind, lengths = Server(), {"prompt_tokens": "trace", "output_tokens": "trace"}
    settings = {"rates": "inf", "requests": "2", "trace": str(trace_file(tmp_path)), **lengths}
    async with serving(tmp_path / "fake") as engine, kind.server:
        found = benches(engine, tmp_path)
        server = BenchServer(url=kind.url, model="theirs") if place == "server" else None
        await found.start(BenchOrder(bench="serve", settings=settings, server=server))
        await found.finished()
        assert found.report().state == "done"
        if server is not None:
            assert re.fullmatch(r"\[[0-9a-f]{8}\] what is it all about\?", kind.bodies[-1]["prompt"])
        result = await found.result(1)
        asked = result.rows[0].median("total_input_tokens")
        assert asked == 2 * len("[12345678] what is it all about?") if place == "engine" else asked


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read: No such file"),
        ("[]", "has no conversation that starts with"),
        ("{", "is not a trace in ShareGPT format"),
        (" " * (MAX_TRACE_BYTES + 1), "has 64 MiB; more than 64 would delay"),
    ],
)
async def test_a_trace_that_cannot_be_used_is_one_sentence(tmp_path: Path, content: str | None, said: str) -> None:
    file = tmp_path / "trace.json"
    if content is not None:
        file.write_text(content)
    lengths = {"prompt_tokens": "trace", "output_tokens": "trace"}
    async with serving(tmp_path / "fake") as engine:
        found = benches(engine, None)
        with pytest.raises(InvalidRequest, match=said) as refused:
            await found.start(BenchOrder(bench="serve", settings={"trace": str(file), **lengths}))
        assert refused.value.details["param"] == "trace"


async def test_a_folder_is_no_trace(tmp_path: Path) -> None:
    async with serving(tmp_path / "fake") as engine:
        with pytest.raises(InvalidRequest, match="is not a file"):
            await benches(engine, None).start(BenchOrder(bench="serve", settings={"trace": str(tmp_path)}))
