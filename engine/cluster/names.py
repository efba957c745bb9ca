"""Names of nodes and their devices in the engine, and the translation of a worker's own names. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from engine.backends.base import LoadedModel
from engine.cluster.messages import NodeView
from engine.config import DeviceShare, ModelSpec

GPU_UNIT = 10_000
"""Ray counts GPUs in ten thousandths."""


def join_device(node: str, device: str) -> str:
    """ "gpu-box/cuda:0"; a device of the engine's own machine goes by its plain name."""
    return f"{node}/{device}" if node else device


def split_device(device: str) -> tuple[str, str]:
    """The node's name ("" for the engine's own machine) and the device's name there."""
    node, _, local = device.rpartition("/")
    return node, local


def name_nodes(nodes: Iterable[NodeView], before: Mapping[str, str]) -> dict[str, str]:
    """A name for each node by its id: "" for the engine's machine, the name that it had before (`before`), else the one
    that it was started with, or its host's; numbered where two would have the same."""
    nodes = tuple(nodes)
    names = {node.id: before[node.id] for node in nodes if node.id in before}
    for node in nodes:
        if node.id not in names:
            names[node.id] = "" if node.here else _unused(_plain_name(node), set(names.values()))
    return names


def _plain_name(node: NodeView) -> str:
    name = node.label if node.label and node.label != node.address else node.hostname
    return re.sub(r"[^\w.-]+", "-", name) or "node"


def _unused(name: str, used: set[str]) -> str:
    number, found = 1, name
    while found in used:
        number += 1
        found = f"{name}-{number}"
    return found


class Translation(msgspec.Struct, frozen=True, kw_only=True):
    """How one worker's devices are called. node: where it runs; local: by the engine's name, the name within the node;
    own: by the engine's name, the name within the worker, which sees no GPU but its own."""

    node: str
    local: dict[str, str]
    own: dict[str, str]

    def to_worker(self, spec: ModelSpec) -> ModelSpec:
        """`spec` with the worker's own names."""
        return msgspec.structs.replace(
            spec,
            device=self.own.get(spec.device, spec.device),
            shares=tuple(_renamed(share, self.own) for share in spec.shares),
        )

    def gpu_shares(self, shares: Iterable[DeviceShare], totals: Mapping[str, int]) -> dict[str, float]:
        """The part of each GPU that `shares` take, by its id within the node. totals: bytes of each by that id."""
        needed = {device: 0 for device, local in self.local.items() if is_gpu(local)}
        for share in shares:
            if share.device in needed:
                needed[share.device] += share.total_bytes
        return {self.local[each]: gpu_share(size, totals.get(self.local[each], 0)) for each, size in needed.items()}

    def from_worker(self, model: LoadedModel) -> LoadedModel:
        """Return a loaded model in the engine's names."""
        names = {own: name for name, own in self.own.items()}
        names.setdefault("cpu", join_device(self.node, "cpu"))
        return msgspec.structs.replace(
            model,
            devices=tuple(names.get(device, device) for device in model.devices),
            shares=tuple(_renamed(share, names) for share in model.shares),
        )


def translation(devices: Sequence[str]) -> Translation:
    """For a worker on `devices`, in the order of its layers. Raises ValueError where they are of several nodes."""
    nodes = {split_device(device)[0] for device in devices}
    if len(nodes) != 1:
        raise ValueError(f"a worker needs devices of one node; {', '.join(devices)} are of {len(nodes)}")
    local = {device: split_device(device)[1] for device in devices}
    gpus = [device for device in local if is_gpu(local[device])]
    own = {**local, **{device: f"cuda:{index}" for index, device in enumerate(gpus)}}
    return Translation(node=nodes.pop(), local=local, own=own)


def is_gpu(local: str) -> bool:
    """Return whether the device of that name on its node is an NVIDIA GPU."""
    return local.startswith("cuda:")


def gpu_share(needed_bytes: int, total_bytes: int) -> float:
    """Return the part of a GPU that these bytes are, in units of Ray's, rounded up; all of it where that is unknown."""
    if needed_bytes <= 0 or total_bytes <= 0:
        return 1.0
    return min(1.0, -(-needed_bytes * GPU_UNIT // total_bytes) / GPU_UNIT)


def visible_gpus(setting: str | None, gpus: Sequence[str]) -> str:
    """CUDA_VISIBLE_DEVICES for a worker that gets `gpus` ("cuda:N", N counted among those that the node may use, which
    `setting`, the node's own CUDA_VISIBLE_DEVICES, names)."""
    numbers = [int(gpu.partition(":")[2]) for gpu in gpus]
    if setting is None:
        return ",".join(map(str, numbers))
    entries = [entry.strip() for entry in setting.split(",")]
    return ",".join(entries[number] for number in numbers)


def _renamed(share: DeviceShare, names: Mapping[str, str]) -> DeviceShare:
    return msgspec.structs.replace(share, device=names.get(share.device, share.device))
