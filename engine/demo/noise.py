"""How people really type: other words, dropped words, lower case, no question mark, typing mistakes."""

from __future__ import annotations

import re
from random import Random

SYNONYMS: dict[str, tuple[str, ...]] = {
    "answer": ("reply", "response"),
    "change": ("modify", "alter", "adjust", "edit", "switch"),
    "show": ("display", "tell", "give"),
    "shown": ("displayed", "visible"),
    "stop": ("halt", "end", "quit"),
    "remove": ("delete", "drop", "kill", "take out"),
    "add": ("create", "bring in", "put in", "include"),
    "key": ("button", "shortcut", "hotkey"),
    "model": ("llm", "network", "ai", "model file", "weights"),
    "models": ("llms", "networks"),
    "console": ("program", "app", "application", "tool", "screen"),
    "memory": ("ram", "vram", "mem"),
    "worker": ("process", "replica", "instance"),
    "colours": ("colors",),
    "conversation": ("chat", "talk", "dialog", "thread"),
    "conversations": ("chats", "talks", "dialogs"),
    "message": ("text", "question"),
    "explain": ("describe", "clarify"),
    "use": ("employ", "try", "work with"),
    "load": ("open", "get", "start", "bring in"),
    "big": ("large", "huge"),
    "fast": ("quick", "speedy"),
    "slow": ("sluggish", "laggy"),
    "gpu": ("graphics card", "card", "nvidia gpu"),
    "computer": ("machine", "pc", "laptop", "box"),
    "where": ("in which place", "whereabouts"),
    "settings": ("options", "preferences", "configuration"),
    "flag": ("option", "switch", "parameter", "argument"),
    "want": ("would like", "wanna", "need"),
    "requests": ("calls", "queries", "prompts"),
    "set": ("specify", "define", "choose", "configure"),
    "number": ("figure", "value", "count"),
    "happens": ("occurs", "is going to happen"),
    "server": ("service", "backend", "api"),
    "another": ("a different", "some other", "one more"),
    "folder": ("directory", "dir", "path"),
}

_WORD = re.compile(r"[A-Za-z']+")
_DROPPABLE = {"the", "a", "an", "is", "do", "does", "to", "of", "i", "it", "can", "my", "in", "on", "for"}
_KEYBOARD = "qwertyuiop asdfghjkl zxcvbnm"
_CODE = re.compile(r"[-_/`\[\]+=<>{}\\]")


def roughen(question: str, rng: Random) -> str:
    """Return `question` as somebody in a hurry might type it (often unchanged)."""
    words = question.split(" ")
    words = [_synonym(word, rng) if rng.random() < 0.07 else word for word in words]
    if len(words) > 3 and rng.random() < 0.10:
        words = _drop_words(words, rng)
    if rng.random() < 0.13:
        at = rng.randrange(len(words))
        words[at] = _mistype(words[at], rng)
    return _casing(" ".join(words), rng)


def _synonym(word: str, rng: Random) -> str:
    options = SYNONYMS.get(word.rstrip("?.!,"))
    if not options:
        return word
    return rng.choice(options) + word[len(word.rstrip("?.!,")) :]


def _drop_words(words: list[str], rng: Random) -> list[str]:
    kept = [word for word in words if word.lower() not in _DROPPABLE or rng.random() < 0.4]
    return kept or words


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
