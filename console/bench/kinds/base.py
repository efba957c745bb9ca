"""What a bench is: a plan whose parts are measured one after the other, each as often as there are repeats."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from console.bench.measure import BenchCancelled, ClientPool, Record, Run
from console.bench.result import Column, Key, Published, Setting, said
from console.bench.summary import Values
from console.bench.target import EngineHere, Target
from console.bench.workload import MARK_TOKENS, Exchange, Item, Mix, items, read_trace, usable
from engine.errors import InvalidRequest
from engine.models.files import home_expanded
from engine.simulation.lengths import TRACE, Length, fixed

MAX_SEED = 2**63


class BenchPart(msgspec.Struct, frozen=True, kw_only=True):
    """What one row is measured by. keys: of the row.  requests: how many it sends, for the time that is left.

    least_s: seconds that it takes at least.
    """

    keys: dict[str, Key]
    requests: int
    least_s: float = 0.0

    @property
    def said(self) -> str:
        """For a person."""
        return said(self.keys)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured: the numbers that can be chosen, and how. Each field is a flag too; its Meta says what it means.

    name, about: of the bench.  keys, columns: of its result.  quick: what --quick changes.  no_server: why it cannot be
    put to a server, "" where it can.  synonyms: second names of flags, by field.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    keys: ClassVar[tuple[Column, ...]]
    columns: ClassVar[tuple[Column, ...]]
    published: ClassVar[tuple[Published, ...]] = ()
    quick: ClassVar[Mapping[str, Any]] = {}
    no_server: ClassVar[str] = ""
    synonyms: ClassVar[Mapping[str, str]] = {}

    repeats: Annotated[int, Meta(ge=1, le=1000, description="times that everything is measured, by turns")] = 1
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED, description="what contents, lengths and arrivals are drawn from")] = 0

    def check(self) -> None:
        """Raise InvalidRequest where no target could take it, whatever it is: known before one is loaded."""

    def parts(self, target: Target) -> Sequence[BenchPart]:
        """The rows to be, in the order in which they are measured. Raises InvalidRequest where the target cannot."""
        raise NotImplementedError

    async def measure(self, part: BenchPart, lab: BenchContext) -> Values:
        """One repeat of a row. Raises TargetFailed, BenchCancelled, SkipPart."""
        raise NotImplementedError

    async def prepare(self, lab: BenchContext) -> None:
        """What is read first: nothing. Raises InvalidRequest for what cannot be."""

    async def warm(self, lab: BenchContext) -> None:
        """What is done once before, and does not count: one request."""
        await lab.closed([iter(lab.items(self.mix(lab), 1))])

    def mix(self, lab: BenchContext) -> Mix:
        """What requests are like."""
        raise NotImplementedError

    @classmethod
    def implied(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Fields that have other defaults where others were given."""
        return {}

    def settings(self) -> dict[str, Setting]:
        """The plan as a result tells it."""
        return {name: _told(getattr(self, name)) for name in self.__struct_fields__ if name != "seed"}


class SkipPart(Exception):
    """This row cannot be measured on this target. The text says why."""


class BenchContext:
    """What a plan measures with: a target, and the place of what is measured among the rest.

    note: takes what readers of the numbers must know.  done: told of each request, None for a step that is none.
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
        self._of_repeat = "warm"
        self._first: dict[str, float] = {}
        self._seed = seed
        self._done = done
        self._cancelled = cancelled
        self._crowd = ClientPool(target, done, cancelled)
        self._material = target.material
        self._traces: dict[str, tuple[Exchange, ...]] = {"": ()}

    def begin(self, repeat: int, part: int) -> None:
        """From now on, measure this."""
        self._of_repeat = f"{repeat}"
        self._salt = f"{repeat}/{part}"
        if part == 0:
            self._first.clear()

    def items(self, mix: Mix, count: int, *, first: int = 0, also: str = "", alike: bool = False) -> list[Item]:
        """Requests that no other row or repeat has the contents of, nor one here with another `also`.

        alike: with those of the other rows of this repeat, but for their first tokens.
        """
        fits(self.target, mix)
        own = f"{self._salt}/{also}" if also else self._salt
        salt, lead = (self._of_repeat, own) if alike else (own, "")
        return items(mix, self._material, seed=self._seed, salt=salt, lead=lead, count=count, first=first)

    async def closed(self, clients: Sequence[Iterator[Item]]) -> Run:
        """ClientPool.closed."""
        return await self._crowd.closed(clients)

    async def opened(self, sent: Sequence[Item], max_concurrent: int | None = None) -> Run:
        """ClientPool.opened."""
        return await self._crowd.opened(sent, max_concurrent)

    async def beside(self, mix: Mix, streams: int, late: Item, *, settle_tokens: int) -> tuple[list[Record], Record]:
        """ClientPool.beside, with streams of a mix."""

        def endless(stream: int) -> Iterator[Item]:
            for turn in itertools.count():
                yield from self.items(mix, 1, first=turn * streams + stream)

        return await self._crowd.beside([endless(stream) for stream in range(streams)], late, settle_tokens)

    def first_of_repeat(self, name: str, value: float) -> float:
        """What was said under this name first in this repeat: what later rows are compared to."""
        return self._first.setdefault(name, value)

    def step(self) -> None:
        """A step of the part is done. Raises BenchCancelled where no more is wanted."""
        self._done(None)
        if self._cancelled():
            raise BenchCancelled

    async def read(self, path: str) -> None:
        """Read a trace, for `trace`; on another thread, as the loop may serve others. Raises InvalidRequest."""
        limit = self.target.max_model_len

        def found() -> tuple[Exchange, ...]:
            return tuple(usable(read_trace(home_expanded(path)), self._material, limit, MARK_TOKENS))

        self._traces[path] = await asyncio.to_thread(found)

    def trace(self, path: str) -> tuple[Exchange, ...]:
        """What of a trace that was read the target can take."""
        return self._traces[path]

    @property
    def engine(self) -> EngineHere:
        """The target, where it is an engine in this process. Raises InvalidRequest."""
        return engine_here(self.target)


def enough(requests: int, clients: int) -> None:
    """Raise InvalidRequest where some of the clients would have nothing to send."""
    if requests < clients:
        raise InvalidRequest(
            f"{clients} clients that ask at once need as many requests, and there are {requests}", param="requests"
        )


def at_least_one(name: str, numbers: Collection[int]) -> None:
    """Raise InvalidRequest where there is no number, or one of them is less than 1."""
    if min(numbers, default=0) < 1:
        raise InvalidRequest(f"{name} are numbers of at least 1", param=name)


def engine_here(target: Target) -> EngineHere:
    """The target, where it is an engine in this process. Raises InvalidRequest."""
    if not isinstance(target, EngineHere):
        raise InvalidRequest("this bench needs an engine in this process", param="url")
    return target


def refuse_server(plan: Plan) -> None:
    """Raise InvalidRequest where the bench cannot be put to a server."""
    if plan.no_server:
        raise InvalidRequest(f"{plan.no_server}; leave --url out", param="url")


def fits(target: Target, mix: Mix) -> None:
    """Raise InvalidRequest where requests can be longer than the target takes."""
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


def _told(value: object) -> Setting:
    if isinstance(value, Length):
        return str(value)
    if isinstance(value, tuple):
        return ["inf" if each == math.inf else each for each in value]  # JSON has no infinity
    assert value is None or isinstance(value, str | int | float | bool)
    return value


# Plans whose prompts and lengths may be those of a trace: what people asked, and how long the answers were.


class Traced(Plan, frozen=True, kw_only=True):
    """A trace is read once, before anything is measured."""

    prompt_tokens: Annotated[Length, Meta(description="tokens of a prompt; 'trace' takes the trace's")] = fixed(128)
    output_tokens: Annotated[Length, Meta(description="tokens of an answer; 'trace' takes the trace's")] = fixed(128)
    trace: Annotated[str, Meta(description="file of conversations in ShareGPT's format")] = ""

    @classmethod
    def implied(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Plan: a trace is there to be taken."""
        return {"prompt_tokens": TRACE, "output_tokens": TRACE} if given.get("trace") else {}

    async def prepare(self, lab: BenchContext) -> None:
        """Plan: the trace, where there is one."""
        if self.trace:
            await lab.read(self.trace)

    def mix(self, lab: BenchContext) -> Mix:
        """Plan."""
        return Mix(prompt=self.prompt_tokens, output=self.output_tokens, trace=lab.trace(self.trace))

    def check(self) -> None:
        """Plan: a trace and lengths of it come together."""
        takes = "trace" in (self.prompt_tokens.kind, self.output_tokens.kind)
        if takes != bool(self.trace):
            if takes:
                raise InvalidRequest("lengths of a trace need a trace: a file of conversations", param="trace")
            raise InvalidRequest("a trace is given for lengths, and none is 'trace'", param="trace")
