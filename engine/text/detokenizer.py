"""From token ids to text, one token at a time."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from engine.config import SamplingParams
from engine.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Turns the ids of one answer into text as they come, in constant time per token.

    A character that is not whole yet is held back: at most three bytes, until it is whole, until a byte shows that
    it never will be (it becomes U+FFFD then, as in decoding at once), or until `flush`. All pushes and the flush
    together equal `Tokenizer.decode` of all ids. The one exception is SentencePiece's byte tokens: the library gives
    up a whole run of them for one bad byte, which no stream can do; here the good characters of the run stay.

    shown: control tokens that are text even where the others are skipped.  begins: whether the first token begins a
    text, where a space that the tokenizer writes in front of every text is no part of it; else it goes on with one.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        shown: Iterable[int] = (),
        begins: bool = True,
    ) -> None:
        self._pieces = tokenizer.pieces
        self._skipped = tokenizer.special_ids.difference(shown) if skip_special_tokens else frozenset[int]()
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = begins

    @property
    def unfinished(self) -> bool:
        """Whether the bytes of a character are held back."""
        return bool(self._characters.getstate()[0])

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; "" for a skipped control token or an unfinished character."""
        if token_id in self._skipped:
            return ""
        raw = self.bytes_of(token_id)
        self._at_start = self._at_start and not self._pieces.knows(token_id)
        return self._characters.decode(raw)

    def ahead(self, raw: bytes) -> str:
        """The whole characters of what these bytes would add; the text stays where it is."""
        return codecs.getincrementaldecoder("utf-8")("replace").decode(self._characters.getstate()[0] + raw)

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of `token_id` where it comes next, a control token's too; the text stays where it is."""
        return self._pieces.first(token_id) if self._at_start else self._pieces.inner(token_id)

    def flush(self) -> str:
        """The end of the text: U+FFFD for an unfinished character, else ""."""
        return self._characters.decode(b"", final=True)


def begins_text(tokenizer: Tokenizer, prompt_ids: Sequence[int], params: SamplingParams, *, continues: bool) -> bool:
    """Return whether the first token of an answer begins a text, for `IncrementalDetokenizer`.

    continues: as in BackendRequest. An answer that is held to a grammar has every character that the grammar says.
    """
    return params.grammar is None and (not continues or tokenizer.opens_text(prompt_ids))
