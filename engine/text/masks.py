"""The masks of one model's answers: what their grammars allow to come next, in the model's own tokens."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from functools import cached_property
from itertools import accumulate

import llguidance

from engine.backends.base import BackendRequest
from engine.config import Grammar
from engine.errors import InvalidRequest
from engine.text.grammar import LIMITS, define, in_deep_thread, unusable, without
from engine.text.tokenizer import Tokenizer

COMPILED_KEPT = 64
_WORD_BITS = 32
_DEAD_END = "NoExtensionBias"


class GrammarMask:
    """The TokenMask of one request (see `engine.backends.base`).

    matcher: at the start of the answer; this mask's own.  ends: ids that end the answer where the grammar may end.
    fewest: while fewer tokens are there, none of `ends` may come as long as anything else may.
    barred: the model's end tokens that are not among `ends`; they come only where nothing else may.
    """

    def __init__(
        self, matcher: llguidance.LLMatcher, *, ends: Sequence[int], fewest: int, barred: Sequence[int], size_bytes: int
    ) -> None:
        self._matcher = matcher
        self._ends = tuple(ends)
        self._barred = tuple(barred)
        self._fewest = fewest
        self._size_bytes = size_bytes
        self._tokens: list[int] = []

    @property
    def ended(self) -> bool:
        """Whether the grammar allows nothing more but the answer's end."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def error(self) -> str:
        """Why nothing is allowed any more; "" while anything is."""
        return _why_stuck(self._matcher)

    def allowed(self) -> bytes:
        """The tokens that may come now; none after an error."""
        found = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            return bytes(self._size_bytes)
        bits = found[: self._size_bytes].ljust(self._size_bytes, b"\0")
        unwanted = (*self._barred, *self._ends) if len(self._tokens) < self._fewest else self._barred
        if unwanted and not self.ended:
            fewer = bytearray(bits)
            for token_id in unwanted:
                fewer[token_id // 8] &= ~(1 << token_id % 8)
            return bytes(fewer) if any(fewer) else bits
        return bits

    def forced(self, count: int) -> bytes:
        """The text after the first `count` tokens as far as the grammar leaves no choice; b"" where the mask is not at
        that place, or the answer may end."""
        at_place = len(self._tokens) == count and not (self._matcher.is_stopped() or self._matcher.is_error())
        return self._matcher.compute_ff_bytes() if at_place else b""

    def accept(self, token_id: int) -> None:
        """Go on by a token; one that is not allowed is an error."""
        self._tokens.append(token_id)
        self._matcher.consume_token(token_id)

    def restart(self, generated: Sequence[int]) -> None:
        """Be where the answer is after these tokens."""
        known = self._tokens
        same = next((i for i, pair in enumerate(zip(known, generated, strict=False)) if pair[0] != pair[1]), None)
        same = min(len(known), len(generated)) if same is None else same
        if same < len(known):
            self._matcher.rollback(len(known) - same)
        self._tokens = list(generated)
        self._matcher.consume_tokens(list(generated[same:]))


class GrammarMasks:
    """Makes the masks of one worker's requests. What is compiled is kept, and so is the tokenizer in the shape that the
    library wants, which takes up to a second to make; so nothing of it is done before the first grammar comes.

    vocab_size: logits that the model gives per token, which may be more than the tokenizer has tokens, or fewer.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._compiled: dict[tuple[str, str], llguidance.LLMatcher] = {}
        self._compiling = threading.Lock()

    def begin(self, request: BackendRequest) -> Future[GrammarMask]:
        """The mask of a request that has a grammar, done at once where that was compiled lately. It raises
        InvalidRequest where the model cannot write what the grammar wants."""
        params = request.params
        assert params.grammar is not None, f"request {request.id} is held to nothing"
        grammar = params.grammar if params.stop else without(params.grammar, params.banned_strings)
        start = self._compiled.get((grammar.kind, grammar.source))
        if start is None:
            return in_deep_thread(lambda: self._mask(self._start_of(grammar), request), grammar)
        made: Future[GrammarMask] = Future()
        made.set_result(self._mask(start, request))
        return made

    def _start_of(self, grammar: Grammar) -> llguidance.LLMatcher:
        """The grammar, compiled; what many requests ask for at once is compiled for the first of them."""
        key = (grammar.kind, grammar.source)
        with self._compiling:
            if key not in self._compiled:
                self._compiled[key] = self._compile(grammar)
            start = self._compiled[key]
            if len(self._compiled) > COMPILED_KEPT:
                del self._compiled[next(iter(self._compiled))]
        return start

    def _compile(self, grammar: Grammar) -> llguidance.LLMatcher:
        start = llguidance.LLMatcher(self._library_tokenizer, define(grammar), log_level=0, limits=LIMITS)
        start.compute_bitmask()
        if start.is_error():
            raise unusable(grammar, _why_stuck(start))
        return start

    def _mask(self, start: llguidance.LLMatcher, request: BackendRequest) -> GrammarMask:
        mask = GrammarMask(
            start.deep_copy(),
            ends=[token_id for token_id in request.end_token_ids if token_id < self._vocab_size],
            barred=self._own_ends if request.params.ignore_eos else (),
            fewest=request.params.min_tokens,
            size_bytes=-(-self._vocab_size // _WORD_BITS) * _WORD_BITS // 8,
        )
        mask.restart(request.generated)
        if mask.error:
            raise InvalidRequest(f"the answer so far is not what its grammar allows: {mask.error}")
        return mask

    @property
    def _own_ends(self) -> list[int]:
        return [token_id for token_id in self._tokenizer.eos_token_ids if token_id < self._vocab_size]

    @cached_property
    def _library_tokenizer(self) -> llguidance.LLTokenizer:
        """The tokenizer as the library wants it, with the bytes that tokens really add to a text. A model without end
        tokens gets one that it cannot choose."""
        ends = self._own_ends or [self._vocab_size]
        pieces = _Pieces(self._tokenizer, max(self._vocab_size, *(end + 1 for end in ends)), ends[0])
        wrapped = llguidance.TokenizerWrapper(pieces)
        return llguidance.LLTokenizer(wrapped, n_vocab=len(pieces.tokens), eos_token=ends)


def _why_stuck(matcher: llguidance.LLMatcher) -> str:
    """Why a matcher allows nothing more; "" while it allows anything."""
    why = matcher.get_error().partition("\n")[0]
    return "the model has no token to go on with" if why == _DEAD_END else why


class _Pieces:
    """What the library asks of a tokenizer: the bytes of every token, and the tokens of a text.

    tokens: control tokens by their names, as no text is made of them; ids without a token have no bytes.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, count: int, end_token_id: int) -> None:
        special = tokenizer.special_ids
        self.eos_token_id = end_token_id
        self._special = frozenset(token_id for token_id in {*special, end_token_id} if token_id < count)
        self.special_token_ids = sorted(self._special)
        self.tokens = [
            tokenizer.id_to_token(token_id).encode() if token_id in special else tokenizer.token_bytes(token_id)
            for token_id in range(count)
        ]
        self._tokenizer = tokenizer
        self._longest = max(map(len, self.tokens), default=1)

    def __call__(self, text: str) -> list[int]:
        """Tokens of a text in the middle of others, as the model would have them, which spell it to the byte: where a
        tokenizer writes a space in front of a text, or normalises it, they are those after a line's end, or just long
        ones."""
        if not isinstance(text, str):
            raise TypeError("text is wanted, not bytes")
        wanted = text.encode()
        for before in ("", "\n"):
            ids = self._tokenizer.encode(before + text, add_special_tokens=False)
            lengths = list(accumulate((len(self._bytes(token_id)) for token_id in reversed(ids)), initial=0))
            if len(wanted) in lengths:
                ids = ids[len(ids) - lengths.index(len(wanted)) :]
                if b"".join(map(self._bytes, ids)) == wanted:
                    return ids
        return self._greedily(wanted)

    def _bytes(self, token_id: int) -> bytes:
        """What a token adds to a text; nothing where the model or the text has no such token."""
        if token_id in self._special or token_id >= len(self.tokens):
            return b""
        return self.tokens[token_id]

    def _greedily(self, wanted: bytes) -> list[int]:
        """The longest token each time, as far as there is one."""
        ids: list[int] = []
        at = 0
        while at < len(wanted):
            lengths = range(min(self._longest, len(wanted) - at), 0, -1)
            length = next((length for length in lengths if wanted[at : at + length] in self._ids), 0)
            if not length:
                break
            ids.append(self._ids[wanted[at : at + length]])
            at += length
        return ids

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        return {piece: token_id for token_id, piece in enumerate(self.tokens) if token_id not in self._special}
