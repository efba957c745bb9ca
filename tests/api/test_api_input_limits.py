"""What a request may hold: each list as many entries as can mean something, each text as many tokens as can be read.
What is more is refused in a sentence that names the field and the limit, at little cost."""

from __future__ import annotations

import asyncio
import gc
import json
import zlib
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web

from console.api.context import MAX_PROMPT_LOGPROBS
from console.api.dialects.anthropic import conversation as anthropic
from console.api.dialects.ollama import chat as ollama
from console.api.http.request_body import decompressed
from console.api.http.serial_thread import SerialThread
from console.api.requests.embedding import INPUTS_PER_CHOICE
from console.api.requests.generation import MAX_BLOCKING_S, Generation
from console.api.requests.prompts import Prompt
from console.api.requests.sampler_order import MAX_SAMPLERS
from console.api.requests.sampling import MAX_BREAKER_CHARACTERS, MAX_BREAKERS, MAX_TOKENS_NAMED
from console.api.requests.served_model import MAX_COUNTED_TOKENS, ServedModel
from console.api.requests.structured_output import MAX_SCHEMA_BYTES, json_grammar
from console.api.server import ApiSettings
from engine.config import SamplingParams
from engine.engine import Engine, GenerateRequest
from engine.errors import ContextLengthExceeded, EngineError, InvalidRequest
from engine.requests.request import Request, compact_ids
from engine.system.child_process import ROOT
from engine.text.tokenizer import Tokenizer
from tests.api.harness import Served, serving, told, until
from tests.fakes.backend import FakeBackend
from tests.fakes.bounds import within_bounds
from tests.fakes.hostile_bodies import KINDS
from tests.fakes.model import write_fake_model

CONTEXT = 4096
MIB = 2**20
ECHO_BYTES = 300_000
TALK = [{"role": "user", "content": "x"}]


async def refused(api: Served, path: str, body: dict[str, Any]) -> str:
    """The sentence of a 400, in whatever shape the dialect has for it."""
    async with api.http.post(path, json=body) as response:
        answer = await response.json()
        assert response.status == 400, answer
    error = answer.get("error") or answer["detail"]
    return str(error if isinstance(error, str) else error.get("message") or error["msg"])


@pytest.mark.parametrize(
    ("path", "body", "limit"),
    [
        ("/v1/completions", {"prompt": "x", "stop_token_ids": [1] * (MAX_TOKENS_NAMED + 1)}, MAX_TOKENS_NAMED),
        ("/v1/completions", {"prompt": "x", "custom_token_bans": [1] * (MAX_TOKENS_NAMED + 1)}, MAX_TOKENS_NAMED),
        ("/v1/completions", {"prompt": "x", "custom_token_bans": "1," * MAX_TOKENS_NAMED}, MAX_TOKENS_NAMED),
        (
            "/v1/completions",
            {"prompt": "x", "logit_bias": {str(token_id): 1 for token_id in range(MAX_TOKENS_NAMED + 1)}},
            MAX_TOKENS_NAMED,
        ),
        ("/v1/completions", {"prompt": "x", "sampler_priority": ["top_k"] * (MAX_SAMPLERS + 1)}, MAX_SAMPLERS),
        ("/v1/completions", {"prompt": "x", "sampler_priority": "top_k," * (MAX_SAMPLERS + 1)}, MAX_SAMPLERS),
        (
            "/v1/completions",
            {"prompt": "x", "dry_multiplier": 1, "dry_sequence_breakers": ["a" * (MAX_BREAKER_CHARACTERS + 1)]},
            MAX_BREAKER_CHARACTERS,
        ),
        (
            "/v1/completions",
            {"prompt": "x", "dry_multiplier": 1, "dry_sequence_breakers": '"a",' * 200_000 + '"a"'},
            8 * MAX_BREAKERS * MAX_BREAKER_CHARACTERS,
        ),
        ("/v1/completions", {"prompt": "a" * 4000, "echo": True, "n": 128}, ECHO_BYTES),
        ("/generate", {"prompt": "a" * 4000, "n": 128}, ECHO_BYTES),
        (
            "/generate",
            {"inputs": "a" * 4000, "parameters": {"best_of": 128, "do_sample": True, "return_full_text": True}},
            ECHO_BYTES,
        ),
        ("/v1/chat/completions", {"messages": TALK * (CONTEXT + 1)}, CONTEXT),
        ("/v1/chat/template", {"messages": TALK * (CONTEXT + 1)}, CONTEXT),
        ("/tokenize", {"messages": TALK * (CONTEXT + 1)}, CONTEXT),
        ("/v1/messages", {"messages": TALK * (CONTEXT + 1), "max_tokens": 1}, CONTEXT),
        ("/v1/messages/count_tokens", {"messages": TALK * (CONTEXT + 1)}, CONTEXT),
        ("/api/chat", {"messages": TALK * (CONTEXT + 1)}, CONTEXT),
        ("/detokenize", {"tokens": [97] * (CONTEXT + 1)}, CONTEXT),
        ("/tokenize", {"prompt": "a" * (MAX_COUNTED_TOKENS * 3)}, MAX_COUNTED_TOKENS),
        ("/tokenize", {"inputs": "a" * (MAX_COUNTED_TOKENS * 3)}, MAX_COUNTED_TOKENS),
        ("/api/extra/tokencount", {"prompt": "a" * (MAX_COUNTED_TOKENS * 3)}, MAX_COUNTED_TOKENS),
        ("/api/v1/token-count", {"prompt": "a" * (MAX_COUNTED_TOKENS * 3)}, MAX_COUNTED_TOKENS),
        ("/v1/embeddings", {"input": ["x"] * (4 * INPUTS_PER_CHOICE + 1)}, 4 * INPUTS_PER_CHOICE),
        ("/api/embed", {"input": ["x"] * (4 * INPUTS_PER_CHOICE + 1)}, 4 * INPUTS_PER_CHOICE),
        ("/v1/completions", {"prompt": "x", "guided_json": {"enum": ["a" * 100] * 1000}}, MAX_SCHEMA_BYTES),
        ("/v1/completions", {"prompt": "x", "guided_choice": ["a" * 100] * 1000}, MAX_SCHEMA_BYTES),
    ],
)
async def test_a_list_or_text_that_can_mean_nothing_is_refused_by_its_field_and_limit(
    tmp_path: Path, path: str, body: dict[str, Any], limit: int
) -> None:
    # what an answer may repeat of its prompt is what a body may hold
    settings = ApiSettings(
        port=0,
        max_choices=4 if "embed" in path else 512,
        max_body_bytes=ECHO_BYTES if limit == ECHO_BYTES else 8 * MIB,
    )
    async with serving(tmp_path, FakeBackend(vocab_size=10**6), settings=settings) as api:
        sentence = await refused(api, path, body)
    assert str(limit) in sentence.replace(",", "")


async def test_what_is_long_and_means_something_is_answered(api: Served) -> None:
    assert len((await api.post("/tokenize", prompt="a" * 20_000))["tokens"]) == 20_000
    assert (await api.post("/detokenize", tokens=[97] * CONTEXT))["prompt"] == "a" * CONTEXT
    prompts = ["a" * 4000] * 40
    assert len((await api.post("/v1/completions", prompt=prompts, max_tokens=1))["choices"]) == 40
    ids = [[97] * 4000] * 32
    assert len((await api.post("/v1/completions", prompt=ids, max_tokens=1))["choices"]) == 32
    messages = [{"role": "user", "content": "[{,"}] * 100
    assert (await api.post("/v1/chat/completions", messages=messages, max_tokens=1))["choices"]
    floats = await api.post("/v1/completions", prompt=[97.0] * 4000, max_tokens=1, stop_token_ids=[1.0])
    assert floats["usage"]["prompt_tokens"] == 4000


@pytest.fixture
def model(tmp_path: Path) -> ServedModel:
    """A model whose every byte is a token, with a context of 4096."""
    tokenizer = Tokenizer.from_folder(write_fake_model(tmp_path))
    return served_by(tokenizer, CONTEXT)


def served_by(tokenizer: Tokenizer, context: int) -> ServedModel:
    """A model with a context of so many tokens."""
    loaded: Any = SimpleNamespace(max_model_len=context, vocab_size=257)
    thread = SerialThread("test")
    return ServedModel(
        name="fake", requested_name="", key="", adapter="", loaded=loaded, tokenizer=tokenizer, thread=thread
    )


@pytest.mark.parametrize("counted", [False, True], ids=["prompt", "counted"])
def test_a_text_of_megabytes_is_refused_by_its_first_tokens(model: ServedModel, counted: bool) -> None:
    """The tokenizer takes 140 bytes for each token, and there may be eight million."""
    text = "a b " * (2 * MIB)
    model.tokenizer.__dict__["longest_token"] = 10_000  # its length alone does not say so
    most = MAX_COUNTED_TOKENS if counted else None
    with within_bounds(len(text)), pytest.raises(InvalidRequest) as error:
        model._encode([text], True, most)
    assert isinstance(error.value, ContextLengthExceeded) is not counted


def test_a_text_of_characters_of_many_bytes_is_refused_at_the_cost_of_its_first_tokens(tmp_path: Path) -> None:
    served = served_by(Tokenizer.from_folder(write_fake_model(tmp_path)), 2**17)
    served.tokenizer.__dict__["longest_token"] = 10_000
    text = "🙂" * 2**18  # a million tokens, which are not many characters for such a context
    with within_bounds(4 * len(text)), pytest.raises(ContextLengthExceeded):
        served._encode([text], True, None)


@pytest.mark.parametrize("unit", ["a", "é", "🙂"])
def test_a_text_that_fits_is_never_refused_by_its_pieces(tmp_path: Path, unit: str) -> None:
    tokenizer = Tokenizer.from_folder(write_fake_model(tmp_path))
    tokenizer.__dict__["longest_token"] = 10_000
    text = unit * 300_000
    context = len(text.encode())
    served = served_by(tokenizer, context)
    assert len(served._encode([text], True, None)[0]) == context


@pytest.mark.parametrize("unit", ["hello world, ", "é ", "x" * 50 + " "])
@pytest.mark.parametrize("end", [False, True])
async def test_a_part_of_a_text_has_the_tokens_that_are_kept_of_the_whole(unit: str, end: bool) -> None:
    model = served_by(Tokenizer.from_folder(ROOT / "engine/demo/model"), CONTEXT)
    text = "".join(f"{number} {unit}" for number in range(100_000 // len(unit)))
    [whole] = model.tokenizer.encode_all([text], add_special_tokens=False)
    for tokens in (1, 100, CONTEXT - 1):
        part = await model.part(text, tokens, end=end)
        [ids] = await model.encode([part], add_special_tokens=False)
        assert (ids[-tokens:] if end else ids[:tokens]) == (whole[-tokens:] if end else whole[:tokens])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/v1/generate", {"prompt": "y" + "x" * 200_000, "max_length": 1}),
        ("/generate", {"inputs": "y" + "x" * 200_000, "parameters": {"truncate": 4000, "max_new_tokens": 1}}),
        ("/api/embed", {"model": "fake", "input": ["x" * 200_000 + "y"]}),
        ("/api/embeddings", {"model": "fake", "prompt": "x" * 200_000 + "y"}),
    ],
)
async def test_a_dialect_that_cuts_texts_cuts_those_of_any_length(
    api: Served, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = api.engine.tokenizer_of()
    assert tokenizer is not None
    monkeypatch.setitem(tokenizer.__dict__, "longest_token", 10_000)
    await api.post(path, **body)
    assert 3900 < len(api.backend.submitted[-1].prompt_ids) < 4097
    assert set(api.backend.submitted[-1].prompt_ids) == {ord("x")}


def test_messages_of_one_side_are_put_together_in_time_that_grows_with_them_alone() -> None:
    messages = [{"role": "user", "content": "x" * 400}] * 20_000
    with within_bounds():
        turns = anthropic.read_conversation(None, messages)
    assert [turn["role"] for turn in turns] == ["user"]
    assert len(turns[0]["content"]) == 401 * 20_000 - 1


def test_results_find_their_calls_in_time_that_grows_with_them_alone() -> None:
    calls = [{"id": f"c{i}", "function": {"name": f"f{i % 7}", "arguments": {}}} for i in range(30_000)]
    by_id = [{"role": "tool", "content": "x", "tool_call_id": f"none{i}"} for i in range(10_000)]
    by_name = [{"role": "tool", "content": "x", "tool_name": f"f{i % 7}"} for i in range(10_000)]
    by_turn = [{"role": "tool", "content": "x"} for _ in range(20_000)]
    with within_bounds():
        said = ollama.read_conversation([{"role": "assistant", "tool_calls": calls}, *by_id, *by_name, *by_turn])
    answered = [turn["tool_call_id"] for turn in said[1 + 10_000 :]]
    assert answered[:8] == ["c0", "c1", "c2", "c3", "c4", "c5", "c6", "c7"]
    assert Counter(answered) == Counter(f"c{i}" for i in range(30_000))


def test_an_unpacked_body_is_longer_than_the_packed_one() -> None:
    packed = KINDS["packed, nothing"](8 * MIB).body
    with within_bounds(len(packed)), pytest.raises(InvalidRequest, match="longer than its decompressed content"):
        decompressed(packed, "deflate", 8 * MIB)
    text = b"what does not get any shorter: \x00\xff\x13\x07" * 10_000
    assert decompressed(zlib.compress(text, 0), "deflate", 8 * MIB) == text


@pytest.mark.parametrize("text", ['{"const": "\\ud800"}', '{"const": NaN}', "[" * 60_000, '{"a":' * 5_000])
def test_a_schema_as_text_is_json_or_a_sentence(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"x is not valid JSON|x should be"):
        json_grammar(text, "x")


@pytest.mark.parametrize("text", ["[" * 100_000, '"\\ud800"', "NaN"])
async def test_breakers_as_text_are_json_or_a_sentence(api: Served, text: str) -> None:
    body = {"prompt": "x", "dry_multiplier": 1, "dry_sequence_breakers": text}
    assert "dry_sequence_breakers should be an array" in await refused(api, "/v1/completions", body)


@pytest.mark.parametrize("broken", ["", '"'])
async def test_json_in_the_arguments_of_calls_holds_no_more_than_a_body(api: Served, broken: str) -> None:
    bomb = '{"a":[' + "[]," * 40_000 + "[]]}"
    calls = [{"id": "a", "type": "function", "function": {"name": "b", "arguments": bomb}}] * 2
    if broken:
        calls.insert(1, {"id": "a", "type": "function", "function": {"name": "b", "arguments": broken}})
    body = {"messages": [{"role": "assistant", "content": "", "tool_calls": calls}]}
    sentence = await refused(api, "/v1/chat/completions", body)
    assert sentence.startswith("messages[].tool_calls[].function.arguments is too large" if not broken else "messages[")


async def test_nothing_keeps_a_body_while_its_answer_is_made_or_its_connection_waits(paced_api: Served) -> None:
    """Of connections there may be thousands, and an answer may last for minutes."""
    text = json.dumps({"prompt": "x", "max_tokens": 2, "metadata": {"a": "b" * MIB}}).encode()
    gone = text.replace(b'"x"', b'[""]')
    reader, writer = await asyncio.open_connection("127.0.0.1", paced_api.server.status().port)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n"
    writer.write(head.format(len(gone)).encode() + gone)
    assert b" 400 " in await reader.readuntil(b"\r\n\r\n")
    writer.write(head.format(len(text)).encode() + text)
    sizes = (len(text), len(gone))
    del text, gone
    await paced_api.until_row(state="prefill")
    gc.collect()
    referred = (value for each in gc.get_objects() for value in gc.get_referents(each))
    assert not any(type(value) in (bytes, bytearray) and len(value) in sizes for value in referred)
    writer.close()


class SlowEngine:
    """An engine whose every request takes it a thousandth of a second, on the clock that it keeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.open = 0

    def submit(self, request: GenerateRequest) -> Any:
        """Take it."""
        self.now += 0.001
        self.open += 1
        return SimpleNamespace(cancel=self.cancel)

    def cancel(self) -> None:
        """It is over."""
        self.now += 0.001
        self.open -= 1


async def test_hundreds_of_answers_are_submitted_and_cancelled_in_stretches(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, loop = SlowEngine(), asyncio.get_running_loop()
    prompt = Prompt(compact_ids([1]), "x")
    generation = Generation(cast(Engine, engine), "x", [prompt] * 500, SamplingParams(), model=model)
    others: list[float] = []

    async def look() -> None:
        while True:
            others.append(engine.now)
            await asyncio.sleep(0)

    looking = asyncio.create_task(look())
    monkeypatch.setattr(loop, "time", lambda: engine.now)
    try:
        await generation.submit()
        assert engine.open == 500
        generation.cancel()
        await until(lambda: engine.open == 0)
    finally:
        monkeypatch.undo()
        looking.cancel()
    waits = [after - before for before, after in pairwise(others)]
    assert max(waits) <= MAX_BLOCKING_S + 0.002
    assert len(waits) >= 2 * 500 * 0.001 / (MAX_BLOCKING_S + 0.002)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "x" * 3500, "n": 2, "prompt_logprobs": 20}),
        ("/v1/completions", {"prompt": ["x" * 3500] * 2, "echo": True, "logprobs": 20}),
        ("/v1/completions", {"prompt": "x" * 3500, "n": 2, "echo": True, "logprobs": 20, "stream": True}),
    ],
)
async def test_more_log_probabilities_of_prompts_than_an_answer_may_hold_are_refused(
    api: Served, path: str, fields: dict[str, Any]
) -> None:
    error = await api.refusal(path, max_tokens=1, **fields)
    assert error["param"] == "prompt_logprobs"
    assert f"{2 * 3500 * 21} log-probabilities" in error["message"] and str(MAX_PROMPT_LOGPROBS) in error["message"]


async def test_requests_for_unknown_paths_end_with_their_answers(api: Served) -> None:
    """What only a look for cycles would free holds the loop up a hundred milliseconds at a time."""
    await told(api, "GET", "/nowhere", {})
    gc.collect()
    gc.disable()
    try:
        for path in ("/nowhere", "/v1/nothing"):
            assert (await told(api, "GET", path, {}))[0] == 404
        assert (await told(api, "GET", "/v1/completions", {}))[0] == 405
        kept = [each for each in gc.get_objects() if isinstance(each, web.HTTPException) and each.__traceback__]
        assert not kept
    finally:
        gc.enable()


def alive(*kinds: type[object]) -> set[int]:
    """The ids of such objects; other tests may hold some."""
    return {id(each) for each in gc.get_objects() if isinstance(each, kinds)}


async def test_requests_end_with_their_answers(api: Served) -> None:
    """Each of them, of a thousand that end at once, else is for a look for cycles to free."""
    await api.post("/v1/completions", prompt="x", max_tokens=1)
    gc.collect()
    gc.disable()
    try:
        before = alive(Request)
        await api.post("/v1/completions", prompt="x", max_tokens=2, n=3)
        await until(lambda: alive(Request) <= before)
    finally:
        gc.enable()


async def test_refused_bodies_end_with_their_answers(api: Served) -> None:
    """Else they fill the memory until the next look for cycles."""
    refused = {"prompt": [""]}, {"prompt": "x", "temperature": "hot"}, {"prompt": "x", "model": "nobody's"}
    await told(api, "POST", "/v1/completions", {}, **refused[0])
    gc.collect()
    gc.disable()
    try:
        before = alive(EngineError)
        for body in refused:
            assert (await told(api, "POST", "/v1/completions", {}, **body))[0] in (400, 404)
        assert alive(EngineError) <= before
    finally:
        gc.enable()


async def test_a_generation_that_is_cancelled_while_it_is_submitted_leaves_nothing(model: ServedModel) -> None:
    engine = SlowEngine()
    prompt = Prompt(compact_ids([1]), "x")
    generation = Generation(cast(Engine, engine), "x", [prompt], SamplingParams(), model=model)
    generation.cancel(InvalidRequest("no more"))
    with pytest.raises(InvalidRequest, match="no more"):
        await generation.submit()
    assert engine.open == 0
