"""The ExLlamaV2 backend: the library's generator behind the face that every backend has."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from engine.backends.base import (
    BackendRequest,
    BackendStats,
    FinishReason,
    LoadedModel,
    LoadProgress,
    TokenEvent,
)
from engine.backends.exllama.faults import device_is_lost, reason
from engine.backends.exllama.jobs import Job
from engine.backends.exllama.limits import Limits, sequence_lengths
from engine.backends.exllama.line import Counters, Line, Live
from engine.backends.exllama.parts import Library, LoadedParts
from engine.backends.exllama.sampling import refuse_unsupported
from engine.config import ModelSpec, SamplingParams
from engine.errors import InvalidRequest, LoadCancelled, ModelLoadFailed, WorkerFailed

_logger = logging.getLogger(__name__)

Report = Callable[[LoadProgress], None]


class ImportLibrary(Protocol):
    """Imports the library for a model; raises ModelLoadFailed, or BackendUnavailable where it cannot run."""

    def __call__(self, report: Report, *, spec: ModelSpec, cancelled: Callable[[], bool]) -> Library: ...


class LoadParts(Protocol):
    """Loads a model with the library; raises ModelLoadFailed and leaves nothing allocated then."""

    def __call__(
        self,
        library: Library,
        spec: ModelSpec,
        *,
        max_prompts: int,
        report: Report,
        cancelled: Callable[[], bool],
    ) -> LoadedParts: ...


class ExllamaBackend:
    """Backend over the library's dynamic generator. See `engine.backends.base.Backend` for what each method promises.

    At most max_prompts requests are the generator's at a time, where each takes its pages for the whole answer before
    it starts; the others wait here. A step that fails ends the requests that were in it and makes a new generator;
    where that fails too, the backend is degraded and refuses everything until the next load.
    """

    def __init__(self, import_library: ImportLibrary | None = None, load_parts: LoadParts | None = None) -> None:
        self._import_library = import_library
        self._load_parts = load_parts
        self._parts: LoadedParts | None = None
        self._generator: Any = None
        self._limits: Limits | None = None
        self._max_prompts = 1
        self._line = Line()
        self._counters = Counters()
        self._unsent: list[TokenEvent] = []
        self._degraded = ""

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
        import_library, load_parts = self._loaders()
        library = import_library(report, spec=spec, cancelled=cancelled)
        _raise_if(cancelled)
        self._parts = parts = load_parts(library, spec, max_prompts=max_prompts, report=report, cancelled=cancelled)
        try:
            _raise_if(cancelled)
            self._generator = parts.make_generator()
            self._limits = _limits(parts, spec, self._generator)
            self._max_prompts = max_prompts
            report(LoadProgress(phase="warm_up", done=0, total=1, unit="steps"))
            self._warm_up()
            report(LoadProgress(phase="warm_up", done=1, total=1, unit="steps"))
            _raise_if(cancelled)
        except BaseException:
            self.unload()
            raise
        return parts.info

    def submit(self, request: BackendRequest) -> None:
        """Take a request. Raises ContextLengthExceeded, InvalidRequest naming the field, or WorkerFailed where the
        generator broke and could not be mended."""
        if self._limits is None:
            raise RuntimeError("the backend holds no model")
        if self._degraded:
            raise WorkerFailed(self._degraded)
        if request.id in self._line:
            raise InvalidRequest(f"a request with id {request.id} is being worked on", param="id")
        self._limits.refuse(request)
        refuse_unsupported(request.params)
        self._line.waiting[request.id] = request

    def cancel(self, request_id: str) -> None:
        """Forget a request and free its pages."""
        self._unsent = [event for event in self._unsent if event.request_id != request_id]
        self._line.waiting.pop(request_id, None)
        live = self._line.running.pop(request_id, None)
        if live is not None:
            live.count(self._counters)
            self._release(live)

    def set_max_prompts(self, max_prompts: int) -> None:
        """Give the generator up to this many from the next step on."""
        self._max_prompts = max_prompts

    def has_work(self) -> bool:
        """Whether any request is live, or an end of one was not told yet."""
        return bool(self._line or self._unsent)

    def step(self) -> Sequence[TokenEvent]:
        """One iteration of the generator, and the tokens it gave."""
        if self._generator is not None:
            self._start()
        if self._generator is not None and self._line.running:
            try:
                results = self._generator.iterate()
            except Exception as error:
                self._mend(error)
            else:
                self._counters.steps += 1
                self._collect({result["identifier"] for result in results if result["eos"]})
        events, self._unsent = self._unsent, []
        return events

    def stats(self) -> BackendStats:
        """Counters and gauges now."""
        counters, running = self._counters, self._line.running.values()
        decoding = sum(live.job.started and live.job.decoding for live in running)
        started = sum(live.job.started for live in running)
        free = list(self._generator.unreferenced_pages.values()) if self._generator is not None else []
        info = self._parts.info if self._parts is not None else None
        return BackendStats(
            waiting=len(self._line.waiting) + len(running) - started,
            prefilling=started - decoding,
            decoding=decoding,
            pages_total=self._parts.pages if self._parts is not None else 0,
            pages_free=len(free),
            pages_cached=sum(page.kv_position > 0 for page in free),
            prefix_query_tokens=counters.prefix_query_tokens,
            prefix_hit_tokens=counters.prefix_hit_tokens,
            prompt_tokens_computed=counters.prompt_tokens_computed,
            steps=counters.steps,
            weights_bytes=info.weights_bytes if info is not None else 0,
            kv_bytes=info.kv_bytes if info is not None else 0,
            draft_tokens=counters.draft_tokens,
            draft_accepted=counters.draft_accepted,
            degraded=self._degraded,
            sequences=tuple(self._line.sequences()),
        )

    def check(self) -> None:
        """Prove that the generator has our jobs and no others, and that its pages add up; raises AssertionError."""
        ours = {live.job.handle.identifier for live in self._line.running.values()}
        if self._generator is None:
            assert not self._line, f"{len(ours)} requests without a generator"
            return
        generator = self._generator
        active = {job.identifier for job in generator.active_jobs}
        theirs = active | {job.identifier for job in generator.pending_jobs}
        assert ours == theirs, f"{len(ours)} requests run, the generator has {len(theirs)} jobs"
        held, free = len(generator.referenced_pages), len(generator.unreferenced_pages)
        total = self._parts.pages if self._parts is not None else 0
        assert held + free == total, f"{held} pages held and {free} free are not {total}"
        assert active or not held, f"{held} pages are held by nobody"

    def unload(self) -> None:
        """Give all memory back and forget every request."""
        parts, self._parts = self._parts, None
        self._generator = self._limits = None
        self._line, self._counters = Line(), Counters()
        self._unsent.clear()
        self._degraded = ""
        if parts is not None:
            parts.free()

    # --- inside ---------------------------------------------------------------------------------------------------

    def _loaders(self) -> tuple[ImportLibrary, LoadParts]:
        if self._import_library is None or self._load_parts is None:
            from engine.backends.exllama.library import import_library
            from engine.backends.exllama.loading import load_parts

            return self._import_library or import_library, self._load_parts or load_parts
        return self._import_library, self._load_parts

    def _warm_up(self) -> None:
        """Answer a short request, so that kernels are chosen and the whole path has worked once."""
        request = BackendRequest(id="warm-up", prompt_ids=[0] * 8, params=SamplingParams(max_tokens=4, seed=0))
        self._line.waiting[request.id] = request
        while self._line:
            for event in self.step():
                if event.finish == "error":
                    raise ModelLoadFailed(f"the model was loaded, but it cannot answer: {event.message}")
        self._generator.reset_page_table()
        self._counters = Counters()

    def _start(self) -> None:
        """Give the generator as many requests as there are places."""
        assert self._parts is not None
        assert self._limits is not None
        while self._line.waiting and len(self._line.running) < self._max_prompts:
            request = next(iter(self._line.waiting.values()))
            lengths = sequence_lengths(request)
            if self._line.places + len(lengths) > self._limits.places:
                return
            del self._line.waiting[request.id]
            new_tokens = self._limits.room(lengths)
            if request.params.max_tokens is not None:
                new_tokens = min(new_tokens, request.params.max_tokens - len(request.generated))
            if new_tokens < 1:
                self._end(request.id, "length")
                continue
            try:
                job = Job(
                    self._parts.library,
                    request,
                    new_tokens=new_tokens,
                    draft_tokens=self._limits.draft_tokens,
                    vocab_size=self._limits.vocab_size,
                )
                self._generator.enqueue(job.handle)
            except Exception as error:
                if device_is_lost(error):
                    raise
                _logger.exception("request %s could not be started", request.id)
                self._end(request.id, "error", reason(error))
            else:
                self._line.running[request.id] = Live(job, request)

    def _collect(self, ended: set[str]) -> None:
        """Take the tokens of everybody; those in `ended` are no jobs any more."""
        for live in list(self._line.running.values()):
            request_id = live.request.id
            live.count(self._counters)
            self._unsent += live.events(self._counters, ended=request_id in ended and not live.job.failed)
            if request_id in ended or live.job.failed:
                del self._line.running[request_id]
            if live.job.failed:
                self._end(request_id, "error", "the model gave no finite probabilities for it")
                if request_id not in ended:
                    self._release(live)

    def _release(self, live: Live) -> None:
        """Take a job from the generator, which is made anew where it cannot."""
        if self._generator is None:
            return
        try:
            self._generator.cancel(live.job.handle)
        except Exception as error:
            self._mend(error)

    def _mend(self, error: Exception) -> None:
        """End the requests of a step that failed, and let those that held no pages yet go on in a new generator.

        Where nobody held any, all jobs end: so every failure ends somebody, and none can go on for ever.
        """
        if device_is_lost(error):
            raise error
        assert self._parts is not None
        running = list(self._line.running.values())
        _logger.error("the generator failed with %d requests", len(running), exc_info=error)
        pending = {id(job) for job in self._generator.pending_jobs}
        failed = [live for live in running if id(live.job.handle) not in pending] or running
        self._line.running.clear()
        self._generator = None
        self._line.give_back([live.request for live in running if live not in failed])
        for live in failed:
            self._end(live.request.id, "error", reason(error))
        try:
            self._generator = self._parts.make_generator()
        except Exception as failure:
            _logger.exception("the generator could not be made anew")
            self._degrade(f"the generator broke and could not be made anew: {type(failure).__name__}: {failure}")
            if device_is_lost(failure):
                raise

    def _degrade(self, why: str) -> None:
        self._degraded = why
        for request_id in self._line.waiting:
            self._end(request_id, "error", why)
        self._line.waiting.clear()

    def _end(self, request_id: str, finish: FinishReason, message: str = "") -> None:
        self._unsent.append(TokenEvent(request_id=request_id, finish=finish, message=message))


def _limits(parts: LoadedParts, spec: ModelSpec, generator: Any) -> Limits:
    """The limits of what was loaded. Guesses from a request's own text look at its last max_ngram - 1 tokens, and the
    library takes it for granted that they are there."""
    return Limits(
        pages=parts.pages,
        max_model_len=parts.info.max_model_len,
        max_input_len=spec.max_input_len,
        draft_tokens=parts.draft_tokens,
        places=generator.max_batch_size,
        vocab_size=parts.info.vocab_size,
        min_prompt=generator.max_ngram - 1 if generator.use_ngram_draft else 1,
    )


def _raise_if(cancelled: Callable[[], bool]) -> None:
    if cancelled():
        raise LoadCancelled("the load was cancelled")
