"""Tokens guessed ahead from a request's own text, and how many of them are worth a step's time. No torch here.

A guess is computed with in the same step as the token before it, and holds where that step draws the very token that
was guessed. Since a draw depends on nothing but the logits, the seed and the position, the answer is the one that
there would have been without.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from engine.backends.base import DraftPosition

LONG, SHORT = 4, 2
MAX_AHEAD = 7
_FIRST_HOLDS = 0.5
_LEARNS = 0.2
_MOST_SKIPPED = 64


class Lookup:
    """Finds where the last tokens of a text stood before (prompt lookup decoding, Saxena 2023): what followed there is
    what may follow now. Grows by one token in O(1)."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}

    def extend(self, token_ids: Sequence[int]) -> None:
        """Note the tokens that come after those before."""
        for token_id in token_ids:
            for length in (LONG, SHORT):  # noted only now, so that the end of the text does not find itself
                if len(self._tokens) >= length:
                    self._after[tuple(self._tokens[-length:])] = len(self._tokens)
            self._tokens.append(token_id)

    def guess(self, most: int) -> list[int]:
        """The `most` tokens that followed when the text last went as it ends now; the longer likeness counts."""
        for length in (LONG, SHORT):
            start = self._after.get(tuple(self._tokens[-length:])) if len(self._tokens) >= length else None
            if start is not None:
                return self._going_round(start, most)
        return []

    def _going_round(self, start: int, count: int) -> list[int]:
        """The tokens from `start` on, and from there again where the text ends before."""
        period = len(self._tokens) - start
        return [self._tokens[start + ahead % period] for ahead in range(count)]


@dataclass(slots=True)
class Guesser:
    """Guesses for one sequence. holds: the share of guesses that hold, lately, at each position alike."""

    lookup: Lookup = field(default_factory=Lookup)
    holds: float = _FIRST_HOLDS
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
            self.holds += _LEARNS * ((position < held) - self.holds)
        if held:
            self._failures = 0
        elif guessed:
            self._failures += 1
            self._skip = min(_MOST_SKIPPED, 2 ** (self._failures - 1) - 1)


class StepTime:
    """What steps of nothing but single tokens and guesses take: seconds = fixed + rows x row, by least squares over
    the recent ones. As long as they all have about as many rows, a row is taken for a small part of the step."""

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._squares = self._products = 0.0

    def observe(self, rows: int, seconds: float) -> None:
        """A step of so many rows took so long."""
        self._weight = _FORGETS * self._weight + 1
        self._rows = _FORGETS * self._rows + rows
        self._seconds = _FORGETS * self._seconds + seconds
        self._squares = _FORGETS * self._squares + rows * rows
        self._products = _FORGETS * self._products + rows * seconds

    def worth(self, rows: int, tokens: float) -> float:
        """How likely a guess has to hold for its row to be worth its time, in a step of `rows` rows that is expected
        to bring `tokens`: as many tokens per second as the step brings without it."""
        if not self._weight:
            return _FIRST_HOLDS
        mean_rows, mean_s = self._rows / self._weight, self._seconds / self._weight
        variance = self._squares / self._weight - mean_rows**2
        covariance = self._products / self._weight - mean_rows * mean_s
        assumed = _ROWS_SHARE * mean_s / mean_rows
        row = max(0.0, (covariance + _DOUBT_ROWS2 * assumed) / (variance + _DOUBT_ROWS2))
        step_s = max(mean_s + (rows - mean_rows) * row, row)
        return min(1.0, tokens * row / step_s) if step_s else _FIRST_HOLDS


_FORGETS = 0.98
_ROWS_SHARE = 0.2
_DOUBT_ROWS2 = 0.05


class Guesses:
    """The guesses of all requests of a worker. most: tokens ahead; 0 guesses nothing.

    told: by position ahead, how many were computed with, and how many of those held.
    """

    def __init__(self, most: int = 0) -> None:
        self.most = most
        self.told: tuple[DraftPosition, ...] = ()
        self._time = StepTime()
        self._guessers: dict[str, Guesser] = {}

    def begin(self, request_id: str, token_ids: Sequence[int]) -> None:
        """A request with these tokens, any of which may come again."""
        if self.most:
            guesser = self._guessers[request_id] = Guesser()
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

    def stepped(self, rows: int, seconds: float) -> None:
        """A step of nothing but single tokens and guesses took so long."""
        if self.most:
            self._time.observe(rows, seconds)

    def came(self, request_id: str, guessed: int, token_ids: Sequence[int]) -> None:
        """A request that was guessed so many tokens ahead got these."""
        guesser = self._guessers.get(request_id)
        if guesser is None:
            return
        guesser.learn(guessed, len(token_ids) - 1)
        guesser.lookup.extend(token_ids)
        if guessed:
            self.told = tuple(self._counted(guessed, len(token_ids) - 1))

    def _counted(self, guessed: int, held: int) -> Iterator[DraftPosition]:
        for position in range(max(guessed, len(self.told))):
            told = self.told[position] if position < len(self.told) else DraftPosition()
            yield DraftPosition(guessed=told.guessed + (position < guessed), held=told.held + (position < held))


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
