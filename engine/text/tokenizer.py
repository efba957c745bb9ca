"""A model folder's tokenizer: text to ids and back, end tokens, chat template, sampling defaults."""

from __future__ import annotations

import asyncio
import codecs
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from functools import cached_property
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import tokenizers

from engine.config import SamplingParams
from engine.errors import InvalidRequest, UnsupportedModel
from engine.models.gguf.file import is_gguf
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer_config import TokenizerFolder
from engine.text.tokenizer_file import (
    NO_TEXT,
    NO_TOKENS,
    is_linear_pattern,
    pattern_strings,
    read_tokenizer,
    refusing_panics,
)

# Calls of native code that cannot be interrupted and may take hours: they are abandoned in time.

_LOOK_S = 0.02
_MAX_ABANDONED = 2

T = TypeVar("T")


class BoundedCalls:
    """Calls with a limit of processor time. While _MAX_ABANDONED that took more have not ended, no other begins: each
    occupies a processor."""

    def __init__(self) -> None:
        self._abandoned: list[threading.Thread] = []

    def run(self, work: Callable[[], T], limit_s: float) -> T:
        """The result of `work`, which is done in a thread. Raises what it raises, or TimeoutError."""
        self._abandoned = [thread for thread in self._abandoned if thread.is_alive()]
        if len(self._abandoned) >= _MAX_ABANDONED:
            raise TimeoutError
        call = _Call(work)
        thread = threading.Thread(target=call.run, name="bounded-call", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(_LOOK_S)
            if thread.is_alive() and call.spent_s() > limit_s:
                self._abandoned.append(thread)
                raise TimeoutError
        return call.result()


class _Call(Generic[T]):
    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._found: list[T] = []
        self._error: BaseException | None = None
        self._clock = time.CLOCK_MONOTONIC
        self._began_s = time.clock_gettime(self._clock)

    def run(self) -> None:
        if hasattr(time, "pthread_getcpuclockid"):  # not on macOS
            self._clock, self._began_s = time.pthread_getcpuclockid(threading.get_ident()), 0.0
        try:
            self._found.append(self._work())
        except BaseException as error:
            self._error = error

    def spent_s(self) -> float:
        """Processor time so far; 0 once it has ended."""
        try:
            return time.clock_gettime(self._clock) - self._began_s
        except OSError:
            return 0.0

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return self._found[0]


# What each token adds to a text, as bytes: the ground of streaming text, logprob bytes and token-level grammars.
#
# `tokenizers` decodes whole lists. For the decoders that causal language models use, the text of a list is the UTF-8
# reading of its tokens' bytes in a row, where only the first token may differ (a leading space is stripped). So a
# token's bytes are looked up once and kept, and adding a token to a text costs the same however long the text is.

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
                f"streaming supports {', '.join(sorted(_STREAMABLE))}"
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

    def has(self, token_id: int) -> bool:
        """Return whether there is such a token; ids beyond the vocabulary (padding of the head) are none."""
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
        yield from _decoder_kinds_of(json.loads(decoder.__getstate__()))


def _decoder_kinds_of(description: Mapping[str, object]) -> Iterator[str]:
    inner = description.get("decoders")
    if description["type"] == "Sequence" and isinstance(inner, list):
        for child in inner:
            yield from _decoder_kinds_of(child)
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


_CLOSE_S = 2.0

_SHORT_TEXT = 1024
"""Characters that a tokenizer whose patterns are quick is given at once."""

_CALL_S, _CHARACTER_S = 0.5, 20e-6
"""Processor time that others may take: twenty times what usual ones take of a character."""


class TokenSpan(NamedTuple):
    """A token of a text, and which characters it stands for; an empty span for one that the model adds."""

    token_id: int
    start: int
    stop: int


class Tokenizer:
    """The tokenizer of one model; safe to use from several threads.

    vocab_size: ids that the tokenizer has (a model's embedding may have a few rows more).
    eos_token_ids: every end token that the folder names; bos_token_id: None where the model has none.
    special_ids: control tokens, which skip_special_tokens leaves out of text.  is_quick: whether it looks for nothing
    in a text that could take it long.
    """

    def __init__(self, backend: tokenizers.Tokenizer, folder: TokenizerFolder) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.is_quick = all(map(is_linear_pattern, _regexes(backend)))
        self._calls = BoundedCalls()
        self.pieces = TokenPieces(backend)
        self.vocab_size = backend.get_vocab_size()
        self.special_ids = self.pieces.special_ids
        self.bos_token_id = folder.bos_token_id(backend.token_to_id)
        self.eos_token_ids = folder.eos_token_ids(backend.token_to_id)
        self.generation_defaults = folder.generation_defaults()
        self._contained: dict[str, bool] = {}
        self._templates = {
            name: ChatTemplate(source, folder.special_tokens()) for name, source in folder.chat_templates().items()
        }

    @classmethod
    def from_folder(cls, path: Path) -> Tokenizer:
        """The tokenizer in a model folder; raises UnsupportedModel where there is none that can be read."""
        if not is_gguf(path) and not (path / "tokenizer.json").is_file():
            others = [name for name in ("tokenizer.model", "vocab.json", "tiktoken.model") if (path / name).is_file()]
            but = f" ({others[0]} alone is not read)" if others else ""
            raise UnsupportedModel(f"{path} has no tokenizer.json, which is needed to read and write text{but}")
        with refusing_panics(UnsupportedModel(f"the tokenizer in {path} cannot be used")):
            return cls(read_tokenizer(path), TokenizerFolder.read(path))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; with the tokens that the model expects around a text (BOS, say), but never BOS twice.

        Text made by `apply_chat_template` has its control tokens already: encode it without add_special_tokens.
        """
        return self.encode_all([text], add_special_tokens=add_special_tokens)[0]

    def encode_all(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Ids of each text, as `encode` gives them. Other threads run meanwhile."""
        # The library's encode() would hold the interpreter's lock for as long as it takes.
        encodings = self._tokenize(
            texts, lambda: self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        )
        twice = [self.bos_token_id] * 2 if add_special_tokens and self.bos_token_id is not None else None
        return [ids[1:] if ids[:2] == twice else ids for ids in (encoding.ids for encoding in encodings)]

    def spans(self, text: str, *, add_special_tokens: bool = True) -> list[TokenSpan]:
        """The tokens that `encode` gives, and where each stands in `text`. Other threads run meanwhile."""
        [encoding] = self._tokenize(
            [text], lambda: self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        )
        spans = [TokenSpan(id_, *offsets) for id_, offsets in zip(encoding.ids, encoding.offsets, strict=True)]
        twice = add_special_tokens and [span.token_id for span in spans[:2]] == [self.bos_token_id] * 2
        return spans[1:] if twice else spans

    def cut(self, text: str, tokens: int, *, end: bool = False) -> tuple[str, int]:
        """Return the first, or last, `tokens` tokens of a text, or all of it, and how many it has. Other threads run
        meanwhile."""
        [encoding] = self._tokenize([text], lambda: self._backend.encode_batch([text], add_special_tokens=False))
        count = len(encoding)
        place = encoding.token_to_chars(count - tokens if end else tokens) if count > tokens else None
        if place is None:
            return text, count
        return text[place[0] :] if end else text[: place[0]], tokens

    def _tokenize(self, texts: Sequence[str], work: Callable[[], T]) -> T:
        """Return the library's tokens of these texts. Raises InvalidRequest where it fails, or takes too long: a
        tokenizer of unknown origin may take hours for what others do in a millisecond."""
        characters = sum(map(len, texts))
        with refusing_panics(NO_TOKENS):
            if self.is_quick and characters < _SHORT_TEXT:
                return work()
            try:
                return self._calls.run(work, _CALL_S + characters * _CHARACTER_S)
            except TimeoutError:
                raise InvalidRequest("the model's tokenizer takes too long for this text") from None

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token: a text of n characters has n / longest_token tokens at least."""
        return max(map(len, self._backend.get_vocab()), default=1)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`; unknown ids are left out, broken UTF-8 becomes U+FFFD."""
        with refusing_panics(NO_TEXT):
            return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def opens_text(self, prompt_ids: Sequence[int]) -> bool:
        """Return whether what comes after these tokens begins a text: there is no text in them, or they end with a
        control token and the tokenizer starts over behind those, as SentencePiece's do with a space of their own."""
        tokens = (token_id for token_id in reversed(prompt_ids) if self.pieces.has(token_id))
        last = next(tokens, None)
        if last is None or last not in self.special_ids:
            return last is None
        return self._restarts_after_special or all(token_id in self.special_ids for token_id in tokens)

    @cached_property
    def _restarts_after_special(self) -> bool:
        """True if a text after a control token has the same tokens as on its own."""
        control = self.id_to_token(min(self.special_ids))
        alone, behind = self.encode_all(["a", f"{control}a"], add_special_tokens=False)
        return behind[1:] == alone

    def id_to_token(self, token_id: int) -> str:
        """The vocabulary's own spelling of a token ("Ġthe", "▁the"); "" for an unknown id."""
        return self._backend.id_to_token(token_id) or ""

    def token_to_id(self, token: str) -> int | None:
        """The id of a token by its vocabulary spelling, None where there is none."""
        return self._backend.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text; one token may be a part of a character."""
        return self.pieces.inner(token_id)

    @property
    def has_chat_template(self) -> bool:
        """True if the model has a template that makes a prompt of a chat."""
        return bool(self._templates)

    async def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        client: str = "",
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        **kwargs: object,
    ) -> str:
        """The prompt text of a chat, control tokens included; raises InvalidRequest where it cannot be made. client:
        the clients of a template take turns. continue_final: it ends with the text of the last message."""
        template = self.tool_template if tools else self._chat_template
        if template is None:
            raise InvalidRequest(
                "this model has no chat template; send its prompt as plain text to the completions endpoint",
                param="messages",
            )
        return await template.render(
            messages,
            client,
            add_generation_prompt=add_generation_prompt,
            continue_final=continue_final,
            tools=tools,
            **kwargs,
        )

    def warm_up(self) -> None:
        """Have the chat templates ready to render soon; a folder may hold more than are ever used."""
        for template in self._used_templates:
            template.warm_up()

    async def close(self) -> None:
        """End the chat templates' processes. A rendering that takes long is not waited for; its process ends after it.

        Later renderings work, but are slow.
        """
        ending = [template.close() for template in self._used_templates]
        await asyncio.to_thread(futures.wait, ending, _CLOSE_S)

    @property
    def _used_templates(self) -> set[ChatTemplate]:
        return {template for template in (self._chat_template, self.tool_template) if template is not None}

    def template_contains(self, text: str) -> bool:
        """Return whether a chat template in use has that text in its source; found once for each text."""
        if text not in self._contained:
            self._contained[text] = any(text in template.source for template in self._used_templates)
        return self._contained[text]

    def template_uses(self, variable: str) -> bool:
        """Return whether a chat template has an expression or a statement with that name in it."""
        return any(template.uses(variable) for template in self._used_templates)

    @property
    def _chat_template(self) -> ChatTemplate | None:
        return self._templates.get("default") or next(iter(self._templates.values()), None)

    @property
    def tool_template(self) -> ChatTemplate | None:
        """The template of a chat with tools: one of its own, else the only one; None where the model has none."""
        own = self._templates.get("tool_use") or self._templates.get("default")
        return own or next(iter(self._templates.values()), None)


def _regexes(backend: tokenizers.Tokenizer) -> list[str]:
    """Return the regular expressions that a tokenizer searches a text for."""
    steps = [step for step in (backend.normalizer, backend.pre_tokenizer) if step is not None]
    return [found for step in steps for found in pattern_strings(json.loads(step.__getstate__()))]


# From token ids to text, one token at a time.


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
    def has_partial_character(self) -> bool:
        """True if the bytes of a character are held back."""
        return bool(self._characters.getstate()[0])

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; "" for a skipped control token or an unfinished character."""
        if token_id in self._skipped:
            return ""
        raw = self.bytes_of(token_id)
        self._at_start = self._at_start and not self._pieces.has(token_id)
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
