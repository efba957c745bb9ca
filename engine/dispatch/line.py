"""Waiting requests in order of urgency."""

from __future__ import annotations

from collections.abc import Iterator

from engine.dispatch.heap import MutableHeap
from engine.request import Request


def urgency(request: Request, ageing_s: float) -> float:
    """Smaller goes first: the moment of arrival, moved back by `ageing_s` for each priority.

    The effective priority, priority + waited / ageing_s, grows equally fast for all who wait. So their order never
    changes, one number given at arrival is enough to keep it, and whoever waits gets past any stream of requests that
    are p priorities higher once it has waited p * ageing_s longer than they.
    """
    return request.created - request.priority * ageing_s


class Line:
    """Requests by urgency, equal ones by order of arrival. Every operation is O(log n), amortised."""

    __slots__ = ("_ageing_s", "_heap", "_requests")

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s
        self._heap: MutableHeap[float, int] = MutableHeap()
        self._requests: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request.order in self._requests

    def __iter__(self) -> Iterator[Request]:
        """All of them, in no order."""
        return iter(self._requests.values())

    def add(self, request: Request) -> None:
        """Put it at its place."""
        self._requests[request.order] = request
        self._heap.put(request.order, urgency(request, self._ageing_s))

    def remove(self, request: Request) -> None:
        """Take it out, if it is in."""
        if self._requests.pop(request.order, None) is not None:
            self._heap.discard(request.order)

    def first(self) -> Request | None:
        """The most urgent one."""
        order = self._heap.first()
        return None if order is None else self._requests[order]

    def leading(self, count: int) -> list[Request]:
        """Up to `count` of the most urgent ones, in order."""
        return [self._requests[order] for order in self._heap.leading(count)]

    def take_all(self) -> list[Request]:
        """Take all out, in order."""
        requests = sorted(self._requests.values(), key=lambda each: (urgency(each, self._ageing_s), each.order))
        self._heap = MutableHeap()
        self._requests.clear()
        return requests
