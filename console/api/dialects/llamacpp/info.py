"""GET /props and /slots, POST /tokenize, /apply-template, /embedding and /embeddings; and llama-swap's GET /running and
/unload, and POST /api/models/unload."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import msgspec
from aiohttp import web

from console.api.context import ApiContext
from console.api.dialects.llamacpp.body import EmbeddingBody, TokenizeBody, default_settings
from console.api.dialects.llamacpp.completion import settings_of
from console.api.http.auth import may_load
from console.api.http.errors import Forbidden, json_response
from console.api.http.request_body import offload, run_offloaded
from console.api.requests.body import read
from console.api.requests.chat_body import ChatBody
from console.api.requests.conversation import read_messages
from console.api.requests.embedding import EncodedVector, check_inputs, encode_vectors, errors_name_input, vectors_of
from console.api.requests.model_list import ANSWERING, model_not_found, names_of
from console.api.requests.prompts import count_prompts, read_prompts
from console.api.requests.schemas import describes
from console.api.requests.served_model import MANY_TOKENS, ServedModel, not_ready
from console.api.version import product_version
from engine.errors import EngineError, InvalidRequest
from engine.snapshot import ModelReading, ModelState, Snapshot
from engine.text.tokenizer import Tokenizer
from engine.text.tokenizer_config import TokenizerFolder

_MODEL = "name of the model, by default the first; it is not loaded for this"


class NoSlot(EngineError):
    """Every place on the workers is taken."""

    code = "no_slot"
    http_status = 503


class Modalities(msgspec.Struct, frozen=True):
    """Kinds of input besides text."""

    vision: bool = False
    audio: bool = False


class DefaultSettings(msgspec.Struct, frozen=True):
    """Settings of a request that sends none. n_ctx: max tokens of its prompt and answer."""

    n_ctx: int
    params: dict[str, Any]


class Props(msgspec.Struct, frozen=True, kw_only=True):
    """A model and how it is served. total_slots: requests computed at once.  model_path: its name.

    chat_template: in Jinja, "" without any.  is_sleeping: the next request loads it.
    """

    default_generation_settings: DefaultSettings
    total_slots: int
    model_alias: str
    model_path: str
    modalities: Modalities = Modalities()
    chat_template: str
    bos_token: str
    eos_token: str
    build_info: str
    is_sleeping: bool


class NextToken(msgspec.Struct, frozen=True):
    """Progress of an answer. n_remain: tokens until its limit.  n_decoded: so far."""

    has_next_token: bool
    n_remain: int
    n_decoded: int


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """A place for one request on a worker. next_token: of the request that has it."""

    id: int
    n_ctx: int
    is_processing: bool
    next_token: NextToken | msgspec.UnsetType = msgspec.UNSET


class Piece(msgspec.Struct, frozen=True):
    """A token and its text: its bytes where they are no text on their own."""

    id: int
    piece: str | list[int]


class Tokens(msgspec.Struct, frozen=True):
    """Tokens of a text: ids, or pieces where requested."""

    tokens: list[int | Piece]


class Rendered(msgspec.Struct, frozen=True):
    """The prompt of a conversation."""

    prompt: str


class Embedded(msgspec.Struct, frozen=True):
    """The vector of one text, in an array of its own."""

    index: int
    embedding: list[EncodedVector]


RunningState = Literal["starting", "ready", "stopping"]

_RUNNING: Mapping[ModelState, RunningState] = {
    "loading": "starting",
    "ready": "ready",
    "draining": "stopping",
    "unloading": "stopping",
}


class RunningModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model in memory. ttl: seconds without requests after which it is unloaded, 0 for never."""

    model: str
    state: RunningState
    ttl: float


class RunningModels(msgspec.Struct, frozen=True):
    """The models in memory, and those that are being loaded."""

    running: list[RunningModel]


class InfoEndpoints:
    """The endpoints of this module."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    def routes(self) -> list[web.RouteDef]:
        """Return their places and handlers."""
        return [
            web.get("/props", self._props),
            web.get("/slots", self._slots),
            web.get("/running", self._running),
            web.get("/unload", self._unload),
            web.post("/api/models/unload", self._unload),
            web.post("/api/models/unload/{model}", self._unload),
            web.post("/tokenize", self._tokenize),
            web.post("/apply-template", self._apply_template),
            web.post("/embedding", self._embed),
            web.post("/embeddings", self._embed),
        ]

    @describes("Model and default settings (llama.cpp)", answer=Props, query={"model": _MODEL})
    async def _props(self, request: web.Request) -> web.Response:
        model = await self._model(request)
        status = self._context.engine.status if model is None else model.status
        if status.spec is None or (model is None and status.state not in ANSWERING):
            raise not_ready(status)
        folder = await asyncio.to_thread(TokenizerFolder.read, status.spec.path)
        templates, tokens = folder.chat_templates(), folder.special_tokens()
        context = status.spec.max_model_len or 0 if status.model is None else status.model.max_model_len
        return json_response(
            Props(
                default_generation_settings=DefaultSettings(context, settings_of(*default_settings())),
                total_slots=self._total_slots(model),
                model_alias=status.spec.name,
                model_path=status.spec.name,
                chat_template=templates.get("default", next(iter(templates.values()), "")),
                bos_token=tokens.get("bos_token", ""),
                eos_token=tokens.get("eos_token", ""),
                build_info=f"ericllm {product_version()}",
                is_sleeping=status.state != "ready",
            )
        )

    @describes(
        "Running requests of a model, by place on its workers (llama.cpp)",
        answer=list[Slot],
        query={"model": _MODEL, "fail_on_no_slot": "1 answers 503 where every place is taken"},
    )
    async def _slots(self, request: web.Request) -> web.Response:
        model, snapshot = await self._model(request), self._context.engine.snapshot()
        loaded = (snapshot.status if model is None else model.status).model
        context, places = 0 if loaded is None else loaded.max_model_len, self._total_slots(model)
        active = [row for row in snapshot.requests if row.state in ("prefill", "decode")]
        if model is None:
            others = _other_models(snapshot)
            running = [row for row in active if row.model not in others][:places]
        else:
            own = names_of(model)
            running = [row for row in active if row.model in own][:places]
        if len(running) == places and request.query.get("fail_on_no_slot", "0") not in ("", "0"):
            raise NoSlot("no slot available")
        busy = [
            Slot(
                id=place,
                n_ctx=context,
                is_processing=True,
                next_token=NextToken(True, max(0, row.max_tokens - row.output_tokens), row.output_tokens),
            )
            for place, row in enumerate(running)
        ]
        free = [Slot(id=place, n_ctx=context, is_processing=False) for place in range(len(running), places)]
        return json_response([*busy, *free])

    @describes("List models in memory (llama-swap)", answer=RunningModels)
    async def _running(self, request: web.Request) -> web.Response:
        sees_all = may_load(request)
        return json_response(
            RunningModels(
                [
                    RunningModel(model=model.name, state=state, ttl=model.idle_unload_s)
                    for model in self._context.engine.models()
                    if (state := _RUNNING.get(model.status.state)) is not None
                    and (sees_all or state == "ready" or not model.loaded_by_request)
                ]
            )
        )

    @describes("Unload models that requests have loaded, after their running answers (llama-swap)", answer="text/plain")
    async def _unload(self, request: web.Request) -> web.Response:
        if not may_load(request) or request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            raise Forbidden("Models are unloaded for keys with the scope load, and for programs of this machine")
        engine, name = self._context.engine, request.match_info.get("model", "")
        for model in [_present(name, engine.models())] if name else engine.models():
            if not engine.sleep(model.key) and name:
                raise InvalidRequest(
                    f"{name} is a model that an operator loaded; POST /admin/unload unloads it", param="model"
                )
        return web.Response(text="OK")

    @describes("Tokenize text (llama.cpp)", body=TokenizeBody, answer=Tokens, example={"content": "Hello"})
    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await read(request, TokenizeBody)
        model = await self._context.served_model(request, body)
        ids = await model.count(body.content, add_special_tokens=body.add_special)
        own = await model.count(body.content, add_special_tokens=False) if body.add_special else ids
        if not body.parse_special and not model.tokenizer.special_ids.isdisjoint(own):
            raise InvalidRequest(
                "parse_special cannot be false here: content has control tokens, which are always tokens of their own",
                param="parse_special",
            )
        tokens = partial(_tokens, ids, model, with_pieces=body.with_pieces)
        return await offload(request, tokens) if len(ids) > MANY_TOKENS else tokens()

    @describes(
        "Render a conversation to a prompt (llama.cpp)",
        body=ChatBody,
        answer=Rendered,
        example={"messages": [{"role": "user", "content": "Hello"}]},
    )
    async def _apply_template(self, request: web.Request) -> web.Response:
        body = await read(request, ChatBody)
        model = await self._context.served_model(request, body)
        model.check_length(len(body.messages), "messages")
        turns = await run_offloaded(request, partial(read_messages, body.messages))
        prompt = await body.prompt(model, turns, await body.tool_use(model))
        return json_response(Rendered(prompt.text))

    @describes(
        "Compute embeddings of texts (llama.cpp)",
        body=EmbeddingBody,
        answer=list[Embedded],
        example={"content": "Hello"},
        operation="embeddings",
    )
    async def _embed(self, request: web.Request) -> web.Response:
        body = await read(request, EmbeddingBody)
        model = await self._context.served_model(request, body)
        if body.content is None:
            raise InvalidRequest("content is missing", param="content")
        name = body.sent_name("content")
        check_inputs(count_prompts(body.content, name), None, model, self._context.settings, params=(name,))
        with errors_name_input(name):
            prompts = await read_prompts(body.content, model, name, empty_texts=False)
            vectors, _ = await vectors_of(self._context, request, body, model, prompts)
        written = await encode_vectors(vectors, "float")
        return json_response([Embedded(index, [vector]) for index, vector in enumerate(written)])

    async def _model(self, request: web.Request) -> ModelReading | None:
        """Return the model that the address names; None for the first. Raises ModelNotFound."""
        name = request.query.get("model", "")
        if not name or name in self._context.unnamed_models:
            return None
        return _present(name, await self._context.models_for(request).readings())

    def _total_slots(self, model: ModelReading | None) -> int:
        counts = self._context.engine.snapshot() if model is None else model
        return max(1, counts.target_workers * counts.max_prompts)


def _present(name: str, models: Sequence[ModelReading]) -> ModelReading:
    """Return the model of a name, an alias, or an adapter. Raises ModelNotFound."""
    for model in models:
        if name in names_of(model):
            return model
    raise model_not_found(name, [model.name for model in models])


def _other_models(snapshot: Snapshot) -> set[str]:
    """Return the names of all models and adapters besides the first model and its own."""
    first = snapshot.status.spec
    others = [each for each in snapshot.models if first is None or each.name != first.name]
    return {name for each in others for name in (each.name, *(adapter.name for adapter in each.adapters))}


def _tokens(ids: list[int], model: ServedModel, *, with_pieces: bool) -> web.Response:
    if not with_pieces:
        return json_response(Tokens([*ids]))
    return json_response(Tokens([Piece(token_id, _piece(model.tokenizer, token_id)) for token_id in ids]))


def _piece(tokenizer: Tokenizer, token_id: int) -> str | list[int]:
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)
