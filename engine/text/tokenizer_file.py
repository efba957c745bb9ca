"""Reading tokenizer.json, which is untrusted, into the library that uses it.

The library, tokenizers, takes what it is given: a normalizer that doubles a text forty times, a pattern of 100,000
characters, a vocabulary whose tries fill the memory. So the file is looked at first. It also panics where it does not
know what to do, which is no Exception in Python. Its parser holds the interpreter's lock: about 40 ms for each MiB.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import tokenizers

from engine.config import quote_value
from engine.errors import EngineError, InvalidRequest, UnsupportedModel
from engine.models.files import decode_json, decode_values, read_file
from engine.models.gguf.file import GgufModel, is_gguf

# Regular expressions of an untrusted tokenizer.json: which of them are surely quick.
#
# The library matches them by backtracking. One of twenty characters can take the fourth power of a text's length.

_ATOM = r"(?:\\[pP]\{\^?\w+\}|\\u[\da-fA-F]{4}|\\[sSdDwWhHrntfv]|\\\W|\[\^?(?:\\.|[^\[\]\\])+\]|[^\\\[\](){}|*+?^$])"
_MAYBE = rf"(?:{_ATOM}(?:(?:\?|\{{\d(?:,\d)?\}})\+?)?)?"
_ENDLESS = rf"{_ATOM}(?:[*+]|\{{\d,\}})\+?"
_WORDS = rf"\(\?i:(?:{_ATOM}|\|)+\)"
_QUICK = re.compile(
    rf"{_ATOM}{{1,40}}|{_WORDS}"
    rf"|{_MAYBE}(?:{_ENDLESS}){{0,2}}(?:{_WORDS}\?)?"
    rf"|{_MAYBE}{_ENDLESS}(?:{_ATOM}|\(\?[!=]{_ATOM}\))"
)
"""An alternative that is tried in about as many ways as a text is long: it has two repetitions without an end at most,
and one alone where something comes behind it that may fail."""


def is_linear_pattern(pattern: str) -> bool:
    """Return whether a search for it surely takes no more than the square of a text's length. Those of published models
    are quick."""
    return all(_QUICK.fullmatch(each) for each in _alternatives(pattern))


def pattern_strings(step: object) -> Iterator[str]:
    """The regular expressions in a step of a tokenizer.json, and in all steps within it."""
    if isinstance(step, list):
        for each in step:
            yield from pattern_strings(each)
    elif isinstance(step, Mapping):
        for key, value in step.items():
            if key == "Regex":
                yield str(value)
            else:
                yield from pattern_strings(value)


def _alternatives(pattern: str) -> list[str]:
    """The parts between those bars that are in no group and no class."""
    parts, depth, in_class, escaped = [""], 0, False, False
    for character in pattern:
        if not escaped and not in_class:
            depth += (character == "(") - (character == ")")
        if not escaped and character in "[]":
            in_class = character == "["
        if character == "|" and not (escaped or in_class or depth):
            parts.append("")
        else:
            parts[-1] += character
        escaped = character == "\\" and not escaped
    return parts


_MAX_FILE_BYTES = 48 * 2**20
"""Vocabularies of a quarter of a million tokens take up to 35 MiB."""

_MAX_VALUES = 3_000_000
"""A vocabulary of 262,000 tokens and 514,000 merges, as Gemma's, has 2,100,000."""

_MAX_STEP_BYTES = 2 * 2**20
"""Of the normalizer, and of each step besides the model. SentencePiece's table of characters has some hundred KiB."""

_MAX_PATTERN = 4096
"""Characters of all regular expressions together. Those of a tokenizer have some hundred."""

_MAX_GROWTH = 100
"""How many characters a step may make of one. Compatibility decomposition makes 18 of U+FDFA."""

_MAX_TOKEN = 4096
"""Characters of a token. The longest of most vocabularies are a hundred spaces or so."""

_MAX_ADDED = 150_000
_MAX_TEXT = 4_000_000
"""Characters of all added tokens, and of a Unigram model's, which the library keeps in tries: some 100 bytes each."""

_MAX_WORD = 1000
"""Characters of a word that WordPiece looks at; it takes time with their square."""

_GROWTH: Mapping[str, int] = {
    "NFC": 3,
    "NFD": 4,
    "NFKC": 18,
    "NFKD": 18,
    "Lowercase": 3,
    "BertNormalizer": 12,
    "ByteLevel": 4,
    "Metaspace": 2,
}
"""Characters that these make of one, at most."""

NO_TOKENS = InvalidRequest("the model's tokenizer cannot tokenize this text")
NO_TEXT = InvalidRequest("the model's tokenizer cannot decode these tokens")

_Token = Annotated[str, msgspec.Meta(max_length=_MAX_TOKEN)]


class _Added(msgspec.Struct):
    content: _Token = ""


class _Model(msgspec.Struct):
    vocab: dict[_Token, int] | list[tuple[_Token, float]] | None = None
    max_input_chars_per_word: int = 0


class _Tokenizer(msgspec.Struct):
    """A tokenizer.json, its steps as they stand there. Truncation and padding are left out: they are not used."""

    version: msgspec.Raw = msgspec.Raw(b'"1.0"')
    added_tokens: msgspec.Raw = msgspec.Raw(b"[]")
    normalizer: msgspec.Raw = msgspec.Raw(b"null")
    pre_tokenizer: msgspec.Raw = msgspec.Raw(b"null")
    post_processor: msgspec.Raw = msgspec.Raw(b"null")
    decoder: msgspec.Raw = msgspec.Raw(b"null")
    model: msgspec.Raw = msgspec.Raw(b"null")


def read_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """The tokenizer in the folder's tokenizer.json, or in a GGUF file. Raises UnsupportedModel, which says what is
    wrong with it, or FileNotFoundError."""
    file = folder if is_gguf(folder) else folder / "tokenizer.json"
    if is_gguf(folder):
        content = msgspec.json.encode(GgufModel(folder).tokenizer())
    else:
        content = read_file(file, _MAX_FILE_BYTES)
    if sum(map(content.count, (b"[", b"{", b",", b":"))) > _MAX_VALUES:
        raise UnsupportedModel(f"{file.name} in {file.parent} holds more than {_MAX_VALUES:,} values")
    with refusing_panics(UnsupportedModel(f"{file.name} in {file.parent} cannot be read")):
        parts = decode_json(content, _Tokenizer, file)
        _refuse_steps(parts, file)
        _refuse_vocabulary(parts, file)
        return tokenizers.Tokenizer.from_buffer(msgspec.json.encode(parts))


@contextmanager
def refusing_panics(refusal: EngineError) -> Iterator[None]:
    """Raise `refusal`, with the reason, where the library fails or panics within: its panics are no Exception, and
    would end more than the one request or model that they are about."""
    try:
        yield
    except EngineError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise type(refusal)(f"{refusal.message}: {quote_value(str(error), 200)}", **refusal.details) from None


def _refuse_steps(parts: _Tokenizer, file: Path) -> None:
    """Raise UnsupportedModel for a step that makes too much of a text, and for too long regular expressions."""
    patterns = 0
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        raw = bytes(getattr(parts, name))
        if len(raw) > _MAX_STEP_BYTES:
            raise _refusal(file, f"its {name} is larger than {_MAX_STEP_BYTES / 2**20:g} MiB")
        step = decode_values(raw, object, file)
        if _growth(step) > _MAX_GROWTH:
            raise _refusal(file, f"its {name} makes more than {_MAX_GROWTH} characters of one")
        found = list(pattern_strings(step))
        patterns += sum(map(len, found))
        if name == "decoder" and not all(map(is_linear_pattern, found)):
            raise _refusal(file, "its decoder has a regular expression that may take long")
    if patterns > _MAX_PATTERN:
        raise _refusal(file, f"its regular expressions have {patterns} characters, more than {_MAX_PATTERN}")


def _refuse_vocabulary(parts: _Tokenizer, file: Path) -> None:
    """Raise UnsupportedModel for tokens that are too many or too long."""
    added = [token.content for token in decode_json(bytes(parts.added_tokens), list[_Added], file)]
    model = decode_json(bytes(parts.model), _Model, file)
    if len(added) > _MAX_ADDED:
        raise _refusal(file, f"it adds {len(added):,} tokens, more than {_MAX_ADDED:,}")
    pieces = [piece for piece, _ in model.vocab] if isinstance(model.vocab, list) else []
    for what, texts in (("added tokens", added), ("Unigram pieces", pieces)):
        characters = sum(map(len, texts))
        if characters > _MAX_TEXT:
            raise _refusal(file, f"its {what} have {characters:,} characters, more than {_MAX_TEXT:,}")
    if model.max_input_chars_per_word > _MAX_WORD:
        raise _refusal(file, f"its words have more than {_MAX_WORD} characters (max_input_chars_per_word)")


def _refusal(file: Path, why: str) -> UnsupportedModel:
    return UnsupportedModel(f"{file.name} in {file.parent} is not supported: {why}")


def _growth(step: object) -> float:
    """How many characters a step, and all steps within it, make of one at most."""
    if isinstance(step, list):
        product = 1.0
        for each in step:
            product = min(product * _growth(each), _MAX_GROWTH + 1)
        return product
    if not isinstance(step, dict):
        return 1.0
    match step.get("type"):
        case "Replace":
            return _replacement_growth(step.get("pattern"), len(str(step.get("content", ""))))
        case "Prepend":
            return 1.0 + len(str(step.get("prepend", "")))
        case "Precompiled":
            return _longest_replacement(str(step.get("precompiled_charsmap", "")))
        case "TemplateProcessing":
            pieces = step.get("single")
            return float(str(pieces).count("'Sequence'"))
        case kind:
            inner = [_growth(value) for value in step.values() if isinstance(value, list)]
            return max([_GROWTH.get(str(kind), 1), *inner])


def _replacement_growth(pattern: object, content: int) -> float:
    """By what a replacement of `content` characters lengthens a text: a pattern may match between any two of it."""
    searched = pattern.get("String") if isinstance(pattern, dict) else None
    return max(1.0, content / len(searched)) if isinstance(searched, str) and searched else 1.0 + content


def _longest_replacement(charsmap: str) -> float:
    """Characters of the longest text that SentencePiece's table has in place of one: its texts end with a 0."""
    try:
        table = base64.b64decode(charsmap)
    except binascii.Error:
        return 1.0
    texts = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
    return max(len(text.decode("utf-8", "replace")) for text in texts)
