"""The budget of a step, changed while requests run."""

from __future__ import annotations

from engine.worker_process.protocol import Codec, SetItlTarget, SetStepTokens, SetThreads
from tests.fakes.scheduling import scheduler, step, submit


def test_a_smaller_budget_cuts_prompts_from_the_next_step_on() -> None:
    s = scheduler()
    submit(s, "a", 24)
    first = [len(chunk.token_ids) for chunk in step(s).chunks]
    s.limits.set_step_tokens(4)
    then = [len(chunk.token_ids) for chunk in step(s).chunks]
    assert (first, then) == ([16], [4])
    s.check()


def test_a_budget_that_memory_did_not_allow_is_found_out_anew() -> None:
    s = scheduler()
    submit(s, "a", 24)
    step(s)
    assert s.shrink()
    s.limits.set_step_tokens(32)
    assert s.limits.step_tokens == 32


def test_all_cross_the_channel() -> None:
    codec = Codec()
    targets = SetItlTarget(target_s=0.05), SetItlTarget(target_s=None)
    for message in (SetStepTokens(step_tokens=64), SetThreads(threads=3), *targets):
        assert codec.command(codec.frame(message)[4:]) == message
