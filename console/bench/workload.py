"""What is sent, and when: drawn from a seed, so that every run sends the same.

Lengths and arrivals depend on the seed and on a request's number alone, so that every row of a bench has the same ones;
contents depend on the row and the repeat too, all of them or the first tokens, so that nothing is found in a prefix
cache that is not meant to be: what follows another beginning is none of its own. A trace's texts stand behind a mark.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Sequence

import msgspec

from console.bench.prompts import Material, Prompt
from console.bench.trace import Exchange, sampled
from engine.simulation.demand import gap_s
from engine.simulation.lengths import Length

_LEAD_TOKENS = 4
"""So many that a prompt begins with are enough to make it another one for any cache of prefixes."""
MARK_TOKENS = 16
"""More than a mark before a trace's text has, in any vocabulary."""


class PrefixMix(msgspec.Struct, frozen=True, kw_only=True):
    """A share of the prompts that begin with one of `groups` texts of `tokens` tokens."""

    tokens: int
    groups: int = 1
    share: float = 1.0


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One request. at_s: when it arrives, since the run began.  group: whose prefix it has, None where it has none."""

    number: int
    prompt: Prompt
    output_tokens: int
    at_s: float = 0.0
    group: int | None = None


class Mix(msgspec.Struct, frozen=True, kw_only=True):
    """What requests are like. prompt: without the shared prefix.  trace: what "trace" lengths are taken from."""

    prompt: Length
    output: Length
    prefix: PrefixMix | None = None
    trace: tuple[Exchange, ...] = ()


def items(
    mix: Mix, material: Material, *, seed: int, salt: str, count: int, first: int = 0, lead: str = ""
) -> list[Item]:
    """Requests `first` to `first + count`.

    salt: what contents depend on beside the seed.  lead: what the first tokens do in its place; "" is none of it.
    """
    talks = sampled(mix.trace, first + count, seed) if mix.trace else []
    return [_item(mix, material, (seed, salt, lead), number, talks) for number in range(first, first + count)]


def _item(
    mix: Mix, material: Material, drawn_from: tuple[int, str, str], number: int, talks: Sequence[Exchange]
) -> Item:
    seed, salt, lead = drawn_from
    lengths, contents = random.Random(f"{seed}/{number}"), random.Random(f"{seed}/{salt}/{number}")
    own = random.Random(f"{seed}/{lead or salt}/first of {number}")
    if mix.prompt.kind == "trace":
        prompt = material.of_text(f"[{_mark(material, own)}] {talks[number].asked}")
    else:
        tokens = mix.prompt.draw(lengths)
        first = min(_LEAD_TOKENS, tokens) if lead else 0
        prompt = material.prompt(first, own) + material.prompt(tokens - first, contents)
    output = material.count(talks[number].answered) if mix.output.kind == "trace" else mix.output.draw(lengths)
    group = _group(mix.prefix, lengths)
    if mix.prefix is not None and group is not None:
        prompt = material.prompt(mix.prefix.tokens, random.Random(f"{seed}/{salt}/prefix {group}")) + prompt
    return Item(number=number, prompt=prompt, output_tokens=output, group=group)


def _mark(material: Material, rng: random.Random) -> str:
    """A word that no other prompt has, in this run or, where the material is new in each, in another."""
    drawn = material.prompt(_LEAD_TOKENS, rng)
    return hashlib.blake2s(f"{drawn.ids}{drawn.text}".encode(), digest_size=4).hexdigest()


def _group(prefix: PrefixMix | None, rng: random.Random) -> int | None:
    if prefix is None or rng.random() >= prefix.share:
        return None
    return rng.randrange(prefix.groups)


def arriving(sent: Sequence[Item], *, rate: float, burstiness: float, seed: int) -> list[Item]:
    """The requests with times of arrival: `rate` a second on average, all at once where it is infinite.

    burstiness: the shape of the gamma distribution of the time between two; 1 is a Poisson process, less comes in
    bursts, more is more even (as vLLM's bench has it).
    """
    if math.isinf(rate):
        return list(sent)
    rng, at_s, timed = random.Random(f"{seed}/arrivals"), 0.0, []
    for item in sent:
        timed.append(msgspec.structs.replace(item, at_s=at_s))
        at_s += gap_s(rng, rate, burstiness)
    return timed
