"""POST /v1/rerank and /v1/score: how similar texts are, as vLLM and Jina answer it, and /v2/rerank as Cohere does.

The score of two texts is the cosine of their vectors, which is what vLLM gives for a model that makes vectors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy
from aiohttp import web
from numpy.typing import NDArray
from pydantic import Field, WithJsonSchema

from console.api.context import ApiContext, new_id
from console.api.dialects.openai.common import now
from console.api.http.errors import json_response
from console.api.http.request_body import run_offloaded
from console.api.requests.body import read
from console.api.requests.chat_body import OPENAI_INERT
from console.api.requests.embedding import EmbeddingFields, check_inputs, errors_name_input, vectors_of
from console.api.requests.parameters import TEXT_ONLY, Refusal
from console.api.requests.prompts import Prompt, read_prompts
from console.api.requests.schemas import JsonSchema, describes, one_given
from console.api.requests.served_model import ServedModel
from engine.errors import InvalidRequest

_TEXT: JsonSchema = {"type": "string", "minLength": 1}
_ONE: JsonSchema = {
    "anyOf": [_TEXT, {"type": "object", "properties": {"text": _TEXT}, "required": ["text"], "maxProperties": 1}]
}
_SEVERAL: JsonSchema = {"anyOf": [*_ONE["anyOf"], {"type": "array", "items": _ONE, "minItems": 1}]}
_TEXTS = WithJsonSchema(_SEVERAL)
_OPTIONAL_TEXTS = WithJsonSchema({"anyOf": [*_SEVERAL["anyOf"], {"type": "null"}]})

_NO_ACTIVATION = "scores are cosines"
_REFUSED: Mapping[str, Refusal] = {
    "activation": Refusal(_NO_ACTIVATION, (True,)),
    "instruction": Refusal("put it into the query"),
    "max_chunks_per_doc": Refusal("documents are not split"),
    "mm_processor_kwargs": Refusal(TEXT_ONLY),
    "rank_fields": Refusal("documents are texts", (["text"],)),
    "softmax": Refusal(_NO_ACTIVATION, (True,)),
    "use_activation": Refusal(_NO_ACTIVATION, (True,)),
}


class _ScoringBody(EmbeddingFields):
    """Fields of both kinds of request.

    max_tokens_per_query, max_tokens_per_doc: max tokens of a query, and of a document; longer ones lose their end, or
    the side of truncation_side. 0 is no limit.
    """

    refused = _REFUSED
    inert = OPENAI_INERT

    max_tokens_per_query: Annotated[int, Field(ge=0)] = 0
    max_tokens_per_doc: Annotated[int, Field(ge=0)] = 0


class RerankBody(_ScoringBody):
    """A question and documents, to be put in the order of their similarity to it.

    query: a text.  documents: texts, or objects with a text.  top_n: the number of documents to return; 0 and -1 are
    all.  return_documents: false leaves the texts out of the answer.
    """

    prompt_field = "documents"

    query: Annotated[object, WithJsonSchema(_ONE)]
    documents: Annotated[object, _TEXTS]
    top_n: Annotated[int, Field(ge=-1)] = 0
    return_documents: bool = True


class ScoreBody(_ScoringBody):
    """Texts to compare: one with each of several, or each with the one at its place.

    text_1, queries, data_1: a text, or texts.  text_2, documents, items, data_2: texts to compare them with.
    """

    prompt_field = "text_1"
    aliases: ClassVar[Mapping[str, str]] = {
        "data_1": "text_1",
        "data_2": "text_2",
        "documents": "text_2",
        "items": "text_2",
        "queries": "text_1",
    }

    text_1: Annotated[object, _OPTIONAL_TEXTS] = None
    text_2: Annotated[object, _OPTIONAL_TEXTS] = None
    rules: ClassVar[Sequence[JsonSchema]] = [
        one_given("text_1", "queries", "data_1"),
        one_given("text_2", "documents", "items", "data_2"),
    ]


# Answers.


class RankedText(msgspec.Struct, frozen=True):
    """A document. multi_modal: vLLM's other kind, always null."""

    text: str
    multi_modal: None = None


class Ranked(msgspec.Struct, frozen=True, kw_only=True):
    """A document's score. index: its place in the request."""

    index: int
    document: RankedText | msgspec.UnsetType = msgspec.UNSET
    relevance_score: float


class RankUsage(msgspec.Struct, frozen=True):
    """Tokens of the query, once, and of all documents."""

    prompt_tokens: int
    total_tokens: int


class Reranked(msgspec.Struct, frozen=True, kw_only=True):
    """Documents, the most similar first."""

    id: str
    model: str
    usage: RankUsage
    results: list[Ranked]


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """The score of one pair."""

    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreUsage(msgspec.Struct, frozen=True):
    """Tokens of all texts, each counted once."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: None = None


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    """Scores of pairs, in their order."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: ScoreUsage


class ScoringEndpoints:
    """POST /v1/rerank, /v2/rerank, /rerank, /v1/score and /score."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    def routes(self) -> list[web.RouteDef]:
        """Return their places and handlers."""
        return [
            *(web.post(path, self._rerank) for path in ("/v1/rerank", "/v2/rerank", "/rerank")),
            *(web.post(path, self._score) for path in ("/v1/score", "/score")),
        ]

    @describes(
        "Rank documents by their similarity to a query",
        body=RerankBody,
        answer=Reranked,
        example={"query": "a text", "documents": ["another", "a text"]},
        operation="embeddings",
    )
    async def _rerank(self, request: web.Request) -> web.Response:
        body = await read(request, RerankBody)
        queries, documents = _texts(body.query, "query", single=True), _texts(body.documents, "documents")
        model = await self._context.served_model(request, body)
        scores, tokens = await self._compare(request, body, model, queries, documents, ("query", "documents"))
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n if body.top_n > 0 else None]
        shown = [RankedText(text) if body.return_documents else msgspec.UNSET for text in documents]
        results = [Ranked(index=index, document=shown[index], relevance_score=scores[index]) for index in best]
        usage = RankUsage(tokens, tokens)
        return json_response(Reranked(id=new_id("rerank"), model=model.name, usage=usage, results=results))

    @describes(
        "Score the similarity of texts",
        body=ScoreBody,
        answer=Scores,
        example={"text_1": "a text", "text_2": ["another", "a text"]},
        operation="embeddings",
    )
    async def _score(self, request: web.Request) -> web.Response:
        body = await read(request, ScoreBody)
        names = body.sent_name("text_1"), body.sent_name("text_2")
        first, second = _texts(body.text_1, names[0]), _texts(body.text_2, names[1])
        if len(first) not in (1, len(second)):
            raise InvalidRequest(
                f"{names[0]} has {len(first)} texts and {names[1]} {len(second)}; {names[0]} should have one, or as "
                "many",
                param=names[0],
            )
        model = await self._context.served_model(request, body)
        scores, tokens = await self._compare(request, body, model, first, second, names)
        data = [Score(index=index, score=score) for index, score in enumerate(scores)]
        usage = ScoreUsage(tokens, tokens)
        return json_response(Scores(id=new_id("score"), created=now(), model=model.name, data=data, usage=usage))

    async def _compare(
        self,
        request: web.Request,
        body: _ScoringBody,
        model: ServedModel,
        first: Sequence[str],
        second: Sequence[str],
        names: tuple[str, str],
    ) -> tuple[list[float], int]:
        """Return the score of each of `second` with the one of `first` at its place, or with the only one, and the
        tokens of all. names: the client's names of both."""
        check_inputs(len(first) + len(second), None, model, self._context.settings, params=names)
        limits = body.max_tokens_per_query, body.max_tokens_per_doc
        prompts: list[Prompt] = []
        for texts, name, limit in zip((first, second), names, limits, strict=True):
            cut = body.truncation(model, side="right", most=limit)
            with errors_name_input(name):
                prompts += await read_prompts([*texts], model, name, empty_texts=False, truncation=cut)
        longest = max(range(len(prompts)), key=lambda place: len(prompts[place].ids))
        with errors_name_input(names[longest >= len(first)]):
            salt = body.cache_salt
            vectors, tokens = await vectors_of(self._context, request, body, model, prompts, cache_salt=salt)
        return await run_offloaded(request, lambda: cosines(vectors[: len(first)], vectors[len(first) :])), tokens


def cosines(first: Sequence[bytes], second: Sequence[bytes]) -> list[float]:
    """Return the cosine of each of `second` with the one of `first` at its place, or with the only one."""
    left, right = _unit_vectors(first), _unit_vectors(second)
    found: list[float] = numpy.clip((left * right).sum(axis=1), -1.0, 1.0).tolist()
    return found


def _unit_vectors(vectors: Sequence[bytes]) -> NDArray[numpy.float64]:
    """Return vectors of float32 as rows of length 1; one of zeros stays so."""
    rows = numpy.stack([numpy.frombuffer(vector, numpy.float32) for vector in vectors]).astype(numpy.float64)
    lengths: NDArray[numpy.float64] = numpy.linalg.norm(rows, axis=1, keepdims=True)
    return rows / numpy.maximum(lengths, numpy.finfo(numpy.float32).tiny)


def _texts(value: Any, param: str, *, single: bool = False) -> list[str]:
    """Return one text or several, each a string or an object with a text; raises InvalidRequest."""
    if value is None:
        raise InvalidRequest(f"{param} is missing", param=param)
    if single or not isinstance(value, list):
        return [_text(value, param)]
    if not value:
        raise InvalidRequest(f"{param} is an empty array", param=param)
    return [_text(item, f"{param}[{place}]") for place, item in enumerate(value)]


def _text(item: object, param: str) -> str:
    match item:
        case "" | {"text": ""}:
            raise InvalidRequest(f"{param} is empty", param=param)
        case str(text):
            return text
        case {"text": str(text)} if len(item) == 1:  # type: ignore[arg-type]
            return text
        case {"content": _}:
            raise InvalidRequest(f"{param}.content is not supported: {TEXT_ONLY}", param=param)
        case _:
            raise InvalidRequest(f"{param} should be a text, or an object with a text", param=param)
