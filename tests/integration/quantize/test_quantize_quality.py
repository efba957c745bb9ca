"""What the demo model still knows when it is quantised: the more bits, the more."""

from __future__ import annotations

import asyncio
import re
import tomllib
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.backends.base import BackendRequest
from engine.backends.scheduler.batch import ChunkInput
from engine.backends.torch.backend import TorchBackend
from engine.config import ModelSpec, SamplingParams
from engine.demo import model_path
from engine.text.tokenizer import Tokenizer
from tests.fakes.oracle import PAGE_TOKENS, ignore_progress, load_runner, never
from tools.demo_model.corpus import make_corpus
from tools.exl2_writer.quantize import quantize_folder

QUESTIONS = Path(__file__).resolve().parents[2] / "data" / "demo_questions.toml"
HELD_OUT_SEED = 987_654_321
"""No round of the demo model's training has it."""

ANSWER_TOKENS = 120

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def demo_at(tmp_path_factory: pytest.TempPathFactory) -> dict[float, Path]:
    """The demo model at some widths."""
    folder = tmp_path_factory.mktemp("demo")
    made = {bits: folder / f"{bits:g}" for bits in (2.5, 4.0, 6.0, 8.0)}
    for bits, target in made.items():
        quantize_folder(model_path(), target, bits=bits)
    return made


@dataclass(frozen=True)
class Question:
    """A question of the demo model's examination, and the patterns that its answer must contain."""

    ask: str
    want: tuple[str, ...]

    def accepts(self, answer: str) -> bool:
        return all(re.search(pattern, answer, re.IGNORECASE) for pattern in self.want)


def examination(count: int) -> list[Question]:
    entries = tomllib.loads(QUESTIONS.read_text(encoding="utf-8"))["question"][:count]
    return [Question(entry["ask"], tuple(entry["want"])) for entry in entries]


def greedy_answers(folder: Path, questions: list[Question]) -> list[str]:
    """What the torch backend answers, all in one batch."""
    backend, tokenizer = TorchBackend(), Tokenizer.from_folder(folder)
    spec = ModelSpec(path=folder, name="demo", backend="torch", device="cpu", dtype="float32", kv_cache_tokens=8192)
    backend.load(spec, max_prompts=64, step_tokens=512, page_tokens=16, report=ignore_progress, cancelled=never)
    answers: dict[str, list[int]] = {question.ask: [] for question in questions}
    for question in questions:
        text = asyncio.run(tokenizer.apply_chat_template([{"role": "user", "content": question.ask}]))
        backend.submit(
            BackendRequest(
                id=question.ask,
                prompt_ids=tokenizer.encode(text, add_special_tokens=False),
                params=SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, seed=0),
                end_token_ids=tokenizer.eos_token_ids,
            )
        )
    while backend.has_work():
        for event in backend.step():
            if event.token_id is not None:
                answers[event.request_id].append(event.token_id)
            if event.token_id in tokenizer.eos_token_ids or len(answers[event.request_id]) == ANSWER_TOKENS:
                backend.cancel(event.request_id)
    backend.unload()
    return [tokenizer.decode(answer) for answer in answers.values()]


def test_the_demo_model_at_6_bits_knows_what_it_knew(demo_at: dict[float, Path]) -> None:
    questions = examination(12)
    known = [
        question
        for question, answer in zip(questions, greedy_answers(model_path(), questions), strict=True)
        if question.accepts(answer)
    ]
    assert len(known) >= 8
    answers = greedy_answers(demo_at[6.0], known)
    wrong = [f"{q.ask!r} -> {answer!r}" for q, answer in zip(known, answers, strict=True) if not q.accepts(answer)]
    assert len(wrong) <= 1, "\n".join(wrong)


def next_token_logprobs(folder: Path, prompts: list[list[int]]) -> Tensor:
    """Log-probabilities after each prompt, float32 [prompts, vocabulary]."""
    runner = load_runner(folder)
    pages = list(range(64))
    logits = [runner.forward([ChunkInput(prompt, 0, pages, sample=True)])[0] for prompt in prompts]
    return torch.stack(logits).log_softmax(dim=-1)


def held_out_prompts(count: int) -> list[list[int]]:
    """Beginnings of answers that the demo model was not trained on."""
    tokenizer = Tokenizer.from_folder(model_path())
    prompts = []
    for number, talk in enumerate(make_corpus(count, HELD_OUT_SEED)):
        asked, answered = talk.exchanges[0].question, talk.exchanges[0].answer
        chat: list[dict[str, Any]] = [{"role": "user", "content": asked}]
        text = asyncio.run(tokenizer.apply_chat_template(chat)) + answered[: 8 * (number % 5)]
        prompts.append(tokenizer.encode(text, add_special_tokens=False)[: 64 * PAGE_TOKENS])
    return prompts


def test_more_bits_stray_less_from_the_original(demo_at: dict[float, Path]) -> None:
    """By the mean Kullback-Leibler divergence of the next token on held-out text."""
    prompts = held_out_prompts(120)
    original = next_token_logprobs(model_path(), prompts)
    strayed = {
        bits: float((original.exp() * (original - next_token_logprobs(folder, prompts))).sum(dim=-1).mean())
        for bits, folder in demo_at.items()
    }
    assert all(less > more for less, more in pairwise(strayed[bits] for bits in sorted(strayed)))
    assert strayed[8.0] < 1e-3
