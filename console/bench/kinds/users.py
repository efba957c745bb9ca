"""Response time by number of users, each of whom sends requests one after the other."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from console.bench.kinds.base import BenchPart, OutputTokens, Plan, PromptTokens, at_least_one
from console.bench.measure import BenchContext, Values, columns, summarize
from console.bench.result import Column, Published
from console.bench.target import Target
from console.bench.workload import Mix
from engine.simulation.lengths import fixed

_STUDY = "a study with 64 requests of each user"


class Users(Plan, frozen=True, kw_only=True):
    """1..N users with 64 requests each."""

    name: ClassVar[str] = "users"
    about: ClassVar[str] = "mean response time by number of users, one request at a time each"
    form: ClassVar = ("users", "requests", "prompt_tokens", "output_tokens", "repeats")
    keys: ClassVar = (Column(name="users", title="users", digits=0),)
    columns: ClassVar = (
        Column(name="response_s", title="mean response", unit="s", digits=2, better="lower"),
        Column(name="to_one_user", title="vs. fewest users", unit="x", digits=2, better="lower"),
        *columns("request_throughput", "output_throughput", "mean_ttft_ms", "p99_e2el_ms"),
    )
    published: ClassVar = tuple(
        Published(
            who="a server in a study",
            device="not stated",
            source=_STUDY,
            keys={"users": users},
            values={"response_s": response_s, "to_one_user": to_one_user},
        )
        for users, response_s, to_one_user in ((1, 55.0, 1.0), (9, 84.0, 1.53))
    )
    quick: ClassVar = {"users": (1, 2, 4), "requests": 4, "output_tokens": fixed(32)}

    users: Annotated[tuple[int, ...], Meta(description="numbers of users")] = (1, 2, 3, 5, 7, 9)
    requests: Annotated[int, Meta(ge=1, le=10**6, description="requests of each user")] = 64
    prompt_tokens: PromptTokens = fixed(128)
    output_tokens: OutputTokens = fixed(128)

    def mix(self, context: BenchContext) -> Mix:
        return Mix(prompt=self.prompt_tokens, output=self.output_tokens)

    def check(self) -> None:
        at_least_one("users", self.users)

    @property
    def max_concurrent_requests(self) -> int:
        return max(self.users)

    def parts(self, target: Target) -> list[BenchPart]:
        return [BenchPart(keys={"users": users}, requests=users * self.requests) for users in self.users]

    async def measure(self, part: BenchPart, context: BenchContext) -> Values:
        users = int(part.keys["users"])
        sent = context.items(self.mix(context), users * self.requests)
        run = await context.closed_loop([iter(sent[user::users]) for user in range(users)])
        response_s = sum(record.e2e_s for record in run.answered) / len(run.answered)
        first = context.first_of_repeat("response_s", response_s)
        return {"response_s": response_s, "to_one_user": response_s / first, **summarize(run)}
