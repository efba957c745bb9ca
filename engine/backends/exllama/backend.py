"""The ExLlamaV2 backend: the library's generator behind the face that every backend has."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from engine.backends.base import (
    BackendRequest,
    BackendStats,
    FinishReason,
    LoadedModel,
    LoadProgress,
    PrefixChanges,
    TokenEvent,
    TokenMask,
)
from engine.backends.exllama.accounts import check_accounts
from engine.backends.exllama.gauges import gauges
from engine.backends.exllama.jobs import Job
from engine.backends.exllama.limits import LEASE_TOKENS, Limits, limits_of, sequence_lengths
from engine.backends.exllama.line import Counters, Line, Live
from engine.backends.exllama.loaders import ImportLibrary, LoadParts, Report, loaders
from engine.backends.exllama.parts import LoadedParts
from engine.backends.exllama.sampling import refuse_unsupported
from engine.backends.faults import device_is_lost, ends_worker, is_out_of_memory, reason
from engine.backends.prefix import PageHash
from engine.config import AdapterSpec, ModelSpec, SamplingParams
from engine.errors import InvalidRequest, LoadCancelled, ModelLoadFailed, WorkerFailed

_logger = logging.getLogger(__name__)


class ExllamaBackend:
    """Backend over the library's dynamic generator. See `engine.backends.base.Backend` for what each method promises.

    At most max_prompts requests are the generator's at a time, each as a job that takes its pages for LEASE_TOKENS more
    tokens before it starts; the others wait here. A step that fails ends the requests that were in it and makes a new
    generator. A step that runs out of memory ends nobody as long as fewer can be tried: all go on, three quarters of
    them at once. Nor does a lost device, or a generator that cannot be replaced: they end the worker.
    """

    def __init__(self, import_library: ImportLibrary | None = None, load_parts: LoadParts | None = None) -> None:
        self._import_library = import_library
        self._load_parts = load_parts
        self._parts: LoadedParts | None = None
        self._generator: Any = None
        self._limits: Limits | None = None
        self._pages = PageHash(os.urandom(32))
        self._max_prompts = 1
        self._prompts_limit = 0
        self._line = Line()
        self._masks: dict[str, TokenMask] = {}
        self._counters = Counters()
        self._unsent: list[TokenEvent] = []

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
        import_library, load_parts = loaders(self._import_library, self._load_parts)
        library = import_library(report, spec=spec, cancelled=cancelled)
        _raise_if(cancelled)
        self._parts = parts = load_parts(library, spec, max_prompts=max_prompts, report=report, cancelled=cancelled)
        try:
            _raise_if(cancelled)
            self._generator = parts.make_generator()
            self._limits = limits_of(parts, spec, self._generator)
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
            raise RuntimeError("the backend holds no model")
        if request.id in self._line:
            raise InvalidRequest(f"a request with id {request.id} is being worked on", param="id")
        self._limits.refuse(request)
        refuse_unsupported(request.params)
        self._line.waiting[request.id] = request
        if mask is not None:
            self._masks[request.id] = mask

    def cancel(self, request_id: str) -> None:
        """Forget a request and free its pages."""
        self._unsent = [event for event in self._unsent if event.request_id != request_id]
        self._masks.pop(request_id, None)
        live = self._line.drop(request_id)
        if live is not None:
            live.count(self._counters)
            self._release(live)

    def set_max_prompts(self, max_prompts: int) -> None:
        """Give the generator up to this many from the next step on, also where memory did not allow it before."""
        self._max_prompts = max_prompts
        self._prompts_limit = 0

    def set_step_tokens(self, step_tokens: int) -> None:
        """The library cuts prompts as it was loaded to."""

    def has_work(self) -> bool:
        """Whether any request is live, or an end of one was not told yet."""
        return bool(self._line or self._unsent)

    @ends_worker()
    def step(self) -> Sequence[TokenEvent]:
        """One iteration of the generator, and the tokens it gave."""
        if self._generator is not None:
            self._start()
        if self._generator is not None and self._line.running:
            try:
                results = self._generator.iterate()
            except Exception as error:
                self._mend(error, retry=is_out_of_memory(error))
            else:
                self._counters.steps += 1
                self._collect({result["identifier"] for result in results if result["eos"]})
        events, self._unsent = self._unsent, []
        return events

    def stats(self) -> BackendStats:
        """Counters and gauges now."""
        stats = gauges(self._line, self._counters, self._generator, self._parts)
        return msgspec.structs.replace(stats, prompts_limit=self._prompts_limit)

    def prefix_changes(self) -> PrefixChanges:
        """Nothing: the library keys its pages in a way of its own."""
        return PrefixChanges()

    def attach(self, adapter: AdapterSpec) -> int:
        """Refused: the library applies an adapter to every request, so it is chosen with the model (--lora)."""
        raise InvalidRequest(
            f"the exllamav2 backend cannot attach {adapter.name} while it runs; load the model with --lora",
            param="adapter",
            value=adapter.name,
        )

    def detach(self, key: str) -> None:
        """Nothing to forget."""

    def check(self) -> None:
        """Prove that the generator has our jobs and no others, and that its pages add up; raises AssertionError."""
        if self._generator is None or self._parts is None:
            assert not self._line, f"{len(self._line.running)} requests without a generator"
        else:
            check_accounts(self._generator, self._line.running.keys(), self._parts.pages)

    def unload(self) -> None:
        """Give all memory back and forget every request."""
        parts, self._parts = self._parts, None
        self._generator = self._limits = None
        self._line, self._counters = Line(), Counters()
        self._masks.clear()
        self._unsent.clear()
        self._prompts_limit = 0
        if parts is not None:
            parts.free()

    # --- inside ---------------------------------------------------------------------------------------------------

    def _warm_up(self) -> None:
        """Answer a short request, so that kernels are chosen and the whole path has worked once."""
        request = BackendRequest(id="warm-up", prompt_ids=[0] * 8, params=SamplingParams(max_tokens=4, seed=0))
        self._line.waiting[request.id] = request
        try:
            while self._line:
                for event in self.step():
                    if event.finish == "error":
                        raise ModelLoadFailed(f"the model was loaded, but it cannot answer: {event.message}")
        except WorkerFailed as error:
            raise ModelLoadFailed(f"the model was loaded, but it cannot answer: {error.message}") from error
        self._generator.reset_page_table()
        self._counters = Counters()

    def _start(self) -> None:
        """Give the generator as many requests as there are places."""
        assert self._limits is not None
        places = min(self._max_prompts, self._prompts_limit or self._max_prompts)
        while self._line.waiting and len(self._line.running) < places:
            lengths = sequence_lengths(next(iter(self._line.waiting.values())))
            if self._line.places + len(lengths) > self._limits.places:
                return
            request = self._line.take()
            new_tokens = self._limits.wanted(request)
            if new_tokens < 1:
                self._end(request.id, "length")
                continue
            try:
                self._line.run(request, self._enqueue(request, new_tokens))
            except Exception as error:
                if device_is_lost(error):
                    raise
                _logger.exception("request %s could not be started", request.id)
                self._end(request.id, "error", reason(error))

    def _enqueue(self, request: BackendRequest, new_tokens: int) -> Job:
        """Make a job and give it to the generator. A sampler with a state of its own keeps one job to the end."""
        assert self._parts is not None
        assert self._limits is not None
        job = Job(
            self._parts.library,
            request,
            new_tokens=new_tokens if request.params.mirostat else min(new_tokens, LEASE_TOKENS),
            draft_tokens=self._limits.draft_tokens,
            vocab_size=self._limits.vocab_size,
            root=self._pages.scoped(b"", request.cache_scope),
            mask=self._masks.get(request.id),
        )
        self._generator.enqueue(job.handle)
        return job

    def _collect(self, over: set[str]) -> None:
        """Take the tokens of everybody. The generator has done with the jobs in `over`."""
        assert self._limits is not None
        going_on: list[Live] = []
        for live in list(self._line.running.values()):
            request_id, failed, whole = live.request.id, live.job.failed, live.job.whole
            goes_on = not whole and (request_id not in over or (not failed and self._limits.wanted(live.rest()) > 0))
            live.count(self._counters)
            self._unsent += live.events(self._counters, ended=not goes_on and not failed)
            if failed or not goes_on:
                self._line.drop(request_id)
                self._masks.pop(request_id, None)
            elif request_id in over:
                going_on.append(live)
            if failed:
                self._end(request_id, "error", live.job.why_failed)
            if (failed or whole) and request_id not in over:
                self._release(live)
        self._line.give_back(going_on)

    def _release(self, live: Live) -> None:
        """Take a job from the generator, which is replaced where it cannot."""
        if self._generator is None:
            return
        try:
            self._generator.cancel(live.job.handle)
        except Exception as error:
            self._mend(error)

    def _mend(self, error: Exception, *, retry: bool = False) -> None:
        """End the requests of a step that failed, and let those that held no pages yet go on in a new generator.

        Where nobody held any, all jobs end. retry: fewer of them may do what all could not, so that all go on. Every
        failure ends somebody or lowers how many run, and none can go on for ever. Raises WorkerFailed where there is no
        new generator.
        """
        if device_is_lost(error):
            raise error
        assert self._parts is not None
        running = list(self._line.running.values())
        pending = {id(job) for job in self._generator.pending_jobs}
        failed = [live for live in running if id(live.job.handle) not in pending] or running
        if retry and len(failed) > 1:
            self._prompts_limit = len(failed) - max(1, len(failed) // 4)
            _logger.warning("a step ran out of memory; now %d requests run at once", self._prompts_limit)
            failed = []
        else:
            _logger.error("the generator failed with %d requests", len(running), exc_info=error)
        self._generator = None
        self._line.give_back([live for live in running if live not in failed], Live.as_told)
        for live in failed:
            self._line.drop(live.request.id)
            self._end(live.request.id, "error", reason(error))
        try:
            self._generator = self._parts.make_generator()
        except Exception as failure:
            if device_is_lost(failure):
                raise
            raise WorkerFailed(
                f"the generator broke and could not be replaced: {type(failure).__name__}: {failure}"
            ) from failure

    def _end(self, request_id: str, finish: FinishReason, message: str = "") -> None:
        self._line.begun.discard(request_id)
        self._masks.pop(request_id, None)
        self._unsent.append(TokenEvent(request_id=request_id, finish=finish, message=message))


def _raise_if(cancelled: Callable[[], bool]) -> None:
    if cancelled():
        raise LoadCancelled("the load was cancelled")
