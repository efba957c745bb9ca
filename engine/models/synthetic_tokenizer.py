"""A tokenizer of any size with nothing to learn from: bytes, and merges of letters in alphabetical order."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain, islice, product
from pathlib import Path
from string import ascii_lowercase

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.errors import InvalidRequest

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 0, 1 and 2; a turn and an answer end with <|im_end|>."""

PAD_TOKEN_ID = 0
EOS_TOKEN_IDS = (2, 0)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_SPACE = "Ġ"  # how byte-level vocabularies write one
_PAIRS = tuple(product((_SPACE, *ascii_lowercase), ascii_lowercase))
_INNER_PAIRS = tuple(product(ascii_lowercase, repeat=2))


def write_tokenizer(folder: Path, *, vocab_size: int) -> None:
    """Write a byte-level BPE tokenizer (any text round-trips) of exactly `vocab_size` ids, with a ChatML template.

    Raises InvalidRequest for fewer ids than bytes and special tokens need.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = [*SPECIAL_TOKENS, *alphabet]
    if vocab_size < len(plain):
        raise InvalidRequest(
            f"a tokenizer of {vocab_size} ids cannot be made: bytes and special tokens are {len(plain)}"
        )
    merges = list(islice(_merges(), vocab_size - len(plain)))
    words = plain + ["".join(pair) for pair in merges]
    vocab = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": SPECIAL_TOKENS[2],
        "pad_token": SPECIAL_TOKENS[PAD_TOKEN_ID],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")


def _merges() -> Iterator[tuple[str, str]]:
    """Words of two letters, then of three, then of four: 494 thousand, none twice."""
    pairs = ["".join(pair) for pair in _PAIRS]
    inner = ["".join(pair) for pair in _INNER_PAIRS]
    return chain(_PAIRS, product(pairs, ascii_lowercase), product(pairs, inner))
