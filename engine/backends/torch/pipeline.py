"""Pipeline: launches steps of the model, samples from them and reads the tokens back; where the device runs by itself,
the next step is launched before this one is read.

    synchronous (a CPU)     launch N | sample N | read N
    asynchronous            sample N | launch N + 1 with the sampled ids | read N | ... sample N + 1 | ...

Between the read of N and the sampling of N + 1 the tokens of N are committed, and requests are cancelled. So penalties,
grammars and seeds are as they would be without asynchronous scheduling; only work for requests that ended meanwhile is
lost.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from engine.backends.base import BackendRequest, TokenEvent, TokenMask
from engine.backends.sampling.sampler import SampledToken, SampleRow, draw
from engine.backends.sampling.sampling_tensors import to_device
from engine.backends.scheduler.async_scheduling import async_obstacle, plan_next_step
from engine.backends.scheduler.batch import ChunkInput
from engine.backends.scheduler.scheduler import Scheduler
from engine.backends.scheduler.sequences import BatchPlan
from engine.backends.scheduler.sequences import Sequence as TokenSequence
from engine.backends.torch.model.lora import LoraAdapter
from engine.backends.torch.prompt_logprobs import FinalStates, PromptOutput, prompt_output_for
from engine.backends.torch.runner import ModelRunner
from engine.backends.torch.speculation.ngram import accepted
from engine.backends.torch.speculation.speculation import Speculation
from engine.backends.torch_device import failure_reason, is_device_lost

# One active request of the torch backend, and its events.


@dataclass(slots=True)
class ActiveRequest:
    """A request: its sequence for the scheduler, its row for the sampler, its adapter, and the output about its prompt,
    until that is sent."""

    sequence: TokenSequence
    row: SampleRow
    adapter: LoraAdapter | None
    prompt_output: PromptOutput | None
    started: bool = False

    @classmethod
    def create(
        cls, request: BackendRequest, adapter: LoraAdapter | None, mask: TokenMask | None, vocab_size: int
    ) -> ActiveRequest:
        """Return the state of a new request."""
        prompt_output = prompt_output_for(request)
        prompt_tokens, max_tokens = len(request.prompt_ids), request.params.max_tokens
        sequence = TokenSequence(
            request.id,
            [*request.prompt_ids, *request.generated],
            prompt_tokens=prompt_tokens,
            adapter=adapter.key if adapter is not None else "",
            cache_scope=request.cache_scope,
            shared_tokens=request.shared_tokens,
            generates=max_tokens != 0,
            limit=None if max_tokens is None else prompt_tokens + max_tokens,
            states_wanted=prompt_output.until if prompt_output is not None else 0,
            resumed=request.resumed,
            client=request.client,
        )
        row = SampleRow(
            request.params,
            prompt_ids=request.prompt_ids,
            generated=request.generated,
            end_token_ids=[token_id for token_id in request.end_token_ids if token_id < vocab_size],
            banned_next=request.banned_next,
            mask=mask,
        )
        return cls(sequence, row, adapter, prompt_output)

    @property
    def allows_drafts(self) -> bool:
        """True if draft tokens may be used for it."""
        return self.row.foreseeable and self.sequence.generates

    def token_events(self, tokens: Sequence[SampledToken], *, ended: bool) -> Iterator[TokenEvent]:
        """Take its new tokens, and return their events. ended: True if they are its last ones."""
        for remaining, token in zip(reversed(range(len(tokens))), tokens, strict=True):
            self.row.push(token.token_id)
            complete = self.row.mask is not None and self.row.mask.is_complete
            yield TokenEvent(
                request_id=self.sequence.id,
                token_id=token.token_id,
                logprob=token.logprob,
                finish="stop" if complete else "length" if ended and not remaining else None,
                cached_tokens=None if self.started else self.sequence.cached_tokens,
                prompt_logprobs=self.prompt_output.logprobs if self.prompt_output is not None else (),
            )
            self.started, self.prompt_output = True, None

    def prompt_event(self) -> TokenEvent:
        """Return its only event, where it has no answer and its prompt is computed."""
        vector = self.prompt_output.vector if self.prompt_output is not None else b""
        return TokenEvent(
            request_id=self.sequence.id,
            finish="stop" if vector else "length",
            cached_tokens=self.sequence.cached_tokens,
            prompt_logprobs=self.prompt_output.logprobs if self.prompt_output is not None else (),
            vector=vector,
        )


_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A step that was launched. logits: of the rows to sample.  written: pages pinned until it is done.
    prefilled, finite: the sequences that it prefills, and `ModelRunner.finite` of them.  best: `ModelRunner.best`."""

    plan: BatchPlan
    logits: Tensor
    started_s: float
    prefilled: Sequence[TokenSequence] = ()
    finite: Tensor | None = None
    best: Tensor | None = None
    written: list[int] = field(default_factory=list)

    def without_finished(self) -> InFlightStep:
        """Return the step without sequences that were removed meanwhile: those have no pages."""
        return self.without({sequence for sequence in self.plan.sequences if not sequence.pages})

    def without(self, dropped: Collection[TokenSequence]) -> InFlightStep:
        """Return the step without these sequences, for which nothing of it counts."""
        pairs = list(zip(self.plan.sequences, self.plan.chunks, strict=True))
        remaining = [pair for pair in pairs if pair[0] not in dropped]
        if len(remaining) == len(pairs):
            return self
        rows = [row for row, sequence in enumerate(self.plan.sampled_sequences) if sequence not in dropped]
        logits = self.logits.index_select(0, to_device(torch.tensor(rows, dtype=torch.int64), self.logits.device))
        plan = replace(
            self.plan,
            sequences=[sequence for sequence, _ in remaining],
            chunks=[chunk for _, chunk in remaining],
            prompts=[pair for pair in self.plan.prompts if pair[0] not in dropped],
            dropped=[*self.plan.dropped, *(chunk for sequence, chunk in pairs if sequence in dropped)],
        )
        return replace(self, plan=plan, logits=logits, best=None)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a step. tokens: per sequence of `plan.sampled_sequences`, one, plus one per accepted draft; none if its
    logits are not valid.  nonfinite: prefilled sequences whose hidden states are not finite."""

    tokens: list[list[SampledToken]]
    nonfinite: Sequence[TokenSequence] = ()


class Pipeline:
    """Runs the steps of one loaded model. requests: all active ones, by id."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, requests: Mapping[str, ActiveRequest]) -> None:
        self._runner, self._scheduler, self._requests = runner, scheduler, requests
        self._in_flight: InFlightStep | None = None

    @property
    def has_pending(self) -> bool:
        """True if a step is launched that is not read back."""
        return self._in_flight is not None

    @torch.inference_mode()
    def pending_plan(self) -> BatchPlan | None:
        """Return the plan of the launched step, without finished sequences; None where there is none."""
        if self._in_flight is None:
            return None
        self._in_flight = self._in_flight.without_finished()
        if not self._in_flight.plan.chunks:
            self.drop()
        return self._in_flight.plan if self._in_flight is not None else None

    @torch.inference_mode()
    def run(self, plan: BatchPlan, speculation: Speculation) -> StepResult:
        """Run the step of `plan`, which is `pending_plan` if there is one. After an error nothing of it counts."""
        step, self._in_flight = self._in_flight or self._launch(plan), None
        try:
            return self._finish(step, speculation)
        except BaseException:
            self.drop()
            raise
        finally:
            self._unpin(step)

    def drop(self) -> None:
        """Drop the launched step, if there is one: nothing of it counts, and it can be planned again."""
        step, self._in_flight = self._in_flight, None
        try:
            if self._runner.readback is not None:
                self._runner.readback.mark()()  # it may still write to its pages
        finally:
            if step is not None:
                self._unpin(step)

    def _launch(self, plan: BatchPlan, drawn: Tensor | None = None) -> InFlightStep:
        started_s = time.perf_counter()
        logits = self._runner.forward(plan.chunks, partial(self._read_prompt_states, plan), drawn)
        prefilled = [each for each, chunk in zip(plan.sequences, plan.chunks, strict=True) if chunk.prefills]
        return InFlightStep(plan, logits, started_s, prefilled, self._runner.finite, self._runner.best)

    def _launch_next(self, running: BatchPlan, drawn: Tensor, *, speculates: bool) -> InFlightStep | None:
        """Launch the step after `running` with the sampled ids `drawn`; None where it has to wait for the read."""
        if async_obstacle(running, self._scheduler, speculates=speculates):
            return None
        plan = plan_next_step(running, self._scheduler)
        if not plan.chunks:
            return None
        try:
            step = self._launch(plan, drawn)
        except Exception as error:
            if is_device_lost(error):
                raise
            _logger.debug("the next step is not launched yet: %s", failure_reason(error))
            return None  # it is planned again once this one is read, and may fail then
        return replace(step, written=self._scheduler.pin_written(plan))

    def _finish(self, step: InFlightStep, speculation: Speculation) -> StepResult:
        chunks = [chunk for chunk in step.plan.chunks if chunk.sample]
        rows = self._sample_rows(step.plan, chunks)
        tokens, finite = self._read(step, rows, speculation)
        nonfinite = [each for each, good in zip(step.prefilled, finite, strict=False) if each.pages and not good]
        if len(rows) == sum(len(chunk.token_ids) for chunk in step.plan.chunks):
            speculation.record_step(len(rows), len(chunks), time.perf_counter() - step.started_s)
        if len(rows) == len(chunks):  # no draft tokens
            return StepResult([[] if token is None else [token] for token in tokens], nonfinite)
        remaining = iter(tokens)
        accepted_tokens = [
            _accepted_tokens(chunk, list(itertools.islice(remaining, chunk.num_sampled))) for chunk in chunks
        ]
        return StepResult(accepted_tokens, nonfinite)

    def _sample_rows(self, plan: BatchPlan, chunks: Sequence[ChunkInput]) -> list[SampleRow]:
        rows: list[SampleRow] = []
        for sequence, chunk in zip(plan.sampled_sequences, chunks, strict=True):
            row = self._requests[sequence.id].row
            rows.append(row)
            if chunk.num_drafts:
                rows += [row.ahead(tokens) for tokens in range(1, chunk.num_sampled)]
        return rows

    def _read(
        self, step: InFlightStep, rows: Sequence[SampleRow], speculation: Speculation
    ) -> tuple[list[SampledToken | None], list[bool]]:
        """Sample, and read the tokens back, and whether the prefilled sequences are finite, if that was checked.
        Meanwhile the next step is launched; a row of it that follows an undecided token is dropped."""
        readback, finite = self._runner.readback, step.finite
        drawn = draw(step.logits, rows, wait=readback is None, find_best=self._runner.find_best, best=step.best)
        if readback is None:
            return drawn.tokens(), [] if finite is None else finite.tolist()
        finite = None if finite is None else readback.fetch(finite)
        copied, wait = drawn.map_tensors(readback.fetch), readback.mark()
        self._in_flight = self._launch_next(step.plan, drawn.ids, speculates=speculation.enabled)
        wait()
        tokens = copied.tokens()
        for row, token in copied.draw_undecided(rows).items():
            tokens[row] = token
            if self._in_flight is not None:
                self._in_flight = self._in_flight.without({step.plan.sampled_sequences[row]})
        return tokens, [] if finite is None else finite.tolist()

    def _unpin(self, step: InFlightStep) -> None:
        if step.written:
            self._scheduler.unpin_written(step.written)

    def _read_prompt_states(self, plan: BatchPlan, index: int, states: FinalStates) -> None:
        """Read the final states of a prompt, that of sequence number `index` of the step."""
        prompt_output = self._requests[plan.sequences[index].id].prompt_output
        assert prompt_output is not None, f"{plan.sequences[index].id} has no output about its prompt"
        prompt_output.read(plan.chunks[index], states)


def _accepted_tokens(chunk: ChunkInput, drawn: Sequence[SampledToken | None]) -> list[SampledToken]:
    """Return the valid tokens of those sampled for a chunk: its own, and one more per accepted draft."""
    drafts = chunk.token_ids[len(chunk.token_ids) - chunk.num_drafts :]
    count = accepted(drafts, [token.token_id if token is not None else None for token in drawn])
    return [token for token in drawn[:count] if token is not None]
