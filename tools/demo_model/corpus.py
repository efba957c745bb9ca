"""The training conversations: facts asked in thousands of ways, small talk, and questions on other matters.

The corpus is a pure function of (facts, seed): the same seed gives the same conversations.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from random import Random

from tools.demo_model.facts import Fact, FollowUp, KnowledgeBase, load_knowledge
from tools.demo_model.grammar import Grammar
from tools.demo_model.noise import roughen

_NOT_LETTERS = re.compile(r"[^a-z0-9]+")


@dataclass(frozen=True)
class Exchange:
    """One question and the answer to learn."""

    question: str
    answer: str


@dataclass(frozen=True)
class Conversation:
    """Exchanges in order; `system` is None without a system prompt, `chat` is False for plain text."""

    exchanges: tuple[Exchange, ...]
    system: str | None = None
    chat: bool = True


def normalise(question: str) -> str:
    """Fold case and punctuation, to compare questions by their words alone."""
    return _NOT_LETTERS.sub(" ", question.lower()).strip()


def make_corpus(size: int, seed: int) -> Iterator[Conversation]:
    """Yield `size` conversations drawn from the shipped facts."""
    maker = CorpusMaker(load_knowledge(), Random(seed))
    for _ in range(size):
        yield maker.conversation()


class CorpusMaker:
    """Draws conversations from a knowledge base with a given random generator."""

    def __init__(self, knowledge: KnowledgeBase, rng: Random) -> None:
        self._rng = rng
        self._grammar = Grammar(knowledge.classes)
        self._frames = knowledge.frames
        self._synonyms = knowledge.synonyms
        self._systems = knowledge.systems
        self._facts = knowledge.facts
        self._shares = list(accumulate(fact.weight for fact in knowledge.facts))
        self._follow_ups: dict[str, list[FollowUp]] = defaultdict(list)
        for follow_up in knowledge.follow_ups:
            for fact_id in follow_up.after:
                self._follow_ups[fact_id].append(follow_up)

    def conversation(self) -> Conversation:
        """Draw one conversation: mostly one or two exchanges, sometimes a long one or plain text."""
        rng = self._rng
        kind = rng.random()
        if kind < 0.05:
            return Conversation((self._exchange(self._fact()),), chat=False)
        system = rng.choice(self._systems) if rng.random() < 0.3 else None
        if kind < 0.72:
            count = 1
        elif kind < 0.94:
            count = 2
        else:
            count = rng.randint(3, 30) if rng.random() < 0.1 else rng.randint(3, 10)
        return Conversation(tuple(self._exchanges(count)), system)

    def _exchanges(self, count: int) -> Iterator[Exchange]:
        previous: str | None = None
        for _ in range(count):
            follow_ups = self._follow_ups.get(previous or "", [])
            if follow_ups and self._rng.random() < 0.6:
                follow_up = self._rng.choice(follow_ups)
                question = self._ask(follow_up.ask)
                yield Exchange(roughen(question, self._synonyms, self._rng), self._rng.choice(follow_up.answers))
                previous = None
                continue
            fact = self._fact(followable=count > 1 and self._rng.random() < 0.5)
            yield self._exchange(fact)
            previous = fact.id

    def _fact(self, followable: bool = False) -> Fact:
        while True:
            fact = self._rng.choices(self._facts, cum_weights=self._shares)[0]
            if not followable or fact.id in self._follow_ups:
                return fact

    def _exchange(self, fact: Fact) -> Exchange:
        return Exchange(self._question(fact), self._rng.choice(fact.answers))

    def _question(self, fact: Fact) -> str:
        rng = self._rng
        kinds = [kind for kind in ("about", "do", "ask") if getattr(fact, kind)]
        weights = [3.0 if kind == "ask" else 2.0 for kind in kinds]
        kind = rng.choices(kinds, weights)[0]
        question = self._ask(getattr(fact, kind))
        if kind != "ask":
            frame = self._ask(getattr(self._frames, kind))
            question = frame.replace("{x}", question)
        if not fact.plain:
            question = self._wrap(question)
        return roughen(question, self._synonyms, rng)

    def _ask(self, phrases: tuple[str, ...]) -> str:
        return self._grammar.sample(self._rng.choice(phrases), self._rng)

    def _wrap(self, question: str) -> str:
        rng = self._rng
        if rng.random() < 0.28:
            question = self._grammar.sample(rng.choice(self._frames.before), rng) + " " + question
        if rng.random() < 0.16:
            ending = "?" if question.endswith("?") else ""
            after = rng.choice(self._frames.after)
            tail = self._grammar.sample(after, rng)
            question = question.rstrip("?") + ("" if after.startswith(",") else " ") + tail
            question = question.rstrip("?") + ending
        return question
