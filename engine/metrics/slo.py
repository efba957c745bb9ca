"""Slo: the latency that answers are to keep, and whether one kept it."""

from __future__ import annotations

import msgspec


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of an answer's latency in seconds; None is no limit.

    ttft_s: to the first token.  itl_s: between tokens, the answer's mean.  e2e_s: to the last token.
    share: of the latencies that are to be within them, where a percentile is judged instead of single answers.
    """

    ttft_s: float | None = None
    itl_s: float | None = None
    e2e_s: float | None = None
    share: float = 0.95

    @property
    def is_set(self) -> bool:
        """True if there is any limit."""
        return any(limit is not None for limit in (self.ttft_s, self.itl_s, self.e2e_s))

    def is_met(self, ttft_s: float | None, itl_s: float | None, e2e_s: float | None = None) -> bool:
        """Return whether an answer kept it; one of a single token has no time between tokens (None)."""
        return (
            (self.ttft_s is None or (ttft_s is not None and ttft_s <= self.ttft_s))
            and (self.itl_s is None or itl_s is None or itl_s <= self.itl_s)
            and (self.e2e_s is None or (e2e_s is not None and e2e_s <= self.e2e_s))
        )
