"""A model folder's tokenizer: text to ids and back, end tokens, chat template, sampling defaults."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, TypeVar

import tokenizers

from engine.errors import InvalidRequest, UnsupportedModel
from engine.text.bounded_call import BoundedCalls
from engine.text.chat_template import ChatTemplate
from engine.text.folder import TokenizerFolder
from engine.text.patterns import is_quick, regexes
from engine.text.pieces import TokenPieces
from engine.text.tokenizer_file import NO_TEXT, NO_TOKENS, read_tokenizer, refusing_panics

_CLOSE_S = 2.0

_SHORT_TEXT = 1024
"""Characters that a tokenizer whose patterns are quick is given at once."""

_CALL_S, _CHARACTER_S = 0.5, 20e-6
"""Processor time that others may take: twenty times what usual ones take of a character."""

T = TypeVar("T")


class TokenSpan(NamedTuple):
    """A token of a text, and which characters it stands for; an empty span for one that the model adds."""

    token_id: int
    start: int
    stop: int


class Tokenizer:
    """The tokenizer of one model; safe to use from several threads.

    vocab_size: ids that the tokenizer knows (a model's embedding may have a few rows more).
    eos_token_ids: every end token that the folder names; bos_token_id: None where the model has none.
    special_ids: control tokens, which skip_special_tokens leaves out of text.  is_quick: whether it looks for nothing
    in a text that could take it long.
    """

    def __init__(self, backend: tokenizers.Tokenizer, folder: TokenizerFolder) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.is_quick = all(map(is_quick, _regexes(backend)))
        self._calls = BoundedCalls()
        self.pieces = TokenPieces(backend)
        self.vocab_size = backend.get_vocab_size()
        self.special_ids = self.pieces.special_ids
        self.bos_token_id = folder.bos_token_id(backend.token_to_id)
        self.eos_token_ids = folder.eos_token_ids(backend.token_to_id)
        self.generation_defaults = folder.generation_defaults()
        self._templates = {
            name: ChatTemplate(source, folder.special_tokens()) for name, source in folder.chat_templates().items()
        }

    @classmethod
    def from_folder(cls, path: Path) -> Tokenizer:
        """The tokenizer in a model folder; raises UnsupportedModel where there is none that can be read."""
        file = path / "tokenizer.json"
        if not file.is_file():
            others = [name for name in ("tokenizer.model", "vocab.json", "tiktoken.model") if (path / name).is_file()]
            but = f" ({others[0]} alone is not read)" if others else ""
            raise UnsupportedModel(f"{path} has no tokenizer.json, which is needed to read and write text{but}")
        with refusing_panics(UnsupportedModel(f"tokenizer.json in {path} cannot be used")):
            return cls(read_tokenizer(file), TokenizerFolder.read(path))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; with the tokens that the model expects around a text (BOS, say), but never BOS twice.

        Text made by `apply_chat_template` has its control tokens already: encode it without add_special_tokens.
        """
        return self.encode_all([text], add_special_tokens=add_special_tokens)[0]

    def encode_all(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Ids of each text, as `encode` gives them. Other threads run meanwhile."""
        # The library's encode() would hold the interpreter's lock for as long as it takes.
        encodings = self._tokenized(
            texts, lambda: self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        )
        twice = [self.bos_token_id] * 2 if add_special_tokens and self.bos_token_id is not None else None
        return [ids[1:] if ids[:2] == twice else ids for ids in (encoding.ids for encoding in encodings)]

    def spans(self, text: str, *, add_special_tokens: bool = True) -> list[TokenSpan]:
        """The tokens that `encode` gives, and where each stands in `text`. Other threads run meanwhile."""
        [encoding] = self._tokenized(
            [text], lambda: self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        )
        spans = [TokenSpan(id_, *offsets) for id_, offsets in zip(encoding.ids, encoding.offsets, strict=True)]
        twice = add_special_tokens and [span.token_id for span in spans[:2]] == [self.bos_token_id] * 2
        return spans[1:] if twice else spans

    def cut(self, text: str, tokens: int, *, end: bool = False) -> tuple[str, int]:
        """The beginning, or the end, of a text that has so many tokens, or all of it, and how many it has. Other
        threads run meanwhile."""
        [encoding] = self._tokenized([text], lambda: self._backend.encode_batch([text], add_special_tokens=False))
        count = len(encoding)
        place = encoding.token_to_chars(count - tokens if end else tokens) if count > tokens else None
        if place is None:
            return text, count
        return text[place[0] :] if end else text[: place[0]], tokens

    def _tokenized(self, texts: Sequence[str], work: Callable[[], T]) -> T:
        """What the library makes of these texts. Raises InvalidRequest where it cannot, or takes too long: anybody may
        have written the tokenizer, and some take hours of what others take a millisecond of."""
        characters = sum(map(len, texts))
        with refusing_panics(NO_TOKENS):
            if self.is_quick and characters < _SHORT_TEXT:
                return work()
            try:
                return self._calls.run(work, _CALL_S + characters * _CHARACTER_S)
            except TimeoutError:
                raise InvalidRequest("the model's tokenizer takes too long to make tokens of this text") from None

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
        known = (token_id for token_id in reversed(prompt_ids) if self.pieces.knows(token_id))
        last = next(known, None)
        if last is None or last not in self.special_ids:
            return last is None
        return self._restarts_after_special or all(token_id in self.special_ids for token_id in known)

    @cached_property
    def _restarts_after_special(self) -> bool:
        """Whether a text behind a control token has the tokens that it has on its own."""
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
        """What a token adds to a text, in bytes; one token may be a part of a character."""
        return self.pieces.inner(token_id)

    @property
    def has_chat_template(self) -> bool:
        """Whether the model says how a chat becomes a prompt."""
        return bool(self._templates)

    async def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        client: str = "",
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        **kwargs: object,
    ) -> str:
        """The prompt text of a chat, control tokens included; raises InvalidRequest where it cannot be made. client:
        who asks, for the clients of a template take turns."""
        template = self.tool_template if tools else self._chat_template
        if template is None:
            raise InvalidRequest(
                "this model has no chat template; send its prompt as plain text to the completions endpoint",
                param="messages",
            )
        return await template.render(
            messages, client, add_generation_prompt=add_generation_prompt, tools=tools, **kwargs
        )

    def warm_up(self) -> None:
        """Have the chat templates ready to render soon; a folder may hold more than are ever used."""
        for template in self._used_templates:
            template.warm_up()

    async def close(self) -> None:
        """End the chat templates' processes. A rendering that takes long is not waited for; its process ends after it.

        What is still asked for works, but is slow.
        """
        ending = [template.close() for template in self._used_templates]
        await asyncio.to_thread(futures.wait, ending, _CLOSE_S)

    @property
    def _used_templates(self) -> set[ChatTemplate]:
        return {template for template in (self._chat_template, self.tool_template) if template is not None}

    @property
    def _chat_template(self) -> ChatTemplate | None:
        return self._templates.get("default") or next(iter(self._templates.values()), None)

    @property
    def tool_template(self) -> ChatTemplate | None:
        """The template of a chat with tools: one of its own, else the only one; None where the model has none."""
        own = self._templates.get("tool_use") or self._templates.get("default")
        return own or next(iter(self._templates.values()), None)


def _regexes(backend: tokenizers.Tokenizer) -> list[str]:
    """All that a tokenizer looks for in a text."""
    steps = [step for step in (backend.normalizer, backend.pre_tokenizer) if step is not None]
    return [found for step in steps for found in regexes(json.loads(step.__getstate__()))]
