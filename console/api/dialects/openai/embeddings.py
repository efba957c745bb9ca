"""POST /v1/embeddings: OpenAI's vectors of texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from aiohttp import web

from console.api.context import ApiContext
from console.api.http.errors import json_response
from console.api.requests.body import read
from console.api.requests.chat_body import OPENAI_INERT
from console.api.requests.embedding import (
    EmbeddingFields,
    EncodedVector,
    Encoding,
    check_inputs,
    encode_vectors,
    errors_name_input,
    vectors_of,
)
from console.api.requests.parameters import Refusal
from console.api.requests.prompts import count_prompts, read_prompts
from console.api.requests.schemas import TEXTS_TO_EMBED, describes
from console.api.requests.served_model import ServedModel

_REFUSED: Mapping[str, Refusal] = {
    "add_special_tokens": Refusal("texts are tokenized with the model's own special tokens", (True,)),
    "embed_dtype": Refusal("vectors are float32", ("float32",)),
    "endianness": Refusal("vectors have the byte order of the machine", ("native",)),
    "input_type": Refusal("queries and documents get the same vector"),
    "messages": Refusal("send the text as input"),
    "normalize": Refusal("vectors have length 1", (True,)),
}


class EmbeddingBody(EmbeddingFields):
    """An embedding request. input: a string, token ids, or an array of either.

    dimensions: the length of the model's vectors, or nothing.
    """

    refused = _REFUSED
    inert = OPENAI_INERT

    input: Annotated[object, TEXTS_TO_EMBED]
    encoding_format: Encoding = "float"
    dimensions: int | None = None


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
    """POST /v1/embeddings."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    def routes(self) -> list[web.RouteDef]:
        """Return its place and handler."""
        return [web.post("/v1/embeddings", self._post)]

    @describes(
        "Compute embeddings of texts",
        body=EmbeddingBody,
        answer=Embeddings,
        example={"input": ["a text", "another"]},
        operation="embeddings",
    )
    async def _post(self, request: web.Request) -> web.StreamResponse:
        body = await read(request, EmbeddingBody)
        model = await self._context.served_model(request, body)
        check_inputs(count_prompts(body.input, "input"), body.dimensions, model, self._context.settings)
        with errors_name_input():
            return json_response(await self._embed(request, body, model))

    async def _embed(self, request: web.Request, body: EmbeddingBody, model: ServedModel) -> Embeddings:
        truncation = body.truncation(model, side="right")
        prompts = await read_prompts(body.input, model, "input", empty_texts=False, truncation=truncation)
        salt = body.cache_salt
        vectors, tokens = await vectors_of(self._context, request, body, model, prompts, cache_salt=salt)
        written = await encode_vectors(vectors, body.encoding_format)
        data = [Embedding(index=index, embedding=vector) for index, vector in enumerate(written)]
        return Embeddings(data=data, model=model.name, usage=EmbeddingUsage(tokens, tokens))
