"""The worker whose steps are measured, from outside; and from its steps to costs that can be kept."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType, TracebackType
from typing import Any

import msgspec

from console.bench.child import Child
from console.bench.plan import plan_for
from console.bench.progress import Show
from console.estimate import estimate_for
from console.planning.steps import Design, Loaded
from console.sources import load_settings
from engine.config import EngineConfig
from engine.devices import cpu_name
from engine.simulation.fit import fit_steps
from engine.simulation.step_costs import MeasuredModel, StepSample

_ROUNDS = 3
LONGEST_TOKENS = 3072
WITHOUT_GUESSES = MappingProxyType({"draft_model": None, "ngram_draft": False, "draft_tokens": None})
"""Settings of a load: a step that guesses is none of those that are simulated."""


class MeterOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What the child is to measure. changes: settings of the load."""

    model: str
    design: Design
    threads: int
    changes: dict[str, Any]


class MeasuredWorker:
    """`async with`, then `steps` as often as wanted. changes: settings of the load, before those that are saved.

    Raises EngineError where the model cannot be loaded.
    """

    def __init__(
        self, model: str, design: Design, threads: int, changes: Mapping[str, object] = MappingProxyType({})
    ) -> None:
        order = MeterOrder(model=model, design=design, threads=threads, changes=dict(changes) | dict(WITHOUT_GUESSES))
        self._order = msgspec.json.encode(order).decode()
        self._child: Child | None = None
        self.loaded = Loaded(device="", dtype="", max_model_len=0)

    async def __aenter__(self) -> MeasuredWorker:
        """Start it and load the model."""
        self._child = await Child.start("the measured worker", "console.planning.meter", self._order)
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


async def measure(
    model: str,
    *,
    threads: int | None,
    max_prompts: int,
    step_tokens: int,
    changes: Mapping[str, object],
    seconds: float,
    show: Show,
) -> MeasuredModel:
    """Step costs of a model here, in about so many seconds after its load. changes: settings of that. Raises
    EngineError."""
    plan = plan_for(model, threads=threads, rounds=1, changes={**changes, **WITHOUT_GUESSES})
    page_tokens = EngineConfig().page_tokens
    design = Design(
        max_prompts=max_prompts, step_tokens=step_tokens, page_tokens=page_tokens, longest_tokens=LONGEST_TOKENS
    )
    kv_tokens = _kv_tokens(model, design, changes)
    samples: list[StepSample] = []
    show(f"loading {model}")
    async with MeasuredWorker(model, design, plan.threads, changes) as worker:
        await worker.steps(0)  # the first steps of a process are slower
        for number in range(_ROUNDS):
            show(f"measuring steps, {number + 1} of {_ROUNDS}: {len(samples)} so far")
            samples += await worker.steps(seconds / _ROUNDS)
        loaded = worker.loaded
    return MeasuredModel(
        model=plan.spec.name,
        device=loaded.device,
        machine=cpu_name(),
        threads=plan.threads,
        max_model_len=loaded.max_model_len,
        kv_tokens=kv_tokens,
        page_tokens=page_tokens,
        step_tokens=step_tokens,
        fit=fit_steps(samples),
        max_prompts=max(sample.shape.decodes for sample in samples),
        context_tokens=max(sample.shape.context_tokens // max(1, sample.shape.decodes) for sample in samples),
        backend=plan.spec.backend,
        dtype=loaded.dtype,
        weights=plan.spec.weights,
        cache_bits=plan.spec.cache_bits,
    )


def _kv_tokens(model: str, design: Design, changes: Mapping[str, object]) -> int:
    """What the KV pages of a worker would hold if it served here, with all the memory that is free now; what is
    measured with holds no more than that takes."""
    asked = {"max_prompts": design.max_prompts, "step_tokens": design.step_tokens, "num_workers": 1}
    found = estimate_for(load_settings({"model": model, **asked, **changes, **WITHOUT_GUESSES}))
    return found.placements[0].kv_tokens if found.fits else design.kv_tokens
