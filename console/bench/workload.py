"""Requests and their times, drawn from a seed, so that every run sends the same.

Lengths and arrivals depend on the seed and on a request's number alone, so that every row of a bench has the same ones;
contents depend on the row and the repeat too, all of them or the first tokens, so that nothing is found in a prefix
cache that is not meant to be: what follows another beginning is none of its own. A trace's texts stand behind a mark.
"""

from __future__ import annotations

import hashlib
import math
import random
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from engine.errors import InvalidRequest
from engine.simulation.demand import gap_s
from engine.simulation.lengths import Length
from engine.text.tokenizer import Tokenizer

# What prompts are made of: token ids where the target takes ids, else words.

_MAX_WORDS = 2000
_PLAIN_WORDS = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work number night point home water room mother area money story fact
month lot right study book eye job word business issue side kind head house service friend father power hour game line
end member law car city name team minute idea body back parent face others level office door health person art war
history party result change morning reason research girl guy moment air teacher force
"""


class Prompt(msgspec.Struct, frozen=True):
    """A prompt, as ids or as text. tokens: how many it was meant to have; a text may have a few more or fewer."""

    tokens: int
    ids: tuple[int, ...] = ()
    text: str = ""

    def __add__(self, other: Prompt) -> Prompt:
        """One after the other, of the same kind."""
        text = " ".join(filter(None, (self.text, other.text)))
        return Prompt(self.tokens + other.tokens, self.ids + other.ids, text)


class Material(Protocol):
    """Makes prompts."""

    def prompt(self, tokens: int, rng: random.Random) -> Prompt:
        """A prompt of a number of tokens."""

    def of_text(self, text: str) -> Prompt:
        """One that says this."""

    def count(self, text: str) -> int:
        """Tokens of a text, as well as it is known here."""


class TokenIds:
    """Prompts of any of the given ids. tokenizer: for texts that a trace brings."""

    def __init__(self, ids: Sequence[int], tokenizer: Tokenizer) -> None:
        self._ids = ids
        self._tokenizer = tokenizer

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int | None = None) -> TokenIds:
        """Of all that are no control tokens. vocab_size: the model's, where it has fewer."""
        size = min(tokenizer.vocab_size, vocab_size or tokenizer.vocab_size)
        return cls([each for each in range(size) if each not in tokenizer.special_ids], tokenizer)

    def prompt(self, tokens: int, rng: random.Random) -> Prompt:
        """Material: exactly as many."""
        return Prompt(tokens, ids=tuple(rng.choices(self._ids, k=tokens)))

    def of_text(self, text: str) -> Prompt:
        """Material: as the model would read it."""
        ids = tuple(self._tokenizer.encode(text))
        return Prompt(len(ids), ids=ids)

    def count(self, text: str) -> int:
        """Material: exactly."""
        return len(self._tokenizer.encode(text, add_special_tokens=False))


class Fresh:
    """Prompts of another material with contents that only this object's have, so that an engine which goes on from run
    to run finds nothing of an earlier one in its cache. Lengths, and which prompts begin alike, stay as they are."""

    def __init__(self, material: Material) -> None:
        self._material = material
        self._own = secrets.token_hex(8)

    def prompt(self, tokens: int, rng: random.Random) -> Prompt:
        return self._material.prompt(tokens, random.Random(f"{self._own}/{rng.getrandbits(64)}"))

    def of_text(self, text: str) -> Prompt:
        """Material: a text is what it is."""
        return self._material.of_text(text)

    def count(self, text: str) -> int:
        return self._material.count(text)


class Words:
    """Prompts of words that are one token each for `tokenizer`; without one, of common words, which mostly are."""

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        self._tokenizer = tokenizer
        self._words: Sequence[str] = (_single_tokens(tokenizer) if tokenizer else ()) or _PLAIN_WORDS.split()

    def prompt(self, tokens: int, rng: random.Random) -> Prompt:
        """Material: as many words."""
        return Prompt(tokens, text=" ".join(rng.choices(self._words, k=tokens)))

    def of_text(self, text: str) -> Prompt:
        """Material: the text itself."""
        return Prompt(self.count(text), text=text)

    def count(self, text: str) -> int:
        """Material: exactly with a tokenizer, else a token for four characters (English, in most vocabularies)."""
        if self._tokenizer is None:
            return max(1, len(text) // 4)
        return len(self._tokenizer.encode(text, add_special_tokens=False))


def _single_tokens(tokenizer: Tokenizer) -> list[str]:
    """Words that stay one token each in a text, as far as they are needed."""
    found: list[str] = []
    for token_id in range(tokenizer.vocab_size):
        text = tokenizer.decode([token_id])
        word = text.strip()
        if len(word) < 3 or not (word.isascii() and word.isalpha() and word.islower()):
            continue
        if len(tokenizer.encode(f"a {word} {word}", add_special_tokens=False)) == 3:
            found.append(word)
            if len(found) == _MAX_WORDS:
                break
    return found


# Conversations of people, as ShareGPT exports them: what was asked, and how long the answer was.
#
# The format is a JSON array of {"conversations": [{"from": "human" | "user" | "gpt" | ..., "value": text}, ...]}; the
# first turn is the prompt, the second the answer whose length is asked for again.

MIN_TOKENS = 4
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
        raise InvalidRequest(f"{file} is not a trace in ShareGPT format: {error}", param="trace") from error
    found = tuple(
        Exchange(first.value, second.value)
        for first, second in (talk.conversations[:2] for talk in talks if len(talk.conversations) >= 2)
        if first.who in _ASKING and first.value and second.value
    )
    if not found:
        raise InvalidRequest(f"{file} has no conversation that starts with a question and an answer", param="trace")
    return found


def sampled(exchanges: Sequence[Exchange], count: int, seed: int) -> list[Exchange]:
    """Return `count` of them, in an order that the seed gives; repeated where there are fewer."""
    order = list(exchanges)
    random.Random(f"{seed}/trace").shuffle(order)
    return [order[place % len(order)] for place in range(count)]


def usable(
    exchanges: Sequence[Exchange], material: Material, max_model_len: int | None, reserved: int = 0
) -> list[Exchange]:
    """Those whose two sides have some tokens each, and that fit the model with `reserved` more. Raises
    InvalidRequest where none does."""
    limit = max_model_len or 2**31
    room = limit - reserved
    fitting = [each for each in exchanges if _fits(material.count(each.asked), material.count(each.answered), room)]
    if not fitting:
        fits = f"fits the model's {limit} tokens" if max_model_len else f"has {MIN_TOKENS} tokens on both sides"
        raise InvalidRequest(f"no exchange of the trace {fits}", param="trace")
    return fitting


def _fits(asked: int, answered: int, room: int) -> bool:
    return min(asked, answered) >= MIN_TOKENS and asked + answered < room


_LEAD_TOKENS = 4
"""First tokens that make a prompt different for any prefix cache."""
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
    """Contents and lengths of requests. prompt: without the shared prefix.  trace: for lengths of "trace"."""

    prompt: Length
    output: Length
    prefix: PrefixMix | None = None
    trace: tuple[Exchange, ...] = ()


def items(
    mix: Mix, material: Material, *, seed: int, salt: str, count: int, first: int = 0, lead: str = ""
) -> list[Item]:
    """Requests `first` to `first + count`.

    salt: for contents, besides the seed.  lead: for the first tokens in place of salt; "" is none.
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


def with_arrivals(sent: Sequence[Item], *, rate: float, burstiness: float, seed: int) -> list[Item]:
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
