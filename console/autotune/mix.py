"""What requests are like while settings are tried: lengths of prompts and answers, as the operator's own are. Pure."""

from __future__ import annotations

import random
import re

import msgspec

from engine.errors import InvalidRequest
from engine.insight_values import Insight, Lengths

ENOUGH_REQUESTS = 50
"""Requests that ended, from which on lengths are taken from what there was."""
DRAWN = 512
MAX_LENGTH = 1_000_000
_LENGTH = re.compile(r"(\d{1,7})(?:-(\d{1,7}))?")
_USUAL_PROMPT, _USUAL_OUTPUT = range(64, 257), range(32, 129)


class Mix(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of prompt and of answer, for one request after the other, over and over. said: where they are from."""

    said: str
    lengths: tuple[tuple[int, int], ...]

    def of(self, number: int) -> tuple[int, int]:
        """Of request `number`."""
        return self.lengths[number % len(self.lengths)]

    def within(self, context_tokens: int) -> Mix:
        """With what does not fit a context cut: prompts to three quarters of it, and answers to what is left."""
        most = max(1, context_tokens * 3 // 4)
        cut = ((min(prompt, most), output) for prompt, output in self.lengths)
        fitting = ((prompt, max(1, min(output, context_tokens - prompt - 1))) for prompt, output in cut)
        return Mix(said=self.said, lengths=tuple(fitting))


def usual_mix(seed: int) -> Mix:
    """What is taken where nothing is known: short questions, short answers."""
    draw = random.Random(seed)
    pairs = [(draw.choice(_USUAL_PROMPT), draw.choice(_USUAL_OUTPUT)) for _ in range(DRAWN)]
    return Mix(said=_said(_USUAL_PROMPT, _USUAL_OUTPUT), lengths=tuple(pairs))


def asked_mix(prompt: str | None, output: str | None, seed: int) -> Mix | None:
    """Lengths as an operator writes them: "128", or "64-256" for any in it; None where neither is given, and what is
    left out is as usual. Raises InvalidRequest."""
    if prompt is None and output is None:
        return None
    prompts, outputs = _lengths(prompt, _USUAL_PROMPT), _lengths(output, _USUAL_OUTPUT)
    draw = random.Random(seed)
    pairs = [(draw.choice(prompts), draw.choice(outputs)) for _ in range(DRAWN)]
    return Mix(said=_said(prompts, outputs), lengths=tuple(pairs))


def mix_of_history(insight: Insight, seed: int) -> Mix | None:
    """Lengths as those of the session were, prompts and answers each by itself; None after too few requests."""
    if min(insight.prompts.spread.count, insight.outputs.spread.count) < ENOUGH_REQUESTS:
        return None
    draw = random.Random(seed)
    prompts, outputs = _drawn(insight.prompts, draw), _drawn(insight.outputs, draw)
    said = f"lengths as of the last {insight.outputs.spread.count:,} requests"
    return Mix(said=said, lengths=tuple(zip(prompts, outputs, strict=True)))


def _drawn(lengths: Lengths, draw: random.Random) -> list[int]:
    """Evenly from within each column of the histogram; what is longer than the last is as long as the longest."""
    longest = round(lengths.spread.longest or lengths.bounds[-1])
    lowest = [0, *lengths.bounds]
    highest = [*lengths.bounds, max(longest, lengths.bounds[-1] + 1)]
    columns = draw.choices(range(len(lengths.counts)), weights=lengths.counts, k=DRAWN)
    return [
        draw.randint(lowest[column] + 1, min(highest[column], max(longest, lowest[column] + 1))) for column in columns
    ]


def _said(prompts: range, outputs: range) -> str:
    return f"prompts of {_span(prompts)} tokens, answers of {_span(outputs)}"


def _span(lengths: range) -> str:
    return f"{lengths[0]}" if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]}"


def _lengths(text: str | None, usual: range) -> range:
    if text is None:
        return usual
    found = _LENGTH.fullmatch(text.strip())
    least = int(found[1]) if found else 0
    most = int(found[2] or found[1]) if found else 0
    if not 1 <= least <= most <= MAX_LENGTH:
        raise InvalidRequest(
            f"{text} is no length; it is a number of tokens like 128, or any from 64-256, up to {MAX_LENGTH:,}",
            param="length",
        )
    return range(least, most + 1)
