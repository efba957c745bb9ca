"""The tokenizer in a GGUF file gives the ids, texts and prompts that the one in its model folder does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter, TokenType
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library

from engine.errors import UnsupportedModel
from engine.models.gguf.header import read_gguf
from engine.models.gguf.vocabulary import end_tokens_of, tokenizer_of
from engine.text.tokenizer import Tokenizer
from tests.fakes.gguf_models import write_gguf
from tests.fakes.tiny_models import EOS_TOKEN_IDS, make_tiny_model
from tests.fakes.tiny_tokenizers import byte_fallback

_TEXTS = (
    "",
    " ",
    "the quick brown fox",
    " two  spaces   three ",
    "one\n\ntwo\r\n\tthree\n \n four",
    "12345 6.78 1,000,000 ½²",
    "it's I'LL don't the token's",
    "smile 😀 family 👩‍👧 naïve é ünïcode 日本語 한국어",
    "def f(x):\n    return x**2  # ok\n",
)
_MARKED = ("<|im_start|>user\nthe fox <|im_end|>\n", "a<|endoftext|>b", "<|im_end|>")
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def split_by(expression: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(expression), "isolated"), _BYTES])


_WAYS: dict[str, tuple[Any, Any]] = {
    "gpt-2": (pre_tokenizers.ByteLevel(add_prefix_space=False), None),
    "smollm": (
        pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]),
        None,
    ),
    "llama-bpe": (split_by(_LLAMA3), None),
    "qwen2": (split_by(_QWEN2), normalizers.NFC()),
}
"""By llama.cpp's names: how the tokenizer.json of a model splits and normalises its texts."""


def pair(folder: Path, way: str = "gpt-2", **said: Any) -> tuple[Tokenizer, Tokenizer]:
    """The tokenizer of a model folder that splits text that way, and that of a GGUF file made of it."""
    make_tiny_model(folder / "model")
    library = Library.from_file(str(folder / "model" / "tokenizer.json"))
    library.pre_tokenizer, normalizer = _WAYS[way]
    if normalizer is not None:
        library.normalizer = normalizer
    library.save(str(folder / "model" / "tokenizer.json"))
    file = write_gguf(folder / "model", folder / "model.gguf", pre=way, **said)
    return Tokenizer.from_folder(folder / "model"), Tokenizer.from_folder(file)


@pytest.mark.parametrize("way", _WAYS)
def test_byte_level_ids_are_those_of_the_folder(tmp_path: Path, way: str) -> None:
    expected, found = pair(tmp_path, way)
    for text in (*_TEXTS, *_MARKED, "e\u0301"):
        assert found.encode(text) == expected.encode(text), text
        assert found.decode(found.encode(text)) == expected.decode(expected.encode(text))


def test_end_tokens_are_those_of_the_folder(tmp_path: Path) -> None:
    expected, found = pair(tmp_path)
    assert set(found.eos_token_ids) == set(expected.eos_token_ids) == set(EOS_TOKEN_IDS)


def test_a_prompt_by_the_chat_template_is_that_of_the_folder(tmp_path: Path) -> None:
    expected, found = pair(tmp_path)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " the fox?\n"}]

    async def rendered(tokenizer: Tokenizer) -> str:
        try:
            return await tokenizer.apply_chat_template(messages)
        finally:
            await tokenizer.close()

    assert asyncio.run(rendered(found)) == asyncio.run(rendered(expected))


def test_texts_begin_with_the_token_that_the_metadata_wants(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model")
    path = tmp_path / "model" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"bos_token": "<|endoftext|>"}))

    def first(name: str, **said: Any) -> int:
        return Tokenizer.from_folder(write_gguf(tmp_path / "model", tmp_path / name, **said)).encode("the fox")[0]

    assert first("wanted.gguf", add_bos=True) == 0
    assert first("not wanted.gguf", pre="llama-bpe", add_bos=False) != 0
    assert first("llama 3 says nothing.gguf", pre="llama-bpe") == 0
    assert first("gpt-2 says nothing.gguf") != 0


def test_a_way_to_split_text_that_is_not_known_is_refused_by_name(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model")
    file = write_gguf(tmp_path / "model", tmp_path / "model.gguf", pre="another-bpe")
    with pytest.raises(UnsupportedModel, match="another-bpe"):
        Tokenizer.from_folder(file)


def sentencepiece_pair(folder: Path, *, starts: bool) -> tuple[Tokenizer, Tokenizer]:
    """Likewise, of SentencePiece's kind. starts: a space is put before every text, as Llama 2 has it."""
    library = byte_fallback()
    make_tiny_model(folder / "model", vocab_size=library.get_vocab_size())
    if not starts:
        library.normalizer = normalizers.Replace(" ", "▁")
    library.save(str(folder / "model" / "tokenizer.json"))
    path = folder / "model" / "tokenizer_config.json"
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": None}
    path.write_text(json.dumps(json.loads(path.read_text()) | special))
    file = write_gguf(folder / "model", folder / "model.gguf", **({} if starts else {"add_space_prefix": False}))
    return Tokenizer.from_folder(folder / "model"), Tokenizer.from_folder(file)


@pytest.mark.parametrize("starts", [True, False])
def test_sentencepiece_ids_are_those_of_the_folder(tmp_path: Path, starts: bool) -> None:
    expected, found = sentencepiece_pair(tmp_path, starts=starts)
    for text in (*_TEXTS, "the thin   in<s>the</s> in"):
        assert found.encode(text) == expected.encode(text), text
        assert found.encode(text)[0] == 1
    if starts:
        assert found.decode(found.encode("the  thin é 世 😀")) == expected.decode(expected.encode("the  thin é 世 😀"))


def unigram_pair(folder: Path) -> tuple[Tokenizer, Tokenizer]:
    """Likewise, of a unigram model with byte tokens, as T5's tokenizer.json has it but for these."""
    pieces = {"<pad>": 0.0, "</s>": 0.0, "<unk>": 0.0, **{f"<0x{byte:02X}>": 0.0 for byte in range(256)}}
    pieces |= {"\u2581": -4.0, "\u2581the": -3.0, "he": -5.0, **dict.fromkeys("abcdefghijklmnopqrstuvwxyz", -8.0)}
    make_tiny_model(folder / "model", vocab_size=len(pieces))
    library = Library(models.Unigram([*pieces.items()], unk_id=2, byte_fallback=True))
    spaces = [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" +"), "\u2581")]
    library.normalizer = normalizers.Sequence([*spaces, normalizers.Prepend("\u2581")])
    library.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    library.add_special_tokens(["<pad>", "</s>", "<unk>"])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    library.decoder = decoders.Sequence(steps)
    library.save(str(folder / "model" / "tokenizer.json"))
    path = folder / "model" / "tokenizer_config.json"
    special = {"bos_token": None, "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    path.write_text(json.dumps(json.loads(path.read_text()) | special))
    flags = {"add_space_prefix": True, "remove_extra_whitespaces": True}
    file = write_gguf(folder / "model", folder / "model.gguf", **flags)
    return Tokenizer.from_folder(folder / "model"), Tokenizer.from_folder(file)


def test_unigram_ids_and_texts_are_those_of_the_folder(tmp_path: Path) -> None:
    expected, found = unigram_pair(tmp_path)
    for text in (*_TEXTS, "the</s>the", "a<unk>b"):
        ids = expected.encode(text)
        assert found.encode(text) == ids, text
        assert found.decode(ids) == expected.decode(ids)
    assert found.decode(found.encode("the \u00e9 \u4e16 \U0001f600")) == "the \u00e9 \u4e16 \U0001f600"


@pytest.mark.parametrize("table", [b"abc", b"\x04\0\0\0", b"\x05\0\0\0abcdefg\0", b"\x04\0\0\0abcdefg"])
def test_a_unigram_model_with_a_broken_table_of_characters_is_refused(tmp_path: Path, table: bytes) -> None:
    with pytest.raises(UnsupportedModel, match="precompiled_charsmap that is no table of characters"):
        Tokenizer.from_folder(unigram_file(tmp_path / "model.gguf", table=table))


def test_a_unigram_model_without_scores_for_its_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="2 entries in tokenizer"):
        Tokenizer.from_folder(unigram_file(tmp_path / "few.gguf", scores=[0.0, 0.0]))
    with pytest.raises(UnsupportedModel, match="scores that are no numbers"):
        Tokenizer.from_folder(unigram_file(tmp_path / "nan.gguf", scores=[0.0, 0.0, float("nan")]))
    with pytest.raises(UnsupportedModel, match="no unknown token"):
        Tokenizer.from_folder(unigram_file(tmp_path / "short.gguf", tokens=["a", "b"], scores=[0.0, 0.0]))


def unigram_file(
    file: Path, *, tokens: Sequence[str] = ("a", "b", "c"), scores: Sequence[float] = (0.0,) * 3, table: bytes = b""
) -> Path:
    writer = GGUFWriter(file, "llama")
    writer.add_tokenizer_model("t5")
    writer.add_token_list(list(tokens))
    writer.add_token_scores(list(scores))
    if table:
        writer.add_precompiled_charsmap(table)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return file


def vocabulary(file: Path, tokens: dict[str, TokenType], name: str = "") -> Path:
    """A file with these tokens alone, which nothing merges."""
    writer = GGUFWriter(file, "llama")
    if name:
        writer.add_name(name)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(tokens.values()))
    writer.add_token_merges(["a a"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return file


def test_tokens_that_end_a_turn_do_so_whatever_kind_the_file_gives_them(tmp_path: Path) -> None:
    kinds = {"a": TokenType.NORMAL, "<|im_end|>": TokenType.NORMAL, "<end_of_turn>": TokenType.USER_DEFINED}
    header = read_gguf(vocabulary(tmp_path / "model.gguf", kinds))
    assert end_tokens_of(header) == [1, 2]
    assert [(each["id"], each["special"]) for each in tokenizer_of(header)["added_tokens"]] == [(1, True), (2, True)]


def test_tokens_that_fill_the_embedding_are_none_of_the_vocabulary(tmp_path: Path) -> None:
    kinds = {"a": TokenType.NORMAL, "[PAD1]": TokenType.UNUSED, "spare": TokenType.UNUSED, "[PAD2]": TokenType.NORMAL}
    header = read_gguf(vocabulary(tmp_path / "model.gguf", kinds))
    assert tokenizer_of(header)["model"]["vocab"] == {"a": 0, "spare": 2, "[PAD2]": 3}


@pytest.mark.parametrize(("name", "taken"), [("Phi-3.5 mini instruct", True), ("phi3", True), ("Phi-2", False)])
def test_phi_3s_control_tokens_take_the_white_space_behind_them(tmp_path: Path, name: str, taken: bool) -> None:
    control = dict.fromkeys(("<|user|>", "<|endoftext|>", "<s>"), TokenType.CONTROL)
    added = tokenizer_of(read_gguf(vocabulary(tmp_path / "model.gguf", control, name)))["added_tokens"]
    assert [(each["content"], each["rstrip"]) for each in added] == [
        ("<|user|>", taken),
        ("<|endoftext|>", False),
        ("<s>", False),
    ]
