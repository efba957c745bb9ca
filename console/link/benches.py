"""`link.benches`: benches of a model that serves, how the last one goes, and the results that are remembered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from console.bench.result import BenchProgress, BenchResult
from engine.errors import InvalidRequest

BenchState = Literal["none", "running", "stopping", "done", "cancelled", "failed"]


class BenchField(msgspec.Struct, frozen=True, kw_only=True):
    """A setting of a bench. hint: what it means.  quick, full: what it is where nothing is given, as it is written.

    traced: what it is in their place where a trace is given, "" where that changes nothing.
    """

    name: str
    title: str
    hint: str
    quick: str
    full: str
    traced: str = ""


class BenchForm(msgspec.Struct, frozen=True, kw_only=True):
    """A bench to choose. measures: a sentence.  refused: why it cannot be run here, "" where it can.

    no_server: why it cannot be put to a server, "" where it can.
    """

    bench: str
    measures: str
    fields: tuple[BenchField, ...] = ()
    refused: str = ""
    no_server: str = ""


class BenchServer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A server to be asked in place of the engine. dialect: as --dialect takes it.  key: its API key, "" for none.

    model: as the server calls it, "" is the first that it lists.
    """

    url: str
    dialect: str = "openai"
    key: str = ""
    model: str = ""


class BenchOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A bench to run. model: by its name, "" is the first one.  server: None is the engine.

    settings: of the bench, by their names and as they are written on the command line; the rest is as `quick` says.
    """

    bench: str
    model: str = ""
    settings: dict[str, str] = {}
    quick: bool = True
    server: BenchServer | None = None


def refuse_from_elsewhere(order: BenchOrder) -> None:
    """Raise InvalidRequest, its param the setting, for what only a console of the engine's own process may order."""
    if order.server is not None:
        raise InvalidRequest(
            "servers are measured only by a console on that machine; from here use "
            f"'ericllm bench {order.bench} --url {order.server.url}'",
            param="url",
        )
    if order.settings.get("trace"):
        raise InvalidRequest(
            "a trace is a file on the engine's machine: use a console or the command line there",
            param="trace",
        )


class BenchReport(msgspec.Struct, frozen=True, kw_only=True):
    """How the last one goes or went. progress: the last news of it.

    outcome: its result or why it failed, in a sentence.  number: of its result in the history, 0 where it has none.
    """

    state: BenchState = "none"
    bench: str = ""
    model: str = ""
    progress: BenchProgress | None = None
    outcome: str = msgspec.field(default="", name="said")
    number: int = 0

    @property
    def under_way(self) -> bool:
        """True while it still asks."""
        return self.state in ("running", "stopping")


class BenchEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A remembered result. started: ISO 8601, UTC.  target: "engine", or a server's URL.

    headline: the figure that one looks for first.  settings: what it was measured with, in a few words.
    """

    id: int
    bench: str
    started: str
    duration_s: float
    model: str
    target: str
    complete: bool
    headline: str
    settings: str


class BenchesLink(Protocol):
    """Benches, for a screen. Coroutines raise engine.errors.EngineError."""

    def report(self) -> BenchReport:
        """How the last one goes or went, at once."""

    async def forms(self) -> Sequence[BenchForm]:
        """The benches there are, with their settings."""

    async def start(self, order: BenchOrder) -> None:
        """Begin; returns once it has.

        Raises EngineBusy while another bench or a search for settings goes on, NoModelLoaded, InvalidRequest for what
        the engine cannot take, and TargetFailed where a server does not answer; details: param, the setting.
        """

    async def cancel(self) -> None:
        """End it; what was measured by then is kept. Returns when it has ended. Nothing happens where none goes on."""

    async def history(self) -> Sequence[BenchEntry]:
        """The results that are remembered, those of the command line too, the newest first."""

    async def result(self, number: int) -> BenchResult:
        """A remembered result. Raises InvalidRequest where there is none of that number."""

    async def forget(self, number: int) -> None:
        """Forget a result. Raises InvalidRequest where there is none of that number."""
