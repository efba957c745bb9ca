"""Admission: a request becomes one of the model that is to answer it, or is refused with numbers."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from engine.backends.base import LoadedModel
from engine.backends.parameters import refuse_lacking
from engine.config import ModelSpec, PrefixSharing, SamplingParams
from engine.errors import ContextLengthExceeded, Draining, InvalidRequest, ModelNotFound, NoModelLoaded, QueueFull
from engine.requests.request import GenerateRequest, Request, compact_ids
from engine.requests.stream import RequestStream
from engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from engine.models.deployment import Deployment
    from engine.models.manager import ModelManager
    from engine.scheduling.queue import ModelQueue

_log = logging.getLogger("engine")
_MIN_LEFT_S = 0.001
"""Of the time of a request whose model took all of it."""


class RequestAdmission:
    """Belongs to the engine's loop. prefix_sharing: as in EngineConfig, for the requests that come from now on.
    draining_since: unix time since which new requests are refused, None while they are taken."""

    def __init__(self, models: ModelManager) -> None:
        self.prefix_sharing: PrefixSharing = models.defaults.prefix_sharing
        self.draining_since: float | None = None
        self._models = models
        self._orders = count(1)

    def drain(self) -> None:
        """Refuse new requests from now on, and log it; those that were admitted go on. Does nothing while draining."""
        if self.draining_since is None:
            self.draining_since = time.time()
            unfinished = len(self._models.tracker.live)
            _log.info("draining: refusing new requests, %d still running", unfinished)
            self._models.meter.mark(self.draining_since, "drain", kind="drain")

    def resume(self) -> None:
        """Take new requests again, and log it. Does nothing where they are taken."""
        if self.draining_since is not None:
            now = time.time()
            _log.info("accepting requests again after %.0f s of draining", now - self.draining_since)
            self.draining_since = None
            self._models.meter.mark(now, "resume", kind="drain")

    def refuse_while_draining(self) -> None:
        """Raise Draining while new requests are refused."""
        if self.draining_since is not None:
            raise Draining("draining for maintenance: new requests are refused")

    def admit(self, wanted: GenerateRequest) -> tuple[Request, Deployment]:
        """Return the request, which is in no queue yet, and the model that is to have it.

        Raises Draining, NoModelLoaded, ModelNotFound, QueueFull, ContextLengthExceeded or InvalidRequest; where its
        prompt has to be made again for that model, the latter two end the request later.
        """
        self.refuse_while_draining()
        deployment, prompt_of = self._destination(wanted)
        model, tokenizer = deployment.require_admitting() if wanted.key else deployment.require_ready()
        if wanted.adapter and wanted.adapter not in deployment.adapters:
            raise ModelNotFound(f"{deployment.spec.name} has no adapter {wanted.adapter!r}", param="adapter")
        request_id = wanted.id or f"gen-{secrets.token_hex(8)}"
        seed = secrets.randbits(63) if wanted.params.seed is None else wanted.params.seed
        params = msgspec.structs.replace(wanted.params, seed=seed)
        if prompt_of is not None:
            params = resolve_params(wanted.prompt_ids, params, deployment.spec, model, seed=seed)
        if wanted.embed:
            params = embedding_params(params, model)
        timeout_s = resolve_timeout(wanted.timeout_s, self._models.defaults.timeout_s)
        if timeout_s and (waited_s := sum(wanted.waited.values())):
            timeout_s = max(_MIN_LEFT_S, timeout_s - waited_s)
        self._check_room(request_id, wanted.client, deployment)
        request = Request(
            id=request_id,
            source=wanted.source,
            priority=wanted.priority,
            order=next(self._orders),
            prompt_ids=compact_ids(wanted.prompt_ids),
            prompt_of=prompt_of,
            params=params,
            requested_params=wanted.params,
            end_token_ids=end_tokens(params, tokenizer.eos_token_ids),
            timeout_s=timeout_s,
            created=asyncio.get_running_loop().time(),
            stream=RequestStream(request_id, len(wanted.prompt_ids), partial(self._models.tracker.cancel, request_id)),
            model_queue=deployment.model_queue,
            model=wanted.model,
            adapter=wanted.adapter,
            adapter_key=deployment.adapters.key(wanted.adapter),
            client=wanted.client,
            key_name=wanted.key_name,
            address=wanted.address,
            program=wanted.program,
            cache_scope=self._cache_scope(wanted),
            shared_tokens=wanted.shared_tokens if self.prefix_sharing == "system" and not wanted.cache_salt else 0,
            encode=wanted.encode,
            choices=wanted.choices,
            continues=wanted.continues,
            embed=wanted.embed,
            reports_prompt=wanted.reports_prompt,
        )
        request.timeline.ledger.seconds.update(wanted.waited)
        if wanted.arrived is not None:
            request.timeline.ledger.prepared(wanted.arrived, request.created)
        return request, deployment

    def _destination(self, wanted: GenerateRequest) -> tuple[Deployment, Path | None]:
        """The model that is to answer, and the folder of the model whose tokenizer made the prompt: None where that one
        has been replaced since, and the prompt has to be made again."""
        made_for = self._models.by_key(wanted.key) if wanted.key else None
        if made_for is not None and (made_for.state in ("ready", "draining") or made_for.asleep):
            return made_for, made_for.spec.path
        deployment, _ = self._models.find_deployment(wanted.model)
        if not wanted.key:
            return deployment, deployment.spec.path
        if wanted.encode is None or deployment.tokenizer is None:
            raise NoModelLoaded("the model was unloaded before the request was queued", state="unloaded")
        return deployment, None

    def _check_room(self, request_id: str, client: str, deployment: Deployment) -> None:
        """Raise InvalidRequest where there is a request of this id, QueueFull where the queue has no room for another.

        Free places on workers count as room. Beyond the limit a client with less than its share of the queue is still
        taken: no one can fill it for the others.
        """
        if request_id in self._models.tracker.live:
            raise InvalidRequest(f"request id {request_id} is already in use", param="id")
        limit, queue = self._models.defaults.max_queue, deployment.model_queue
        free = sum(slot.free for slot in deployment.slots())
        if queue.queued >= limit + free and not queue.has_share_left(client, limit):
            raise self._queue_full(queue, limit)

    def _queue_full(self, queue: ModelQueue, limit: int) -> QueueFull:
        """Return the refusal: a client is to come back when it would have got a worker, or, while that is unknown, when
        the queue is likely to have room, from how fast requests end lately."""
        now = asyncio.get_running_loop().time()
        wait_s, rate = queue.forecast.next_wait_s(queue, now), self._models.meter.finished_per_s(now)
        sentence = f"the queue is full: {queue.queued} of max {limit} requests"
        return QueueFull.with_wait(sentence, wait_s, retry_s=1 / rate if rate else 1, queued=queue.queued, limit=limit)

    def _cache_scope(self, wanted: GenerateRequest) -> str:
        """Return the scope of its pages in the prefix cache. Never "": nothing but system prompts may lie where all
        scopes look."""
        tenant = "" if self.prefix_sharing == "all" else wanted.tenant
        return f"{len(tenant)}:{tenant}{wanted.cache_salt}"


def fit_request(request: Request, spec: ModelSpec, model: LoadedModel, tokenizer: Tokenizer) -> None:
    """Give a request that moves to a model the limits that the model has for its prompt.

    Raises InvalidRequest, and ContextLengthExceeded where there is no room for another token.
    """
    params = resolve_params(request.prompt_ids, request.requested_params, spec, model, seed=request.params.seed or 0)
    if request.embed:
        params = embedding_params(params, model)
    if request.generated and len(request.generated) >= (params.max_tokens or 0):
        raise ContextLengthExceeded("no room left for more tokens")
    request.params = params
    request.end_token_ids = end_tokens(params, tokenizer.eos_token_ids)


def resolve_params(
    prompt_ids: Sequence[int], params: SamplingParams, spec: ModelSpec, model: LoadedModel, *, seed: int
) -> SamplingParams:
    """`params` with max_tokens and seed set: max_tokens at most the room after the prompt, `seed` where none is given.

    Raises ContextLengthExceeded where the prompt leaves no room for one token or is longer than the spec allows, and
    InvalidRequest for an empty prompt, a token that the model does not have, or a parameter that its backend lacks.
    """
    params.validate()
    refuse_lacking(params, model.backend)
    _check_tokens(prompt_ids, params, model.vocab_size)
    room = _max_new_tokens(prompt_ids, params, spec, model)
    max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    return msgspec.structs.replace(
        params,
        max_tokens=max_tokens,
        min_tokens=min(params.min_tokens, max_tokens),
        seed=seed if params.seed is None else params.seed,
    )


def resolve_timeout(timeout_s: float | None, default_s: float) -> float:
    """The request's own limit or the engine's, in seconds; 0 is none. Raises InvalidRequest."""
    if timeout_s is None:
        return default_s
    if not math.isfinite(timeout_s) or timeout_s < 0:
        raise InvalidRequest(
            f"timeout_s is {timeout_s:g}; it must be 0 (no limit) or more", param="timeout_s", value=timeout_s
        )
    return timeout_s


def embedding_params(params: SamplingParams, model: LoadedModel) -> SamplingParams:
    """`params` of a request for a prompt's vector; raises InvalidRequest where the model's backend makes none."""
    if not model.hidden_size:
        raise InvalidRequest(
            f"embeddings are not supported by the {model.backend} backend, which returns no hidden states",
            backend=model.backend,
        )
    return msgspec.structs.replace(params, max_tokens=0, min_tokens=0)


def end_tokens(params: SamplingParams, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
    """Every id that ends the answer: the model's own unless ignore_eos, and stop_token_ids.

    An answer with a grammar ends where that ends, with one of the model's own, and JSON nowhere else.
    """
    if params.grammar is not None and params.grammar.is_json:
        return tuple(eos_token_ids)
    own = () if params.ignore_eos and params.grammar is None else eos_token_ids
    return tuple(dict.fromkeys((*own, *params.stop_token_ids)))


def _check_tokens(prompt_ids: Sequence[int], params: SamplingParams, vocab_size: int) -> None:
    if not prompt_ids:
        raise InvalidRequest("the prompt is empty; it needs at least one token", param="prompt")
    for param, ids in (
        ("prompt", prompt_ids),
        ("logit_bias", params.logit_bias),
        ("stop_token_ids", params.stop_token_ids),
        ("dry_breaker_ids", params.dry_breaker_ids),
        ("negative_prompt_ids", params.negative_prompt_ids),
    ):
        worst = next((bound for bound in (min(ids), max(ids)) if not 0 <= bound < vocab_size), None) if ids else None
        if worst is not None:
            raise InvalidRequest(
                f"{param} has token {worst}; the model has tokens 0 to {vocab_size - 1}", param=param, value=worst
            )


def _max_new_tokens(prompt_ids: Sequence[int], params: SamplingParams, spec: ModelSpec, model: LoadedModel) -> int:
    """Tokens that can be generated after the prompt, and after the negative one; at least 1."""
    tokens, param = len(prompt_ids), "prompt"
    if len(params.negative_prompt_ids) > tokens:
        tokens, param = len(params.negative_prompt_ids), "negative_prompt"
    limit, why = min(
        (model.max_model_len - 1, f"with the answer's first token the max is {model.max_model_len}"),
        (spec.max_input_len or model.max_model_len, f"prompts may have {spec.max_input_len}"),
        (model.kv_tokens - 1, f"the KV pages of a worker hold {model.kv_tokens}"),
    )
    if tokens > limit:
        requested = {} if params.max_tokens is None else {"max_tokens": params.max_tokens}
        raise ContextLengthExceeded(
            f"the {param.replace('_', ' ')} has {tokens} tokens; {why}",
            param=param,
            prompt_tokens=tokens,
            limit=limit,
            max_model_len=model.max_model_len,
            **requested,
        )
    return min(model.max_model_len, model.kv_tokens) - tokens
