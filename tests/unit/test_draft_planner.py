"""For whom a draft model guesses and how far: decided over made-up times, of steps and of passes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.backends.torch.speculation.draft_planner import (
    MAX_LAG_TOKENS,
    DraftCandidate,
    DraftPlanner,
    DraftTask,
    num_draft_tokens,
)
from engine.backends.torch.speculation.step_time import StepTime

STEP_S, STEP_ROW_S = 0.020, 0.0005


def learned(fixed_s: float, row_s: float) -> StepTime:
    time = StepTime()
    for rows in (1, 3, 5, 2, 8, 4, 6, 1) * 8:
        time.observe(rows, fixed_s + rows * row_s)
    return time


def chosen(*holds: float, pass_s: float, spare: int = 99, most: int = 7) -> list[int]:
    return num_draft_tokens(
        holds,
        [most] * len(holds),
        rows=len(holds),
        tokens=float(len(holds)),
        spare=spare,
        time=learned(STEP_S, STEP_ROW_S),
        passes=learned(pass_s, 0.0001),
    )


class Machine:
    """A worker that decodes `decodes` sequences, and a draft model of which so many guesses in a row hold."""

    def __init__(self, *, holds: int, pass_s: float, decodes: int = 1, behind: int = 100) -> None:
        self.time = StepTime()
        self.drafting = DraftPlanner(4, self.time, StepTime())
        self.holds, self.pass_s, self.decodes = holds, pass_s, decodes
        self.behind = dict.fromkeys(map(str, range(decodes)), behind)
        self.steps, self.spent_s, self.draft_s, self.tokens, self.fed = 0, 0.0, 0.0, 0, 0

    def step(self) -> dict[str, DraftTask]:
        candidates = [DraftCandidate(name, behind, 99) for name, behind in self.behind.items()]
        turns = self.drafting.plan(candidates, rows=self.decodes, tokens=float(self.decodes), spare=99, budget=128)
        for ahead in range(max((max(turn.num_drafts, 1) for turn in turns.values()), default=0)):
            fed = [
                turn.catch_up if ahead == 0 else 1 for turn in turns.values() if turn.num_drafts > ahead or ahead == 0
            ]
            self.draft_s += self.pass_s
            self.drafting.record_pass(sum(fed), self.pass_s, max(fed) <= MAX_LAG_TOKENS)
        rows = self.decodes + sum(turn.num_drafts for turn in turns.values())
        seconds = STEP_S + rows * STEP_ROW_S
        self.time.observe(rows, seconds)
        self.drafting.record_step(self.decodes, seconds)
        for name in self.behind:
            turn = turns.get(name, DraftTask(0, 0))
            held = min(self.holds, turn.num_drafts)
            if turn.num_drafts:
                self.drafting.record_result(name, turn.num_drafts, held)
            self.fed += turn.catch_up
            self.behind[name] += 1 + held - turn.catch_up - min(held, max(0, turn.num_drafts - 1))
            self.tokens += 1 + held
        self.steps += 1
        self.spent_s += seconds
        return turns

    @property
    def speedup(self) -> float:
        """Against the same machine without a draft model."""
        plain_s = self.tokens / self.decodes * (STEP_S + self.decodes * STEP_ROW_S)
        return plain_s / (self.spent_s + self.draft_s)


def test_guesses_that_hold_and_passes_that_cost_little_go_far() -> None:
    assert chosen(0.95, pass_s=0.001) == [7]


def test_a_pass_is_made_where_it_brings_more_tokens_a_second_than_the_step_without() -> None:
    assert chosen(0.6, pass_s=0.009)[0] >= 1
    assert chosen(0.4, pass_s=0.009) == [0]


def test_the_likeliest_go_first_into_the_room_there_is() -> None:
    assert chosen(0.5, 0.95, 0.5, pass_s=0.001, spare=2) == [1, 1, 0]
    assert chosen(0.2, 0.95, pass_s=0.001, spare=3)[1] > chosen(0.2, 0.95, pass_s=0.001, spare=3)[0]


@given(
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 7)), max_size=6),
    st.integers(0, 20),
    st.floats(0.0001, 0.05),
)
def test_nobody_gets_more_than_there_is_room_for(pairs: list[tuple[float, int]], spare: int, pass_s: float) -> None:
    holds, rooms = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    taken = num_draft_tokens(
        holds,
        rooms,
        rows=max(1, len(pairs)),
        tokens=float(max(1, len(pairs))),
        spare=spare,
        time=learned(STEP_S, STEP_ROW_S),
        passes=learned(pass_s, 0.0),
    )
    assert sum(taken) <= spare
    assert all(count <= room for count, room in zip(taken, rooms, strict=True))


def test_nothing_is_guessed_before_a_step_was_timed_and_nothing_where_there_is_no_room() -> None:
    drafting = DraftPlanner(4, StepTime(), StepTime())
    assert drafting.plan([DraftCandidate("a", 1, 9)], rows=1, tokens=1.0, spare=9, budget=9) == {}
    drafting = DraftPlanner(4, learned(STEP_S, STEP_ROW_S), StepTime())
    assert drafting.plan([DraftCandidate("a", 1, 9)], rows=1, tokens=1.0, spare=0, budget=9) == {}
    assert drafting.plan([], rows=1, tokens=1.0, spare=9, budget=9) == {}


@pytest.mark.parametrize("decodes", [1, 8])
def test_a_draft_model_that_is_right_is_used_all_the_time(decodes: int) -> None:
    machine = Machine(holds=4, pass_s=0.002, decodes=decodes)
    for _ in range(400):
        machine.step()
    assert machine.speedup > 1.8


@pytest.mark.parametrize("decodes", [1, 8])
@pytest.mark.parametrize("pass_s", [0.002, 0.020])
def test_a_useless_one_costs_next_to_nothing(decodes: int, pass_s: float) -> None:
    machine = Machine(holds=0, pass_s=pass_s, decodes=decodes)
    for _ in range(3000):
        machine.step()
    assert machine.speedup > 0.97


def test_one_that_is_right_but_as_slow_as_the_model_costs_next_to_nothing() -> None:
    machine = Machine(holds=4, pass_s=0.040)
    for _ in range(3000):
        machine.step()
    assert machine.speedup > 0.97


def test_texts_that_are_read_for_nothing_are_paid_for_out_of_what_was_saved() -> None:
    """Every answer ends right after the draft model has read its long prompt."""
    machine = Machine(holds=4, pass_s=0.010)
    for _ in range(3000):
        machine.behind["0"] = 128
        machine.step()
    assert machine.speedup > 0.95


def test_one_that_gets_better_is_found_out() -> None:
    machine = Machine(holds=0, pass_s=0.002)
    for _ in range(1000):
        machine.step()
    machine.holds = 4
    machine.tokens, machine.spent_s, machine.draft_s = 0, 0.0, 0.0
    for _ in range(3000):
        machine.step()
    assert machine.speedup > 1.3


def test_a_text_that_is_longer_than_a_pass_is_read_in_several() -> None:
    machine = Machine(holds=4, pass_s=0.002, behind=300)
    machine.step()
    fed = [turn for _ in range(4) for turn in machine.step().values()]
    assert [turn.catch_up for turn in fed[:3]] == [128, 128, 300 + 3 - 256]
    assert [bool(turn.num_drafts) for turn in fed[:3]] == [False, False, True]
