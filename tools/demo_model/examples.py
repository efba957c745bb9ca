"""From conversations to token batches: which tokens a model reads, and which of them it learns to write."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.demo_model.corpus import Conversation
from tools.demo_model.tokenizer import BOS, END, ROLES, token_id

IGNORED = -100
"""The target of a position that is not learned, as `torch.nn.functional.cross_entropy` takes it."""


@dataclass(frozen=True)
class Example:
    """Token ids of a conversation, and per token whether it belongs to an answer."""

    ids: list[int]
    answer: list[bool]


@dataclass(frozen=True)
class Batch:
    """`ids` and `targets`, both (rows, tokens); targets are the next ids, or `IGNORED`."""

    ids: Tensor
    targets: Tensor


def encode(conversation: Conversation, tokenizer: Tokenizer, max_length: int) -> Example:
    """Lay a conversation out as the chat template does (or as plain text) and mark its answers."""
    example = Example([token_id(tokenizer, BOS)], [False])
    end = token_id(tokenizer, END)

    def add(text: str, answer: bool, role: str | None = None) -> None:
        if role is not None:
            example.ids.append(token_id(tokenizer, ROLES[role]))
            example.answer.append(False)
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        if role is not None or answer:
            ids = [*ids, end]
        example.ids.extend(ids)
        example.answer.extend([answer] * len(ids))

    if conversation.system is not None:
        add(conversation.system, False, "system")
    for exchange in conversation.exchanges:
        add(exchange.question, False, "user" if conversation.chat else None)
        answer = exchange.answer if conversation.chat else "\n" + exchange.answer
        add(answer, True, "assistant" if conversation.chat else None)
    return Example(example.ids[:max_length], example.answer[:max_length])


def cut_last_answer(example: Example, rng: Random) -> Example:
    """Keep only the first tokens of the last answer.

    They decide which fact is given, which is the hard part; the rest is soon known by heart. Cutting it saves
    a third of the training time.
    """
    start = len(example.answer)
    while start > 0 and example.answer[start - 1]:
        start -= 1
    end = start + rng.randint(4, 16)
    return Example(example.ids[:end], example.answer[:end])


def batches(
    examples: Iterable[Example],
    tokens_per_batch: int,
    question_share: float,
    pad: int,
    rng: Random,
    window: int = 4000,
) -> Iterator[Batch]:
    """Group examples of like length, at most `tokens_per_batch` each, in random order within a window.

    All answer tokens are learned, and a random `question_share` of the rest (they shape the embeddings).
    """
    buffered: list[Example] = []
    for example in examples:
        buffered.append(example)
        if len(buffered) == window:
            yield from _window(buffered, tokens_per_batch, question_share, pad, rng)
            buffered = []
    yield from _window(buffered, tokens_per_batch, question_share, pad, rng)


def _window(
    buffered: list[Example], tokens_per_batch: int, question_share: float, pad: int, rng: Random
) -> Iterator[Batch]:
    groups: list[list[Example]] = [[]]
    for example in sorted(buffered, key=lambda example: len(example.ids)):
        if groups[-1] and (len(groups[-1]) + 1) * len(example.ids) > tokens_per_batch:
            groups.append([])
        groups[-1].append(example)
    rng.shuffle(groups)
    for group in groups:
        if group:
            yield _collate(group, question_share, pad, rng)


def _collate(group: list[Example], question_share: float, pad: int, rng: Random) -> Batch:
    width = max(len(example.ids) for example in group)
    ids = torch.full((len(group), width), pad, dtype=torch.long)
    targets = torch.full((len(group), width), IGNORED, dtype=torch.long)
    for row, example in enumerate(group):
        length = len(example.ids)
        ids[row, :length] = torch.tensor(example.ids)
        learned = [
            token if answer or rng.random() < question_share else IGNORED
            for token, answer in zip(example.ids[1:], example.answer[1:], strict=True)
        ]
        targets[row, : length - 1] = torch.tensor(learned)
    return Batch(ids, targets)
