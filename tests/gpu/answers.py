"""Greedy answers of one backend, and whether two backends agree on them.

Two kernels that compute the same thing differ in the last bits, so greedy tokens may part where the two best tokens are
nearly equal. Agreement therefore means: the same tokens with log-probabilities within a tolerance, up to a place where
the other's token was within that tolerance of the best one. A wrong attention is off by far more, from the first token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from engine.backends.base import BackendRequest, LoadedModel, TokenEvent
from engine.config import MAX_LOGPROBS, AdapterSpec, ModelSpec, SamplingParams
from engine.worker_process.factory import create_backend

PROMPT_LENGTHS = (1, 3, 255, 256, 257, 500, 700, 1000)
"""Around the page's 256 tokens, and several pages."""

_DRAFT_SLOTS = 32
"""Slots beyond those of the requests, where tokens are drafted: the torch backend takes only free ones for drafts."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A token with its log-probability and the best ones at its place, as (id, logprob)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Answers(msgspec.Struct, frozen=True, kw_only=True):
    """What a backend said to each prompt, and what it had loaded. drafted, accepted, preemptions: as in its stats."""

    model: LoadedModel
    answers: list[list[Step]]
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0

    @property
    def tokens(self) -> list[list[int]]:
        """The answers' tokens alone."""
        return [[step.token_id for step in answer] for answer in self.answers]


@dataclass(frozen=True, slots=True)
class Agreement:
    """How well two sets of answers agree; differences in nats.

    compared: tokens that are equal.  longest: of them, in the answer that stayed equal longest.  parted: answers that
    went another way somewhere.  worst_gap: the most that the other's token was below the best one there.
    worst_difference: of the equal tokens' log-probabilities.
    """

    compared: int
    longest: int
    parted: int
    worst_gap: float
    worst_difference: float

    def within(self, tolerance: float, steps: int = 1) -> bool:
        """Whether no difference is larger, and some answer was compared for at least that many steps."""
        return self.longest >= steps and max(self.worst_gap, self.worst_difference) <= tolerance

    def __str__(self) -> str:
        return (
            f"{self.compared} equal tokens, {self.longest} in a row, "
            f"log-probabilities within {self.worst_difference:.4f}; "
            f"{self.parted} answers parted, at gaps of at most {self.worst_gap:.4f}"
        )


def prompts(count: int, vocab: int) -> list[list[int]]:
    """`count` prompts of the lengths above, no two alike; tokens from 3 on, for the first three are special."""
    lengths = [PROMPT_LENGTHS[number % len(PROMPT_LENGTHS)] for number in range(count)]
    return [
        [3 + (number * 131 + index * 7 + index * index % 89) % (vocab - 3) for index in range(length)]
        for number, length in enumerate(lengths)
    ]


def ask(
    spec: ModelSpec,
    asked: Sequence[Sequence[int]],
    tokens: int,
    *,
    params: Sequence[SamplingParams] = (SamplingParams(temperature=0.0, seed=1),),
    adapter: AdapterSpec | None = None,
    page_tokens: int = 256,
) -> Answers:
    """Answers of `tokens` tokens to all prompts in one batch, from the backend that `spec` names; greedy ones unless
    there are `params`, by turns.  adapter: what to compute all with."""
    backend = create_backend(spec)
    drafts = spec.backend == "torch" and (spec.ngram_draft or spec.draft_model is not None)
    model = backend.load(
        spec,
        max_prompts=len(asked) + (_DRAFT_SLOTS if drafts else 0),
        step_tokens=512,
        page_tokens=page_tokens,
        report=lambda progress: None,
        cancelled=lambda: False,
    )
    try:
        if adapter is not None:
            backend.attach(adapter)
        for number, prompt in enumerate(asked):
            its = msgspec.structs.replace(
                params[number % len(params)], max_tokens=tokens, logprobs=MAX_LOGPROBS, ignore_eos=True
            )
            key = adapter.key if adapter is not None else ""
            backend.submit(BackendRequest(id=str(number), prompt_ids=list(prompt), params=its, adapter=key))
        answers: list[list[Step]] = [[] for _ in asked]
        while backend.has_work():
            for event in backend.step():
                _take(event, answers[int(event.request_id)])
                if len(answers[int(event.request_id)]) >= tokens:
                    backend.cancel(event.request_id)
        stats = backend.stats()
        return Answers(
            model=model,
            answers=[answer[:tokens] for answer in answers],  # drafts can go beyond
            drafted=stats.draft_tokens,
            accepted=stats.draft_accepted,
            preemptions=stats.preemptions,
        )
    finally:
        backend.unload()


def _take(event: TokenEvent, answer: list[Step]) -> None:
    if event.finish == "error":
        raise RuntimeError(f"request {event.request_id} failed: {event.message}")
    if event.token_id is not None and event.logprob is not None:
        answer.append(Step(token_id=event.token_id, logprob=event.logprob.logprob, top=event.logprob.top))


def agreement(reference: Answers, other: Answers) -> Agreement:
    """How `other` compares to `reference`, answer by answer up to where each parts."""
    compared = longest = parted = 0
    worst_gap = worst_difference = 0.0
    for expected, got in zip(reference.answers, other.answers, strict=True):
        length = 0
        for mine, theirs in zip(expected, got, strict=True):
            if mine.token_id != theirs.token_id:
                parted += 1
                worst_gap = max(worst_gap, _gap(mine, theirs.token_id))
                break
            length += 1
            worst_difference = max(worst_difference, abs(mine.logprob - theirs.logprob))
        compared, longest = compared + length, max(longest, length)
    return Agreement(compared, longest, parted, worst_gap, worst_difference)


def _gap(step: Step, token_id: int) -> float:
    """Nats by which a token is less likely than the one chosen; infinite where it is not among the best."""
    return step.logprob - dict(step.top).get(token_id, -math.inf)
