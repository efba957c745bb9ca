"""Conversations of people, as ShareGPT exports them: what was asked, and how long the answer was.

The format is a JSON array of {"conversations": [{"from": "human" | "user" | "gpt" | ..., "value": text}, ...]}; the
first turn is the prompt, the second the answer whose length is asked for again.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import msgspec

from console.bench.prompts import Material
from engine.errors import InvalidRequest

LEAST_TOKENS = 4
_ASKING = ("human", "user")


class _Turn(msgspec.Struct, rename={"who": "from"}):
    value: str
    who: str = "human"


class _Talk(msgspec.Struct):
    conversations: list[_Turn] = []


class Exchange(msgspec.Struct, frozen=True):
    """A question, and its answer."""

    asked: str
    answered: str


def read_trace(file: Path) -> tuple[Exchange, ...]:
    """The first exchange of each conversation. Raises InvalidRequest where the file is none, or holds none."""
    try:
        talks = msgspec.json.decode(file.read_bytes(), type=list[_Talk])
    except OSError as error:
        raise InvalidRequest(f"{file} cannot be read: {error.strerror or error}", param="trace") from error
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise InvalidRequest(f"{file} is no trace in ShareGPT's format: {error}", param="trace") from error
    found = tuple(
        Exchange(first.value, second.value)
        for first, second in (talk.conversations[:2] for talk in talks if len(talk.conversations) >= 2)
        if first.who in _ASKING and first.value and second.value
    )
    if not found:
        raise InvalidRequest(f"{file} holds no conversation that begins with a question and its answer", param="trace")
    return found


def sampled(exchanges: Sequence[Exchange], count: int, seed: int) -> list[Exchange]:
    """So many, in an order that the seed gives; from the start again where there are fewer."""
    order = list(exchanges)
    random.Random(f"{seed}/trace").shuffle(order)
    return [order[place % len(order)] for place in range(count)]


def usable(
    exchanges: Sequence[Exchange], material: Material, max_model_len: int | None, beside: int = 0
) -> list[Exchange]:
    """Those whose two sides have some tokens each, and that fit the model with so many beside them. Raises
    InvalidRequest where none does."""
    limit = max_model_len or 2**31
    room = limit - beside
    kept = [each for each in exchanges if _fits(material.count(each.asked), material.count(each.answered), room)]
    if not kept:
        fits = f"fits the model's {limit} tokens" if max_model_len else f"has {LEAST_TOKENS} tokens on both sides"
        raise InvalidRequest(f"no exchange of the trace {fits}", param="trace")
    return kept


def _fits(asked: int, answered: int, room: int) -> bool:
    return min(asked, answered) >= LEAST_TOKENS and asked + answered < room
