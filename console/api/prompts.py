"""Prompts as clients send them: text or token ids, one or several."""

from __future__ import annotations

from dataclasses import dataclass

from console.api.served import ServedModel
from engine.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: the ids to continue, and the text that stands before the answer."""

    ids: list[int]
    text: str


async def read_prompts(value: object, model: ServedModel) -> list[Prompt]:
    """`prompt` as OpenAI takes it: a string, token ids, or an array of either. Raises InvalidRequest."""
    return [await _read_prompt(item, model) for item in _items(value)]


def _items(value: object) -> list[object]:
    """The single prompts in `value`."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise _misshapen()
    if not value:
        raise InvalidRequest("prompt is an empty array", param="prompt")
    return [value] if _is_id(value[0]) else value


async def _read_prompt(item: object, model: ServedModel) -> Prompt:
    if isinstance(item, str):
        prompt = Prompt(await model.encode(item), item)
    elif isinstance(item, list) and all(_is_id(part) for part in item):
        model.check_token_ids(item, "prompt")
        prompt = Prompt(item, model.tokenizer.decode(item))
    else:
        raise _misshapen()
    if not prompt.ids:
        raise InvalidRequest("prompt is empty; there is nothing to continue", param="prompt")
    return prompt


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _misshapen() -> InvalidRequest:
    return InvalidRequest("prompt should be a string, an array of strings, or token ids", param="prompt")
