"""The knob values that were in use under load, and what each pair of them gave. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from console.effects import ENOUGH_S, SETTLE_S, load_of, mean_of
from engine.snapshot import Mark, Second, Snapshot


@dataclass(frozen=True, slots=True)
class Setting:
    """Knob values that were in use under load, and what they gave. now: they are in use."""

    workers: int
    max_prompts: int
    tokens_per_s: float
    ttft_s: float | None
    itl_s: float | None
    load: float
    seconds: int
    now: bool = False


def settings_seen(
    history: Sequence[Second], marks: Sequence[Mark], model: str, workers: int, max_prompts: int
) -> list[Setting]:
    """What each pair of knob values of a model gave, those in use last; only of seconds with load, and not of those
    while workers came or went. workers, max_prompts: the values now."""
    values = {"workers": float(workers), "max_prompts": float(max_prompts)}
    turned = [mark for mark in marks if mark.knob in values and mark.model in ("", model)]
    groups: dict[tuple[float, float], list[Second]] = {}
    for second in reversed(history):
        while turned and turned[-1].at >= second.at:
            mark = turned.pop()
            values[mark.knob] = mark.before if mark.before is not None else values[mark.knob]
        if load_of(second) and not _in_transition(second, marks):
            groups.setdefault((values["workers"], values["max_prompts"]), []).append(second)
    current = (float(workers), float(max_prompts))
    found = [
        _setting(pair, seconds, now=pair == current) for pair, seconds in groups.items() if len(seconds) >= ENOUGH_S
    ]
    return sorted(found, key=lambda setting: setting.now)


class SeenSettings:
    """`settings_seen`, worked out once for every second."""

    def __init__(self) -> None:
        self._key: tuple[object, ...] = ()
        self._found: list[Setting] = []

    def of(self, snapshot: Snapshot, model: str) -> list[Setting]:
        """Those of a model whose knobs `snapshot` has."""
        history, now = snapshot.history, (snapshot.target_workers, snapshot.max_prompts)
        key = (history[-1].at if history else 0.0, snapshot.marks, model, now)
        if key != self._key:
            self._key, self._found = key, settings_seen(history, snapshot.marks, model, *now)
        return self._found


def _in_transition(second: Second, marks: Sequence[Mark]) -> bool:
    return any(
        mark.at < second.at and (mark.settled_at is None or second.at < mark.settled_at + SETTLE_S + 1)
        for mark in marks
        if mark.knob
    )


def _setting(pair: tuple[float, float], seconds: Sequence[Second], *, now: bool) -> Setting:
    def mean(value: Callable[[Second], float | None]) -> float | None:
        found = mean_of([each for second in seconds if (each := value(second)) is not None])
        return found.value if found is not None else None

    return Setting(
        workers=int(pair[0]),
        max_prompts=int(pair[1]),
        tokens_per_s=fmean(second.output_tokens for second in seconds),
        ttft_s=mean(lambda second: second.ttft_p95),
        itl_s=mean(lambda second: second.itl_p95),
        load=median(map(load_of, seconds)),
        seconds=len(seconds),
        now=now,
    )
