"""Which stop string ended an answer, for dialects that tell."""

from __future__ import annotations

from collections.abc import Sequence

from engine.backends.base import FinishReason
from engine.config import SamplingParams


def stops_of(params: SamplingParams) -> tuple[str, ...]:
    """Those that can end an answer: in JSON that it is held to, none does."""
    return () if params.grammar is not None and params.grammar.is_json else params.stop


def without_stop(text: str, finish: FinishReason | None, stops: Sequence[str]) -> tuple[str, str | None]:
    """An answer's last piece without the stop string that ended it, and that string; None where something else did.

    text: what came with `finish`, of a request with `SamplingParams.include_stop`. An answer ends where a stop string
    is complete, nothing of which was let through before; so it ends with one where and only where one ended it.
    """
    ended = [stop for stop in stops if finish in ("stop", "length") and text.endswith(stop)]
    if not ended:
        return text, None
    stop = max(ended, key=len)
    return text[: -len(stop)], stop
