"""A model folder without weights whose tokenizer maps token id b to byte b: text and ids are foretold at sight."""

from __future__ import annotations

import json
from pathlib import Path

from engine.config import ModelSpec

EOS_ID = 256
VOCAB_SIZE = 257

_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 4096,
    "vocab_size": VOCAB_SIZE,
    "eos_token_id": EOS_ID,
    "torch_dtype": "float32",
}


def write_fake_model(folder: Path, *, starts: bool = False) -> Path:
    """Write the folder's JSON files (config, tokenizer, chat template) and return it. starts: every text begins with a
    token of its own, <eos>."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS_ID}))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {"eos_token": "<eos>", "chat_template": _CHAT_TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
        )
    )
    starting = {"post_processor": _STARTS} if starts else {}
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer() | starting))
    return folder


def fake_spec(folder: Path, **fields: object) -> ModelSpec:
    """A spec for the fake model, written into `folder` if it is not there yet."""
    if not (folder / "config.json").exists():
        write_fake_model(folder)
    return ModelSpec(path=folder, name="fake", **fields)  # type: ignore[arg-type]


_TEXT = {"Sequence": {"id": "A", "type_id": 0}}
_START = {"SpecialToken": {"id": "<eos>", "type_id": 0}}
_STARTS = {
    "type": "TemplateProcessing",
    "single": [_START, _TEXT],
    "pair": [_START, _TEXT, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<eos>": {"id": "<eos>", "ids": [EOS_ID], "tokens": ["<eos>"]}},
}


def _byte_characters() -> list[str]:
    """GPT-2's printable stand-in for each byte, in byte order (Radford et al. 2019, byte-level BPE)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    spare = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(spare)) for byte in range(256)]


def _tokenizer() -> dict[str, object]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": EOS_ID,
                "content": "<eos>",
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {character: byte for byte, character in enumerate(_byte_characters())},
            "merges": [],
        },
    }
