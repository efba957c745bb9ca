"""Answers held to grammars by real (tiny, random) models: whatever the weights say, what comes out is valid."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from engine.backends.base import BackendRequest, TokenEvent
from engine.backends.torch.backend import TorchBackend
from engine.config import EngineConfig, Grammar, ModelSpec, SamplingParams
from engine.engine import Engine, GenerateRequest
from engine.text.grammar import GrammarMasks
from engine.text.tokenizer import Tokenizer
from tests.fakes.engines import Answer, StillProbe, read, until
from tests.fakes.tiny_models import make_tiny_model

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "é", '"\n']}, "maxItems": 3},
        "inner": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["name", "age", "tags", "inner"],
    "additionalProperties": False,
}
HELD = Grammar(kind="json_schema", source=json.dumps(SCHEMA))
WORDS = Grammar(kind="regex", source="[a-c]{3,5}!")
GRAMMARS = [HELD, None, WORDS, Grammar(kind="choice", source='["yes", "no, never"]'), HELD]
KNOBS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 3.0, "top_k": 5, "xtc_probability": 1.0, "xtc_threshold": 0.01},
    {"temperature": 1.5, "top_p": 0.7, "min_p": 0.05, "typical_p": 0.8, "tfs": 0.9},
    {"repetition_penalty": 1.8, "frequency_penalty": 2.0, "dry_multiplier": 5.0},
    {"stop": ("a", '"', "}"), "stop_token_ids": (5, 6, 7)},
    {"min_tokens": 900, "ignore_eos": True},
    {"logit_bias": {2: 100.0, 0: 100.0, 93: -100.0}},
    {"banned_strings": ("  ", "\t", "z", ": ")},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("held"), max_position_embeddings=2048)


@pytest.fixture
async def engine(folder: Path) -> AsyncIterator[Engine]:
    """Small steps over few pages, so that answers are preempted on the way."""
    engine = Engine(EngineConfig(worker_host="thread", max_prompts=8, step_tokens=32), probe=StillProbe())
    await engine.start()
    try:
        await engine.load(ModelSpec(path=folder, name="tiny", dtype="float32", threads=1, kv_cache_tokens=480))
        yield engine
    finally:
        await engine.close(drain_s=0.0)


def ask(grammar: Grammar | None, prompt: str = "abc", *, most: int = 1000, **params: Any) -> GenerateRequest:
    fields = SamplingParams(grammar=grammar, max_tokens=most if grammar else 40, **{"seed": 1, **params})
    return GenerateRequest(prompt_ids=[5 + ord(letter) % 200 for letter in prompt], params=fields)


def assert_held(answer: Answer, grammar: Grammar | None) -> None:
    """The answer ended by itself and is what its grammar describes."""
    if grammar is None:
        return
    assert answer.last.finish == "stop", answer.text
    if grammar.is_json:
        jsonschema.validate(json.loads(answer.text), SCHEMA)
    elif grammar.kind == "choice":
        assert answer.text in json.loads(grammar.source)
    else:
        assert re.fullmatch(grammar.source, answer.text)


@pytest.mark.parametrize("knobs", KNOBS, ids=lambda knobs: next(iter(knobs)))
async def test_whatever_the_sampler_is_told_the_answer_is_what_its_grammar_describes(
    engine: Engine, knobs: dict[str, Any]
) -> None:
    held = [HELD] * 4 if "stop" in knobs else [HELD, WORDS, HELD, HELD]
    asked = [engine.submit(ask(grammar, seed=seed, **knobs)) for seed, grammar in enumerate(held)]
    for grammar, answer in zip(held, await asyncio.gather(*map(read, asked)), strict=True):
        assert_held(answer, grammar)


async def test_answers_of_several_grammars_and_of_none_share_a_batch_and_are_what_they_are_alone(
    engine: Engine,
) -> None:
    async def alone(seed: int) -> Answer:
        return await read(engine.submit(ask(GRAMMARS[seed % 5], "prompt" * (seed % 3 + 1), seed=seed)))

    together = await asyncio.gather(*(alone(seed) for seed in range(15)))
    assert any(worker.stats.preemptions for worker in engine.publish().workers)
    for seed, answer in enumerate(together):
        assert_held(answer, GRAMMARS[seed % 5])
        assert (await alone(seed)).token_ids == answer.token_ids


async def test_max_tokens_ends_json_with_length(engine: Engine) -> None:
    answer = await read(engine.submit(ask(HELD, most=6)))
    assert (answer.last.finish, len(answer.token_ids)) == ("length", 6)


async def test_an_answer_of_any_kind_goes_on_where_its_worker_was_lost(engine: Engine) -> None:
    whole = await read(engine.submit(ask(HELD, seed=7)))
    stream = engine.submit(ask(HELD, seed=7))
    reading = asyncio.create_task(read(stream))
    await until(lambda: engine.request_detail(stream.request_id).row.output_tokens)
    await engine.restart_worker(engine.publish().workers[0].id)
    answer = await reading
    assert answer.token_ids == whole.token_ids
    assert_held(answer, HELD)


async def test_a_grammar_that_the_model_cannot_write_is_an_error_that_names_it(engine: Engine) -> None:
    answer = await read(engine.submit(ask(Grammar(kind="lark", source="start: nothing", param="guided_grammar"))))
    assert answer.last.error is not None
    assert answer.last.error.details["param"] == "guided_grammar"


def test_guesses_are_made_for_none_that_is_held(folder: Path) -> None:
    torch.set_num_threads(1)
    backend = TorchBackend()
    spec = ModelSpec(path=folder, name="tiny", dtype="float32", kv_cache_tokens=4096, ngram_draft=True)
    backend.load(spec, max_prompts=4, step_tokens=64, page_tokens=8, report=lambda _: None, cancelled=lambda: False)
    masks = GrammarMasks(Tokenizer.from_folder(folder), 320)
    loops = Grammar(kind="regex", source="(abcdef){20}")
    request = BackendRequest(id="a", prompt_ids=[4, 5], params=SamplingParams(grammar=loops, seed=1, max_tokens=400))
    backend.submit(request, masks.begin(request).result(60.0))
    events: list[TokenEvent] = []
    while backend.has_work():
        events += backend.step()
        backend.check()
    assert events[-1].finish == "stop"
    assert backend.stats().draft_tokens == 0
    backend.unload()
