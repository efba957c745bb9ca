"""Clients that ask one request after the other while settings are tried, and what they see of the answers."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from console.bench.workload import Exchange, Material, sampled, usable
from console.tuning.autotune.record import Sample, Slice
from engine.config import SamplingParams
from engine.engine import Engine, GenerateRequest
from engine.errors import EngineError, ErrorInfo, InvalidRequest, WorkerFailed, from_info
from engine.metrics.slo import Slo
from engine.requests.stream import RequestStream
from engine.simulation.lengths import Length
from engine.snapshot import Insight, Lengths

# What requests are like while settings are tried: lengths of prompts and answers, as the operator's own are. Pure.

ENOUGH_REQUESTS = 50
"""Requests that ended, from which on lengths are taken from what there was."""
DRAWN = 512
_USUAL_PROMPT, _USUAL_OUTPUT = Length.parse("64-256"), Length.parse("32-128")


class Mix(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of prompt and of answer, for one request after the other, over and over. source: where they are from.

    prompts: token ids of the prompts, in the same order; empty where that is not known.
    """

    source: str
    lengths: tuple[tuple[int, int], ...]
    prompts: tuple[tuple[int, ...], ...] = ()

    def of(self, number: int) -> tuple[int, int]:
        """Of request `number`."""
        return self.lengths[number % len(self.lengths)]

    def prompt_ids(self, number: int) -> tuple[int, ...] | None:
        """Return the prompt of request `number`; None where only its length is given."""
        return self.prompts[number % len(self.prompts)] if self.prompts else None

    def within(self, context_tokens: int) -> Mix:
        """With what does not fit a context cut: prompts to three quarters of it, and answers to what is left."""
        most = max(1, context_tokens * 3 // 4)
        cut = ((min(prompt, most), output) for prompt, output in self.lengths)
        fitting = tuple((prompt, max(1, min(output, context_tokens - prompt - 1))) for prompt, output in cut)
        prompts = tuple(ids[:prompt] for ids, (prompt, _) in zip(self.prompts, fitting, strict=bool(self.prompts)))
        return Mix(source=self.source, lengths=fitting, prompts=prompts)


def usual_mix(seed: int) -> Mix:
    """Return the mix of a model without history: short questions, short answers."""
    found = asked_mix(str(_USUAL_PROMPT), None, seed)
    assert found is not None
    return found


def asked_mix(prompt: str | None, output: str | None, seed: int) -> Mix | None:
    """Lengths as they are written for a bench: "128", "64-256", "normal:128:32"; None where neither is given, and what
    is left out is as usual. Raises InvalidRequest, its param "prompt" or "output"."""
    if prompt is None and output is None:
        return None
    prompts, outputs = _parsed(prompt, _USUAL_PROMPT, "prompt"), _parsed(output, _USUAL_OUTPUT, "output")
    draw = random.Random(seed)
    pairs = [(prompts.draw(draw), outputs.draw(draw)) for _ in range(DRAWN)]
    return Mix(source=f"prompts of {prompts} tokens, answers of {outputs}", lengths=tuple(pairs))


def mix_of_trace(exchanges: Sequence[Exchange], material: Material, context_tokens: int, seed: int) -> Mix:
    """Questions as a trace has them, and answers as long as its own. Raises InvalidRequest where none fits."""
    talks = sampled(usable(exchanges, material, context_tokens), DRAWN, seed)
    prompts = [material.of_text(talk.asked) for talk in talks]
    pairs = tuple((prompt.tokens, material.count(talk.answered)) for prompt, talk in zip(prompts, talks, strict=True))
    ids = tuple(prompt.ids for prompt in prompts)
    where = f"questions and lengths of answers as in a trace of {len(exchanges):,} exchanges"
    return Mix(source=where, lengths=pairs, prompts=ids if all(ids) else ())


def mix_of_history(insight: Insight, seed: int) -> Mix | None:
    """Lengths as those of the session were, prompts and answers each by itself; None after too few requests."""
    if min(insight.prompts.spread.count, insight.outputs.spread.count) < ENOUGH_REQUESTS:
        return None
    draw = random.Random(seed)
    prompts, outputs = _drawn(insight.prompts, draw), _drawn(insight.outputs, draw)
    source = f"lengths as of the last {insight.outputs.spread.count:,} requests"
    return Mix(source=source, lengths=tuple(zip(prompts, outputs, strict=True)))


def _drawn(lengths: Lengths, draw: random.Random) -> list[int]:
    """Evenly from within each column of the histogram; what is longer than the last is as long as the longest."""
    longest = round(lengths.spread.longest or lengths.bounds[-1])
    lowest = [0, *lengths.bounds]
    highest = [*lengths.bounds, max(longest, lengths.bounds[-1] + 1)]
    columns = draw.choices(range(len(lengths.counts)), weights=lengths.counts, k=DRAWN)
    return [
        draw.randint(lowest[column] + 1, min(highest[column], max(longest, lowest[column] + 1))) for column in columns
    ]


def _parsed(text: str | None, usual: Length, param: str) -> Length:
    found = usual if text is None else Length.parse(text, param, traced=True)
    if found.kind == "trace":
        raise InvalidRequest("lengths of a trace need --trace FILE", param=param)
    return found


SOURCE = "autotune"
BEHIND_OTHERS = -100
"""The priority of our requests: those of other clients go first."""
SLICES = 4
FEWEST_FIRST_TOKENS = 2
LONGEST = 3
"""Times its length that a window may take to see that many, where the SLO asks for first tokens."""
_WAIT_S = 0.2
OWN_TOKENS = 4
"""That a question of a trace begins with in place of its own: the prefix cache must find nothing of the last time."""


@dataclass(slots=True)
class WindowMeter:
    """Tokens and latencies of a slice. since: when the setting had settled; of requests before that, first tokens do
    not count."""

    slo: Slo
    since: float
    began: float
    tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)
    judged: int = 0
    met_slo: int = 0

    def cut(self, now: float) -> Slice:
        """The slice that ends now; another begins."""
        found = Slice(
            seconds=now - self.began,
            tokens=self.tokens,
            ttft_s=self.ttft_s,
            itl_s=self.itl_s,
            judged=self.judged,
            met_slo=self.met_slo,
        )
        self.began, self.tokens, self.judged, self.met_slo = now, 0, 0, 0
        self.ttft_s, self.itl_s = [], []
        return found

    def received(self, asked: float, last: float | None, now: float, tokens: int, gaps: Sequence[float]) -> None:
        """Tokens of a request that was sent at `asked` and last had some at `last`. gaps: seconds between them."""
        self.tokens += tokens
        if last is None and asked >= self.since:
            self.ttft_s.append(now - asked)
        if (asked if last is None else last) >= self.since:
            self.itl_s += gaps

    def ended(self, asked: float, first: float, gaps: Sequence[float]) -> None:
        """A whole answer: does it keep the SLO? gaps: seconds between its tokens."""
        if asked < self.since:
            return
        itl_s = sum(gaps) / len(gaps) if gaps else 0.0
        self.judged += 1
        self.met_slo += self.slo.is_met(first - asked, itl_s)


class LoadGenerator:
    """Clients on the engine's loop. model: whom they ask.  ids: what prompts are made of.  source: their requests'."""

    def __init__(
        self,
        engine: Engine,
        model: str,
        mix: Mix,
        slo: Slo,
        ids: Sequence[int],
        *,
        seed: int = 0,
        source: str = SOURCE,
    ) -> None:
        self._engine = engine
        self._source = source
        self._model = model
        self._mix = mix
        self._ids = ids
        self._draw = random.Random(seed)
        self._number = 0
        self._clients: list[asyncio.Task[None]] = []
        self._finishing = asyncio.Event()
        self._error: ErrorInfo | None = None
        self._meter = WindowMeter(slo, time.perf_counter(), time.perf_counter())

    async def set_clients(self, count: int) -> None:
        """Change the number of clients; those beyond it leave and cancel their requests."""
        leaving, self._clients = self._clients[count:], self._clients[:count]
        for client in leaving:
            client.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        self._clients += [asyncio.create_task(self._ask_on()) for _ in range(count - len(self._clients))]

    async def finish(self) -> None:
        """Send nothing more; returns once the last requests have ended by themselves."""
        self._finishing.set()
        await asyncio.gather(*self._clients, return_exceptions=True)

    async def measure(self, seconds: float, settle_s: float) -> Sample:
        """A window of the setting that is in use: after `settle_s`, for `seconds`, longer where answers begin seldom.

        Raises WorkerFailed where nothing is answered.
        """
        meter = self._meter
        self._error = None
        await asyncio.sleep(settle_s)
        meter.since = time.perf_counter()  # new clients all ask at once, and wait for each other
        meter.cut(meter.since)
        slices: list[Slice] = []
        longest = SLICES * LONGEST if meter.slo.ttft_s is not None else SLICES
        while len(slices) < SLICES or (_few(slices) and len(slices) < longest):
            await asyncio.sleep(seconds / SLICES)
            slices.append(meter.cut(time.perf_counter()))
        if not any(each.tokens for each in slices):
            raise from_info(self._error) if self._error else WorkerFailed("no answer within the measurement time")
        return Sample(slices=tuple(slices))

    async def _ask_on(self) -> None:
        """One client: asks again once it is answered, and a little later after an error.

        It begins in the middle of an answer, as it were: clients that come together would end together, time and again,
        and a window would measure the wave that it happens to see.
        """
        share = 1.0 - self._draw.random()
        while not self._finishing.is_set():
            try:
                await self._engine.serving(self._model)
                if self._finishing.is_set():
                    break
                async with self._engine.submit(self._request(share)) as stream:
                    await self._read(stream)
                share = 1.0
            except EngineError as error:
                self._error = error.info
                await asyncio.sleep(_WAIT_S)

    async def _read(self, stream: RequestStream) -> None:
        asked, first, last = time.perf_counter(), None, None
        gaps: list[float] = []
        async for delta in stream:
            now = time.perf_counter()
            if delta.token_ids:
                self._meter.received(asked, last, now, len(delta.token_ids), delta.gaps)
                first, last = first or now, now
                gaps += delta.gaps
            if delta.error is not None:
                raise from_info(delta.error)
        if first is not None:
            self._meter.ended(asked, first, gaps)

    def _request(self, share: float) -> GenerateRequest:
        """The next one, with a prompt that no other begins like. share: of the answer that the mix has for it."""
        prompt_tokens, output_tokens = self._mix.of(self._number)
        known_ids = self._mix.prompt_ids(self._number)
        self._number += 1
        drawn = self._draw.choices(self._ids, k=prompt_tokens)
        return GenerateRequest(
            prompt_ids=drawn if known_ids is None else [*drawn[:OWN_TOKENS], *known_ids[OWN_TOKENS:]],
            params=SamplingParams(
                temperature=0.0, max_tokens=math.ceil(share * output_tokens), ignore_eos=True, seed=0
            ),
            source=self._source,
            client=self._source,
            priority=BEHIND_OTHERS,
            timeout_s=0,
            model=self._model,
        )


def _few(slices: Sequence[Slice]) -> bool:
    return sum(len(each.ttft_s) for each in slices) < FEWEST_FIRST_TOKENS
