"""POST /api/generate: Ollama's answer to one prompt, which the model's chat template wraps."""

from __future__ import annotations

from functools import partial
from typing import Any

from aiohttp import web
from msgspec import UNSET

from console.api.context import ApiContext, new_id
from console.api.dialects.ollama.answers import (
    AnswerPart,
    AnswerWriter,
    Generated,
    Stopwatch,
    ToolCalled,
    no_answer,
    send_whole,
)
from console.api.dialects.ollama.body import GenerateBody, options_params
from console.api.http.errors import json_response
from console.api.requests.body import read
from console.api.requests.chat_prompt import chat_prompt
from console.api.requests.conversation import Turn
from console.api.requests.prompts import Prompt, read_prompts
from console.api.requests.schemas import describes
from console.api.requests.served_model import MANY_TOKENS, ServedModel
from console.api.requests.stream import JSON_LINES
from console.api.requests.thinking import ThinkingOptions
from engine.errors import InvalidRequest
from engine.requests.request import compact_ids


class Generate:
    """POST /api/generate."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    def routes(self) -> list[web.RouteDef]:
        """Return its place and handler."""
        return [web.post("/api/generate", self._post)]

    @describes(
        "Answer a prompt",
        body=GenerateBody,
        answer=Generated,
        event=Generated,
        media="application/x-ndjson",
        example={"prompt": "Hello", "stream": False, "options": {"num_predict": 16}},
    )
    async def _post(self, request: web.Request) -> web.StreamResponse:
        watch = Stopwatch()
        body = await read(request, GenerateBody)
        options = body.read()
        _check_raw(body)
        if not body.prompt and await body.unloads(request, self._context):
            return json_response(no_answer(body.model or "", watch, _load_shape, unloads=True))
        model = body.with_client_name(
            await watch.loading(self._context.served_model(request, options, JSON_LINES if body.stream else None))
        )
        body.keep_loaded(request, self._context.engine, model, stops=not body.prompt)
        if not body.prompt:
            ending = no_answer(model.name, watch, _load_shape, unloads=body.keep_alive_s == 0)
            return await send_whole(request, self._context.settings, ending)
        thinking = body.thinking(model)
        prompt = await _prompt(body, model, thinking)
        params = options_params(options, model, len(prompt.ids), logprobs=body.wanted_logprobs)
        if _has_template(body, model):
            params = thinking.apply_to(params, model, prompt)
        text = prompt.answer_text(model.tokenizer, params) if body.logprobs else None
        writer = AnswerWriter(model, watch, partial(_shape, body, prompt), logprobs=text)
        async with self._context.generate(request, new_id("gen"), options, model, [prompt], params) as generation:
            return await writer.answer(request, self._context.settings, generation, body.stream)


def _shape(
    body: GenerateBody,
    prompt: Prompt,
    text: str,
    thinking: str,
    calls: list[ToolCalled],
    ids: list[int] | None,
    /,
    **fields: Any,
) -> AnswerPart:
    """The end has the conversation's tokens, unless the client sent them as a raw prompt."""
    context = UNSET if ids is None or body.raw else [*prompt.ids, *ids]
    return Generated(response=text, thinking=thinking or UNSET, context=context, **fields)


def _load_shape(
    text: str, thinking: str, calls: list[ToolCalled], ids: list[int] | None, /, **fields: Any
) -> AnswerPart:
    return Generated(response=text, **fields)


def _check_raw(body: GenerateBody) -> None:
    for name in ("system", "context", "think"):
        if body.raw and getattr(body, name):
            raise InvalidRequest(f"raw takes the prompt as it is, without {name}", param=name)


def _has_template(body: GenerateBody, model: ServedModel) -> bool:
    """Return whether the model's chat template wraps the prompt."""
    return model.tokenizer.has_chat_template and not body.raw


async def _prompt(body: GenerateBody, model: ServedModel, thinking: ThinkingOptions) -> Prompt:
    """Return the prompt; without a chat template it is the body's text."""
    if not _has_template(body, model):
        for name in ("system", "think"):
            if getattr(body, name):
                raise InvalidRequest(f"{name} is not supported: this model has no chat template", param=name)
        [prompt] = await read_prompts(body.prompt, model)
    else:
        turns: list[Turn] = [
            {"role": role, "content": text} for role, text in (("system", body.system), ("user", body.prompt)) if text
        ]
        prompt = await chat_prompt(model, turns, variables=thinking.variables(model))
    if not body.context:
        return prompt
    joined = partial(_after, body.context, prompt, model)
    return joined() if len(body.context) < MANY_TOKENS else await model.offload(joined)


def _after(context: list[int], prompt: Prompt, model: ServedModel) -> Prompt:
    """Return the prompt after an earlier conversation, with one start token."""
    model.check_token_ids(context, "context")
    begins = bool(prompt.ids) and prompt.ids[0] == model.tokenizer.bos_token_id
    ids = prompt.ids[1:] if begins else prompt.ids
    return Prompt(compact_ids([*context, *ids]), prompt.text, continues=prompt.continues)
