"""What requests are like while settings are tried: lengths of prompts and answers, as the operator's own are. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from console.bench.prompts import Material
from console.bench.trace import Exchange, sampled, usable
from engine.errors import InvalidRequest
from engine.insight_values import Insight, Lengths
from engine.simulation.lengths import Length

ENOUGH_REQUESTS = 50
"""Requests that ended, from which on lengths are taken from what there was."""
DRAWN = 512
_USUAL_PROMPT, _USUAL_OUTPUT = Length.parse("64-256"), Length.parse("32-128")


class Mix(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of prompt and of answer, for one request after the other, over and over. said: where they are from.

    prompts: what the prompts say, as token ids, in the same order; empty where that is not known.
    """

    said: str
    lengths: tuple[tuple[int, int], ...]
    prompts: tuple[tuple[int, ...], ...] = ()

    def of(self, number: int) -> tuple[int, int]:
        """Of request `number`."""
        return self.lengths[number % len(self.lengths)]

    def says(self, number: int) -> tuple[int, ...] | None:
        """What the prompt of request `number` says, if that is known."""
        return self.prompts[number % len(self.prompts)] if self.prompts else None

    def within(self, context_tokens: int) -> Mix:
        """With what does not fit a context cut: prompts to three quarters of it, and answers to what is left."""
        most = max(1, context_tokens * 3 // 4)
        cut = ((min(prompt, most), output) for prompt, output in self.lengths)
        fitting = tuple((prompt, max(1, min(output, context_tokens - prompt - 1))) for prompt, output in cut)
        prompts = tuple(ids[:prompt] for ids, (prompt, _) in zip(self.prompts, fitting, strict=bool(self.prompts)))
        return Mix(said=self.said, lengths=fitting, prompts=prompts)


def usual_mix(seed: int) -> Mix:
    """What is taken where nothing is known: short questions, short answers."""
    found = asked_mix(str(_USUAL_PROMPT), None, seed)
    assert found is not None
    return found


def asked_mix(prompt: str | None, output: str | None, seed: int) -> Mix | None:
    """Lengths as they are written for a bench: "128", "64-256", "normal:128:32"; None where neither is given, and what
    is left out is as usual. Raises InvalidRequest, its param "prompt" or "output"."""
    if prompt is None and output is None:
        return None
    prompts, outputs = _parsed(prompt, _USUAL_PROMPT, "prompt"), _parsed(output, _USUAL_OUTPUT, "output")
    draw = random.Random(seed)
    pairs = [(prompts.draw(draw), outputs.draw(draw)) for _ in range(DRAWN)]
    return Mix(said=f"prompts of {prompts} tokens, answers of {outputs}", lengths=tuple(pairs))


def mix_of_trace(exchanges: Sequence[Exchange], material: Material, context_tokens: int, seed: int) -> Mix:
    """Questions as a trace has them, and answers as long as its own. Raises InvalidRequest where none fits."""
    talks = sampled(usable(exchanges, material, context_tokens), DRAWN, seed)
    prompts = [material.of_text(talk.asked) for talk in talks]
    pairs = tuple((said.tokens, material.count(talk.answered)) for said, talk in zip(prompts, talks, strict=True))
    ids = tuple(said.ids for said in prompts)
    where = f"questions and lengths of answers as in a trace of {len(exchanges):,} exchanges"
    return Mix(said=where, lengths=pairs, prompts=ids if all(ids) else ())


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


def _parsed(text: str | None, usual: Length, param: str) -> Length:
    found = usual if text is None else Length.parse(text, param, traced=True)
    if found.kind == "trace":
        raise InvalidRequest("lengths of a trace are taken with --trace FILE", param=param)
    return found
