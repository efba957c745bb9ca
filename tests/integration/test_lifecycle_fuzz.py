"""Everything that an operator, clients and bad luck can do to models, at any moment, with the accounts proved after
every turn of the loop. A seed gives one run, which ERICLLM_FUZZ_SEED=n plays again; ERICLLM_FUZZ_RUNS is how many the
longer test plays."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from pathlib import Path
from random import Random

import pytest

from engine.config import AdapterSpec, EngineConfig, ModelSpec, SamplingParams
from engine.engine import Engine, FindModel, GenerateRequest, LoadOrder, RequestStream
from engine.errors import EngineError, InsufficientMemory
from engine.placement import load_history, model_facts
from engine.text.tokenizer import Tokenizer
from engine.worker_process.hosts import WorkerExit
from tests.fakes.engines import read
from tests.fakes.model import fake_spec
from tests.fakes.scripted_workers import Machine, answer_of
from tests.fakes.virtual_time import VirtualLoop, run

NAMES = ("a", "b", "c")
ADAPTERS = ("polite", "rude")
MODEL_LENS = (4096, 100, 30)
OPERATIONS = 60
FEW_RUNS = 100
RUNS = int(os.environ.get("ERICLLM_FUZZ_RUNS", "400"))
DRAIN_S = 3.0
FORGOTTEN_S = 300.0
"""Seconds after which an operation, with all the drains and loads that it began, is no reason for anything."""

JUSTIFIED = {
    "engine_closed": {"close"},
    "no_model_loaded": {"replace", "unload", "die"},
    "load_cancelled": {"cancel_load", "unload", "close"},
    "worker_failed": {"die"},
    "model_load_failed": {"load"},
    "unsupported_model": {"load"},
    "insufficient_memory": {"load", "reconfigure"},
    "context_length_exceeded": {"load"},
    "request_timeout": {"timeout"},
}
"""The operations of which one must have come before a request ends with that error."""


@pytest.fixture(autouse=True)
def _no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of a chat template's: nobody chats here, and they would be waited for by the real clock."""
    monkeypatch.setattr(Tokenizer, "warm_up", lambda self: None)


class Player:
    """One run: an engine on a machine, and operations that chance chooses, of which most runs leave out some."""

    def __init__(self, loop: VirtualLoop, random: Random, folders: dict[str, Path]) -> None:
        self.loop = loop
        self.random = random
        self.folders = folders
        self.machine = Machine(random, room=random.choice((1, 2, 2, 3, 5)))
        self.calm = random.random() < 0.6
        if not self.calm:
            self.machine.flaky = random.random() < 0.5
            self.machine.broken = {name for name in NAMES if random.random() < 0.1}
        self.machine.stuck = {name for name in NAMES if random.random() < 0.05}
        self.engine = Engine(
            EngineConfig(
                worker_host="thread",
                restart_backoff_s=random.choice((0.0, 0.5)),
                max_deaths=random.choice((1, 2, 5)),
                hang_s=0.0,
                max_prompts=random.choice((1, 2, 4)),
                timeout_s=random.choice((0.0, 0.0, 20.0)),
            ),
            new_host=self.machine.new_host,
            probe=self.machine,
        )
        self.names = random.choice((NAMES, NAMES, NAMES[:2], NAMES[:1]))
        self.last: dict[str, float] = {}
        self.most_workers = 1
        self.calls: list[asyncio.Task[object]] = []
        self.reading: list[asyncio.Task[None]] = []
        self.streams: list[RequestStream] = []
        self.cancelled: set[str] = set()
        self.log: list[str] = []
        if self.engine.config.timeout_s:
            self.last["timeout"] = float("inf")
        if self.machine.flaky:
            self.last["die"] = float("inf")

    async def play(self) -> None:
        """Start, let chance have its way, and close; nothing may be left."""
        chance = self.random
        await self.engine.start()
        self.loop.after_each.append(self.engine.check)
        self.begin("load", self.load())
        await asyncio.sleep(chance.choice((0.1, 5.0)))
        operations: list[Callable[[], Awaitable[object] | None]] = [
            self.load, self.load, self.reload, self.reload, self.unload, self.cancel_load, self.reconfigure,
            self.attach, self.detach, self.restart, self.drain, self.doze, self.doze, self.cancel_request,
            self.leave, self.cancel_queued, *(() if self.calm else (self.die, self.die)),
        ]  # fmt: skip
        operations = chance.sample(operations, chance.choice((3, 6, 10, len(operations))))
        operations += [self.ask, self.submit] * max(1, len(operations) // 6)
        if chance.random() < 0.4:
            operations += [self.name_it] * max(1, len(operations) // 5)
        for _ in range(chance.randrange(5, OPERATIONS)):
            operation = chance.choice(operations)
            self.begin(operation.__name__, operation())
            await self.pause()
        if chance.random() < 0.6:
            await self.settle()
        await self.close()

    def begin(self, name: str, work: Awaitable[object] | None) -> None:
        """Do it beside everything else; what it raises must be an error for a person."""
        self.log.append(f"{self.loop.now:.3f} {name}")
        self.note(name)
        if work is not None:
            self.calls.append(asyncio.ensure_future(work))

    def note(self, name: str) -> None:
        """That is done now."""
        self.last[name] = max(self.last.get(name, 0.0), self.loop.now)

    async def pause(self) -> None:
        """Some turns of the loop, or some time."""
        match self.random.randrange(5):
            case 0 | 1:
                for _ in range(self.random.randrange(12)):
                    await asyncio.sleep(0)
            case 2:
                await asyncio.sleep(self.random.random() * 0.1)
            case 3:
                await asyncio.sleep(self.random.random() * 3)

    async def settle(self) -> None:
        """Left alone, every model gets where it was sent, and every request to its end; then it obeys and answers."""
        self.machine.stuck.clear()
        for _ in range(50):
            await asyncio.sleep(60)
            snapshot = self.engine.publish()
            unloads = any(
                model.status.state == "unloading" for model in snapshot.models
            )  # one that fell asleep just now
            if not snapshot.queued + snapshot.running and not unloads:
                break
        assert all(call.done() for call in self.calls)
        assert (snapshot.queued, snapshot.running) == (0, 0)
        for model in snapshot.models:
            may_fail = self.may_fail or self.most_workers > self.machine.room
            assert model.status.state in ("ready", "idle", *(("failed",) if may_fail else ())), model
        names = [model.name for model in snapshot.models]
        assert self.may_fail or len(names) == len(set(names)), names
        for model in snapshot.models:
            if not self.may_fail:
                workers = [worker.state for worker in snapshot.workers if worker.model == model.name]
                wanted = model.target_workers if model.status.state == "ready" else 0
                assert workers == ["ready"] * wanted, f"{model.name} is to have {wanted}: {workers}"
            assert model.status.state != "failed" or not any(
                worker.state == "ready" for worker in snapshot.workers if worker.model == model.name
            ), f"{model.name} has failed with a worker that is ready"
            if model.status.state == "ready":
                await self.answers(model.name)
        if not self.may_fail:
            await self.obeys()

    @property
    def may_fail(self) -> bool:
        """Whether models may fail for good."""
        return "die" in self.last or bool(self.machine.broken)

    async def answers(self, name: str) -> None:
        """Ask a model, as a client does."""
        assert (await self.engine.serving(name)).name == name
        await self._ask(name, len(self.calls))
        await asyncio.wait((self.reading[-1],))
        assert self.streams[-1].request_id not in self.cancelled

    async def obeys(self) -> None:
        """Load and unload in peace: nothing is in the way, and nothing stays."""
        for name in self.engine._models.names():
            if name in NAMES:
                await self.engine.unload(name)
        assert self.engine.publish().models == ()
        self.begin("load", self.engine.load(ModelSpec(path=self.folders["a"], name="a"), num_workers=1))
        await self.calls[-1]
        await self.answers("a")
        assert [model.name for model in self.engine.publish().models] == ["a"]

    async def close(self) -> None:
        """Close, perhaps again while it closes, and look at what is left."""
        drain_s = self.random.choice((0.0, 1.0, 30.0))
        self.begin("close", self.engine.close(drain_s))
        await self.pause()
        if self.random.random() < 0.3:
            self.begin("close", self.engine.close(0.0))
        await asyncio.wait(self.calls)
        for call in self.calls:
            if call.cancelled():
                assert call.cancelling(), f"{call} was cancelled by nobody"
            elif (error := call.exception()) is not None and not isinstance(error, EngineError):
                raise error
        await asyncio.gather(*self.reading)
        assert all(stream.finished for stream in self.streams)
        assert self.engine.publish().models == ()
        assert self.engine.publish().workers == ()
        assert self.machine.alive == []
        assert self.machine.wrongs == []
        self.engine.check()

    # -- what may happen ----------------------------------------------------------------------------------------

    def load(self) -> Awaitable[object]:
        """Load a model, with knobs of its own or not."""
        return self._load(self.random.choice(self.names), beside=self.random.random() < 0.4)

    def reload(self) -> Awaitable[object]:
        """Load a model in its own place."""
        held = [model.name for model in self.engine.publish().models]
        return self._load(self.random.choice(held or self.names), beside=False)

    async def _load(self, name: str, *, beside: bool) -> None:
        chance = self.random
        self.note("load")
        if any(each.spec.name != name for each in self.engine._models):
            self.note("replace")
        length = chance.choice(MODEL_LENS)
        spec = ModelSpec(path=self.folders[name], name=name, max_model_len=None if length == MODEL_LENS[0] else length)
        knobs: dict[str, float] = {"num_workers": chance.choice((1, 1, 2))}
        if chance.random() < 0.5:
            knobs["idle_unload_s"] = chance.choice((0.5, 2.0))
        if chance.random() < 0.3:
            knobs["max_prompts"] = chance.choice((1, 3))
        self.most_workers = max(self.most_workers, int(knobs["num_workers"]))
        began, held = self.loop.now, list(self.engine._models)
        staying = [each for each in held if each.state in ("ready", "idle") and each.desired != "gone"]
        settled = all(replica.state == "ready" for each in held for replica in each.replicas())
        try:
            await self.engine.load(spec, beside=beside, **knobs)  # type: ignore[arg-type]
        except InsufficientMemory:
            others = ("unload", "reconfigure", "close", "restart", "drain", "name_it")
            meddled = any(self.last.get(other, -1.0) >= began for other in others)
            if self.calm and not meddled:
                assert not any(each.ended.is_set() for each in staying), "a load that was refused changed something"
                alone = len(held) <= (0 if beside else 1) and held == staying  # one that leaves still has its memory
                fits = knobs["num_workers"] <= self.machine.room
                assert not (alone and settled and fits), "a load was refused that fits"
            raise

    async def unload(self) -> None:
        """Unload one; nothing of that name that was there is left."""
        name = self.random.choice(("", *self.names))
        meant = [each for each in self.engine._models if name in ("", each.spec.name)]
        meant = meant if name else [each for each in meant if each is self.engine._models.first]
        await self.engine.unload(name, drain_s=self.random.choice((0.0, 0.2, 30.0)))
        assert all(each.ended.is_set() for each in meant), f"{[(each.key, each.state) for each in meant]} stay"

    def cancel_load(self) -> Awaitable[object]:
        """Cancel what loads."""
        return self.engine.cancel_load()

    async def reconfigure(self) -> None:
        """Change a knob; it may be another load's by the time that the devices were read."""
        knob = self.random.choice(("num_workers", "max_prompts", "idle_unload_s"))
        value = {"num_workers": 1 + self.random.randrange(3), "max_prompts": 1 + self.random.randrange(4)}.get(
            knob, self.random.choice((0.0, 0.5))
        )
        if knob == "num_workers":
            self.most_workers = max(self.most_workers, int(value))
        try:
            await self.engine.reconfigure(model=self.random.choice(("", *NAMES)), **{knob: value})  # type: ignore[arg-type]
        finally:
            self.note("reconfigure")

    async def attach(self) -> None:
        """Attach an adapter, one of three versions of it; it can be named then, until its model goes."""
        name, version = self.random.choice(ADAPTERS), self.random.choice(NAMES)
        await self.engine.attach(
            AdapterSpec(name=name, path=self.folders[version]), self.random.choice(("", *self.names))
        )

    def detach(self) -> Awaitable[object]:
        """Detach it."""
        return self.engine.detach(self.random.choice(ADAPTERS))

    def restart(self) -> Awaitable[object]:
        """Restart a worker."""
        return self.engine.restart_worker(f"w{self.random.randrange(3)}")

    def drain(self) -> Awaitable[object]:
        """Drain a worker."""
        return self.engine.drain_worker(f"w{self.random.randrange(3)}")

    def die(self) -> None:
        """A worker dies."""
        if alive := self.machine.alive:
            self.random.choice(alive).die(WorkerExit(signal="SIGKILL"))

    def doze(self) -> None:
        """Models with a limit were not asked for long; one may be asked just then."""
        self.engine._models.tick(self.loop.now + 1000)
        if self.random.random() < 0.4:
            self.submit()

    def ask(self) -> Awaitable[object]:
        """Ask as the API does, up to six at once: wait for a model, then queue a request made for it."""
        names = [model.name for model in self.engine.publish().models]
        name = self.random.choice(("", "", *names, *names, *NAMES, *ADAPTERS, *ADAPTERS))
        for _ in range(self.random.choice((0, 0, 2, 5))):
            self.begin("ask", self._ask(name, len(self.calls)))
        return self._ask(name, len(self.calls))

    def name_it(self) -> Awaitable[object]:
        """Ask for a model that may not be here, as a client does that may have it loaded."""
        return self._ask(self.random.choice(NAMES), len(self.calls), self._find)

    async def _find(self, name: str) -> LoadOrder | None:
        await asyncio.sleep(self.random.choice((0, 0.01)))
        return LoadOrder(spec=ModelSpec(path=self.folders[name], name=name, pin=self.random.random() < 0.1))

    def cancel_request(self) -> None:
        """A client goes away."""
        if self.streams:
            stream = self.random.choice(self.streams)
            if self.engine.cancel(stream.request_id):
                self.cancelled.add(stream.request_id)

    def cancel_queued(self) -> None:
        """Empty the queue."""
        if self.random.random() < 0.3:
            self.cancelled |= {row.id for row in self.engine.publish().requests if row.state == "queued"}
            self.engine.cancel_queued()

    def leave(self) -> None:
        """Whoever called goes away."""
        if self.calls:
            self.random.choice(self.calls).cancel()

    async def _ask(self, name: str, number: int, find: FindModel | None = None) -> None:
        chance = self.random
        serving = await self.engine.serving(name, find)
        for _ in range(chance.choice((0, 0, 1, 3))):
            await asyncio.sleep(0)
        self._submit(name, number, serving.tokenizer, key=serving.key, adapter=serving.adapter)

    def submit(self) -> None:
        """Queue a request for a model that is ready, in the same turn of the loop as what was done last."""
        ready = [each for each in self.engine._models if each.state == "ready" and each.tokenizer is not None]
        for each in ready[:1]:
            with contextlib.suppress(EngineError):
                self._submit("", len(self.log), each.tokenizer, key=each.key)

    def _submit(self, name: str, number: int, tokenizer: Tokenizer | None, *, key: str, adapter: str = "") -> None:
        chance = self.random
        prompt = f"question {number}"

        async def encode(tokenizer: Tokenizer) -> list[int]:
            await asyncio.sleep(chance.choice((0, 0, 0.1, 30)))
            return tokenizer.encode(prompt, add_special_tokens=False)

        assert tokenizer is not None
        ids, tokens = tokenizer.encode(prompt, add_special_tokens=False), 1 + chance.randrange(40)
        stream = self.engine.submit(
            GenerateRequest(
                prompt_ids=ids,
                params=SamplingParams(max_tokens=tokens),
                model=name,
                key=key,
                adapter=adapter,
                encode=encode if chance.random() < 0.7 else None,
                client=chance.choice(("x", "y")),
            )
        )
        self.streams.append(stream)
        request = self.engine._tracker.live[stream.request_id]
        expected = answer_of(ids, tokens, request.adapter_key)
        self.reading.append(asyncio.ensure_future(self._read(stream, expected, len(ids))))

    async def _read(self, stream: RequestStream, expected: list[int], prompt_tokens: int) -> None:
        began = self.loop.now
        answer = await read(stream, patience_s=1e5)
        finish, error, got = answer.last.finish, answer.last.error, len(answer.token_ids)
        assert answer.token_ids == expected[:got]
        assert sum(delta.finish is not None for delta in answer.deltas) == 1
        if finish == "length":
            assert got in (len(expected), *(length - prompt_tokens for length in MODEL_LENS)) or (
                got > MODEL_LENS[-1] - prompt_tokens and self.recent(began, {"load"})
            )
        elif finish == "cancelled":
            assert stream.request_id in self.cancelled
        elif finish == "timeout":
            assert self.engine.config.timeout_s and (got or error is not None)
        else:
            assert finish == "error" and error is not None
            assert self.recent(began, JUSTIFIED[error.code]), f"nothing asked for {error.code}: {error.message}"
            assert not error.message.endswith("was unloaded"), "nothing asked for that"

    def recent(self, began: float, operations: set[str]) -> bool:
        """Whether one of these was begun not long before `began`, or since."""
        return any(self.last.get(operation, -float("inf")) >= began - FORGOTTEN_S for operation in operations)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model's folder for each name."""
    parent = tmp_path_factory.mktemp("models")
    for name in NAMES:
        fake_spec(parent / name)
    return {name: parent / name for name in NAMES}


@pytest.fixture(autouse=True)
def _read_folders_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of loads of the same three folders."""
    read_facts, from_folder = cache(_facts_of), cache(Tokenizer.from_folder)
    monkeypatch.setattr(load_history, "read_facts", lambda spec: read_facts(spec.path))
    monkeypatch.setattr(Tokenizer, "from_folder", lambda folder: from_folder(folder))
    monkeypatch.setattr("engine.models.handover.DRAIN_S", DRAIN_S)
    monkeypatch.setattr("engine.metrics.publisher._PUBLISH_HZ", 0.1)


def _facts_of(path: Path) -> model_facts.ModelFacts:
    return model_facts.read_facts(ModelSpec(path=path, name="fake"))


def play(seed: int, folders: dict[str, Path]) -> list[str]:
    """One run; its log."""
    random = Random(seed)
    players: list[Player] = []

    async def main(loop: VirtualLoop) -> None:
        players.append(Player(loop, random, folders))
        await players[0].play()

    try:
        run(main, random)
    except BaseException as error:
        log = "\n".join(players[0].log[-30:])
        raise AssertionError(f"seed {seed}: {error!r}; ERICLLM_FUZZ_SEED={seed} replays it\n{log}") from error
    return players[0].log


def seeds(first: int, end: int) -> Sequence[int]:
    """The seeds to play: that of the environment alone, where one is given."""
    given = os.environ.get("ERICLLM_FUZZ_SEED")
    return [int(given)] if given else range(first, end)


def test_models_come_and_go_at_any_moment_and_no_request_or_worker_is_lost(folders: dict[str, Path]) -> None:
    for seed in seeds(0, FEW_RUNS):
        play(seed, folders)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_hundreds_of_runs_of_models_that_come_and_go(folders: dict[str, Path]) -> None:
    for seed in seeds(FEW_RUNS, FEW_RUNS + RUNS):
        play(seed, folders)


def test_a_seed_replays_its_run(folders: dict[str, Path]) -> None:
    assert play(7, folders) == play(7, folders)
