"""A plan of where workers go: what each device is to hold, and what it lacks, in numbers and in words."""

from __future__ import annotations

import msgspec

from engine.config import DeviceShare
from engine.costs import Correction, ModelCosts
from engine.errors import Detail, InsufficientMemory
from engine.snapshot import DeviceReading

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


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """What is planned for one device. short_bytes: what it lacks of used_bytes + headroom_bytes; 0 where all fits."""

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
    seats: tuple[Seat, ...]

    @property
    def fits(self) -> bool:
        """Whether no device lacks anything."""
        return not any(seat.short_bytes for seat in self.seats)

    @property
    def shortage(self) -> str:
        """What each device lacks, the worst first; "" where all fits."""
        return "; ".join(
            f"{_name(seat)}: needed {_mib(seat.used_bytes)} (weights {_mib(seat.weights_bytes)}, "
            f"KV pages {_mib(seat.kv_bytes)}, working memory {_mib(seat.working_bytes)}) beside "
            f"{_mib(seat.headroom_bytes)} kept free, and {_mib(seat.device.free_bytes, up=False)} are free: "
            f"short by {_mib(seat.short_bytes)}"
            for seat in self._lacking
        )

    def refusal(self) -> InsufficientMemory:
        """The error of a plan that does not fit; in its details the numbers of the worst device and of each."""
        worst, number = self._lacking[0], len(self.placements)
        details: dict[str, Detail] = {}
        for seat in self._lacking:
            details |= {f"{_name(seat)}.{key}": value for key, value in _numbers(seat).items()}
        whom = f"{number} workers with {self.costs.name} do" if number > 1 else f"a worker with {self.costs.name} does"
        return InsufficientMemory(f"{whom} not fit: {self.shortage}", device=_name(worst), **_numbers(worst), **details)

    @property
    def _lacking(self) -> list[Seat]:
        return sorted((seat for seat in self.seats if seat.short_bytes), key=lambda seat: -seat.short_bytes)


def _numbers(seat: Seat) -> dict[str, Detail]:
    return {
        "needed_bytes": seat.used_bytes,
        "free_bytes": seat.device.free_bytes,
        "headroom_bytes": seat.headroom_bytes,
        "short_bytes": seat.short_bytes,
    }


def _name(seat: Seat) -> str:
    return f"{seat.device.node}/{seat.device.id}" if seat.device.node else seat.device.id


def _mib(size_bytes: int, *, up: bool = True) -> str:
    """Whole MiB, rounded up, or down for what there is."""
    return f"{-(-size_bytes // _MIB) if up else size_bytes // _MIB} MiB"
