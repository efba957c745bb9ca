"""What prompts are made of: token ids where the target takes ids, else words."""

from __future__ import annotations

import random
import secrets
from collections.abc import Sequence
from typing import Protocol

import msgspec

from engine.text.tokenizer import Tokenizer

_MOST_WORDS = 2000
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
        """One of so many tokens."""

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
        known = min(tokenizer.vocab_size, vocab_size or tokenizer.vocab_size)
        return cls([each for each in range(known) if each not in tokenizer.special_ids], tokenizer)

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
        """Material."""
        return self._material.prompt(tokens, random.Random(f"{self._own}/{rng.getrandbits(64)}"))

    def of_text(self, text: str) -> Prompt:
        """Material: a text is what it is."""
        return self._material.of_text(text)

    def count(self, text: str) -> int:
        """Material."""
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
            if len(found) == _MOST_WORDS:
                break
    return found
