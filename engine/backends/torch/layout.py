"""Layout: the device of each layer of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.backends.torch.device_memory import DeviceMemory
from engine.config import DeviceShare
from engine.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Span:
    """Adjacent layers on one device."""

    layers: range
    memory: DeviceMemory

    @property
    def device(self) -> torch.device:
        """The device that computes them."""
        return self.memory.device


@dataclass(frozen=True, slots=True)
class Layout:
    """All layers in order. The embedding is with the first span, the final norm and the head with the last."""

    spans: tuple[Span, ...]

    @property
    def first(self) -> DeviceMemory:
        """The device of the embedding."""
        return self.spans[0].memory

    @property
    def last(self) -> DeviceMemory:
        """The device of the final norm and the head."""
        return self.spans[-1].memory

    @property
    def memories(self) -> tuple[DeviceMemory, ...]:
        """Each device once, in the order of the layers."""
        return tuple(dict.fromkeys(span.memory for span in self.spans))

    @property
    def by_layer(self) -> tuple[DeviceMemory, ...]:
        """The device of each layer."""
        return tuple(span.memory for span in self.spans for _ in span.layers)

    def shares(self) -> tuple[DeviceShare, ...]:
        """Return the memory used on each device."""
        by_layer = self.by_layer
        return tuple(
            DeviceShare(
                device=memory.name,
                layers=by_layer.count(memory),
                weights_bytes=memory.weights_bytes,
                kv_bytes=memory.kv_bytes,
                working_bytes=memory.working_bytes,
            )
            for memory in self.memories
        )

    def kv_room_bytes(self) -> int:
        """Return the bytes that KV pages of all layers may take, as the fullest device allows."""
        by_layer = self.by_layer
        return min(
            memory.free_bytes() * len(by_layer) // by_layer.count(memory)
            for memory in self.memories
            if memory in by_layer
        )


def split_layers(layers: int, memories: Sequence[DeviceMemory], shares: Sequence[DeviceShare]) -> Layout:
    """Split `layers` layers over `memories` by `shares`; a single share has them all.

    Raises InvalidRequest where the shares' layers are not those of the model.
    """
    if len(shares) <= 1 and not any(share.layers for share in shares):
        return Layout((Span(range(layers), memories[0]),))
    counts = [share.layers for share in shares]
    if min(counts) < 0 or sum(counts) != layers:
        raise InvalidRequest(
            f"the shares give {' + '.join(map(str, counts))} layers to {', '.join(share.device for share in shares)}; "
            f"the model has {layers}",
            param="shares",
            value=sum(counts),
        )
    by_name = {memory.name: memory for memory in memories}
    spans: list[Span] = []
    for share in shares:
        start = spans[-1].layers.stop if spans else 0
        spans.append(Span(range(start, start + share.layers), by_name[share.device]))
    return Layout(tuple(spans))
