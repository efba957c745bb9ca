"""Steps on their way through the model: launched, drawn from, read. Where the device runs by itself, the next one is
launched before this one is read.

    wait for everything (a CPU)      launch N | draw N | read N
    ahead (see `ahead`)              draw N | launch N + 1, its ids out of N's draws | read N | ... draw N + 1 | ...

Between the read of N and the draw of N + 1 the tokens of N are handed out and counted, and requests are cancelled. So
whatever a draw depends on, penalties, grammars and seeds, it finds as it would without planning ahead; and only what
the device computes for the requests that ended meanwhile is lost.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from engine.backends.base import BackendRequest, TokenEvent, TokenMask
from engine.backends.scheduler.async_scheduling import async_obstacle, plan_next_step
from engine.backends.scheduler.batch import ChunkInput
from engine.backends.scheduler.scheduler import Scheduler
from engine.backends.scheduler.sequences import Plan
from engine.backends.scheduler.sequences import Sequence as TokenSequence
from engine.backends.torch.model.lora import LoraAdapter
from engine.backends.torch.runner import ModelRunner
from engine.backends.torch.sampling.prompt_logprobs import FinalStates, PromptOutput, prompt_output_for
from engine.backends.torch.sampling.sampler import SampledToken, SamplerOutput, SampleRow, draw
from engine.backends.torch.sampling.sampling_tensors import to_device
from engine.backends.torch.speculation.ngram import held
from engine.backends.torch.speculation.speculation import Speculation
from engine.backends.torch_common.errors import failure_reason, is_device_lost

# One live request of the torch backend, and what it tells of each step that brought it something.

NOT_FINITE = "the model gave no finite probabilities for it"


@dataclass(slots=True)
class Job:
    """A request's sequence for the scheduler, its row for the sampler, the adapter that it holds, and what is still to
    be told of its prompt."""

    sequence: TokenSequence
    row: SampleRow
    adapter: LoraAdapter | None
    telling: PromptOutput | None
    begun: bool = False

    @classmethod
    def of(cls, request: BackendRequest, adapter: LoraAdapter | None, mask: TokenMask | None, vocab_size: int) -> Job:
        """A request, before anything of it happens."""
        telling = prompt_output_for(request)
        prompt_tokens, most = len(request.prompt_ids), request.params.max_tokens
        sequence = TokenSequence(
            request.id,
            [*request.prompt_ids, *request.generated],
            prompt_tokens=prompt_tokens,
            adapter=adapter.key if adapter is not None else "",
            cache_scope=request.cache_scope,
            shared_tokens=request.shared_tokens,
            answers=most != 0,
            limit=prompt_tokens + most if most is not None else None,
            tell=telling.until if telling is not None else 0,
            resumed=request.resumed,
        )
        row = SampleRow(
            request.params,
            prompt_ids=request.prompt_ids,
            generated=request.generated,
            end_token_ids=[token_id for token_id in request.end_token_ids if token_id < vocab_size],
            banned_next=request.banned_next,
            mask=mask,
        )
        return cls(sequence, row, adapter, telling)

    @property
    def foreseeable(self) -> bool:
        """Whether tokens may be guessed ahead of it."""
        return self.row.foreseeable and self.sequence.answers

    def told(self, tokens: Sequence[SampledToken], *, ended: bool) -> Iterator[TokenEvent]:
        """Take its new tokens; ended: whether they are its last ones."""
        for left, token in zip(reversed(range(len(tokens))), tokens, strict=True):
            self.row.push(token.token_id)
            whole = self.row.mask is not None and self.row.mask.ended
            yield TokenEvent(
                request_id=self.sequence.id,
                token_id=token.token_id,
                logprob=token.logprob,
                finish="stop" if whole else "length" if ended and not left else None,
                cached_tokens=None if self.begun else self.sequence.cached_tokens,
                prompt_logprobs=self.telling.logprobs if self.telling is not None else (),
            )
            self.begun, self.telling = True, None

    def computed(self) -> TokenEvent:
        """Its end, where it is to have no answer and its prompt is computed."""
        vector = self.telling.vector if self.telling is not None else b""
        return TokenEvent(
            request_id=self.sequence.id,
            finish="stop" if vector else "length",
            cached_tokens=self.sequence.cached_tokens,
            prompt_logprobs=self.telling.logprobs if self.telling is not None else (),
            vector=vector,
        )

    @property
    def why_nothing(self) -> str:
        """Why no token could be chosen for it."""
        mask = self.row.mask
        return NOT_FINITE if mask is None or not mask.error else f"its grammar allows nothing more: {mask.error}"


_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A step that the device was given. logits: of the rows to draw for.  written: pages held until it is done.
    prefilled, finite: the sequences that it prefills, and `ModelRunner.finite` of them."""

    plan: Plan
    logits: Tensor
    began_s: float
    prefilled: Sequence[TokenSequence] = ()
    finite: Tensor | None = None
    written: list[int] = field(default_factory=list)

    def without_ended(self) -> InFlightStep:
        """The same for the sequences that still run: one that was removed holds no pages."""
        pairs = list(zip(self.plan.sequences, self.plan.chunks, strict=True))
        left = [pair for pair in pairs if pair[0].pages]
        if len(left) == len(pairs):
            return self
        rows = [row for row, sequence in enumerate(self.plan.sampled) if sequence.pages]
        logits = self.logits.index_select(0, to_device(torch.tensor(rows, dtype=torch.int64), self.logits.device))
        plan = Plan([sequence for sequence, _ in left], [chunk for _, chunk in left])
        return replace(self, plan=plan, logits=logits)


@dataclass(frozen=True, slots=True)
class Computed:
    """What a step gave. tokens: of each sequence of `plan.sampled`, one, as many more as guesses held, or none where
    there was nothing to draw from.  spoilt: sequences that it prefilled and whose numbers are not finite."""

    tokens: list[list[SampledToken]]
    spoilt: Sequence[TokenSequence] = ()


class Pipeline:
    """The steps of one loaded model. jobs: of all live requests, by id."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, jobs: Mapping[str, Job]) -> None:
        self._runner, self._scheduler, self._jobs = runner, scheduler, jobs
        self._ahead: InFlightStep | None = None

    @property
    def ahead(self) -> bool:
        """Whether a step is launched that nobody has read."""
        return self._ahead is not None

    @torch.inference_mode()
    def launched(self) -> Plan | None:
        """What is left of the step that was launched ahead, to be computed next; None where nothing is."""
        if self._ahead is None:
            return None
        self._ahead = self._ahead.without_ended()
        if not self._ahead.plan.chunks:
            self.drop()
        return self._ahead.plan if self._ahead is not None else None

    @torch.inference_mode()
    def compute(self, plan: Plan, speculation: Speculation) -> Computed:
        """What the step of `plan` gives.

        plan: what is `launched`, where anything is. After an error nothing of it counts, and `drop` is to be called.
        """
        step, self._ahead = self._ahead or self._launch(plan), None
        try:
            return self._computed(step, speculation)
        except BaseException:
            self.drop()
            raise
        finally:
            self._let_go(step)

    def drop(self) -> None:
        """Forget the step that was launched ahead, if one was: nothing of it counts, and all can be planned again."""
        ahead, self._ahead = self._ahead, None
        try:
            if self._runner.landing is not None:
                self._runner.landing.mark()()  # it may still write to its pages
        finally:
            if ahead is not None:
                self._let_go(ahead)

    def _launch(self, plan: Plan, drawn: Tensor | None = None) -> InFlightStep:
        began_s = time.perf_counter()
        logits = self._runner.forward(plan.chunks, partial(self._tell, plan), drawn)
        prefilled = [each for each, chunk in zip(plan.sequences, plan.chunks, strict=True) if chunk.prefills]
        return InFlightStep(plan, logits, began_s, prefilled, self._runner.finite)

    def _launch_behind(self, running: Plan, drawn: Tensor, *, guesses: bool) -> InFlightStep | None:
        """The step after `running`, with what is drawn there for its ids; None where it waits for those to be read."""
        if async_obstacle(running, self._scheduler, guesses=guesses):
            return None
        plan = plan_next_step(running, self._scheduler)
        if not plan.chunks:
            return None
        try:
            step = self._launch(plan, drawn)
        except Exception as error:
            if is_device_lost(error):
                raise
            _logger.debug("a step is not launched ahead: %s", failure_reason(error))
            return None  # it is planned again once the one before is read, and fails then if it must
        return replace(step, written=self._scheduler.hold_written(plan))

    def _computed(self, step: InFlightStep, speculation: Speculation) -> Computed:
        chunks = [chunk for chunk in step.plan.chunks if chunk.sample]
        rows = self._rows(step.plan, chunks)
        tokens, finite = self._read(step, draw(step.logits, rows), speculation)
        spoilt = [each for each, good in zip(step.prefilled, finite, strict=False) if each.pages and not good]
        if len(rows) == sum(len(chunk.token_ids) for chunk in step.plan.chunks):
            speculation.stepped(len(rows), len(chunks), time.perf_counter() - step.began_s)
        if len(rows) == len(chunks):  # nothing was guessed
            return Computed([[] if token is None else [token] for token in tokens], spoilt)
        left = iter(tokens)
        return Computed([_kept(chunk, list(itertools.islice(left, chunk.sampled))) for chunk in chunks], spoilt)

    def _rows(self, plan: Plan, chunks: Sequence[ChunkInput]) -> list[SampleRow]:
        return [
            self._jobs[sequence.id].row.ahead(tokens)
            for sequence, chunk in zip(plan.sampled, chunks, strict=True)
            for tokens in range(chunk.sampled)
        ]

    def _read(
        self, step: InFlightStep, drawn: SamplerOutput, speculation: Speculation
    ) -> tuple[list[SampledToken | None], list[bool]]:
        """What was drawn, and which of the prefilled sequences are finite as far as that was looked at, once it is
        there. This is where planning ahead comes in."""
        landing, finite = self._runner.landing, step.finite
        if landing is None:
            return drawn.tokens(), [] if finite is None else finite.tolist()
        finite = None if finite is None else landing.fetch(finite)
        on_host, wait = drawn.copied(landing.fetch), landing.mark()
        self._ahead = self._launch_behind(step.plan, drawn.ids, guesses=speculation.guesses)
        wait()
        return on_host.tokens(), [] if finite is None else finite.tolist()

    def _let_go(self, step: InFlightStep) -> None:
        if step.written:
            self._scheduler.let_go(step.written)

    def _tell(self, plan: Plan, index: int, states: FinalStates) -> None:
        """A step has what is to be told of the prompt of its sequence number `index`."""
        telling = self._jobs[plan.sequences[index].id].telling
        assert telling is not None, f"nothing is to be told of {plan.sequences[index].id}"
        telling.read(plan.chunks[index], states)


def _kept(chunk: ChunkInput, drawn: Sequence[SampledToken | None]) -> list[SampledToken]:
    """The tokens that stay of those drawn for a chunk: its own, and behind it as long as the guesses held."""
    guesses = chunk.token_ids[len(chunk.token_ids) - chunk.guessed :]
    count = held(guesses, [token.token_id if token is not None else None for token in drawn])
    return [token for token in drawn[:count] if token is not None]
