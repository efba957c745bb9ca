"""32 streams over two workers of which one, or both, are killed in their middle: a real model, in float32, and in
bfloat16 where it is deterministic."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from engine.backends.torch.native.library import native_isa
from engine.config import ModelSpec, SamplingParams
from engine.engine import Engine, GenerateRequest
from tests.fakes.engines import Answer, all_ready, ask, config, read, until
from tests.fakes.held import Hold
from tests.fakes.tiny_models import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STREAMS = 32
TOKENS = 160
GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=TOKENS, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.2, top_p=0.95, max_tokens=TOKENS, ignore_eos=True)
KINDS = ("plain", "logprobs", "stop", "banned")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), head_dim=16)


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hold:
    return Hold(monkeypatch, tmp_path, "make_torch")


@pytest.fixture(params=["float32", "bfloat16"])
async def engine(folder: Path, request: pytest.FixtureRequest, hold: Hold) -> AsyncIterator[Engine]:
    """Two workers with sixteen places each."""
    engine = Engine(config(worker_host="process", num_workers=2, max_prompts=STREAMS // 2))
    await engine.start()
    try:
        dtype, deterministic = request.param, request.param == "bfloat16" and native_isa() is not None
        spec = ModelSpec(path=folder, name="tiny", threads=1, kv_cache_tokens=8192, dtype=dtype)
        await engine.load(msgspec.structs.replace(spec, deterministic=deterministic))
        await all_ready(engine)
        yield engine
    finally:
        await engine.close(drain_s=0.0)


def plain(number: int) -> GenerateRequest:
    params = GREEDY if number % 8 < 4 else msgspec.structs.replace(SEEDED, seed=number)
    return ask(f"marker {number}", params=params)


def with_extras(request: GenerateRequest, number: int, answer: Answer) -> GenerateRequest:
    """The request with what its number calls for: stop and banned strings are three characters that its plain answer
    has from two thirds on and not before."""
    late = range(len(answer.text) * 2 // 3, len(answer.text) - 2)
    middle = next(answer.text[at : at + 3] for at in late if answer.text.find(answer.text[at : at + 3]) == at)
    extras: dict[str, dict[str, object]] = {
        "plain": {},
        "logprobs": {"logprobs": 3},
        "stop": {"stop": (middle,)},
        "banned": {"banned_strings": (middle,)},
    }
    params = msgspec.structs.replace(request.params, **extras[KINDS[number % 4]])
    return msgspec.structs.replace(request, params=params)


async def answers(engine: Engine, requests: list[GenerateRequest]) -> list[Answer]:
    return await asyncio.gather(*(read(engine.submit(request)) for request in requests))


def logprobs(answer: Answer) -> list[float]:
    return [each.logprob for delta in answer.deltas for each in delta.logprobs]


async def disturbed(engine: Engine, hold: Hold, requests: list[GenerateRequest], victims: int) -> list[Answer]:
    """The answers when that many workers are killed while all requests are in their middle."""
    await all_ready(engine)
    hold.begin()
    reading = [asyncio.create_task(read(engine.submit(request))) for request in requests]
    await until(lambda: min(row.output_tokens for row in engine.publish().requests[:STREAMS]) > 3)
    before = engine.publish()
    assert before.running == STREAMS
    for worker in before.workers[:victims]:
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
    hold.end()
    answered = await asyncio.gather(*reading)
    assert engine.publish().totals.requeued - before.totals.requeued == STREAMS // 2 * victims
    return answered


async def test_32_streams_go_on_from_what_their_clients_have_when_one_worker_is_killed_or_all_are(
    engine: Engine, hold: Hold
) -> None:
    bare = [plain(number) for number in range(STREAMS)]
    bare_answers = await answers(engine, bare)
    requests = [with_extras(each, number, bare_answers[number]) for number, each in enumerate(bare)]
    expected = await answers(engine, requests)
    for victims in (1, 2):
        got = await disturbed(engine, hold, requests, victims)
        assert [answer.token_ids for answer in got] == [answer.token_ids for answer in expected]
        assert [answer.text for answer in got] == [answer.text for answer in expected]
        assert [answer.last.finish for answer in got] == [answer.last.finish for answer in expected]
        assert [answer.last.finish for answer in got].count("stop") == STREAMS // 4
        for number, (want, have) in enumerate(zip(expected, got, strict=True)):
            assert logprobs(have) == pytest.approx(logprobs(want), abs=1e-4)
            assert len(logprobs(have)) == (TOKENS if KINDS[number % 4] == "logprobs" else 0)
            assert (have.text != bare_answers[number].text) == (KINDS[number % 4] in ("stop", "banned"))
