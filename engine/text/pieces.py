"""What each token adds to a text, as bytes: the ground of streaming text, logprob bytes and token-level grammars.

`tokenizers` decodes whole lists. For the decoders that causal language models use, the text of a list is the UTF-8
reading of its tokens' bytes in a row, where only the first token may differ (a leading space is stripped). So a
token's bytes are looked up once and kept, and adding a token to a text costs the same however long the text is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import tokenizers

from engine.errors import UnsupportedModel
from engine.text.tokenizer_file import NO_TEXT, refusing_panics

_MAX_ANCHOR = 50_000
"""Ids that are looked at for a token of plain letters. Vocabularies have one among their first hundreds."""

_STREAMABLE = frozenset({"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece"})


class TokenPieces:
    """The bytes of every token of one tokenizer; raises UnsupportedModel for a decoder that looks ahead."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        kinds = set(_decoder_kinds(tokenizer.decoder))
        if unknown := kinds - _STREAMABLE:
            raise UnsupportedModel(
                f"tokenizer.json decodes with {', '.join(sorted(unknown))}; "
                f"text can be streamed for {', '.join(sorted(_STREAMABLE))}"
            )
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        self._special = frozenset(
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self._anchor, self._anchor_text = self._find_anchor()
        self._inner: dict[int, bytes] = {}

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of control tokens, which `skip_special_tokens` leaves out."""
        return self._special

    def knows(self, token_id: int) -> bool:
        """Whether there is such a token; ids beyond the vocabulary (padding of the head) are none."""
        return self._tokenizer.id_to_token(token_id) is not None

    def first(self, token_id: int) -> bytes:
        """The bytes of the token where it begins a text; b"" for an unknown id."""
        raw = self._raw_bytes(token_id)
        return self._decode(token_id).encode() if raw is None else raw

    def inner(self, token_id: int) -> bytes:
        """The bytes of the token after others; b"" for an unknown id."""
        found = self._inner.get(token_id)
        if found is None:
            raw = self._raw_bytes(token_id)
            found = self._after_anchor(token_id).encode() if raw is None else raw
            self._inner[token_id] = found
        return found

    def _raw_bytes(self, token_id: int) -> bytes | None:
        """The bytes of a token that spells bytes rather than characters, else None."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            try:
                return bytes(_BYTE_OF_CHARACTER[character] for character in token)
            except KeyError:
                return token.encode()
        if self._byte_fallback and (value := _fallback_byte(token)) is not None and value >= 0x80:
            return bytes([value])
        return None

    def _decode(self, *token_ids: int) -> str:
        with refusing_panics(NO_TEXT):
            return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def _after_anchor(self, token_id: int) -> str:
        return self._decode(self._anchor, token_id)[len(self._anchor_text) :]

    def _find_anchor(self) -> tuple[int, str]:
        """A token that reads the same whatever follows it: one whose text is plain letters."""
        for token_id in range(min(self._tokenizer.get_vocab_size(), _MAX_ANCHOR)):
            token = self._tokenizer.id_to_token(token_id) or ""
            if token.isalpha() and token.isascii() and self._decode(token_id) == token:
                return token_id, token
        return 0, self._decode(0)


def _decoder_kinds(decoder: tokenizers.decoders.Decoder | None) -> Iterator[str]:
    """The types of a tokenizer's decoder, those inside a Sequence included; its state is tokenizer.json's part."""
    if decoder is not None:
        yield from _kinds(json.loads(decoder.__getstate__()))


def _kinds(description: Mapping[str, object]) -> Iterator[str]:
    inner = description.get("decoders")
    if description["type"] == "Sequence" and isinstance(inner, list):
        for child in inner:
            yield from _kinds(child)
    else:
        yield str(description["type"])


def _fallback_byte(token: str) -> int | None:
    """The value of a byte token such as "<0xE2>" (SentencePiece's byte fallback), else None."""
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    try:
        return int(token[3:5], 16)
    except ValueError:
        return None


def _byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level BPE, inverted (GPT-2, Radford et al. 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(shifted)}


_BYTE_OF_CHARACTER = _byte_alphabet()
