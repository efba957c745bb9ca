"""The worker whose steps are measured, from outside; and from its steps to costs that can be kept."""

from __future__ import annotations

from types import TracebackType

import msgspec

from console.bench.child import Child
from console.bench.plan import plan_for
from console.bench.progress import Show
from console.planning.steps import Design, Loaded
from engine.config import EngineConfig
from engine.devices import cpu_name, usable_cores
from engine.simulation.fit import fit_steps
from engine.simulation.step_costs import MeasuredModel, StepSample

_ROUNDS = 3
LONGEST_TOKENS = 3072


class MeasuredWorker:
    """`async with`, then `steps` as often as wanted. Raises EngineError where the model cannot be loaded."""

    def __init__(self, model: str, design: Design, threads: int) -> None:
        self._design = design
        sizes = (threads, design.max_prompts, design.step_tokens, design.longest_tokens)
        self._arguments = (model, *map(str, sizes))
        self._child: Child | None = None
        self.loaded = Loaded(device="", dtype="", max_model_len=0)

    async def __aenter__(self) -> MeasuredWorker:
        """Start it and load the model."""
        self._child = await Child.start("the measured worker", "console.planning.steps", *self._arguments)
        try:
            self.loaded = msgspec.json.decode(await self._child.line(), type=Loaded)
        except BaseException:
            await self._child.end(kill=True)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it."""
        assert self._child is not None, "it was entered before"
        await self._child.end(kill=True)

    async def steps(self, seconds: float) -> list[StepSample]:
        """Steps over the design, as many points as come within about so many seconds."""
        assert self._child is not None, "it is to be entered first"
        return msgspec.json.decode(await self._child.ask(b"%g" % seconds), type=list[StepSample])


async def measure(model: str, *, threads: int | None, max_prompts: int, seconds: float, show: Show) -> MeasuredModel:
    """Step costs of a model here, in about so many seconds after its load. Raises EngineError."""
    plan = plan_for(model, threads=threads, rounds=1)
    config = EngineConfig()
    design = Design(
        max_prompts=max_prompts,
        step_tokens=config.step_tokens,
        page_tokens=config.page_tokens,
        longest_tokens=LONGEST_TOKENS,
    )
    samples: list[StepSample] = []
    show(f"loading {model}")
    async with MeasuredWorker(model, design, plan.threads) as worker:
        await worker.steps(0)  # the first steps of a process are slower
        for number in range(_ROUNDS):
            show(f"measuring steps, {number + 1} of {_ROUNDS}: {len(samples)} so far")
            samples += await worker.steps(seconds / _ROUNDS)
        loaded = worker.loaded
    return MeasuredModel(
        model=plan.spec.name,
        device=loaded.device,
        machine=f"{cpu_name()}, {usable_cores()} cores",
        threads=plan.threads,
        max_model_len=loaded.max_model_len,
        kv_tokens=design.kv_tokens,
        page_tokens=config.page_tokens,
        step_tokens=config.step_tokens,
        fit=fit_steps(samples),
    )
