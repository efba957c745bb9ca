"""Answers constrained by a grammar, with llguidance: which tokens may come next, however the tokenizer cuts the text.

A grammar is compiled in a thread whose stack is as deep as its definitions refer to one another: the library follows
those by recursion, and where a stack ends it takes the process with it. What nests without them it bounds by itself,
as it does the time and the memory that anything takes.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, TypeVar

import llguidance
import msgspec
from llguidance.gbnf_to_lark import any_to_lark

from engine.backends.base import BackendRequest
from engine.config import Grammar
from engine.errors import InvalidRequest
from engine.text.thinking import TextMask, ThinkingMask
from engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions


T = TypeVar("T")

JSON_WHITESPACE = r"([\x20\x09]|\x0A[\x20\x09]{0,32})"
"""What may stand between the parts of a JSON document: a space, or a line's end and indentation. With more, a model
that is unsure would go on with it for ever."""

LIMITS = llguidance.LLParserLimits(max_lexer_states=50_000, verbose_errors=False)

_JSON: JsonCompileOptions = {"whitespace_pattern": JSON_WHITESPACE}
_KINDS = {
    "json_schema": "a supported JSON schema",
    "json_object": "a JSON object",
    "regex": "a supported regular expression",
    "choice": "a choice",
    "lark": "a supported grammar",
}
_MIN_STACK_BYTES = 2**24
_MAX_STACK_BYTES = 2**29
_BYTES_PER_LEVEL = 3 * 2**12
_BYTES_PER_KEY = 2**9
"""Of stack, more than were measured: for an object or a definition that refers to others, for a key of an object."""

_MAX_REASON = 300
_WORD = re.compile(r"\w+")
_DEFINES = re.compile(r"\s*[?!]*\w+[^:\"/]*:")
_BEFORE_COLON = re.compile(r"\s+:")
_starting = threading.Lock()


def check(grammar: Grammar) -> None:
    """Raise InvalidRequest, naming the client's field, for a grammar that nothing can be held to.

    Takes milliseconds for a usual one, a fraction of a second at worst, in which other threads run.
    """
    definition = define(grammar)
    failed, messages = in_deep_thread(
        lambda: llguidance.LLMatcher.validate_grammar_with_warnings(definition, None, limits=LIMITS), grammar
    ).result()
    if failed:
        raise unusable(grammar, messages[0])


def define(grammar: Grammar) -> str:
    """The grammar as llguidance takes it; raises InvalidRequest where it is not even in its own language."""
    matcher = llguidance.LLMatcher
    try:
        match grammar.kind:
            case "json_schema":
                return matcher.grammar_from_json_schema(grammar.source, overrides=_JSON)
            case "json_object":
                return matcher.grammar_from_json_schema('{"type": "object"}', overrides=_JSON)
            case "regex":
                return matcher.grammar_from_regex(grammar.source)
            case "choice":
                choices = json.loads(grammar.source)
                return matcher.grammar_from_lark("start: " + " | ".join(json.dumps(choice) for choice in choices))
            case "lark":
                return matcher.grammar_from_lark(any_to_lark(grammar.source))
    except RecursionError:
        raise unusable(grammar, "it is nested too deeply") from None
    except Exception as error:  # the converter from EBNF raises Exception itself
        raise unusable(grammar, str(error)) from error


def without(grammar: Grammar, banned: Sequence[str]) -> Grammar:
    """A choice without those in which a banned string would come, any other grammar as it is.

    Raises InvalidRequest where none is left.
    """
    if grammar.kind != "choice" or not banned:
        return grammar
    choices, folded = json.loads(grammar.source), [string.casefold() for string in banned]
    left = [choice for choice in choices if not any(string in choice.casefold() for string in folded)]
    if not left:
        raise InvalidRequest(f"every {grammar.param} contains one of banned_strings", param="banned_strings")
    return msgspec.structs.replace(grammar, source=json.dumps(left)) if len(left) < len(choices) else grammar


def in_deep_thread(work: Callable[[], T], grammar: Grammar) -> Future[T]:
    """Do `work` in a thread of its own, with the stack that compiling `grammar` may take.

    Raises InvalidRequest where that is more than any grammar gets, or than there is.
    """
    size = stack_bytes(grammar)
    if size > _MAX_STACK_BYTES:
        raise unusable(grammar, "its definitions refer to one another too deeply")
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    with _starting:  # the size is the whole process's
        usual = threading.stack_size(size)
        try:
            threading.Thread(target=run, name="grammar", daemon=True).start()
        except RuntimeError:
            raise unusable(grammar, f"{size >> 20} MiB of stack to compile it are not available") from None
        finally:
            threading.stack_size(usual)
    return future


def stack_bytes(grammar: Grammar) -> int:
    """The most stack that compiling a grammar may take, by its structure. Raises InvalidRequest for what is no JSON."""
    levels = keys = 0
    try:
        if grammar.kind == "json_schema":
            levels, keys = _referring_objects(grammar.source)
        elif grammar.kind == "lark":
            levels = _referring_definitions(grammar.source)
    except RecursionError:
        raise unusable(grammar, "it is nested too deeply") from None
    except ValueError as error:
        raise unusable(grammar, str(error)) from error
    return _MIN_STACK_BYTES + _BYTES_PER_LEVEL * levels + _BYTES_PER_KEY * keys


def _referring_objects(schema: str) -> tuple[int, int]:
    """How many objects of a JSON schema hold a reference, at whatever depth, and how many keys it has in all.

    A chain of references passes each of those objects once.
    """
    levels = keys = 0

    def refers(value: object) -> bool:
        return value is True or (isinstance(value, list) and any(map(refers, value)))

    def visit(pairs: list[tuple[str, object]]) -> bool:
        """Return whether an object holds a reference, which stands for it in what is around it."""
        nonlocal levels, keys
        found = any("ref" in key.lower() or refers(value) for key, value in pairs)
        levels, keys = levels + found, keys + len(pairs)
        return found

    json.loads(schema, object_pairs_hook=visit)
    return levels, keys


def _referring_definitions(source: str) -> int:
    """How many definitions of a grammar may name another, and how many brackets are on their lines.

    A chain of references passes each once. Words in strings are taken for names, and where a part is in another
    language (JSON, say), every line for one that names something.
    """
    lines = _BEFORE_COLON.sub(":", source).split("\n")
    named = {word for line in lines for word in _WORD.findall(line.rpartition(":")[0])}
    mixed = "%json" in source or "%lark" in source
    levels = 0
    for line in lines:
        defines = _DEFINES.match(line)
        if mixed or not named.isdisjoint(_WORD.findall(line, defines.end() if defines else 0)):
            continues = line.lstrip().startswith("|")
            levels += sum(map(line.count, "([{")) + max(line.count(":"), not continues)
    return levels


def unusable(grammar: Grammar, why: str) -> InvalidRequest:
    """Return the error of a grammar that cannot constrain an answer."""
    return InvalidRequest(f"{grammar.param} is not {_KINDS[grammar.kind]}: {_reason(why)}", param=grammar.param)


def _reason(message: str) -> str:
    """Return the error in one line: of a regular expression's parser the last one, of all others the first."""
    lines = message.strip().splitlines() or ["it cannot be read"]
    line = next((line for line in lines if line.startswith("error: ")), lines[0])
    return line.removeprefix("error: ").removeprefix("at 1(8): ")[:_MAX_REASON]


# The masks of one model's answers: what their grammars allow to come next, in the model's own tokens.

MAX_COMPILED = 64
_WORD_BITS = 32
_DEAD_END = "NoExtensionBias"


class GrammarMask:
    """The TokenMask of one request (see `engine.backends.base`).

    matcher: at the start of the answer; this mask's own.  ends: ids that end the answer where the grammar may end.
    min_tokens: while fewer tokens are there, none of `ends` may come as long as anything else may.
    barred: the model's end tokens that are not among `ends`; they come only where nothing else may.
    """

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        *,
        ends: Sequence[int],
        min_tokens: int,
        barred: Sequence[int],
        size_bytes: int,
    ) -> None:
        self._matcher = matcher
        self._ends = tuple(ends)
        self._barred = tuple(barred)
        self._min_tokens = min_tokens
        self._size_bytes = size_bytes
        self._tokens: list[int] = []

    @property
    def is_complete(self) -> bool:
        """True if the grammar allows nothing but the answer's end."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def error(self) -> str:
        """Reason why nothing is allowed; "" while anything is."""
        return _why_stuck(self._matcher)

    def bitmask(self) -> bytes:
        """Return the tokens that may come next; none after an error."""
        found = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            return bytes(self._size_bytes)
        bits = found[: self._size_bytes].ljust(self._size_bytes, b"\0")
        unwanted = (*self._barred, *self._ends) if len(self._tokens) < self._min_tokens else self._barred
        if unwanted and not self.is_complete:
            fewer = bytearray(bits)
            for token_id in unwanted:
                fewer[token_id // 8] &= ~(1 << token_id % 8)
            return bytes(fewer) if any(fewer) else bits
        return bits

    def forced_text(self, count: int) -> bytes:
        """The text after the first `count` tokens as far as the grammar leaves no choice; b"" where the mask is not at
        that place, or the answer may end."""
        at_place = len(self._tokens) == count and not (self._matcher.is_stopped() or self._matcher.is_error())
        return self._matcher.compute_ff_bytes() if at_place else b""

    def accept(self, token_id: int) -> None:
        """Advance by a token; one that is not allowed is an error."""
        self._tokens.append(token_id)
        self._matcher.consume_token(token_id)

    def restart(self, generated: Sequence[int]) -> None:
        """Move to where the answer is after these tokens."""
        before = self._tokens
        same = next((i for i, pair in enumerate(zip(before, generated, strict=False)) if pair[0] != pair[1]), None)
        same = min(len(before), len(generated)) if same is None else same
        if same < len(before):
            self._matcher.rollback(len(before) - same)
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

    def begin(self, request: BackendRequest) -> Future[TextMask]:
        """The mask of a request, done at once where it has no grammar or that was compiled lately. It raises
        InvalidRequest where the model cannot write what the grammar wants."""
        params = request.params
        made: Future[TextMask] = Future()
        if params.grammar is None:
            made.set_result(self._after_thinking(request, None))
            return made
        grammar = params.grammar if params.stop else without(params.grammar, params.banned_strings)
        start = self._compiled.get((grammar.kind, grammar.source))
        if start is None:
            return in_deep_thread(lambda: self._mask(self._start_of(grammar), request), grammar)
        made.set_result(self._mask(start, request))
        return made

    def _start_of(self, grammar: Grammar) -> llguidance.LLMatcher:
        """The grammar, compiled; what many requests ask for at once is compiled for the first of them."""
        key = (grammar.kind, grammar.source)
        with self._compiling:
            if key not in self._compiled:
                self._compiled[key] = self._compile(grammar)
            start = self._compiled[key]
            if len(self._compiled) > MAX_COMPILED:
                del self._compiled[next(iter(self._compiled))]
        return start

    def _compile(self, grammar: Grammar) -> llguidance.LLMatcher:
        start = llguidance.LLMatcher(self._library_tokenizer, define(grammar), log_level=0, limits=LIMITS)
        start.compute_bitmask()
        if start.is_error():
            raise unusable(grammar, _why_stuck(start))
        return start

    def _mask(self, start: llguidance.LLMatcher, request: BackendRequest) -> TextMask:
        grammar = GrammarMask(
            start.deep_copy(),
            ends=self._ends(request),
            barred=self._own_ends if request.params.ignore_eos else (),
            min_tokens=request.params.min_tokens,
            size_bytes=-(-self._vocab_size // _WORD_BITS) * _WORD_BITS // 8,
        )
        mask = grammar if request.params.thinking is None else self._after_thinking(request, grammar)
        mask.restart(request.generated)
        if mask.error:
            raise InvalidRequest(f"the answer violates its grammar: {mask.error}")
        return mask

    def _after_thinking(self, request: BackendRequest, grammar: GrammarMask | None) -> TextMask:
        """The mask of an answer that may think first."""
        mask = ThinkingMask(
            self._tokenizer,
            request.params,
            vocab_size=self._vocab_size,
            ends=self._ends(request),
            answer=grammar,
        )
        mask.restart(request.generated)
        return mask

    def _ends(self, request: BackendRequest) -> list[int]:
        return [token_id for token_id in request.end_token_ids if token_id < self._vocab_size]

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
    return "the model has no token to continue with" if why == _DEAD_END else why


class _Pieces:
    """A tokenizer for the library: the bytes of every token, and the tokens of a text.

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
            raise TypeError("text is expected, not bytes")
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
        """Return the bytes that a token adds to a text; none where the model or the text has no such token."""
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
