"""Our own backend: scheduler, pages, model and sampler behind the face that every backend has."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.backends.base import (
    BackendRequest,
    BackendStats,
    FinishReason,
    LoadedModel,
    LoadProgress,
    PrefixChanges,
    SequenceStats,
    TokenEvent,
)
from engine.backends.faults import device_is_lost, is_out_of_memory, reason
from engine.backends.torch import scheduler as scheduling
from engine.backends.torch.kv_size import CPU_SHARE, CUDA_SHARE, kv_pages
from engine.backends.torch.lora import LoraAdapter
from engine.backends.torch.pages import PagePool
from engine.backends.torch.runner import ModelRunner
from engine.backends.torch.sampler import SampledToken, SampleRow, sample
from engine.backends.torch.scheduler import Plan, Scheduler
from engine.backends.torch.warm_up import warm_up
from engine.config import AdapterSpec, ModelSpec
from engine.errors import InvalidRequest, LoadCancelled

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Job:
    """A live request: its sequence for the scheduler, its row for the sampler, and the adapter that it holds."""

    sequence: scheduling.Sequence
    row: SampleRow
    adapter: LoraAdapter | None
    begun: bool = False


class TorchBackend:
    """Backend over ModelRunner. See `engine.backends.base.Backend` for what each method promises.

    A step that runs out of device memory is made smaller and done again; where it cannot get smaller, and where the
    model fails otherwise, the requests in the step end with "error" and the others go on.
    """

    def __init__(self, runner_type: type[ModelRunner] = ModelRunner) -> None:
        self._runner_type = runner_type
        self._runner: ModelRunner | None = None
        self._scheduler: Scheduler | None = None
        self._jobs: dict[str, _Job] = {}
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
        """Load weights, allocate KV pages (see `kv_size`), and run one step of the largest size."""
        self.unload()
        self._runner = runner = self._runner_type.load(spec.path, spec, report=report, cancelled=cancelled)
        try:
            _raise_if(cancelled)
            pool = self._allocate(runner, spec, max_prompts, page_tokens, report)
            _raise_if(cancelled)
            report(LoadProgress(phase="warm_up", done=0, total=1, unit="steps"))
            warm_up(runner, pool, max_prompts, step_tokens)
            report(LoadProgress(phase="warm_up", done=1, total=1, unit="steps"))
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
        return LoadedModel(
            backend="torch",
            architecture=runner.config.architecture,
            dtype=runner.dtype_name,
            devices=runner.devices,
            vocab_size=runner.config.vocab_size,
            max_model_len=runner.config.max_model_len,
            kv_tokens=pool.num_pages * page_tokens,
            page_tokens=page_tokens,
            weights_bytes=runner.weights_bytes,
            kv_bytes=self._kv_bytes,
            parameters=runner.parameters,
            active_parameters=runner.active_parameters,
            shared_bytes=runner.shared_bytes,
            attention=runner.attention.name if runner.attention else "",
            attention_reason=runner.attention.reason if runner.attention else "",
            linear=runner.linear,
            shares=runner.shares,
            adapters_per_request=True,
        )

    def submit(self, request: BackendRequest) -> None:
        """Take a request. Raises ContextLengthExceeded or InvalidRequest, naming the field. It keeps its adapter, even
        one that is detached meanwhile."""
        runner, scheduler = self._loaded()
        if request.id in self._jobs:
            raise InvalidRequest(f"a request with id {request.id} is being worked on", param="id")
        vocab = runner.config.vocab_size
        _refuse_unknown_tokens(request, vocab)
        adapter = runner.adapters.named(request.adapter)
        sequence = scheduling.Sequence(
            request.id,
            [*request.prompt_ids, *request.generated],
            prompt_tokens=len(request.prompt_ids),
            adapter=adapter.key if adapter is not None else "",
        )
        scheduler.submit(sequence)
        row = SampleRow(
            request.params,
            prompt_ids=request.prompt_ids,
            generated=request.generated,
            end_token_ids=[token_id for token_id in request.end_token_ids if token_id < vocab],
            banned_next=request.banned_next,
        )
        self._jobs[request.id] = _Job(sequence, row, adapter)

    def cancel(self, request_id: str) -> None:
        """Forget a request and free its pages."""
        job = self._jobs.pop(request_id, None)
        if job is not None and self._scheduler is not None:
            self._scheduler.remove(job.sequence)

    def set_max_prompts(self, max_prompts: int) -> None:
        """Admit up to this many from the next step on."""
        self._loaded()[1].set_max_prompts(max_prompts)

    def has_work(self) -> bool:
        """Whether any request is live."""
        return bool(self._jobs)

    def step(self) -> Sequence[TokenEvent]:
        """One forward pass for everybody, and the tokens it gave."""
        if self._scheduler is None or not self._jobs:
            return []
        events: list[TokenEvent] = []
        admit = True
        while True:
            plan = self._scheduler.plan(admit=admit)
            events += [self._end(sequence.id, "length") for sequence in plan.exhausted]
            if not plan.chunks:
                return events
            try:
                tokens = self._compute(plan)
            except Exception as error:
                if device_is_lost(error):
                    raise
                if not (is_out_of_memory(error) and self._scheduler.shrink()):
                    return events + self._fail(plan, error)
                _logger.warning(
                    "a step ran out of memory; now %d requests run at once, and prompts get %d tokens a step",
                    len(self._scheduler.running),
                    self._scheduler.step_tokens,
                )
                admit = False
                continue
            self._steps += 1
            return events + self._commit(plan, tokens)

    def stats(self) -> BackendStats:
        """Counters and gauges now."""
        if self._scheduler is None or self._runner is None:
            return BackendStats(steps=self._steps)
        scheduler, pool, counters = self._scheduler, self._scheduler.pool, self._scheduler.counters
        decoding = sum(sequence.missing == 1 for sequence in scheduler.running)
        return BackendStats(
            waiting=len(scheduler.waiting),
            prefilling=len(scheduler.running) - decoding,
            decoding=decoding,
            pages_total=pool.num_pages,
            pages_free=pool.free_pages,
            pages_cached=pool.cached_pages,
            prefix_query_tokens=counters.prefix_query_tokens,
            prefix_hit_tokens=counters.prefix_hit_tokens,
            prompt_tokens_computed=counters.prompt_tokens_computed,
            preemptions=counters.preemptions,
            steps=self._steps,
            weights_bytes=self._runner.weights_bytes,
            kv_bytes=self._kv_bytes,
            prompts_limit=scheduler.prompts_limit,
            sequences=tuple(
                SequenceStats(request_id=each.id, computed_tokens=each.computed, known_tokens=each.known)
                for each in (*scheduler.running, *scheduler.waiting)
            ),
        )

    def prefix_changes(self) -> PrefixChanges:
        """Pages that became findable or ceased to be since the last call."""
        return self._scheduler.pool.take_changes() if self._scheduler is not None else PrefixChanges()

    def attach(self, adapter: AdapterSpec) -> int:
        """Make an adapter usable from the next step on, in place of another of its name; its bytes."""
        return self._loaded()[0].adapters.attach(adapter).size_bytes

    def detach(self, name: str) -> None:
        """Take an adapter's name away; its memory is free once the last request that computes with it has ended."""
        self._loaded()[0].adapters.detach(name)

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
        runner, self._runner, self._scheduler = self._runner, None, None
        self._jobs.clear()
        self._kv_bytes = 0
        if runner is not None:
            runner.unload()

    # --- inside ---------------------------------------------------------------------------------------------------

    def _loaded(self) -> tuple[ModelRunner, Scheduler]:
        if self._runner is None or self._scheduler is None:
            raise RuntimeError("the backend holds no model")
        return self._runner, self._scheduler

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
            bytes_per_token=runner.kv_bytes_per_token(),
            free_bytes=runner.free_bytes(),
            share=CPU_SHARE if runner.devices == ("cpu",) else CUDA_SHARE,
        )
        self._kv_bytes = runner.allocate_kv(pages, page_tokens, report=report)
        return PagePool(pages, page_tokens, spec.prefix_salt)

    @torch.inference_mode()
    def _compute(self, plan: Plan) -> list[SampledToken | None]:
        logits = self._loaded()[0].forward(plan.chunks)
        rows = [self._jobs[sequence.id].row for sequence in plan.sampled]
        return sample(logits, rows) if rows else []

    def _commit(self, plan: Plan, tokens: list[SampledToken | None]) -> list[TokenEvent]:
        sampled = plan.sampled
        ended = self._loaded()[1].commit(plan, [token.token_id if token else None for token in tokens])
        at_end = {sequence.id for sequence in ended}
        events = []
        for sequence, token in zip(sampled, tokens, strict=True):
            if token is None:
                events.append(self._end(sequence.id, "error", "the model gave no finite probabilities for it"))
                continue
            job = self._jobs[sequence.id]
            job.row.push(token.token_id)
            events.append(
                TokenEvent(
                    request_id=sequence.id,
                    token_id=token.token_id,
                    logprob=token.logprob,
                    finish="length" if sequence.id in at_end else None,
                    cached_tokens=None if job.begun else sequence.cached_tokens,
                )
            )
            job.begun = True
            if sequence.id in at_end:
                del self._jobs[sequence.id]
        return events

    def _fail(self, plan: Plan, error: Exception) -> list[TokenEvent]:
        """End every request of a step that failed."""
        _logger.error("a step of %d requests failed", len(plan.sequences), exc_info=error)
        return [self._end(sequence.id, "error", reason(error)) for sequence in plan.sequences]

    def _end(self, request_id: str, finish: FinishReason, message: str = "") -> TokenEvent:
        self.cancel(request_id)
        return TokenEvent(request_id=request_id, finish=finish, message=message)


def _refuse_unknown_tokens(request: BackendRequest, vocab: int) -> None:
    """Raise InvalidRequest where a token id lies outside the vocabulary, as it would fail the step of everybody."""
    for param, token_ids in (
        ("prompt", request.prompt_ids),
        ("generated", request.generated),
        ("logit_bias", request.params.logit_bias),
        ("banned_next", request.banned_next),
    ):
        wrong = next((token_id for token_id in token_ids if not 0 <= token_id < vocab), None)
        if wrong is not None:
            raise InvalidRequest(f"{param} names token {wrong}; the model has {vocab}", param=param, value=wrong)
    if not request.prompt_ids:
        raise InvalidRequest("the prompt is empty; it takes one token at least", param="prompt")


def _raise_if(cancelled: Callable[[], bool]) -> None:
    if cancelled():
        raise LoadCancelled("the load was cancelled")
