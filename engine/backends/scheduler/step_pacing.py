"""StepPacing: how many prompt tokens a step computes, for first tokens to come early and answers to keep their pace.

A step of a language model costs nearly linearly in its work: something fixed, something for each answer and for the
context that it attends to, something for each prompt token and for what that attends to. These prices are fitted to
the worker's own steps while it serves, as all of them differ by machine, model, load and neighbours.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from itertools import chain
from statistics import median_high

from engine.backends.base import ItlReport
from engine.backends.scheduler.sequences import BatchPlan

_MEMORY_STEPS = 2000.0
"""Steps of a kind after which one counts a third in the prices."""
_SPEED_SHARE = 0.1
"""What one step counts in the speed."""
_FEW_STEPS = 8
_MAX_UNLIKE = 32
"""How many times as long as another of the first steps of its kind one may take."""
_KEPT_ERRORS = 256
_KEPT_SHARE = 0.995
_MAX_MARGIN = 2.0
_RESERVE = 1.03
"""The share that so few steps say they keep is itself uncertain."""
_GROWTH = 2
"""A step may have that many times the prompt tokens of the largest one that was measured."""
_BEYOND = 1.25
"""Where answers alone take longer than the target, prompts may make a step that much longer than these."""
_MIN_BEYOND = 1.1
"""The same where answers alone leave hardly any of the target: so that prompts never starve."""
_FIRST_STEPS = 64
_FIT_EVERY = 4
"""Steps from one fit to the next after the first ones: prices that 2,000 steps decide change little in one."""
_OBSERVE_EVERY = 8
_SHORT_S = 1 / 40
"""Without a target, prompts may take that much of any step: a stream still flows."""
_ALONE_EVERY = 256
"""Steps with prompts beside answers, one after the other, after which one has answers alone. While all have both, the
prices of one cannot be separated from those of the other; and these decide how many prompt tokens the next steps have,
and so on."""
_FIRST_ALONE_EVERY = 4
"""The same until a few steps had answers alone."""
_SWEEPS = 8
_SETTLED = 1e-6

MIN_CHUNK = 2
"""Tokens of a prompt that a step computes at least: a single one would look like that of an answer."""

_STEP_OVERHEAD = 1 / 8
"""Where several prompts wait, steps are as short as they can be with no more than that share of them being the price of
any step, of which the answers in them use most. A larger share lowers TTFT p50, and the last of many that come together
wait longer. Without a target, a long prompt leaves that share of a step to its answers: they wait no more than eight
times as long as they take alone, and take no more than an eighth of the prompt's time."""
_FEW_PROMPT_STEPS = 2

_Row = tuple[float, float, float, float, float, float, float]
"""1, tokens of answers, tokens that these attend to, all tokens, pairs that those of prompts make with what they attend
to, prompts, tokens of these that were computed before. So a token of an answer has at least the price of one of a
prompt: less of a step's price is mistaken for fixed. And what a prompt costs however few of its tokens a step computes,
such as reading what these attend to, is not mistaken for what the answers cost: else these would seem to leave no time
for more, and few be computed for ever."""
_PRICES = 7
_FIRST_PRICES = 5
"""The others are left out until `_SEPARATING_STEPS` steps had prompts: from few steps, any may seem to be all."""
_SEPARATING_STEPS = 16


class _Sums:
    """Normal equations of the steps of one kind, the older ones fading. Errors count as shares of a step's time, or of
    the expected one where that is longer: so none counts for more than all of it. Of the first steps of a kind nothing
    is expected yet, so those that seem to take no time, beside the others, are left out."""

    __slots__ = ("_first", "gram", "pull")

    def __init__(self) -> None:
        self._first: list[tuple[_Row, float, float]] = []
        self._clear()

    def add(self, row: _Row, seconds: float, expected_s: float) -> None:
        """Add a step."""
        if len(self._first) >= _FEW_STEPS:
            self._add(row, seconds, expected_s)
            return
        self._first.append((row, seconds, expected_s))
        self._clear()
        usual_s = median_high(took_s for _, took_s, _ in self._first)
        for each, took_s, least_s in self._first:
            if took_s * _MAX_UNLIKE >= usual_s:
                self._add(each, took_s, least_s)

    def _clear(self) -> None:
        self.gram = [[0.0] * _PRICES for _ in range(_PRICES)]
        self.pull = [0.0] * _PRICES

    def _add(self, row: _Row, seconds: float, expected_s: float) -> None:
        keep = 1.0 - 1.0 / _MEMORY_STEPS
        weight = max(seconds, expected_s) ** -2
        for index, value in enumerate(row):
            line, weighted = self.gram[index], weight * value
            for other in range(_PRICES):
                line[other] = line[other] * keep + weighted * row[other]
            self.pull[index] = self.pull[index] * keep + weighted * seconds


class _Recent:
    """The last numbers of many, in order of size."""

    __slots__ = ("_numbers", "_ordered")

    def __init__(self) -> None:
        self._numbers: deque[float] = deque()
        self._ordered: list[float] = []

    def add(self, number: float) -> None:
        """Add one, in place of the oldest."""
        self._numbers.append(number)
        insort(self._ordered, number)
        if len(self._numbers) > _KEPT_ERRORS:
            del self._ordered[bisect_left(self._ordered, self._numbers.popleft())]

    def quantile(self, share: float) -> float | None:
        """Return what this share of them stays within; None without any."""
        return self._ordered[int(share * (len(self._ordered) - 1))] if self._ordered else None


class StepPacing:
    """Prompt tokens of each step, by prices that are fitted to the steps of this worker.

    Where several prompts wait, their first tokens come the sooner the fewer of them share a step: all get theirs at its
    end. What that costs is the price that any step has, once more. `efficient_tokens` weighs one against the other.

    The prices are the non-negative least squares of recent steps, by coordinate descent (Franc, Hlavac and Navara
    2005), of what these would have taken at the usual speed. The speed of the machine is followed apart, as it changes
    within seconds, when nearly equal steps say nothing of single prices. Steps of answers alone and steps with prompts
    fade each at their own pace, so that hours without a prompt forget nothing of what one costs.

    A step is planned to take no longer than the target divided by the factor that 99 of 100 recent steps stayed within
    of what was expected of them, and never has more than twice the prompt tokens of the largest that was measured
    beside answers.

    Without a target, a long prompt beside answers takes no more of a step than `prompt_s`.

    target_s: seconds between two tokens of an answer; None for no target.
    """

    def __init__(self) -> None:
        self.target_s: float | None = None
        self._answers, self._mixed = _Sums(), _Sums()
        self._prices = [0.0] * _PRICES
        self._slower = 1.0
        self._counts = [0, 0]
        self._largest = 0.0
        self._ratios, self._errors = _Recent(), _Recent()
        self._floor: tuple[int, float] = (0, 0.0)
        self._passed_over = 0
        self._shared_in_a_row = 0
        self._pairs_per_token = 0.0

    def set_target(self, target_s: float | None) -> None:
        """Pace for this from the next step on."""
        self.target_s = target_s

    def observe(self, plan: BatchPlan, seconds: float) -> None:
        """Take the time of a step that is over, before its sequences change."""
        if seconds > plan.restored_s and plan.sequences and (plan.prompts or not self._passes_over()):
            self._observe(_row_of(plan), seconds - plan.restored_s)
        elif not plan.prompts and self.wants_answers_alone:
            self._shared_in_a_row = 0  # else prompts would wait until no step reads pages back any more

    def observe_answers(self, answers: int, context: int, seconds: float) -> None:
        """Take the time of a step of answers alone, which attend to `context` tokens together."""
        if seconds > 0 and not self._passes_over():
            self._observe(_answers_row(answers, context), seconds)

    def _passes_over(self) -> bool:
        """Return whether the next step of answers alone is not looked at: without a target, few of them say enough."""
        if self.target_s is not None or self._counts[False] < _FIRST_STEPS or self.wants_answers_alone:
            return False
        self._passed_over = (self._passed_over + 1) % _OBSERVE_EVERY
        return self._passed_over != 0

    def _observe(self, row: _Row, seconds: float) -> None:
        answers, prompt_tokens = row[1], row[3] - row[1]
        expected_s = self._seconds(row)
        if answers:
            self._floor = int(answers), self._answers_s(answers, row[2])
        if self._counts[bool(prompt_tokens)] >= _FEW_STEPS:
            ratio = seconds / max(expected_s, 1e-9)
            if answers:
                self._ratios.add(ratio)
                self._errors.add(abs(ratio - 1.0))
            self._slower *= min(max(ratio, 0.1), 10.0) ** _SPEED_SHARE
        sums = self._mixed if prompt_tokens else self._answers
        sums.add(row, seconds / self._slower, expected_s / self._slower)
        self._counts[bool(prompt_tokens)] += 1
        if prompt_tokens:
            self._pairs_per_token += (row[4] / prompt_tokens - self._pairs_per_token) * _SPEED_SHARE
        else:
            self._shared_in_a_row = 0
        if answers and prompt_tokens:
            self._largest = max(prompt_tokens, self._largest)
            if self.target_s is not None or seconds > _SHORT_S:
                self._shared_in_a_row += 1
        steps = sum(self._counts)
        if steps < _FIRST_STEPS or steps % _FIT_EVERY == 0:
            self._fit()

    @property
    def wants_answers_alone(self) -> bool:
        """True if the next step that has answers is to have no prompts, for its price to be known."""
        every = _ALONE_EVERY if self._counts[False] >= _FEW_STEPS else _FIRST_ALONE_EVERY
        return self._shared_in_a_row >= every

    def efficient_tokens(self) -> float:
        """Return the prompt tokens beyond which a step computes them hardly any cheaper; infinity until that is known.

        Of a step of n tokens, what any step costs is the share fixed / (fixed + n * token).
        """
        fixed_s, token_s = self._prices[0], self._prices[3] + self._prices[4] * self._pairs_per_token
        if self._counts[False] < _FEW_STEPS or self._counts[True] < _FEW_PROMPT_STEPS or not token_s:
            return math.inf
        return fixed_s / token_s * (1 / _STEP_OVERHEAD - 1)

    def spare_s(self, answers: int, context: int) -> float | None:
        """Return the seconds that a step may take besides its answers, which attend to `context` tokens together; None
        without a target."""
        if self.target_s is None:
            return None
        return self._spare_s(self._answers_s(answers, context))

    def prompt_tokens(self, plan: BatchPlan, start: int, most: int, least: int) -> int:
        """Return the prompt tokens, between `least` and `most`, for a step that has the answers of `plan`, and has
        restored pages before.

        start: position of the first of them.
        """
        if self.target_s is None or not plan.sequences:
            return most
        if not self._largest:
            return least
        prompt_s = self.prompt_s(plan)
        growing = min(most, _GROWTH * max(self._largest, least))
        return int(min(growing, max(self.min_tokens(least, prompt_s, start), self.affordable_tokens(prompt_s, start))))

    def min_tokens(self, least: int, seconds: float, start: int) -> int:
        """Return the prompt tokens of a step in any case, from position `start` on, where prompts should take so long.

        Without a target, or known prices, `least`; else no more than MIN_CHUNK, as at the end of a long prompt `least`
        may take longer than the target leaves. Where what any token costs there takes longer, the target is missed
        whatever there is, and few tokens only make for more such steps: then as many as take a quarter of that.
        """
        if self.target_s is None or not self._largest:
            return least
        any_s = self.tokens_s(start, 0)
        few = min(least, MIN_CHUNK)
        return few if seconds >= any_s else max(few, int(min(self._tokens_in(any_s / 4, start), self._largest)))

    def prompt_s(self, plan: BatchPlan) -> float:
        """Return the seconds for prompts in a step that has the answers of `plan`; infinity in one that has none."""
        if not plan.sequences:
            return math.inf
        _, answers, context, *_ = _row_of(plan)
        floor_s = self._answers_s(answers, context)
        if self.target_s is None:
            return max(_SHORT_S, floor_s * (1 / _STEP_OVERHEAD - 1))
        return max(0.0, self._spare_s(floor_s) - plan.restored_s)

    def affordable_tokens(self, seconds: float, start: int) -> float:
        """Return the tokens of a prompt, from position `start` on, that take so long; 0 where any take longer."""
        left_s = seconds - self.tokens_s(start, 0)
        return self._tokens_in(left_s, start) if left_s > 0 else 0.0

    def tokens_s(self, start: int, tokens: int) -> float:
        """Return the seconds that tokens of a prompt take, from position `start` on.

        With a target, what any of them take too. Without one, each step that had fewer of them for that would pay it
        again.
        """
        pairs = tokens * (start + (tokens + 1) / 2)
        *_, token, pair, prompt, read = self._prices
        any_s = 0.0 if self.target_s is None else prompt + read * start
        return self._slower * (any_s + token * tokens + pair * pairs)

    def _tokens_in(self, seconds: float, start: int) -> float:
        """Return the tokens of a prompt that take so long besides what any do."""
        token_s, pair_s = self._slower * self._prices[3], self._slower * self._prices[4]
        linear_s = token_s + pair_s * (start + 0.5)
        root_s = linear_s + math.sqrt(linear_s * linear_s + 2 * pair_s * seconds)
        return 2 * seconds / root_s if root_s else math.inf

    def _spare_s(self, floor_s: float) -> float:
        assert self.target_s is not None
        planned_s = self.target_s / (self._margin * _RESERVE)
        return max(planned_s, floor_s * (_MIN_BEYOND if floor_s < planned_s else _BEYOND)) - floor_s

    def report(self) -> ItlReport | None:
        """Return how well steps are foretold, and what the answers alone take; None without a target."""
        if self.target_s is None:
            return None
        answers, floor_s = self._floor
        return ItlReport(
            target_s=self.target_s,
            floor_s=floor_s * self._margin,
            answers=answers,
            error=self._errors.quantile(0.5),
        )

    @property
    def _margin(self) -> float:
        """How many times as long as expected nearly all recent steps took at most."""
        return min(max(self._ratios.quantile(_KEPT_SHARE) or 1.0, 1.0), _MAX_MARGIN)

    def _answers_s(self, answers: float, context: float) -> float:
        return self._seconds(_answers_row(answers, context))

    def _seconds(self, row: _Row) -> float:
        return self._slower * sum(price * value for price, value in zip(self._prices, row, strict=True))

    def _fit(self) -> None:
        """Bring the prices up to date, from where they are."""
        first, second, prices = self._answers, self._mixed, self._prices
        gram = [[a + b for a, b in zip(*lines, strict=True)] for lines in zip(first.gram, second.gram, strict=True)]
        pull = [a + b for a, b in zip(first.pull, second.pull, strict=True)]
        count = _PRICES if self._counts[True] >= _SEPARATING_STEPS else _FIRST_PRICES
        for _ in range(_SWEEPS):
            moved = 0.0
            for index, line in enumerate(gram[:count]):
                if line[index] <= 0.0:
                    continue
                slope = pull[index] - _dot(line, prices)
                price = max(0.0, prices[index] + slope / line[index])
                moved = max(moved, abs(price - prices[index]) * math.sqrt(line[index]))
                prices[index] = price
            if moved < _SETTLED:
                break


def _dot(line: Sequence[float], prices: Sequence[float]) -> float:
    return sum(value * price for value, price in zip(line, prices, strict=True))


def _answers_row(answers: float, context: float) -> _Row:
    return 1.0, float(answers), float(context), float(answers), 0.0, 0.0, 0.0


def _row_of(plan: BatchPlan) -> _Row:
    answers = context = prompt_tokens = prompts = computed = 0
    pairs = 0.0
    for chunk in chain(plan.chunks, plan.dropped):
        tokens = len(chunk.token_ids)
        if chunk.prefills:
            prompts += 1
            computed += chunk.start
            prompt_tokens += tokens
            pairs += tokens * (chunk.start + (tokens + 1) / 2)
        else:
            answers += tokens
            context += tokens * (chunk.start + tokens)
    all_tokens = float(answers + prompt_tokens)
    return 1.0, float(answers), float(context), all_tokens, pairs, float(prompts), float(computed)
