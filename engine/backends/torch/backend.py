"""Our own backend: scheduler, pages, model and sampler behind the face that every backend has."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from engine.backends.base import (
    BackendRequest,
    BackendStats,
    FinishReason,
    LoadedModel,
    LoadProgress,
    PrefixChanges,
    SequenceStats,
    TokenEvent,
    TokenMask,
)
from engine.backends.common.kv_format import CPU_SHARE, CUDA_SHARE, kv_pages
from engine.backends.scheduler.batch import ChunkInput
from engine.backends.scheduler.page_pool import PagePool
from engine.backends.scheduler.scheduler import Scheduler, refuse_unknown_tokens
from engine.backends.scheduler.sequences import Plan
from engine.backends.torch.determinism import refuse_adapters
from engine.backends.torch.device_memory import StepOutOfMemory
from engine.backends.torch.pipeline import NOT_FINITE, Computed, Job, Pipeline
from engine.backends.torch.runner import ModelRunner
from engine.backends.torch.sampling.sampler import SampleRow, sample
from engine.backends.torch.speculation.draft_model import DraftModel
from engine.backends.torch.speculation.speculation import Speculation
from engine.backends.torch_common.errors import ends_worker, failure_reason, is_device_lost, is_out_of_memory
from engine.config import AdapterSpec, ModelSpec, SamplingParams
from engine.errors import Detail, InsufficientMemory, InvalidRequest, LoadCancelled

# What a load of the torch backend says of the model.


def describe_model(
    runner: ModelRunner, pool: PagePool, kv_bytes: int, draft: DraftModel | None = None, *, step_s: float
) -> LoadedModel:
    """A model whose KV pages are allocated, and take so many bytes. The bytes are those of its draft model too."""
    return LoadedModel(
        backend="torch",
        architecture=runner.config.architecture,
        dtype=runner.dtype_name,
        devices=runner.devices,
        vocab_size=runner.config.vocab_size,
        max_model_len=runner.config.max_model_len,
        kv_tokens=pool.num_pages * pool.page_tokens,
        page_tokens=pool.page_tokens,
        weights_bytes=runner.weights_bytes,
        kv_bytes=kv_bytes,
        parameters=runner.parameters,
        active_parameters=runner.active_parameters,
        shared_bytes=runner.shared_bytes + (draft.runner.shared_bytes if draft is not None else 0),
        attention=runner.attention.name if runner.attention else "",
        attention_reason=runner.attention.reason if runner.attention else "",
        linear=runner.linear,
        native=runner.native,
        shares=runner.shares,
        adapters_per_request=True,
        hidden_size=runner.config.hidden_size,
        step_s=step_s,
    )


# How the torch backend is doing, in numbers.


def backend_stats(
    runner: ModelRunner, scheduler: Scheduler, speculation: Speculation, *, steps: int, kv_bytes: int
) -> BackendStats:
    """Counters and gauges now."""
    pool, counters, running = scheduler.pool, scheduler.counters, scheduler.running
    decoding = sum(sequence.missing == 1 for sequence in running)
    return BackendStats(
        waiting=len(scheduler.waiting),
        prefilling=len(running) - decoding,
        decoding=decoding,
        pages_total=pool.num_pages,
        pages_free=pool.free_pages,
        pages_cached=pool.cached_pages,
        prefix_query_tokens=counters.prefix_query_tokens,
        prefix_hit_tokens=counters.prefix_hit_tokens,
        prompt_tokens_computed=counters.prompt_tokens_computed,
        preemptions=counters.preemptions,
        steps=steps,
        weights_bytes=runner.weights_bytes,
        kv_bytes=kv_bytes,
        draft_tokens=sum(position.guessed for position in speculation.told),
        draft_accepted=sum(position.held for position in speculation.told),
        drafts=speculation.told,
        prompts_limit=scheduler.limits.prompts_limit,
        sequences=tuple(
            SequenceStats(request_id=each.id, computed_tokens=each.computed, known_tokens=each.known)
            for each in (*running, *scheduler.waiting)
        ),
    )


# The first step of a model that was just loaded.

CPU_TOKENS = 64
"""Tokens of the warm-up's prompts on a CPU, where nothing is taken or made ready by more of them but time."""


def warm_up(runner: ModelRunner, pool: PagePool, max_prompts: int, step_tokens: int) -> float:
    """Run the largest step there can be, so that its memory is taken and its kernels are ready before the first
    request: step_tokens of prompt, and max_prompts sequences that sample. All write over the same free pages. Then
    decodes are recorded, where that can be. On a CPU a smaller one will do, and the largest is only counted.

    Returns the seconds that such a step takes, reckoned from the smaller one. Raises InsufficientMemory.
    """
    chunks = _largest(runner, pool, max_prompts, step_tokens)
    try:
        computed = chunks
        if runner.on_cpu and step_tokens > CPU_TOKENS:
            runner.foresee(chunks)
            computed = _largest(runner, pool, max_prompts, CPU_TOKENS)
        row = SampleRow(SamplingParams(temperature=1.0, top_p=0.9, seed=0), prompt_ids=[0])
        began_s = time.perf_counter()
        logits = runner.forward(computed)
        sample(logits, [row] * len(computed))
        took_s = time.perf_counter() - began_s
        runner.record_decodes(max_prompts)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise InsufficientMemory(
            f"the weights and KV pages fit on {', '.join(runner.devices)}, but a step of {step_tokens} tokens and "
            f"{max_prompts} answers does not besides: {error}; take fewer kv_cache_tokens, max_prompts or step_tokens",
            **_numbers(runner, error),
        ) from error
    return took_s * _tokens(chunks) / _tokens(computed)


def _largest(runner: ModelRunner, pool: PagePool, max_prompts: int, step_tokens: int) -> list[ChunkInput]:
    longest = min(step_tokens, runner.config.max_model_len, pool.num_pages * pool.page_tokens)
    pages = list(range(pool.pages_for(longest)))
    chunks = [ChunkInput([0] * longest, 0, pages, sample=True)] * max(1, step_tokens // longest)
    chunks += [ChunkInput([0], longest - 1, pages, sample=True)] * max(0, max_prompts - len(chunks))
    return chunks


def _tokens(chunks: Sequence[ChunkInput]) -> int:
    return sum(len(chunk.token_ids) for chunk in chunks)


def _numbers(runner: ModelRunner, error: Exception) -> dict[str, Detail]:
    if isinstance(error, StepOutOfMemory):
        return {
            "device": error.device,
            "needed_bytes": error.needed_bytes,
            "free_bytes": error.free_bytes,
            "short_bytes": error.needed_bytes - error.free_bytes,
        }
    return {"device": ", ".join(runner.devices), "free_bytes": runner.free_bytes()}


_logger = logging.getLogger(__name__)


class TorchBackend:
    """Backend over ModelRunner. See `engine.backends.base.Backend` for what each method promises.

    A step that runs out of device memory is made smaller and done again; where it cannot get smaller, and where the
    model fails otherwise, the requests in the step end with "error" and the others go on. A lost device ends nobody.
    """

    def __init__(self, runner_type: type[ModelRunner] = ModelRunner) -> None:
        self._runner_type = runner_type
        self._runner: ModelRunner | None = None
        self._scheduler: Scheduler | None = None
        self._pipeline: Pipeline | None = None
        self._jobs: dict[str, Job] = {}
        self._draft: DraftModel | None = None
        self._speculation = Speculation()
        self._steps = 0
        self._kv_bytes = 0

    def load(
        self,
        spec: ModelSpec,
        *,
        max_prompts: int,
        step_tokens: int,
        page_tokens: int,
        report: Callable[[LoadProgress], None],
        cancelled: Callable[[], bool],
    ) -> LoadedModel:
        """Load weights, allocate KV pages (see `kv_size`), and run a step (see `warm_up`)."""
        self.unload()
        self._runner = runner = self._runner_type.load(spec.path, spec, report=report, cancelled=cancelled)
        try:
            if spec.draft_model is not None:
                self._draft = DraftModel.load(spec, runner, report=report, cancelled=cancelled)
            _raise_if(cancelled)
            pool = self._allocate(runner, spec, max_prompts, page_tokens, report)
            _raise_if(cancelled)
            report(LoadProgress(phase="warm_up", done=0, total=1, unit="steps"))
            step_s = sum(warm_up(each, pool, max_prompts, step_tokens) for each in self._runners())
            report(LoadProgress(phase="warm_up", done=1, total=1, unit="steps"))
            for each in self._runners():
                each.settle()
            _raise_if(cancelled)
        except BaseException:
            self.unload()
            raise
        self._scheduler = Scheduler(
            pool,
            max_prompts=max_prompts,
            step_tokens=step_tokens,
            max_model_len=runner.config.max_model_len,
            max_input_len=spec.max_input_len,
        )
        self._pipeline = Pipeline(runner, self._scheduler, self._jobs)
        self._speculation = Speculation(lookup=spec.ngram_draft, draft=self._draft, most=spec.draft_tokens)
        return describe_model(runner, pool, self._kv_bytes, self._draft, step_s=step_s)

    def submit(self, request: BackendRequest, mask: TokenMask | None = None) -> None:
        """Take a request. Raises ContextLengthExceeded or InvalidRequest, naming the field. It keeps its adapter, even
        one that is detached meanwhile."""
        runner, scheduler = self._loaded()
        if request.id in self._jobs:
            raise InvalidRequest(f"a request with id {request.id} is being worked on", param="id")
        vocab_size = runner.config.vocab_size
        refuse_unknown_tokens(request, vocab_size)
        job = Job.of(request, runner.adapters.find(request.adapter), mask, vocab_size)
        scheduler.submit(job.sequence)
        self._jobs[request.id] = job
        if job.foreseeable:
            self._speculation.begin(request.id, job.sequence.token_ids)

    def cancel(self, request_id: str) -> None:
        """Forget a request and free its pages."""
        job = self._jobs.pop(request_id, None)
        self._speculation.end(request_id)
        if job is not None and self._scheduler is not None:
            self._scheduler.remove(job.sequence)

    def set_max_prompts(self, max_prompts: int) -> None:
        """Admit up to this many from the next step on."""
        self._loaded()[1].limits.set_max_prompts(max_prompts)

    def set_step_tokens(self, step_tokens: int) -> None:
        """Compute up to this many tokens from the next step on."""
        self._loaded()[1].limits.set_step_tokens(step_tokens)

    def has_work(self) -> bool:
        """Whether any request is live, or a step is launched that is nobody's any more."""
        return bool(self._jobs) or (self._pipeline is not None and self._pipeline.ahead)

    @ends_worker()
    def step(self) -> Sequence[TokenEvent]:
        """One forward pass for everybody, and the tokens it gave."""
        if self._scheduler is None or self._pipeline is None or not self.has_work():
            return []
        events: list[TokenEvent] = []
        admit = True
        while True:
            planned = self._pipeline.launched()
            plan = planned or self._scheduler.plan(admit=admit)
            events += [self._end(sequence.id, "length") for sequence in plan.exhausted]
            if not plan.chunks:
                return events
            if admit and planned is None:
                self._speculation.add(plan, self._scheduler, self._row_of)
            try:
                computed = self._pipeline.compute(plan, self._speculation)
            except Exception as error:
                if is_device_lost(error):
                    raise
                if not (is_out_of_memory(error) and self._scheduler.shrink()):
                    return events + self._fail(plan, error)
                _logger.warning(
                    "a step ran out of memory; now %d requests run at once, and prompts get %d tokens a step",
                    len(self._scheduler.running),
                    self._scheduler.limits.step_tokens,
                )
                admit = False
                continue
            self._steps += 1
            return events + self._commit(plan, computed)

    def stats(self) -> BackendStats:
        """Counters and gauges now."""
        if self._scheduler is None or self._runner is None:
            return BackendStats(steps=self._steps)
        return backend_stats(
            self._runner, self._scheduler, self._speculation, steps=self._steps, kv_bytes=self._kv_bytes
        )

    def prefix_changes(self) -> PrefixChanges:
        """Pages that became findable or ceased to be since the last call."""
        return self._scheduler.pool.take_changes() if self._scheduler is not None else PrefixChanges()

    def attach(self, adapter: AdapterSpec) -> int:
        """Make an adapter usable from the next step on, in place of another of its key; its bytes."""
        runner = self._loaded()[0]
        if runner.deterministic:
            raise refuse_adapters()
        return runner.adapters.attach(adapter).size_bytes

    def detach(self, key: str) -> None:
        """Forget an adapter; its memory is free once the last request that computes with it has ended."""
        self._loaded()[0].adapters.detach(key)

    def check(self) -> None:
        """Prove that pages, sequences and requests agree; raises AssertionError with the numbers."""
        if self._scheduler is None:
            assert not self._jobs, f"{len(self._jobs)} requests without a model"
            return
        self._scheduler.check()
        scheduled = {sequence.id for sequence in (*self._scheduler.running, *self._scheduler.waiting)}
        assert scheduled == self._jobs.keys(), f"{len(scheduled)} sequences for {len(self._jobs)} requests"

    def unload(self) -> None:
        """Give all memory back and forget every request."""
        runners = self._runners()
        self._runner = self._scheduler = self._pipeline = self._draft = None
        self._jobs.clear()
        self._speculation = Speculation()
        self._kv_bytes = 0
        for runner in reversed(runners):
            runner.unload()

    # --- inside ---------------------------------------------------------------------------------------------------

    def _loaded(self) -> tuple[ModelRunner, Scheduler]:
        if self._runner is None or self._scheduler is None:
            raise RuntimeError("the backend holds no model")
        return self._runner, self._scheduler

    def _runners(self) -> list[ModelRunner]:
        """What computes: the model, and the one that guesses for it."""
        draft = self._draft.runner if self._draft is not None else None
        return [runner for runner in (self._runner, draft) if runner is not None]

    def _row_of(self, request_id: str) -> SampleRow:
        return self._jobs[request_id].row

    def _allocate(
        self,
        runner: ModelRunner,
        spec: ModelSpec,
        max_prompts: int,
        page_tokens: int,
        report: Callable[[LoadProgress], None],
    ) -> PagePool:
        pages = kv_pages(
            asked_tokens=spec.kv_cache_tokens,
            max_prompts=max_prompts,
            max_model_len=runner.config.max_model_len,
            page_tokens=page_tokens,
            bytes_per_token=sum(each.kv_bytes_per_token() for each in self._runners()),
            free_bytes=runner.free_bytes(),
            share=CPU_SHARE if runner.devices == ("cpu",) else CUDA_SHARE,
        )
        self._kv_bytes = runner.allocate_kv(pages, page_tokens, report=report, most_sequences=max_prompts)
        if self._draft is not None:
            self._kv_bytes += self._draft.runner.allocate_kv(pages, page_tokens, report=report)
        return PagePool(pages, page_tokens, spec.prefix_salt)

    def _commit(self, plan: Plan, computed: Computed) -> list[TokenEvent]:
        tokens, sampled = computed.tokens, plan.sampled
        guessed = [chunk.guessed for chunk in plan.chunks if chunk.sample]
        known = [sequence.known for sequence in sampled]
        ids = [[token.token_id for token in new] for new in tokens]
        ended = self._loaded()[1].commit(plan, ids, computed.spoilt)
        at_end = {sequence.id for sequence in ended}
        spoilt = self._add_told(plan) | {sequence.id for sequence in computed.spoilt}
        events = [self._computed(each.id) for each in ended if not (each.answers or each.id in spoilt)]
        events += [self._end(name, "error", NOT_FINITE) for name in spoilt]
        for index, sequence in enumerate(sampled):
            if sequence.id in spoilt:
                continue
            if not ids[index] and guessed[index]:
                self._speculation.end(sequence.id)  # it goes on without guesses, one of which may have spoilt the step
                continue
            if not ids[index]:
                events.append(self._end(sequence.id, "error", self._jobs[sequence.id].why_nothing))
                continue
            self._speculation.came(sequence, guessed[index], ids[index], self._loaded()[1])
            new = tokens[index][: sequence.known - known[index]]
            events += self._jobs[sequence.id].told(new, ended=sequence.id in at_end)
            if events[-1].finish is not None:
                self.cancel(sequence.id)
        return events

    def _add_told(self, plan: Plan) -> set[str]:
        """A step counts, and what it had to tell of prompts with it; the requests for which that is not finite."""
        told = [sequence.id for sequence, chunk in zip(plan.sequences, plan.chunks, strict=True) if chunk.told]
        return {name for name in told if (telling := self._jobs[name].telling) is not None and not telling.add()}

    def _computed(self, request_id: str) -> TokenEvent:
        """The end of a request that is to have no answer: its prompt is computed."""
        event = self._jobs[request_id].computed()
        self.cancel(request_id)
        return event

    def _fail(self, plan: Plan, error: Exception) -> list[TokenEvent]:
        """End every request of a step that failed."""
        _logger.error("a step of %d requests failed", len(plan.sequences), exc_info=error)
        return [self._end(sequence.id, "error", failure_reason(error)) for sequence in plan.sequences]

    def _end(self, request_id: str, finish: FinishReason, message: str = "") -> TokenEvent:
        self.cancel(request_id)
        return TokenEvent(request_id=request_id, finish=finish, message=message)


def _raise_if(cancelled: Callable[[], bool]) -> None:
    if cancelled():
        raise LoadCancelled("the load was cancelled")
