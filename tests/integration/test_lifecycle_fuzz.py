"""Everything that an operator, clients and bad luck can do to models, at any moment, with the accounts proved after
every turn of the loop. A seed gives one run, which ERICLLM_FUZZ_SEED=n plays again."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from random import Random

import pytest

from engine import facts, fitting
from engine.config import AdapterSpec, EngineConfig, ModelSpec, SamplingParams
from engine.engine import Engine, GenerateRequest, RequestStream
from engine.errors import EngineError
from engine.text.tokenizer import Tokenizer
from engine.worker.hosts import WorkerExit
from tests.fakes.engines import read
from tests.fakes.model import fake_spec
from tests.fakes.scripted_workers import Machine, answer_of
from tests.fakes.virtual_time import VirtualLoop, run

NAMES = ("a", "b", "c")
OPERATIONS = 60


class Player:
    """One run: an engine on a machine, and operations that chance chooses."""

    def __init__(self, loop: VirtualLoop, random: Random, folders: dict[str, Path]) -> None:
        self.loop = loop
        self.random = random
        self.folders = folders
        self.machine = Machine(random, room=random.choice((1, 2, 2, 3, 5)))
        self.machine.broken = {name for name in NAMES if random.random() < 0.1}
        self.engine = Engine(
            EngineConfig(
                worker_host="thread",
                restart_backoff_s=random.choice((0.0, 0.5)),
                max_deaths=random.choice((2, 5)),
                hang_s=0.0,
                max_prompts=random.choice((1, 2, 4)),
                timeout_s=random.choice((0.0, 20.0)),
            ),
            new_host=self.machine.new_host,
            probe=self.machine,
        )
        self.calls: list[asyncio.Task[object]] = []
        self.reading: list[asyncio.Task[None]] = []
        self.streams: list[RequestStream] = []
        self.log: list[str] = []

    async def play(self) -> None:
        """Start, let chance have its way, and close; nothing may be left."""
        await self.engine.start()
        self.loop.after_each.append(self.engine.check)
        self.begin("load", self.load())
        await asyncio.sleep(self.random.choice((0.1, 5.0)))
        operations: list[Callable[[], Awaitable[object] | None]] = [
            self.load, self.load, self.load, self.unload, self.cancel_load, self.reconfigure, self.attach, self.detach,
            self.restart, self.drain, self.die, self.die, self.ask, self.ask, self.ask, self.ask, self.cancel_request,
            self.leave, self.cancel_queued,
        ]  # fmt: skip
        for _ in range(self.random.randrange(5, OPERATIONS)):
            operation = self.random.choice(operations)
            self.begin(operation.__name__, operation())
            await self.pause()
        if self.random.random() < 0.5:
            await self.settle()
        await self.close()

    def begin(self, name: str, work: Awaitable[object] | None) -> None:
        """Do it beside everything else; what it raises must be an error for a person."""
        self.log.append(f"{self.loop.now:.3f} {name}")
        if work is not None:
            self.calls.append(asyncio.ensure_future(work))

    async def pause(self) -> None:
        """Some turns of the loop, or some time."""
        match self.random.randrange(4):
            case 0:
                for _ in range(self.random.randrange(12)):
                    await asyncio.sleep(0)
            case 1:
                await asyncio.sleep(self.random.random() * 0.1)
            case 2:
                await asyncio.sleep(self.random.random() * 3)

    async def settle(self) -> None:
        """Left alone, every model gets where it was sent, and every request to its end."""
        for _ in range(50):
            await asyncio.sleep(60)
            snapshot = self.engine.snapshot()
            if not snapshot.queued + snapshot.running:
                break
        assert {model.status.state for model in snapshot.models} <= {"ready", "idle", "failed"}, snapshot.models
        assert all(call.done() for call in self.calls)
        assert (snapshot.queued, snapshot.running) == (0, 0)
        ready = [model.name for model in snapshot.models if model.status.state == "ready"]
        for name in ready:
            assert (await self.engine.serving(name)).name == name

    async def close(self) -> None:
        """Close, perhaps again while it closes, and look at what is left."""
        drain_s = self.random.choice((0.0, 1.0, 30.0))
        closing = [asyncio.ensure_future(self.engine.close(drain_s))]
        await self.pause()
        if self.random.random() < 0.3:
            closing.append(asyncio.ensure_future(self.engine.close(0.0)))
        await asyncio.gather(*closing)
        results = await asyncio.gather(*self.calls, return_exceptions=True)
        for result in results:
            assert not isinstance(result, BaseException) or isinstance(result, EngineError | asyncio.CancelledError), (
                repr(result)
            )
        for call, result in zip(self.calls, results, strict=True):
            assert not isinstance(result, asyncio.CancelledError) or call.cancelling(), (
                f"{call} was cancelled by nobody"
            )
        await asyncio.gather(*self.reading)
        assert all(stream.finished for stream in self.streams)
        assert self.engine.snapshot().models == ()
        assert self.engine.snapshot().workers == ()
        assert self.machine.alive == []
        self.engine.check()

    # -- what may happen ----------------------------------------------------------------------------------------

    def load(self) -> Awaitable[object]:
        """Load a model, with knobs of its own or not."""
        chance = self.random
        name = chance.choice(NAMES)
        spec = ModelSpec(path=self.folders[name], name=name, max_model_len=chance.choice((None, 100)))
        knobs: dict[str, float] = {"workers": chance.choice((1, 1, 2))}
        if chance.random() < 0.3:
            knobs["idle_unload_s"] = chance.choice((0.5, 2.0))
        if chance.random() < 0.3:
            knobs["max_prompts"] = chance.choice((1, 3))
        return self.engine.load(spec, beside=chance.random() < 0.4, **knobs)  # type: ignore[arg-type]

    def unload(self) -> Awaitable[object]:
        """Unload one."""
        return self.engine.unload(self.random.choice(("", *NAMES)), drain_s=self.random.choice((0.0, 0.2, 30.0)))

    def cancel_load(self) -> Awaitable[object]:
        """Cancel what loads."""
        return self.engine.cancel_load()

    def reconfigure(self) -> Awaitable[object]:
        """Change a knob."""
        knob = self.random.choice(("workers", "max_prompts", "idle_unload_s"))
        value = {"workers": 1 + self.random.randrange(3), "max_prompts": 1 + self.random.randrange(4)}.get(
            knob, self.random.choice((0.0, 0.5))
        )
        return self.engine.reconfigure(model=self.random.choice(("", *NAMES)), **{knob: value})  # type: ignore[arg-type]

    def attach(self) -> Awaitable[object]:
        """Attach an adapter."""
        return self.engine.attach(AdapterSpec(name="polite", path=self.folders["a"]), self.random.choice(("", *NAMES)))

    def detach(self) -> Awaitable[object]:
        """Detach it."""
        return self.engine.detach("polite")

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

    def ask(self) -> Awaitable[object]:
        """Ask as the API does, up to six at once: wait for a model, then queue a request made for it."""
        names = [model.name for model in self.engine.snapshot().models]
        name = self.random.choice(("", "", *names, *names, *NAMES, "polite"))
        for _ in range(self.random.choice((0, 0, 2, 5))):
            self.begin("ask", self._ask(name, len(self.calls)))
        return self._ask(name, len(self.calls))

    def cancel_request(self) -> None:
        """A client goes away."""
        if self.streams:
            self.engine.cancel(self.random.choice(self.streams).request_id)

    def cancel_queued(self) -> None:
        """Empty the queue."""
        if self.random.random() < 0.3:
            self.engine.cancel_queued()

    def leave(self) -> None:
        """Whoever called goes away."""
        if self.calls:
            self.random.choice(self.calls).cancel()

    async def _ask(self, name: str, number: int) -> None:
        chance = self.random
        serving = await self.engine.serving(name)
        prompt = f"question {number}"

        def encode(tokenizer: Tokenizer) -> list[int]:
            return tokenizer.encode(prompt, add_special_tokens=False)

        ids = encode(serving.tokenizer)
        tokens = 1 + chance.randrange(40)
        for _ in range(chance.choice((0, 0, 1, 3))):
            await asyncio.sleep(0)
        stream = self.engine.submit(
            GenerateRequest(
                prompt_ids=ids,
                params=SamplingParams(max_tokens=tokens),
                model=name,
                key=serving.key,
                adapter=serving.adapter,
                encode=encode if chance.random() < 0.7 else None,
                client=chance.choice(("x", "y")),
            )
        )
        self.streams.append(stream)
        self.reading.append(asyncio.ensure_future(self._read(stream, answer_of(ids, tokens))))

    async def _read(self, stream: RequestStream, expected: list[int]) -> None:
        answer = await read(stream, patience_s=1e5)
        assert answer.token_ids == expected[: len(answer.token_ids)]
        assert answer.last.finish != "length" or answer.token_ids
        error = answer.last.error
        assert error is None or not error.message.endswith("was unloaded"), "nothing asked for that"
        assert sum(delta.finish is not None for delta in answer.deltas) == 1


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
    monkeypatch.setattr(fitting, "read_facts", lambda spec: read_facts(spec.path))
    monkeypatch.setattr(Tokenizer, "from_folder", lambda folder: from_folder(folder))


def _facts_of(path: Path) -> facts.ModelFacts:
    return facts.read_facts(ModelSpec(path=path, name="fake"))


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


def seeds(number: int) -> list[int]:
    """The seeds to play: that of the environment alone, where one is given."""
    given = os.environ.get("ERICLLM_FUZZ_SEED")
    return [int(given)] if given else list(range(number))


def test_models_come_and_go_at_any_moment_and_no_request_or_worker_is_lost(folders: dict[str, Path]) -> None:
    for seed in seeds(100):
        play(seed, folders)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_two_thousand_runs_of_models_that_come_and_go(folders: dict[str, Path]) -> None:
    for seed in seeds(2000):
        play(seed, folders)


def test_a_seed_replays_its_run(folders: dict[str, Path]) -> None:
    assert play(7, folders) == play(7, folders)
