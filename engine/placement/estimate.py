"""Estimate of a load: memory of each device, and whether it fits, before anything is loaded. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from engine.backends.common.exllama_memory import unpacking_warning
from engine.config import ModelSpec
from engine.placement.model_facts import ModelFacts
from engine.placement.model_memory import Correction, Workload
from engine.placement.plan import DevicePlan, Placement, Plan, plan
from engine.snapshot import DeviceReading

_QUANTISED_SHARE = 0.75
"""Of 16 bits for each weight, the most that a quantised model's file has."""

_DECODED_FACTOR = 1.5


class DeviceEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """One device with everything planned on it.

    others_bytes: in use already, by any process.  headroom_bytes: kept free.  free_bytes: left beyond that.
    short_bytes: what is lacking; without it, the six others sum to total_bytes.
    """

    id: str
    name: str
    kind: Literal["cpu", "cuda", "simulated"]
    total_bytes: int
    weights_bytes: int
    kv_bytes: int
    working_bytes: int
    others_bytes: int
    headroom_bytes: int
    free_bytes: int
    short_bytes: int
    node: str = ""


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """Result that a load would have.

    weights_bytes: of a worker on one device, or of all of its ranks.  kv_token_bytes: of one token.
    fits: whether there is memory.  problem: why it cannot be loaded however much there is, "" if it can.
    learned: what earlier loads corrected.  verdict: one sentence.  warning: the cost of a load that fits, in speed or
    memory, "" for none.  simulated: the devices are.
    """

    model: str
    backend: str
    dtype: str
    weights: str
    cache_bits: int
    context_tokens: int
    workers: int
    max_prompts: int
    weights_bytes: int
    kv_token_bytes: int
    devices: tuple[DeviceEstimate, ...]
    placements: tuple[Placement, ...]
    fits: bool
    verdict: str
    problem: str = ""
    warning: str = ""
    learned: Correction = Correction()
    simulated: bool = False

    @property
    def can_load(self) -> bool:
        """True if a load would succeed, as far as can be foretold."""
        return self.fits and not self.problem


def estimate(
    facts: ModelFacts,
    devices: Sequence[DeviceReading],
    spec: ModelSpec,
    *,
    workers: int,
    workload: Workload,
    correct: Callable[[str], Correction] = lambda identity: Correction(),
    problem: str = "",
    cores: int = 0,
    later: Sequence[DeviceReading] = (),
) -> Estimate:
    """The estimate for `workers` new workers on what `devices` have free now.

    problem: what is wrong with the model or the settings apart from memory.  cores: CPU cores that this process may run
    on, 0 where that is not known.  later: as in `engine.placement.plan.place`. Raises InvalidRequest for a device or a
    split that cannot be.
    """
    found = plan(workers, facts, devices, spec, workload, correct=correct, later=later)
    costs = found.costs
    return Estimate(
        model=spec.name,
        backend=costs.backend,
        dtype=costs.dtype,
        weights=costs.weights,
        cache_bits=costs.cache_bits,
        context_tokens=costs.context_tokens,
        workers=workers,
        max_prompts=workload.max_prompts,
        weights_bytes=costs.weights_bytes * costs.num_devices,
        kv_token_bytes=costs.kv_token_bytes * costs.num_devices,
        devices=tuple(map(_device, found.device_plans)),
        placements=found.placements,
        fits=found.fits,
        verdict=_verdict(found, problem),
        problem=problem,
        warning=" ".join(filter(None, (_shared_cores(found, cores), _unpacked(found, facts, workload)))),
        learned=costs.correction,
        simulated=costs.kind == "simulated",
    )


def _device(planned: DevicePlan) -> DeviceEstimate:
    device = planned.device
    return DeviceEstimate(
        id=device.id,
        name=device.name,
        kind=device.kind,
        total_bytes=device.total_bytes,
        weights_bytes=planned.weights_bytes,
        kv_bytes=planned.kv_bytes,
        working_bytes=planned.working_bytes,
        others_bytes=device.total_bytes - device.free_bytes,
        headroom_bytes=min(planned.headroom_bytes, device.free_bytes),
        free_bytes=max(0, device.free_bytes - planned.headroom_bytes - planned.used_bytes),
        short_bytes=planned.short_bytes,
        node=device.node,
    )


def _shared_cores(found: Plan, cores: int) -> str:
    computing = sum(not placement.node for placement in found.placements) if found.costs.kind != "cuda" else 0
    if not cores or computing <= cores:
        return ""
    shared = f"{cores} CPU cores" if cores > 1 else "one CPU core"
    return f"{computing} workers share {shared} and slow each other down."


def _unpacked(found: Plan, facts: ModelFacts, workload: Workload) -> str:
    """Return the cost of quantised layers that the backend unpacks, at load or in large steps; "" for none."""
    layers = facts.parts.layers
    elements, stored = sum(each.elements for each in layers), sum(each.packed_bytes for each in layers)
    if not stored or stored > _QUANTISED_SHARE * 2 * elements:
        return ""
    if found.costs.backend == "exllamav2":
        return unpacking_warning(workload.max_prompts, elements)
    needed = sum(found.costs.layer_bytes)
    if found.costs.backend != "torch" or needed <= _DECODED_FACTOR * stored:
        return ""
    return f"Quantised layers are decoded at load: {needed / stored:.1f} times the memory of their files."


def _verdict(found: Plan, problem: str) -> str:
    if problem:
        return f"Cannot be loaded: {problem}"
    if not found.fits:
        on_devices = any(
            planned.short_bytes for planned in found.device_plans if planned.device.kind == found.costs.kind
        )
        where = "" if on_devices else " in host RAM, which simulated devices use"
        return f"Does not fit{where}: {found.shortage}."
    tokens = sorted({placement.kv_tokens for placement in found.placements})
    kv_text = f"{tokens[0]:,}" if len(tokens) == 1 else f"{tokens[0]:,} to {tokens[-1]:,}"
    workers = len(found.placements)
    short = "" if tokens[0] >= found.costs.context_tokens else ", less than the full context"
    whom, each = (f"{workers} workers", " each") if workers > 1 else ("1 worker", "")
    return f"Fits: {whom}, KV cache for {kv_text} tokens{each}{short}."
