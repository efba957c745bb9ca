"""Texts become the ids that llama.cpp makes of them, for the tokenizers that GGUF names."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import AddedToken, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library

from engine.text.tokenizer import Tokenizer
from tests.fakes.gguf_models import write_gguf
from tests.fakes.llama_cpp import Ask, llama_cpps
from tests.fakes.sentencepiece_tables import charsmap
from tests.fakes.tiny_models import SPECIAL_TOKENS, make_tiny_model

pytest.importorskip("xllamacpp")

_PRE_TOKENIZERS = (
    "llama-bpe",
    "qwen2",
    "qwen35",
    "gpt-4o",
    "tekken",
    "gpt-2",
    "smollm",
    "deepseek-v3",
    "deepseek-coder",
    "deepseek-llm",
    "kimi-k2",
    "superbpe",
    "bloom",
    "viking",
    "seed-coder",
    "bailingmoe",
    "ufakzeka",
    "minicpm5",
    "jais-2",
    "exaone-moe",
    "laguna",
    "spark2_5",
    "youtu",
    "chameleon",
    "falcon",
    "default",
)
"""One name of each group that splits text in the same way."""
_ASCII_CASE = ("gpt-4o", "tekken")
"""Their words begin anew at upper-case letters, of which llama.cpp knows those of ASCII alone."""
_ANY_CASE = ("kimi-k2", "youtu")
"""Their words begin anew at upper-case letters, as their own tokenizers have it, and llama.cpp's do not."""
_PIECES = (
    "the",
    " The",
    "It's",
    "I'LL",
    " don't",
    "foo_bar",
    "HTTPServer",
    "x+=1;",
    "!!",
    " ...",
    "$5",
    "#a-b",
    "~^|`",
)
_PIECES += (
    "0",
    "12",
    "12345",
    "1234567",
    "6.78",
    " ",
    "  ",
    "\t",
    "\n",
    "\n\n",
    "\r\n",
    " \n ",
    "/",
    "//\n",
    "(a)",
    "<=>",
)
_PIECES += (
    "日本語",
    "中文。",
    "한국어",
    "ひらがな",
    "カタカナ",
    "é",
    "ÜBER",
    "ñandú",
    "😀",
    "👩‍👧",
    "½",
    "²",
    "…",
    "«»",
    "Привет",
)
_TEXTS = (
    "",
    "12345 6.78 1,000,000",
    "It's I'LL don't",
    "a\n\nb\r\n\tc\n \n d",
    "中文123中文",
    "  two  spaces   three  ",
)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    draw = random.Random(0)
    return [*_TEXTS, *("".join(draw.choices(_PIECES, k=draw.randint(1, 12))) for _ in range(300))]


def greedy_tokenizer(folder: Path) -> None:
    """Write a byte-level BPE whose merges go over all borders between words, so that where a text is split shows."""
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    draw = random.Random(1)
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(("".join(draw.choices(_PIECES, k=12)) for _ in range(2000)), trainer)
    library.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Tokenizer, Ask]]]:
    folder = tmp_path_factory.mktemp("models")
    make_tiny_model(folder / "model", vocab_size=1500, num_hidden_layers=1)
    greedy_tokenizer(folder / "model")
    files = [write_gguf(folder / "model", folder / f"{pre}.gguf", pre=pre, add_bos=False) for pre in _PRE_TOKENIZERS]
    with llama_cpps(*files) as asks:
        yield {
            pre: (Tokenizer.from_folder(file), ask) for pre, file, ask in zip(_PRE_TOKENIZERS, files, asks, strict=True)
        }


def their_ids(ask: Ask, text: str) -> list[int]:
    ids: list[int] = ask("/tokenize", {"content": text, "add_special": True, "parse_special": True})["tokens"]
    return ids


@pytest.mark.parametrize("pre", _PRE_TOKENIZERS)
def test_a_pre_tokenizer_splits_texts_as_llama_cpp_does(
    served: dict[str, tuple[Tokenizer, Ask]], texts: list[str], pre: str
) -> None:
    tokenizer, ask = served[pre]
    for text in texts:
        if pre in _ASCII_CASE and any(character in text for character in "\u00dc\u041f"):
            continue
        if pre in _ANY_CASE and begins_anew(text):
            continue
        assert tokenizer.encode(text) == their_ids(ask, text), text


def begins_anew(text: str) -> bool:
    """Whether an upper-case letter follows another that is none."""
    return any(first.isalpha() and not first.isupper() and second.isupper() for first, second in pairwise(text))


# Unigram models.

_WITHOUT_TABLE = "T5 without a table of characters"
_WAYS = {
    "T5": {"add_space_prefix": True, "remove_extra_whitespaces": True},
    _WITHOUT_TABLE: {"add_space_prefix": True, "remove_extra_whitespaces": True},
    "as it stands": {"add_space_prefix": False},
    "a space in front": {"add_space_prefix": True},
}
_TABLE = {
    "\n": " ",
    "\t": " ",
    "\u00bd": "1/2",
    "\u2026": "...",
    "\u00e9": "e",
    "\u3000": " ",
    "\uff21": "A",
    "e\u0301": "E",
}


def unigram_folder(folder: Path, *, with_bytes: bool = False) -> Path:
    """A model with a unigram tokenizer of random scores, whose vocabulary lacks some characters."""
    draw = random.Random(2)
    pieces: dict[str, float] = {"<pad>": 0.0, "</s>": 0.0, "<unk>": 0.0, "<mask>": 0.0}
    if with_bytes:
        pieces |= {f"<0x{byte:02X}>": 0.0 for byte in range(256)}
    sample = "".join(draw.choices(_PIECES, k=500)).replace(" ", "\u2581")
    for _ in range(400):
        at = draw.randrange(len(sample))
        pieces.setdefault(sample[at : at + draw.randint(1, 5)], -draw.uniform(3, 12))
    make_tiny_model(folder, vocab_size=len(pieces), num_hidden_layers=1)
    library = Library(models.Unigram(list(pieces.items()), unk_id=2, byte_fallback=with_bytes))
    library.add_special_tokens(["<pad>", "</s>", "<unk>"])
    library.add_tokens([AddedToken("<mask>", normalized=False)])
    library.save(str(folder / "tokenizer.json"))
    path = folder / "tokenizer_config.json"
    special = {"bos_token": None, "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    path.write_text(json.dumps(json.loads(path.read_text()) | special))
    return folder


@pytest.fixture(scope="module")
def unigrams(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Tokenizer, Ask]]]:
    folder = tmp_path_factory.mktemp("unigrams")
    model, table = unigram_folder(folder / "model"), charsmap(_TABLE)
    files = [
        write_gguf(model, folder / f"{way}.gguf", charsmap=b"" if way == _WITHOUT_TABLE else table, **flags)
        for way, flags in _WAYS.items()
    ]
    with llama_cpps(*files) as asks:
        yield {way: (Tokenizer.from_folder(file), ask) for way, file, ask in zip(_WAYS, files, asks, strict=True)}


@pytest.mark.parametrize("way", _WAYS)
def test_a_unigram_model_makes_the_ids_that_llama_cpp_makes(
    unigrams: dict[str, tuple[Tokenizer, Ask]], texts: list[str], way: str
) -> None:
    tokenizer, ask = unigrams[way]
    for text in (
        *texts,
        "  a \n  b  ",
        "the\n  the\n\n the",
        " a <mask> b",
        "the</s>the  the",
        "<unk> The",
        "\u2581the",
        "the\u0301 e",
    ):
        assert tokenizer.encode(text) == their_ids(ask, text), text
