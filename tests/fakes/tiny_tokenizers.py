"""Small tokenizers of the kinds that real models use, made in memory: byte-level BPE and SentencePiece-like."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")
"""Ids 0, 1 and 2 of every tokenizer here."""

_TEXT = [
    "the quick brown fox jumps over the lazy dog",
    "one  two   three\n\tfour",
    "it's the token's text, isn't it? éè",
] * 3


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen have it: every byte is a character of the vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    tokenizer.add_tokens([AddedToken("two words"), AddedToken("日本")])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2 and Mistral have it: spaces are "▁", one is put in front, unknown characters become byte tokens."""
    pieces = [*"▁abcdefghijklmnopqrstuvwxyz.,?!'é世", "▁t", "he", "▁the", "▁▁", "in"]
    vocabulary = [*SPECIAL_TOKENS, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    model = models.BPE(
        vocab={piece: number for number, piece in enumerate(vocabulary)},
        merges=[("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "▁"), ("i", "n")],
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def metaspace() -> Tokenizer:
    """As newer SentencePiece conversions have it: one Metaspace step both ways, no byte tokens."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=list(SPECIAL_TOKENS), show_progress=False)
    tokenizer.train_from_iterator(_TEXT, trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, **files: dict[str, Any]) -> Path:
    """Write tokenizer.json and further JSON files, named without their ending (`config={...}`), to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder
