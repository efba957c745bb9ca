"""Which layers of which worker lie on which device: decisions over bytes alone.

A worker is one segment per device, adjacent layers in the order of the devices. Two ways to arrange workers are
combined: whole ones wherever they fit, and a chain: the devices are filled in order, the worker that does not fit whole
being continued on the next device (McNaughton's wrap-around rule, 1959). Among all arrangements in which split workers
lie on devices one after another, the chain completes the most: each device's room goes to the worker that is furthest.
So what it cannot do is refused, and neither more room nor fewer workers can turn a yes into a no.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from engine.placement.model_memory import ModelCosts


class Segment(msgspec.Struct, frozen=True):
    """Layers [start, stop) of one worker on the device of that number."""

    device: int
    start: int
    stop: int


WorkerSegments = tuple[Segment, ...]

_SEARCH_STEPS = 20


class SplitProblem(msgspec.Struct, frozen=True, kw_only=True):
    """Workers to be arranged over devices.

    room: bytes that may be taken of each device.  groups: numbers of devices that a worker may span, those of one
    machine.  pages: KV pages that each worker has at the least.  resident: workers of the model are there already.
    later: bytes that may be taken once the workers that these replace are gone, () where none are: a device is
    preferred by that.
    """

    costs: ModelCosts
    room: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    pages: int
    resident: bool = False
    later: tuple[int, ...] = ()

    @property
    def whole_bytes(self) -> int:
        """A worker on one device."""
        return self.segment_bytes(Segment(0, 0, self.costs.layers))

    @property
    def shared_bytes(self) -> int:
        """Bytes that a second worker on the same device does not take again."""
        return self.costs.weights_bytes if self.costs.shares_weights else 0

    def next_whole_bytes(self, others: int) -> int:
        """Return the bytes of a worker on one device next to `others` that were arranged there."""
        return self.whole_bytes - self.shared_bytes * (self.resident or others > 0)

    def segment_bytes(self, segment: Segment) -> int:
        """A segment with its KV pages."""
        return self.costs.share("", segment.start, segment.stop, self.pages).total_bytes

    def needs(self, workers: Sequence[WorkerSegments]) -> tuple[int, ...]:
        """Bytes that the workers take of each device, with the least of KV pages."""
        return self.needs_with(workers, [self.pages] * len(workers))

    def needs_with(self, workers: Sequence[WorkerSegments], pages: Sequence[int]) -> tuple[int, ...]:
        """As `needs`, with these numbers of KV pages for the workers."""
        needed, whole_ones = [0] * len(self.room), [0] * len(self.room)
        for worker, count in zip(workers, pages, strict=True):
            for segment in worker:
                needed[segment.device] += self.costs.share("", segment.start, segment.stop, count).total_bytes
                whole_ones[segment.device] += len(worker) == 1
        return tuple(
            need - self.shared_bytes * max(0, count - (not self.resident))
            for need, count in zip(needed, whole_ones, strict=True)
        )

    def short(self, workers: Sequence[WorkerSegments]) -> tuple[int, ...]:
        """Bytes that each device lacks for them."""
        return tuple(
            max(0, need - room) if need else 0 for need, room in zip(self.needs(workers), self.room, strict=True)
        )

    def with_room(self, room: Sequence[int]) -> SplitProblem:
        """The same with other room."""
        return msgspec.structs.replace(self, room=tuple(room), later=())


def whole_workers(ground: SplitProblem, number: int) -> list[WorkerSegments]:
    """`number` workers, each on the device with most room left of those that it fits on, or of all where it fits on
    none; the first of equals. Among those that it fits on, the most room is what there will be later."""
    room, later, placed = list(ground.room), list(ground.later or ground.room), [0] * len(ground.room)
    workers: list[WorkerSegments] = []
    for _ in range(number):
        sizes = [ground.next_whole_bytes(others) for others in placed]
        fits = [size <= left for size, left in zip(sizes, room, strict=True)]
        device = max(range(len(room)), key=lambda each: (fits[each], later[each] if fits[each] else room[each]))
        room[device] -= sizes[device]
        later[device] -= sizes[device]
        placed[device] += 1
        workers.append(_whole_on(ground, device))
    return workers


def num_whole_workers(ground: SplitProblem) -> int:
    """How many workers fit whole."""
    first, further = ground.next_whole_bytes(0), ground.next_whole_bytes(1)
    return sum(1 + (room - first) // max(1, further) for room in ground.room if room >= first)


def chained_workers(ground: SplitProblem, number: int) -> list[WorkerSegments]:
    """Up to `number` workers by the chain rule; as many as there is room for."""
    workers: list[WorkerSegments] = []
    for group in ground.groups:
        begun: list[Segment] = []
        for device in group:
            left = ground.room[device]
            while len(workers) < number:
                start = begun[-1].stop if begun else 0
                segment = _longest(ground, device, start, left)
                if segment is None:
                    break
                left -= ground.segment_bytes(segment)
                begun.append(segment)
                if segment.stop < ground.costs.layers:
                    break
                workers.append(tuple(begun))
                begun = []
    return workers


def automatic_split(ground: SplitProblem, number: int) -> list[WorkerSegments]:
    """Whole workers while they fit, the rest split over what they leave; an arrangement that is short where none fits.

    One that is split takes as few devices as it can.
    """
    capacity = num_whole_workers(ground)
    if number <= capacity or len(ground.room) == 1:
        return whole_workers(ground, number)
    chained = chained_workers(ground, number)
    if len(chained) < number:
        return smallest_shortfall(ground, [whole_workers(ground, number), _if_each_had_more(ground, number)])
    placed = whole_workers(ground, capacity)
    left = ground.with_room(_minus(ground.room, ground.needs(placed)))
    choices = (split(left, number - capacity) for split in (_fewest, chained_workers))
    return next(([*placed, *rest] for rest in choices if len(rest) == number - capacity), chained)


def balanced_split(ground: SplitProblem, number: int) -> list[WorkerSegments]:
    """EricLLM's --gpu_balance: as many whole workers on every device, the odd ones split evenly over all of them.

    Fewer workers than devices are whole, each on its own. Where one way for the odd ones does not fit, the other is
    taken if it does.
    """
    devices = range(len(ground.room))
    rounds, odd = divmod(number, len(devices))
    everywhere = [_whole_on(ground, device) for _ in range(rounds) for device in devices]
    left = ground.with_room(_minus(ground.room, ground.needs(everywhere)))
    roomiest = sorted(devices, key=lambda device: -left.room[device])
    as_whole = [*everywhere, *(_whole_on(ground, device) for device in sorted(roomiest[:odd]))]
    if not all(1 < len(group) <= ground.costs.layers for group in ground.groups):
        return as_whole
    split = [*everywhere, *(_even_split(ground, ground.groups[n % len(ground.groups)]) for n in range(odd))]
    return smallest_shortfall(ground, [split, as_whole] if rounds else [as_whole, split])


def split_by_weights(ground: SplitProblem, number: int, weights_bytes: Sequence[int]) -> list[WorkerSegments] | None:
    """--gpu_split: the layers in order, as many on each device as `weights_bytes` holds of weights; None where it holds
    too few of them."""
    costs = ground.costs
    workers: list[WorkerSegments] = []
    for worker in range(number):
        group = ground.groups[worker % len(ground.groups)]
        segments: list[Segment] = []
        for device, size_bytes in zip(group, weights_bytes, strict=False):
            start = segments[-1].stop if segments else 0
            stop = _furthest(start, costs.layers, partial(costs.weights_of, start), size_bytes)
            if stop > start:
                segments.append(Segment(device, start, stop))
        if not segments or segments[-1].stop < costs.layers:
            return None
        workers.append(tuple(segments))
    return workers


def tensor_parallel_split(ground: SplitProblem, number: int) -> list[WorkerSegments]:
    """Every worker over all devices of a machine, an even part on each: what tensor parallelism takes."""
    return [_even_split(ground, ground.groups[worker % len(ground.groups)]) for worker in range(number)]


def rank_split(ground: SplitProblem, number: int, ranks: int) -> list[WorkerSegments] | None:
    """Every worker over `ranks` devices of a machine with a part of all layers on each: those with most room; None
    where no machine has as many. ground.costs: of one device."""
    groups = [group for group in ground.groups if len(group) >= ranks]
    if not groups:
        return None
    room, workers = list(ground.room), list[WorkerSegments]()
    for _ in range(number):
        options = [sorted(group, key=lambda device: -room[device])[:ranks] for group in groups]
        fullest = [room[option[-1]] for option in options]
        chosen = sorted(options[fullest.index(max(fullest))])
        for device in chosen:
            room[device] -= ground.whole_bytes
        workers.append(tuple(segment for device in chosen for segment in _whole_on(ground, device)))
    return workers


def smallest_shortfall(ground: SplitProblem, choices: Sequence[list[WorkerSegments]]) -> list[WorkerSegments]:
    """The arrangement that lacks the fewest bytes in all, the first of equals."""
    return min(choices, key=lambda workers: sum(ground.short(workers)))


def _fewest(ground: SplitProblem, number: int) -> list[WorkerSegments]:
    """Each worker over as few devices of a group as hold it, the roomiest; fewer workers where one fits nowhere so."""
    workers: list[WorkerSegments] = []
    for _ in range(number):
        options = (
            chained_workers(_only(ground, sorted(group, key=lambda device: -ground.room[device])[:count]), 1)
            for count in range(1, max(map(len, ground.groups)) + 1)
            for group in ground.groups
            if count <= len(group)
        )
        found = next((option for option in options if option), None)
        if found is None:
            break
        workers += found
        ground = ground.with_room(_minus(ground.room, ground.needs(found)))
    return workers


def _only(ground: SplitProblem, devices: Sequence[int]) -> SplitProblem:
    """The same with room on these devices alone."""
    return ground.with_room([room if device in devices else 0 for device, room in enumerate(ground.room)])


def _if_each_had_more(ground: SplitProblem, number: int) -> list[WorkerSegments]:
    """The chain's arrangement with about the least bytes more on every device that let it complete `number` workers."""

    def with_more(extra_bytes: int) -> list[WorkerSegments]:
        return chained_workers(ground.with_room([room + extra_bytes for room in ground.room]), number)

    enough = number * ground.whole_bytes - min(0, *ground.room)
    unit = (enough >> _SEARCH_STEPS) + 1
    found = bisect_left(range(enough // unit + 1), number, key=lambda units: len(with_more(units * unit)))
    return with_more(min(enough, found * unit))


def _longest(ground: SplitProblem, device: int, start: int, room_bytes: int) -> Segment | None:
    """As many layers from `start` on as there is room for; None where there is none for one."""
    last = ground.costs.layers

    def size_bytes(stop: int) -> int:
        return ground.segment_bytes(Segment(device, start, stop))

    if size_bytes(last) <= room_bytes:
        return Segment(device, start, last)
    stop = _furthest(start, last - 1, size_bytes, room_bytes)
    return Segment(device, start, stop) if stop > start else None


def _furthest(start: int, last: int, size_bytes: Callable[[int], int], room_bytes: int) -> int:
    """The largest end up to `last` whose size fits; `start` where none does."""
    return start + bisect_right(range(start + 1, last + 1), room_bytes, key=size_bytes)


def _whole_on(ground: SplitProblem, device: int) -> WorkerSegments:
    return (Segment(device, 0, ground.costs.layers),)


def _even_split(ground: SplitProblem, group: Sequence[int]) -> WorkerSegments:
    layers = ground.costs.layers
    ends = [layers * (position + 1) // len(group) for position in range(len(group))]
    starts = [0, *ends[:-1]]
    return tuple(
        Segment(device, start, end) for device, start, end in zip(group, starts, ends, strict=True) if end > start
    )


def _minus(room: Sequence[int], needed: Sequence[int]) -> list[int]:
    return [have - need for have, need in zip(room, needed, strict=True)]
