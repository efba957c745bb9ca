"""What is told of prompts on its way through the engine: once, whatever becomes of workers and models meanwhile."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest

from engine.backends.base import BackendRequest, unpack_logprobs
from engine.config import SamplingParams
from engine.engine import GenerateRequest
from engine.errors import InvalidRequest
from tests.fakes.backend import FakeBackend, Gate, foretold, saying, vector_of
from tests.fakes.engines import Answer, Backends, ask, read, serving, until, until_idle
from tests.fakes.model import fake_spec

PROMPT = "the prompt"
SCORED = SamplingParams(max_tokens=6, prompt_logprobs=2, logprobs=0)


def scored(**fields: object) -> GenerateRequest:
    return ask(PROMPT, params=SCORED, **fields)


def assert_told_once(answer: Answer, params: SamplingParams = SCORED) -> None:
    expected = foretold(BackendRequest(id="", prompt_ids=list(PROMPT.encode()), params=params))
    assert [unpack_logprobs(delta.prompt_logprobs) for delta in answer.deltas if delta.prompt_logprobs] == [expected]


async def test_what_is_told_of_a_prompt_comes_with_the_first_token(tmp_path: Path) -> None:
    async with serving(tmp_path) as engine:
        answer = await read(engine.submit(scored()))
        assert_told_once(answer)
        assert answer.deltas[0].prompt_logprobs


async def test_a_worker_lost_before_the_first_token_has_the_next_one_tell(tmp_path: Path) -> None:
    gate = Gate()
    first = FakeBackend(gate=gate)
    backends = Backends(first)
    async with serving(tmp_path, backends) as engine:
        stream = engine.submit(scored())
        await until(lambda: first.submitted)
        await engine.restart_worker("w0")
        gate.open()
        assert_told_once(await read(stream))
        assert backends.made[1].submitted[0].params.prompt_logprobs == 2


async def test_a_worker_lost_after_the_first_token_leaves_nothing_to_tell(tmp_path: Path) -> None:
    gate = Gate(1)
    backends = Backends(FakeBackend(gate=gate))
    async with serving(tmp_path, backends) as engine:
        stream = engine.submit(scored())
        await until(lambda: any(row.output_tokens for row in engine.publish().requests))
        await engine.restart_worker("w0")
        gate.open()
        answer = await read(stream)
        assert_told_once(answer)
        assert backends.made[1].submitted[0].params.prompt_logprobs is None
        assert len(answer.token_ids) == 6


async def test_tokens_that_are_taken_back_do_not_tell_twice(tmp_path: Path) -> None:
    backend = FakeBackend(reply=saying("bad", then=ord(".")))
    async with serving(tmp_path, Backends(backend)) as engine:
        params = SamplingParams(max_tokens=6, prompt_logprobs=1, banned_strings=("bad",))
        answer = await read(engine.submit(ask(PROMPT, params=params)))
        assert_told_once(answer, params)
        assert [request.params.prompt_logprobs for request in backend.submitted] == [1, None]


async def test_a_request_without_tokens_ends_with_what_is_told_of_its_prompt(tmp_path: Path) -> None:
    async with serving(tmp_path) as engine:
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        answer = await read(engine.submit(ask(PROMPT, params=params)))
        assert_told_once(answer, params)
        assert (answer.last.finish, answer.token_ids, answer.text) == ("length", [], "")


async def test_a_vector_is_the_last_thing_that_comes(tmp_path: Path) -> None:
    async with serving(tmp_path) as engine:
        answer = await read(engine.submit(ask(PROMPT, embed=True, max_tokens=None)))
        (delta,) = answer.deltas
        assert delta.finish == "stop"
        assert array("f", delta.vector).tolist() == vector_of(PROMPT.encode())
        totals = engine.publish().totals
        assert (totals.prompt_tokens, totals.output_tokens) == (len(PROMPT), 0)


async def test_vectors_wait_and_move_like_every_request(tmp_path: Path) -> None:
    gate = Gate()
    first = FakeBackend(gate=gate)
    backends = Backends(first)
    async with serving(tmp_path, backends, max_prompts=2) as engine:
        streams = [engine.submit(ask(f"{PROMPT} {number}", embed=True)) for number in range(5)]
        assert engine.cancel(streams[4].request_id)
        await until(lambda: len(first.submitted) == 2)
        await engine.restart_worker("w0")
        gate.open()
        answers = [await read(stream) for stream in streams]
        await until_idle(backends.made[1], gate)
    assert [answer.last.finish for answer in answers] == ["stop"] * 4 + ["cancelled"]
    for number, answer in enumerate(answers[:4]):
        assert array("f", answer.last.vector).tolist() == vector_of(f"{PROMPT} {number}".encode())


async def test_a_model_that_embeds_nothing_refuses_with_its_backends_name(tmp_path: Path) -> None:
    async with serving(tmp_path, Backends(FakeBackend(embeds=False))) as engine:
        with pytest.raises(InvalidRequest, match="embeddings are not supported by the fake backend"):
            engine.submit(ask(PROMPT, embed=True))


async def test_vectors_go_over_to_a_model_that_is_loaded_anew(tmp_path: Path) -> None:
    gate = Gate()
    backends = Backends(FakeBackend(gate=gate))
    async with serving(tmp_path, backends) as engine:
        stream = engine.submit(ask(PROMPT, embed=True))
        await until(lambda: backends.made[0].submitted)
        gate.open()
        await engine.load(fake_spec(tmp_path, max_model_len=64))
        answer = await read(stream)
    assert array("f", answer.last.vector).tolist() == vector_of(PROMPT.encode())
