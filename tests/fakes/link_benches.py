"""FakeBenches: writes down what is asked, and has the results that it is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from console.bench.comparison import headline, settings_text
from console.bench.kinds import PLANS
from console.bench.result import BenchResult
from console.link.benches import BenchEntry, BenchField, BenchForm, BenchOrder, BenchReport
from engine.errors import InvalidRequest

if TYPE_CHECKING:
    from tests.fakes.link import FakeLink

_REQUESTS = BenchField(name="requests", title="requests", hint="requests of each user", quick="4", full="64")
_FIELDS = {
    "latency": (BenchField(name="prompts", title="prompts", hint="requests that count", quick="3", full="9"),),
    "users": (
        BenchField(name="users", title="users", hint="numbers of users", quick="1,2,4", full="1,2,3,5,7,9"),
        _REQUESTS,
        BenchField(name="repeats", title="repeats", hint="times that everything is measured", quick="1", full="1"),
    ),
}
_FIELDS["serve"] = (
    BenchField(name="requests", title="requests", hint="requests of each rate", quick="16", full="100"),
    BenchField(
        name="prompt_tokens", title="prompt tokens", hint="tokens of a prompt", quick="128", full="128", traced="trace"
    ),
    BenchField(
        name="output_tokens", title="answer tokens", hint="tokens of an answer", quick="32", full="128", traced="trace"
    ),
    BenchField(name="trace", title="trace", hint="file of conversations in ShareGPT's format", quick="", full=""),
)
_NO_SERVER = {
    "grid": "This bench turns the knobs of the engine of this process.",
    "load": "This bench loads a model.",
}
_REFUSED = {"load": "This bench unloads the model, and here it serves others."}


class FakeBenches:
    """`current` is what report() gives, `results` what is remembered, by number. start, cancel, forget and history can
    fail and be held, as "bench", "cancel_bench", "forget_bench" and "bench_history"."""

    def __init__(self, link: FakeLink) -> None:
        self._link = link
        self.current = BenchReport()
        self.results: dict[int, BenchResult] = {}

    def report(self) -> BenchReport:
        """As it was given."""
        return self.current

    async def forms(self) -> Sequence[BenchForm]:
        """Some settings of three benches; one is refused, and two of a server."""
        return tuple(
            BenchForm(
                bench=name,
                measures=plan.sentence(),
                fields=_FIELDS.get(name, () if name in _REFUSED else (_REQUESTS,)),
                refused=_REFUSED.get(name, ""),
                no_server=_NO_SERVER.get(name, ""),
            )
            for name, plan in PLANS.items()
        )

    async def start(self, order: BenchOrder) -> None:
        """It goes on from now on."""
        await self._link.record("bench", order=order)
        self.current = BenchReport(state="running", bench=order.bench, model=order.model or "NeuralHermes-7B")

    async def cancel(self) -> None:
        """It has ended."""
        await self._link.record("cancel_bench")
        said = "Cancelled: what was measured by then is kept as number 3."
        self.current = msgspec.structs.replace(self.current, state="cancelled", outcome=said)

    async def history(self) -> Sequence[BenchEntry]:
        """The newest first."""
        await self._link.gate("bench_history")
        return tuple(_entry(number, self.results[number]) for number in sorted(self.results, reverse=True))

    async def result(self, number: int) -> BenchResult:
        """As it was given."""
        if number not in self.results:
            raise InvalidRequest(f"the history has no result {number}", param="id")
        return self.results[number]

    async def forget(self, number: int) -> None:
        """It is gone."""
        await self._link.record("forget_bench", number=number)
        self.results.pop(number, None)


def _entry(number: int, result: BenchResult) -> BenchEntry:
    return BenchEntry(
        id=number,
        bench=result.name,
        started=result.started,
        duration_s=result.duration_s,
        model=result.target.model,
        target=result.target.url or result.target.kind,
        complete=result.complete,
        headline=headline(result),
        settings=settings_text(result),
    )
