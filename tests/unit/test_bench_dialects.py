"""What a bench asks servers of every kind, and what it reads off their answers."""

from __future__ import annotations

import json

import pytest

from console.bench.dialects import DIALECTS
from console.bench.dialects.base import first_model
from console.bench.http_target import HttpTarget
from console.bench.kinds.latency import Latency
from console.bench.prompts import Prompt
from console.bench.run import run_bench
from console.bench.target import Chunk, TargetFailed
from console.bench.workload import Item
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
        with pytest.raises(TargetFailed, match=r"/v1/completions: Expected `array`, got `int`"):
            await run_bench(PLAN, target)


async def test_a_server_that_says_nothing_is_one_sentence() -> None:
    kind = Server("/v1/completions", [])
    async with kind.server, HttpTarget(str(kind.server.make_url("")), model="m") as target:
        with pytest.raises(TargetFailed, match="the answer had no tokens"):
            await run_bench(PLAN, target)
