"""FakeLink: an EngineLink with no engine behind it. It shows the snapshot it is given and writes down every call.

link = FakeLink(scenes.busy())
link.show(scenes.failed())              # what snapshot() gives from now on
link.script["tuning.report"] = report   # the answer to a call from now on, by its name in console.link.rpc
link.failures["load"] = ModelLoadFailed("...")   # the next call of that method raises it, once
link.hold("load")                       # that method (or "chat": between words) waits ...
link.release("load")                    # ... until now
assert link.commands == [("reconfigure", {"num_workers": 3})]

A call that is more than an answer of the script has a method `on_...` on the link or on its group.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from console.bench.comparison import headline, settings_text
from console.bench.result import BenchResult
from console.link.api import KeyLimits, KeyReading, NewKey, Scope
from console.link.benches import BenchEntry, BenchOrder, BenchReport
from console.link.chat import ChatDelta, ChatMessage, DraftCount
from console.link.protocol import ApiStatus
from console.link.rpc import ENGINE, Call, RpcGroup, RpcLink
from console.link.settings import SettingRow
from console.link.tuning import TuneOrder, TuningReport
from console.settings.load_options import NO_OPTIONS, LoadOptions
from console.settings.rows import setting_rows
from console.settings.schema import Settings, flag_of
from console.settings.sources import Sources, changed
from engine.config import ModelSpec, SamplingParams
from engine.errors import EngineError, InvalidRequest, LoadCancelled, ModelNotFound, NoModelLoaded, RequestNotFound
from engine.models.catalog import ModelEntry
from engine.models.resolve import is_hub_id
from engine.placement.estimate import Estimate
from engine.requests.history import RequestDetail, TokenBatch, WorkerSpan
from engine.snapshot import Insight, LogEntry, ModelStatus, RequestRow, Session, Snapshot
from tests.fakes import scenes
from tests.fakes.link_answers import ANSWERS, LOGS, MODELS

AROUND_A_TURN = 4
"""Tokens of a chat template around a turn."""

FILE = Path("/home/op/.config/ericllm/config.toml")
KEY = "eric_" + "Xy7-" * 8
"""Of every key that is made."""

SOURCES = Sources(
    flags={"port": "8001"},
    variables={"api_key": "s3cret"},
    saved={"theme": "ericllm-light", "max_prompts": 8, "port": 9000, "draft_tokens": 4},
    file=FILE,
)


class FakeLink(RpcLink):
    """See the module. `answer` is what every chat says, word by word; `answers` what single models say instead.

    asked: every call that was awaited, with its arguments, those that change nothing too.
    served: what api_status() gives.  lines: the log.
    """

    def __init__(
        self,
        snapshot: Snapshot | None = None,
        *,
        api: ApiStatus | None = None,
        models: Sequence[ModelEntry] = MODELS,
        logs: Sequence[LogEntry] = LOGS,
        answer: str = "Max prompts is how many requests a worker works on at once.",
    ) -> None:
        super().__init__(self)
        self.current = snapshot if snapshot is not None else scenes.busy()
        self.served = api if api is not None else ApiStatus(running=True, clients=3, requests=4120)
        self.lines = list(logs)
        self.answer = answer
        self.answers: dict[str, str] = {}
        self.script: dict[str, Any] = {**ANSWERS, "engine.list_models": models}
        self.failures: dict[str, EngineError] = {}
        self.asked: list[tuple[Call, Mapping[str, Any]]] = []
        self.chats: list[tuple[list[ChatMessage], SamplingParams]] = []
        self.chat_models: list[str] = []
        self.closed_chats = 0
        self.api = FakeApi(self, "api")
        self.benches = FakeBenches(self, "benches")
        self.conversation = FakeConversation(self, "conversation")
        self.insight = FakeInsight(self, "insight")
        self.models = FakeModels(self, "models")
        self.requests = FakeRequests(self, "requests")
        self.settings = FakeSettings(self)
        self.tuning = FakeTuning(self, "tuning")
        self._gates: dict[str, asyncio.Event] = {}

    # -- the script -------------------------------------------------------------------------------------------------

    def show(self, snapshot: Snapshot) -> None:
        """Have snapshot() give another one from now on."""
        self.current = snapshot

    def change(self, **changes: Any) -> None:
        """Show the snapshot with other values."""
        self.current = msgspec.structs.replace(self.current, **changes)

    def log(self, message: str, *, level: int = logging.INFO, source: str = "engine") -> None:
        """Add a log line."""
        self.lines.append(LogEntry(at=scenes.NOW, level=level, source=source, message=message))

    def hold(self, method: str) -> None:
        """Make calls of `method` wait until release(method)."""
        self._gates[method] = asyncio.Event()

    def step(self, method: str) -> None:
        """Let what waits at a held method go on once (a chat: by a word), and then wait again."""
        waiting = self._gates[method]
        self.hold(method)
        waiting.set()

    def release(self, method: str) -> None:
        """Let a held method go on, now and later."""
        self._gates.pop(method).set()

    async def wait(self, method: str) -> None:
        """Wait while `method` is held; raise what it is to fail with."""
        if method in self._gates:
            await self._gates[method].wait()
        if method in self.failures:
            raise self.failures.pop(method)

    # -- the calls --------------------------------------------------------------------------------------------------

    @property
    def commands(self) -> list[tuple[str, dict[str, Any]]]:
        """The calls that change something, by their methods, with arguments that are not the default."""
        return [(call.method, _written(call, arguments)) for call, arguments in self.asked if call.changes]

    def names(self) -> list[str]:
        """The methods of the commands, in order."""
        return [name for name, _ in self.commands]

    def asked_for(self, name: str) -> list[Mapping[str, Any]]:
        """The arguments of each call of that name."""
        return [arguments for call, arguments in self.asked if call.name == name]

    def at_once(self, call: Call, arguments: Mapping[str, object]) -> object:
        """Return the answer of its method or of the script, as it is now."""
        method = self._method(call)
        if method is None:
            return self.script.get(call.name, call.blank(**arguments))
        return method(**_complete(call, arguments))

    async def ask(self, call: Call, arguments: Mapping[str, object]) -> object:
        """Answer as things are when it is asked, or change them once it is not held; a coroutine waits by itself."""
        self.asked.append((call, arguments))
        method = self._method(call)
        if inspect.iscoroutinefunction(method):
            return await method(**_complete(call, arguments))
        if call.changes:
            await self.wait(call.method)
            return self.at_once(call, arguments)
        answer = self.at_once(call, arguments)
        await self.wait(call.method)
        return answer

    def _method(self, call: Call) -> Callable[..., Any] | None:
        return getattr(self if call.group == ENGINE else getattr(self, call.group), f"on_{call.method}", None)

    def on_snapshot(self) -> Snapshot:
        return self.current

    def on_api_status(self) -> ApiStatus:
        return self.served

    def on_logs(self, after: int) -> tuple[int, Sequence[LogEntry]]:
        return len(self.lines), self.lines[after:]

    def on_cancel_load(self) -> None:
        """End a held load with LoadCancelled."""
        if "load" in self._gates:
            self.failures["load"] = LoadCancelled("the load was cancelled")
            self.release("load")

    def on_unload(self, model: str, drain_seconds: float) -> None:
        if len(self.current.models) > 1:
            self.change(models=tuple(each for each in self.current.models if each.name != model))
        else:
            self.change(status=ModelStatus(), workers=(), requests=(), queued=0, running=0)

    def on_reconfigure(self, model: str, **knobs: float | None) -> None:
        """Set the knobs of the first model."""
        values = {name: value for name, value in knobs.items() if value is not None}
        if not model:
            self.change(
                **{"target_workers" if name == "num_workers" else name: value for name, value in values.items()}
            )

    def on_drain(self) -> None:
        self.change(draining_since=self.current.at)

    def on_resume(self) -> None:
        self.change(draining_since=None)

    def on_cancel_request(self, request_id: str) -> None:
        self.change(requests=_cancelled(self.current.requests, lambda row: row.id == request_id))

    def on_start_api(self) -> None:
        """On; a stop that is held is taken back."""
        self.served = msgspec.structs.replace(self.served, running=True, stopping=False, error=None)

    async def on_stop_api(self, finish: bool) -> bool:
        """Off; with `finish`, stopping while it is held, unless it was kept on."""
        self.served = msgspec.structs.replace(self.served, stopping=finish)
        await self.wait("stop_api")
        if finish and not self.served.stopping:
            return False
        self.served = msgspec.structs.replace(self.served, running=False, stopping=False, clients=0, connections=0)
        return True


def _complete(call: Call, arguments: Mapping[str, object]) -> dict[str, Any]:
    """With the defaults of those left out."""
    complete: dict[str, Any] = msgspec.structs.asdict(call.arguments(**arguments))
    return complete


def _written(call: Call, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Without those that are the default; options of a load as arguments of their own."""
    defaults = {field.name: field.default for field in msgspec.structs.fields(call.arguments)}
    given = {name: value for name, value in arguments.items() if value != defaults[name]}
    options: LoadOptions = given.pop("changes", NO_OPTIONS)
    return {**given, **options.given()}


def _cancelled(rows: Sequence[RequestRow], which: Callable[[RequestRow], bool]) -> tuple[RequestRow, ...]:
    return tuple(
        msgspec.structs.replace(row, state="finished", finish="cancelled") if which(row) else row for row in rows
    )


class FakeGroup(RpcGroup):
    """A group of calls of a FakeLink whose answers depend on the calls before."""

    def __init__(self, link: FakeLink, group: str) -> None:
        super().__init__(link, group)
        self._link = link
        self._script = link.script

    def change_report(self, **changes: Any) -> None:
        """Have another answer to the group's `report`."""
        name = f"{self._group}.report"
        self._script[name] = msgspec.structs.replace(self._script[name], **changes)


class FakeApi(FakeGroup):
    """Its report is as the commands left it."""

    def on_listen(self, host: str, port: int) -> None:
        self._link.served = msgspec.structs.replace(self._link.served, host=host, port=port)

    def on_make_key(self, name: str, scopes: tuple[Scope, ...], limits: KeyLimits) -> NewKey:
        keys = self._script["api.report"].keys
        if any(key.name == name for key in keys):
            raise InvalidRequest(f"A key {name} already exists; choose another name", param="name")
        self._keep(*keys, KeyReading(name=name, scopes=scopes, limits=limits, made_at=scenes.NOW))
        return NewKey(name=name, scopes=scopes, key=KEY)

    def on_revoke_key(self, name: str) -> None:
        self._keep(*(key for key in self._script["api.report"].keys if key.name != name))

    def on_switch_dialect(self, name: str, on: bool) -> None:
        dialects = self._script["api.report"].dialects
        replaced = (msgspec.structs.replace(each, on=on) if each.name == name else each for each in dialects)
        self.change_report(dialects=tuple(replaced))

    def _keep(self, *keys: KeyReading) -> None:
        self.change_report(keys=keys)
        self._link.served = msgspec.structs.replace(self._link.served, key_required=bool(keys))


class FakeBenches(FakeGroup):
    """results: what is remembered, by number."""

    results: Mapping[int, BenchResult] = {}

    def on_start(self, order: BenchOrder) -> None:
        report = BenchReport(state="running", bench=order.bench, model=order.model or "NeuralHermes-7B")
        self._script["benches.report"] = report

    def on_cancel(self) -> None:
        outcome = "Cancelled: what was measured by then is saved as #3."
        self.change_report(state="cancelled", outcome=outcome)

    def on_history(self) -> Sequence[BenchEntry]:
        return tuple(_entry(number, self.results[number]) for number in sorted(self.results, reverse=True))

    def on_result(self, number: int) -> BenchResult:
        if number not in self.results:
            raise InvalidRequest(f"the history has no result {number}", param="id")
        return self.results[number]

    def on_forget(self, number: int) -> None:
        self.results = {each: result for each, result in self.results.items() if each != number}


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


class FakeConversation(FakeGroup):
    """A model that counts words as tokens. continued: the chats that went on with an answer.

    thinking: before its answers.  enabled: what each chat asked of it.
    """

    def __init__(self, link: FakeLink, group: str) -> None:
        super().__init__(link, group)
        self.context = 8192
        self.continued: list[list[ChatMessage]] = []
        self.thinking = ""
        self.enabled: list[bool | None] = []

    @property
    def counted(self) -> list[str]:
        """The drafts that were counted."""
        return [each["draft"] for each in self._link.asked_for("conversation.count_tokens")]

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        params: SamplingParams,
        model: str = "",
        *,
        continue_answer: bool = False,
        enable_thinking: bool | None = None,
    ) -> AsyncIterator[ChatDelta]:
        """`thinking` and `answer` in words, each a delta; hold("chat") stops before every word."""
        link = self._link
        self._check()
        link.chats.append((list(messages), params))
        link.chat_models.append(model)
        self.enabled.append(enable_thinking)
        if continue_answer:
            self.continued.append(list(messages))
        thoughts, words = self.thinking.split(), link.answers.get(model, link.answer).split(" ")
        try:
            for index, word in enumerate(thoughts):
                await link.wait("chat")
                is_first = index == 0 and not continue_answer
                yield ChatDelta(text="", thinking=word if is_first else f" {word}", output_tokens=index + 1)
                await asyncio.sleep(0)
            for index, word in enumerate(words):
                await link.wait("chat")
                yield ChatDelta(
                    text=word if index == 0 and (thoughts or not continue_answer) else f" {word}",
                    output_tokens=index + 1,
                    ttft_s=0.08,
                    tokens_per_s=45.0,
                    finish="stop" if index == len(words) - 1 else None,
                    prompt_tokens=24,
                )
                await asyncio.sleep(0)
        finally:
            link.closed_chats += 1

    def on_count_tokens(self, messages: Sequence[ChatMessage], draft: str, model: str) -> DraftCount:
        self._check()
        history = sum(len(message.content.split()) for message in messages) + AROUND_A_TURN * (len(messages) + 1)
        return DraftCount(history=history, draft=len(draft.split()), context=self.context)

    def _check(self) -> None:
        state = self._link.current.status.state
        if state not in ("ready", "idle"):
            raise NoModelLoaded("no model is loaded", state=state)


class FakeInsight(FakeGroup):
    """It forgets the session of the snapshot."""

    def on_reset(self) -> None:
        current = self._link.current
        self._link.change(insight=Insight(session=Session(since=current.at), energy=current.insight.energy))


class FakeModels(FakeGroup):
    """expected: the estimate by model, else the script's.  saved: options of last loads, by model."""

    def __init__(self, link: FakeLink, group: str) -> None:
        super().__init__(link, group)
        self.expected: dict[str, Estimate] = {}
        self.saved: dict[str, LoadOptions] = {}

    @property
    def asked(self) -> list[tuple[str, LoadOptions]]:
        """Models and options of the estimates."""
        return [(each["model"], each.get("changes", NO_OPTIONS)) for each in self._link.asked_for("models.estimate")]

    def on_defaults(self) -> LoadOptions:
        """The scene's knobs."""
        return LoadOptions(
            num_workers=self._link.current.target_workers,
            max_prompts=self._link.current.max_prompts,
            cache_bits=16,
            weights="auto",
            dtype="auto",
        )

    async def on_load(self, model: str, changes: LoadOptions, beside: bool, **_: object) -> None:
        """Loading while held, then ready, and remembered; ModelNotFound for a name that is not in the catalogue."""
        link = self._link
        models: Sequence[ModelEntry] = self._script["engine.list_models"]
        entry = next((entry for entry in models if model in (entry.name, str(entry.path))), None)
        if entry is None:
            raise ModelNotFound(f"no model is called {model}", model=model)
        spec = ModelSpec(path=entry.path, name=entry.name)
        if not beside:
            link.change(status=msgspec.structs.replace(scenes.loading().status, spec=spec))
        try:
            await link.wait("load")
        except EngineError as error:
            failed = ModelStatus(state="failed", spec=spec, error=error.info)
            if not beside:
                link.change(status=ModelStatus() if isinstance(error, LoadCancelled) else failed)
            raise
        if not beside:
            link.change(status=scenes.ready_status(entry.name, weights_bytes=entry.weights_bytes))
        self.saved[model] = changes

    def on_download(self, model: str) -> None:
        assert is_hub_id(model)

    def on_estimate(self, model: str, **_: object) -> Estimate:
        found: Estimate = self.expected.get(model, self._script["models.estimate"])
        return found

    def on_remembered(self, model: str) -> LoadOptions:
        return self.saved.get(model, NO_OPTIONS)

    def on_forget(self, model: str) -> None:
        self.saved.pop(model, None)


class FakeRequests(FakeGroup):
    """ended: oldest first; those that the snapshot shows as finished are added by themselves.
    details: what `detail` gives, by id; where a test gave none, a plain story of the row, with its texts if `texts`.
    """

    def __init__(self, link: FakeLink, group: str) -> None:
        super().__init__(link, group)
        self.ended: list[RequestRow] = []
        self.details: dict[str, RequestDetail] = {}

    def on_finished(self, after: int) -> tuple[int, Sequence[RequestRow]]:
        """Those after the first `after`."""
        finished = [row for row in reversed(self._link.current.requests) if row.state == "finished"]
        before = {(row.id, row.order) for row in self.ended} if finished else set()
        self.ended += [row for row in finished if (row.id, row.order) not in before]
        return len(self.ended), self.ended[after:]

    def on_detail(self, request_id: str, order: int) -> RequestDetail:
        if request_id in self.details:
            return self.details[request_id]
        rows = [*self._link.current.requests, *reversed(self.ended)]
        row = next((row for row in rows if row.id == request_id and order in (0, row.order)), None)
        if row is None:
            raise RequestNotFound(f"unknown request {request_id}: neither running nor recent", id=request_id)
        return story(row)

    def on_cancel_queued(self, model: str) -> int:
        """Those that the snapshot shows as waiting end as cancelled."""
        before = self._link.current.requests
        self._link.change(requests=_cancelled(before, lambda row: row.state == "queued"), queued=0)
        return sum(row.state == "queued" for row in before)


def story(row: RequestRow, **changes: Any) -> RequestDetail:
    """A request that went the usual way: it waited, was on one worker, and its tokens came evenly."""
    began, itl_s = row.ttft_s, row.itl_s or 0.0
    times = [] if began is None else [began + at * itl_s for at in range(row.output_tokens)]
    until_s = row.age_s if row.state == "finished" else None
    values: dict[str, Any] = {
        "row": row,
        "stays": () if row.worker is None else (WorkerSpan(worker=row.worker, since_s=row.queued_s, until_s=until_s),),
        "bursts": tuple(TokenBatch(since_s=at, until_s=at, tokens=1) for at in times),
    }
    return RequestDetail(**(values | changes))


class FakeSettings(FakeGroup):
    """Takes what the schema takes. sources: what the program was started with.  names: of the settings that are
    shown."""

    def __init__(
        self,
        link: FakeLink,
        sources: Sources = SOURCES,
        turned: Mapping[str, object] | None = None,
        names: Collection[str] = tuple(Settings.model_fields),
    ) -> None:
        super().__init__(link, "settings")
        self.sources = sources
        self.in_use = sources.settings()
        self.turned = dict(turned or {})
        self._names = names

    @property
    def saves(self) -> list[tuple[str, str | None]]:
        """Names and values, in order."""
        return [(each["name"], each["value"]) for each in self._link.asked_for("settings.save")]

    def on_rows(self) -> Sequence[SettingRow]:
        """Made as the real ones are."""
        rows = setting_rows(self.in_use, self.sources.settings(), self.sources, self.turned)
        return tuple(row for row in rows if row.name in self._names)

    def on_path(self) -> str:
        return str(FILE)

    def on_save(self, name: str, value: str | None) -> SettingRow:
        """Check the value and keep it."""
        saved: dict[str, Any] = {key: each for key, each in self.sources.saved.items() if key != name}
        if value is not None:
            saved[name] = getattr(changed(Settings(), {name: value}), name)
        self.sources = self.sources.saving(saved, self.sources.profiles)
        if flag_of(name).used != "start" and not {name} & {*self.sources.flags, *self.sources.variables}:
            self.in_use = self.in_use.model_copy(update={name: getattr(self.sources.settings(), name)})
        return next(row for row in self.on_rows() if row.name == name)


class FakeTuning(FakeGroup):
    """A search is cancelled and used as it is ordered; how it goes is the script's."""

    def on_start(self, order: TuneOrder) -> None:
        report = TuningReport(state="running", budget_s=order.minutes * 60, knobs=order.knobs)
        self._script["tuning.report"] = report

    def on_cancel(self) -> None:
        self.change_report(state="cancelled", now=None)

    def on_use_best(self) -> None:
        self.change_report(applied=True)

    def on_start_load(self, model: str, seconds: float) -> None:
        self.change_report(load_left_s=seconds, load_clients=32)

    def on_stop_load(self) -> None:
        self.change_report(load_left_s=0.0, load_clients=0)
