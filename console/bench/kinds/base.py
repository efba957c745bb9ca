"""A bench: a plan whose parts are measured one after the other, each repeat of all parts before the next."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from console.bench.measure import BenchContext, Values, check_lengths
from console.bench.result import Column, Key, Published, Setting, key_texts
from console.bench.target import Target
from console.bench.workload import Mix
from engine.errors import InvalidRequest
from engine.simulation.lengths import TRACE, Length, fixed

MAX_SEED = 2**63


Concurrent = Annotated[int, Meta(ge=1, le=10**5, title="clients", description="concurrent clients")]
OutputTokens = Annotated[Length, Meta(title="answer tokens", description="answer tokens")]
PromptTokens = Annotated[Length, Meta(description="prompt tokens")]


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

    async def measure(self, part: BenchPart, context: BenchContext) -> Values:
        """Measure one repeat of a row. Raises TargetFailed, SkipPart."""
        raise NotImplementedError

    async def prepare(self, context: BenchContext) -> None:
        """Read input files. Raises InvalidRequest."""

    async def warm(self, context: BenchContext) -> None:
        """Warm up once, which is not measured: with one request."""
        await context.closed_loop([iter(context.items(self.mix(context), 1))])

    def mix(self, context: BenchContext) -> Mix:
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


def enough(requests: int, clients: int) -> None:
    """Raise InvalidRequest where there are fewer requests than clients."""
    if requests < clients:
        raise InvalidRequest(
            f"{clients} concurrent clients need at least {clients} requests, not {requests}", param="requests"
        )


def at_least_one(name: str, numbers: Collection[int]) -> None:
    """Raise InvalidRequest where there is no number, or one below 1."""
    if min(numbers, default=0) < 1:
        raise InvalidRequest(f"{name} must be 1 or more", param=name)


def refuse_server(plan: Plan) -> None:
    """Raise InvalidRequest where the bench cannot measure a server."""
    if plan.no_server:
        raise InvalidRequest(f"{plan.no_server}; leave --url out", param="url")


def plan_fits(plan: Plan, limit: int | None) -> None:
    """Raise InvalidRequest where its requests can have more than `limit` tokens."""
    prompt, output = getattr(plan, "prompt_tokens", None), getattr(plan, "output_tokens", None)
    if prompt is not None and output is not None:
        check_lengths(limit, prompt, output, getattr(plan, "prefix_tokens", 0))


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

    async def prepare(self, context: BenchContext) -> None:
        """Plan: the trace, if any."""
        if self.trace:
            await context.read(self.trace)

    def mix(self, context: BenchContext) -> Mix:
        return Mix(prompt=self.prompt_tokens, output=self.output_tokens, trace=context.trace)

    def check(self) -> None:
        """Plan: a trace and its lengths go together."""
        uses_trace = "trace" in (self.prompt_tokens.kind, self.output_tokens.kind)
        if uses_trace != bool(self.trace):
            if uses_trace:
                raise InvalidRequest("lengths from a trace need --trace FILE", param="trace")
            raise InvalidRequest("a trace is given, but no length is 'trace'", param="trace")
