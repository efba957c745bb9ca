"""What the dispatcher knows of one worker."""

from __future__ import annotations

from collections.abc import Sequence

from engine.backends.base import BackendStats
from engine.dispatch.prefixes import PrefixMemory
from engine.dispatch.step_cost import StepCost
from engine.worker.protocol import StepBatch


class WorkerView:
    """A worker as its reports and what was sent there show it."""

    def __init__(self) -> None:
        self.prefixes = PrefixMemory()
        self.cost = StepCost()
        self._missing: dict[str, int] = {}
        self._prompt_tokens_computed = 0

    @property
    def pending_tokens(self) -> int:
        """Prompt tokens of its requests that it has yet to compute."""
        return sum(self._missing.values()) if self._missing else 0

    def sent(self, request_id: str, keys: Sequence[bytes], missing_tokens: int) -> None:
        """A request with these pages goes there; so many of its tokens are not cached."""
        self.prefixes.sent(keys)
        self._missing[request_id] = missing_tokens

    def left(self, request_id: str) -> None:
        """It does not work on this request any more."""
        self._missing.pop(request_id, None)

    def prompt_tokens(self, stats: BackendStats) -> int:
        """Prompt tokens computed since the stats before these."""
        before, self._prompt_tokens_computed = self._prompt_tokens_computed, stats.prompt_tokens_computed
        return max(0, stats.prompt_tokens_computed - before)

    def progressed(self, batch: StepBatch) -> None:
        """Take in what a step brought: pages, and how far prompts are."""
        self.prefixes.changed(batch.prefix)
        for sequence in batch.stats.sequences if self._missing else ():
            missing = self._missing.get(sequence.request_id)
            if missing is not None:
                self._missing[sequence.request_id] = min(missing, sequence.known_tokens - sequence.computed_tokens)
        for output in batch.outputs if self._missing else ():
            if output.token_ids or output.finish is not None:
                self._missing.pop(output.request_id, None)
