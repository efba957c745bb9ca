"""Prompts as clients send them: text or token ids, one or several."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeGuard, cast

from console.api.requests.body import as_integer, as_integers
from console.api.requests.sampling import SamplingFields
from console.api.requests.served_model import ServedModel
from engine.config import SamplingParams
from engine.errors import InvalidRequest
from engine.requests.request import Encode, compact_ids
from engine.text.tokenizer import IncrementalDetokenizer, Tokenizer, begins_text

_READ_AT_ONCE = 65_536
"""Characters and ids of prompts that are tokenized together."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: the ids to continue, compact, and the text that stands before the answer.

    encode: makes the ids again for another model; None where the client gave ids.  continues: as in BackendRequest.
    begun: text of the answer that it ends with.  shared_tokens: as in GenerateRequest.
    tool_format: the default format of calls, where the chat template has none.
    """

    ids: array[int]
    text: str
    encode: Encode | None = None
    continues: bool = True
    begun: str = ""
    shared_tokens: int = 0
    tool_format: str = ""

    def answer_text(self, tokenizer: Tokenizer, params: SamplingParams) -> IncrementalDetokenizer:
        """Return the detokenizer of one answer, before its first token, as the worker has it."""
        return IncrementalDetokenizer(
            tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            shown=params.shown_token_ids,
            begins=begins_text(tokenizer, self.ids, params, continues=self.continues),
        )


async def read_prompts(
    value: object, model: ServedModel, param: str = "prompt", *, empty_texts: bool = True
) -> list[Prompt]:
    """`prompt` as OpenAI takes it: a string, token ids, or an array of either. param: what the dialect calls it.

    empty_texts: take an empty text where the model begins every text with a token.  Raises InvalidRequest.
    """
    items = _items(value, param)
    if not empty_texts and "" in items:
        raise _empty(value, items.index(""), param)
    prompts = [prompt for part in _chunks(items) for prompt in await _read(part, model, param)]
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


async def _read(items: Sequence[object], model: ServedModel, param: str) -> list[Prompt]:
    encoded = iter(await model.encode([item for item in items if isinstance(item, str)]))
    return [
        Prompt(compact_ids(next(encoded)), item, partial(_encode, item))
        if isinstance(item, str)
        else await _read_ids(item, model, param)
        for item in items
    ]


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


async def _encode(text: str, tokenizer: Tokenizer) -> list[int]:
    return await asyncio.to_thread(tokenizer.encode, text)


def _items(value: object, param: str) -> list[object]:
    """Return the single prompts in `value`."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise _wrong_type(param)
    if not value:
        raise InvalidRequest(f"{param} is an empty array", param=param)
    return [value] if _is_id(as_integer(value[0])) else value


async def _read_ids(item: object, model: ServedModel, param: str) -> Prompt:
    if not isinstance(item, list):
        raise _wrong_type(param)
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
