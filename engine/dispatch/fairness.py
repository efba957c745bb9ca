"""Whose request is next: the places on the workers are shared fairly among the clients that want one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count

from engine.dispatch.heap import MutableHeap
from engine.dispatch.line import Line
from engine.request import Request


class _Client:
    """One client's waiting requests, how many of its requests are worked on, and when it last had a place (a count of
    such events, not a time)."""

    __slots__ = ("running", "turn", "waiting")

    def __init__(self, waiting: Line, turn: int) -> None:
        self.waiting = waiting
        self.running = 0
        self.turn = turn


class FairQueue:
    """A line of requests per client. The next request is that of the client with the fewest at work; among equals, of
    the one that has gone longest without a place. Within a client it is the most urgent one.

    What is shared is a worker's places, for as long as requests hold them, so that long answers count for more than
    short ones: max-min fair sharing (one resource of Ghodsi et al., "Dominant Resource Fairness", 2011), with the
    round of Nagle's fair queueing (RFC 970, 1985) among equals. Who comes new joins the round at its end, so neither
    one client with many requests nor many clients with one each can lock anybody out. A client is remembered only
    while it has a request here: nothing is saved up, nothing is owed.

    Every operation is O(log n), amortised.
    """

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s
        self._clients: dict[str, _Client] = {}
        self._next: MutableHeap[tuple[int, int], str] = MutableHeap()
        self._turns = count()
        self._waiting = 0

    def __len__(self) -> int:
        return self._waiting

    def __iter__(self) -> Iterator[Request]:
        """Every waiting request, in no particular order."""
        return (request for client in self._clients.values() for request in client.waiting)

    def check(self, running: Mapping[str, int]) -> None:
        """Prove the accounts; running: requests at work of each client. Raises AssertionError."""
        waiting = {name: len(client.waiting) for name, client in self._clients.items()}
        assert self._waiting == sum(waiting.values()), f"{self._waiting} requests counted, {waiting} wait"
        counted = {name: client.running for name, client in self._clients.items() if client.running}
        assert counted == running, f"clients have {counted} requests at work, not {running}"

    def add(self, request: Request) -> None:
        """Queue a request."""
        client = self._client(request.client)
        self._waiting -= len(client.waiting)
        client.waiting.add(request)
        self._waiting += len(client.waiting)
        self._rank(request.client, client)

    def remove(self, request: Request) -> bool:
        """Take a waiting request out; False where it is not in."""
        client = self._clients.get(request.client)
        if client is None or request not in client.waiting:
            return False
        client.waiting.remove(request)
        self._waiting -= 1
        self._rank(request.client, client)
        return True

    def first(self) -> Request | None:
        """The next request; None where none waits."""
        name = self._next.first()
        return None if name is None else self._clients[name].waiting.first()

    def leading(self, count: int) -> list[Request]:
        """The next request and up to `count` - 1 that might as well be: those of clients with as few at work."""
        requests: list[Request] = []
        clients = [self._clients[name] for name in self._next.leading(count)]
        for client in clients:
            if client.running == clients[0].running:
                requests += client.waiting.leading(count - len(requests))
        return requests

    def began(self, name: str) -> None:
        """A request of this client got a place."""
        client = self._client(name)
        client.running += 1
        client.turn = next(self._turns)
        self._rank(name, client)

    def ended(self, name: str) -> None:
        """A request of this client, which had a place, has it no more."""
        client = self._clients[name]
        client.running -= 1
        client.turn = next(self._turns)
        self._rank(name, client)

    def take_all(self) -> list[Request]:
        """Take all waiting requests out, in the order in which they would get places if none ended."""
        requests: list[Request] = []
        while (request := self.first()) is not None:
            self.remove(request)
            self.began(request.client)
            requests.append(request)
        for request in requests:
            self.ended(request.client)
        return requests

    def by_client(self) -> dict[str, int]:
        """How many requests of each client wait, of those that have any."""
        return {name: len(client.waiting) for name, client in self._clients.items() if len(client.waiting)}

    def _client(self, name: str) -> _Client:
        client = self._clients.get(name)
        if client is None:
            client = self._clients[name] = _Client(Line(self._ageing_s), next(self._turns))
        return client

    def _rank(self, name: str, client: _Client) -> None:
        """Put a changed client at its place, or forget it."""
        if len(client.waiting):
            self._next.put(name, (client.running, client.turn))
            return
        self._next.discard(name)
        if not client.running:
            del self._clients[name]
