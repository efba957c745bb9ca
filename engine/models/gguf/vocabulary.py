"""The tokenizer that a GGUF file's metadata describes, as the tokenizer.json and tokenizer_config.json of the same
model have it.

Pre-tokenizers are those that llama.cpp's names stand for (src/llama-vocab.cpp), as the published tokenizer.json of a
model of that name has them.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from engine.config import quote_value
from engine.errors import UnsupportedModel
from engine.models.gguf.header import GgufHeader

Json = dict[str, Any]

# Expressions of the published tokenizers; where one has several, each splits what the one before left whole.
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_CASED = r"[\p{Lu}\p{Ll}\p{Lt}&&[^\u10d0-\u10ff]]"
"""Letters of alphabets with two cases, but for Georgian's."""
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?{_CASED}+",
    r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}+",
)
_KIMI_UPPER, _KIMI_LOWER = rf"[{_UPPER}&&[^\p{{Han}}]]", rf"[{_LOWER}&&[^\p{{Han}}]]"
_KIMI_K2 = (
    r"\p{Han}+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}*{_KIMI_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}+{_KIMI_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
_BLOOM = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_SEED_CODER = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_BAILING = _QWEN2.replace(r"\s*[\r\n]+", r"\s*[\r\n]")
_NO_CONTRACTIONS = _QWEN2.removeprefix(f"{_CONTRACTIONS}|")
_MINICPM5 = (r"\p{N}{1,3}", _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}+"))
_JAIS2 = _LLAMA3.replace(
    r"\s+(?!\S)|\s+", "|".join(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2")) + r"|\s"
)
_EXAONE_MOE = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_LINES = r"[^\n]+|\n+"
_SPARK = (
    *_DEEPSEEK_V3[:2],
    _DEEPSEEK_V3[2].replace(r"[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+", r"[\p{P}\p{S}]+|[\r\n]"),
    r"\p{N}",
)
_YOUTU = (
    r"[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    r"|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    _GPT4O.replace(r"\p{N}{1,3}", r"\p{N}"),
)
_CHAMELEON = (
    "<sentinel:[0-9]+>",
    "IMGIMG[A-I]{1,4}Z",
    "[\t\n]|    |  ",
    r"\p{N}",
    r"[\p{P}!-/:-@\[-`{-~]",
    _GPT2,
)
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")

_BEGUN_LLAMA3 = (
    "llama3",
    "llama-v3",
    "llama-bpe",
    "falcon3",
    "falcon-h1",
    "pixtral",
    "midm-2.0",
    "lfm2",
    "jina-v5-nano",
)

_EXPRESSIONS: Mapping[str, Sequence[str]] = {
    name: expressions
    for names, expressions in (
        ((*_BEGUN_LLAMA3, "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), (_LLAMA3,)),
        (
            ("qwen2", "stablelm2", "deepseek-r1-qwen", "megrez", "hunyuan", "solar-open", "grok-2", "kormo", "f2llmv2"),
            (_QWEN2,),
        ),
        (("qwen35",), (_QWEN35,)),
        (("gpt-4o", "llama4", "kanana2", "minimax-m2", "talkie"), (_GPT4O,)),
        (("tekken",), (_TEKKEN,)),
        (("gpt-2", "phi-2", "jina-es", "jina-de", "mpt", "olmo", "jais", "trillion"), (_GPT2,)),
        (("granite-docling", "gigachat", "a.x-4.0", "mellum", "exaone4"), (_GPT2,)),
        (("smollm", "refact", "starcoder", "command-r", "codeshell"), (r"\p{N}", _GPT2)),
        (("exaone", "minerva-7b", "mellum2"), (r"\p{N}", _GPT2)),
        (("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _DEEPSEEK_V3),
        (("deepseek-coder",), _DEEPSEEK_CODER),
        (("deepseek-llm",), _DEEPSEEK_LLM),
        (("kimi-k2",), (_KIMI_K2,)),
        (("superbpe",), (r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
        (("bloom", "poro-chat", "gpt3-finnish"), (_BLOOM,)),
        (("viking",), (_BLOOM, r"\p{N}")),
        (("seed-coder",), (_SEED_CODER,)),
        (("bailingmoe", "bailingmoe2", "llada-moe"), (_BAILING,)),
        (("ufakzeka",), (_NO_CONTRACTIONS,)),
        (("minicpm5",), _MINICPM5),
        (("jais-2",), (_JAIS2,)),
        (("exaone-moe",), (_EXAONE_MOE,)),
        (("laguna",), (_LINES, _QWEN2)),
        (("spark2_5",), _SPARK),
        (("youtu",), _YOUTU),
        (("chameleon",), _CHAMELEON),
        (("falcon",), _FALCON),
        (("default",), _DEFAULT),
    )
    for name in names
}
"""By llama.cpp's names of pre-tokenizers."""
_BYTES: Json = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_WHOLE_WORDS = (*_BEGUN_LLAMA3, "dbrx", "smaug-bpe", "tekken", "gpt-4o", "llama4", "minicpm5", "youtu")
"""Words that are tokens as a whole are not merged (ignore_merges)."""
_COMPOSED = ("qwen2", "qwen35", "deepseek-r1-qwen", "olmo")
"""Texts are normalised to NFC first."""
_BEGUN = (*_BEGUN_LLAMA3, "tekken", "chameleon")
"""Texts begin with BOS where the metadata does not say whether they do."""

_ENDS = frozenset(
    (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>"),
        *("<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>"),
        *("<end_of_utterance>", "<eos>"),
    )
)
"""Control tokens that end an answer, or a turn of it, whatever the metadata says: as llama.cpp has it."""

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
_PADDING = re.compile(r"\[PAD\d+\]")
"""Tokens that fill the embedding's rows, which no text has."""

_PHI3 = ("phi-3", "phi3")
_PHI3_STRICT = ("<unk>", "<s>", "<|endoftext|>")
"""Of Phi 3's control tokens, those that leave the white space behind them: as llama.cpp has it."""
_SPACE = "\u2581"

_USUAL_IDS: Mapping[str, Mapping[str, int]] = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "t5": {"eos": 1, "unknown": 2, "padding": 0},
}
"""Special tokens that the metadata does not name, by kind of tokenizer: as llama.cpp has it."""
_ALL_BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))

_MAX_MERGED_LENGTH, _MAX_MERGED_LENGTHS, _MAX_MERGES = 256, 4_000_000, 1_000_000
"""Characters of a token that merges make, of all tokens, and merges. Gemma's 262,144 tokens have 580,000 merges."""


def tokenizer_of(header: GgufHeader) -> Json:
    """The tokenizer.json. Raises UnsupportedModel as `refuse_tokenizer` does, and for tokens that could be merged
    without end."""
    refuse_tokenizer(header)
    tokens = list(header.texts("tokenizer.ggml.tokens") or ())
    kinds = _kinds(header, tokens)
    vocabulary = {
        token: number
        for number, token in enumerate(tokens)
        if kinds[number] != _UNUSED or _PADDING.fullmatch(token) is None
    }
    match header.text("tokenizer.ggml.model"):
        case "gpt2":
            parts = _byte_level(header, vocabulary)
        case "t5":
            parts = _unigram(header, tokens, kinds)
        case _:
            parts = _sentencepiece(header, tokens, vocabulary)
    is_phi3 = any(name in header.text("general.name").lower() for name in _PHI3)
    added = [
        _added(number, token, kinds[number], takes_space=is_phi3 and token not in _PHI3_STRICT)
        for number, token in enumerate(tokens)
        if kinds[number] in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    return {"version": "1.0", "added_tokens": added, "post_processor": _post_processor(header, tokens), **parts}


def refuse_tokenizer(header: GgufHeader) -> None:
    """Raise UnsupportedModel for a file without a tokenizer, or with one of a kind that is not read, one that splits
    words in an unknown way, or one whose lists are missing or do not fit together. No text is decoded."""
    tokens = header.texts("tokenizer.ggml.tokens")
    for key, is_there in (("model", "tokenizer.ggml.model" in header), ("tokens", bool(tokens))):
        if not is_there:
            raise UnsupportedModel(f"{quote_value(header.file.name)} has no tokenizer: it lacks tokenizer.ggml.{key}")
    _types(header, num_tokens := len(tokens or ()))
    match header.text("tokenizer.ggml.model"):
        case "gpt2":
            _pre_tokenizer(header, header.text("tokenizer.ggml.pre", "default"))
            _merge_texts(header)
        case "llama":
            _scores(header, num_tokens)
        case "t5":
            _unknown(header, _scores(header, num_tokens))
            _charsmap(header)
        case other:
            raise UnsupportedModel(
                f"the tokenizer in {quote_value(header.file.name)} is of the kind {quote_value(other) or 'none'}; "
                "gpt2, llama and t5 are read",
                kind=quote_value(other),
            )


def tokenizer_config_of(header: GgufHeader) -> Json:
    """The tokenizer_config.json: special tokens as texts, and chat templates. Raises UnsupportedModel."""
    tokens = header.texts("tokenizer.ggml.tokens") or []
    config: Json = {}
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        if (number := _special(header, key, len(tokens))) is not None:
            config[name] = tokens[number]
    templates = dict(_templates(header))
    if templates:
        config["chat_template"] = [{"name": name, "template": source} for name, source in templates.items()]
    return config


def end_tokens_of(header: GgufHeader) -> list[int]:
    """Ids of the tokens that end an answer, or a turn of it, that which the metadata names first."""
    tokens = header.texts("tokenizer.ggml.tokens") or []
    named = [_special(header, key, len(tokens)) for key in ("eos", "eot", "eom")]
    by_text = (number for number, token in enumerate(tokens) if token in _ENDS)
    return list(dict.fromkeys([*(number for number in named if number is not None), *by_text]))


def _special(header: GgufHeader, key: str, num_tokens: int) -> int | None:
    """The id of the token that begins a text ("bos"), ends one ("eos") and so on: that in the metadata, else the usual
    one of this kind of tokenizer; None where there is no such token."""
    usual = _USUAL_IDS.get(header.text("tokenizer.ggml.model"), {}).get(key)
    for number in (header.whole(f"tokenizer.ggml.{key}_token_id"), usual):
        if number is not None and 0 <= number < num_tokens:
            return number
    return None


def _templates(header: GgufHeader) -> Iterator[tuple[str, str]]:
    prefix = "tokenizer.chat_template"
    for name in header.names():
        if name == prefix:
            yield "default", header.text(name)
        elif name.startswith(f"{prefix}."):
            yield name.removeprefix(f"{prefix}."), header.text(name)


def _kinds(header: GgufHeader, tokens: Sequence[str]) -> Sequence[float]:
    """Of each token. Those that end a turn are control tokens whatever the metadata says."""
    types = _types(header, len(tokens))
    return [_CONTROL if token in _ENDS else kind for token, kind in zip(tokens, types, strict=True)]


def _types(header: GgufHeader, num_tokens: int) -> Sequence[float]:
    """Those that the metadata gives the tokens. Raises UnsupportedModel where they are not as many."""
    types = header.numbers("tokenizer.ggml.token_type")
    if types is None:
        return [_NORMAL] * num_tokens
    if len(types) != num_tokens:
        raise _misfit(header, "token_type", len(types), num_tokens)
    return types


def _scores(header: GgufHeader, num_tokens: int) -> Sequence[float]:
    """Those of all tokens, likewise."""
    scores = header.numbers("tokenizer.ggml.scores")
    if scores is None or len(scores) != num_tokens:
        raise _misfit(header, "scores", len(scores or ()), num_tokens)
    return scores


def _merge_texts(header: GgufHeader) -> Sequence[str]:
    """The merges of byte-level BPE. Raises UnsupportedModel where there are none."""
    merges = header.texts("tokenizer.ggml.merges")
    if merges is None:
        raise UnsupportedModel(f"{quote_value(header.file.name)} has no tokenizer.ggml.merges for its tokenizer")
    return merges


def _unknown(header: GgufHeader, scores: Sequence[float]) -> int:
    """The unknown token of a unigram model. Raises UnsupportedModel without one, or for scores that are no numbers."""
    unknown = _special(header, "unknown", len(scores))
    if unknown is None or not all(map(math.isfinite, scores)):
        what = "no unknown token" if unknown is None else "tokenizer.ggml.scores that are no numbers"
        raise UnsupportedModel(f"the unigram tokenizer in {quote_value(header.file.name)} has {what}")
    return unknown


def _added(number: int, token: str, kind: float, *, takes_space: bool) -> Json:
    flags = dict.fromkeys(("single_word", "lstrip", "normalized"), False)
    return {
        "id": number,
        "content": token,
        "special": kind != _USER_DEFINED,
        **flags,
        "rstrip": takes_space and (kind == _CONTROL or token == "</s>"),
    }


def _byte_level(header: GgufHeader, vocabulary: Mapping[str, int]) -> Json:
    """Byte-level BPE, as GPT-2 has it."""
    name = header.text("tokenizer.ggml.pre", "default")
    return {
        "normalizer": {"type": "NFC"} if name in _COMPOSED else None,
        "pre_tokenizer": _pre_tokenizer(header, name),
        "decoder": _BYTES,
        "model": {
            "type": "BPE",
            "vocab": vocabulary,
            "merges": list(_merge_texts(header)),
            "ignore_merges": name in _WHOLE_WORDS,
        },
    }


def _pre_tokenizer(header: GgufHeader, name: str) -> Json:
    expressions = _EXPRESSIONS.get(name)
    if expressions is None:
        raise UnsupportedModel(
            f"the tokenizer in {quote_value(header.file.name)} splits words as {quote_value(name)} does; known are "
            f"{', '.join(sorted(_EXPRESSIONS))}",
            pre=quote_value(name),
        )
    splits: list[Json] = [
        {"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False} for each in expressions
    ]
    return {"type": "Sequence", "pretokenizers": [*splits, _BYTES]}


def _sentencepiece(header: GgufHeader, tokens: Sequence[str], vocabulary: Mapping[str, int]) -> Json:
    """SentencePiece's BPE, which merges what makes the token of the highest score: the merges are all ways to make a
    token of two, best first."""
    scores = _scores(header, len(tokens))
    starts = header.flag("tokenizer.ggml.add_space_prefix", True)
    unknown = _special(header, "unknown", len(tokens))
    steps: list[Json] = [{"type": "Prepend", "prepend": _SPACE}] if starts else []
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": _SPACE})
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "decoder": _spaces_decoder(starts),
        "model": {
            "type": "BPE",
            "unk_token": tokens[unknown] if unknown is not None else None,
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": vocabulary,
            "merges": _merges(tokens, vocabulary, scores),
        },
    }


def _spaces_decoder(starts: bool) -> Json:
    """SentencePiece's: starts: whether a space that it put before the text is taken away."""
    decoders: list[Json] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if starts:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": decoders}


def _unigram(header: GgufHeader, tokens: Sequence[str], kinds: Sequence[float]) -> Json:
    """SentencePiece's unigram model, which finds the tokens of the highest sum of scores. What no token has becomes
    byte tokens where there are all 256, as SentencePiece has it, else the unknown token."""
    scores = _scores(header, len(tokens))
    unknown = _unknown(header, scores)
    lowest = min((score for score, kind in zip(scores, kinds, strict=True) if kind == _NORMAL), default=0.0)
    merges = header.flag("tokenizer.ggml.remove_extra_whitespaces", False)
    starts = merges or header.flag("tokenizer.ggml.add_space_prefix", False)
    table = _charsmap(header)
    steps: list[Json] = []
    if table:
        steps.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()})
    if merges:
        steps += [_replace(" +", " "), _replace(r"\A | \z", "")]
    if starts:
        steps.append(_replace(r"\A(?= *[^ ])", _SPACE))
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": _SPACE})
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "decoder": _spaces_decoder(starts),
        "model": {
            "type": "Unigram",
            "unk_id": unknown,
            "byte_fallback": len(_ALL_BYTES.intersection(tokens)) == len(_ALL_BYTES),
            "vocab": [
                [token, _unigram_score(score, kind, lowest)]
                for token, score, kind in zip(tokens, scores, kinds, strict=True)
            ],
        },
    }


def _unigram_score(score: float, kind: float, lowest: float) -> float:
    """The library's unknown token costs 10 more than the lowest of all scores, SentencePiece's than that of a normal
    token: the others get no lower one."""
    if kind in (_NORMAL, _UNUSED):
        return max(score, lowest)
    return 0.0 if kind == _USER_DEFINED else lowest


def _charsmap(header: GgufHeader) -> bytes:
    """SentencePiece's table of characters and what stands for them, b"" for none: its size in 4 bytes, a trie of 32-bit
    units, then texts that end with 0. Raises UnsupportedModel for another."""
    table = header.numbers("tokenizer.ggml.precompiled_charsmap")
    if table is None or not len(table):
        return b""
    raw = table.tobytes() if isinstance(table, memoryview) and table.format in ("b", "B") else b""
    trie_bytes = int.from_bytes(raw[:4], "little")
    if not trie_bytes or trie_bytes % 4 or 4 + trie_bytes >= len(raw) or raw[-1]:
        raise UnsupportedModel(
            f"{quote_value(header.file.name)} has a tokenizer.ggml.precompiled_charsmap that is no table of characters"
        )
    return raw


def _replace(expression: str, content: str) -> Json:
    return {"type": "Replace", "pattern": {"Regex": expression}, "content": content}


def _merges(tokens: Sequence[str], vocabulary: Mapping[str, int], scores: Sequence[float]) -> list[list[str]]:
    found: list[tuple[float, int, int, list[str]]] = []
    lengths = list(map(len, tokens))
    if max(lengths) > _MAX_MERGED_LENGTH or sum(lengths) > _MAX_MERGED_LENGTHS:
        raise UnsupportedModel(
            f"the SentencePiece tokenizer's tokens are too long: more than {_MAX_MERGED_LENGTH} characters in one, or "
            f"more than {_MAX_MERGED_LENGTHS:,} in all, are not supported"
        )
    for number, token in enumerate(tokens):
        if len(found) > _MAX_MERGES:
            raise UnsupportedModel(
                f"the SentencePiece tokenizer has more than {_MAX_MERGES:,} ways to make a token of two, which is not "
                "supported",
                limit=_MAX_MERGES,
            )
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in vocabulary and right in vocabulary:
                found.append((-scores[number], vocabulary[left], vocabulary[right], [left, right]))
    return [pair for *_, pair in sorted(found, key=lambda each: each[:3])]


def _post_processor(header: GgufHeader, tokens: Sequence[str]) -> Json | None:
    """The tokens that are put around a text: the token that begins it, and the one that ends it."""
    begins = header.text("tokenizer.ggml.model") == "llama" or header.text("tokenizer.ggml.pre") in _BEGUN
    around = []
    ends = header.text("tokenizer.ggml.model") == "t5"
    for key, name, usual in (("add_bos_token", "bos", begins), ("add_eos_token", "eos", ends)):
        wanted = header.flag(f"tokenizer.ggml.{key}", usual)
        around.append(_special(header, name, len(tokens)) if wanted else None)
    begin, end = around
    if begin is None and end is None:
        return None
    special = {tokens[number]: number for number in (begin, end) if number is not None}
    single: list[Json] = [{"Sequence": {"id": "A", "type_id": 0}}]
    if begin is not None:
        single.insert(0, {"SpecialToken": {"id": tokens[begin], "type_id": 0}})
    if end is not None:
        single.append({"SpecialToken": {"id": tokens[end], "type_id": 0}})
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, *single],
        "special_tokens": {
            token: {"id": token, "ids": [number], "tokens": [token]} for token, number in special.items()
        },
    }


def _misfit(header: GgufHeader, what: str, count: int, tokens: int) -> UnsupportedModel:
    return UnsupportedModel(
        f"{quote_value(header.file.name)} has {count} entries in tokenizer.ggml.{what} for {tokens} tokens"
    )
