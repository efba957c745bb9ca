"""N-gram drafts (prompt lookup): draft tokens from a request's own text, and how many are worth a step's time. No
torch.

A draft token is computed in the same step as the token before it, and accepted where that step samples the same token.
As sampling depends only on logits, seed and position, the answer is the same as without drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.backends.common.step_memory import MAX_DRAFTS
from engine.backends.torch.speculation.step_time import INITIAL_ACCEPTANCE_RATE, StepTime

LONG, SHORT = 4, 2
LEARNING_RATE = 0.2
_MAX_SKIPPED = 64


class PromptLookup:
    """Index of a text's n-grams (prompt lookup decoding, Saxena 2023): the tokens that followed the last ones before
    are the draft. O(1) per token, at the next draft."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._next_position: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the text."""
        self._tokens.extend(token_ids)

    def draft(self, max_drafts: int) -> list[int]:
        """Return the `max_drafts` tokens that followed the last occurrence of the final n-gram; longer ones first."""
        self._index()
        for length in (LONG, SHORT):
            start = self._next_position.get(tuple(self._tokens[-length:])) if len(self._tokens) >= length else None
            if start is not None:
                return self._cyclic(start, max_drafts)
        return []

    def _index(self) -> None:
        """Index the n-grams of new tokens, without the final ones, which have no next token yet."""
        for position in range(self._indexed, len(self._tokens)):
            for length in (LONG, SHORT):
                if position >= length:
                    self._next_position[tuple(self._tokens[position - length : position])] = position
        self._indexed = len(self._tokens)

    def _cyclic(self, start: int, count: int) -> list[int]:
        """Return `count` tokens from `start` on, repeating them where the text ends."""
        period = len(self._tokens) - start
        return [self._tokens[start + ahead % period] for ahead in range(count)]


@dataclass(slots=True)
class SequenceDrafter:
    """Drafts for one sequence. acceptance_rate: recent share of accepted drafts, the same for each position."""

    lookup: PromptLookup = field(default_factory=PromptLookup)
    acceptance_rate: float = INITIAL_ACCEPTANCE_RATE
    _skip: int = 0
    _failures: int = 0

    def draft(self, max_drafts: int) -> list[int]:
        """Return up to `max_drafts` draft tokens; none for a while after rejected ones, longer each time."""
        if self._skip:
            self._skip -= 1
            return []
        return self.lookup.draft(max_drafts)

    def record(self, num_drafts: int, accepted: int) -> None:
        """Update the acceptance rate: of `num_drafts` tokens the first `accepted` were."""
        for position in range(min(num_drafts, accepted + 1)):
            self.acceptance_rate += LEARNING_RATE * ((position < accepted) - self.acceptance_rate)
        if accepted:
            self._failures = 0
        elif num_drafts:
            self._failures += 1
            self._skip = min(_MAX_SKIPPED, 2 ** (self._failures - 1) - 1)


class NgramDrafter:
    """Drafts for all requests of a worker. max_drafts: per step and request, 0 for none.  time: model of its steps."""

    def __init__(self, max_drafts: int, time: StepTime) -> None:
        self.max_drafts = max_drafts
        self._time = time
        self._drafters: dict[str, SequenceDrafter] = {}

    def begin(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Add a request with its prompt."""
        if self.max_drafts:
            drafter = self._drafters[request_id] = SequenceDrafter()
            drafter.lookup.extend(token_ids)

    def end(self, request_id: str) -> None:
        """Remove a request."""
        self._drafters.pop(request_id, None)

    def plan(self, request_ids: Sequence[str], spare: int) -> dict[str, Sequence[int]]:
        """Return the drafts of these requests, which are all decodes of the step. spare: rows left for drafts."""
        if spare <= 0 or not self._drafters:
            return {}
        candidates = {}
        for request_id in request_ids:
            drafter = self._drafters.get(request_id)
            if drafter is not None and (ids := drafter.draft(self.max_drafts)):
                candidates[request_id] = (ids, drafter.acceptance_rate)
        counts = allot_drafts(list(candidates.values()), decodes=len(request_ids), spare=spare, time=self._time)
        return {name: ids[:count] for (name, (ids, _)), count in zip(candidates.items(), counts, strict=True) if count}

    def record_result(self, request_id: str, num_drafts: int, token_ids: Sequence[int]) -> None:
        """Record the tokens that a request with `num_drafts` drafts got."""
        drafter = self._drafters.get(request_id)
        if drafter is None:
            return
        drafter.record(num_drafts, len(token_ids) - 1)
        drafter.lookup.extend(token_ids)

    def expected_accepted(self, drafts: Mapping[str, Sequence[int]]) -> float:
        """Return the expected number of accepted drafts."""
        return sum(
            self._drafters[name].acceptance_rate ** (ahead + 1)
            for name, ids in drafts.items()
            for ahead in range(len(ids))
        )


def accepted(drafts: Sequence[int], drawn: Sequence[int | None]) -> int:
    """Return how many of the sampled tokens are valid, where drawn[i] was sampled after drafts[:i]: one more than
    accepted drafts, and none from the first that could not be sampled."""
    for count, token in enumerate(drawn):
        if token is None:
            return count
        if count < len(drafts) and token != drafts[count]:
            return count + 1
    return len(drawn)


def allot_drafts(
    drafts: Sequence[tuple[Sequence[int], float]],
    *,
    decodes: int,
    spare: int,
    time: StepTime,
    max_drafts: int = MAX_DRAFTS,
) -> list[int]:
    """Return how many of its drafts each sequence may use in the next step.

    drafts: of each sequence, with its acceptance rate.  decodes: rows of the step without drafts.  spare: rows left for
    drafts.  The most probable come first, as long as they are worth their time.
    """
    offers = sorted(
        (
            (acceptance_rate ** (ahead + 1), index)
            for index, (ids, acceptance_rate) in enumerate(drafts)
            for ahead in range(len(ids[:max_drafts]))
        ),
        key=lambda offer: -offer[0],
    )
    counts = [0] * len(drafts)
    rows, tokens = decodes, float(decodes)
    for probability, index in offers[:spare]:
        if probability <= time.break_even_probability(rows, tokens):
            break
        counts[index] += 1
        rows, tokens = rows + 1, tokens + probability
    return counts
