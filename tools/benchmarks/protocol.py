"""Messages between the driver and an engine's runner, one JSON object a line; the work and the ways to do it. Needs the
standard library alone, as it runs where the engines are installed.

A runner says what it is ({"about": {"precision": "bf16", "versions": {"torch": "2.13"}}}) once it is ready, or why it
cannot run ({"error": ...}); then it answers each work ({"clients": 8, "output_tokens": 128, "prompts": [[ids], ...]})
and each load ({"streams": 16, ...}) with what its clients saw ({"tokens": 1024, "seconds": 3.2, "ttft_s": [...], ...}).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

Prompt = tuple[int, ...]

PROMPT_TOKENS, OUTPUT_TOKENS = 128, 128
_SPREAD = 8
"""Lengths of prompts differ by up to an eighth of the one asked for."""
FIRST_ID, VOCABULARY = 3, 32000
"""Ids that every shape has and that are no special tokens: FIRST_ID up to below VOCABULARY."""
_ROOM_TOKENS = 16
_BF16_BYTES = 2


def max_tokens(prompt_tokens: int, output_tokens: int = OUTPUT_TOKENS) -> int:
    """Tokens of the longest prompt and its answer; the rest is for engines that want a little room."""
    return prompt_tokens + prompt_tokens // _SPREAD + output_tokens + _ROOM_TOKENS


@dataclass(frozen=True)
class Work:
    """A closed loop: `clients` of them ask the prompts (token ids) in order, each as soon as its last answer is whole.

    Every answer is greedy and has exactly `output_tokens` tokens. An engine without a queue of its own gets the prompts
    in batches of `clients`.
    """

    clients: int
    output_tokens: int
    prompts: tuple[Prompt, ...]

    def line(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    def batches(self) -> list[tuple[Prompt, ...]]:
        """The prompts, `clients` at a time."""
        return [self.prompts[first : first + self.clients] for first in range(0, len(self.prompts), self.clients)]


def work_of(
    clients: int, round_: int, *, prompt_tokens: int = PROMPT_TOKENS, output_tokens: int = OUTPUT_TOKENS
) -> Work:
    """The work of a round: as many requests as clients, no prompt like that of another round."""
    drawn = random.Random(f"{prompt_tokens} {clients} {round_}")
    spread = prompt_tokens // _SPREAD
    lengths = [drawn.randint(prompt_tokens - spread, prompt_tokens + spread) for _ in range(clients)]
    return Work(clients, output_tokens, tuple(_ids(drawn, length) for length in lengths))


def _ids(drawn: random.Random, length: int) -> Prompt:
    return tuple(drawn.randrange(FIRST_ID, VOCABULARY) for _ in range(length))


@dataclass(frozen=True)
class Load:
    """Streams that go on for ever, each with a new answer as soon as one is complete, beside long prompts: one every
    `every_s` seconds, or as soon as the one before is read. Seen are `seconds`, after `warm_up_s`. setting: of the
    engine from now on, "" for those that it has."""

    streams: int = 16
    stream_prompt_tokens: int = 64
    answer_tokens: int = 512
    prompt_tokens: int = 8192
    every_s: float = 5.0
    seconds: float = 30.0
    warm_up_s: float = 10.0
    setting: str = ""

    @property
    def max_tokens(self) -> int:
        """Of a prompt and its answer."""
        return max(self.prompt_tokens, self.stream_prompt_tokens + self.answer_tokens) + _ROOM_TOKENS

    @property
    def kv_tokens(self) -> int:
        """Of all requests together: the streams, a long prompt, and one that a round before may have left."""
        stream = self.stream_prompt_tokens + self.answer_tokens + _ROOM_TOKENS
        return self.streams * stream + 2 * (self.prompt_tokens + _ROOM_TOKENS)

    def line(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))


def work_or_load(line: str) -> Work | Load:
    """Parse a line."""
    fields = json.loads(line)
    if "streams" in fields:
        return Load(**fields)
    return Work(fields["clients"], fields["output_tokens"], tuple(map(tuple, fields["prompts"])))


class Answer:
    """An answer as its client sees it. tokens: how many came; arrivals: when, in seconds of perf_counter, one for each
    chunk of tokens that came together; none where an engine reports nothing before the end."""

    def __init__(self) -> None:
        self.sent_s = time.perf_counter()
        self.tokens = 0
        self.arrivals: list[float] = []

    def arrived(self, tokens: int = 1) -> None:
        """Tokens arrive now."""
        self.arrivals.append(time.perf_counter())
        self.tokens += tokens


@dataclass(frozen=True)
class Done:
    """tokens: generated in all; seconds: of all the work.  ttft_s: from sending a request to its first token, one for
    each answer; itl_s: between two chunks of an answer; both empty where the engine reports nothing before the end.
    prompt_tokens: of a load's long prompts, read within its seconds."""

    tokens: int
    seconds: float
    ttft_s: tuple[float, ...] = ()
    itl_s: tuple[float, ...] = ()
    prompt_tokens: float = 0.0

    @classmethod
    def of(cls, answers: Sequence[Answer], seconds: float) -> Done:
        """Add the answers of a work up."""
        return cls(
            sum(answer.tokens for answer in answers),
            seconds,
            tuple(answer.arrivals[0] - answer.sent_s for answer in answers if answer.arrivals),
            tuple(second - first for answer in answers for first, second in pairwise(answer.arrivals)),
        )

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Given:
    """The arguments of a runner. max_tokens: of a prompt and its answer together.  python: the interpreter of the venv
    that the engine is installed in, where the runner is in another.  kv_tokens: of all clients together, 0 for the most
    that they can have."""

    model: Path
    clients: int
    max_tokens: int
    threads: int
    mode: str = ""
    python: str = ""
    kv_tokens: int = 0

    def arguments(self) -> list[str]:
        """As a command line."""
        return [argument for key, value in asdict(self).items() for argument in (f"--{key}", str(value))]

    @classmethod
    def from_arguments(cls, arguments: Sequence[str]) -> Given:
        """Parse a command line."""
        parser = argparse.ArgumentParser()
        parser.add_argument("--model", type=Path, required=True)
        for name in ("clients", "max_tokens", "threads"):
            parser.add_argument(f"--{name}", type=int, required=True)
        for name in ("mode", "python"):
            parser.add_argument(f"--{name}", default="")
        parser.add_argument("--kv_tokens", type=int, default=0)
        return cls(**vars(parser.parse_args(arguments)))

    @property
    def tokens(self) -> int:
        """Room for all clients."""
        return self.kv_tokens or self.clients * self.max_tokens

    @property
    def kv_gib(self) -> int:
        """GiB of keys and values of 16 bits for all clients and half as many again, whole, at least one."""
        config = json.loads((self.model / "config.json").read_text(encoding="utf-8"))
        head_dim: int = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        a_token: int = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim * _BF16_BYTES
        return 1 + self.tokens * a_token * 3 // 2 // 2**30


Ask = Callable[[Prompt, int, Answer], Awaitable[None]]
"""Requests an answer of exactly a number of tokens to a prompt, and reports those that arrive."""

Arrived = Callable[[int], None]
"""Called with a number of tokens as they arrive."""

Batch = Callable[[Sequence[Prompt], int, Sequence[Answer]], None]
"""Answers a batch of prompts, all at once."""


@dataclass(frozen=True)
class Ready:
    """An engine with its model: either `ask`, or `batch` of one that takes no request while others run.

    precision: of the numbers that its linear layers multiply: "bf16", "f32" or "int8".  configure: applies a setting.
    """

    precision: str
    ask: Ask | None = None
    batch: Batch | None = None
    versions: dict[str, str] = field(default_factory=dict)
    configure: Callable[[str], Awaitable[None]] | None = None


@dataclass(frozen=True)
class About:
    """The loaded engine: its precision as `Ready` has it, and the versions of its packages."""

    precision: str
    versions: dict[str, str]


Loaded = Callable[[Given], AbstractAsyncContextManager[Ready]]
"""Loads the model, and lets go of it in the end."""


async def done(ready: Ready, work: Work | Load) -> Done:
    """Do a work or a load. Raises RuntimeError for a load where requests cannot come while others run."""
    if isinstance(work, Load):
        if ready.ask is None:
            raise RuntimeError("it takes no request while others run")
        if work.setting:
            if ready.configure is None:
                raise RuntimeError(f"it has no setting {work.setting}")
            await ready.configure(work.setting)
        return await _under_load(ready.ask, work)
    began_s = time.perf_counter()
    answers = await _closed_loop(ready.ask, work) if ready.ask else _in_batches(ready.batch, work)
    return Done.of(answers, time.perf_counter() - began_s)


async def _closed_loop(ask: Ask, work: Work) -> list[Answer]:
    prompts = iter(work.prompts)
    answers: list[Answer] = []

    async def client() -> None:
        for prompt in prompts:
            answer = Answer()
            answers.append(answer)
            await ask(prompt, work.output_tokens, answer)

    await asyncio.gather(*(client() for _ in range(work.clients)))
    return answers


def _in_batches(batch: Batch | None, work: Work) -> list[Answer]:
    answers: list[Answer] = []
    for prompts in work.batches():
        each = [Answer() for _ in prompts]
        if batch:
            batch(prompts, work.output_tokens, each)
        answers += each
    return answers


async def _under_load(ask: Ask, load: Load) -> Done:
    """A prompt counts by the share of the time from sending it to its first token that lies within the seconds seen."""
    drawn = random.Random(0)
    streams: list[Answer] = []
    longs: list[Answer] = []
    reading: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def stream() -> None:
        while True:
            streams.append(Answer())
            await ask(_ids(drawn, load.stream_prompt_tokens), load.answer_tokens, streams[-1])

    async def read_long_prompts() -> None:
        nonlocal reading
        while True:
            longs.append(Answer())
            reading = asyncio.ensure_future(ask(_ids(drawn, load.prompt_tokens), 1, longs[-1]))
            await reading
            await asyncio.sleep(max(0.0, load.every_s - (time.perf_counter() - longs[-1].sent_s)))

    tasks = [asyncio.ensure_future(stream()) for _ in range(load.streams)]
    tasks.append(asyncio.ensure_future(read_long_prompts()))
    began_s = time.perf_counter() + load.warm_up_s
    ended_s = began_s + load.seconds
    await asyncio.wait(tasks, timeout=ended_s - time.perf_counter(), return_when=asyncio.FIRST_EXCEPTION)
    await asyncio.wait([*tasks, reading], return_when=asyncio.FIRST_COMPLETED)  # how far it is by now shows at its end
    for task in tasks:
        task.cancel()
    failed = [each for each in await asyncio.gather(*tasks, return_exceptions=True) if isinstance(each, Exception)]
    if failed:
        raise failed[0]
    gaps = [
        second - first
        for answer in streams
        for first, second in pairwise(answer.arrivals)
        if began_s <= second < ended_s
    ]
    first_s = [answer.arrivals[0] - answer.sent_s for answer in longs if answer.arrivals and answer.sent_s >= began_s]
    read = sum(
        max(0.0, min(answer.arrivals[0], ended_s) - max(answer.sent_s, began_s))
        / (answer.arrivals[0] - answer.sent_s)
        * load.prompt_tokens
        for answer in longs
        if answer.arrivals
    )
    return Done(len(gaps), load.seconds, tuple(first_s), tuple(gaps), read)


class Stepper:
    """Makes an `Ask` of an engine that computes one step for all its requests when it is called.

    add: takes a prompt, a number of tokens and what to call with the tokens that arrive, and returns what cancels the
    request; that is whole when as many arrived as were asked for.  step: computes one.
    """

    def __init__(self, add: Callable[[Prompt, int, Arrived], Callable[[], object]], step: Callable[[], None]) -> None:
        self._add, self._step = add, step
        self._waiting: set[asyncio.Future[None]] = set()
        self._steps: asyncio.Task[None] | None = None

    async def ask(self, prompt: Prompt, tokens: int, answer: Answer) -> None:
        """An `Ask`."""
        whole: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def arrived(count: int) -> None:
            answer.arrived(count)
            if answer.tokens >= tokens and not whole.done():
                whole.set_result(None)

        cancel = self._add(prompt, tokens, arrived)
        self._waiting.add(whole)
        if self._steps is None or self._steps.done():
            self._steps = asyncio.ensure_future(self._run())
        try:
            await whole
        except asyncio.CancelledError:
            cancel()
            raise
        finally:
            self._waiting.discard(whole)

    async def _run(self) -> None:
        """Step while requests wait. What goes wrong is each request's error."""
        try:
            while self._waiting:
                self._step()
                await asyncio.sleep(0)
        except Exception as error:
            for whole in self._waiting:
                if not whole.done():
                    whole.set_exception(error)


def serve(loaded: Loaded, packages: Sequence[str] = ()) -> None:
    """Be a runner: load the model; then work until standard input ends.

    Whatever the engine prints goes to standard error. packages: those whose versions are reported.
    """
    answers = _take_stdout()

    async def run() -> None:
        async with loaded(Given.from_arguments(sys.argv[1:])) as ready:
            versions = {package: version(package) for package in packages} | ready.versions
            _say(answers, {"about": asdict(About(ready.precision, versions))})
            while line := await asyncio.to_thread(sys.stdin.readline):
                _say(answers, asdict(await done(ready, work_or_load(line))))

    try:
        asyncio.run(run())
    except Exception as error:
        with suppress(BrokenPipeError):
            _say(answers, {"error": f"{type(error).__name__}: {error}"})
        raise


def _take_stdout() -> TextIO:
    """The real standard output; from here on, file descriptor 1 is standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def _say(answers: TextIO, what: Any) -> None:
    answers.write(json.dumps(what) + "\n")
    answers.flush()


_SHORT = {"bfloat16": "bf16", "float32": "f32", "float16": "f16"}


def precision_of_dtype(name: str) -> str:
    """That of a type as torch calls it, "bfloat16" or "torch.bfloat16"."""
    name = name.removeprefix("torch.")
    return _SHORT.get(name, name)


def precision_of_openvino(weights: str, inference: str, cpuinfo: str) -> str:
    """OpenVINO's. inference: its INFERENCE_PRECISION_HINT.

    By default it rounds rows of float32 to 8 bits for weights that have 8, where the CPU has VNNI; else it makes
    weights into what rows are.
    """
    return "int8" if (weights, inference) == ("int8", "f32") and "vnni" in cpuinfo else inference
