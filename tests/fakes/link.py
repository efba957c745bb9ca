"""FakeLink: an EngineLink with no engine behind it. It shows the snapshot it is given and writes down every command.

link = FakeLink(scenes.busy())
link.show(scenes.failed())              # what snapshot() gives from now on
link.failures["load"] = ModelLoadFailed("...")   # the next call of that command raises it, once
link.hold("load")                       # that command (or "chat": between words) waits ...
link.release("load")                    # ... until now
assert link.commands == [("reconfigure", {"workers": 3})]
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from console.link.chat import ChatMessage
from console.link.protocol import ApiStatus
from console.settings.load_options import LoadOptions
from engine.config import ModelSpec, SamplingParams
from engine.doctor.examine import examine
from engine.doctor.report import Report
from engine.errors import EngineError, LoadCancelled, ModelNotFound
from engine.models.catalog import ModelEntry
from engine.placement.estimate import Estimate
from engine.snapshot import LogEntry, ModelStatus, RequestRow, Snapshot
from tests.fakes import estimates, machines, scenes
from tests.fakes.link_api import FakeApi
from tests.fakes.link_benches import FakeBenches
from tests.fakes.link_conversation import FakeConversation
from tests.fakes.link_insight import FakeInsight
from tests.fakes.link_models import FakeModels
from tests.fakes.link_requests import FakeRequests
from tests.fakes.link_settings import FakeSettings
from tests.fakes.link_tuning import FakeTuning

MODELS = (
    ModelEntry(
        name="demo",
        path=Path("/opt/ericllm/demo"),
        origin="built in",
        architecture="LlamaForCausalLM",
        quantisation="",
        dtype="bfloat16",
        parameters=8_400_000,
        weights_bytes=17 * scenes.MIB,
        context_tokens=1024,
        chat_template="own",
    ),
    ModelEntry(
        name="NeuralHermes-7B",
        path=Path("/models/NeuralHermes-7B"),
        origin="/models",
        architecture="MistralForCausalLM",
        quantisation="exl2 5.0 bpw",
        dtype="float16",
        parameters=7_241_732_096,
        weights_bytes=int(4.4 * scenes.GIB),
        context_tokens=8192,
        chat_template="ChatML",
    ),
    ModelEntry(
        name="old-pickle[v1]",
        path=Path("/models/old-pickle[v1]"),
        origin="/models",
        architecture="GPT2LMHeadModel",
        quantisation="",
        dtype="float32",
        parameters=124_439_808,
        weights_bytes=int(0.5 * scenes.GIB),
        context_tokens=1024,
        problem="the weights are pickles; only safetensors are read",
    ),
)

LOGS = (
    LogEntry(at=scenes.NOW - 3, level=logging.INFO, source="engine", message="loading NeuralHermes-7B"),
    LogEntry(at=scenes.NOW - 2, level=logging.WARNING, source="w0", message="[kernels] compiled in 1.2 s"),
    LogEntry(at=scenes.NOW - 1, level=logging.ERROR, source="api", message="port 8000 is taken"),
)


class FakeLink:
    """See the module. `answer` is what every chat says, word by word; `answers` what single models say instead."""

    def __init__(
        self,
        snapshot: Snapshot | None = None,
        *,
        api: ApiStatus | None = None,
        models: Sequence[ModelEntry] = MODELS,
        logs: Sequence[LogEntry] = LOGS,
        answer: str = "Max prompts is how many requests a worker works on at once.",
    ) -> None:
        self.current = snapshot if snapshot is not None else scenes.busy()
        self.served = api if api is not None else ApiStatus(running=True, clients=3, requests=4120)
        self.found = list(models)
        self.lines = list(logs)
        self.answer = answer
        self.answers: dict[str, str] = {}
        self.api = FakeApi(self)
        self.conversation = FakeConversation(self)
        self.insight = FakeInsight(self)
        self.models = FakeModels(self)
        self.requests = FakeRequests(self)
        self.tuning = FakeTuning(self)
        self.benches = FakeBenches(self)
        self.report = examine(machines.H100_WITH_EVERYTHING, "exllamav2")
        self.commands: list[tuple[str, dict[str, Any]]] = []
        self.failures: dict[str, EngineError] = {}
        self.chats: list[tuple[list[ChatMessage], SamplingParams]] = []
        self.chat_models: list[str] = []
        self.expected = estimates.estimate()
        self.closed_chats = 0
        self.settings = FakeSettings()
        self._gates: dict[str, asyncio.Event] = {}
        self._load_cancelled = False

    # -- the script -------------------------------------------------------------------------------------------------

    def show(self, snapshot: Snapshot) -> None:
        """What snapshot() gives from now on."""
        self.current = snapshot

    def log(self, message: str, *, level: int = logging.INFO, source: str = "engine") -> None:
        """Add a log line."""
        self.lines.append(LogEntry(at=scenes.NOW, level=level, source=source, message=message))

    def hold(self, command: str) -> None:
        """Make `command` wait until release(command)."""
        self._gates[command] = asyncio.Event()

    def step(self, command: str) -> None:
        """Let what waits at a held command go on once (a chat: by a word), and then wait again."""
        waiting = self._gates[command]
        self.hold(command)
        waiting.set()

    def release(self, command: str) -> None:
        """Let a held command go on, now and later."""
        self._gates.pop(command).set()

    def names(self) -> list[str]:
        """The commands called, in order."""
        return [name for name, _ in self.commands]

    async def record(self, name: str, /, **arguments: Any) -> None:
        """Write a command down; raise what it is to fail with, wait while it is held."""
        self.commands.append((name, arguments))
        if name in self.failures:
            raise self.failures.pop(name)
        await self.gate(name)

    def answer_of(self, model: str) -> str:
        """What a chat with that model says."""
        return self.answers.get(model, self.answer)

    async def gate(self, name: str) -> None:
        """Wait where `name` is held."""
        if name in self._gates:
            await self._gates[name].wait()

    def _change(self, **changes: Any) -> None:
        self.current = msgspec.structs.replace(self.current, **changes)

    # -- EngineLink -------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """The scene shown now."""
        return self.current

    def api_status(self) -> ApiStatus:
        """As the commands left it."""
        return self.served

    def logs(self, after: int = 0) -> tuple[int, Sequence[LogEntry]]:
        """The lines after the first `after`."""
        return len(self.lines), self.lines[after:]

    async def list_models(self) -> Sequence[ModelEntry]:
        """The catalogue given."""
        await self.record("list_models")
        return self.found

    async def load(self, model: str, *, beside: bool = False) -> None:
        """As `models.load`, without changes."""
        await self.models.load(model, beside=beside)

    async def begin_load(self, model: str, *, beside: bool, **changes: object) -> None:
        """Loading while held, then ready; ModelNotFound for a name that is not in the catalogue."""
        entry = next((entry for entry in self.found if model in (entry.name, str(entry.path))), None)
        if entry is None:
            raise ModelNotFound(f"no model is called {model}", model=model)
        spec = ModelSpec(path=entry.path, name=entry.name)
        self._load_cancelled = False
        if beside:
            await self.record("load", model=model, beside=True, **changes)
            return
        self._change(status=msgspec.structs.replace(scenes.loading().status, spec=spec))
        try:
            await self.record("load", model=model, **changes)
            if self._load_cancelled:
                raise LoadCancelled(f"loading {model} was cancelled")
        except LoadCancelled:
            self._change(status=ModelStatus())
            raise
        except EngineError as error:
            self._change(status=ModelStatus(state="failed", spec=spec, error=error.info))
            raise
        self._change(status=scenes.ready_status(entry.name, weights_bytes=entry.weights_bytes))

    async def cancel_load(self) -> None:
        """Ends a held load with LoadCancelled."""
        await self.record("cancel_load")
        self._load_cancelled = True
        if "load" in self._gates:
            self.release("load")

    async def unload(self, model: str = "", *, drain_seconds: float = 30.0) -> None:
        """Back to no model."""
        await self.record("unload", **({"model": model} if model else {}))
        if len(self.current.models) > 1:
            self._change(models=tuple(each for each in self.current.models if each.name != model))
            return
        self._change(status=ModelStatus(), workers=(), requests=(), queued=0, running=0)

    async def reconfigure(
        self,
        *,
        workers: int | None = None,
        max_prompts: int | None = None,
        idle_unload_s: float | None = None,
        model: str = "",
    ) -> None:
        """Moves the targets."""
        knobs = {
            "workers": workers,
            "max_prompts": max_prompts,
            "idle_unload_s": idle_unload_s,
            "model": model or None,
        }
        await self.record("reconfigure", **{name: value for name, value in knobs.items() if value is not None})
        if model:
            return
        self._change(
            target_workers=self.current.target_workers if workers is None else workers,
            max_prompts=self.current.max_prompts if max_prompts is None else max_prompts,
        )

    async def restart_worker(self, worker_id: str) -> None:
        """Keeps the call alone."""
        await self.record("restart_worker", worker_id=worker_id)

    async def drain_worker(self, worker_id: str) -> None:
        """Keeps the call alone."""
        await self.record("drain_worker", worker_id=worker_id)

    async def estimate(self, model: str, *, workers: int | None = None, max_prompts: int | None = None) -> Estimate:
        """As `models.estimate`."""
        return await self.models.estimate(model, LoadOptions(num_workers=workers, max_prompts=max_prompts))

    async def attach(self, name: str, path: str, model: str = "", *, scale: float = 1.0) -> None:
        """Keeps the call alone."""
        await self.record("attach", name=name, path=path, **({"model": model} if model else {}))

    async def detach(self, name: str, model: str = "") -> None:
        """Keeps the call alone."""
        await self.record("detach", name=name, **({"model": model} if model else {}))

    async def cancel_request(self, request_id: str) -> None:
        """Finishes that row as cancelled."""
        await self.record("cancel_request", request_id=request_id)

        def ended(row: RequestRow) -> RequestRow:
            if row.id != request_id:
                return row
            return msgspec.structs.replace(row, state="finished", finish="cancelled")

        self._change(requests=tuple(ended(row) for row in self.current.requests))

    def sampling_defaults(self, model: str = "") -> SamplingParams:
        """A model that suggests a temperature."""
        return SamplingParams(temperature=0.6)

    async def diagnose(self) -> Report:
        """The report given."""
        await self.record("diagnose")
        return self.report

    async def start_api(self) -> None:
        """On."""
        await self.record("start_api")
        self.served = msgspec.structs.replace(self.served, running=True, error=None)

    async def stop_api(self, *, finish: bool = False) -> None:
        """Off; with `finish`, stopping while it is held."""
        self.served = msgspec.structs.replace(self.served, stopping=finish)
        await self.record("stop_api", **({"finish": True} if finish else {}))
        self.served = msgspec.structs.replace(self.served, running=False, stopping=False, clients=0, connections=0)
