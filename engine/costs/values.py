"""What a model takes of each device that it is put on: the numbers, and what follows from them."""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.config import BackendKind, CacheBits, DeviceShare, WeightsName

DeviceKind = Literal["cpu", "cuda", "simulated"]


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is to do at once; the fields are EngineConfig's."""

    max_prompts: int = 16
    step_tokens: int = 512
    page_tokens: int = 16


class Correction(msgspec.Struct, frozen=True, kw_only=True):
    """What earlier loads teach: weights are multiplied by a factor, working memory on each device has bytes added.

    loads: how many they were.
    """

    weights_factor: float = 1.0
    working_bytes: int = 0
    loads: int = 0


class ModelCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that one worker takes. A worker is its layers in order, adjacent ones on a device.

    identity: of what was counted; the same for the same files held in the same way.
    first_bytes, last_bytes: what goes with the first and with the last layer.  joined_bytes: of these, what is held
    once where both lie on the same device (a tied head).
    page_bytes: a KV page of page_tokens, in one layer.  device_page_bytes: what it takes besides on each device, and
    first_page_bytes on the first.
    working_bytes: on each device, for steps and the runtime.  head_working_bytes: on the last instead.
    unseen_bytes: of these, what LoadedModel.shares says nothing of.
    shares_weights: whether workers on one device hold them once.
    host_process_bytes: RAM of the machine for each worker's process, where the devices are simulated and so all that
    it holds is in RAM too; 0 elsewhere.  host_shares_weights: whether workers of one machine hold them once there.
    correction: by which all of these are corrected already.
    """

    name: str
    identity: str
    backend: BackendKind
    dtype: str
    kind: DeviceKind
    cache_bits: CacheBits
    context_tokens: int
    page_tokens: int
    layer_bytes: tuple[int, ...]
    first_bytes: int = 0
    last_bytes: int = 0
    joined_bytes: int = 0
    page_bytes: int = 0
    device_page_bytes: int = 0
    first_page_bytes: int = 0
    working_bytes: int = 0
    head_working_bytes: int = 0
    unseen_bytes: int = 0
    shares_weights: bool = False
    host_process_bytes: int = 0
    host_shares_weights: bool = False
    weights: WeightsName = "auto"
    correction: Correction = Correction()

    @property
    def layers(self) -> int:
        """How many there are."""
        return len(self.layer_bytes)

    @property
    def weights_bytes(self) -> int:
        """Of a worker that lies on one device."""
        return self.weights_of(0, self.layers)

    @property
    def kv_token_bytes(self) -> int:
        """Keys and values of one token in all layers, rounded up."""
        return -(-self.layers * self.page_bytes // self.page_tokens)

    def pages(self, tokens: int) -> int:
        """KV pages that hold so many tokens."""
        return -(-tokens // self.page_tokens)

    def weights_of(self, start: int, stop: int) -> int:
        """Weights of layers [start, stop) and what goes with them."""
        first, last = start == 0, stop == self.layers
        ends = self.first_bytes * first + self.last_bytes * last - self.joined_bytes * (first and last)
        return sum(self.layer_bytes[start:stop]) + ends

    def share(self, device: str, start: int, stop: int, pages: int) -> DeviceShare:
        """What layers [start, stop) take of `device`, with `pages` KV pages."""
        first, last = start == 0, stop == self.layers
        working = self.head_working_bytes if last else self.working_bytes
        weights = self.weights_of(start, stop)
        return DeviceShare(
            device=device,
            layers=stop - start,
            weights_bytes=weights,
            shared_bytes=weights if self.shares_weights or self.host_shares_weights else 0,
            kv_bytes=pages * ((stop - start) * self.page_bytes + self.first_page_bytes * first),
            working_bytes=working + pages * self.device_page_bytes,
        )


def device_kind(device: str) -> DeviceKind:
    """The kind of the device of that name, as in DeviceShare.device."""
    return "cpu" if device == "cpu" else "simulated" if device.startswith("sim") else "cuda"


def corrected(costs: ModelCosts, by: Correction) -> ModelCosts:
    """The costs as earlier loads bear them out."""

    def weigh(size_bytes: int) -> int:
        return int(size_bytes * by.weights_factor)

    return msgspec.structs.replace(
        costs,
        layer_bytes=tuple(map(weigh, costs.layer_bytes)),
        first_bytes=weigh(costs.first_bytes),
        last_bytes=weigh(costs.last_bytes),
        joined_bytes=weigh(costs.joined_bytes),
        working_bytes=max(0, costs.working_bytes + by.working_bytes),
        head_working_bytes=max(0, costs.head_working_bytes + by.working_bytes),
        correction=by,
    )
