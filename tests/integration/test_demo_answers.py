"""What a newcomer asks first gets a right, readable answer from the shipped demo model."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.demo import model_path
from tools.demo_model.corpus import make_corpus, normalise
from tools.demo_model.model import DemoModel, Shape
from tools.demo_model.recipe import Recipe

transformers: Any = pytest.importorskip("transformers")

QUESTIONS = Path(__file__).resolve().parents[1] / "data" / "demo_questions.toml"
WANTED_RIGHT = 54
MAX_NEW_TOKENS = 200


@dataclass(frozen=True)
class Question:
    """A question and the patterns that its answer must contain."""

    ask: str
    want: tuple[str, ...]

    def accepts(self, answer: str) -> bool:
        return all(re.search(pattern, answer, re.IGNORECASE) for pattern in self.want)


@dataclass(frozen=True)
class Answer:
    """A greedy answer, and whether the model ended it by itself."""

    text: str
    ended: bool


def questions() -> list[Question]:
    entries = tomllib.loads(QUESTIONS.read_text(encoding="utf-8"))["question"]
    return [Question(entry["ask"], tuple(entry["want"])) for entry in entries]


def greedy_answers(folder: Path, chats: list[list[dict[str, str]]]) -> list[Answer]:
    """Answer every chat of `chats` greedily with the model in `folder`, all in one batch."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    render = tokenizer.apply_chat_template
    texts = [render(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    with torch.inference_mode():
        out = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
    new = out[:, inputs["input_ids"].shape[1] :]
    return [
        Answer(tokenizer.decode(ids, skip_special_tokens=True), bool((ids == tokenizer.eos_token_id).any()))
        for ids in new
    ]


def one_question(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


@pytest.fixture(scope="module")
def answered() -> list[tuple[Question, Answer]]:
    asked = questions()
    answers = greedy_answers(model_path(), [one_question(question.ask) for question in asked])
    return list(zip(asked, answers, strict=True))


def test_sixty_questions_are_asked() -> None:
    assert len(questions()) == 60


@pytest.mark.slow
def test_no_test_question_occurs_in_the_training_corpus() -> None:
    held_out = {normalise(question.ask) for question in questions()}
    for turn in Recipe().rounds:
        talks = make_corpus(turn.size, turn.seed)
        assert not held_out & {normalise(e.question) for talk in talks for e in talk.exchanges}


def test_the_demo_model_knows_the_key_fact_in_at_least_54_of_60_answers(
    answered: list[tuple[Question, Answer]],
) -> None:
    wrong = [f"{asked.ask!r} -> {answer.text!r}" for asked, answer in answered if not asked.accepts(answer.text)]
    assert len(answered) - len(wrong) >= WANTED_RIGHT, "\n".join(wrong)


def test_every_answer_ends_by_itself(answered: list[tuple[Question, Answer]]) -> None:
    assert [question.ask for question, answer in answered if not answer.ended] == []


def test_a_follow_up_is_understood_from_the_conversation() -> None:
    chat = [
        *one_question("what is the port?"),
        {"role": "assistant", "content": "`--port` sets the API's port; the default is 8000."},
        *one_question("thank you! and how do I get rid of a model that I loaded?"),
    ]
    assert "`u`" in greedy_answers(model_path(), [chat])[0].text


def test_transformers_computes_what_the_training_computed() -> None:
    trained = DemoModel(Shape(vocab_size=4096)).eval()
    trained.load_state_dict(load_file(model_path() / "model.safetensors"))
    reference = transformers.AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32).eval()
    ids = torch.randint(6, 4096, (2, 300), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        ours, theirs = trained.logits(trained.hidden(ids, torch.float32)), reference(ids).logits
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)


def test_the_shipped_folder_is_small_and_complete() -> None:
    names = {path.name for path in model_path().iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= names
    assert sum(path.stat().st_size for path in model_path().iterdir()) < 24 * 2**20


@pytest.mark.parametrize("text", ["Grüße, 世界! 🙂", "a\n\n\tb  c", "`--max_prompts` = 16", ""])
def test_the_tokenizer_round_trips_any_text(text: str) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_path())
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
