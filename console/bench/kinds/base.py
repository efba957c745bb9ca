"""A bench: a plan whose parts are measured one after the other, each repeat of all parts before the next."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from console.bench.measure import BenchCancelled, ClientPool, Record, Run
from console.bench.result import Column, Key, Published, Setting, key_texts
from console.bench.summary import Values
from console.bench.target import EngineHere, Target
from console.bench.workload import MARK_TOKENS, Exchange, Item, Mix, items, read_trace, usable
from engine.errors import InvalidRequest
from engine.models.files import home_expanded
from engine.simulation.lengths import TRACE, Length, fixed

MAX_SEED = 2**63


Concurrent = Annotated[int, Meta(ge=1, le=10**5, title="clients", description="concurrent clients")]
OutputTokens = Annotated[Length, Meta(title="answer tokens", description="tokens of an answer")]
PromptTokens = Annotated[Length, Meta(description="tokens of a prompt")]


class BenchPart(msgspec.Struct, frozen=True, kw_only=True):
    """One row of a result. keys: of the row.  requests: number of them, from which the time left is estimated.

    least_s: minimum of seconds that it takes.
    """

    keys: dict[str, Key]
    requests: int
    least_s: float = 0.0

    @property
    def title(self) -> str:
        """The row as text."""
        return key_texts(self.keys)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a bench, and how it is measured. Each field is a flag, with the type, bounds and text of its
    annotation; its title is that of its place in the console's form.

    name, about: of the bench.  form: fields that the console offers, in their order.  keys, columns: of its result.
    quick: values that --quick changes.  no_serving: why it cannot measure a model that serves others.  no_server: why
    it cannot measure a server. Both "" where it can.  synonyms: second names of flags, by field.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    form: ClassVar[tuple[str, ...]] = ()
    keys: ClassVar[tuple[Column, ...]]
    columns: ClassVar[tuple[Column, ...]]
    published: ClassVar[tuple[Published, ...]] = ()
    quick: ClassVar[Mapping[str, Any]] = {}
    no_serving: ClassVar[str] = ""
    no_server: ClassVar[str] = ""
    synonyms: ClassVar[Mapping[str, str]] = {}

    repeats: Annotated[int, Meta(ge=1, le=1000, description="repeats of every measurement, interleaved")] = 1
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED, description="seed of contents, lengths and arrivals")] = 0

    def check(self) -> None:
        """Raise InvalidRequest where no target could take it, whatever it is: known before one is loaded."""

    @property
    def max_concurrent_requests(self) -> int:
        """Maximum of requests under way at a time."""
        raise NotImplementedError

    def parts(self, target: Target) -> Sequence[BenchPart]:
        """The rows, in the order in which they are measured. Raises InvalidRequest where the target cannot."""
        raise NotImplementedError

    async def measure(self, part: BenchPart, lab: BenchContext) -> Values:
        """Measure one repeat of a row. Raises TargetFailed, BenchCancelled, SkipPart."""
        raise NotImplementedError

    async def prepare(self, lab: BenchContext) -> None:
        """Read input files. Raises InvalidRequest."""

    async def warm(self, lab: BenchContext) -> None:
        """Warm up once, which is not measured: with one request."""
        await lab.closed([iter(lab.items(self.mix(lab), 1))])

    def mix(self, lab: BenchContext) -> Mix:
        """Contents and lengths of the requests."""
        raise NotImplementedError

    @classmethod
    def implied(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Defaults of fields that depend on the given ones."""
        return {}

    @classmethod
    def sentence(cls) -> str:
        """The description of the bench as a sentence."""
        return f"{cls.about[:1].upper()}{cls.about[1:]}."

    def settings(self) -> dict[str, Setting]:
        """The plan as part of a result."""
        return {name: _plain(getattr(self, name)) for name in self.__struct_fields__ if name != "seed"}


class SkipPart(Exception):
    """This row cannot be measured on this target. The text says why."""


class BenchContext:
    """The target of a plan, and the repeat and part under way.

    note: adds a note for readers of the numbers.  done: called with each request, None for a step without one.
    """

    def __init__(
        self,
        target: Target,
        seed: int,
        *,
        note: Callable[[str], None] = lambda text: None,
        done: Callable[[Record | None], None] = lambda record: None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        self.target = target
        self.note = note
        self._salt = "warm"
        self._repeat_salt = "warm"
        self._first: dict[str, float] = {}
        self._seed = seed
        self._done = done
        self._cancelled = cancelled
        self._clients = ClientPool(target, done, cancelled)
        self._material = target.material
        self._traces: dict[str, tuple[Exchange, ...]] = {"": ()}

    def begin(self, repeat: int, part: int) -> None:
        """Begin a part of a repeat."""
        self._repeat_salt = f"{repeat}"
        self._salt = f"{repeat}/{part}"
        if part == 0:
            self._first.clear()

    def items(self, mix: Mix, count: int, *, first: int = 0, also: str = "", alike: bool = False) -> list[Item]:
        """Requests whose contents differ from those of other rows, repeats and values of `also`.

        alike: as those of the other rows of this repeat, but for their first tokens.
        """
        fits(self.target, mix)
        own = f"{self._salt}/{also}" if also else self._salt
        salt, lead = (self._repeat_salt, own) if alike else (own, "")
        return items(mix, self._material, seed=self._seed, salt=salt, lead=lead, count=count, first=first)

    async def closed(self, clients: Sequence[Iterator[Item]]) -> Run:
        """ClientPool.closed."""
        return await self._clients.closed(clients)

    async def opened(self, sent: Sequence[Item], max_concurrent: int | None = None) -> Run:
        """ClientPool.opened."""
        return await self._clients.opened(sent, max_concurrent)

    async def during_streams(
        self, mix: Mix, streams: int, late: Item, *, settle_tokens: int
    ) -> tuple[list[Record], Record]:
        """ClientPool.during_streams, with streams of a mix."""

        def endless(stream: int) -> Iterator[Item]:
            for turn in itertools.count():
                yield from self.items(mix, 1, first=turn * streams + stream)

        return await self._clients.during_streams([endless(stream) for stream in range(streams)], late, settle_tokens)

    def first_of_repeat(self, name: str, value: float) -> float:
        """The first value of this name in this repeat, to which later rows are compared."""
        return self._first.setdefault(name, value)

    def step(self) -> None:
        """Count a step of the part. Raises BenchCancelled."""
        self._done(None)
        if self._cancelled():
            raise BenchCancelled

    async def read(self, path: str) -> None:
        """Read a trace on another thread, as the loop may serve others. Raises InvalidRequest."""
        limit = self.target.max_model_len

        def exchanges() -> tuple[Exchange, ...]:
            return tuple(usable(read_trace(home_expanded(path)), self._material, limit, MARK_TOKENS))

        self._traces[path] = await asyncio.to_thread(exchanges)

    def trace(self, path: str) -> tuple[Exchange, ...]:
        """The exchanges of a trace that fit the target."""
        return self._traces[path]

    @property
    def engine(self) -> EngineHere:
        """The target as an engine in this process. Raises InvalidRequest."""
        return engine_here(self.target)


def enough(requests: int, clients: int) -> None:
    """Raise InvalidRequest where there are fewer requests than clients."""
    if requests < clients:
        raise InvalidRequest(f"{clients} concurrent clients need as many requests, not {requests}", param="requests")


def at_least_one(name: str, numbers: Collection[int]) -> None:
    """Raise InvalidRequest where there is no number, or one below 1."""
    if min(numbers, default=0) < 1:
        raise InvalidRequest(f"{name} are numbers of at least 1", param=name)


def engine_here(target: Target) -> EngineHere:
    """The target as an engine in this process. Raises InvalidRequest."""
    if not isinstance(target, EngineHere):
        raise InvalidRequest("this bench needs an engine in this process", param="url")
    return target


def refuse_server(plan: Plan) -> None:
    """Raise InvalidRequest where the bench cannot measure a server."""
    if plan.no_server:
        raise InvalidRequest(f"{plan.no_server}; leave --url out", param="url")


def fits(target: Target, mix: Mix) -> None:
    """Raise InvalidRequest where requests can be longer than the target's context."""
    _fit(target.max_model_len, mix.prompt, mix.output, mix.prefix.tokens if mix.prefix else 0)


def plan_fits(plan: Plan, limit: int | None) -> None:
    """Raise InvalidRequest where its requests can have more than `limit` tokens."""
    prompt, output = getattr(plan, "prompt_tokens", None), getattr(plan, "output_tokens", None)
    if prompt is not None and output is not None:
        _fit(limit, prompt, output, getattr(plan, "prefix_tokens", 0))


def _fit(limit: int | None, prompt_tokens: Length, output_tokens: Length, shared: int) -> None:
    prompt, output = prompt_tokens.most, output_tokens.most
    if limit is None or prompt is None or output is None:
        return
    if shared + prompt + output > limit:
        with_prefix = f" behind a prefix of {shared}" if shared else ""
        raise InvalidRequest(
            f"prompts of up to {prompt} tokens{with_prefix} and answers of up to {output} do not fit the model's "
            f"{limit}",
            param="prompt_tokens",
        )


def _plain(value: object) -> Setting:
    if isinstance(value, Length):
        return str(value)
    if isinstance(value, tuple):
        return ["inf" if each == math.inf else each for each in value]  # JSON has no infinity
    assert value is None or isinstance(value, str | int | float | bool)
    return value


class Traced(Plan, frozen=True, kw_only=True):
    """A plan whose prompts and lengths may be those of a trace: a file of real conversations, read once."""

    prompt_tokens: PromptTokens = fixed(128)
    output_tokens: OutputTokens = fixed(128)
    trace: Annotated[str, Meta(description="file of conversations (ShareGPT's format), for lengths of 'trace'")] = ""

    @classmethod
    def implied(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Plan: lengths of the trace."""
        return {"prompt_tokens": TRACE, "output_tokens": TRACE} if given.get("trace") else {}

    async def prepare(self, lab: BenchContext) -> None:
        """Plan: the trace, if any."""
        if self.trace:
            await lab.read(self.trace)

    def mix(self, lab: BenchContext) -> Mix:
        """Plan."""
        return Mix(prompt=self.prompt_tokens, output=self.output_tokens, trace=lab.trace(self.trace))

    def check(self) -> None:
        """Plan: a trace and its lengths go together."""
        uses_trace = "trace" in (self.prompt_tokens.kind, self.output_tokens.kind)
        if uses_trace != bool(self.trace):
            if uses_trace:
                raise InvalidRequest("lengths of a trace need a trace: a file of conversations", param="trace")
            raise InvalidRequest("a trace is given for lengths, and none is 'trace'", param="trace")
