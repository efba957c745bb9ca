"""The demo corpus: deterministic, broad, and made of facts that are whole."""

from __future__ import annotations

from random import Random

import pytest
from tokenizers import Tokenizer

from tools.demo_model.corpus import Conversation, Exchange, make_corpus, normalise
from tools.demo_model.examples import IGNORED, batches, encode
from tools.demo_model.facts import load_knowledge
from tools.demo_model.grammar import Grammar, GrammarError
from tools.demo_model.noise import roughen
from tools.demo_model.tokenizer import BOS, END, PAD, ROLES, token_id, train_tokenizer

SMALL = 2000


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    talks = make_corpus(SMALL, seed=5)
    return train_tokenizer((e.question + e.answer for talk in talks for e in talk.exchanges), vocab_size=1024)


def test_the_same_seed_makes_the_same_corpus() -> None:
    assert list(make_corpus(200, seed=3)) == list(make_corpus(200, seed=3))
    assert list(make_corpus(200, seed=3)) != list(make_corpus(200, seed=4))


def test_most_questions_of_the_corpus_are_different() -> None:
    asked = [normalise(e.question) for talk in make_corpus(SMALL, seed=5) for e in talk.exchanges]
    assert len(set(asked)) > 0.7 * len(asked)


def test_every_phrase_of_every_fact_expands() -> None:
    knowledge = load_knowledge()
    grammar, rng = Grammar(knowledge.classes), Random(0)
    for fact in knowledge.facts:
        for phrase in (*fact.about, *fact.do, *fact.ask):
            assert grammar.sample(phrase, rng)
    for follow_up in knowledge.follow_ups:
        for phrase in follow_up.ask:
            assert grammar.sample(phrase, rng)


def test_every_fact_reaches_the_corpus() -> None:
    answers = {e.answer for talk in make_corpus(20_000, seed=5) for e in talk.exchanges}
    assert [fact.id for fact in load_knowledge().facts if not answers & set(fact.answers)] == []


def test_the_corpus_holds_chats_with_and_without_a_system_prompt_and_plain_text() -> None:
    talks = list(make_corpus(SMALL, seed=5))
    assert any(talk.system for talk in talks)
    assert any(talk.system is None for talk in talks)
    assert any(not talk.chat for talk in talks)
    assert max(len(talk.exchanges) for talk in talks) > 8


def test_a_phrase_picks_one_alternative_and_tidies_spaces() -> None:
    grammar = Grammar({"x": ["one", "two"]})
    assert {grammar.sample("(a|b|) <x>?", Random(seed)) for seed in range(50)} == {
        "a one?", "b one?", "one?", "a two?", "b two?", "two?",
    }  # fmt: skip
    assert grammar.sample(r"f\(x\) < 3", Random(0)) == "f(x) < 3"


@pytest.mark.parametrize("phrase", ["(a|b", "a)", "<nobody>"])
def test_a_malformed_phrase_is_refused(phrase: str) -> None:
    with pytest.raises(GrammarError):
        Grammar({}).sample(phrase, Random(0))


def test_flag_names_survive_typing_mistakes() -> None:
    rng = Random(1)
    assert all(
        "--num_workers" in roughen("what does --num_workers mean?", {"mean": ["do"]}, rng).lower() for _ in range(500)
    )


def test_an_example_marks_the_answer_and_its_end_only(tokenizer: Tokenizer) -> None:
    example = encode(Conversation((Exchange("port?", "It is 8000."),), "Be brief."), tokenizer, 512)
    ids = {name: tokenizer.token_to_id(token) for name, token in (("bos", BOS), ("end", END), *ROLES.items())}
    assert example.ids[:2] == [ids["bos"], ids["system"]]
    answer = [token for token, learned in zip(example.ids, example.answer, strict=True) if learned]
    assert tokenizer.decode(answer[:-1]) == "It is 8000."
    assert answer[-1] == example.ids[-1] == ids["end"]
    assert example.ids.count(ids["end"]) == 3


def test_batches_keep_every_answer_token_and_the_token_budget(tokenizer: Tokenizer) -> None:
    examples = [encode(talk, tokenizer, 512) for talk in make_corpus(300, seed=5)]
    made = list(batches(examples, 2048, 0.0, token_id(tokenizer, PAD), Random(0)))
    learned = sum(int((batch.targets != IGNORED).sum()) for batch in made)
    assert learned == sum(sum(example.answer) for example in examples)
    assert all(batch.ids.numel() <= 2048 for batch in made)
