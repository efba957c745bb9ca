"""Entrance: what is asked becomes a request of the model that is to answer it, or is refused."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from itertools import count

from engine.admission import end_tokens, resolve_params, resolve_timeout, to_embed
from engine.desk import Desk
from engine.errors import ModelNotFound, NoModelLoaded
from engine.models.deployment import Deployment
from engine.models.manager import ModelManager
from engine.request import GenerateRequest, Request, compact
from engine.stream import RequestStream


class Entrance:
    """Belongs to the engine's loop."""

    def __init__(self, models: ModelManager, desk: Desk) -> None:
        self._models = models
        self._desk = desk
        self._orders = count(1)

    def admit(self, asked: GenerateRequest) -> tuple[Request, Deployment]:
        """The request, which nothing has yet, and the model that is to have it.

        Raises NoModelLoaded, ModelNotFound, QueueFull, ContextLengthExceeded or InvalidRequest.
        """
        deployment, prompt_ids = self._destination(asked)
        model, tokenizer = deployment.require_ready()
        if asked.adapter and asked.adapter not in deployment.adapters:
            raise ModelNotFound(f"{deployment.spec.name} has no adapter {asked.adapter!r}", param="adapter")
        config = self._models.defaults
        request_id = asked.id or f"gen-{secrets.token_hex(8)}"
        params = resolve_params(prompt_ids, asked.params, deployment.spec, model, seed=secrets.randbits(63))
        if asked.embed:
            params = to_embed(params, model)
        timeout_s = resolve_timeout(asked.timeout_s, config.timeout_s)
        free = sum(slot.free for slot in deployment.slots())
        self._desk.check_room(request_id, deployment.lane, config.max_queue, free)
        request = Request(
            id=request_id,
            source=asked.source,
            priority=asked.priority,
            order=next(self._orders),
            prompt_ids=compact(prompt_ids),
            params=params,
            asked=asked.params,
            end_token_ids=end_tokens(params, tokenizer.eos_token_ids),
            timeout_s=timeout_s,
            created=asyncio.get_running_loop().time(),
            stream=RequestStream(request_id, len(prompt_ids), lambda: self._cancel(request_id)),
            lane=deployment.lane,
            model=asked.model,
            adapter=asked.adapter,
            adapter_key=deployment.adapters.key(asked.adapter),
            client=asked.client,
            encode=asked.encode,
            choices=asked.choices,
            continues=asked.continues,
            embed=asked.embed,
        )
        return request, deployment

    def _cancel(self, request_id: str) -> None:
        self._desk.cancel(request_id)

    def _destination(self, asked: GenerateRequest) -> tuple[Deployment, Sequence[int]]:
        """The model that is to answer, and the prompt as its tokenizer has it: the model may have been replaced since
        the prompt was tokenized."""
        made_for = self._models.by_key(asked.key) if asked.key else None
        if made_for is not None and made_for.state in ("ready", "draining"):
            return made_for, asked.prompt_ids
        deployment, _ = self._models.named(asked.model)
        if not asked.key:
            return deployment, asked.prompt_ids
        if asked.encode is None or deployment.tokenizer is None:
            raise NoModelLoaded("the model was unloaded before the request was queued", state="unloaded")
        return deployment, asked.encode(deployment.tokenizer)
