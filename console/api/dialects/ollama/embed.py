"""POST /api/embed and the older /api/embeddings: vectors of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar

import msgspec
from aiohttp import web

from console.api.context import ApiContext
from console.api.dialects.ollama.answers import Stopwatch
from console.api.dialects.ollama.body import OllamaBody, Options, read_options
from console.api.http.errors import json_response
from console.api.requests.body import read
from console.api.requests.embedding import (
    EncodedVector,
    check_inputs,
    encode_vectors,
    errors_name_input,
    vectors_of,
)
from console.api.requests.prompts import read_prompts
from console.api.requests.schemas import TEXTS, describes
from console.api.requests.served_model import ServedModel
from engine.errors import InvalidRequest

_NO_NUMBERS = msgspec.Raw(b"[]")
"""The vector of no text."""


class EmbedBody(OllamaBody):
    """A request for vectors. input: a text, or several.  truncate: use the beginning of a text that is too long, which
    is refused where this is false.  dimensions: the length of the model's vectors, or nothing."""

    clamped: ClassVar[Mapping[str, str]] = {"input": "to its beginning, if it is too long and truncate is not false"}

    input: Annotated[Any, TEXTS]
    truncate: bool = True
    dimensions: int | None = None


class EmbeddingsBody(OllamaBody):
    """A request for one vector, in an older form."""

    clamped: ClassVar[Mapping[str, str]] = {"prompt": "to its beginning, if it is too long"}

    prompt: str = ""


class Embedded(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of /api/embed. embeddings: of length 1, in the order of the texts."""

    model: str
    embeddings: list[EncodedVector]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OldEmbedding(msgspec.Struct, frozen=True):
    """The answer of /api/embeddings."""

    embedding: EncodedVector


class Embed:
    """POST /api/embed and /api/embeddings."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    def routes(self) -> list[web.RouteDef]:
        """Return their places and handlers."""
        return [web.post("/api/embed", self._post), web.post("/api/embeddings", self._old)]

    @describes(
        "Compute embeddings of texts",
        body=EmbedBody,
        answer=Embedded,
        example={"input": ["a text", "another"]},
        operation="embeddings",
    )
    async def _post(self, request: web.Request) -> web.StreamResponse:
        watch = Stopwatch()
        body = await read(request, EmbedBody)
        options = _options(body)
        texts = _texts(body.input)
        model = body.with_client_name(await watch.loading(self._context.served_model(request, options)))
        body.keep_loaded(request, self._context.engine, model)
        check_inputs(len(texts), body.dimensions, model, self._context.settings)
        vectors, tokens = await self._vectors(request, options, model, texts, truncate=body.truncate)
        return json_response(
            Embedded(
                model=model.name,
                embeddings=vectors,
                total_duration=watch.total_ns,
                load_duration=watch.load_ns,
                prompt_eval_count=tokens,
            )
        )

    @describes(
        "Compute the embedding of a text",
        body=EmbeddingsBody,
        answer=OldEmbedding,
        example={"prompt": "a text"},
        operation="embeddings",
    )
    async def _old(self, request: web.Request) -> web.StreamResponse:
        body = await read(request, EmbeddingsBody)
        options = _options(body)
        model = await self._context.served_model(request, options)
        body.keep_loaded(request, self._context.engine, model)
        texts = [body.prompt] if body.prompt else []
        vectors, _ = await self._vectors(request, options, model, texts, truncate=True)
        return json_response(OldEmbedding(vectors[0] if vectors else _NO_NUMBERS))

    async def _vectors(
        self, request: web.Request, options: Options, model: ServedModel, texts: Sequence[str], *, truncate: bool
    ) -> tuple[list[EncodedVector], int]:
        """Return the vector of each text, and the number of tokens of all."""
        if not texts:
            return [], 0
        limit = min(options.num_ctx or model.loaded.max_model_len, model.loaded.max_model_len) - 1
        if truncate:
            texts = [await model.part(text, limit) for text in texts]
        with errors_name_input():
            prompts = await read_prompts(list(texts), model, "input")
            if truncate:
                prompts = [replace(prompt, ids=prompt.ids[:limit], encode=None) for prompt in prompts]
            vectors, tokens = await vectors_of(self._context, request, options, model, prompts)
        return await encode_vectors(vectors, "float"), tokens


def _options(body: OllamaBody) -> Options:
    _ = body.keep_alive_s
    return read_options(body.options, model=body.model_name)


def _texts(value: object) -> list[str]:
    """Return the texts to embed. Raises InvalidRequest."""
    texts = [value] if isinstance(value, str) and value else value or []
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest("input should be a string or an array of strings", param="input")
    return texts
