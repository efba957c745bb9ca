"""Looking for guesses costs no more than a small share of the time, unless guesses save more."""

from __future__ import annotations

import pytest

from engine.backends.torch.speculation.speculation import FREE_SHARE, SpeculationBudget

STEP_S = 0.002


def run(budget: SpeculationBudget, steps: int, *, looking_s: float, saved_s: float = 0.0) -> tuple[int, float]:
    """In how many of the steps was looked, and how long it took in all, less what was saved."""
    looked, cost_s = 0, 0.0
    for _ in range(steps):
        if budget.should_draft():
            budget.charge(looking_s)
            budget.credit(saved_s)
            looked, cost_s = looked + 1, cost_s + looking_s - saved_s
        budget.record_step(STEP_S)
    return looked, cost_s


@pytest.mark.parametrize("share", [0.02, 0.1, 0.5, 3.0])
def test_looking_that_finds_nothing_costs_a_hundredth_at_most(share: float) -> None:
    _, cost_s = run(SpeculationBudget(), 20_000, looking_s=share * STEP_S)
    assert cost_s < 2 * FREE_SHARE * 20_000 * STEP_S


def test_a_single_long_look_at_the_beginning_is_forgiven() -> None:
    budget = SpeculationBudget()
    run(budget, 1, looking_s=5 * STEP_S)
    assert budget.should_draft()


def test_looking_that_costs_next_to_nothing_goes_on() -> None:
    assert run(SpeculationBudget(), 5_000, looking_s=0.9 * FREE_SHARE * STEP_S)[0] == 5_000


def test_looking_that_is_paid_for_goes_on() -> None:
    assert run(SpeculationBudget(), 5_000, looking_s=0.1 * STEP_S, saved_s=0.11 * STEP_S)[0] == 5_000


def test_what_saves_nothing_any_more_is_given_up_soon_however_much_it_saved() -> None:
    budget = SpeculationBudget()
    run(budget, 10_000, looking_s=0.1 * STEP_S, saved_s=0.5 * STEP_S)
    looked, _ = run(budget, 1_000, looking_s=0.1 * STEP_S)
    assert looked < 400


def test_what_begins_to_save_is_found_out_and_goes_on() -> None:
    budget = SpeculationBudget()
    run(budget, 5_000, looking_s=0.1 * STEP_S)
    run(budget, 520, looking_s=0.1 * STEP_S, saved_s=0.2 * STEP_S)
    assert run(budget, 1_000, looking_s=0.1 * STEP_S, saved_s=0.2 * STEP_S)[0] == 1_000
