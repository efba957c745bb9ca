"""History: the last ten minutes by the second, and the last hour in means of ten seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from engine.snapshot import Second, TenSeconds

HISTORY_SECONDS = 600
HOUR_SECONDS = 3600
_TENS = HOUR_SECONDS // 10


class History:
    """Grows by a second at a time. seconds, hour: oldest first; each is another tuple only where it changed."""

    def __init__(self) -> None:
        self.seconds: tuple[Second, ...] = ()
        self.hour: tuple[TenSeconds, ...] = ()

    def add(self, second: Second) -> None:
        """Add a second; the first of a new ten closes those before it."""
        last = self.seconds[-1:]
        if last and _ten(last[0]) != _ten(second):
            ten = [each for each in self.seconds[-20:] if _ten(each) == _ten(last[0])]
            self.hour = (*self.hour[-(_TENS - 1) :], _mean(ten))
        self.seconds = (*self.seconds[-(HISTORY_SECONDS - 1) :], second)


def tens_of(seconds: Iterable[Second]) -> tuple[TenSeconds, ...]:
    """Return the means of whole tens of seconds; those of the last ten are not over yet."""
    return tuple(_mean(list(ten)) for _, ten in groupby(seconds, _ten))[:-1][-_TENS:]


def _ten(second: Second) -> int:
    return int(second.at // 10)


def _mean(seconds: Sequence[Second]) -> TenSeconds:
    def mean(value: Callable[[Second], float | None]) -> float | None:
        measured = [found for second in seconds if (found := value(second)) is not None]
        return sum(measured) / len(measured) if measured else None

    return TenSeconds(
        at=_ten(seconds[0]) * 10.0 + 5,
        seconds=len(seconds),
        output_tokens=mean(lambda second: second.output_tokens) or 0.0,
        prompt_tokens=mean(lambda second: second.prompt_tokens) or 0.0,
        running=mean(lambda second: second.running) or 0.0,
        queued=mean(lambda second: second.queued) or 0.0,
        kv_usage=mean(lambda second: second.kv_usage) or 0.0,
        ttft_p50=mean(lambda second: second.ttft_p50),
        ttft_p95=mean(lambda second: second.ttft_p95),
        itl_p50=mean(lambda second: second.itl_p50),
        itl_p95=mean(lambda second: second.itl_p95),
        limit=Counter(second.limit for second in seconds).most_common(1)[0][0],
    )
