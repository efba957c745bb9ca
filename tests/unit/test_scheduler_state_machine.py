"""Whatever happens in whatever order, the scheduler's accounts add up and nobody is forgotten."""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.backends.common.kv_tiers import KvTiers
from engine.backends.common.page_folder import PageFolder
from engine.backends.scheduler.batch import ChunkInput
from engine.backends.scheduler.scheduler import Scheduler
from engine.backends.scheduler.sequences import BatchPlan, Sequence
from engine.errors import ContextLengthExceeded
from tests.fakes.scheduling import scheduler
from tests.fakes.tiered import FakePages

STREAMS = [[0, 1, 0, 0, 1] * 6, [1, 1, 0] * 10]
PROMPTS = st.builds(
    lambda stream, length, tail: (stream[:length] + tail)[:29],
    st.sampled_from(STREAMS),
    st.integers(1, 29),
    st.lists(st.integers(0, 1), max_size=3),
)
"""Prompts that often share a long prefix."""


class SchedulerWalk(RuleBasedStateMachine):
    """Random life of a small scheduler, with a fake KV cache: a page's slots hold the very tokens fed to it.

    Before each chunk, the pages must hold exactly the tokens that come before it: this proves that every token is
    fed once, in order, into the right place, and that shared prefixes and preemption never mix sequences up.
    """

    def __init__(self) -> None:
        super().__init__()
        self.page_tokens = 3
        self.pages = FakePages(self.page_tokens)
        self.slots = self.pages.tokens
        self.scheduler = self.new_scheduler()
        self.live: dict[str, Sequence] = {}
        self.expected: dict[str, list[int]] = {}
        self.count = 0

    def new_scheduler(self) -> Scheduler:
        return scheduler(pages=9, page_tokens=3, max_prompts=3, step_tokens=7, max_model_len=40, clock=self.clock)

    def clock(self) -> float:
        return 0.0

    @rule(prompt=PROMPTS, generated=st.lists(st.integers(0, 1), max_size=4), client=st.integers(0, 2))
    def submit(self, prompt: list[int], generated: list[int], client: int) -> None:
        self.count += 1
        new = Sequence(str(self.count), prompt + generated, len(prompt), client=client)
        if len(prompt) > 27:
            with pytest.raises(ContextLengthExceeded):
                self.scheduler.submit(new)
            return
        self.scheduler.submit(new)
        self.live[new.id] = new
        self.expected[new.id] = prompt + generated

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        self.scheduler.remove(self.live.pop(name))

    @rule(max_prompts=st.integers(1, 5))
    def set_max_prompts(self, max_prompts: int) -> None:
        self.scheduler.limits.set_max_prompts(max_prompts)

    @rule()
    def run_out_of_memory(self) -> None:
        for ended in self.scheduler.plan().exhausted:
            del self.live[ended.id]
        self.scheduler.shrink()

    @rule(seed=st.integers(0, 2**16), steps=st.integers(1, 6))
    def step(self, seed: int, steps: int) -> None:
        draw = random.Random(seed)
        for _ in range(steps):
            self.one_step(draw)

    def one_step(self, draw: random.Random) -> None:
        running = len(self.scheduler.running)
        decodes = {seq.id for seq in self.scheduler.running if seq.num_uncomputed == 1}
        preemptions = self.scheduler.counters.preemptions
        restored = self.scheduler.counters.restored_tokens
        guesses = {name: [draw.randint(0, 1) for _ in range(draw.randint(0, 5))] for name in decodes}
        plan = self.scheduler.plan()
        self.scheduler.add_drafts(plan, guesses)
        preempted = self.scheduler.counters.preemptions > preemptions
        assert len(self.scheduler.running) <= max(self.scheduler.limits.max_prompts, running)
        tokens_planned = sum(len(chunk.token_ids) - chunk.num_drafts for chunk in plan.chunks)
        assert tokens_planned <= max(7, len(decodes) + 3)
        if not preempted:
            self.uses_its_tokens(plan, tokens_planned)
        if not preempted and not plan.exhausted:
            assert decodes <= {seq.id for seq in plan.sequences}
        for seq, chunk in zip(plan.sequences, plan.chunks, strict=True):
            self.feed(seq, chunk)
        tokens = []
        for chunk in plan.chunks:
            if chunk.sample:
                held = draw.randint(0, chunk.num_drafts)
                tokens.append([*chunk.token_ids[1:][:held], draw.randint(0, 1)])
        for seq, new in zip(plan.sampled_sequences, tokens, strict=True):
            self.expected[seq.id] += new[: 40 - len(self.expected[seq.id])]
        ended = plan.exhausted + self.scheduler.commit(plan, tokens)
        for seq in ended:
            assert seq.num_tokens >= min(40, 9 * 3)
            del self.live[seq.id]
        self.scheduler.check()
        has_restored = self.scheduler.counters.restored_tokens > restored
        assert plan.chunks or ended or preempted or has_restored or not self.live, (
            "work is left but the step did nothing"
        )

    def uses_its_tokens(self, plan: BatchPlan, tokens_planned: int) -> None:
        uncomputed = sum(seq.num_uncomputed for seq in self.scheduler.running if not seq.stored_pages)
        assert tokens_planned >= min(self.scheduler.limits.step_tokens, uncomputed), "tokens of the step are left over"

    def feed(self, seq: Sequence, chunk: ChunkInput) -> None:
        size, start, pages = self.page_tokens, chunk.start, list(chunk.pages)
        fed = list(chunk.token_ids)
        tokens = fed[: len(fed) - chunk.num_drafts]
        known = self.expected[seq.id]
        assert [self.slots[pages[p // size], p % size] for p in range(start)] == known[:start]
        assert tokens
        assert tokens == known[start : start + len(tokens)]
        assert chunk.sample == (start + len(tokens) == len(known))
        for offset, token in enumerate(fed):
            position = start + offset
            self.slots[pages[position // size], position % size] = token

    @invariant()
    def accounts_add_up(self) -> None:
        self.scheduler.check()
        assert len(self.scheduler.running) + len(self.scheduler.waiting) == len(self.live)
        for name, seq in self.live.items():
            assert seq.token_ids == self.expected[name]

    def teardown(self) -> None:
        for seq in self.live.values():
            self.scheduler.remove(seq)
        assert self.scheduler.pool.free_pages == 9
        self.scheduler.check()


class PacedSchedulerWalk(SchedulerWalk):
    """The same where steps take time, at times with a target for it. They may compute fewer tokens than they may have,
    but some of a prompt in each, except for one at times that shows what answers cost, so all requests end."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.step_s, self.token_s = 0.1, 1.0
        super().__init__()

    def clock(self) -> float:
        self.now_s += self.step_s
        return self.now_s

    def feed(self, seq: Sequence, chunk: ChunkInput) -> None:
        self.now_s += self.token_s * len(chunk.token_ids)
        super().feed(seq, chunk)

    @rule(step_s=st.floats(0.0, 1.0), token_s=st.floats(0.0, 1.0))
    def change_pace(self, step_s: float, token_s: float) -> None:
        self.step_s, self.token_s = step_s, token_s

    @rule(target_s=st.none() | st.floats(0.01, 10.0))
    def set_itl_target(self, target_s: float | None) -> None:
        self.scheduler.pacing.set_target(target_s)

    @rule(seed=st.integers(0, 2**16))
    def finish(self, seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(40 * len(self.live)):
            self.one_step(draw)
        assert not self.live

    def uses_its_tokens(self, plan: BatchPlan, tokens_planned: int) -> None:
        if any(seq.num_uncomputed > 1 for seq in self.scheduler.running):
            is_for_a_price = bool(plan.sequences) and self.scheduler.pacing.wants_answers_alone
            assert plan.prompts or is_for_a_price, "no prompt goes on"


class TieredSchedulerWalk(SchedulerWalk):
    """The same with a tier that keeps the pages, of which some are lost or damaged, and worker deaths: what is waiting
    or running then goes on in a new scheduler over empty pages."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp())
        self.batch_pages = 16
        super().__init__()

    def new_scheduler(self) -> Scheduler:
        tiers = KvTiers([PageFolder("host", self.root, 1 << 20, "model").open()], self.pages)
        tiers.batch_pages = self.batch_pages
        return scheduler(
            pages=9,
            page_tokens=3,
            max_prompts=3,
            step_tokens=7,
            max_model_len=40,
            salt=b"same",
            tiers=tiers,
            clock=self.clock,
        )

    @rule(data=st.data(), damage=st.sampled_from(["remove", "tear"]))
    def damage(self, data: st.DataObject, damage: str) -> None:
        files = sorted(self.root.glob("*/*"))
        if files:
            file = data.draw(st.sampled_from(files))
            file.unlink() if damage == "remove" else file.write_bytes(file.read_bytes()[:-1])

    @rule()
    def die(self) -> None:
        self.slots.clear()
        self.scheduler = self.new_scheduler()
        for name, old in list(self.live.items()):
            self.live[name] = Sequence(name, list(old.token_ids), old.prompt_tokens, client=old.client, resumed=True)
            self.scheduler.submit(self.live[name])

    def teardown(self) -> None:
        super().teardown()
        shutil.rmtree(self.root)


class SlowTieredSchedulerWalk(TieredSchedulerWalk):
    """The same with a tier of which a page takes longer than a step may restore."""

    def new_scheduler(self) -> Scheduler:
        self.batch_pages = 1
        return super().new_scheduler()

    def clock(self) -> float:
        return float(self.scheduler.counters.restored_tokens)


TestSchedulerWalk = SchedulerWalk.TestCase
TestSchedulerWalk.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestPacedSchedulerWalk = PacedSchedulerWalk.TestCase
TestPacedSchedulerWalk.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestTieredSchedulerWalk = TieredSchedulerWalk.TestCase
TestTieredSchedulerWalk.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestSlowTieredSchedulerWalk = SlowTieredSchedulerWalk.TestCase
TestSlowTieredSchedulerWalk.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
