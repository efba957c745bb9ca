"""Prompts as clients send them: text or token ids, one or several."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Literal, TypeGuard, cast

from pydantic import Field, WithJsonSchema

from console.api.requests.body import Body, as_integer, as_integers
from console.api.requests.sampling import SamplingFields
from console.api.requests.served_model import ServedModel
from engine.config import SamplingParams, format_number
from engine.errors import InvalidRequest
from engine.requests.request import Encode, compact_ids
from engine.text.tokenizer import IncrementalDetokenizer, Tokenizer, begins_text

_TRUNCATE = "truncate_prompt_tokens"
_TOKENS_TO_KEEP = WithJsonSchema({"type": "integer", "minimum": -1, "not": {"const": 0}})

_READ_AT_ONCE = 65_536
"""Characters and ids of prompts that are tokenized together."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: the ids to continue, compact, and the text that stands before the answer.

    encode: makes the ids again for another model; None where the client gave ids.  continues: as in BackendRequest.
    begun: text of the answer that it ends with.  shared_tokens: as in GenerateRequest.
    tool_headers: of its answer, as in `ToolUse`.
    """

    ids: array[int]
    text: str
    encode: Encode | None = None
    continues: bool = True
    begun: str = ""
    shared_tokens: int = 0
    tool_headers: Mapping[str, str] = field(default_factory=dict)

    def answer_text(self, tokenizer: Tokenizer, params: SamplingParams) -> IncrementalDetokenizer:
        """Return the detokenizer of one answer, before its first token, as the worker has it."""
        return IncrementalDetokenizer(
            tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            shown=params.shown_token_ids,
            begins=begins_text(tokenizer, self.ids, params, continues=self.continues),
        )


@dataclass(frozen=True, slots=True)
class Truncation:
    """Max tokens of a prompt. A longer one loses its beginning, or, unless `keeps_end`, its end."""

    tokens: int
    keeps_end: bool = True

    async def part_of(self, text: str, model: ServedModel) -> str:
        """Return the part of a text that has the tokens to keep, and some to spare."""
        return await model.part(text, self.tokens, end=self.keeps_end)

    def cut(self, ids: Sequence[int]) -> list[int]:
        """Return the tokens to keep."""
        return list(ids[-self.tokens :] if self.keeps_end else ids[: self.tokens])

    def cut_text(self, ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
        """Return the tokens to keep of a text with special tokens around it, which stay as far as there is room."""
        if len(ids) <= self.tokens:
            return list(ids)
        [whole] = tokenizer.encode_all(["a"])
        [inner] = tokenizer.encode_all(["a"], add_special_tokens=False)
        starts = range(len(whole) - len(inner) + 1)
        before = next((at for at in starts if whole[at : at + len(inner)] == inner), 0)
        end = len(ids) - (len(whole) - len(inner) - before)
        room = max(0, self.tokens - before - (len(ids) - end))
        remaining = ids[max(before, end - room) : end] if self.keeps_end else ids[before : before + room]
        return self.cut([*ids[:before], *remaining, *ids[end:]])


class TruncationFields(Body):
    """vLLM's fields for prompts that are too long.

    truncate_prompt_tokens: use only this number of tokens of the prompt, -1 for as many as fit; special tokens around a
    text stay.
    truncation_side: side to truncate; default: left for generation, right for embeddings and scores.
    """

    truncate_prompt_tokens: Annotated[int | None, Field(ge=-1), _TOKENS_TO_KEEP] = None
    truncation_side: Literal["left", "right"] | None = None

    def truncation(
        self,
        model: ServedModel,
        *,
        max_tokens: int | None = None,
        side: Literal["left", "right"] = "left",
        most: int = 0,
    ) -> Truncation | None:
        """Return how to truncate, None for not at all. max_tokens: of the answer; side: the default; most: max tokens
        of the prompt besides, 0 for any.

        Raises InvalidRequest where prompt and answer would not fit into the context.
        """
        wanted, context = self.truncate_prompt_tokens, model.loaded.max_model_len
        keeps_end = (self.truncation_side or side) == "left"
        if wanted is None:
            return Truncation(most, keeps_end) if most else None
        room = context - (max_tokens or 0)
        if wanted == 0:
            raise InvalidRequest("truncate_prompt_tokens is 0; it must be -1 or at least 1", param=_TRUNCATE)
        if max(1, wanted) > room:
            raise InvalidRequest(
                f"truncate_prompt_tokens is {format_number(wanted)}; of the {context} tokens of the context, "
                f"max_tokens leaves {format_number(max(0, room))}",
                param=_TRUNCATE,
            )
        fitting = min(context - 1, model.loaded.kv_tokens - 1, model.max_input_len or context)
        tokens = min(room if wanted < 0 else wanted, fitting)
        return Truncation(min(tokens, most or tokens), keeps_end)


async def read_prompts(
    value: object,
    model: ServedModel,
    param: str = "prompt",
    *,
    empty_texts: bool = True,
    truncation: Truncation | None = None,
) -> list[Prompt]:
    """`prompt` as OpenAI takes it: a string, token ids, or an array of either. param: what the dialect calls it.

    empty_texts: take an empty text where the model begins every text with a token.  truncation: of each prompt.
    Raises InvalidRequest.
    """
    items = _items(value, param)
    if not empty_texts and "" in items:
        raise _empty(value, items.index(""), param)
    prompts = [prompt for part in _chunks(items) for prompt in await _read(part, model, param, truncation)]
    for index, prompt in enumerate(prompts):
        if not prompt.ids:
            raise _empty(value, index, param)
    return prompts


async def negative_prompt_ids(fields: SamplingFields, model: ServedModel) -> list[int]:
    """Return the ids to guide away from, in the prompt's place: negative_prompt, or, where that is empty, the model's
    start token alone. Empty without guidance. Raises InvalidRequest."""
    if fields.cfg_scale == 1.0:
        return []
    if fields.negative_prompt:
        return (await model.encode([fields.negative_prompt]))[0]
    if model.tokenizer.bos_token_id is None:
        raise InvalidRequest(
            "negative_prompt is empty, and this model has no start token for it",
            param="negative_prompt",
        )
    return [model.tokenizer.bos_token_id]


def count_prompts(value: object, param: str = "prompt") -> int:
    """Return the number of prompts in `value`. Raises InvalidRequest where it is no array, string or token ids."""
    return len(_items(value, param))


async def _read(items: Sequence[object], model: ServedModel, param: str, truncation: Truncation | None) -> list[Prompt]:
    texts = [item for item in items if isinstance(item, str)]
    if truncation is not None:
        texts = [await truncation.part_of(text, model) for text in texts]
    encoded = iter(zip(texts, await model.encode(texts), strict=True))
    return [
        await _of_text(item, *next(encoded), model, param, truncation)
        if isinstance(item, str)
        else await _read_ids(item, model, param, truncation)
        for item in items
    ]


async def _of_text(
    whole: str, text: str, ids: list[int], model: ServedModel, param: str, truncation: Truncation | None
) -> Prompt:
    """Return the prompt of a text. text, ids: its part that may be needed, and the tokens of that."""
    remaining = ids if truncation is None else truncation.cut_text(ids, model.tokenizer)
    shown = whole if len(remaining) == len(ids) and text == whole else await model.decode(remaining, param)
    return Prompt(compact_ids(remaining), shown, partial(_encode, text, truncation))


def _chunks(items: Iterable[object]) -> Iterator[list[object]]:
    """Yield prompts to read together: meanwhile the tokenizer takes thirty times the memory of their ids."""
    part: list[object] = []
    size = 0
    for item in items:
        part.append(item)
        size += len(item) if isinstance(item, str | list) else 0
        if size >= _READ_AT_ONCE:
            yield part
            part, size = [], 0
    yield part


async def _encode(text: str, truncation: Truncation | None, tokenizer: Tokenizer) -> list[int]:
    ids = await asyncio.to_thread(tokenizer.encode, text)
    return ids if truncation is None else truncation.cut_text(ids, tokenizer)


def _items(value: object, param: str) -> list[object]:
    """Return the single prompts in `value`."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise _wrong_type(param)
    if not value:
        raise InvalidRequest(f"{param} is an empty array", param=param)
    return [value] if _is_id(as_integer(value[0])) else value


async def _read_ids(item: object, model: ServedModel, param: str, truncation: Truncation | None) -> Prompt:
    if not isinstance(item, list):
        raise _wrong_type(param)
    item = item if truncation is None else truncation.cut(item)
    model.check_fits(len(item))
    ids = cast(list[int], as_integers(item))
    if not set(map(type, ids)) <= {int}:
        raise _wrong_type(param)
    text = await model.decode(ids, param)
    return Prompt(compact_ids(ids), text)


def _is_id(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _empty(value: object, index: int, param: str) -> InvalidRequest:
    place = f"{param}[{index}]" if isinstance(value, list) else param
    return InvalidRequest(f"{place} is empty", param=param)


def _wrong_type(param: str) -> InvalidRequest:
    return InvalidRequest(f"{param} should be a string, an array of strings, or token ids", param=param)
