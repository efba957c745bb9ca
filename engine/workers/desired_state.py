"""DesiredState: what workers are to do from now on, and after each restart."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from engine.backends.base import LoadedModel
from engine.config import AdapterSpec, EngineConfig, ModelSpec
from engine.devices import usable_cores
from engine.placement.plan import Placement
from engine.worker_process.protocol import (
    Attach,
    Attached,
    Command,
    Detach,
    Load,
    SetItlTarget,
    SetMaxPrompts,
    SetStepTokens,
    SetThreads,
)


class ModelDesiredState:
    """The desired state of every worker of a model, those to come included. threads: of each; 0 shares the cores
    out."""

    def __init__(self, spec: ModelSpec, config: EngineConfig) -> None:
        self.max_prompts = config.max_prompts
        self.step_tokens = config.step_tokens
        self.threads = config.threads
        self.itl_target_s = config.slo_itl_s
        self.adapters: dict[str, AdapterSpec] = {}
        self._spec = spec
        self._page_tokens = config.page_tokens

    def load(self, placement: Placement, workers: int, kv_file: str = "") -> Load:
        """Return the load of a worker at a place. workers: number of them on this machine.  kv_file: as in
        ModelSpec."""
        return Load(
            spec=msgspec.structs.replace(self.placed(placement), kv_file=kv_file),
            max_prompts=self.max_prompts,
            step_tokens=self.step_tokens,
            page_tokens=self._page_tokens,
            threads=self.threads_each(workers),
            itl_target_s=self.itl_target_s,
            adapters=tuple(self.adapters.values()),
        )

    def placed(self, placement: Placement) -> ModelSpec:
        """Return the model as a worker at that place loads it."""
        return msgspec.structs.replace(
            self._spec,
            device=placement.device,
            shares=placement.shares,
            kv_cache_tokens=self._spec.kv_cache_tokens or placement.kv_tokens,
        )

    def follow(self, model: LoadedModel) -> bool:
        """Have every worker compute with the native kernels, or none, as the first that was loaded does: answers must
        not depend on the worker. Returns False where `model` does otherwise."""
        if self._spec.native is None:
            self._spec = msgspec.structs.replace(self._spec, native=model.native)
        return model.native in (None, self._spec.native)

    def restarted(self, spec: ModelSpec) -> ModelSpec:
        """Return the model as a worker loads it that takes the place of one with `spec`."""
        return msgspec.structs.replace(spec, native=self._spec.native)

    def threads_each(self, workers: int) -> int:
        """Return the CPU threads of each of a number of workers."""
        return self.threads or self._spec.threads or max(1, usable_cores() // max(1, workers))


class DesiredState:
    """The desired state of one worker. Each order is sent to it at once, and kept in `load`, with which each that takes
    its place begins.

    attached: what came of the adapters, by key.
    """

    def __init__(self, load: Load, send: Callable[[Command], None]) -> None:
        self.load = load
        self.attached: dict[str, Attached] = {}
        self._send = send

    def move(self, spec: ModelSpec) -> None:
        """Where the next one is to lie is another place, perhaps."""
        self.load = msgspec.structs.replace(self.load, spec=spec)

    def set_max_prompts(self, max_prompts: int) -> None:
        """Work on at most this many at once."""
        self._order(SetMaxPrompts(max_prompts=max_prompts), max_prompts=max_prompts)

    def set_step_tokens(self, step_tokens: int) -> None:
        """Compute at most this many tokens in a step."""
        if step_tokens != self.load.step_tokens:
            self._order(SetStepTokens(step_tokens=step_tokens), step_tokens=step_tokens)

    def set_itl_target(self, target_s: float | None) -> None:
        """Keep this time between tokens."""
        if target_s != self.load.itl_target_s:
            self._order(SetItlTarget(target_s=target_s), itl_target_s=target_s)

    def set_threads(self, threads: int) -> None:
        """Compute with this many CPU threads."""
        if threads != self.load.threads:
            self._order(SetThreads(threads=threads), threads=threads)

    def attach(self, adapter: AdapterSpec) -> None:
        """Let requests name this adapter; `attached` gets the result."""
        others = self._without(adapter.key)
        self._order(Attach(adapter=adapter), adapters=(*others, adapter))

    def detach(self, key: str) -> None:
        """Forget an adapter."""
        self._order(Detach(key=key), adapters=self._without(key))

    def _without(self, key: str) -> tuple[AdapterSpec, ...]:
        self.attached.pop(key, None)
        return tuple(each for each in self.load.adapters if each.key != key)

    def _order(self, command: Command, **changes: object) -> None:
        self.load = msgspec.structs.replace(self.load, **changes)
        self._send(command)
