"""ApiContext, which every endpoint works with, and the observers of requests."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field

from aiohttp import web
from msgspec import structs
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from console.api.http.auth import client_of, may_load, tenant_of
from console.api.http.json_bounds import MAX_VALUES, JsonBounds
from console.api.http.observability import AccessLog, HttpMetrics, RequestObserver, add_work
from console.api.http.refused_clients import RefusedClients
from console.api.http.request_body import model_of_path, release_bytes
from console.api.http.serial_thread import SerialThread
from console.api.http.tracing import Tracing, open_tracing
from console.api.http.traffic import Traffic, call_of
from console.api.requests.generation import Generation
from console.api.requests.model_list import Loadable, VisibleModels
from console.api.requests.progress import GenerationProgress, ModelProgress, follow
from console.api.requests.prompts import Prompt
from console.api.requests.sampling import ModelFields, SamplingFields
from console.api.requests.served_model import ServedModel, adapter_of
from console.api.requests.stream import Framing, wait_in_stream
from console.api.settings import ApiSettings
from engine.config import SamplingParams, format_number
from engine.engine import Engine, Serving
from engine.errors import InvalidRequest, ModelNotFound
from engine.metrics.alerts import AlertLog


class RequestObservers(Collector):
    """The observers of every request: HTTP metrics and, with `alerts`, refused clients always; access log and traces,
    where set, from `open` to `close`."""

    def __init__(self, alerts: AlertLog | None = None) -> None:
        self._http = HttpMetrics()
        self._refused = None if alerts is None else RefusedClients(alerts)
        self._log: AccessLog | None = None
        self._tracing: Tracing | None = None
        self._lost = 0

    def __iter__(self) -> Iterator[RequestObserver]:
        return (observer for observer in (self._http, self._refused, self._log, self._tracing) if observer is not None)

    async def open(self, settings: ApiSettings) -> None:
        """Start log and traces. Raises CannotLog, TracingUnavailable with neither started."""
        tracing, log = None, None
        if settings.otlp_traces_endpoint is not None:
            tracing = await asyncio.to_thread(open_tracing, settings.otlp_traces_endpoint)
        try:
            if settings.access_log is not None:
                log = AccessLog(
                    settings.access_log, owns_stdout=settings.owns_stdout, max_bytes=settings.access_log_bytes
                )
                await asyncio.to_thread(log.open)
        except BaseException:
            if tracing is not None:
                await asyncio.to_thread(tracing.close)
            raise
        self._tracing, self._log = tracing, log

    async def close(self) -> None:
        """Write and send the rest. Idempotent."""
        log, tracing = self._log, self._tracing
        self._log = self._tracing = None
        if log is not None:
            await asyncio.to_thread(log.close)
            self._lost += log.lost
        if tracing is not None:
            await asyncio.to_thread(tracing.close)

    def collect(self) -> Iterator[Metric]:
        """Return the HTTP metrics, for /metrics."""
        yield from self._http.collect()
        lost = self._lost + (self._log.lost if self._log is not None else 0)
        yield CounterMetricFamily("ericllm_access_log_lost_lines", "Lines that could not be written", value=lost)


MAX_PROMPT_LOGPROBS = 2**17
"""Log-probabilities of the tokens of prompts in all answers to a request, alternatives counted: 8 MB of JSON. A prompt
that fills the context may have one for each token whatever its length."""

MAX_REPEATED = 2**20
"""Characters of prompts in each chunk of a stream whose chunks have all texts so far: a millisecond's work for each."""


@dataclass(frozen=True, slots=True)
class ApiContext:
    """The engine, the settings, and the requests under way, which a stopping server ends.

    observers: of every request.  body_thread: for work on long bodies.
    unnamed_models: names that clients send for the first model.  loadable: models that requests may have loaded.
    """

    engine: Engine
    settings: ApiSettings
    unnamed_models: frozenset[str] = frozenset()
    loadable: Loadable | None = None
    traffic: Traffic = field(default_factory=Traffic)
    observers: RequestObservers = field(default_factory=RequestObservers)
    body_thread: SerialThread = field(default_factory=lambda: SerialThread("bodies"))
    _running: set[Generation] = field(default_factory=set)
    _waiting: set[asyncio.Timeout] = field(default_factory=set)
    _contexts: set[int] = field(default_factory=set)
    _submitting: asyncio.Lock = field(default_factory=asyncio.Lock)

    def json_bounds(self) -> JsonBounds:
        """Return the bounds of a body: besides other values, as many token ids as the longest context, also while its
        model is idle."""
        loaded = [model.status.model for model in self.engine.snapshot().models]
        self._contexts.update(model.max_model_len for model in loaded if model is not None)
        max_ids = max(self._contexts, default=0)
        return JsonBounds(max_depth=self.settings.max_json_depth, max_values=MAX_VALUES + max_ids)

    async def served_model(
        self, request: web.Request, body: ModelFields, framing: Framing | None = None
    ) -> ServedModel:
        """Return the model that a request's body names (the first where it names none), waiting while it is loaded or
        replaced, with the adapter that `model` or `lora` names. One that is not here is loaded where the client may
        have that done. framing: of the stream that the answer will be, which begins meanwhile; None for others.

        Raises what Engine.serving does, ModelNotFound for an adapter that the model lacks, EngineClosed where the
        server stops meanwhile, and InvalidRequest for a format that has no grammar, or an adapter that cannot be
        chosen.
        """
        if isinstance(body, SamplingFields) and body.asks_for_format:
            await asyncio.to_thread(body.format, self.settings.max_schema_bytes)
        name = body.model or ""
        try:
            async with self.waiting():
                try:
                    serving = await self._serving(request, name, framing)
                except ModelNotFound:
                    if name not in self.unnamed_models:
                        raise
                    name = ""
                    serving = await self._serving(request, name, framing)
        except TimeoutError:
            raise self.traffic.cut_error() from None
        return ServedModel(
            name=name or serving.name,
            requested_name=name,
            key=serving.key,
            adapter=adapter_of(serving, body.lora),
            loaded=serving.model,
            tokenizer=serving.tokenizer,
            thread=self.body_thread,
            client=client_of(request),
            thinking=serving.spec.thinking,
            sampling=serving.spec.sampling,
            max_input_len=serving.spec.max_input_len,
            shares_system=self.engine.prefix_sharing == "system",
            waited=serving.waited,
            unloads=serving.unloads,
        )

    async def _serving(self, request: web.Request, name: str, framing: Framing | None) -> Serving:
        loadable, may_wake, client = self._loadable_by(request), may_load(request), client_of(request)
        find = None if loadable is None else loadable.find
        serving = self.engine.serving(name, find, may_wake=may_wake, client=client)
        if framing is None or self.engine.answers_now(name):
            return await serving
        return await wait_in_stream(request, self.settings, framing, ModelProgress(self.engine, name), serving)

    def models_for(self, request: web.Request) -> VisibleModels:
        """Return the models that a request may name."""
        return VisibleModels(self.engine, self._loadable_by(request), only=model_of_path(request))

    def _loadable_by(self, request: web.Request) -> Loadable | None:
        return self.loadable if may_load(request) else None

    @asynccontextmanager
    async def waiting(self, timeout_s: float | None = None) -> AsyncIterator[None]:
        """Wait for something; raises TimeoutError after `timeout_s`, or when the server stops."""
        async with asyncio.timeout(timeout_s) as wait:
            self._waiting.add(wait)
            try:
                yield
            finally:
                self._waiting.discard(wait)

    def check_choices(self, prompts: int, n: int) -> None:
        """Raise InvalidRequest where prompts with `n` answers each are too many; before they are read."""
        wanted = prompts * n
        if wanted > self.settings.max_choices:
            most = self.settings.max_choices
            if n == 1:
                raise InvalidRequest(f"prompt requests {wanted} answers; the limit is {most}", param="prompt")
            raise InvalidRequest(f"n is {n}, which makes {wanted} answers; the limit is {most}", param="n")

    def check_echo(self, prompts: Sequence[Prompt], n: int, *, each_time: bool = False) -> None:
        """Raise InvalidRequest where answers that begin with their prompts would repeat more of them than a body may
        hold; each_time: or every part of a stream more than MAX_REPEATED."""
        repeated = n * sum(len(prompt.text) for prompt in prompts)
        most = min(MAX_REPEATED if each_time else self.settings.max_body_bytes, self.settings.max_body_bytes)
        if repeated > most:
            repeats = f"the answers would repeat {repeated} characters of prompts; the limit is {most}"
            if n == 1:
                raise InvalidRequest(repeats, param="prompt")
            raise InvalidRequest(f"n is {n}: {repeats}", param="n")

    def _check_prompt_logprobs(
        self, prompts: Sequence[Prompt], n: int, params: SamplingParams, model: ServedModel
    ) -> None:
        """Raise InvalidRequest where more are requested than an answer may hold."""
        if params.prompt_logprobs is None:
            return
        wanted = n * sum(len(prompt.ids) for prompt in prompts) * (1 + params.prompt_logprobs)
        most = max(MAX_PROMPT_LOGPROBS, model.loaded.max_model_len)
        if wanted > most:
            raise InvalidRequest(
                f"prompt_logprobs would return {wanted} log-probabilities, with {params.prompt_logprobs} alternatives "
                f"per prompt token; the limit is {most}",
                param="prompt_logprobs",
            )

    def generate(
        self,
        request: web.Request,
        request_id: str,
        body: SamplingFields,
        model: ServedModel,
        prompts: Sequence[Prompt],
        params: SamplingParams,
    ) -> AbstractAsyncContextManager[Generation]:
        """Return a generation that is submitted on entering, and cancelled on leaving unless it has ended. Raises
        InvalidRequest where it exceeds the settings."""
        self.check_choices(len(prompts), body.answers_each)
        self._check_prompt_logprobs(prompts, body.answers_each, params, model)
        params, call = apply_limits(params, self.settings), call_of(request)
        call.tool_headers = next((prompt.tool_headers for prompt in prompts if prompt.tool_headers), {})
        generation = Generation(
            self.engine,
            request_id,
            prompts,
            params,
            body.answers_each,
            model=model,
            client=client_of(request),
            key_name=call.key,
            address=call.address,
            program=call.program,
            tenant=tenant_of(request),
            cache_salt=body.cache_salt,
            priority=-body.priority,
            arrived=call.arrived,
            why=body.why,
            reports_prompt=body.reports_prompt,
        )
        return self._running_generation(request, generation)

    def embed(
        self,
        request: web.Request,
        request_id: str,
        body: ModelFields,
        model: ServedModel,
        prompts: Sequence[Prompt],
        cache_salt: str = "",
    ) -> AbstractAsyncContextManager[Generation]:
        """Return a generation of the prompts' vectors, as `generate` does: each answer has one, and nothing else."""
        call = call_of(request)
        generation = Generation(
            self.engine,
            request_id,
            prompts,
            SamplingParams(max_tokens=0),
            model=model,
            client=client_of(request),
            key_name=call.key,
            address=call.address,
            program=call.program,
            tenant=tenant_of(request),
            cache_salt=cache_salt,
            priority=-body.priority,
            arrived=call.arrived,
            embed=True,
        )
        return self._running_generation(request, generation)

    @asynccontextmanager
    async def _running_generation(self, request: web.Request, generation: Generation) -> AsyncIterator[Generation]:
        """Submit it; end it on leaving, and count its tokens. Generations of several answers are submitted one after
        the other, so that two which fill the queue together do not fail both."""
        self._running.add(generation)
        try:
            async with self._submitting if generation.size > 1 else nullcontext():
                await generation.submit()
            release_bytes(request)
            follow(request, GenerationProgress(generation))
            yield generation
            if call_of(request).began:
                generation.read_to_end()
        finally:
            self._running.discard(generation)
            generation.cancel()
            used, call = generation.tokens, call_of(request)
            call.prompt_tokens += used.prompt
            call.output_tokens += used.output
            add_work(request, generation.work)

    def cancel_all(self) -> None:
        """Cancel every request under way, with the server's stop as the reason."""
        for generation in tuple(self._running):
            generation.cancel(self.traffic.cut_error())
        for wait in tuple(self._waiting):
            wait.reschedule(asyncio.get_running_loop().time())


def apply_limits(params: SamplingParams, settings: ApiSettings) -> SamplingParams:
    """Return the parameters, where an answer without a limit gets that of the settings. Raises InvalidRequest naming
    the field that exceeds them."""
    if len(params.stop) > settings.max_stops:
        raise InvalidRequest(f"stop has {len(params.stop)} strings; the limit is {settings.max_stops}", param="stop")
    if (longest := max(map(len, params.stop), default=0)) > settings.max_stop_length:
        most = settings.max_stop_length
        raise InvalidRequest(f"stop has a string of {longest} characters; the limit is {most}", param="stop")
    limit = settings.max_output_tokens
    if limit is None:
        return params
    if params.max_tokens is not None and params.max_tokens > limit:
        raise InvalidRequest(
            f"max_tokens is {format_number(params.max_tokens)}; the limit is {limit}", param="max_tokens"
        )
    return structs.replace(params, max_tokens=limit) if params.max_tokens is None else params


def new_id(prefix: str) -> str:
    """Return a new id, as "chatcmpl-2f…"."""
    return f"{prefix}-{secrets.token_hex(16)}"
