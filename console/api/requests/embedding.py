"""Vectors of texts, made by the loaded model: what the dialects' endpoints for embeddings share.

A vector is the mean of the model's final hidden states over the text's tokens, of length 1 as OpenAI's are. The model
was trained to continue texts, not for this; OpenAI's answer says how its vectors were made.
"""

from __future__ import annotations

import asyncio
import base64
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Literal

import msgspec
from aiohttp import web
from pydantic import Field

from console.api.context import ApiContext, new_id
from console.api.requests.prompts import Prompt, TruncationFields
from console.api.requests.sampling import MAX_CACHE_SALT, ModelFields
from console.api.requests.served_model import ServedModel
from console.api.settings import ApiSettings
from engine.config import format_number
from engine.errors import ContextLengthExceeded, InvalidRequest

Encoding = Literal["float", "base64"]

MAX_INPUTS = 2048
"""What OpenAI takes at once."""

INPUTS_PER_CHOICE = 4
"""Texts for each answer that a request may ask for: a vector is computed in one step. Clients send up to MAX_INPUTS."""


_NUMBERS_OR_TEXT = {"anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "string"}]}

EncodedVector = Annotated[msgspec.Raw, msgspec.Meta(extra_json_schema=_NUMBERS_OR_TEXT)]
"""A vector as JSON: numbers, or base64 of them as float32 (little-endian)."""


class EmbeddingFields(ModelFields, TruncationFields):
    """Fields of requests for vectors.

    cache_salt: share the prefix cache only with requests of the same salt; choose one that is hard to guess.
    """

    cache_salt: Annotated[str, Field(max_length=MAX_CACHE_SALT)] = ""


@contextmanager
def errors_name_input(param: str = "input") -> Iterator[None]:
    """Raise ContextLengthExceeded about the input, in the field `param`: the engine knows of prompts alone."""
    try:
        yield
    except ContextLengthExceeded as error:
        details = error.details
        tokens = f"{'at least ' if details.get('at_least') else ''}{details.get('prompt_tokens')}"
        message = f"the input has {tokens} tokens; the limit is {details.get('limit')}"
        raise ContextLengthExceeded(message, **details | {"param": param}) from None


async def vectors_of(
    context: ApiContext,
    request: web.Request,
    body: ModelFields,
    model: ServedModel,
    prompts: Sequence[Prompt],
    *,
    cache_salt: str = "",
) -> tuple[list[bytes], int]:
    """Each prompt's vector as float32, and the tokens of all. Raises what Engine.submit does."""
    vectors: list[bytes] = []
    tokens = 0
    # As many at once as a request may ask for answers and the queue may hold: all of them are submitted, or none.
    for some in _chunks(prompts, max(1, min(context.settings.max_choices, context.engine.config.max_queue))):
        async with context.embed(request, new_id("embd"), body, model, some, cache_salt) as generation:
            vectors.extend(answer.vector for answer in await generation.answers())
            tokens += generation.tokens.prompt
    return vectors, tokens


async def encode_vectors(vectors: Sequence[bytes], encoding: Encoding) -> list[EncodedVector]:
    """Vectors as JSON."""
    written = []
    for vector in vectors:
        written.append(_encode_vector(vector, encoding))
        await asyncio.sleep(0)  # writing millions of numbers must not hold others up
    return written


def check_inputs(
    inputs: int,
    dimensions: int | None,
    model: ServedModel,
    settings: ApiSettings,
    *,
    params: Sequence[str] = ("input",),
) -> None:
    """Raise InvalidRequest for too many texts, and for vectors of a length that the model does not make. params: the
    client's names of the fields with texts."""
    if inputs > (most := min(MAX_INPUTS, INPUTS_PER_CHOICE * settings.max_choices)):
        have = f"{params[0]} has" if len(params) == 1 else f"{' and '.join(params)} have"
        raise InvalidRequest(f"{have} {inputs} texts; the limit is {most}", param=params[-1])
    size = model.loaded.hidden_size
    if dimensions not in (None, size) and size:
        raise InvalidRequest(
            f"dimensions is {format_number(dimensions or 0)}; this model's vectors have {size}", param="dimensions"
        )


def _chunks(prompts: Sequence[Prompt], size: int) -> Iterator[Sequence[Prompt]]:
    return (prompts[first : first + size] for first in range(0, len(prompts), size))


def _encode_vector(vector: bytes, encoding: Encoding) -> msgspec.Raw:
    plain = base64.b64encode(vector).decode() if encoding == "base64" else array("f", vector).tolist()
    return msgspec.Raw(msgspec.json.encode(plain))
