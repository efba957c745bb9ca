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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from engine.backends.faults import device_is_lost, reason
from engine.backends.torch.ahead import obstacle, plan_after
from engine.backends.torch.batch import ChunkInput
from engine.backends.torch.drawn import Drawn, SampledToken
from engine.backends.torch.guesses import held
from engine.backends.torch.jobs import Job
from engine.backends.torch.prompts import FinalStates
from engine.backends.torch.runner import ModelRunner
from engine.backends.torch.sampler import SampleRow, draw
from engine.backends.torch.scheduler import Scheduler
from engine.backends.torch.sending import sent
from engine.backends.torch.sequences import Plan
from engine.backends.torch.sequences import Sequence as TokenSequence
from engine.backends.torch.speculation import Speculation

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that the device was given. logits: of the rows to draw for.  written: pages held until it is done.
    prefilled, finite: the sequences that it prefills, and `ModelRunner.finite` of them."""

    plan: Plan
    logits: Tensor
    began_s: float
    prefilled: Sequence[TokenSequence] = ()
    finite: Tensor | None = None
    written: list[int] = field(default_factory=list)

    def without_ended(self) -> Launched:
        """The same for the sequences that still run: one that was removed holds no pages."""
        pairs = list(zip(self.plan.sequences, self.plan.chunks, strict=True))
        left = [pair for pair in pairs if pair[0].pages]
        if len(left) == len(pairs):
            return self
        rows = [row for row, sequence in enumerate(self.plan.sampled) if sequence.pages]
        logits = self.logits.index_select(0, sent(torch.tensor(rows, dtype=torch.int64), self.logits.device))
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
        self._ahead: Launched | None = None

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

    def _launch(self, plan: Plan, drawn: Tensor | None = None) -> Launched:
        began_s = time.perf_counter()
        logits = self._runner.forward(plan.chunks, partial(self._tell, plan), drawn)
        prefilled = [each for each, chunk in zip(plan.sequences, plan.chunks, strict=True) if chunk.prefills]
        return Launched(plan, logits, began_s, prefilled, self._runner.finite)

    def _launch_behind(self, running: Plan, drawn: Tensor, *, guesses: bool) -> Launched | None:
        """The step after `running`, with what is drawn there for its ids; None where it waits for those to be read."""
        if obstacle(running, self._scheduler, guesses=guesses):
            return None
        plan = plan_after(running, self._scheduler)
        if not plan.chunks:
            return None
        try:
            step = self._launch(plan, drawn)
        except Exception as error:
            if device_is_lost(error):
                raise
            _logger.debug("a step is not launched ahead: %s", reason(error))
            return None  # it is planned again once the one before is read, and fails then if it must
        return replace(step, written=self._scheduler.hold_written(plan))

    def _computed(self, step: Launched, speculation: Speculation) -> Computed:
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
        self, step: Launched, drawn: Drawn, speculation: Speculation
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

    def _let_go(self, step: Launched) -> None:
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
