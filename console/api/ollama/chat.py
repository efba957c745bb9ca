"""POST /api/chat: Ollama's answer to a conversation."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from aiohttp import web
from msgspec import UNSET

from console.api.body import read
from console.api.chat_prompt import chat_prompt
from console.api.context import ApiContext, new_id
from console.api.conversation import read_messages
from console.api.described import describes
from console.api.ollama.answering import Answering
from console.api.ollama.answers import Chatted, Part, Said, Stopwatch, ToolCalled
from console.api.ollama.body import ChatBody
from console.api.ollama.conversation import goes_on, read_conversation
from console.api.ollama.options import options_params
from console.api.received import of_body


class Chat:
    """The endpoint."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    def routes(self) -> list[web.RouteDef]:
        """Where it is found."""
        return [web.post("/api/chat", self._post)]

    @describes(
        "Answer a conversation",
        body=ChatBody,
        answer=Chatted,
        event=Chatted,
        media="application/x-ndjson",
        example={
            "messages": [{"role": "user", "content": "Hello"}],
            "stream": False,
            "options": {"num_predict": 16},
        },
    )
    async def _post(self, request: web.Request) -> web.StreamResponse:
        watch = Stopwatch()
        body = await read(request, ChatBody)
        options = body.read()
        said = await of_body(request, partial(read_conversation, body.messages))
        model = body.as_named(await watch.loading(self._context.served(request, options)))
        if not said:
            return Answering(model, watch, _shape).loaded()
        model.check_length(len(said), "messages")
        use = await asyncio.to_thread(body.tool_use, model) if body.tools else body.tool_use(model)
        prompt = await chat_prompt(
            model,
            await of_body(request, partial(read_messages, said)),
            continue_final=goes_on(said),
            variables=body.variables,
            tools=use.definitions,
        )
        params = use.applied(options_params(options, model, len(prompt.ids), logprobs=body.wanted_logprobs))
        text = prompt.answer_text(model.tokenizer, params) if body.logprobs else None
        answering = Answering(model, watch, _shape, logprobs=text, reader=use.reader())
        async with self._context.generate(request, new_id("chat"), options, model, [prompt], params) as generation:
            return await answering.answer(request, self._context.settings, generation, body.stream)


def _shape(text: str, calls: list[ToolCalled], ids: list[int] | None, /, **fields: Any) -> Part:
    return Chatted(message=Said(content=text, tool_calls=calls or UNSET), **fields)
