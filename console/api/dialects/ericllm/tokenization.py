"""/tokenize, /detokenize and /version as vLLM has them, and /v1/chat/template, a conversation as a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Literal

import msgspec
from aiohttp import web

from console.api.context import ApiContext
from console.api.http.errors import json_response
from console.api.http.request_body import document_of, offload, run_offloaded
from console.api.requests.body import read
from console.api.requests.chat_body import ChatBody
from console.api.requests.chat_prompt import ConversationFields
from console.api.requests.conversation import read_messages
from console.api.requests.parameters import Refusal
from console.api.requests.sampling import ModelFields
from console.api.requests.schemas import TOKEN_IDS, EndpointSpec, attach_specs, describes
from console.api.requests.served_model import MANY_TOKENS, ServedModel
from console.api.version import product_version

_HELLO = [{"role": "user", "content": "Hello"}]

_CHAT_REFUSED: Mapping[str, Refusal] = {
    name: ChatBody.refused[name] for name in ("add_special_tokens", "chat_template", "documents")
}
_INERT = frozenset({"user"})  # labels of the client's own


class TokenizeBody(ModelFields):
    """A text to tokenize. add_special_tokens: with those that the model expects around it.

    return_token_strs: also return each token as in the vocabulary.
    """

    inert = _INERT

    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatBody(ModelFields, ConversationFields):
    """A conversation to render with the model's chat template and to tokenize.

    return_token_strs: also return each token as in the vocabulary.
    """

    refused = _CHAT_REFUSED
    inert = _INERT

    return_token_strs: bool = False


class DetokenizeBody(ModelFields):
    """Token ids to decode."""

    tokens: Annotated[list[int], TOKEN_IDS]


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of a text. token_strs: null where they were not requested."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(msgspec.Struct, frozen=True):
    """The text of tokens, control tokens included. content: the same, for clients of llama.cpp, who send this body."""

    prompt: str
    content: str


class Rendered(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt of a conversation. count: of its tokens."""

    object: Literal["chat.template"] = "chat.template"
    model: str
    prompt: str
    count: int
    max_model_len: int


class Version(msgspec.Struct, frozen=True):
    """The server's version."""

    version: str


class Utilities:
    """POST /tokenize, /detokenize, /v1/chat/template and GET /version."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    def routes(self) -> list[web.RouteDef]:
        """Return their places and handlers."""
        return [
            web.post("/tokenize", self._tokenize),
            web.post("/detokenize", self._detokenize),
            web.post("/v1/chat/template", self._render),
            web.get("/version", self._version),
        ]

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await _read_tokenize(request)
        model = await self._context.served_model(request, body)
        if isinstance(body, TokenizeBody):
            ids = await model.count(body.prompt, add_special_tokens=body.add_special_tokens)
        else:
            model.check_length(len(body.messages), "messages")
            use = await body.tool_use(model)
            turns = await run_offloaded(request, partial(read_messages, body.messages))
            ids = list((await body.prompt(model, turns, use)).ids)
        tokens = partial(_tokens, ids, model, with_strings=body.return_token_strs)
        return await offload(request, tokens) if len(ids) > MANY_TOKENS else tokens()

    attach_specs(
        _tokenize,
        EndpointSpec(summary="Tokenize text", body=TokenizeBody, answer=Tokens, example={"prompt": "Hello"}),
        EndpointSpec(summary="Tokenize messages", body=TokenizeChatBody, answer=Tokens, example={"messages": _HELLO}),
    )

    @describes("Convert tokens to text", body=DetokenizeBody, answer=Text, example={"tokens": [72, 105]})
    async def _detokenize(self, request: web.Request) -> web.Response:
        body = await read(request, DetokenizeBody)
        model = await self._context.served_model(request, body)
        model.check_length(len(body.tokens), "tokens")
        model.check_token_ids(body.tokens, "tokens")
        text = await run_offloaded(request, partial(_decode, model, body.tokens))
        return json_response(Text(prompt=text, content=text))

    @describes("Render a conversation to a prompt", body=ChatBody, answer=Rendered, example={"messages": _HELLO})
    async def _render(self, request: web.Request) -> web.Response:
        body = await read(request, ChatBody)
        model = await self._context.served_model(request, body)
        model.check_length(len(body.messages), "messages")
        turns = await run_offloaded(request, partial(read_messages, body.messages))
        prompt = await body.prompt(model, turns, await body.tool_use(model))
        limit = model.loaded.max_model_len
        rendered = Rendered(model=model.name, prompt=prompt.text, count=len(prompt.ids), max_model_len=limit)
        return json_response(rendered)

    @describes("Version of the server", answer=Version)
    async def _version(self, request: web.Request) -> web.Response:
        return json_response(Version(product_version()))


async def _read_tokenize(request: web.Request) -> TokenizeBody | TokenizeChatBody:
    """Read a body; one with messages is a conversation. Raises InvalidRequest."""
    is_conversation = (await document_of(request)).get("messages") is not None
    return await read(request, TokenizeChatBody if is_conversation else TokenizeBody)


def _tokens(ids: list[int], model: ServedModel, *, with_strings: bool) -> web.Response:
    strings = [model.tokenizer.id_to_token(token_id) for token_id in ids] if with_strings else None
    limit = model.loaded.max_model_len
    return json_response(Tokens(count=len(ids), max_model_len=limit, tokens=ids, token_strs=strings))


def _decode(model: ServedModel, ids: list[int]) -> str:
    return model.tokenizer.decode(ids, skip_special_tokens=False)
