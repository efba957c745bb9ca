"""How people really type: other words, dropped words, lower case, no question mark, typing mistakes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from random import Random

_WORD = re.compile(r"[A-Za-z']+")
_DROPPABLE = {"the", "a", "an", "is", "do", "does", "to", "of", "i", "it", "can", "my", "in", "on", "for"}
_KEYBOARD = "qwertyuiop asdfghjkl zxcvbnm"
_CODE = re.compile(r"[-_/`\[\]+=<>{}\\]")


def roughen(question: str, synonyms: Mapping[str, Sequence[str]], rng: Random) -> str:
    """Return `question` as a user in a hurry might type it (often unchanged)."""
    words = question.split(" ")
    words = [_synonym(word, synonyms, rng) if rng.random() < 0.16 else word for word in words]
    if len(words) > 3 and rng.random() < 0.10:
        words = _drop_words(words, rng)
    if rng.random() < 0.13:
        at = rng.randrange(len(words))
        words[at] = _mistype(words[at], rng)
    return _casing(" ".join(words), rng)


def _synonym(word: str, synonyms: Mapping[str, Sequence[str]], rng: Random) -> str:
    options = synonyms.get(word.rstrip("?.!,").lower())
    if not options:
        return word
    return rng.choice(options) + word[len(word.rstrip("?.!,")) :]


def _drop_words(words: list[str], rng: Random) -> list[str]:
    typed = [word for word in words if word.lower() not in _DROPPABLE or rng.random() < 0.4]
    return typed or words


def _mistype(word: str, rng: Random) -> str:
    """Swap, drop, double or replace one letter; short words and code stay as they are."""
    if len(word) < 4 or _CODE.search(word) or not _WORD.search(word):
        return word
    at = rng.randrange(1, len(word) - 1)
    kind = rng.randrange(4)
    if kind == 0:
        return word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    if kind == 1:
        return word[:at] + word[at + 1 :]
    if kind == 2:
        return word[:at] + word[at] + word[at:]
    near = _KEYBOARD.find(word[at].lower())
    return word[:at] + (_KEYBOARD[near - 1].strip() or word[at]) + word[at + 1 :] if near > 0 else word


def _casing(text: str, rng: Random) -> str:
    if rng.random() < 0.5:
        text = text[:1].upper() + text[1:]
    elif rng.random() < 0.5:
        text = text.lower()
    if rng.random() < 0.005:
        text = text.upper()
    if rng.random() < 0.12:
        text = text.replace("'", "")
    ending = rng.random()
    if text.endswith("?") and ending < 0.45:
        text = text[:-1]
    elif ending > 0.94:
        text = text.rstrip("?.! ") + rng.choice(("!", "??", "...", " ?", ".", "?!", " :)", " please?"))
    return text
