"""Where the time of each sequence goes: what kept it waiting, and what the prompts of others took of its steps.

Clocks that only grow do the accounting, so that a step costs the same however many answers go on in it: a sequence
notes their readings when it begins to wait, and when its answer begins.
"""

from __future__ import annotations

import collections.abc as abc
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from types import MappingProxyType

from engine.backends.base import StepLimit, TimeLost
from engine.backends.scheduler.sequences import BatchPlan, Sequence

_WAITS = MappingProxyType({"max_prompts": "slot", "kv_pages": "pages", "step_tokens": "step_tokens"})
"""What a waiting sequence waits for, by the limit of the step."""

_KEPT_PROMPTS = 128
_KEPT_ENDED = 1024
_DECODE_SHARE = 0.1


@dataclass(slots=True)
class _Entry:
    """One sequence. phase: what it does now.  marks: the clocks' readings when that began."""

    phase: str = "waiting"
    marks: dict[str, float] = field(default_factory=dict)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    behind: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))


@dataclass(slots=True)
class _PromptSpan:
    """A prompt that took all that a clock gained between two of its readings."""

    sequence_id: str
    since: float
    until: float


def _largest(plan: BatchPlan) -> str:
    """The sequence of the largest prompt of a step that has one."""
    return max(plan.prompts, key=lambda each: len(each[1].token_ids))[0].id


class StepTimes:
    """clock: seconds, of any origin.  limited: steps by what limited them."""

    def __init__(self, clock: abc.Callable[[], float]) -> None:
        self.limited: Counter[StepLimit] = Counter()
        self._clock = clock
        self._at = 0.0
        self._clocks = {"elapsed": 0.0, "prompts": 0.0} | dict.fromkeys(_WAITS.values(), 0.0)
        self._decode_step_s: float | None = None
        self._prompts = {clock: deque[_PromptSpan](maxlen=_KEPT_PROMPTS) for clock in ("prompts", "step_tokens")}
        self._entries: dict[str, _Entry] = {}
        self._ended: dict[str, _Entry] = {}

    def submitted(self, sequence: Sequence) -> None:
        """A sequence waits from now on."""
        if not self._entries:
            self._at = self._clock()
        self._entries[sequence.id] = _Entry(marks=dict(self._clocks))

    def admitted(self, sequence: Sequence) -> None:
        """A sequence waits no more. One that was preempted has lost all until it is where it was."""
        entry = self._entries.get(sequence.id)
        if entry is not None and (entry.phase != "preempted" or sequence.num_uncomputed == 1):
            self._settle(entry, "decode" if sequence.num_uncomputed == 1 else "prefill")

    def preempted(self, sequence: Sequence) -> None:
        """A sequence lost its pages."""
        entry = self._entries.get(sequence.id)
        if entry is not None and entry.phase != "preempted":
            self._settle(entry, "preempted")

    def removed(self, sequence: Sequence) -> None:
        """A sequence is gone; what it lost can still be read once."""
        entry = self._entries.pop(sequence.id, None)
        if entry is None:
            return
        self._settle(entry, "ended")
        self._ended[sequence.id] = entry
        if len(self._ended) > _KEPT_ENDED:
            del self._ended[next(iter(self._ended))]

    def begin_step(self) -> None:
        """The next step begins now, where that is not when the last one ended."""
        self._at = self._clock()

    def stepped(self, plan: BatchPlan, running: abc.Sequence[Sequence], *, waiting: bool) -> float:
        """Account for the step of `plan`, which is over, before its sequences change; return its seconds."""
        now = self._clock()
        step_s, self._at = now - self._at, now
        clocks = self._clocks
        clocks["elapsed"] += step_s
        self.limited[plan.limit] += 1
        if waiting and (reason := _WAITS.get(plan.limit)) is not None:
            self._gain(reason, step_s, _largest(plan) if reason == "step_tokens" and plan.prompts else "")
        if plan.prompts:
            self._shared_step(plan, running, step_s)
        elif self._decode_step_s is None:
            self._decode_step_s = step_s
        else:
            self._decode_step_s += (step_s - self._decode_step_s) * _DECODE_SHARE
        return step_s

    def lost(self, request_id: str) -> TimeLost:
        """Return what a live request has lost so far, or one that is removed, once."""
        entry = self._entries.get(request_id)
        if entry is not None:
            self._settle(entry, entry.phase)
        else:
            entry = self._ended.pop(request_id, None)
        if entry is None or not entry.seconds:
            return TimeLost()
        behind = max(entry.behind, key=entry.behind.__getitem__, default="")
        return TimeLost(seconds=dict(entry.seconds), behind=behind)

    def _shared_step(self, plan: BatchPlan, running: abc.Sequence[Sequence], step_s: float) -> None:
        """A step with prompts in it: answers lose what it took longer than one without, a prompt loses the share of the
        others' tokens, and one that got no tokens all of it."""
        sizes = [len(chunk.token_ids) for _, chunk in plan.prompts]
        answers = len(plan.sequences) - len(sizes)
        tokens = sum(sizes)
        largest = _largest(plan)
        plain_s = self._decode_step_s if self._decode_step_s is not None else step_s * answers / (answers + tokens)
        if answers and (lost_s := max(0.0, step_s - plain_s)):
            self._gain("prompts", lost_s, largest)
        for (sequence, chunk), size in zip(plan.prompts, sizes, strict=True):
            entry = self._entries.get(sequence.id)
            if entry is None:
                continue
            if entry.phase == "prefill" and tokens > size:
                entry.seconds["prefill_prompts"] += step_s * (tokens - size) / (answers + tokens)
                others = ((each.id, many) for (each, _), many in zip(plan.prompts, sizes, strict=True))
                entry.behind[max((many, name) for name, many in others if name != sequence.id)[1]] += step_s
            if chunk.sample:
                self._settle(entry, "decode")
        if len(plan.sequences) < len(running):
            planned = set(map(id, plan.sequences))
            for sequence in running:
                entry = self._entries.get(sequence.id)
                if id(sequence) in planned or sequence.stored_pages:  # which waits for a tier, not for a prompt
                    continue
                if entry is not None and entry.phase == "prefill":
                    entry.seconds["step_tokens"] += step_s
                    entry.behind[largest] += step_s

    def _gain(self, clock: str, seconds: float, behind: str) -> None:
        """Let a clock gain seconds. behind: the sequence whose prompt took them, "" for none."""
        since, until = self._clocks[clock], self._clocks[clock] + seconds
        self._clocks[clock] = until
        if not behind:
            return
        spans = self._prompts[clock]
        if spans and spans[-1].sequence_id == behind and spans[-1].until == since:
            spans[-1].until = until
        else:
            spans.append(_PromptSpan(behind, since, until))

    def _settle(self, entry: _Entry, phase: str) -> None:
        """Charge what the clocks have gained in its phase, and begin the next one."""
        marks, clocks = entry.marks, self._clocks
        if entry.phase == "waiting":
            charges = {reason: clocks[reason] - marks[reason] for reason in _WAITS.values()}
        elif entry.phase == "preempted":
            charges = {"preempted": clocks["elapsed"] - marks["elapsed"]}
        elif entry.phase == "decode":
            charges = {"prompts": clocks["prompts"] - marks["prompts"]}
        else:
            charges = {}
        for reason, seconds in charges.items():
            if seconds > 0:
                entry.seconds[reason] += seconds
                for span in self._prompts.get(reason, ()):
                    if span.until > marks[reason]:
                        entry.behind[span.sequence_id] += span.until - max(span.since, marks[reason])
        entry.phase, entry.marks = phase, dict(clocks)
