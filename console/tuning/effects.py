"""Effects of changed knobs, measured: the seconds before against those after, under the same load. Pure.

A change is compared only over seconds that had about as many requests, running and queued, as one another; what lies
between the turn and the moment that the workers were there is left out. A difference counts where it is more than
twice the standard error of both means, and more than a twentieth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from statistics import fmean, median, stdev
from typing import Literal

from engine.snapshot import Mark, Second, Snapshot

WINDOW_S = 60
"""Seconds with load that are looked at on each side, at most."""
ENOUGH_S = 10
"""Comparable seconds that each side must have."""
SETTLE_S = 2.0
"""Seconds left out once the workers are there: what waited for them comes in a rush."""
BAND = 0.25
"""How much a load may differ from another and be called the same; one request always may."""
LEAST = 0.05
_ENOUGH_SAMPLES = 3
_SAME_TURN_S = 3.0

Outcome = Literal["measured", "measuring", "waiting", "incomparable", "unmeasured"]
Verdict = Literal["better", "worse", "same"]


@dataclass(frozen=True, slots=True)
class Change:
    """A knob that was turned: steps of one turn are one change. at: unix time of the first, last_at of the last step;
    settled_at: when the workers had followed, None as long as they have not."""

    knob: str
    before: float
    after: float
    at: float
    last_at: float
    settled_at: float | None = None
    model: str = ""


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over seconds, with its standard error."""

    value: float
    error: float


@dataclass(frozen=True, slots=True)
class Delta:
    """One number before and after. verdict: what an operator would say of it."""

    before: float
    after: float
    verdict: Verdict

    @property
    def relative(self) -> float:
        """0.5 is half as much again."""
        return self.after / self.before - 1 if self.before else 0.0


@dataclass(frozen=True, slots=True)
class Effect:
    """The effect of a change. text: where there are no numbers (yet). load: requests at a time, of the seconds
    that were compared. seconds: how many those were, before and after. final: nothing more will be known of it."""

    change: Change
    outcome: Outcome
    text: str = ""
    load: float | None = None
    seconds: tuple[int, int] = (0, 0)
    tokens_per_s: Delta | None = None
    ttft_s: Delta | None = None
    itl_s: Delta | None = None
    final: bool = False


def changes(marks: Iterable[Mark]) -> list[Change]:
    """The knobs that were turned, oldest first. Turns back before anything came of them are none."""
    found: list[Change] = []
    for mark in marks:
        if not mark.knob or mark.before is None or mark.after is None:
            continue
        last = found[-1] if found else None
        if last is not None and _same_turn(last, mark):
            found[-1] = Change(mark.knob, last.before, mark.after, last.at, mark.at, mark.settled_at, mark.model)
        else:
            found.append(Change(mark.knob, mark.before, mark.after, mark.at, mark.at, mark.settled_at, mark.model))
    return [change for change in found if change.before != change.after]


def _same_turn(change: Change, mark: Mark) -> bool:
    if (change.knob, change.model, change.after) != (mark.knob, mark.model, mark.before):
        return False
    followed = change.settled_at is not None and change.settled_at <= mark.at
    return not followed or mark.at - change.last_at <= _SAME_TURN_S


def load_of(second: Second) -> int:
    """Requests there were, running and queued."""
    return second.running + second.queued


def effect_of(change: Change, marks: Sequence[Mark], history: Sequence[Second]) -> Effect:
    """Return the effect of a change, as far as `history` shows it. marks: all actions of the operator; each ends the
    measurement of the one before."""
    earlier = max((mark.settled_at or mark.at for mark in marks if mark.at < change.at), default=float("-inf"))
    later = min((mark.at for mark in marks if mark.at > change.last_at), default=None)
    if not history or history[0].at > change.at:
        return Effect(change, "unmeasured", "too long ago to be measured", final=True)
    before = [second for second in history if earlier + SETTLE_S < second.at <= change.at and load_of(second)]
    if len(before) < ENOUGH_S:
        had = "no load" if not before else f"only {len(before)} s of load"
        return Effect(change, "unmeasured", f"{had} before it, nothing to compare with", final=True)
    if change.settled_at is None or (later is not None and later < change.settled_at):
        if later is not None:
            return Effect(change, "unmeasured", "another change came before it took effect", final=True)
        return Effect(change, "waiting", "until the workers are there")
    begins = change.settled_at + SETTLE_S + 1
    after = [each for each in history if begins <= each.at and (later is None or each.at <= later) and load_of(each)]
    return _compared(change, before[-WINDOW_S:], after[:WINDOW_S], history[-1], over=later is not None)


def _compared(change: Change, before: Sequence[Second], after: Sequence[Second], now: Second, *, over: bool) -> Effect:
    """over: no more seconds will come after it."""
    alike = _alike(before, after)
    if min(map(len, alike)) >= ENOUGH_S:
        return _measured(change, *alike, final=over or len(after) >= WINDOW_S)
    if len(after) >= ENOUGH_S and (over or not alike[1]):
        loads = (round(median(map(load_of, side))) for side in (before, after))
        text = "the load changed from {} to {} requests".format(*loads)
        return Effect(change, "incomparable", text, final=over or len(after) >= WINDOW_S)
    if over:
        had = "no load" if not after else f"only {len(after)} s of load"
        return Effect(change, "unmeasured", f"{had} before the next change", final=True)
    if len(after) >= WINDOW_S:
        return Effect(change, "incomparable", "the load changes too much from second to second", final=True)
    if not load_of(now):
        return Effect(change, "waiting", "for load")
    return Effect(change, "measuring", f"{max(1, ENOUGH_S - len(alike[1]))} s more")


def _alike(before: Sequence[Second], after: Sequence[Second]) -> tuple[list[Second], list[Second]]:
    """The seconds of both sides around the load that most of them share."""
    usual = median(map(load_of, before))

    def around(load: int) -> tuple[list[Second], list[Second]]:
        near = max(1.0, BAND * load)
        first, second = ([each for each in side if abs(load_of(each) - load) <= near] for side in (before, after))
        return first, second

    def rank(load: int) -> tuple[int, int, float]:
        one, other = map(len, around(load))
        return min(one, other), one + other, -abs(load - usual)

    return around(max({load_of(second) for second in before}, key=rank))


def _measured(change: Change, before: Sequence[Second], after: Sequence[Second], *, final: bool) -> Effect:
    def delta(value: Callable[[Second], float | None], *, more_is_better: bool) -> Delta | None:
        means = [mean_of([found for each in side if (found := value(each)) is not None]) for side in (before, after)]
        return _delta(means[0], means[1], more_is_better=more_is_better) if means[0] and means[1] else None

    return Effect(
        change,
        "measured",
        load=median(map(load_of, before)),
        seconds=(len(before), len(after)),
        tokens_per_s=delta(lambda second: second.output_tokens, more_is_better=True),
        ttft_s=delta(lambda second: second.ttft_p95, more_is_better=False),
        itl_s=delta(lambda second: second.itl_p95, more_is_better=False),
        final=final,
    )


def mean_of(values: Sequence[float]) -> Mean | None:
    """None where there are too few to speak of."""
    if len(values) < _ENOUGH_SAMPLES:
        return None
    return Mean(fmean(values), stdev(values) / sqrt(len(values)))


def _delta(before: Mean, after: Mean, *, more_is_better: bool) -> Delta:
    difference = after.value - before.value
    noise = max(2 * sqrt(before.error**2 + after.error**2), LEAST * abs(before.value))
    if abs(difference) <= noise:
        return Delta(before.value, after.value, "same")
    return Delta(before.value, after.value, "better" if (difference > 0) == more_is_better else "worse")


class Effects:
    """The effects of the changes seen, kept when the history no longer reaches back to them."""

    def __init__(self) -> None:
        self._cached: dict[Change, Effect] = {}
        self._seen_at = 0.0
        self._marks: tuple[Mark, ...] = ()
        self.found: tuple[Effect, ...] = ()

    def look(self, snapshot: Snapshot) -> None:
        """Bring `found` (newest first) up to date; costs nothing while no second has passed."""
        now = snapshot.history[-1].at if snapshot.history else 0.0
        if (now, snapshot.marks) == (self._seen_at, self._marks):
            return
        self._seen_at, self._marks = now, snapshot.marks
        found = [self._effect(change, snapshot) for change in changes(snapshot.marks)]
        self._cached = {effect.change: effect for effect in found}
        self.found = tuple(reversed(found))

    def _effect(self, change: Change, snapshot: Snapshot) -> Effect:
        cached = self._cached.get(change)
        if cached is not None and cached.final:
            return cached
        effect = effect_of(change, snapshot.marks, snapshot.history)
        lost = bool(snapshot.history) and snapshot.history[0].at > change.at - WINDOW_S
        return replace(cached, final=True) if cached is not None and lost and cached.outcome == "measured" else effect


# The knob values that were in use under load, and what each pair of them gave. Pure.


@dataclass(frozen=True, slots=True)
class ObservedSetting:
    """Knob values that were in use under load, and what they gave. now: they are in use."""

    workers: int
    max_prompts: int
    tokens_per_s: float
    ttft_s: float | None
    itl_s: float | None
    load: float
    seconds: int
    now: bool = False


def observed_settings(
    history: Sequence[Second], marks: Sequence[Mark], model: str, workers: int, max_prompts: int
) -> list[ObservedSetting]:
    """Return what each pair of knob values of a model gave, those in use last; only of seconds with load, and not of
    those while workers came or went. workers, max_prompts: the values now."""
    values = {"num_workers": float(workers), "max_prompts": float(max_prompts)}
    turned = [mark for mark in marks if mark.knob in values and mark.model in ("", model)]
    groups: dict[tuple[float, float], list[Second]] = {}
    for second in reversed(history):
        while turned and turned[-1].at >= second.at:
            mark = turned.pop()
            values[mark.knob] = mark.before if mark.before is not None else values[mark.knob]
        if load_of(second) and not _in_transition(second, marks):
            groups.setdefault((values["num_workers"], values["max_prompts"]), []).append(second)
    current = (float(workers), float(max_prompts))
    found = [
        _setting(pair, seconds, now=pair == current) for pair, seconds in groups.items() if len(seconds) >= ENOUGH_S
    ]
    return sorted(found, key=lambda setting: setting.now)


class ObservedSettings:
    """`observed_settings`, worked out once for every second."""

    def __init__(self) -> None:
        self._key: tuple[object, ...] = ()
        self._found: list[ObservedSetting] = []

    def of(self, snapshot: Snapshot, model: str) -> list[ObservedSetting]:
        """Those of a model whose knobs `snapshot` has."""
        history, now = snapshot.history, (snapshot.target_workers, snapshot.max_prompts)
        key = (history[-1].at if history else 0.0, snapshot.marks, model, now)
        if key != self._key:
            self._key, self._found = key, observed_settings(history, snapshot.marks, model, *now)
        return self._found


def _in_transition(second: Second, marks: Sequence[Mark]) -> bool:
    return any(
        mark.at < second.at and (mark.settled_at is None or second.at < mark.settled_at + SETTLE_S + 1)
        for mark in marks
        if mark.knob
    )


def _setting(pair: tuple[float, float], seconds: Sequence[Second], *, now: bool) -> ObservedSetting:
    def mean(value: Callable[[Second], float | None]) -> float | None:
        found = mean_of([each for second in seconds if (each := value(second)) is not None])
        return found.value if found is not None else None

    return ObservedSetting(
        workers=int(pair[0]),
        max_prompts=int(pair[1]),
        tokens_per_s=fmean(second.output_tokens for second in seconds),
        ttft_s=mean(lambda second: second.ttft_p95),
        itl_s=mean(lambda second: second.itl_p95),
        load=median(map(load_of, seconds)),
        seconds=len(seconds),
        now=now,
    )
