"""A tokenizer.json that somebody else wrote: refused in one sentence where it would cost too much; never a panic."""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from engine.errors import InvalidRequest, UnsupportedModel
from engine.text.tokenizer import Tokenizer
from engine.text.tokenizer_config import refuse_other_vocabulary
from engine.text.tokenizer_file import is_linear_pattern, read_tokenizer, refusing_panics
from tests.fakes import tiny_tokenizers
from tests.fakes.bounds import outcome, within_bounds

Parts = dict[str, Any]

BASE: Parts = json.loads(tiny_tokenizers.byte_level().to_str())
SPIN = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
"""Takes time with the power of the x's: the library's engine gives up after ten million steps, and panics."""

SPUN = "x" * 60


def split(pattern: str) -> Parts:
    return {"pre_tokenizer": SPIN | {"pattern": {"Regex": pattern}}}


def replaced(pattern: Parts, content: str) -> Parts:
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(step: Parts, times: int) -> Parts:
    return {"type": "Sequence", "normalizers": [step] * times}


def added(count: int, length: int) -> Parts:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}
    return {"added_tokens": [{"id": 400 + i, "content": f"{i:0{length}}", **flags} for i in range(count)]}


def unigram(*pieces: str) -> Parts:
    return {"model": {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], *([piece, -1.0] for piece in pieces)]}}


def table(written: str) -> Parts:
    return {"normalizer": {"type": "Precompiled", "precompiled_charsmap": written}}


def charsmap(*texts: bytes) -> Parts:
    return table(base64.b64encode(struct.pack("<II", 4, 0) + b"\0".join(texts) + b"\0").decode())


TWICE = {"type": "TemplateProcessing", "pair": [], "special_tokens": {}}
TWICE |= {"single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2}

HOSTILE: dict[str, tuple[Parts, str]] = {
    "a text doubled forty times": (
        {"normalizer": sequence(replaced({"String": "a"}, "aa"), 40)},
        "its normalizer makes more than 100 characters of one",
    ),
    "a text prefixed to death": (
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "a" * 200}]}},
        "its normalizer makes more than 100",
    ),
    "something between any two characters": (
        {"normalizer": replaced({"Regex": ""}, "a" * 100)},
        "its normalizer makes more than 100",
    ),
    "bytes as characters, over and over": (
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BASE["pre_tokenizer"]] * 9}},
        "its pre_tokenizer makes more than 100",
    ),
    "a character that stands for a novel": (charsmap(b"a" * 5000), "its normalizer makes more than 100"),
    "tokens doubled thirty times": (
        {"post_processor": {"type": "Sequence", "processors": [TWICE] * 30}},
        "its post_processor makes more than 100",
    ),
    "answers doubled forty times": (
        {"decoder": {"type": "Sequence", "decoders": [replaced({"String": "a"}, "aa")] * 40}},
        "its decoder makes more than 100",
    ),
    "300,000 steps": ({"normalizer": sequence({"type": "Lowercase"}, 300_000)}, "its normalizer is larger than 2 MiB"),
    "a decoder that looks for what may take long": (
        {"decoder": replaced({"Regex": "(X+X+)+y"}, "z")},
        "its decoder has a regular expression that may take long",
    ),
    "a long pattern": (split("(?i)" + "ß" * 50_000), "its regular expressions have 50004 characters, more than 4096"),
    "a pattern that is none": (split("("), "Oniguruma error"),
    "a table that is none": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA" * 9}},
        "cannot be read",
    ),
    "a table of no base64": ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "?"}}, "cannot be read"),
    "a long added token": (added(1, 5000), "of length <= 4096"),
    "long added tokens": (added(1100, 4000), "its added tokens have 4,400,000 characters, more than 4,000,000"),
    "many added tokens": (added(150_001, 6), "it adds 150,001 tokens, more than 150,000"),
    "a long piece": (unigram("a" * 5000), "of length <= 4096"),
    "long pieces": (unigram(*(f"{i:04000}" for i in range(1100))), "its Unigram pieces have 4,400,005 characters"),
    "a long token": (
        {"model": BASE["model"] | {"vocab": BASE["model"]["vocab"] | {"a" * 5000: 999}}},
        "length <= 4096",
    ),
    "long words": (
        {"model": {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "a", "max_input_chars_per_word": 10**9}},
        "its words have more than 1000 characters",
    ),
    "a token below nothing": ({"model": BASE["model"] | {"vocab": {"a": -1}}}, "invalid value: integer `-1`"),
    "a model that is none": ({"model": {"type": "\x1b[31mX"}}, "cannot be read"),
    "a decoder that is none": ({"decoder": {"type": "Replace"}}, "cannot be read"),
}

BYTES: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "is not valid JSON"),
    "a list": (b"[]", "has invalid content"),
    "deep nesting": (b'{"model":' + b"[" * 10**6 + b"]" * 10**6 + b"}", "nested too deeply"),
    "steps within steps": (
        b'{"model":{"type":"BPE","vocab":{},"merges":[]},"normalizer":'
        + b'{"type":"Sequence","normalizers":[' * 300
        + b"]}" * 300
        + b"}",
        "cannot be read",
    ),
    "three million values": (b'{"model":[' + b"0," * 3 * 10**6 + b"0]}", "holds more than 3,000,000 values"),
    "no text": (b'{"added_tokens":[{"content":"\xff"}]}', "is not valid JSON"),
}


def write(folder: Path, parts: Parts) -> int:
    content = json.dumps(BASE | parts).encode()
    (folder / "tokenizer.json").write_bytes(content)
    return len(content)


@pytest.mark.parametrize(("parts", "reason"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_tokenizer_is_refused_in_one_sentence_at_little_cost(
    tmp_path: Path, parts: Parts, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    size = write(tmp_path, parts)
    said = outcome(lambda: str(Tokenizer.from_folder(tmp_path)), size, UnsupportedModel)
    assert said.startswith(f"tokenizer.json in {tmp_path} ")
    assert reason in said
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(("content", "reason"), BYTES.values(), ids=BYTES)
def test_a_broken_tokenizer_is_refused_in_one_sentence_at_little_cost(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    assert reason in outcome(lambda: str(Tokenizer.from_folder(tmp_path)), len(content), UnsupportedModel)


def test_a_tokenizer_larger_than_any_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(2**40)  # a hole
    with within_bounds(48 * 2**20), pytest.raises(UnsupportedModel, match="is larger than 48 MiB"):
        Tokenizer.from_folder(tmp_path)


def test_a_model_that_stands_there_twice_is_looked_at_as_it_is_read(tmp_path: Path) -> None:
    hostile = json.dumps(unigram(*(f"{i:04000}" for i in range(1100)))["model"])
    mild = json.dumps(BASE["model"])
    for first, second, refused in ((hostile, mild, False), (mild, hostile, True)):
        (tmp_path / "tokenizer.json").write_text(f'{{"model":{first},"model":{second}}}')
        size = len(first) + len(second)
        said = outcome(lambda: str(read_tokenizer(tmp_path)), size, UnsupportedModel)
        assert ("Unigram pieces" in said) is refused


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "metaspace"])
def test_what_is_looked_at_first_is_the_tokenizer_that_it_was(tmp_path: Path, kind: str) -> None:
    made = getattr(tiny_tokenizers, kind)()
    read = read_tokenizer(tiny_tokenizers.save(made, tmp_path))
    assert json.loads(read.to_str()) == json.loads(made.to_str())


def test_a_link_out_of_the_folder_is_no_tokenizer(tmp_path: Path) -> None:
    tiny_tokenizers.save(tiny_tokenizers.byte_level(), tmp_path / "other")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").symlink_to("../other/tokenizer.json")
    with pytest.raises(UnsupportedModel, match="leads out of the folder"):
        Tokenizer.from_folder(tmp_path / "model")
    with pytest.raises(UnsupportedModel, match="leads out of the folder"):
        refuse_other_vocabulary(tmp_path / "model", tmp_path / "other")


# -- panics ------------------------------------------------------------------------------------------------------------


def spinning(folder: Path) -> Tokenizer:
    """A tokenizer that panics on SPUN, as text and as a token."""
    parts = added(1, 1)
    parts["added_tokens"][0]["content"] = SPUN.upper()
    strip = {"type": "Strip", "content": "X", "start": 0, "stop": 1000}
    decoder = {"type": "Sequence", "decoders": [strip, {"type": "Fuse"}]}
    write(folder, split(SPIN["pattern"]["Regex"]) | parts | {"decoder": decoder})
    return Tokenizer.from_folder(folder)


def test_a_text_that_the_library_panics_on_is_refused_and_the_next_is_read(tmp_path: Path) -> None:
    subject = spinning(tmp_path)
    for tokenize in (
        lambda: str(subject.encode(SPUN)),
        lambda: str(subject.spans(SPUN)),
        lambda: str(subject.encode_all(["a", SPUN])),
    ):
        assert "cannot tokenize this text: Onig" in outcome(tokenize, 0, InvalidRequest)
    assert subject.encode("the")


SLOW = r"[a-z]*[a-z]*[a-z]*~|."
"""Takes the fourth power of a text's length, and never as many steps from one place that the library gives up."""


@pytest.mark.parametrize("step", [split(SLOW), {"normalizer": replaced({"Regex": SLOW}, "x")}])
def test_a_text_that_takes_the_library_hours_is_refused_in_a_second_and_so_is_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: Parts
) -> None:
    write(tmp_path, step)
    subject = Tokenizer.from_folder(tmp_path)
    assert not subject.is_quick
    assert subject.encode("the")
    monkeypatch.setattr("engine.text.tokenizer._CALL_S", 0.01)  # so that what goes on does not for long
    for _ in range(3):
        assert "takes too long" in outcome(lambda: str(subject.encode("x" * 220)), 0, InvalidRequest)


def test_a_text_of_any_length_may_take_as_long_as_texts_do(tmp_path: Path) -> None:
    write(tmp_path, split(r" ?\p{L}+|\s+(?!\S)|\s+"))
    subject = Tokenizer.from_folder(tmp_path)
    assert subject.is_quick
    text = "a word " * 2_000
    assert len(subject.spans(text)) == len(subject.encode(text)) > 2_000


PUBLISHED = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s+",
    r"[^\r\n\p{L}\p{N}]?+\p{L}+| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]| {2,}",
)


@pytest.mark.parametrize("pattern", PUBLISHED)
def test_the_patterns_of_published_models_are_known_to_be_quick(pattern: str) -> None:
    assert is_linear_pattern(pattern)


@pytest.mark.parametrize(
    "pattern",
    [SLOW, "[a-z ]*[a-z ]*~", "(a+)+$", "(a|a)*c", r"(.*)\1", "a?a?a?b", "(?i:a*b*c)", "a*b*(?i:x|y)", "a+b+(?!c)"],
)
def test_a_pattern_that_may_take_long_is_not(pattern: str) -> None:
    assert not is_linear_pattern(pattern)


def test_tokens_that_the_library_panics_on_are_refused_and_the_next_are_read(tmp_path: Path) -> None:
    subject = spinning(tmp_path)
    token = subject.token_to_id(SPUN.upper())
    assert token is not None
    for read in (lambda: subject.decode([token]), lambda: str(subject.token_bytes(token))):
        assert "cannot decode these tokens: index out of bounds" in outcome(read, 0, InvalidRequest)
    assert subject.decode(subject.encode("the"))


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_ends_the_program_is_no_refusal(end: type[BaseException]) -> None:
    with pytest.raises(end), refusing_panics(InvalidRequest("no")):
        raise end
