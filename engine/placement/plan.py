"""Where workers go, how many KV pages each gets, and what is lacking where they do not fit.

Pure decisions: devices, what a model costs and settings in; placements or a refusal with numbers out.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from engine.backends.common.gguf_codes import CODES_CAPABILITY
from engine.backends.common.kv_format import TYPICAL_TOKENS, default_kv_tokens
from engine.backends.common.kv_tiers import unused_host_bytes
from engine.backends.common.native_kernels import prefers_bfloat16
from engine.backends.common.step_memory import MULTIPROCESSORS
from engine.config import DeviceShare, ModelSpec
from engine.devices import account
from engine.errors import Detail, InsufficientMemory, InvalidRequest
from engine.placement.layer_split import (
    SplitProblem,
    WorkerSegments,
    automatic_split,
    balanced_split,
    rank_split,
    split_by_weights,
    tensor_parallel_split,
)
from engine.placement.model_facts import ModelFacts
from engine.placement.model_memory import RUNTIME_BYTES, Correction, DeviceKind, ModelCosts, Workload, costs_of
from engine.snapshot import DeviceReading, WorkerState
from engine.text.device_names import device_label

# A plan of where workers go: what each device is to hold, and what it lacks, in numbers and in words.

_MIB = 2**20


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Where one worker goes. shares: per device, in order of the layers.  kv_tokens: what its KV pages are to hold.

    node: the machine, as in DeviceReading.node.  identity, unseen_bytes, correction: of its ModelCosts.
    """

    shares: tuple[DeviceShare, ...]
    kv_tokens: int
    node: str = ""
    identity: str = ""
    unseen_bytes: int = 0
    correction: Correction = Correction()

    @property
    def device(self) -> str:
        """As in ModelSpec.device: "auto" where it spans several."""
        return self.shares[0].device if len(self.shares) == 1 else "auto"


class DevicePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Planned use of one device. short_bytes: what it lacks of used_bytes + headroom_bytes; 0 where all fits."""

    device: DeviceReading
    headroom_bytes: int = 0
    weights_bytes: int = 0
    kv_bytes: int = 0
    working_bytes: int = 0
    short_bytes: int = 0

    @property
    def used_bytes(self) -> int:
        """All that is planned."""
        return self.weights_bytes + self.kv_bytes + self.working_bytes


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A placement per worker, whether it fits or not, and what that makes of each device that could be used."""

    costs: ModelCosts
    placements: tuple[Placement, ...]
    device_plans: tuple[DevicePlan, ...]

    @property
    def fits(self) -> bool:
        """True if no device lacks memory."""
        return not any(planned.short_bytes for planned in self.device_plans)

    @property
    def shortage(self) -> str:
        """Memory that each device lacks, as a sentence, the worst first; "" where all fits."""
        return "; ".join(
            f"{device_label(planned.device)}: needed {_mib(planned.used_bytes)} "
            f"(weights {_mib(planned.weights_bytes)}, "
            f"KV pages {_mib(planned.kv_bytes)}, working memory {_mib(planned.working_bytes)}) plus "
            f"{_mib(planned.headroom_bytes)} kept free, and {_mib(planned.device.free_bytes, up=False)} are free: "
            f"short by {_mib(planned.short_bytes)}"
            for planned in self._lacking
        )

    def refusal(self) -> InsufficientMemory:
        """The error of a plan that does not fit; in its details the numbers of the worst device and of each."""
        worst, number = self._lacking[0], len(self.placements)
        details: dict[str, Detail] = {}
        for planned in self._lacking:
            details |= {f"{_name(planned)}.{key}": value for key, value in _numbers(planned).items()}
        whom = f"{number} workers with {self.costs.name} do" if number > 1 else f"a worker with {self.costs.name} does"
        return InsufficientMemory(f"{whom} not fit: {self.shortage}", device=_name(worst), **_numbers(worst), **details)

    @property
    def _lacking(self) -> list[DevicePlan]:
        return sorted(
            (planned for planned in self.device_plans if planned.short_bytes), key=lambda planned: -planned.short_bytes
        )


def _numbers(planned: DevicePlan) -> dict[str, Detail]:
    return {
        "needed_bytes": planned.used_bytes,
        "free_bytes": planned.device.free_bytes,
        "headroom_bytes": planned.headroom_bytes,
        "short_bytes": planned.short_bytes,
    }


def _name(planned: DevicePlan) -> str:
    return f"{planned.device.node}/{planned.device.id}" if planned.device.node else planned.device.id


def _mib(size_bytes: int, *, up: bool = True) -> str:
    """Whole MiB, rounded up, or down for what there is."""
    return f"{-(-size_bytes // _MIB) if up else size_bytes // _MIB} MiB"


KV_SHARE: dict[DeviceKind, float] = {"cpu": 0.5, "cuda": 0.9, "simulated": 0.9}
"""Of what all workers leave of a device, how much KV pages may take beyond the least. RAM is everybody's."""

_GRANTS = 8
"""Times that a refused plan is tried with what it lacked."""

SHARED_GPU = 0.5
"""The same on a GPU beyond what requests typically need: the rest is for other models, unless max_models is 1."""

_HEADROOM: dict[DeviceKind, tuple[float, int]] = {
    "cpu": (0.02, 256 * _MIB),
    "cuda": (0.01, 192 * _MIB),
    "simulated": (0.01, 64 * _MIB),
}
"""What stays free: a share of the device, for what grows with it (fragments, page tables), and a floor."""


def place(
    workers: int,
    facts: ModelFacts,
    devices: Sequence[DeviceReading],
    spec: ModelSpec,
    workload: Workload | None = None,
    *,
    correct: Callable[[str], Correction] = lambda identity: Correction(),
    resident: bool = False,
    later: Sequence[DeviceReading] = (),
) -> list[Placement]:
    """A placement for each of `workers` new workers of a model; the memory of other workers is in `devices` already.

    resident: whether workers of the same model run there, whose weights new ones may share.
    later: the devices without the workers that these replace, where there are such: of the devices that have room now,
    those are preferred that will have the most.
    Raises InsufficientMemory with the shortfall of each device, InvalidRequest for a device or split that cannot be.
    """
    found = plan(workers, facts, devices, spec, workload or Workload(), correct=correct, resident=resident, later=later)
    if not found.fits:
        raise found.refusal()
    return list(found.placements)


def plan(
    workers: int,
    facts: ModelFacts,
    devices: Sequence[DeviceReading],
    spec: ModelSpec,
    workload: Workload,
    *,
    correct: Callable[[str], Correction] = lambda identity: Correction(),
    resident: bool = False,
    later: Sequence[DeviceReading] = (),
) -> Plan:
    """The same, whether it fits or not. Raises InvalidRequest alone."""
    usable = candidates(devices, spec)
    if any(device.capability is not None and device.capability < CODES_CAPABILITY for device in usable):
        facts = facts.decoded_on_cuda()
    costs = costs_of(
        facts,
        spec,
        usable[0].kind,
        workload,
        bfloat16=prefers_bfloat16(),
        correct=correct,
        processors=max(device.processors or MULTIPROCESSORS for device in usable),
    )
    return plan_costs(
        workers,
        costs,
        usable,
        spec,
        workload.max_prompts,
        max_models=workload.max_models,
        resident=resident,
        later=later,
        hosts=devices,
    )


def plan_costs(
    workers: int,
    costs: ModelCosts,
    devices: Sequence[DeviceReading],
    spec: ModelSpec,
    max_prompts: int,
    *,
    max_models: int = 0,
    resident: bool = False,
    later: Sequence[DeviceReading] = (),
    hosts: Sequence[DeviceReading] = (),
) -> Plan:
    """A plan over exactly these devices, all of one kind.

    later: as for `place`.  hosts: among them are the CPUs of the devices' machines, whose RAM workers on simulated
    devices take.
    """
    headroom = [_headroom_bytes(device, position, spec) for position, device in enumerate(devices)]
    least, typical, most = _pages(costs, spec, max_prompts)
    free_later = {(device.node, device.id): device.free_bytes for device in later}
    ground = SplitProblem(
        costs=costs,
        room=tuple(device.free_bytes - reserve for device, reserve in zip(devices, headroom, strict=True)),
        groups=_machines(devices),
        pages=least,
        resident=resident,
        later=tuple(
            free_later.get((device.node, device.id), device.free_bytes) - reserve
            for device, reserve in zip(devices, headroom, strict=True)
        ),
    )
    arranged = _arrange(ground, workers, spec, devices)
    short = _sufficient(ground, ground.short(arranged), lambda granted: _arrange(granted, workers, spec, devices))
    nodes = [devices[worker[0].device].node for worker in arranged]
    machines = [host for host in hosts if costs.host_process_bytes and host.kind == "cpu" and host.node in nodes]
    pages = [least] * workers
    on_hosts = [_host_plan(ground, host, arranged, nodes, pages, spec) for host in machines]
    if not any(short) and not any(planned.short_bytes for planned in on_hosts):
        share = KV_SHARE[costs.kind]
        filled = _grown(ground, arranged, most, share if max_models == 1 else min(share, SHARED_GPU))
        pages = list(map(max, filled, _grown(ground, arranged, typical, share)))
        for planned in on_hosts:
            pages = _limit_to_host(ground, planned, arranged, nodes, pages)
        on_hosts = [_host_plan(ground, host, arranged, nodes, pages, spec) for host in machines]
    placements = tuple(_placement(costs, worker, count, devices) for worker, count in zip(arranged, pages, strict=True))
    used = ground.needs_with(arranged, pages)
    device_plans = map(_device_plan, devices, headroom, used, short, _by_device(arranged, placements, len(devices)))
    return Plan(costs=costs, placements=placements, device_plans=(*device_plans, *on_hosts))


def _sufficient(
    ground: SplitProblem, short: Sequence[int], arrange: Callable[[SplitProblem], list[WorkerSegments]]
) -> list[int]:
    """Return bytes per device with which the plan fits, `short` at least: with more memory the layers may be split
    otherwise, so that another device lacks some."""
    granted = list(short)
    for _ in range(_GRANTS if any(short) else 0):
        room, later = (tuple(map(operator.add, each, granted)) for each in (ground.room, ground.later))
        more = msgspec.structs.replace(ground, room=room, later=later)
        lacking = more.short(arrange(more))
        if not any(lacking):
            break
        granted = list(map(operator.add, granted, lacking))
    return granted


def candidates(devices: Sequence[DeviceReading], spec: ModelSpec) -> list[DeviceReading]:
    """The devices that workers of `spec` may be put on: the one that it names, else every GPU or simulated one, else
    the CPU. Raises InvalidRequest for one that is not there."""
    if spec.device == "auto":
        found = [device for device in devices if device.kind == "simulated"]
        found = found or [device for device in devices if device.kind != "cpu"] or list(devices)
    else:
        name = "cuda:0" if spec.device == "cuda" else spec.device
        found = [device for device in devices if device.id == name]
    if not found:
        raise InvalidRequest(
            f"there is no device {spec.device}; available: {', '.join(device.id for device in devices)}",
            param="device",
            value=spec.device,
        )
    return found


def _arrange(
    ground: SplitProblem, workers: int, spec: ModelSpec, devices: Sequence[DeviceReading]
) -> list[WorkerSegments]:
    if (ranks := ground.costs.num_devices) > 1:
        arranged = rank_split(ground, workers, ranks)
        if arranged is None:
            there = ", ".join(device.id for device in devices)
            raise InvalidRequest(
                f"tensor_parallel_size is {ranks}; that takes {ranks} GPUs of one machine, and there is {there}",
                param="tensor_parallel_size",
                value=ranks,
            )
        return arranged
    if len(devices) > 1:
        if spec.tensor_parallel:
            return tensor_parallel_split(ground, workers)
        if spec.gpu_split_gb:
            return _as_given(ground, workers, spec, devices)
        if spec.gpu_balance:
            return balanced_split(ground, workers)
    elif spec.gpu_split_gb and devices[0].kind != "cpu":
        return _as_given(ground, workers, spec, devices)
    return automatic_split(ground, workers)


def _as_given(
    ground: SplitProblem, workers: int, spec: ModelSpec, devices: Sequence[DeviceReading]
) -> list[WorkerSegments]:
    """Raises InvalidRequest where the split names more devices than there are, or cannot hold the weights."""
    split, most = spec.gpu_split_gb, max(map(len, ground.groups))
    if len(split) > most:
        names = ", ".join(device.id for device in devices)
        raise InvalidRequest(f"gpu_split names {len(split)} GPUs; this machine has {most}: {names}", param="gpu_split")
    fitting = msgspec.structs.replace(
        ground, groups=tuple(group for group in ground.groups if len(group) >= len(split))
    )
    arranged = split_by_weights(fitting, workers, [int(gigabytes * 2**30) for gigabytes in split])
    if arranged is None:
        raise InvalidRequest(
            f"gpu_split leaves {'+'.join(f'{gigabytes:g}' for gigabytes in split)} GB for the weights of {spec.name}, "
            f"which need {ground.costs.weights_bytes / 2**30:.2f} GB in whole layers",
            param="gpu_split",
        )
    return arranged


def _pages(costs: ModelCosts, spec: ModelSpec, max_prompts: int) -> tuple[int, int, int]:
    """KV pages that a worker has at the least, that requests typically need, and that they need at the most: what was
    asked for; else one request of TYPICAL_TOKENS, and `default_kv_tokens`."""
    if spec.kv_cache_tokens is not None:
        asked = max(1, costs.pages(spec.kv_cache_tokens))
        return asked, asked, asked
    typical = min(costs.context_tokens, TYPICAL_TOKENS)
    needed, most = (
        default_kv_tokens(max_prompts, costs.context_tokens, fills_device=fills)
        for fills in (False, costs.kind == "cuda")
    )
    return costs.pages(typical), costs.pages(needed), costs.pages(most)


def _grown(ground: SplitProblem, workers: Sequence[WorkerSegments], wanted: int, share: float) -> list[int]:
    """KV pages of each worker: up to `wanted`, as far as its fair part goes of `share` of what all leave on each of its
    devices."""
    spare = [room - need for room, need in zip(ground.room, ground.needs(workers), strict=True)]
    each_more = msgspec.structs.replace(ground, pages=ground.pages + 1).needs(workers)
    page_bytes = [more - now for more, now in zip(each_more, ground.needs(workers), strict=True)]
    possible = [int(left * share) // size if size else wanted for left, size in zip(spare, page_bytes, strict=True)]
    return [min(wanted, ground.pages + min(possible[segment.device] for segment in worker)) for worker in workers]


def _host_plan(
    ground: SplitProblem,
    host: DeviceReading,
    workers: Sequence[WorkerSegments],
    nodes: Sequence[str],
    pages: Sequence[int],
    spec: ModelSpec,
) -> DevicePlan:
    """Return the use of the RAM of `host` by workers of simulated devices. nodes, pages: of each worker."""
    costs = ground.costs
    here = [
        [costs.share("", segment.start, segment.stop, count) for segment in worker]
        for worker, node, count in zip(workers, nodes, pages, strict=True)
        if node == host.node
    ]
    weights = [sum(share.weights_bytes for share in shares) for shares in here]
    once = costs.host_shares_weights
    planned = DevicePlan(
        device=host,
        headroom_bytes=_headroom_bytes(host, 0, spec),
        weights_bytes=(0 if ground.resident else max(weights)) if once else sum(weights),
        kv_bytes=sum(share.kv_bytes for shares in here for share in shares),
        working_bytes=sum(share.working_bytes for shares in here for share in shares)
        + len(here) * costs.num_devices * costs.host_process_bytes,
    )
    return msgspec.structs.replace(
        planned, short_bytes=max(0, planned.used_bytes + planned.headroom_bytes - host.free_bytes)
    )


def _limit_to_host(
    ground: SplitProblem,
    least: DevicePlan,
    workers: Sequence[WorkerSegments],
    nodes: Sequence[str],
    pages: Sequence[int],
) -> list[int]:
    """The KV pages of each worker, as far as the RAM of its machine goes. least: what that holds with the least."""
    spare = least.device.free_bytes - least.headroom_bytes - least.used_bytes
    here = [worker for worker, node in zip(workers, nodes, strict=True) if node == least.device.node]
    more = msgspec.structs.replace(ground, pages=ground.pages + 1)
    page_bytes = sum(more.segment_bytes(each) - ground.segment_bytes(each) for worker in here for each in worker)
    if not page_bytes:
        return list(pages)
    most = ground.pages + int(spare * KV_SHARE["cpu"]) // page_bytes
    return [min(count, most) if node == least.device.node else count for count, node in zip(pages, nodes, strict=True)]


def _placement(costs: ModelCosts, worker: WorkerSegments, pages: int, devices: Sequence[DeviceReading]) -> Placement:
    return Placement(
        shares=tuple(costs.share(devices[segment.device].id, segment.start, segment.stop, pages) for segment in worker),
        kv_tokens=pages * costs.page_tokens,
        node=devices[worker[0].device].node,
        identity=costs.identity,
        unseen_bytes=costs.unseen_bytes,
        correction=costs.correction,
    )


def _by_device(
    arranged: Sequence[WorkerSegments], placements: Sequence[Placement], devices: int
) -> list[list[DeviceShare]]:
    found: list[list[DeviceShare]] = [[] for _ in range(devices)]
    for worker, placement in zip(arranged, placements, strict=True):
        for segment, share in zip(worker, placement.shares, strict=True):
            found[segment.device].append(share)
    return found


def _device_plan(
    device: DeviceReading, headroom: int, used: int, short: int, shares: Sequence[DeviceShare]
) -> DevicePlan:
    """Return the use of a device. Weights that workers share are once in `used`, and so are the rest of it."""
    kv, working = sum(share.kv_bytes for share in shares), sum(share.working_bytes for share in shares)
    return DevicePlan(
        device=device,
        headroom_bytes=headroom,
        weights_bytes=used - kv - working,
        kv_bytes=kv,
        working_bytes=working,
        short_bytes=short,
    )


def _machines(devices: Sequence[DeviceReading]) -> tuple[tuple[int, ...], ...]:
    """Numbers of the devices of each machine: no worker spans two."""
    nodes = dict.fromkeys(device.node for device in devices)
    return tuple(tuple(number for number, each in enumerate(devices) if each.node == node) for node in nodes)


def _headroom_bytes(device: DeviceReading, position: int, spec: ModelSpec) -> int:
    """As --gpu_reserve asks for this GPU, else the usual; and of RAM what the host tier of the KV cache may take."""
    if device.kind != "cpu" and position < len(spec.gpu_reserve_mib):
        return spec.gpu_reserve_mib[position] * _MIB
    share, floor = _HEADROOM[device.kind]
    return int(device.total_bytes * share) + floor + (unused_host_bytes(spec) if device.kind == "cpu" else 0)


# Occupancy: the devices as placement must see them, with what workers hold, will hold, or would give back.

_TO_COME = ("starting", "loading", "restarting")
_HOLDING = ("ready", "draining", "stopping")


class MemoryHolder(Protocol):
    """A worker. planned: what placement gave it; shares: what it took of that, once it knows."""

    @property
    def id(self) -> str: ...
    @property
    def state(self) -> WorkerState: ...
    @property
    def planned(self) -> tuple[DeviceShare, ...]: ...
    @property
    def shares(self) -> tuple[DeviceShare, ...]: ...


def with_reservations(
    readings: Sequence[DeviceReading],
    workers: Sequence[MemoryHolder],
    leaving: Collection[MemoryHolder] = (),
    surviving_bytes: Callable[[str], int] = lambda worker_id: 0,
) -> list[DeviceReading]:
    """The devices with the memory set aside that workers were promised and do not hold yet; on simulated ones, which
    nothing else accounts for, with all that was promised. What is promised there is promised of the machine's RAM too.
    leaving: workers that count as gone. Failed ones hold nothing, and have no promise.  surviving_bytes:
    the RAM that has outlived a worker, by its id, for the one that takes its place."""
    staying = [worker for worker in workers if worker not in leaving and worker.state != "failed"]
    holding = [worker for worker in workers if worker.state in _HOLDING]
    simulated = account(readings, {worker.id: worker.planned for worker in staying})
    promised = _sums(worker.planned for worker in staying if worker.state in _TO_COME)
    freed = _sums(worker.shares for worker in holding if worker in leaving)
    left = {worker.id: size for worker in workers if worker.state in _TO_COME and (size := surviving_bytes(worker.id))}
    restarting = [worker for worker in workers if worker.id in left]
    found: list[DeviceReading] = []
    for reading, accounted in zip(readings, simulated, strict=True):
        if reading.kind == "simulated":
            found.append(accounted)
        elif reading.kind == "cpu":
            here = {each.id for each in readings if each.kind == "simulated" and each.node == reading.node}
            used_bytes = _ram([*holding, *restarting], reading.id, here, left)
            found.append(_with(reading, used_bytes - _ram(staying, reading.id, here)))
        else:
            found.append(_with(reading, freed.get(reading.id, 0) - promised.get(reading.id, 0)))
    return found


def _ram(workers: Iterable[MemoryHolder], cpu: str, simulated: Collection[str], left: Mapping[str, int] = {}) -> int:
    """RAM that workers on `cpu` and on the simulated devices of its machine take, or will have taken; of those in
    `left`, what was left to them of it. What workers of a model share counts once: it is identified by its size, the
    only sign of whose it is."""
    shared: set[int] = set()
    own = 0
    for worker in workers:
        shares = [share for share in worker.planned if share.device == cpu or share.device in simulated]
        shared_bytes = sum(share.shared_bytes for share in shares)
        shared.add(shared_bytes)
        if worker.id in left:
            own += min(sum(share.kv_bytes for share in shares), max(0, left[worker.id] - shared_bytes))
            continue
        own += sum(share.total_bytes - share.shared_bytes for share in shares)
        if any(share.device in simulated for share in shares):
            own += RUNTIME_BYTES["cpu"]
    return own + sum(shared)


def _sums(shares: Iterable[Iterable[DeviceShare]]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for each in shares:
        for share in each:
            sums[share.device] = sums.get(share.device, 0) + share.total_bytes
    return sums


def _with(reading: DeviceReading, more_bytes: int) -> DeviceReading:
    free = min(reading.total_bytes, max(0, reading.free_bytes + more_bytes))
    return msgspec.structs.replace(reading, free_bytes=free)
