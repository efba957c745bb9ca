"""Tokens guessed ahead from a request's own text, and how many of them are worth a step's time. No torch here.

A guess is computed with in the same step as the token before it, and holds where that step draws the very token that
was guessed. Since a draw depends on nothing but the logits, the seed and the position, the answer is the one that
there would have been without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.backends.torch.speculation.step_time import FIRST_HOLDS, StepTime

LONG, SHORT = 4, 2
MAX_AHEAD = 7
LEARNS = 0.2
_MOST_SKIPPED = 64


class PromptLookup:
    """Finds where the last tokens of a text stood before (prompt lookup decoding, Saxena 2023): what followed there is
    what may follow now. A token costs O(1), when a guess is next made."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        self._noted = 0

    def extend(self, token_ids: Sequence[int]) -> None:
        """The tokens that come after those before."""
        self._tokens.extend(token_ids)

    def guess(self, most: int) -> list[int]:
        """The `most` tokens that followed when the text last went as it ends now; the longer likeness counts."""
        self._note()
        for length in (LONG, SHORT):
            start = self._after.get(tuple(self._tokens[-length:])) if len(self._tokens) >= length else None
            if start is not None:
                return self._going_round(start, most)
        return []

    def _note(self) -> None:
        """What follows each run of tokens; nothing does yet at the end, which so does not find itself."""
        for at in range(self._noted, len(self._tokens)):
            for length in (LONG, SHORT):
                if at >= length:
                    self._after[tuple(self._tokens[at - length : at])] = at
        self._noted = len(self._tokens)

    def _going_round(self, start: int, count: int) -> list[int]:
        """The tokens from `start` on, and from there again where the text ends before."""
        period = len(self._tokens) - start
        return [self._tokens[start + ahead % period] for ahead in range(count)]


@dataclass(slots=True)
class SequenceDrafter:
    """Guesses for one sequence. holds: the share of guesses that hold, lately, at each position alike."""

    lookup: PromptLookup = field(default_factory=PromptLookup)
    holds: float = FIRST_HOLDS
    _skip: int = 0
    _failures: int = 0

    def guess(self, most: int) -> list[int]:
        """Up to `most` tokens. After guesses that came to nothing it makes none for a while, longer each time."""
        if self._skip:
            self._skip -= 1
            return []
        return self.lookup.guess(most)

    def learn(self, guessed: int, held: int) -> None:
        """Of `guessed` tokens, the first `held` were right."""
        for position in range(min(guessed, held + 1)):
            self.holds += LEARNS * ((position < held) - self.holds)
        if held:
            self._failures = 0
        elif guessed:
            self._failures += 1
            self._skip = min(_MOST_SKIPPED, 2 ** (self._failures - 1) - 1)


class NgramDrafter:
    """The guesses of all requests of a worker. most: tokens ahead; 0 guesses nothing.  time: what its steps take."""

    def __init__(self, most: int, time: StepTime) -> None:
        self.most = most
        self._time = time
        self._guessers: dict[str, SequenceDrafter] = {}

    def begin(self, request_id: str, token_ids: Sequence[int]) -> None:
        """A request with these tokens, any of which may come again."""
        if self.most:
            guesser = self._guessers[request_id] = SequenceDrafter()
            guesser.lookup.extend(token_ids)

    def end(self, request_id: str) -> None:
        """A request has ended."""
        self._guessers.pop(request_id, None)

    def plan(self, request_ids: Sequence[str], spare: int) -> dict[str, Sequence[int]]:
        """What to compute with behind the last token of each of these requests, which are all that a step decodes;
        spare: rows that there is room for besides theirs."""
        if spare <= 0 or not self._guessers:
            return {}
        found = {}
        for request_id in request_ids:
            guesser = self._guessers.get(request_id)
            if guesser is not None and (ids := guesser.guess(self.most)):
                found[request_id] = (ids, guesser.holds)
        taken = allot(list(found.values()), decodes=len(request_ids), spare=spare, time=self._time)
        return {name: ids[:count] for (name, (ids, _)), count in zip(found.items(), taken, strict=True) if count}

    def came(self, request_id: str, guessed: int, token_ids: Sequence[int]) -> None:
        """A request that was guessed so many tokens ahead got these."""
        guesser = self._guessers.get(request_id)
        if guesser is None:
            return
        guesser.learn(guessed, len(token_ids) - 1)
        guesser.lookup.extend(token_ids)

    def expected(self, guesses: Mapping[str, Sequence[int]]) -> float:
        """How many of these are likely to hold."""
        return sum(
            self._guessers[name].holds ** (ahead + 1) for name, ids in guesses.items() for ahead in range(len(ids))
        )


def held(guesses: Sequence[int], drawn: Sequence[int | None]) -> int:
    """How many of the tokens drawn stay, where drawn[i] was drawn behind guesses[:i]: one more than guesses that held,
    and none from the first that could not be drawn on."""
    for count, token in enumerate(drawn):
        if token is None:
            return count
        if count < len(guesses) and token != guesses[count]:
            return count + 1
    return len(drawn)


def allot(
    guesses: Sequence[tuple[Sequence[int], float]], *, decodes: int, spare: int, time: StepTime, most: int = MAX_AHEAD
) -> list[int]:
    """How many of its guesses each sequence may compute with in the next step.

    guesses: of each sequence, with the share that holds.  decodes: rows of the step without guesses.  spare: rows
    that there is room for.  The likeliest go first, as long as they are worth their time.
    """
    offers = sorted(
        (
            (holds ** (ahead + 1), index)
            for index, (ids, holds) in enumerate(guesses)
            for ahead in range(len(ids[:most]))
        ),
        key=lambda offer: -offer[0],
    )
    taken = [0] * len(guesses)
    rows, tokens = decodes, float(decodes)
    for likely, index in offers[:spare]:
        if likely <= time.worth(rows, tokens):
            break
        taken[index] += 1
        rows, tokens = rows + 1, tokens + likely
    return taken


# Whether looking for guesses is worth the looking. No torch.
#
# What there is to guess is looked for in every step, on the host: next to nothing beside the step of a large model, and
# a tenth of that of a small one that many requests share. So it is paid for out of what guesses save. Where they save
# less, nothing is looked for during some steps, more of them each time, and then it is tried again. A worker begins
# with the time of a few steps to spend.

FREE_SHARE = 0.01
"""Of a step's time: what looking may cost that saves nothing."""

_CREDIT_STEPS = 8.0
_LOST_STEPS = 0.5
_MOST_SAVED_STEPS = 16.0
_FIRST_REST, _LONGEST_REST = 64, 512


class SpeculationBudget:
    """The account. balance_s: what guesses saved less what looking for them took, of late."""

    def __init__(self) -> None:
        self.balance_s = 0.0
        self._looks, self._credit_steps = True, _CREDIT_STEPS
        self._resting, self._rest = 0, _FIRST_REST

    def due(self) -> bool:
        """Whether to look for guesses beside the step that is planned now."""
        self._looks = not self._resting
        if not self._looks:
            self._resting -= 1
        return self._looks

    def spent(self, seconds: float) -> None:
        """So long was looked."""
        self.balance_s -= seconds

    def saved(self, seconds: float) -> None:
        """Guesses that held, less what it took to compute with all of them."""
        self.balance_s += seconds

    def stepped(self, seconds: float) -> None:
        """A step took so long."""
        if not self._looks:
            return
        given = FREE_SHARE + self._credit_steps
        self.balance_s, self._credit_steps = min(self.balance_s + given * seconds, _MOST_SAVED_STEPS * seconds), 0.0
        if self.balance_s > 0:
            self._rest = _FIRST_REST
        elif self.balance_s < -_LOST_STEPS * seconds:
            self.balance_s = 0.0
            self._resting, self._rest = self._rest, min(2 * self._rest, _LONGEST_REST)
