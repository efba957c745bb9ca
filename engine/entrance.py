"""Entrance: what is asked becomes a request of the model that is to answer it, or is refused."""

from __future__ import annotations

import asyncio
import secrets
from itertools import count
from pathlib import Path

import msgspec

from engine.admission import end_tokens, resolve_params, resolve_timeout, to_embed
from engine.config import PrefixSharing
from engine.desk import Desk
from engine.errors import ModelNotFound, NoModelLoaded
from engine.models.deployment import Deployment
from engine.models.manager import ModelManager
from engine.request import GenerateRequest, Request, compact
from engine.stream import RequestStream


class Entrance:
    """Belongs to the engine's loop. prefix_sharing: as in EngineConfig, for the requests that come from now on."""

    def __init__(self, models: ModelManager, desk: Desk) -> None:
        self.prefix_sharing: PrefixSharing = models.defaults.prefix_sharing
        self._models = models
        self._desk = desk
        self._orders = count(1)

    def admit(self, asked: GenerateRequest) -> tuple[Request, Deployment]:
        """The request, which nothing has yet, and the model that is to have it.

        Raises NoModelLoaded, ModelNotFound, QueueFull, ContextLengthExceeded or InvalidRequest; where its prompt has to
        be made again for that model, the latter two end the request later.
        """
        deployment, prompt_of = self._destination(asked)
        model, tokenizer = deployment.require_ready()
        if asked.adapter and asked.adapter not in deployment.adapters:
            raise ModelNotFound(f"{deployment.spec.name} has no adapter {asked.adapter!r}", param="adapter")
        config = self._models.defaults
        request_id = asked.id or f"gen-{secrets.token_hex(8)}"
        seed = secrets.randbits(63) if asked.params.seed is None else asked.params.seed
        params = msgspec.structs.replace(asked.params, seed=seed)
        if prompt_of is not None:
            params = resolve_params(asked.prompt_ids, params, deployment.spec, model, seed=seed)
        if asked.embed:
            params = to_embed(params, model)
        timeout_s = resolve_timeout(asked.timeout_s, config.timeout_s)
        free = sum(slot.free for slot in deployment.slots())
        self._desk.check_room(request_id, asked.client, deployment.lane, config.max_queue, free)
        request = Request(
            id=request_id,
            source=asked.source,
            priority=asked.priority,
            order=next(self._orders),
            prompt_ids=compact(asked.prompt_ids),
            prompt_of=prompt_of,
            params=params,
            asked=asked.params,
            end_token_ids=end_tokens(params, tokenizer.eos_token_ids),
            timeout_s=timeout_s,
            created=asyncio.get_running_loop().time(),
            stream=RequestStream(request_id, len(asked.prompt_ids), lambda: self._cancel(request_id)),
            lane=deployment.lane,
            model=asked.model,
            adapter=asked.adapter,
            adapter_key=deployment.adapters.key(asked.adapter),
            client=asked.client,
            cache_scope=self._cache_scope(asked),
            shared_tokens=asked.shared_tokens if self.prefix_sharing == "system" and not asked.cache_salt else 0,
            encode=asked.encode,
            choices=asked.choices,
            continues=asked.continues,
            embed=asked.embed,
        )
        return request, deployment

    def _cache_scope(self, asked: GenerateRequest) -> str:
        """Return the scope of its pages in the prefix cache. Never "": nothing but system prompts may lie where all
        scopes look."""
        tenant = "" if self.prefix_sharing == "all" else asked.tenant
        return f"{len(tenant)}:{tenant}{asked.cache_salt}"

    def _cancel(self, request_id: str) -> None:
        self._desk.cancel(request_id)

    def _destination(self, asked: GenerateRequest) -> tuple[Deployment, Path | None]:
        """The model that is to answer, and the folder of the model whose tokenizer made the prompt: None where that one
        has been replaced since, and the prompt has to be made again."""
        made_for = self._models.by_key(asked.key) if asked.key else None
        if made_for is not None and made_for.state in ("ready", "draining"):
            return made_for, made_for.spec.path
        deployment, _ = self._models.named(asked.model)
        if not asked.key:
            return deployment, deployment.spec.path
        if asked.encode is None or deployment.tokenizer is None:
            raise NoModelLoaded("the model was unloaded before the request was queued", state="unloaded")
        return deployment, None
