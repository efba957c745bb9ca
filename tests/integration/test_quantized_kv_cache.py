"""The torch backend over keys and values of 8 and 4 bits: an answer does not depend on how it came about."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import CacheBits
from tests.fakes.tiny_models import make_tiny_model
from tests.integration.torch_backend.running import Run, ask, load, prompt


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"), with_tokenizer=False)


@pytest.mark.parametrize("page_tokens", [8, 16], ids=["gathered", "native"])
@pytest.mark.parametrize("bits", [8, 4])
def test_batches_chunks_preemption_and_prefix_hits_leave_greedy_answers_as_they_are(
    llama: Path, bits: CacheBits, page_tokens: int
) -> None:
    requests = [ask(str(salt), prompt(salt, 20)) for salt in range(4)]
    expected = {
        each.id: Run(load(llama, cache_bits=bits, page_tokens=page_tokens), each).to_end()[each.id] for each in requests
    }
    crowded = load(llama, cache_bits=bits, page_tokens=page_tokens, kv_tokens=80, step_tokens=16)
    assert Run(crowded, *requests).to_end() == expected
    assert crowded.stats().preemptions > 0
    again = Run(crowded, ask("again", prompt(0)))
    assert again.to_end()["again"] == expected["0"]
    hit = Run(crowded, ask("hit", prompt(0)))
    assert (hit.to_end()["hit"], hit.cached) == (expected["0"], {"hit": 16})
