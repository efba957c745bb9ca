"""First tokens of prompts that arrive together, on a machine whose steps take what is written here."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import pytest

from engine.backends.scheduler.page_pool import PagePool
from engine.backends.scheduler.scheduler import Scheduler
from engine.backends.scheduler.sequences import BatchPlan, Sequence
from engine.backends.scheduler.step_pacing import StepPacing
from engine.simulation.step_costs import StepCosts, StepShape

ANSWER_TOKENS = 128
STEP_TOKENS = 512
CPU = StepCosts(fixed_s=6.6e-3, decode_s=4e-4, prompt_token_s=6e-5, prompt_pair_s=2.5e-6)
"""As fitted to the 135M shape on two cores of a Zen 4: a prompt of 128 tokens takes longer than reading the weights."""
GPU = StepCosts(fixed_s=9e-3, decode_s=5e-5, prompt_token_s=1e-5)
"""As a model of 7B on a card: a step of 512 tokens takes less than twice as long as one of a token."""


class Server:
    """A scheduler over a virtual clock, and clients that ask again as soon as their answer is complete.

    ttft_s: of each request, in the order of their first tokens.  steps: prompt tokens of each step.
    """

    def __init__(self, costs: StepCosts, *, clients: Callable[[int], int] = lambda number: 0) -> None:
        self.now_s = 0.0
        self.scheduler = Scheduler(
            PagePool(4_000, 16),
            max_prompts=64,
            step_tokens=STEP_TOKENS,
            max_model_len=100_000,
            clock=lambda: self.now_s,
        )
        self.costs = costs
        self.ttft_s: list[float] = []
        self.steps: list[int] = []
        self._clients = clients
        self._number = 0
        self._arrived_s: dict[str, float] = {}

    def submit(self, tokens: int | None = None) -> Sequence:
        """A request that shares no page with another; about 128 tokens of prompt."""
        self._number += 1
        tokens = tokens or 112 + self._number * 5 % 33
        ids = [self._number, *range(1, tokens)]
        sequence = Sequence(f"r{self._number}", ids, tokens, client=self._clients(self._number))
        self.scheduler.submit(sequence)
        self._arrived_s[sequence.id] = self.now_s
        return sequence

    def step(self) -> BatchPlan:
        """One step; answers that are complete leave."""
        plan = self.scheduler.plan()
        self.scheduler.times.begin_step()
        self.now_s += self.costs.seconds(StepShape.of_plan(plan))
        self.steps.append(sum(len(chunk.token_ids) for _, chunk in plan.prompts))
        sampled = plan.sampled_sequences
        self.scheduler.commit(plan, [[7] for _ in sampled])
        for sequence in sampled:
            if sequence.num_tokens == sequence.prompt_tokens + 1:
                self.ttft_s.append(self.now_s - self._arrived_s.pop(sequence.id))
        return plan

    def serve(self, clients: int, requests: int, answer: int = ANSWER_TOKENS) -> float:
        """Serve so many clients, who begin together; return generated tokens per second."""
        began_s, first = self.now_s, len(self.ttft_s)
        live = [self.submit() for _ in range(clients)]
        left = requests - clients
        while live:
            self.step()
            for sequence in [each for each in live if each.num_tokens == each.prompt_tokens + answer]:
                self.scheduler.remove(sequence)
                live.remove(sequence)
                if left:
                    left -= 1
                    live.append(self.submit())
        return (len(self.ttft_s) - first) * answer / (self.now_s - began_s)

    def experienced(self) -> Server:
        """Itself, after it has served enough to know what its steps cost."""
        self.serve(3, 6)
        self.serve(32, 64)
        self.ttft_s.clear()
        self.steps.clear()
        return self


def full_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take as many prompts as step_tokens allow."""
    monkeypatch.setattr(StepPacing, "efficient_tokens", lambda self: math.inf)
    monkeypatch.setattr(StepPacing, "prompt_s", lambda self, plan: math.inf)


@pytest.mark.parametrize("clients", [8, 32])
def test_first_tokens_do_not_wait_for_the_prompts_of_all_others(clients: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At equal throughput, in the wave that arrives together and in those after it."""
    server = Server(CPU).experienced()
    rate = server.serve(clients, 4 * clients)
    full_steps(monkeypatch)
    full = Server(CPU).experienced()
    full_rate = full.serve(clients, 4 * clients)
    assert statistics.median(server.ttft_s) < 0.75 * statistics.median(full.ttft_s)
    assert statistics.fmean(server.ttft_s) < 0.85 * statistics.fmean(full.ttft_s)
    assert rate > 0.99 * full_rate
    wave, full_wave = server.ttft_s[:clients], full.ttft_s[:clients]
    assert statistics.median(wave) < statistics.median(full_wave)
    assert statistics.fmean(wave) < 1.03 * statistics.fmean(full_wave)
    assert max(wave) < 1.15 * max(full_wave)


def test_where_no_step_has_answers_alone_prompts_share_the_whole_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of one token, as of classifiers: what any step costs hardly shows in steps of prompts."""
    server = Server(CPU)
    rate = server.serve(32, 96, answer=1)
    full_steps(monkeypatch)
    full = Server(CPU)
    assert rate == full.serve(32, 96, answer=1)
    assert (server.steps, server.ttft_s) == (full.steps, full.ttft_s)
    assert server.steps[:-1] == [STEP_TOKENS] * (len(server.steps) - 1)


def test_where_tokens_are_nearly_free_prompts_share_the_whole_step(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(GPU).experienced()
    server.serve(32, 96)
    full_steps(monkeypatch)
    full = Server(GPU).experienced()
    full.serve(32, 96)
    assert server.steps == full.steps


def test_until_it_is_known_what_steps_cost_prompts_share_the_whole_step() -> None:
    server = Server(CPU)
    for _ in range(8):
        server.submit(128)
    server.step()
    assert server.steps == [STEP_TOKENS]


def test_a_prompt_that_fits_into_a_step_is_never_cut() -> None:
    server = Server(CPU).experienced()
    for _ in range(12):
        server.submit()
    while server.scheduler.waiting:
        plan = server.step()
        assert all(chunk.sample for _, chunk in plan.prompts)


def test_a_long_prompt_gets_the_whole_step() -> None:
    server = Server(CPU).experienced()
    server.submit(5 * STEP_TOKENS)
    for _ in range(5):
        server.step()
    assert server.steps == [STEP_TOKENS] * 5


def test_prompts_of_many_clients_are_whole_and_none_is_passed_over() -> None:
    server = Server(CPU, clients=lambda number: number).experienced()
    waiting = [server.submit(128) for _ in range(8)]
    order: list[Sequence] = []
    while len(order) < len(waiting):
        plan = server.step()
        assert sum(len(chunk.token_ids) for chunk in plan.chunks) <= STEP_TOKENS
        assert all(chunk.sample for _, chunk in plan.prompts)
        order += [sequence for sequence, _ in plan.prompts]
    assert order == waiting


def test_without_a_target_few_steps_of_answers_are_looked_at() -> None:
    """Looking at a step costs as much as planning it; prices need no more."""
    looked: list[bool] = []
    pacing = StepPacing()
    before = 0
    for number in range(2000):
        pacing.observe_answers(8, 1000 + number, 0.01)
        after = sum(pacing._counts)
        looked.append(after > before)
        before = after
    assert sum(looked[1000:]) == 125
    pacing.set_target(0.05)
    pacing.observe_answers(8, 1000, 0.01)
    pacing.observe_answers(8, 1000, 0.01)
    assert sum(pacing._counts) == before + 2
