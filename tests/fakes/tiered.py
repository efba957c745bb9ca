"""KV tiers over folders of a test, and pages whose content is the tokens fed to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from engine.backends.common.kv_tiers import KvTiers
from engine.backends.common.page_folder import PageFolder
from engine.backends.scheduler.page_pool import PagePool
from engine.backends.scheduler.scheduler import Scheduler
from engine.backends.scheduler.sequences import BatchPlan
from engine.backends.scheduler.sequences import Sequence as TokenSequence
from tests.fakes.scheduling import still_clock

PAGE_TOKENS = 4
PROMPT = list(range(1, 41))


class FakePages:
    """Pages of `page_tokens` tokens, a byte each."""

    def __init__(self, page_tokens: int = PAGE_TOKENS, *, in_host_memory: bool = True) -> None:
        self.page_bytes = page_tokens
        self.in_host_memory = in_host_memory
        self.tokens: dict[tuple[int, int], int] = {}

    def read_pages(self, pages: Sequence[int]) -> list[bytes]:
        return [bytes(self.tokens[page, offset] for offset in range(self.page_bytes)) for page in pages]

    def write_pages(self, pages: Sequence[int], contents: bytes | memoryview) -> None:
        places = [(page, offset) for page in pages for offset in range(self.page_bytes)]
        self.tokens |= dict(zip(places, contents, strict=True))

    def feed(self, plan: BatchPlan) -> None:
        """Fill what a step computes."""
        for chunk in plan.chunks:
            for position, token in enumerate(chunk.token_ids, chunk.start):
                self.tokens[chunk.pages[position // self.page_bytes], position % self.page_bytes] = token


class TieredWorker:
    """A scheduler with tiers in `root`, as a worker has them that is started again and again. waits_for_disk: in each
    step until it answers, so that the step does not depend on how long that takes; else as long as the scheduler does.
    """

    def __init__(
        self,
        root: Path,
        *,
        names: Sequence[str] = ("host",),
        digest: str = "model",
        limit_bytes: int = 1 << 20,
        pages: int = 64,
        in_host_memory: bool = True,
        clock: Callable[[], float] = still_clock,
        waits_for_disk: bool = True,
    ) -> None:
        self.folders = [PageFolder(name, root / name, limit_bytes, digest).open() for name in names]
        self.pages = FakePages(in_host_memory=in_host_memory)
        self.tiers = KvTiers(self.folders, self.pages)
        if waits_for_disk:
            restore = self.tiers.restore
            self.tiers.restore = lambda keys, pages, wait_s=0.0: restore(keys, pages, 60.0)  # type: ignore[method-assign]
        self.scheduler = Scheduler(
            PagePool(pages, PAGE_TOKENS, b"salt"),
            max_prompts=8,
            step_tokens=64,
            max_model_len=256,
            tiers=self.tiers,
            clock=clock,
        )

    def step(self, token: int = 7) -> BatchPlan:
        """Plan, compute and commit one step, and see that the accounts add up."""
        plan = self.scheduler.plan()
        self.pages.feed(plan)
        self.scheduler.commit(plan, [[token]] * len(plan.sampled_sequences))
        self.scheduler.check()
        return plan


def ask(
    worker: TieredWorker, name: str, prompt: list[int] = PROMPT, *, adapter: str = "", client: int = 0
) -> TokenSequence:
    """Submit a prompt to the worker."""
    new = TokenSequence(name, list(prompt), len(prompt), adapter=adapter, client=client)
    worker.scheduler.submit(new)
    return new


def tokens_in(worker: TieredWorker, sequence: TokenSequence) -> list[int]:
    """Return the tokens that the pages of a sequence were computed from."""
    positions = range(sequence.computed)
    size = PAGE_TOKENS
    return [worker.pages.tokens[sequence.pages[each // size], each % size] for each in positions]
