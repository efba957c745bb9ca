"""POST /v1/embeddings: OpenAI's vectors of texts, made by the loaded model.

A vector is the mean of the model's final hidden states over the text's tokens, of length 1 as OpenAI's are. The model
was trained to go on with texts, not for this; the answer says how its vectors were made.
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

from console.api.context import ApiContext, new_id
from console.api.http.errors import json_response, rename_fields
from console.api.requests.body import read
from console.api.requests.parameters import EMBEDDING_REFUSED, OPENAI_INERT
from console.api.requests.prompts import Prompt, count_prompts, read_prompts
from console.api.requests.sampling import ModelFields
from console.api.requests.schemas import TEXTS_TO_EMBED, describes
from console.api.requests.served_model import ServedModel
from console.api.settings import ApiSettings
from engine.config import format_number
from engine.errors import ContextLengthExceeded, InvalidRequest

Encoding = Literal["float", "base64"]

MAX_INPUTS = 2048
"""What OpenAI takes at once."""

INPUTS_PER_CHOICE = 4
"""Texts for each answer that a request may ask for: a vector is computed in one step. Clients send up to MAX_INPUTS."""


class EmbeddingBody(ModelFields):
    """What the endpoint takes. input: a string, token ids, or an array of either.

    dimensions: as many as the model's vectors have, if anything.
    """

    refused = EMBEDDING_REFUSED
    inert = OPENAI_INERT

    input: Annotated[object, TEXTS_TO_EMBED]
    encoding_format: Encoding = "float"
    dimensions: int | None = None


_NUMBERS_OR_TEXT = {"anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "string"}]}

EncodedVector = Annotated[msgspec.Raw, msgspec.Meta(extra_json_schema=_NUMBERS_OR_TEXT)]
"""A vector as JSON: numbers, or base64 of them as float32 (little-endian)."""


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """One input's vector."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: EncodedVector


class EmbeddingUsage(msgspec.Struct, frozen=True):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. pooling: how the model's states became vectors."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    pooling: Literal["mean"] = "mean"


class EmbeddingEndpoint:
    """The endpoint."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    def routes(self) -> list[web.RouteDef]:
        """Where it is found."""
        return [web.post("/v1/embeddings", self._post)]

    @describes(
        "Turn texts into vectors", body=EmbeddingBody, answer=Embeddings, example={"input": ["a text", "another"]}
    )
    async def _post(self, request: web.Request) -> web.StreamResponse:
        body = await read(request, EmbeddingBody)
        model = await self._context.served(request, body)
        check_inputs(count_prompts(body.input, "input"), body.dimensions, model, self._context.settings)
        with errors_name_input():
            return json_response(await self._embedded(request, body, model))

    async def _embedded(self, request: web.Request, body: EmbeddingBody, model: ServedModel) -> Embeddings:
        prompts = await read_prompts(body.input, model, "input", empty_texts=False)
        vectors, tokens = await vectors_of(self._context, request, body, model, prompts)
        written = await encode_vectors(vectors, body.encoding_format)
        data = [Embedding(index=index, embedding=vector) for index, vector in enumerate(written)]
        return Embeddings(data=data, model=model.name, usage=EmbeddingUsage(tokens, tokens))


@contextmanager
def errors_name_input() -> Iterator[None]:
    """Where a text is too long: the engine knows of prompts alone."""
    try:
        yield
    except ContextLengthExceeded as error:
        message = rename_fields(error.message, {"prompt": "input"})
        raise ContextLengthExceeded(message, **error.details | {"param": "input"}) from None


async def vectors_of(
    context: ApiContext, request: web.Request, body: ModelFields, model: ServedModel, prompts: Sequence[Prompt]
) -> tuple[list[bytes], int]:
    """Each prompt's vector as float32, and the tokens of all. Raises what Engine.submit does."""
    vectors: list[bytes] = []
    tokens = 0
    # As many at once as a request may ask for answers and the queue may hold: all of them are submitted, or none.
    for some in _parts(prompts, max(1, min(context.settings.max_choices, context.engine.config.max_queue))):
        async with context.embed(request, new_id("embd"), body, model, some) as generation:
            vectors.extend(answer.vector for answer in await generation.answers())
            tokens += generation.tokens.prompt
    return vectors, tokens


async def encode_vectors(vectors: Sequence[bytes], encoding: Encoding) -> list[EncodedVector]:
    """Vectors as JSON."""
    written = []
    for vector in vectors:
        written.append(_written(vector, encoding))
        await asyncio.sleep(0)  # writing millions of numbers must not hold others up
    return written


def check_inputs(inputs: int, dimensions: int | None, model: ServedModel, settings: ApiSettings) -> None:
    """Raise InvalidRequest for too many texts, and for vectors of a length that the model does not make."""
    if inputs > (most := min(MAX_INPUTS, INPUTS_PER_CHOICE * settings.max_choices)):
        raise InvalidRequest(f"input has {inputs} texts; the limit is {most}", param="input")
    size = model.loaded.hidden_size
    if dimensions not in (None, size) and size:
        asked = format_number(dimensions or 0)
        raise InvalidRequest(f"dimensions is {asked}; this model's vectors have {size}", param="dimensions")


def _parts(prompts: Sequence[Prompt], size: int) -> Iterator[Sequence[Prompt]]:
    return (prompts[first : first + size] for first in range(0, len(prompts), size))


def _written(vector: bytes, encoding: Encoding) -> msgspec.Raw:
    plain = base64.b64encode(vector).decode() if encoding == "base64" else array("f", vector).tolist()
    return msgspec.Raw(msgspec.json.encode(plain))
