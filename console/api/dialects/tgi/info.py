"""GET /info and POST /tokenize: the model and its limits, and the tokens of a text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from aiohttp import web

from console.api.context import ApiContext
from console.api.dialects.tgi.body import TgiBody
from console.api.dialects.tgi.generate import Info, SimpleToken
from console.api.http.errors import json_response
from console.api.http.request_body import offload
from console.api.requests.body import read
from console.api.requests.sampling import MAX_N, SamplingFields
from console.api.requests.schemas import describes
from console.api.requests.served_model import MANY_TOKENS
from console.api.version import product_version
from engine.config import MAX_STOP_STRINGS
from engine.text.tokenizer import TokenSpan


class InfoEndpoints:
    """GET /info and POST /tokenize."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    def routes(self) -> list[web.RouteDef]:
        """Return their places and handlers."""
        return [web.get("/info", self._info), web.post("/tokenize", self._tokenize)]

    @describes("Model and limits (TGI)", answer=Info)
    async def _info(self, request: web.Request) -> web.Response:
        status, config = self._context.engine.status, self._context.engine.config
        loaded = status.model or (await self._context.served_model(request, SamplingFields.from_document({}))).loaded
        return json_response(
            Info(
                model_id="" if status.spec is None else status.spec.name,
                model_dtype=f"torch.{loaded.dtype}",
                model_device_type=loaded.devices[0].partition(":")[0] if loaded.devices else "cpu",
                max_concurrent_requests=config.num_workers * config.max_prompts + config.max_queue,
                max_best_of=MAX_N,
                max_stop_sequences=min(MAX_STOP_STRINGS, self._context.settings.max_stops),
                max_input_tokens=loaded.max_model_len - 1,
                max_input_length=loaded.max_model_len - 1,
                max_total_tokens=loaded.max_model_len,
                version=product_version(),
            )
        )

    @describes(
        "Tokenize text, with offsets (TGI)",
        body=TgiBody,
        answer=list[SimpleToken],
        example={"inputs": "Once upon a time"},
    )
    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await read(request, TgiBody)
        truncate = body.read_parameters().truncate
        model = await self._context.served_model(request, SamplingFields.from_document({"model": body.model}))
        spans = await model.spans(body.inputs)
        shown = spans if truncate is None else spans[-truncate:]
        tokens = partial(_tokens, body.inputs, shown)
        return await offload(request, tokens) if len(shown) > MANY_TOKENS else tokens()


def _tokens(text: str, spans: Sequence[TokenSpan]) -> web.Response:
    return json_response(
        [SimpleToken(span.token_id, text[span.start : span.stop], span.start, span.stop) for span in spans]
    )
