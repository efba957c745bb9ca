"""A real GGUF file, SmolLM2-135M-Instruct as Q4_1, answers here as it does in llama.cpp."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from engine.backends.torch.runner import ModelRunner
from engine.config import DtypeName
from engine.text.tokenizer import Tokenizer
from tests.fakes.llama_cpp import Ask, llama_cpp
from tests.fakes.oracle import Driver, load_runner
from tests.fakes.published_sources import SMOLLM2, source_folder

pytestmark = pytest.mark.long

STEPS = 32
TEXT = (Path(__file__).parents[2] / "LICENSE").read_text()
NEAR = 0.35
"""Of log-probabilities of the exact numbers. Both round what they multiply codes with to 8 bits, which moves each by
0.05 to 0.2 (standard deviation)."""

QUESTIONS = (
    "Hi",
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain why the sky is blue.",
    "Count from 1 to 20.",
    "Translate 'good morning' into French.",
    "Name three mammals.",
    "What is 12 + 30?",
    "Write a Python function that adds two numbers.",
    "Tell me a short story about a dragon.",
    "Who wrote Hamlet?",
    "List the planets of the solar system.",
    "What is photosynthesis?",
    "How do I boil an egg?",
    "Give me a recipe for pancakes.",
    "What is a prime number?",
    "Describe the moon.",
    "What does HTTP stand for?",
    "Why do cats purr?",
    "Say something in Spanish.",
)
_LETTERS = "abcXYZ 019 \n\t.,'!?-_()éß日本😀\u0301½٣ 's 'RE"
_TEXTS = (
    "",
    "  two  spaces   three",
    "a\n\nb\r\n\tc\n \n d",
    "12345 6.78 1,000,000 ½²",
    "emoji 😀👩‍👩‍👧‍👦 🇩🇪 naïve café 日本語 한국어 العربية हिन्दी",
    "<|im_start|>user\nHi<|im_end|>\na<|endoftext|>b <repo_name>c",
    "\u00a0nbsp\u2003em\u200bzero \ufeffbom",
)


@pytest.fixture(scope="module")
def model() -> Path:
    return source_folder(SMOLLM2) / SMOLLM2.marker


@pytest.fixture(scope="module")
def ask(model: Path) -> Iterator[Ask]:
    with llama_cpp(model) as asking:
        yield asking


def their_ids(ask: Ask, text: str) -> list[int]:
    ids: list[int] = ask("/tokenize", {"content": text, "add_special": True, "parse_special": True})["tokens"]
    return ids


def test_texts_become_the_ids_that_llama_cpp_makes_of_them(model: Path, ask: Ask) -> None:
    tokenizer, draw = Tokenizer.from_folder(model), random.Random(0)
    texts = [*_TEXTS, *("".join(draw.choices(_LETTERS, k=draw.randint(1, 40))) for _ in range(300))]
    assert [tokenizer.encode(text) for text in texts] == [their_ids(ask, text) for text in texts]


def test_a_prompt_by_the_chat_template_is_the_one_of_llama_cpp_and_of_transformers(model: Path, ask: Ask) -> None:
    tokenizer = Tokenizer.from_folder(model)
    first = [{"role": "user", "content": "Hi"}]
    later = [{"role": "system", "content": "Be brief."}, *first, {"role": "assistant", "content": "Yes?"}, *first]
    reads_gguf: Any = AutoTokenizer
    oracle = reads_gguf.from_pretrained(model.parent, gguf_file=model.name)

    async def rendered() -> list[str]:
        try:
            return [await tokenizer.apply_chat_template(messages) for messages in (first, later)]
        finally:
            await tokenizer.close()

    theirs = [ask("/apply-template", {"messages": messages})["prompt"] for messages in (first, later)]
    ours = asyncio.run(rendered())
    assert ours == theirs
    assert ours == [
        oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) for messages in (first, later)
    ]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("native", "questions"), [(None, QUESTIONS), (False, QUESTIONS[::5])], ids=["from codes", "decoded"]
)
def test_greedy_answers_are_those_of_llama_cpp_or_part_at_a_near_tie(
    model: Path, ask: Ask, native: bool | None, questions: Sequence[str]
) -> None:
    """Decoded, each token takes four times as long."""
    runner, ends = load_runner(model, native=native), Tokenizer.from_folder(model).eos_token_ids
    exact = runner if native is False else load_runner(model, native=False)
    for question in questions:
        prompt = ask("/apply-template", {"messages": [{"role": "user", "content": question}]})["prompt"]
        ids = their_ids(ask, prompt)
        asked = {"prompt": ids, "n_predict": STEPS, "temperature": 0, "n_probs": 5, "cache_prompt": False}
        answer = ask("/completion", asked | {"return_tokens": True})
        tokens = [token for token in answer["tokens"] if token not in ends]
        driver = Driver(runner)
        running = driver.add(ids, room=STEPS + 1)
        driver.greedy([running], len(tokens))
        ours = running.tokens[len(ids) :]
        parted = next((at for at, (own, their) in enumerate(zip(ours, tokens, strict=True)) if own != their), None)
        if parted is not None:
            chosen = ours[parted], tokens[parted]
            assert_near_tie(question, exact, ids + tokens[:parted], chosen)


@pytest.fixture(scope="module")
def their_scores(model: Path, ask: Ask) -> tuple[list[int], Tensor]:
    """The tokens of a text, and the log-probability in llama.cpp of each after the ones before it."""
    ids = their_ids(ask, TEXT)
    scores = []
    for count in range(1, len(ids)):
        for most in (2_000, 49_152):
            asked = {"prompt": ids[:count], "n_predict": 1, "temperature": 0, "n_probs": most, "cache_prompt": True}
            found = ask("/completion", asked)["completion_probabilities"][0]["top_logprobs"]
            score = next((each["logprob"] for each in found if each["id"] == ids[count]), None)
            if score is not None:
                scores.append(score)
                break
    assert len(scores) == len(ids) - 1
    return ids, torch.tensor(scores)


def scores_of(model: Path, ids: list[int], **settings: Any) -> Tensor:
    """The log-probability here of each token after the ones before it."""
    driver = Driver(load_runner(model, **settings))
    running = driver.add(ids)
    for _ in ids[1:]:
        driver.feed((running, 1))
    logits = torch.stack(running.logits).float().log_softmax(-1)
    return logits.gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)


@pytest.fixture(scope="module")
def exact_scores(model: Path, their_scores: tuple[list[int], Tensor]) -> Tensor:
    """Likewise, of the decoded numbers in float32."""
    return scores_of(model, their_scores[0], native=False)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_text_is_as_probable_as_in_llama_cpp_and_as_near_to_the_exact_numbers(
    model: Path, their_scores: tuple[list[int], Tensor], exact_scores: Tensor, dtype: DtypeName
) -> None:
    """Perplexities differ by no more than three standard errors: one of so short a text is known to a hundredth."""
    ids, theirs = their_scores
    ours = scores_of(model, ids, dtype=dtype)
    difference = ours - theirs
    assert abs(float(difference.mean())) < 3 * float(difference.std()) / math.sqrt(len(difference))
    assert float((ours - exact_scores).std()) < 1.25 * float((theirs - exact_scores).std())


@pytest.mark.timeout(600)
def test_the_decoded_model_is_the_one_of_llama_cpp_but_for_its_rounding(
    their_scores: tuple[list[int], Tensor], exact_scores: Tensor
) -> None:
    difference = exact_scores - their_scores[1]
    assert abs(float(difference.mean())) < 3 * float(difference.std()) / math.sqrt(len(difference))
    assert float(difference.std()) < 0.25


def assert_near_tie(question: str, exact: ModelRunner, tokens: list[int], choices: tuple[int, int]) -> None:
    """By the exact numbers, both tokens are about as probable as each other after these, and none is much more."""
    driver = Driver(exact)
    scores = driver.feed((driver.add(tokens), None))[-1].log_softmax(-1)
    assert float(scores.max()) - min(float(scores[token]) for token in choices) < NEAR, question
