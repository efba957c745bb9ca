"""Any tokenizer.json is a tokenizer or one sentence, and what it makes of a text is bounded too."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from engine.errors import EngineError, InvalidRequest, UnsupportedModel
from engine.text.tokenizer import Tokenizer
from engine.text.tokenizer_config import refuse_other_vocabulary
from tests.fakes import tiny_tokenizers
from tests.fakes.bounds import outcome
from tests.fakes.mutations import changed, damaged

pytestmark = pytest.mark.long

KINDS = ("byte_level", "byte_fallback", "metaspace")
WHOLE: dict[str, dict[str, Any]] = {kind: json.loads(getattr(tiny_tokenizers, kind)().to_str()) for kind in KINDS}
STEPS: dict[str, tuple[dict[str, Any], ...]] = {
    "normalizer": (
        {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"},
        {"type": "Replace", "pattern": {"Regex": "(x+x+)+y"}, "content": "é"},
        {"type": "Prepend", "prepend": "▁"},
        {"type": "NFKC"},
        {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "lowercase": True},
        {"type": "Strip", "strip_left": True, "strip_right": True},
    ),
    "pre_tokenizer": (
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        {"type": "Split", "pattern": {"Regex": r"\s+(?!\S)|(x+x+)+y"}, "behavior": "Removed", "invert": True},
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
        {"type": "Digits", "individual_digits": True},
    ),
    "decoder": (
        {"type": "Replace", "pattern": {"String": "e"}, "content": "eee"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ),
}
LISTS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}
TEXT = "the quick\n\tbrown \ufdfa ﬃ 日本 <s> 😀 " + "x" * 60


def used(folder: Path) -> str:
    """What comes of a folder's tokenizer and of a text by it."""
    subject = Tokenizer.from_folder(folder)
    ids = subject.encode(TEXT)
    assert len(ids) < 100 * len(TEXT)
    said = subject.decode(ids) + str(subject.spans(TEXT)) + str(list(map(subject.token_bytes, ids)))
    refuse_other_vocabulary(folder, folder)
    return str(len(said))


def look(folder: Path, content: bytes) -> None:
    (folder / "tokenizer.json").write_bytes(content)
    outcome(lambda: used(folder), len(content), UnsupportedModel, InvalidRequest)


def with_more_steps(whole: dict[str, Any], random: Random) -> dict[str, Any]:
    """A tokenizer of several steps each time, as real ones have."""
    document = copy.deepcopy(whole)
    for name, steps in STEPS.items():
        if random.random() < 0.6:
            chosen = [copy.deepcopy(random.choice(steps)) for _ in range(random.choice((1, 2, 3)))]
            document[name] = {"type": "Sequence", LISTS[name]: chosen}
    return document


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_with_other_values_is_one_or_a_sentence(tmp_path: Path, kind: str, seed: int) -> None:
    random = Random(f"{kind}{seed}")
    document = with_more_steps(WHOLE[kind], random)
    model, vocabulary = document.pop("model"), WHOLE[kind]["model"]["vocab"]
    if random.random() < 0.2:
        model = changed(model, random)
    elif random.random() < 0.3:  # most values are tokens: change one that is none
        model = changed({**model, "vocab": {}}, random)
        model = {**model, "vocab": vocabulary} if isinstance(model, dict) else model
    beside = changed(document, random, times=random.randrange(3))
    look(tmp_path, json.dumps({**beside, "model": model} if isinstance(beside, dict) else beside).encode())


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_of_other_bytes_is_one_or_a_sentence(tmp_path: Path, kind: str, seed: int) -> None:
    random = Random(f"{kind}{seed}")
    content = json.dumps(with_more_steps(WHOLE[kind], random)).encode()
    look(tmp_path, damaged(content, random, times=random.randrange(1, 4)))


@pytest.mark.parametrize("seed", range(30))
def test_what_two_tokenizers_have_is_compared_or_refused(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    for name in ("main", "draft"):
        tiny_tokenizers.save(tiny_tokenizers.byte_level(), tmp_path / name)
    file = tmp_path / "draft" / "tokenizer.json"
    file.write_text(json.dumps(changed(WHOLE["byte_level"], random, times=3)))
    outcome(lambda: str(refuse_other_vocabulary(tmp_path / "main", tmp_path / "draft")), 50_000, EngineError)
