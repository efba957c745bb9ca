"""Defects of EricLLM, the program this one descends from. Each of them is a promise here."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from engine.config import SamplingParams
from engine.errors import InvalidRequest
from tests.fakes.backend import FakeBackend, Gate, expected_text, saying
from tests.fakes.engines import Backends, ask, read, row, serving, until, until_idle
from tests.fakes.model import EOS_ID


async def test_a_late_request_joins_a_running_batch(tmp_path: Path) -> None:
    """It drained a whole batch before it admitted the next request."""
    async with serving(tmp_path) as engine:
        endless = engine.submit(ask("endless", max_tokens=4000))
        await until(lambda: engine.publish().running == 1)
        assert (await read(engine.submit(ask("late")))).text == expected_text(b"late", 8)
        assert not endless.finished


async def test_answers_of_different_lengths_never_swap_owners(tmp_path: Path) -> None:
    """It looked futures up by an index into lists that it popped from while iterating."""
    async with serving(tmp_path, max_prompts=16) as engine:
        lengths = [1 + (7 * number) % 40 for number in range(48)]
        prompts = [f"who am I? number {number}" for number in range(48)]
        streams = [
            engine.submit(ask(prompt, max_tokens=length)) for prompt, length in zip(prompts, lengths, strict=True)
        ]
        answers = await asyncio.gather(*map(read, streams))
        for prompt, length, answer in zip(prompts, lengths, answers, strict=True):
            assert answer.text == expected_text(prompt.encode(), length)


async def test_a_late_output_of_a_cancelled_request_finds_no_new_owner(tmp_path: Path) -> None:
    """The same defect, where a client comes back under the id of a request that its worker has not forgotten yet."""
    gate = Gate()
    async with serving(tmp_path, Backends(FakeBackend(gate=gate))) as engine:
        old = engine.submit(ask("old", id="chat-1"))
        await asyncio.to_thread(gate.wait_until_reached)
        old.cancel()
        new = engine.submit(ask("new", id="chat-1"))
        gate.open()
        assert (await read(new)).text == expected_text(b"new", 8)


async def test_one_ending_sequence_leaves_the_others_tokens_alone(tmp_path: Path) -> None:
    """When one sequence ended, those after it in the batch were not sampled in that step, and fed a token twice."""

    def reply(prompt_ids: object, index: int) -> int:
        assert isinstance(prompt_ids, list)
        return EOS_ID if index == prompt_ids[0] else ord("a") + index % 26

    async with serving(tmp_path, Backends(FakeBackend(reply=reply))) as engine:
        streams = [engine.submit(ask([end, 1], max_tokens=100)) for end in (3, 30, 5, 60, 1, 90)]
        answers = await asyncio.gather(*map(read, streams))
        alphabet = "abcdefghijklmnopqrstuvwxyz" * 4
        assert [answer.text for answer in answers] == [alphabet[:end] for end in (3, 30, 5, 60, 1, 90)]
        assert {answer.last.finish for answer in answers} == {"stop"}


async def test_each_request_is_stopped_by_its_own_settings(tmp_path: Path) -> None:
    """One request's settings decided when all of them stopped, and the end token was one model's, in the source."""
    say = saying("one two three ", then=EOS_ID)
    settings = (
        SamplingParams(max_tokens=100, stop=("two",)),
        SamplingParams(max_tokens=100, stop=("three",), include_stop=True),
        SamplingParams(max_tokens=100, stop_token_ids=(ord("w"),)),
        SamplingParams(max_tokens=20, ignore_eos=True),
        SamplingParams(max_tokens=5),
        SamplingParams(max_tokens=100),
    )
    async with serving(tmp_path, Backends(FakeBackend(reply=say))) as engine:
        answers = await asyncio.gather(*(read(engine.submit(ask("x", params=params))) for params in settings))
        assert [(answer.text, answer.last.finish) for answer in answers] == [
            ("one ", "stop"),
            ("one two three", "stop"),
            ("one t", "stop"),
            ("one two three ", "length"),
            ("one t"[:5], "length"),
            ("one two three ", "stop"),
        ]


@pytest.mark.parametrize(
    "params",
    [SamplingParams(stop=("",)), SamplingParams(min_p=2.0), SamplingParams(top_p=0.0), SamplingParams(logprobs=99)],
)
async def test_a_setting_that_cannot_be_honoured_is_refused(tmp_path: Path, params: SamplingParams) -> None:
    """It took stop, min_p and others, and ignored them."""
    async with serving(tmp_path) as engine:
        with pytest.raises(InvalidRequest):
            engine.submit(ask("x", params=params))


async def test_the_loop_stays_free_while_a_worker_computes(tmp_path: Path) -> None:
    """Its forward pass ran on the event loop: nothing else was answered meanwhile."""
    gate = Gate()
    async with serving(tmp_path, Backends(FakeBackend(gate=gate))) as engine:
        stream = engine.submit(ask("x"))
        await asyncio.to_thread(gate.wait_until_reached)
        assert engine.publish().running == 1
        stream.cancel()
        assert (await read(stream)).last.finish == "cancelled"


async def test_a_timeout_of_zero_means_no_limit(tmp_path: Path) -> None:
    """It raised TypeError for a timeout of 0."""
    async with serving(tmp_path, timeout_s=0) as engine:
        assert (await read(engine.submit(ask("x")))).last.finish == "length"
        assert (await read(engine.submit(ask("x", timeout_s=0)))).last.finish == "length"


async def test_a_request_that_timed_out_is_not_computed_further(tmp_path: Path) -> None:
    """It went on computing for nobody."""
    backend = FakeBackend(gate=(gate := Gate()))
    async with serving(tmp_path, Backends(backend)) as engine:
        answer = await read(engine.submit(ask("x", max_tokens=4000, timeout_s=0.02)))
        assert answer.last.error is not None
        assert answer.last.error.code == "request_timeout"
        await until_idle(backend, gate)
        assert backend.steps < 4000


async def test_seeds_are_drawn_for_each_request_and_kept_where_given(tmp_path: Path) -> None:
    """One random number per step was shared by every sequence of the batch."""
    backend = FakeBackend()
    async with serving(tmp_path, Backends(backend)) as engine:
        asked = [None, None, None, 7, 7]
        params = [SamplingParams(max_tokens=2, seed=seed) for seed in asked]
        await asyncio.gather(*(read(engine.submit(ask("x", params=each))) for each in params))
        seeds = [request.params.seed for request in backend.submitted]
        assert seeds[3:] == [7, 7]
        assert len({*seeds[:3]}) == 3


async def test_prompt_tokens_are_counted(tmp_path: Path) -> None:
    """Its count of prompt tokens was always 0."""
    async with serving(tmp_path) as engine:
        answer = await read(engine.submit(ask("x" * 123, id="x")))
        assert answer.last.prompt_tokens == 123
        assert row(engine, "x").prompt_tokens == 123
        assert engine.publish().totals.prompt_tokens == 123
