"""POST /v1/embeddings over a foretold backend, by hand and by the openai client."""

from __future__ import annotations

import asyncio
import base64
import struct
from pathlib import Path
from typing import Any

import openai
import pytest

from engine.config import EngineConfig
from tests.api.harness import Served, serving
from tests.fakes.backend import HIDDEN_SIZE, FakeBackend, Gate, vector_of
from tests.fakes.model import EOS_ID, fake_spec, write_fake_model


async def test_a_text_becomes_one_vector(api: Served) -> None:
    answer = await api.post("/v1/embeddings", input="hello", model="fake")
    assert answer == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": vector_of(b"hello")}],
        "model": "fake",
        "usage": {"prompt_tokens": 5, "total_tokens": 5},
        "pooling": "mean",
    }


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        (["ab", "c"], [b"ab", b"c"]),
        ([97, 98], [b"ab"]),
        ([[97, 98], [99]], [b"ab", b"c"]),
    ],
    ids=["texts", "ids", "arrays of ids"],
)
async def test_every_kind_of_input_gives_vectors_in_its_order(api: Served, given: Any, prompts: list[bytes]) -> None:
    answer = await api.post("/v1/embeddings", input=given)
    assert [each["embedding"] for each in answer["data"]] == [vector_of(prompt) for prompt in prompts]
    assert [each["index"] for each in answer["data"]] == list(range(len(prompts)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))


async def test_base64_is_float32_little_endian(api: Served) -> None:
    answer = await api.post("/v1/embeddings", input="hello", encoding_format="base64")
    raw = base64.b64decode(answer["data"][0]["embedding"])
    assert list(struct.unpack(f"<{HIDDEN_SIZE}f", raw)) == vector_of(b"hello")


async def test_the_openai_client_reads_vectors(api: Served) -> None:
    async with openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as client:
        answer = await client.embeddings.create(model="fake", input=["ab", "c"], dimensions=HIDDEN_SIZE, user="me")
    assert [each.embedding for each in answer.data] == [vector_of(b"ab"), vector_of(b"c")]


async def test_more_inputs_than_may_be_queued_at_once_are_embedded_by_and_by(tmp_path: Path) -> None:
    config = EngineConfig(worker_host="thread", max_prompts=2, max_queue=4)
    async with serving(tmp_path, config=config) as api:
        texts = [f"text {number}" for number in range(30)]
        answer = await api.post("/v1/embeddings", input=texts)
        assert [each["embedding"] for each in answer["data"]] == [vector_of(text.encode()) for text in texts]
        assert answer["usage"]["prompt_tokens"] == sum(map(len, texts))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["x", ""]}, "input"),
        ({"input": 3}, "input"),
        ({"input": [[999]]}, "input"),
        ({"input": ["x"] * 2049}, "input"),
        ({"input": "x" * 5000}, "input"),
        ({"input": "x", "dimensions": 8}, "dimensions"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "x", "truncate_prompt_tokens": 5000}, "truncate_prompt_tokens"),
        ({"input": "x", "temperature": 1}, "temperature"),
        ({"input": "x", "model": "other"}, "model"),
    ],
)
async def test_a_bad_value_is_refused_by_its_field_s_name(api: Served, body: dict[str, Any], param: str) -> None:
    status = 404 if param == "model" else 400
    assert (await api.refusal("/v1/embeddings", status=status, **body))["param"] == param


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("", "input is empty"),
        ([], "input is an empty array"),
        ([""], "input[0] is empty"),
        (["a", ""], "input[1] is empty"),
        ([[97], []], "input[1] is empty"),
    ],
)
async def test_an_empty_text_is_refused_also_where_the_model_begins_every_text_with_a_token(
    tmp_path: Path, given: Any, sentence: str
) -> None:
    spec = fake_spec(write_fake_model(tmp_path, starts=True))
    async with serving(tmp_path, spec=spec) as api:
        assert (await api.post("/tokenize", prompt=""))["tokens"] == [EOS_ID]
        refused = await api.refusal("/v1/embeddings", input=given)
        assert (refused["message"], refused["param"]) == (sentence, "input")


async def test_a_backend_without_hidden_states_says_so(tmp_path: Path) -> None:
    async with serving(tmp_path, FakeBackend(embeds=False)) as api:
        refused = await api.refusal("/v1/embeddings", input="x", dimensions=8)
        assert "embeddings are not supported by the fake backend" in refused["message"]


async def test_a_queue_that_is_full_is_told_with_when_to_try_again(tmp_path: Path) -> None:
    gate = Gate()
    config = EngineConfig(worker_host="thread", max_prompts=1, max_queue=0)
    async with serving(tmp_path, FakeBackend(gate=gate), config=config) as api:
        first = asyncio.create_task(api.post("/v1/embeddings", input="a"))
        await api.until_row(state="prefill")
        async with api.http.post("/v1/embeddings", json={"input": "b"}) as response:
            assert response.status == 429
            assert int(response.headers["Retry-After"]) >= 1
        gate.open()
        assert (await first)["data"][0]["embedding"] == vector_of(b"a")


async def test_a_client_that_leaves_cancels_all_its_inputs(tmp_path: Path) -> None:
    gate = Gate()
    async with serving(tmp_path, FakeBackend(gate=gate)) as api:
        asking = asyncio.create_task(api.post("/v1/embeddings", input=["a", "b"]))
        await asyncio.to_thread(gate.wait_until_reached)
        asking.cancel()
        await api.until_row(finish="cancelled")
        gate.open()
        answer = await api.post("/v1/embeddings", input="c")
        assert answer["data"][0]["embedding"] == vector_of(b"c")
        assert not [row for row in api.engine.publish().requests if row.finish is None]


async def test_a_deadline_is_told_as_one(tmp_path: Path) -> None:
    config = EngineConfig(worker_host="thread", timeout_s=0.05)
    async with serving(tmp_path, FakeBackend(gate=Gate()), config=config) as api:
        refused = await api.refusal("/v1/embeddings", status=504, input="a")
        assert refused["code"] == "request_timeout"


async def test_vectors_count_in_prompts_and_not_in_times_to_a_token(api: Served) -> None:
    await api.post("/v1/embeddings", input="hello")
    await api.until_row(finish="stop")
    (row,) = api.engine.publish().requests
    assert (row.state, row.prompt_tokens, row.output_tokens, row.ttft_s, row.itl_s) == ("finished", 5, 0, None, None)
    assert api.engine.publish().totals.prompt_tokens == 5
    async with api.http.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    counts = [line for line in lines if "time_to_first_token_seconds_count" in line]
    assert counts
    assert all(line.endswith((" 0", " 0.0")) for line in counts)
