"""Evaluation harnesses and retrieval over HTTP, on a real (tiny) model: the numbers are those of transformers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModel

from console.api.server import ApiServer, ApiSettings
from engine.config import EngineConfig, ModelSpec
from engine.engine import Engine
from engine.text.tokenizer import Tokenizer
from tests.fakes.oracle import reference_logits
from tests.fakes.tiny_models import make_tiny_model

CONTEXT, CONTINUATION = "The cat sat on the", " mat, and the dog ran."


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[Path, openai.AsyncOpenAI]]:
    """The model's folder, and a client of the server that serves it."""
    folder = make_tiny_model(tmp_path / "tiny")
    engine = Engine(EngineConfig(worker_host="thread", step_tokens=16))
    server = ApiServer(engine, ApiSettings(port=0))
    await engine.start()
    try:
        await engine.load(ModelSpec(path=folder, name="tiny", dtype="float32", kv_cache_tokens=2048))
        await server.start()
        base = f"{server.status().url}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as client:
            yield folder, client
    finally:
        await server.stop(drain_s=0.0)
        await engine.close(drain_s=0.0)


@pytest.mark.parametrize("tokens", [0, 1])
async def test_a_harness_scores_a_continuation_as_transformers_does(
    served: tuple[Path, openai.AsyncOpenAI], tokens: int
) -> None:
    folder, client = served
    tokenizer = Tokenizer.from_folder(folder)
    start = len(tokenizer.encode(CONTEXT))
    ids = tokenizer.encode(CONTEXT) + tokenizer.encode(CONTINUATION, add_special_tokens=False)
    # What lm-evaluation-harness sends for a log-likelihood (local-completions, tokenized_requests).
    body: dict[str, Any] = {"prompt": [ids], "logprobs": 1, "max_tokens": tokens, "temperature": 0, "seed": 1234}
    answer = await client.completions.create(model="tiny", echo=True, **body)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == len(ids) + tokens

    logs = reference_logits(folder, ids).log_softmax(dim=-1)
    expected = sum(float(logs[place - 1, ids[place]]) for place in range(start, len(ids)))
    assert sum(logprobs.token_logprobs[start : len(ids)]) == pytest.approx(expected, abs=1e-3)
    for place in range(start, len(ids)):
        told = max(logprobs.top_logprobs[place].values())
        assert told == pytest.approx(float(logs[place - 1].max()), abs=2e-4)


async def test_vectors_over_http_are_transformers_pooled_hidden_states(
    served: tuple[Path, openai.AsyncOpenAI],
) -> None:
    folder, client = served
    texts = [CONTEXT, CONTEXT + CONTINUATION]
    answer = await client.embeddings.create(model="tiny", input=texts)
    reference = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    tokenizer = Tokenizer.from_folder(folder)
    for text, found in zip(texts, answer.data, strict=True):
        with torch.inference_mode():
            states = reference(torch.tensor([tokenizer.encode(text)])).last_hidden_state[0]
        expected = torch.nn.functional.normalize(states.mean(dim=0), dim=0)
        torch.testing.assert_close(torch.tensor(found.embedding), expected, atol=1e-5, rtol=1e-4)
