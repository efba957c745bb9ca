"""The GPU checks drive exllamav2's own generator, over stubbed kernels: they end, and find what they should."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from engine.config import ModelSpec
from tests.fakes.exllama import VOCAB_SIZE, RealExllama
from tests.gpu import answers, check_formats, check_serving, check_speed
from tests.gpu.models import TINY

SHAPE = replace(TINY, vocab=VOCAB_SIZE)
Generator = Callable[[], RealExllama]
GENERATORS: dict[str, Generator] = {
    "alone": lambda: RealExllama(max_model_len=4096),
    "with a draft model": lambda: RealExllama(max_model_len=4096, draft_tokens=3),
    "with n-grams": lambda: RealExllama(max_model_len=4096, draft_tokens=3, ngram=True),
}


@pytest.fixture(params=list(GENERATORS))
def spec(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelSpec:
    """What is loaded through create_backend is one of these generators."""
    made = GENERATORS[request.param]
    for module in (answers, check_serving, check_speed):
        monkeypatch.setattr(module, "create_backend", lambda spec: made().backend())
    monkeypatch.setattr(check_serving, "TINY", SHAPE)
    (tmp_path / "output.safetensors").write_bytes(bytes(1 << 20))
    ngram = request.param == "with n-grams"
    return ModelSpec(path=tmp_path, name=request.param, backend="exllamav2", kv_cache_tokens=16384, ngram_draft=ngram)


def test_it_is_timed(spec: ModelSpec) -> None:
    rows = list(check_speed.backend_rows(spec, "exllamav2", SHAPE, prefills=(600,), decodes=(1, 5), steps=3))
    assert [row.name.partition(": ")[2] for row in rows] == [
        "prompt of 600",
        "step of 1",
        "weights read, step of 1",
        "step of 5",
        "weights read, step of 5",
        "step of 5, top_p",
    ]
    assert all(row.value is not None and row.value > 0 for row in rows)


def test_it_serves_prompts_that_come_while_others_decode(spec: ModelSpec) -> None:
    rows = list(check_serving.undisturbed(spec, (5, 12, 40, 300, 700)))
    assert [row.verdict for row in rows] == ["passed", "passed"]


def test_its_answers_have_as_many_tokens_as_were_asked_for(spec: ModelSpec) -> None:
    asked = check_formats.asked_by(spec, 6, VOCAB_SIZE)
    found = answers.ask(spec, asked, 20)
    assert [len(each) for each in found.answers] == [20] * 6
    assert all(len(step.top) == 20 for each in found.answers for step in each)
    assert (found.drafted > 0) == (spec.name != "alone")
