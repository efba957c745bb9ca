"""/v1/responses: OpenAI's newer chat. Its answers are items, and may be kept here so that others follow them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import msgspec
from aiohttp import web

from console.api.context import ApiContext
from console.api.dialects.openai.common import now
from console.api.dialects.openai.responses_body import Message, ResponsesBody, format_of, namespaces_of, size_of
from console.api.dialects.openai.responses_items import (
    Deleted,
    FunctionDefinition,
    IncompleteDetails,
    InputDetails,
    InputTokens,
    ItemList,
    ItemWriter,
    OutputDetails,
    ReasoningEcho,
    Response,
    ResponseError,
    ResponseEvent,
    ResponseNotFound,
    ResponseUsage,
    Status,
    messages_of,
    new_item_id,
)
from console.api.http.auth import is_local_program, tenant_of
from console.api.http.errors import RequestCancelled, json_response
from console.api.http.request_body import run_offloaded
from console.api.requests.body import read
from console.api.requests.chat_prompt import chat_prompt
from console.api.requests.conversation import read_messages
from console.api.requests.generation import Generation
from console.api.requests.logprobs import ChatLogprob, chat_logprobs
from console.api.requests.prompts import Prompt
from console.api.requests.sampling import sampling_params
from console.api.requests.schemas import describes
from console.api.requests.served_model import ServedModel
from console.api.requests.stream import NAMED_EVENTS, ChunkStream
from console.api.tools import ToolUse
from engine.backends.base import FinishReason
from engine.config import SamplingParams
from engine.engine import StreamDelta
from engine.errors import EngineError, InvalidRequest

# Stored responses.

MAX_STORED = 1000
MAX_STORED_BYTES = 64 * 2**20


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """tenant: whose it is.  messages: the conversation up to its end, without instructions.  input: as it was sent."""

    tenant: str
    response: Response
    messages: list[Message]
    input: list[dict[str, object]]
    size_bytes: int


class ResponseStore:
    """The last responses, in memory: MAX_STORED of them, and MAX_STORED_BYTES."""

    def __init__(self) -> None:
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._bytes = 0

    def add(self, stored: StoredResponse) -> None:
        """Keep a response; the oldest ones go for it."""
        self._stored[stored.response.id] = stored
        self._bytes += stored.size_bytes
        while len(self._stored) > MAX_STORED or self._bytes > MAX_STORED_BYTES:
            _, oldest = self._stored.popitem(last=False)
            self._bytes -= oldest.size_bytes

    def find(self, response_id: str, tenant: str, param: str = "response_id") -> StoredResponse:
        """Return one of the client's own. Raises ResponseNotFound."""
        found = self._stored.get(response_id)
        if found is None or found.tenant != tenant:
            raise ResponseNotFound(
                f"{param} {response_id!r} is not stored here: the last {MAX_STORED:,} are, until the server restarts, "
                "those with store set to true",
                param=param,
                value=response_id,
            )
        return found

    def delete(self, response_id: str, tenant: str) -> None:
        """Forget one. Raises ResponseNotFound."""
        self._bytes -= self.find(response_id, tenant).size_bytes
        del self._stored[response_id]


@dataclass(slots=True)
class _Running:
    """A response under way. answer: once `ended` is set, unless its client has left."""

    tenant: str
    generation: Generation
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    answer: Response | None = None


_COUNTED = {"input": "Hello"}
_EXAMPLE = {**_COUNTED, "max_output_tokens": 16}


class Responses:
    """/v1/responses and what is stored of it."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._store = ResponseStore()
        self._running: dict[str, _Running] = {}

    def routes(self) -> list[web.RouteDef]:
        """Return their places and handlers."""
        one = "/v1/responses/{response_id:resp_[0-9a-f]+}"
        return [
            web.post("/v1/responses", self._post),
            web.post("/v1/responses/input_tokens", self._count),
            web.get(one, self._get, allow_head=False),
            web.delete(one, self._delete),
            web.get(f"{one}/input_items", self._items, allow_head=False),
            web.post(f"{one}/cancel", self._cancel),
        ]

    @describes(
        "Answer a conversation in items",
        body=ResponsesBody,
        answer=Response,
        event=ResponseEvent,
        example=_EXAMPLE,
        operation="chat",
    )
    async def _post(self, request: web.Request) -> web.StreamResponse:
        body = await read(request, ResponsesBody)
        model = await self._context.served_model(request, body, NAMED_EVENTS if body.stream else None)
        earlier = self._earlier(request, body)
        messages = await run_offloaded(request, body.messages)
        use = await _tool_use(body, model)
        params = sampling_params(body, model, max_tokens=body.max_output_tokens, logprobs=body.wanted_logprobs)
        params = await use.apply_to(params)
        prompt = await self._prompt(request, body, model, [*earlier, *messages], use)
        params = body.thinking.apply_to(params, model, prompt)
        call = _Call(body, model, use, params, prompt, store=self._stores(request, body))
        async with self._context.generate(request, call.id, body, model, [prompt], params) as generation:
            with self._cancellable(request, call.id, generation) as running:
                if not body.stream:
                    running.answer = answer = await call.answer(generation)
                    self._keep(request, call, [*earlier, *messages], answer)
                    return json_response(answer)
                async with ChunkStream(request, self._context.settings, NAMED_EVENTS) as chunks:
                    running.answer = answer = await call.send(generation, chunks)
                    self._keep(request, call, [*earlier, *messages], answer)
                return chunks.response

    @describes("Count the tokens of a conversation in items", body=ResponsesBody, answer=InputTokens, example=_COUNTED)
    async def _count(self, request: web.Request) -> web.StreamResponse:
        body = await read(request, ResponsesBody)
        model = await self._context.served_model(request, body)
        messages = [*self._earlier(request, body), *await run_offloaded(request, body.messages)]
        prompt = await self._prompt(request, body, model, messages, await _tool_use(body, model))
        return json_response(InputTokens(len(prompt.ids)))

    @describes("Get a stored response", answer=Response)
    async def _get(self, request: web.Request) -> web.StreamResponse:
        if request.query.get("stream") == "true":
            raise InvalidRequest("stream is not supported for stored responses", param="stream")
        return json_response(self._found(request).response)

    @describes("Delete a stored response", answer=Deleted)
    async def _delete(self, request: web.Request) -> web.StreamResponse:
        response_id = request.match_info["response_id"]
        self._store.delete(response_id, tenant_of(request))
        return json_response(Deleted(response_id))

    @describes("List the input of a stored response", answer=ItemList)
    async def _items(self, request: web.Request) -> web.StreamResponse:
        items = self._found(request).input
        ids = [str(item["id"]) for item in items]
        return json_response(ItemList(data=items, first_id=ids[0] if ids else None, last_id=ids[-1] if ids else None))

    @describes("Cancel a response while it streams", answer=Response)
    async def _cancel(self, request: web.Request) -> web.StreamResponse:
        running = self._running.get(request.match_info["response_id"])
        if running is None or running.tenant != tenant_of(request):
            return json_response(self._found(request).response)
        running.generation.cancel(RequestCancelled("The response was cancelled by its client"))
        await running.ended.wait()
        return json_response(running.answer or self._found(request).response)

    def _found(self, request: web.Request) -> StoredResponse:
        return self._store.find(request.match_info["response_id"], tenant_of(request))

    def _earlier(self, request: web.Request, body: ResponsesBody) -> list[Message]:
        """Return the conversation that a stored response ends."""
        if body.previous_response_id is None:
            return []
        return self._store.find(body.previous_response_id, tenant_of(request), "previous_response_id").messages

    async def _prompt(
        self, request: web.Request, body: ResponsesBody, model: ServedModel, messages: Sequence[Message], use: ToolUse
    ) -> Prompt:
        system = [{"role": "system", "content": body.instructions}] if body.instructions else []
        model.check_length(len(messages), "input")
        turns = await run_offloaded(request, partial(read_messages, [*system, *messages]))
        return await chat_prompt(model, turns, variables=body.thinking.variables(model), tools=use)

    def _stores(self, request: web.Request, body: ResponsesBody) -> bool:
        return is_local_program(request) if body.store is None else body.store

    def _keep(self, request: web.Request, call: _Call, messages: list[Message], answer: Response) -> None:
        if not answer.store:
            return
        conversation = [*messages, *messages_of(answer.output)]
        stored = StoredResponse(
            tenant=tenant_of(request), response=answer, messages=conversation, input=call.input_items(), size_bytes=0
        )
        self._store.add(msgspec.structs.replace(stored, size_bytes=size_of(stored)))

    @contextmanager
    def _cancellable(self, request: web.Request, response_id: str, generation: Generation) -> Iterator[_Running]:
        running = self._running[response_id] = _Running(tenant_of(request), generation)
        try:
            yield running
        finally:
            del self._running[response_id]
            running.ended.set()


async def _tool_use(body: ResponsesBody, model: ServedModel) -> ToolUse:
    return await asyncio.to_thread(body.tool_use, model) if body.tools else body.tool_use(model)


class _Call:
    """One request and its answer. store: the answer is kept."""

    def __init__(
        self,
        body: ResponsesBody,
        model: ServedModel,
        use: ToolUse,
        params: SamplingParams,
        prompt: Prompt,
        *,
        store: bool,
    ) -> None:
        self.id = new_item_id("resp")
        self._body = body
        self._model = model
        self._use = use
        self._params = params
        self._store = store
        self._created = now()
        self._text = prompt.answer_text(model.tokenizer, params)
        self._items = ItemWriter(use.reader(), summarizes=body.summarizes, namespaces=namespaces_of(body.tools))

    async def answer(self, generation: Generation) -> Response:
        """Return the whole response."""
        finish: FinishReason | None = None
        try:
            async with aclosing(generation.deltas()) as deltas:
                async for _, delta in deltas:
                    self._items.feed(delta, self._logprobs(delta))
                    finish = delta.finish
        except RequestCancelled:
            return self._ended("cancelled", generation)
        return self._ended(self._status(finish), generation, finish)

    async def send(self, generation: Generation, chunks: ChunkStream) -> Response:
        """Send each event as it comes; return the whole response."""
        finish: FinishReason | None = None
        for kind in ("created", "in_progress"):
            await chunks.send(self._items.event(kind, response=self._response("in_progress")))
        try:
            async with aclosing(generation.deltas()) as deltas:
                async for _, delta in deltas:
                    for event in self._items.feed(delta, self._logprobs(delta)):
                        await chunks.send(event)
                    finish = delta.finish
        except EngineError as error:
            cancelled = isinstance(error, RequestCancelled)
            for event in self._items.end("incomplete"):
                await chunks.send(event)
            failed = self._response(
                "cancelled" if cancelled else "failed",
                generation,
                error=None if cancelled else ResponseError(error.code, error.message),
            )
            await chunks.send(self._items.event("incomplete" if cancelled else "failed", response=failed))
            if cancelled:
                return failed
            raise
        status = self._status(finish)
        for event in self._items.end(status):
            await chunks.send(event)
        ended = self._ended(status, generation, finish)
        await chunks.send(self._items.event(status, response=ended))
        return ended

    def input_items(self) -> list[dict[str, object]]:
        """Return the input as items with ids."""
        items: list[dict[str, object]] = (
            [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": self._body.input}]}]
            if isinstance(self._body.input, str)
            else [{"type": "message", **item} for item in self._body.input]
        )
        return [{**item, "id": item.get("id") or f"in_{self.id}_{i}"} for i, item in enumerate(items)]

    def _ended(self, status: Status, generation: Generation, finish: FinishReason | None = None) -> Response:
        self._items.end("completed" if status == "completed" else "incomplete")
        reason: Literal["max_output_tokens", "timeout"] = "timeout" if finish == "timeout" else "max_output_tokens"
        details = IncompleteDetails(reason) if status == "incomplete" else None
        return self._response(status, generation, incomplete_details=details)

    def _status(self, finish: FinishReason | None) -> Status:
        return "incomplete" if finish in ("length", "timeout") else "completed"

    def _logprobs(self, delta: StreamDelta) -> list[ChatLogprob]:
        """Return those of the answer's tokens, where requested."""
        if self._body.wanted_logprobs is None:
            return []
        found = chat_logprobs(delta.logprobs, self._text).content
        return found if delta.text or not delta.thinking else []

    def _response(self, status: Status, generation: Generation | None = None, **fields: object) -> Response:
        body, params = self._body, self._params
        reasoning = body.reasoning
        return Response(
            id=self.id,
            created_at=self._created,
            completed_at=now() if status == "completed" else None,
            status=status,
            model=self._model.name,
            output=list(self._items.items),
            instructions=body.instructions,
            previous_response_id=body.previous_response_id,
            tools=[
                FunctionDefinition(
                    name=tool.name,
                    description=tool.description or None,
                    parameters=dict(tool.schema),
                    strict=tool.strict,
                )
                for tool in self._use.tools
            ],
            tool_choice=body.tool_choice or "auto",
            parallel_tool_calls=body.parallel_tool_calls,
            text={"format": format_of(body)},
            reasoning=ReasoningEcho(
                reasoning.effort if reasoning is not None else None,
                (reasoning.summary or reasoning.generate_summary) if reasoning is not None else None,
            ),
            temperature=params.temperature,
            top_p=params.top_p,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            top_logprobs=body.top_logprobs or 0,
            max_output_tokens=body.max_output_tokens,
            store=self._store,
            metadata=body.metadata or {},
            usage=None if generation is None else _usage(generation),
            **fields,  # type: ignore[arg-type]
        )


def _usage(generation: Generation) -> ResponseUsage:
    tokens = generation.tokens
    return ResponseUsage(
        input_tokens=tokens.prompt,
        input_tokens_details=InputDetails(tokens.cached),
        output_tokens=tokens.output,
        output_tokens_details=OutputDetails(tokens.thinking),
        total_tokens=tokens.prompt + tokens.output,
        why=generation.why,
    )
