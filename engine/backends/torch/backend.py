"""TorchBackend: scheduler, KV pages, model and sampler behind the interface of a backend."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch.distributed

from engine.backends.base import (
    BackendRequest,
    BackendStats,
    FinishReason,
    LoadedModel,
    LoadProgress,
    PrefixChanges,
    SequenceStats,
    TimeLost,
    TokenEvent,
    TokenMask,
)
from engine.backends.common.kv_format import CPU_SHARE, CUDA_SHARE, kv_pages
from engine.backends.common.kv_tiers import KvTiers, files_stamp, loaded_stamp, open_tiers, pages_digest
from engine.backends.common.step_memory import max_answer_rows
from engine.backends.sampling.sampler import NOT_FINITE, SampleRow, sample
from engine.backends.scheduler.batch import ChunkInput
from engine.backends.scheduler.page_pool import PagePool
from engine.backends.scheduler.scheduler import Scheduler, refuse_unknown_tokens
from engine.backends.scheduler.sequences import BatchPlan
from engine.backends.torch.determinism import adapters_refusal
from engine.backends.torch.device_memory import StepOutOfMemory
from engine.backends.torch.pipeline import ActiveRequest, Pipeline, StepResult
from engine.backends.torch.runner import ModelRunner
from engine.backends.torch.speculation.draft_model import DraftModel
from engine.backends.torch.speculation.speculation import Speculation
from engine.backends.torch_device import ends_worker, failure_reason, is_device_lost, is_out_of_memory
from engine.config import AdapterSpec, ModelSpec, SamplingParams
from engine.errors import Detail, InsufficientMemory, InvalidRequest, LoadCancelled, WorkerFailed

# Description and statistics of a loaded model.


def describe_model(
    runner: ModelRunner, pool: PagePool, kv_bytes: int, draft: DraftModel | None = None, *, step_s: float
) -> LoadedModel:
    """Describe a model whose KV pages are allocated. kv_bytes: of its draft model too.  step_s: of its largest step."""
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
        rank_pids=runner.rank_pids,
    )


def leader_runner() -> type[ModelRunner]:
    """Return the runner of a model that is split over ranks. Raises InvalidRequest where torch cannot."""
    if not torch.distributed.is_available():
        raise InvalidRequest(
            "tensor_parallel_size is not supported: this build of torch has no torch.distributed",
            param="tensor_parallel_size",
        )
    from engine.backends.torch.parallel.leader import LeaderRunner

    return LeaderRunner


def backend_stats(
    runner: ModelRunner,
    scheduler: Scheduler,
    speculation: Speculation,
    tiers: KvTiers | None,
    *,
    steps: int,
    kv_bytes: int,
) -> BackendStats:
    """Return counters and gauges now."""
    pool, counters, running = scheduler.pool, scheduler.counters, scheduler.running
    decoding = sum(sequence.num_uncomputed == 1 for sequence in running)
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
        draft_tokens=sum(position.drafted for position in speculation.positions),
        draft_accepted=sum(position.accepted for position in speculation.positions),
        drafts=speculation.positions,
        prompts_limit=scheduler.limits.prompts_limit,
        oom_steps=counters.oom_steps,
        sequences=tuple(
            SequenceStats(
                request_id=each.id,
                computed_tokens=each.computed,
                known_tokens=each.num_tokens,
                cached_tokens=min(each.cached_tokens or 0, each.computed),
            )
            for each in (*running, *scheduler.waiting)
        ),
        limited=dict(scheduler.times.limited),
        itl=scheduler.pacing.report(),
        kv_tiers=tiers.stats() if tiers is not None else (),
        restored_tokens=counters.restored_tokens,
    )


# The first step of a model that was just loaded.

CPU_WARM_UP_TOKENS = 64
"""Prompt tokens of the warm-up on a CPU, where more of them would only take time."""


def warm_up(
    runner: ModelRunner,
    pool: PagePool,
    max_answers: int,
    step_tokens: int,
    *,
    adapters: bool = True,
    report: Callable[[LoadProgress], None] = lambda progress: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> float:
    """Run the largest possible step, so that its memory is allocated and its kernels are compiled before the first
    request: step_tokens of prompt, and max_answers rows to sample. All write to the same free pages. Then steps of
    few tokens are recorded as CUDA graphs, where possible; with `adapters` too if requests may have some. On a CPU a
    smaller step runs, and the largest is only accounted for; none runs where an earlier worker left pages, which it
    would overwrite.

    Returns the seconds of the largest step, extrapolated on a CPU. Raises InsufficientMemory, or LoadCancelled between
    two recordings.
    """
    chunks = _largest_step(runner, pool, max_answers, step_tokens)
    try:
        computed = chunks
        if runner.kv.file is not None and runner.kv.file.found:
            runner.account_for(chunks)
            return 0.0
        if runner.on_cpu and step_tokens > CPU_WARM_UP_TOKENS:
            runner.account_for(chunks)
            computed = _largest_step(runner, pool, max_answers, CPU_WARM_UP_TOKENS)
        row = SampleRow(SamplingParams(temperature=1.0, top_p=0.9, seed=0), prompt_ids=[0])
        started_s = time.perf_counter()
        logits = runner.forward(computed)
        sample(logits, [row] * len(computed))
        step_s = time.perf_counter() - started_s
        runner.record_decodes(
            max_answers,
            step_tokens,
            adapters=adapters,
            report=report,
            proceed=lambda: _raise_if_cancelled(cancelled),
        )
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise InsufficientMemory(
            f"the weights and KV pages fit on {', '.join(runner.devices)}, but a step of {step_tokens} tokens and "
            f"{max_answers} answers does not: {error}; reduce kv_cache_tokens, max_prompts or step_tokens",
            **_memory_details(runner, error),
        ) from error
    return step_s * _num_tokens(chunks) / _num_tokens(computed)


def _largest_step(runner: ModelRunner, pool: PagePool, max_answers: int, step_tokens: int) -> list[ChunkInput]:
    longest = min(step_tokens, runner.config.max_model_len, pool.num_pages * pool.page_tokens)
    pages = list(range(pool.pages_for(longest)))
    chunks = [ChunkInput([0] * longest, 0, pages, sample=True)] * max(1, step_tokens // longest)
    chunks += [ChunkInput([0], longest - 1, pages, sample=True)] * max(0, max_answers - len(chunks))
    return chunks


def _num_tokens(chunks: Sequence[ChunkInput]) -> int:
    return sum(len(chunk.token_ids) for chunk in chunks)


def _memory_details(runner: ModelRunner, error: Exception) -> dict[str, Detail]:
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
    """Backend over ModelRunner. `engine.backends.base.Backend` has the contract of each method.

    A step that runs out of device memory is repeated with fewer tokens or requests. Where that is not possible, or the
    model fails otherwise, the requests in the step end with "error" and the others go on. A lost device ends the
    worker, not its requests.
    """

    def __init__(self, runner_type: type[ModelRunner] = ModelRunner) -> None:
        self._runner_type = runner_type
        self._runner: ModelRunner | None = None
        self._scheduler: Scheduler | None = None
        self._pipeline: Pipeline | None = None
        self._requests: dict[str, ActiveRequest] = {}
        self._draft: DraftModel | None = None
        self._tiers: KvTiers | None = None
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
        """Load weights, allocate KV pages (see `kv_pages`), and run a step (see `warm_up`)."""
        self.unload()
        stamp: Sequence[str] = files_stamp(spec)
        runner_type = leader_runner() if spec.tensor_parallel_size > 1 else self._runner_type
        self._runner = runner = runner_type.load(spec.path, spec, report=report, cancelled=cancelled)
        try:
            if spec.draft_model is not None:
                self._draft = DraftModel.load(spec, runner, report=report, cancelled=cancelled)
            _raise_if_cancelled(cancelled)
            stamp = loaded_stamp(spec, stamp)
            pool = self._allocate_pages(runner, spec, stamp, max_prompts, page_tokens, report)
            _raise_if_cancelled(cancelled)

            def compiled(done: int, total: int) -> None:
                _raise_if_cancelled(cancelled)
                report(LoadProgress(phase="kernels", done=done, total=total, unit="steps"))

            for each in self._runners():
                each.prepare_attention(compiled)
            report(LoadProgress(phase="warm_up", done=0, total=1, unit="steps"))
            max_answers = max_answer_rows(spec, max_prompts)
            step_s = sum(
                warm_up(
                    *(each, pool, max_answers, step_tokens), adapters=each is runner, report=report, cancelled=cancelled
                )
                for each in self._runners()
            )
            report(LoadProgress(phase="warm_up", done=1, total=1, unit="steps"))
            for each in self._runners():
                each.enlarge_pages()
            self._tiers = open_tiers(spec, runner.kv, pages_digest(spec, stamp, runner.kv_facts(page_tokens)))
            _raise_if_cancelled(cancelled)
        except BaseException:
            self.unload()
            raise
        self._scheduler = Scheduler(
            pool,
            max_prompts=max_prompts,
            step_tokens=step_tokens,
            max_model_len=runner.config.max_model_len,
            max_input_len=spec.max_input_len,
            clock=time.monotonic,
            tiers=self._tiers,
        )
        self._pipeline = Pipeline(runner, self._scheduler, self._requests)
        self._speculation = Speculation(ngram=spec.ngram_draft, draft=self._draft, max_drafts=spec.draft_tokens)
        return describe_model(runner, pool, self._kv_bytes, self._draft, step_s=step_s)

    def submit(self, request: BackendRequest, mask: TokenMask | None = None) -> None:
        """Queue a request. Raises ContextLengthExceeded or InvalidRequest, naming the field. It keeps its adapter, even
        if that is detached meanwhile."""
        runner, scheduler = self._loaded()
        if request.id in self._requests:
            raise InvalidRequest(f"request id {request.id} is already in use", param="id")
        vocab_size = runner.config.vocab_size
        refuse_unknown_tokens(request, vocab_size)
        active = ActiveRequest.create(request, runner.adapters.find(request.adapter), mask, vocab_size)
        scheduler.submit(active.sequence)
        self._requests[request.id] = active
        if active.allows_drafts:
            self._speculation.begin(request.id, active.sequence.token_ids)

    def cancel(self, request_id: str) -> None:
        """Remove a request and free its pages."""
        active = self._requests.pop(request_id, None)
        self._speculation.end(request_id)
        if active is not None and self._scheduler is not None:
            self._scheduler.remove(active.sequence)

    def set_max_prompts(self, max_prompts: int) -> None:
        """Set the max running requests from the next step on."""
        self._loaded()[1].limits.set_max_prompts(max_prompts)

    def set_step_tokens(self, step_tokens: int) -> None:
        """Set the max tokens of a step from the next one on."""
        self._loaded()[1].limits.set_step_tokens(step_tokens)

    def set_itl_target(self, target_s: float | None) -> None:
        """Set the time between tokens that steps keep from the next one on."""
        self._loaded()[1].pacing.set_target(target_s)

    def has_work(self) -> bool:
        """Return whether a request is active, or a launched step is to be read back."""
        if self._runner is not None:
            self._runner.check_ranks()
        return bool(self._requests) or (self._pipeline is not None and self._pipeline.has_pending)

    @ends_worker()
    def step(self) -> Sequence[TokenEvent]:
        """Run one forward pass, and return the events of its requests."""
        if self._scheduler is None or self._pipeline is None or not self.has_work():
            return []
        events: list[TokenEvent] = []
        admit = True
        while True:
            pending = self._pipeline.pending_plan() if self._pipeline.has_pending else None
            plan = pending or self._scheduler.plan(admit=admit)
            events += [self._end(sequence.id, "length") for sequence in plan.exhausted]
            if not plan.chunks:
                return events
            if admit and pending is None:
                self._speculation.add_drafts(plan, self._scheduler, self._sample_row)
            try:
                result = self._pipeline.run(plan, self._speculation)
                self._loaded()[0].check_ranks()
            except Exception as error:
                if is_device_lost(error) or isinstance(error, WorkerFailed):
                    raise
                if not (is_out_of_memory(error) and self._scheduler.shrink()):
                    return events + self._fail(plan, error)
                _logger.warning(
                    "a step ran out of memory; max prompts is now %d, with %d prompt tokens per step",
                    len(self._scheduler.running),
                    self._scheduler.limits.step_tokens,
                )
                admit = False
                continue
            self._steps += 1
            return events + self._commit(plan, result)

    def stats(self) -> BackendStats:
        """Return counters and gauges now."""
        if self._scheduler is None or self._runner is None:
            return BackendStats(steps=self._steps)
        return backend_stats(
            self._runner, self._scheduler, self._speculation, self._tiers, steps=self._steps, kv_bytes=self._kv_bytes
        )

    def time_lost(self, request_id: str) -> TimeLost:
        """Return what a request has lost."""
        return self._scheduler.times.lost(request_id) if self._scheduler is not None else TimeLost()

    def prefix_changes(self) -> PrefixChanges:
        """Return the pages that became findable or ceased to be since the last call."""
        return self._scheduler.pool.take_changes() if self._scheduler is not None else PrefixChanges()

    def attach(self, adapter: AdapterSpec) -> int:
        """Load an adapter for the next steps, in place of another with its key; return its bytes."""
        runner = self._loaded()[0]
        if runner.deterministic:
            raise adapters_refusal()
        return runner.adapters.attach(adapter).size_bytes

    def detach(self, key: str) -> None:
        """Remove an adapter; its memory is freed once the last request with it has ended."""
        self._loaded()[0].adapters.detach(key)

    def check(self) -> None:
        """Verify that pages, sequences and requests agree. Raises AssertionError with the numbers."""
        if self._scheduler is None:
            assert not self._requests, f"{len(self._requests)} requests without a model"
            return
        self._scheduler.check()
        scheduled = {sequence.id for sequence in (*self._scheduler.running, *self._scheduler.waiting)}
        assert scheduled == self._requests.keys(), f"{len(scheduled)} sequences for {len(self._requests)} requests"

    def unload(self) -> None:
        """Free all memory and remove every request."""
        runners, tiers = self._runners(), self._tiers
        self._runner = self._scheduler = self._pipeline = self._draft = self._tiers = None
        if tiers is not None:
            tiers.close()
        self._requests.clear()
        self._speculation = Speculation()
        self._kv_bytes = 0
        for runner in reversed(runners):
            runner.unload()

    # --- inside ---------------------------------------------------------------------------------------------------

    def _loaded(self) -> tuple[ModelRunner, Scheduler]:
        if self._runner is None or self._scheduler is None:
            raise RuntimeError("no model is loaded")
        return self._runner, self._scheduler

    def _runners(self) -> list[ModelRunner]:
        """The model's runner, and that of its draft model."""
        draft = self._draft.runner if self._draft is not None else None
        return [runner for runner in (self._runner, draft) if runner is not None]

    def _sample_row(self, request_id: str) -> SampleRow:
        return self._requests[request_id].row

    def _allocate_pages(
        self,
        runner: ModelRunner,
        spec: ModelSpec,
        stamp: Sequence[str],
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
            fills_device=runner.devices[0].startswith("cuda"),
        )
        self._kv_bytes = runner.allocate_kv(
            pages,
            page_tokens,
            report=report,
            max_sequences=max_prompts,
            name_file=lambda facts: (
                f"ericllm-kv-{spec.kv_file}-{pages_digest(spec, stamp, facts)}" if spec.kv_file else ""
            ),
        )
        if self._draft is not None:
            self._kv_bytes += self._draft.runner.allocate_kv(pages, page_tokens, report=report)
        file = runner.kv.file
        return PagePool(pages, page_tokens, spec.prefix_salt, file.index if file is not None else None)

    def _commit(self, plan: BatchPlan, result: StepResult) -> list[TokenEvent]:
        """Commit a step, and return the events of its requests."""
        scheduler, speculation = self._loaded()[1], self._speculation
        ids = [[token.token_id for token in tokens] for tokens in result.tokens]
        ended = scheduler.commit(plan, ids, result.nonfinite)
        nonfinite = self._commit_prompt_outputs(plan) | {sequence.id for sequence in result.nonfinite}
        events = [self._end_prompt(each.id) for each in ended if not (each.generates or each.id in nonfinite)]
        events += [self._end(name, "error", NOT_FINITE) for name in nonfinite]
        ended_ids = {sequence.id for sequence in ended}
        chunks = [chunk for chunk in plan.chunks if chunk.sample]
        for sequence, chunk, tokens, token_ids in zip(plan.sampled_sequences, chunks, result.tokens, ids, strict=True):
            if sequence.id in nonfinite:
                continue
            if not tokens and chunk.num_drafts:
                speculation.end(sequence.id)  # it goes on without drafts, one of which may have caused this
                continue
            if not tokens:
                events.append(self._end(sequence.id, "error", self._requests[sequence.id].row.no_token_reason))
                continue
            if speculation.enabled:
                speculation.record_result(sequence, chunk.num_drafts, token_ids, scheduler)
            events += self._requests[sequence.id].token_events(tokens, ended=sequence.id in ended_ids)
            if events[-1].finish is not None:
                self.cancel(sequence.id)
        return events

    def _commit_prompt_outputs(self, plan: BatchPlan) -> set[str]:
        """Commit what was read of prompts in a step; return the requests for which it is not finite."""
        nonfinite: set[str] = set()
        for sequence, chunk in zip(plan.sequences, plan.chunks, strict=True):
            output = self._requests[sequence.id].prompt_output if chunk.prompt_states else None
            if output is not None and not output.add():
                nonfinite.add(sequence.id)
        return nonfinite

    def _end_prompt(self, request_id: str) -> TokenEvent:
        """End a request without an answer, whose prompt is computed."""
        event = self._requests[request_id].prompt_event()
        self.cancel(request_id)
        return event

    def _fail(self, plan: BatchPlan, error: Exception) -> list[TokenEvent]:
        """End every request of a failed step."""
        _logger.error("a step of %d requests failed", len(plan.sequences), exc_info=error)
        return [self._end(sequence.id, "error", failure_reason(error)) for sequence in plan.sequences]

    def _end(self, request_id: str, finish: FinishReason, message: str = "") -> TokenEvent:
        self.cancel(request_id)
        return TokenEvent(request_id=request_id, finish=finish, message=message)


def _raise_if_cancelled(cancelled: Callable[[], bool]) -> None:
    if cancelled():
        raise LoadCancelled("the load was cancelled")
