"""A backend over a library's generator, which decides itself what a step computes: requests in, token events out."""

from __future__ import annotations

import logging
import math
import os
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.backends.base import (
    BackendRequest,
    BackendStats,
    FinishReason,
    LoadedModel,
    LoadProgress,
    PrefixChanges,
    TimeLost,
    TokenEvent,
    TokenMask,
)
from engine.backends.common.exllama_memory import PAGE_TOKENS
from engine.backends.common.page_keys import PageHash
from engine.backends.exllama.package import Report
from engine.backends.exllama.requests import Counters, Job, LiveRequest, RequestQueue
from engine.backends.torch_device import ends_worker, failure_reason, is_device_lost, is_out_of_memory
from engine.config import AdapterSpec, ModelSpec, SamplingParams
from engine.errors import ContextLengthExceeded, InvalidRequest, LoadCancelled, ModelLoadFailed, WorkerFailed

# What fits: lengths, pages and places of a request, checked before the library's assertions could be. Pure.

LEASE_TOKENS = 512
"""The library takes pages for a whole answer before it starts. An answer that may be long gets them for this many
tokens at a time instead: it goes on from the prefix cache, and those that wait have their turn in between."""


def sequence_lengths(request: BackendRequest) -> tuple[int, ...]:
    """Tokens of the sequences that the request runs as: with classifier-free guidance there are two."""
    prompts = [request.prompt_ids]
    if request.params.cfg_scale != 1.0:
        prompts.append(list(request.params.negative_prompt_ids))
    return tuple(len(prompt) + len(request.generated) for prompt in prompts)


@dataclass(frozen=True, slots=True)
class Limits:
    """Capacity of one worker.

    pages: KV pages of all requests together.      max_model_len: tokens of one sequence.
    max_input_len: tokens of one prompt.           draft_tokens: tokens guessed ahead per step.
    places: sequences of one step.                 vocab_size: token ids are below it.
    min_prompt: the shortest prompt that can be worked on.
    spare_tokens: for which the library reserves room after an answer.
    """

    pages: int
    max_model_len: int
    max_input_len: int | None
    draft_tokens: int
    places: int
    vocab_size: int
    min_prompt: int = 1
    spare_tokens: int = 0

    def room(self, lengths: Sequence[int]) -> int:
        """How many tokens can follow sequences of these lengths, all growing alike; 0 or less where none can.

        Guesses take room as tokens do: a step computes them before it knows whether they hold.
        """
        free = self.max_model_len - max(lengths) - self.draft_tokens
        return bisect_right(range(1, free + 1), 0, key=lambda new: self.pages_of(lengths, new) > self.pages)

    def wanted(self, request: BackendRequest) -> int:
        """How many tokens the request can still get: as many as it wants and there is room for, if any."""
        room = self.room(sequence_lengths(request))
        limit = request.params.max_tokens
        return room if limit is None else min(room, limit - len(request.generated))

    def pages_of(self, lengths: Sequence[int], new_tokens: int) -> int:
        """Pages that sequences of these lengths take for `new_tokens` more each."""
        beyond = new_tokens + self.draft_tokens + self.spare_tokens
        return sum(-(-(length + beyond) // PAGE_TOKENS) for length in lengths)

    def refuse(self, request: BackendRequest) -> None:
        """Raise ContextLengthExceeded with the numbers, or InvalidRequest naming the field, where it can never run."""
        self._refuse_tokens(request)
        self._refuse_length(request)
        self._refuse_guidance(request)

    def _refuse_tokens(self, request: BackendRequest) -> None:
        params = request.params
        for param, token_ids in (
            ("prompt", request.prompt_ids),
            ("generated", request.generated),
            ("logit_bias", params.logit_bias),
            ("negative_prompt", params.negative_prompt_ids),
        ):
            wrong = next((token_id for token_id in token_ids if not 0 <= token_id < self.vocab_size), None)
            if wrong is not None:
                raise InvalidRequest(
                    f"{param} names token {wrong}; the model has {self.vocab_size}", param=param, value=wrong
                )
        if not request.prompt_ids:
            raise InvalidRequest("the prompt is empty; it needs at least one token", param="prompt")
        if len(request.prompt_ids) < self.min_prompt:
            raise InvalidRequest(
                f"the prompt has {len(request.prompt_ids)} tokens; n-gram speculation needs at least {self.min_prompt}",
                param="prompt",
                value=len(request.prompt_ids),
            )

    def _refuse_length(self, request: BackendRequest) -> None:
        cached = self.pages * PAGE_TOKENS
        guesses = f" with {self.draft_tokens} draft tokens" if self.draft_tokens else ""
        limit, reason = min(
            (self.max_input_len or self.max_model_len, f"max_input_len is {self.max_input_len}"),
            (
                self.max_model_len - 1 - self.draft_tokens,
                f"the context is {self.max_model_len} tokens{guesses}, and the answer needs at least one",
            ),
            (
                cached - 1 - self.draft_tokens - self.spare_tokens,
                f"the KV pages hold {cached} tokens{guesses}, and the answer needs at least one",
            ),
        )
        prompt = len(request.prompt_ids)
        if prompt > limit:
            raise ContextLengthExceeded(
                f"the prompt has {prompt} tokens, more than the limit of {limit}: {reason}",
                prompt_tokens=prompt,
                limit=limit,
                max_model_len=self.max_model_len,
                pool_tokens=cached,
            )

    def _refuse_guidance(self, request: BackendRequest) -> None:
        params = request.params
        if params.cfg_scale == 1.0:
            return
        if not params.negative_prompt_ids:
            raise InvalidRequest(
                f"cfg_scale is {params.cfg_scale:g} without a negative prompt to steer away from",
                param="negative_prompt",
            )
        if self.draft_tokens:
            raise InvalidRequest(
                f"cfg_scale is {params.cfg_scale:g}; a model loaded with speculation supports only 1", param="cfg_scale"
            )
        if self.places < 2:
            raise InvalidRequest(
                f"cfg_scale is {params.cfg_scale:g}, which needs two slots; this worker has one",
                param="cfg_scale",
            )
        lengths = len(request.prompt_ids), len(params.negative_prompt_ids)
        if self.room(lengths) < 1:
            raise ContextLengthExceeded(
                f"the prompt and the negative prompt have {lengths[0]} and {lengths[1]} tokens, more than "
                f"{self.pages} pages of {PAGE_TOKENS} and a context of {self.max_model_len} hold",
                prompt_tokens=lengths[0],
                negative_prompt_tokens=lengths[1],
                limit=self.max_model_len,
                max_model_len=self.max_model_len,
                pool_tokens=self.pages * PAGE_TOKENS,
            )


_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class LoadedParts:
    """A loaded model with its cache, ready to generate.

    library: the library's classes, and config: its config of the model.
    make_generator: a new generator over the same weights and an emptied page table; how a broken one is mended.
    draft_tokens: tokens guessed ahead per step, 0 without speculation.  free: gives all memory back; idempotent.
    """

    library: Any
    config: Any
    info: LoadedModel
    pages: int
    draft_tokens: int
    make_generator: Callable[[], Any]
    free: Callable[[], None]


class PageTable(Protocol):
    """Page table of a library: pages by their hash, those that jobs hold and those that none does."""

    @property
    def referenced_pages(self) -> Mapping[bytes, Any]: ...

    @property
    def unreferenced_pages(self) -> Mapping[bytes, Any]: ...

    def reset_page_table(self) -> None:
        """Forget what the pages hold."""


COUNT_S = 1.0
"""How long the number of cached pages holds while requests run: each of the free pages is looked at to count them, and
stats are read after every step."""


class GeneratorBackend(ABC):
    """Backend over a library's dynamic generator. See `engine.backends.base.Backend` for what each method promises.

    At most max_prompts requests are the generator's at a time, each as a job that takes its pages for LEASE_TOKENS more
    tokens before it starts; the others wait here. A step that fails ends the requests that were in it and makes a new
    generator. A step that runs out of memory ends none as long as fewer can be tried: all go on, three quarters of
    them at once. Nor does a lost device, or a generator that cannot be replaced: they end the worker.
    """

    def __init__(
        self,
        import_library: Callable[..., Any],
        load_parts: Callable[..., LoadedParts],
        clock: Callable[[], float],
    ) -> None:
        self._import_library = import_library
        self._load_parts = load_parts
        self._clock = clock
        self._cached_pages, self._counted_s = 0, -math.inf
        self._parts: LoadedParts | None = None
        self._generator: Any = None
        self._limits: Limits | None = None
        self._page_hash = PageHash(os.urandom(32))
        self._max_prompts = 1
        self._prompts_limit = 0
        self._queue = RequestQueue()
        self._masks: dict[str, TokenMask] = {}
        self._counters = Counters()
        self._unsent: list[TokenEvent] = []

    # --- what the libraries do each in a way of their own -----------------------------------------------------------

    @abstractmethod
    def limits_of(self, parts: LoadedParts, generator: Any, spec: ModelSpec) -> Limits:
        """Return the capacity of a worker that has loaded `spec`."""

    @abstractmethod
    def refuse_params(self, params: SamplingParams) -> None:
        """Raise InvalidRequest naming the first parameter that cannot be honoured."""

    @abstractmethod
    def make_job(
        self, parts: LoadedParts, request: BackendRequest, *, new_tokens: int, root: bytes, mask: TokenMask | None
    ) -> Job:
        """Make a job for up to `new_tokens` tokens. root: of its scope in the prefix cache: the same for all of it."""

    @abstractmethod
    def page_table(self, generator: Any) -> PageTable:
        """Return the page table of a generator."""

    @abstractmethod
    def attach(self, adapter: AdapterSpec) -> int:
        """Make an adapter usable, or raise InvalidRequest."""

    # --- the contract -----------------------------------------------------------------------------------------------

    def load(
        self,
        spec: ModelSpec,
        *,
        max_prompts: int,
        step_tokens: int,
        page_tokens: int,
        report: Report,
        cancelled: Callable[[], bool],
    ) -> LoadedModel:
        """Load weights and cache and run one short request. Pages and prefill chunks have the library's sizes."""
        self.unload()
        library = self._import_library(report, spec=spec, cancelled=cancelled)
        _raise_if(cancelled)
        self._parts = parts = self._load_parts(
            library, spec, max_prompts=max_prompts, report=report, cancelled=cancelled
        )
        try:
            _raise_if(cancelled)
            self._generator = generator = parts.make_generator()
            self._limits = self.limits_of(parts, generator, spec)
            self._max_prompts = max_prompts
            report(LoadProgress(phase="warm_up", done=0, total=1, unit="steps"))
            self._warm_up()
            report(LoadProgress(phase="warm_up", done=1, total=1, unit="steps"))
            _raise_if(cancelled)
        except BaseException:
            self.unload()
            raise
        return parts.info

    def submit(self, request: BackendRequest, mask: TokenMask | None = None) -> None:
        """Take a request. Raises ContextLengthExceeded, or InvalidRequest naming the field."""
        if self._limits is None:
            raise RuntimeError("no model is loaded")
        if request.id in self._queue:
            raise InvalidRequest(f"request id {request.id} is already in use", param="id")
        self._limits.refuse(request)
        self.refuse_params(request.params)
        self._queue.waiting[request.id] = request
        if mask is not None:
            self._masks[request.id] = mask

    def cancel(self, request_id: str) -> None:
        """Forget a request and free its pages."""
        self._unsent = [event for event in self._unsent if event.request_id != request_id]
        self._masks.pop(request_id, None)
        live = self._queue.drop(request_id)
        if live is not None:
            live.count(self._counters)
            self._release(live)

    def set_max_prompts(self, max_prompts: int) -> None:
        """Give the generator up to this many from the next step on, also where memory did not allow it before."""
        self._max_prompts = max_prompts
        self._prompts_limit = 0

    def set_step_tokens(self, step_tokens: int) -> None:  # noqa: B027 - nothing to do, nothing to override
        """The library cuts prompts as it was loaded to."""

    def set_itl_target(self, target_s: float | None) -> None:  # noqa: B027 - likewise
        """The library decides what a step computes."""

    def has_work(self) -> bool:
        """Return whether any request is live, or an end of one was not returned yet."""
        return bool(self._queue or self._unsent)

    @ends_worker()
    def step(self) -> Sequence[TokenEvent]:
        """One iteration of the generator, and the tokens it gave."""
        if self._generator is not None:
            self._start()
        if self._generator is not None and self._queue.running:
            try:
                results = self._generator.iterate()
            except Exception as error:
                no_memory = is_out_of_memory(error)
                self._counters.oom_steps += no_memory
                self._mend(error, retry=no_memory)
            else:
                self._counters.steps += 1
                failures = {each["job"].identifier: each["error"] for each in results if each["stage"] == "error"}
                self._collect({each["identifier"] for each in results if each["eos"] and each["stage"] != "error"})
                for request_id, failure in failures.items():
                    self._fail(request_id, failure)
        events, self._unsent = self._unsent, []
        return events

    def stats(self) -> BackendStats:
        """Counters and gauges now."""
        queue, counters, parts = self._queue, self._counters, self._parts
        running = queue.running.values()
        decoding = sum(live.job.started and live.job.decoding for live in running)
        started = sum(live.job.started for live in running)
        generator = self._generator
        free: Collection[Any] = () if generator is None else self.page_table(generator).unreferenced_pages.values()
        now_s = self._clock()
        if not running or now_s - self._counted_s >= COUNT_S:
            self._cached_pages, self._counted_s = sum(page.kv_position > 0 for page in free), now_s
        return BackendStats(
            waiting=len(queue.waiting) + len(running) - started,
            prefilling=started - decoding,
            decoding=decoding,
            pages_total=parts.pages if parts is not None else 0,
            pages_free=len(free),
            pages_cached=min(self._cached_pages, len(free)),
            prefix_query_tokens=counters.prefix_query_tokens,
            prefix_hit_tokens=counters.prefix_hit_tokens,
            prompt_tokens_computed=counters.prompt_tokens_computed,
            prompts_limit=self._prompts_limit,
            oom_steps=counters.oom_steps,
            steps=counters.steps,
            weights_bytes=parts.info.weights_bytes if parts is not None else 0,
            kv_bytes=parts.info.kv_bytes if parts is not None else 0,
            draft_tokens=counters.draft_tokens,
            draft_accepted=counters.draft_accepted,
            drafts=counters.drafts,
            sequences=tuple(queue.sequences()),
        )

    def time_lost(self, request_id: str) -> TimeLost:
        """Nothing: what a step of the library costs is not known by its parts."""
        return TimeLost()

    def prefix_changes(self) -> PrefixChanges:
        """Nothing: the library keys its pages in a way of its own."""
        return PrefixChanges()

    def detach(self, key: str) -> None:  # noqa: B027 - likewise
        """Nothing to forget."""

    def check(self) -> None:
        """Prove that the generator has our jobs and no others, and that all pages are free or held by one of them;
        raises AssertionError with the numbers."""
        ours, generator, parts = self._queue.running.keys(), self._generator, self._parts
        if generator is None or parts is None:
            assert not self._queue, f"{len(ours)} requests without a generator"
            return
        active = {job.identifier for job in generator.active_jobs}
        theirs = active | {job.identifier for job in generator.pending_jobs}
        assert ours == theirs, f"{len(ours)} requests run, the generator has {len(theirs)} jobs"
        table = self.page_table(generator)
        used, free = len(table.referenced_pages), len(table.unreferenced_pages)
        assert used + free == parts.pages, f"{used} pages in use and {free} free are not {parts.pages}"
        assert active or not used, f"{used} pages are in use without a request"

    def unload(self) -> None:
        """Give all memory back and forget every request."""
        parts, self._parts = self._parts, None
        self._generator = self._limits = None
        self._queue, self._counters = RequestQueue(), Counters()
        self._masks.clear()
        self._unsent.clear()
        self._prompts_limit = 0
        if parts is not None:
            parts.free()

    # --- inside ---------------------------------------------------------------------------------------------------

    def _warm_up(self) -> None:
        """Answer a short request, so that kernels are chosen and the whole path has worked once."""
        request = BackendRequest(id="warm-up", prompt_ids=[0] * 8, params=SamplingParams(max_tokens=4, seed=0))
        self._queue.waiting[request.id] = request
        try:
            while self._queue:
                for event in self.step():
                    if event.finish == "error":
                        raise ModelLoadFailed(f"the model was loaded, but it cannot answer: {event.message}")
        except WorkerFailed as error:
            raise ModelLoadFailed(f"the model was loaded, but it cannot answer: {error.message}") from error
        self.page_table(self._generator).reset_page_table()
        self._counters = Counters()

    def _start(self) -> None:
        """Give the generator as many requests as there are places, as far as they leave pages to the one that waits
        there longest. Of a client for whose next request there are too few, none goes ahead of it."""
        limits, queue = self._limits, self._queue
        assert limits is not None
        places = min(self._max_prompts, self._prompts_limit or self._max_prompts)
        passed_over: set[int] = set()
        for request in list(queue.waiting.values()):
            if len(queue.running) >= places:
                return
            if request.client in passed_over:
                continue
            lengths = sequence_lengths(request)
            if queue.places + len(lengths) > limits.places:
                return
            wanted = limits.wanted(request)
            # a sampler with a state of its own keeps one job to the end
            new_tokens = wanted if request.params.mirostat else min(wanted, LEASE_TOKENS)
            pages = limits.pages_of(lengths, new_tokens)
            claimed = queue.claimed_pages()
            if claimed and claimed + pages > limits.pages and wanted > 0:
                passed_over.add(request.client)
                continue
            del queue.waiting[request.id]
            if wanted < 1:
                self._end(request.id, "length")
                continue
            try:
                queue.run(request, self._enqueue(request, new_tokens), pages)
            except Exception as error:
                if is_device_lost(error):
                    raise
                _logger.exception("request %s could not be started", request.id)
                self._end(request.id, "error", failure_reason(error))

    def _enqueue(self, request: BackendRequest, new_tokens: int) -> Job:
        """Make a job and give it to the generator."""
        assert self._parts is not None
        job = self.make_job(
            self._parts,
            request,
            new_tokens=new_tokens,
            root=self._page_hash.scope_key(b"", request.cache_scope),
            mask=self._masks.get(request.id),
        )
        self._generator.enqueue(job.handle)
        return job

    def _collect(self, over: set[str]) -> None:
        """Take the tokens of everybody. The generator has done with the jobs in `over`."""
        assert self._limits is not None
        going_on: list[LiveRequest] = []
        for live in list(self._queue.running.values()):
            request_id, failed, whole = live.request.id, live.job.sampler.failed, live.job.sampler.whole
            goes_on = not whole and (request_id not in over or (not failed and self._limits.wanted(live.rest()) > 0))
            live.count(self._counters)
            self._unsent += live.events(self._counters, ended=not goes_on and not failed)
            if failed or not goes_on:
                self._queue.drop(request_id)
                self._masks.pop(request_id, None)
            elif request_id in over:
                going_on.append(live)
            if failed:
                self._end(request_id, "error", live.job.sampler.why_failed)
            if (failed or whole) and request_id not in over:
                self._release(live)
        self._queue.give_back(going_on)

    def _fail(self, request_id: str, error: Exception) -> None:
        """End a request that the generator has ended, or let it wait until fewer run where it ran out of memory."""
        if is_device_lost(error):
            raise error
        live = self._queue.running[request_id]
        if is_out_of_memory(error) and len(self._queue.running) > 1:
            self._counters.oom_steps += 1
            self._prompts_limit = len(self._queue.running) - 1
            _logger.warning("a prompt ran out of memory; max prompts is now %d", self._prompts_limit)
            self._queue.give_back([live], LiveRequest.as_sent)
            return
        _logger.error("request %s failed", request_id, exc_info=error)
        self._queue.drop(request_id)
        self._end(request_id, "error", failure_reason(error))

    def _release(self, live: LiveRequest) -> None:
        """Take a job from the generator, which is replaced where it cannot."""
        if self._generator is None:
            return
        try:
            self._generator.cancel(live.job.handle)
        except Exception as error:
            self._mend(error)

    def _mend(self, error: Exception, *, retry: bool = False) -> None:
        """End the requests of a step that failed, and let those that held no pages yet go on in a new generator.

        Where no request held any, all jobs end. retry: fewer of them may do what all could not, so that all go on.
        Every failure ends a request or lowers how many run, and none can go on for ever. Raises WorkerFailed where
        there is no new generator.
        """
        if is_device_lost(error):
            raise error
        assert self._parts is not None
        running = list(self._queue.running.values())
        pending = {id(job) for job in self._generator.pending_jobs}
        failed = [live for live in running if id(live.job.handle) not in pending] or running
        if retry and len(failed) > 1:
            self._prompts_limit = len(failed) - max(1, len(failed) // 4)
            _logger.warning("a step ran out of memory; max prompts is now %d", self._prompts_limit)
            failed = []
        else:
            _logger.error("the generator failed with %d requests", len(running), exc_info=error)
        self._generator = None
        self._queue.give_back([live for live in running if live not in failed], LiveRequest.as_sent)
        for live in failed:
            self._queue.drop(live.request.id)
            self._end(live.request.id, "error", failure_reason(error))
        try:
            self._generator = self._parts.make_generator()
        except Exception as failure:
            if is_device_lost(failure):
                raise
            raise WorkerFailed(
                f"the generator broke and could not be replaced: {type(failure).__name__}: {failure}"
            ) from failure

    def _end(self, request_id: str, finish: FinishReason, message: str = "") -> None:
        self._queue.begun.discard(request_id)
        self._masks.pop(request_id, None)
        self._unsent.append(TokenEvent(request_id=request_id, finish=finish, message=message))


def _raise_if(cancelled: Callable[[], bool]) -> None:
    if cancelled():
        raise LoadCancelled("the load was cancelled")
