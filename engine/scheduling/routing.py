"""The workers as the dispatcher sees them, and where a request fits best."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from engine.backends.base import BackendStats, PrefixChanges
from engine.backends.common.page_keys import page_keys
from engine.requests.request import Request
from engine.worker_process.protocol import StepBatch

# What a worker's step costs, learned from its steps.

_MIN_STEPS = 8
_NOISE = 0.3
_DRIFT = 0.03
_DOUBT = 10.0


class StepPrice(msgspec.Struct, frozen=True):
    """Seconds of a step: fixed_s, and so much more for each prompt token and for each answer that it goes on with."""

    fixed_s: float = 0.01
    prompt_token_s: float = 0.0005
    answer_s: float = 0.001


_INITIAL_PRICE = msgspec.structs.astuple(StepPrice())


class StepCost:
    """A Kalman filter over the three prices, each step being one measurement of their sum. What was never seen keeps
    its price of `StepPrice()`, and what was seen long ago the one it had then.

    Assumed: a step's time is off by 30%; prices drift by 3% a step; the first ones may be wrong by ten times.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._prices = list(_INITIAL_PRICE)
        self._doubt = [[0.0] * 3 for _ in range(3)]
        self._price: StepPrice | None = None
        self._grow_doubt(_DOUBT)

    @property
    def is_reliable(self) -> bool:
        """True if enough steps were seen to believe the price."""
        return self.steps >= _MIN_STEPS

    @property
    def price(self) -> StepPrice:
        """The prices now; none is negative."""
        if self._price is None:
            self._price = StepPrice(*(max(0.0, price) for price in self._prices))
        return self._price

    def observe(self, step_s: float, prompt_tokens: float, answers: float) -> None:
        """Learn from a step that took `step_s` for these numbers of prompt tokens and of answers gone on with."""
        features = (1.0, prompt_tokens, answers)
        self._grow_doubt(_DRIFT)
        expected_s = _dot(features, self._prices)
        spread = [_dot(features, row) for row in self._doubt]
        # between the two, so that neither a step that hung nor a worker that became slower counts for too much
        typical_s2 = max(step_s, expected_s, 1e-6) * max(min(step_s, expected_s), 1e-6)
        gain = [each / (_dot(features, spread) + _NOISE**2 * typical_s2) for each in spread]
        for row in range(3):
            self._prices[row] += gain[row] * (step_s - expected_s)
            for column in range(3):
                self._doubt[row][column] -= gain[row] * spread[column]
        self.steps += 1
        self._price = None

    def _grow_doubt(self, share: float) -> None:
        for index, (price, first) in enumerate(zip(self._prices, _INITIAL_PRICE, strict=True)):
            self._doubt[index][index] += (share * max(price, first / 10)) ** 2


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    """Of three and three: written out, as it runs eight times in every step of every worker."""
    return left[0] * right[0] + left[1] * right[1] + left[2] * right[2]


# Which prefixes a worker holds in its KV pages, as far as the engine knows.

_REMEMBERED_PAGES = 65_536


class PrefixMemory:
    """Pages of one worker by their short keys: those that it reported, and those of prompts that were sent there, which
    it will hold soon. Where a worker reports nothing, what was sent is all that is known.

    It is a hint: a prompt that was cancelled before it was computed, or pages that a silent worker has reused, are
    believed to be there until they are among the `capacity` used longest ago. The next request that comes for them
    makes it true.
    """

    def __init__(self, capacity: int = _REMEMBERED_PAGES) -> None:
        self._capacity = capacity
        self._pages: OrderedDict[bytes, None] = OrderedDict()

    def add(self, keys: Sequence[bytes]) -> None:
        """Note that a prompt with these pages is computed there. Its last page counts as the one used longest ago, so
        that what is forgotten first is what fewest prompts share."""
        self._remember(reversed(keys))

    def update(self, changes: PrefixChanges) -> None:
        """Take in a worker's report."""
        for key in changes.dropped:
            self._pages.pop(key, None)
        self._remember(changes.added)

    def match(self, keys: Sequence[bytes]) -> int:
        """How many of the leading pages it holds."""
        pages = self._pages
        if not keys or keys[0] not in pages:
            return 0  # of most workers, most of the time
        return next((index for index, key in enumerate(keys) if key not in pages), len(keys))

    def _remember(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._pages[key] = None
            self._pages.move_to_end(key)
        while len(self._pages) > self._capacity:
            self._pages.popitem(last=False)


# Which worker a request goes to: where its prefix is cached, when that saves more than it waits.


class Slot(msgspec.Struct, kw_only=True):
    """A worker that takes requests: how many it works on and how many it may."""

    worker: str
    active: int
    max_prompts: int

    @property
    def free(self) -> int:
        """Requests it can take now; 0 if it has more than it may."""
        return max(0, self.max_prompts - self.active)


class Offer(msgspec.Struct, frozen=True, gc=False):
    """An offer of a worker for a request; made for every worker and request, so cheaply. cached_tokens: of its prompt,
    in the worker's pages; pending_tokens: of other prompts, which the worker computes first; price: what its steps
    cost."""

    slot: Slot
    cached_tokens: int
    pending_tokens: int
    price: StepPrice


def cost_s(offer: Offer, tokens: int, answer_tokens: float) -> float:
    """Seconds that a request of `tokens` tokens, of which an answer of `answer_tokens` is expected, costs there:

        waits     (pending + tokens - cached) * prompt_token_s            until its prompt is computed
        delays    (tokens - cached) * prompt_token_s                      by which others get theirs later
        answers   answer_tokens * (fixed_s + (active + 1) * answer_s)     its share of a crowded batch

    So of two equally fast workers the one that holds s tokens more of the prompt gets it as long as

        2 * s * prompt_token_s > (pending there - pending here) * prompt_token_s
                                 + answer_tokens * (active there - active here) * answer_s
    """
    price = offer.price
    own = tokens - offer.cached_tokens
    waits_and_delays_s = (offer.pending_tokens + 2 * own) * price.prompt_token_s
    return waits_and_delays_s + answer_tokens * (price.fixed_s + (offer.slot.active + 1) * price.answer_s)


def choose_worker(offers: Sequence[Offer], tokens: int, answer_tokens: float) -> Offer:
    """The cheapest of the offers, one at least; of equally cheap ones the least busy, then the first."""
    return min(offers, key=lambda offer: (cost_s(offer, tokens, answer_tokens), offer.slot.active))


def may_wait(offers: Sequence[Offer], chosen: Offer) -> bool:
    """Return whether a request had better let another one go before it: a worker without a free place holds so much
    more of its prompt than the `chosen` one that computing it costs more than a step, the least that being overtaken
    takes."""
    price = chosen.price
    step_s = price.fixed_s + chosen.slot.active * price.answer_s
    cached_tokens = max(offer.cached_tokens for offer in offers if offer is chosen or not offer.slot.free)
    return 2 * (cached_tokens - chosen.cached_tokens) * price.prompt_token_s > step_s


# Which workers are slower than their peers.

SLOWER = 1.5
"""A worker is slow whose steps take this many times as long as its peers': those of two equal ones differ by less."""
SLOW_FOR_S = 10.0
"""Seconds of work for which they take so long before it counts."""
_MORE_REQUESTS = 1.25
"""Times the requests of a peer with which a worker may be slower."""


class _SlowClock:
    """The seconds that one worker has lost by being slower than its peers; they only grow.

    slowness: how many times as long as its peers' its steps take; 1 where it is not slow.
    """

    def __init__(self) -> None:
        self.slowness = 1.0
        self._lost_s = 0.0
        self._at: float | None = None
        self._slow_for_s = 0.0

    def compared(self, ratio: float | None, now: float) -> None:
        """Its steps take this many times as long as its peers' now; None while nothing shows that."""
        passed_s = 0.0 if self._at is None else now - self._at
        self._lost_s, self._at = self.read(now), now
        if ratio is not None:
            self._slow_for_s = self._slow_for_s + passed_s if ratio >= SLOWER else 0.0
        self.slowness = ratio if ratio is not None and self._slow_for_s >= SLOW_FOR_S else 1.0

    def read(self, now: float) -> float:
        """The seconds until now."""
        return self._lost_s + (0.0 if self._at is None else (now - self._at) * (1 - 1 / self.slowness))


def _is_alone(worker: str, devices: Mapping[str, Sequence[str]]) -> bool:
    """Return whether no other worker computes on the processors of this one: those that share one slow each other."""
    mine = set(map(_processor, devices[worker]))
    return not any(mine & set(map(_processor, theirs)) for other, theirs in devices.items() if other != worker)


def _processor(device: str) -> str:
    """Return the processor of a device: a GPU itself, and for a simulated one the CPU of its machine."""
    node, _, local = device.rpartition("/")
    return device if local.startswith("cuda") else f"{node}/cpu"


def _kinds(devices: Sequence[str]) -> list[str]:
    """Kinds of the devices of a worker: "cuda" twice, say."""
    return [device.rpartition("/")[2].partition(":")[0] for device in devices]


# What the dispatcher knows of one worker.


class RoutingState:
    """A worker as its reports and what was sent there show it. missing: of each of its requests, the prompt tokens that
    it has yet to compute."""

    def __init__(self) -> None:
        self.prefixes = PrefixMemory()
        self.cost = StepCost()
        self.slow = _SlowClock()
        self.missing: dict[str, int] = {}
        self._prompt_tokens_computed = 0

    @property
    def pending_tokens(self) -> int:
        """Prompt tokens of its requests that it has yet to compute."""
        return sum(self.missing.values()) if self.missing else 0

    def add(self, request_id: str, keys: Sequence[bytes], missing_tokens: int) -> None:
        """Note that a request with these pages goes there. missing_tokens: those that are not cached."""
        self.prefixes.add(keys)
        self.missing[request_id] = missing_tokens

    def remove(self, request_id: str) -> int:
        """Note that it does not work on this request any more; return the prompt tokens that are not computed."""
        return self.missing.pop(request_id, 0)

    def prompt_tokens(self, stats: BackendStats) -> int:
        """Prompt tokens computed since the stats before these."""
        before, self._prompt_tokens_computed = self._prompt_tokens_computed, stats.prompt_tokens_computed
        return max(0, stats.prompt_tokens_computed - before)

    def progressed(self, batch: StepBatch) -> None:
        """Take in what a step brought: pages, and how far prompts are."""
        self.prefixes.update(batch.prefix)
        for sequence in batch.stats.sequences if self.missing else ():
            missing = self.missing.get(sequence.request_id)
            if missing is not None:
                self.missing[sequence.request_id] = min(missing, sequence.known_tokens - sequence.computed_tokens)
        for output in batch.outputs if self.missing else ():
            if output.token_ids or output.finish is not None:
                self.missing.pop(output.request_id, None)


_FIRST_ANSWER_TOKENS = 128.0
_ANSWER_SHARE = 1 / 32
_MORE_ANSWER_TOKENS = 64
_BUSY_S = 2.0


@dataclass(slots=True)
class _Running:
    """A request that a worker works on. prompt_tokens: that were to be computed when it went there.  answer_tokens: of
    its whole answer until now.  expected_tokens: the same at its end, never fewer."""

    worker: str
    client: str
    prompt_tokens: int
    answer_tokens: int
    expected_tokens: float


@dataclass(frozen=True, slots=True)
class Unused:
    """Work that a request did not take: prompt tokens that were not computed, or that are lost with its worker, and
    tokens that its answer was expected to get and did not."""

    prompt_tokens: int
    answer_tokens: float


@dataclass(frozen=True, slots=True)
class Fit:
    """Where a request goes best now. keys: of its prompt's pages; missing_tokens: those not cached there; may_wait:
    whether it had better let another one go first."""

    slot: Slot
    keys: Sequence[bytes]
    missing_tokens: int
    may_wait: bool


class Router:
    """The state of each worker and of the requests that run there. page_tokens, salt: how workers key pages."""

    def __init__(self, page_tokens: int, salt: bytes) -> None:
        self._page_tokens = page_tokens
        self._salt = salt
        self._workers: dict[str, RoutingState] = {}
        self._running: dict[str, _Running] = {}
        self._typical_cost = StepCost()
        self._answer_tokens = _FIRST_ANSWER_TOKENS

    @property
    def running(self) -> dict[str, str]:
        """The worker of each request that was sent to one, by wire id."""
        return {wire_id: running.worker for wire_id, running in self._running.items()}

    def fit(self, request: Request, slots: Sequence[Slot], keys: Sequence[bytes] | None = None) -> Fit:
        """The best of the slots that are free, of which there is one at least; keys, where they are known already."""
        if keys is None:
            keys = page_keys(
                self._salt,
                request.prompt_ids,
                self._page_tokens,
                request.adapter_key,
                request.cache_scope,
                request.shared_tokens,
            )
        tokens = len(request.prompt_ids) + len(request.generated)
        answer_tokens = self.expected_answer(request)
        offers = [self._offer(slot, keys, tokens) for slot in slots]
        best = choose_worker([offer for offer in offers if offer.slot.free], tokens, answer_tokens)
        return Fit(best.slot, keys, tokens - best.cached_tokens, may_wait(offers, best))

    def expected_answer(self, request: Request) -> float:
        """Return how many more tokens a request is expected to get: as many as answers got lately, if it may."""
        if request.params.max_tokens is None:
            return self._answer_tokens
        return min(self._answer_tokens, request.params.max_tokens - len(request.generated))

    def keeps_busy(self, worker: str, client: str) -> bool:
        """Return whether the prompts of a client take a worker _BUSY_S or more until they are computed."""
        view = self._workers.get(worker)
        if view is None or not view.pending_tokens:
            return False
        tokens = sum(missing for name, missing in view.missing.items() if self._running[name].client == client)
        return tokens * self._price(view).prompt_token_s >= _BUSY_S

    def send(self, request: Request, fit: Fit) -> float:
        """Count a request as running where it fits; return the tokens that it is expected to get there."""
        fit.slot.active += 1
        self._workers[fit.slot.worker].add(request.wire_id, fit.keys, fit.missing_tokens)
        generated, answer_tokens = len(request.generated), max(0.0, self.expected_answer(request))
        self._running[request.wire_id] = _Running(
            fit.slot.worker, request.client, fit.missing_tokens, generated, generated + answer_tokens
        )
        return answer_tokens

    def release(self, request: Request) -> Unused | None:
        """Count a request as running no more; return what it did not take, None where it did not run."""
        running = self._running.pop(request.wire_id, None)
        if running is None:
            return None
        view = self._workers.get(running.worker)
        missing_tokens = running.prompt_tokens if view is None else view.remove(request.wire_id)
        return Unused(missing_tokens, running.expected_tokens - running.answer_tokens)

    def stepped(self, worker: str, batch: StepBatch) -> Sequence[tuple[str, float]]:
        """A worker's report: its pages, how far its prompts are, what the step cost, and how long answers get. Before
        `release` is called for the requests that ended in it. Returns clients of which answers got longer than
        expected, each with the tokens by which they are expected to get longer now."""
        view = self._workers.get(worker)
        if view is None:
            return ()  # nothing was sent there yet, or it is forgotten
        prompt_tokens = view.prompt_tokens(batch.stats)
        if batch.step_s > 0:
            for cost in (view.cost, self._typical_cost):
                cost.observe(batch.step_s, prompt_tokens / batch.steps, batch.answers / batch.steps)
        view.progressed(batch)
        longer: list[tuple[str, float]] = []
        for output in batch.outputs:
            running = self._running.get(output.request_id)
            if running is None:
                continue
            running.answer_tokens += len(output.token_ids)
            if running.answer_tokens > running.expected_tokens:
                expected_tokens = running.answer_tokens + _MORE_ANSWER_TOKENS
                longer.append((running.client, expected_tokens - running.expected_tokens))
                running.expected_tokens = expected_tokens
            if output.finish is not None:
                self._answer_tokens += (running.answer_tokens - self._answer_tokens) * _ANSWER_SHARE
        return longer

    def compare(self, devices: Mapping[str, Sequence[str]], now: float) -> None:
        """Find the workers that are slower than their peers; call it once a second. devices: of each worker.

        Compared are workers at work, each with processors of its own, on devices of the same kind. Where more than a
        minority would be slow, or both of two, none is: what slows most of them is not the fault of one.
        """
        running = Counter(each.worker for each in self._running.values())
        reliable = {name for name, view in self._workers.items() if view.cost.is_reliable}
        alone = [name for name in devices if name in reliable and running[name] and _is_alone(name, devices)]
        ratios = {name: self._ratio(name, alone, devices, running) for name in alone}
        num_slow = sum(ratio is not None and ratio >= SLOWER for ratio in ratios.values())
        too_many = num_slow > max(1, (len(alone) - 1) // 2)
        for name, view in self._workers.items():
            view.slow.compared(1.0 if too_many else ratios.get(name), now)

    def _ratio(
        self, worker: str, compared: Sequence[str], devices: Mapping[str, Sequence[str]], running: Mapping[str, int]
    ) -> float | None:
        """Return how many times as long a step of a worker takes as the same one on the median of its peers, None where
        none of them is at work."""

        def step_s(name: str) -> float:
            price = self._workers[name].cost.price
            return price.fixed_s + running[worker] * price.answer_s

        peers = sorted(
            step_s(name)
            for name in compared
            if name != worker
            and _kinds(devices[name]) == _kinds(devices[worker])
            and running[worker] <= _MORE_REQUESTS * running[name]
        )
        usual_s = peers[len(peers) // 2] if peers else 0.0
        return step_s(worker) / usual_s if usual_s > 0 else None

    def slowness(self, worker: str) -> float:
        """Return how many times as long as its peers' the steps of a worker take; 1 where it is not slow."""
        view = self._workers.get(worker)
        return 1.0 if view is None else view.slow.slowness

    def slow_s(self, worker: str, now: float) -> float:
        """Return the seconds that a worker has lost so far by being slower than its peers."""
        view = self._workers.get(worker)
        return 0.0 if view is None else view.slow.read(now)

    def forget(self, worker: str) -> None:
        """The worker is gone, and its pages with it."""
        self._workers.pop(worker, None)

    def _offer(self, slot: Slot, keys: Sequence[bytes], tokens: int) -> Offer:
        view = self._workers.get(slot.worker)
        if view is None:
            view = self._workers[slot.worker] = RoutingState()
        num_pages = view.prefixes.match(keys)
        return Offer(
            slot=slot,
            cached_tokens=min(num_pages * self._page_tokens, tokens - 1) if num_pages else 0,
            pending_tokens=view.pending_tokens,
            price=self._price(view),
        )

    def _price(self, view: RoutingState) -> StepPrice:
        return (view.cost if view.cost.is_reliable else self._typical_cost).price
