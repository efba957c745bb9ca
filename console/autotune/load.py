"""Clients that ask one request after the other while settings are tried, and what they see of the answers."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from console.autotune.mix import Mix
from console.autotune.record import Sample, Slice, Slo
from engine.config import SamplingParams
from engine.engine import Engine, GenerateRequest
from engine.errors import EngineError, ErrorInfo, WorkerFailed, from_info
from engine.stream import RequestStream

SOURCE = "autotune"
BEHIND_OTHERS = -100
"""The priority of our requests: whoever else asks goes first."""
SLICES = 4
FEWEST_FIRST_TOKENS = 2
LONGEST = 3
"""Times its length that a window may take to see that many, where the SLO asks for first tokens."""
_WAIT_S = 0.2
OWN_TOKENS = 4
"""That a question of a trace begins with in place of its own: the prefix cache must find nothing of the last time."""


@dataclass(slots=True)
class Meter:
    """What came in a slice. since: when the setting had settled; of requests before that, first tokens do not count."""

    slo: Slo
    since: float
    began: float
    tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)
    judged: int = 0
    kept: int = 0

    def cut(self, now: float) -> Slice:
        """The slice that ends now; another begins."""
        found = Slice(
            seconds=now - self.began,
            tokens=self.tokens,
            ttft_s=self.ttft_s,
            itl_s=self.itl_s,
            judged=self.judged,
            kept=self.kept,
        )
        self.began, self.tokens, self.judged, self.kept = now, 0, 0, 0
        self.ttft_s, self.itl_s = [], []
        return found

    def came(self, asked: float, last: float | None, now: float, tokens: int, gaps: Sequence[float]) -> None:
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
        in_time = self.slo.ttft_s is None or first - asked <= self.slo.ttft_s
        self.judged += 1
        self.kept += in_time and (self.slo.itl_s is None or itl_s <= self.slo.itl_s)


class Load:
    """Clients on the engine's loop. model: whom they ask.  ids: what prompts are made of."""

    def __init__(self, engine: Engine, model: str, mix: Mix, slo: Slo, ids: Sequence[int], *, seed: int = 0) -> None:
        self._engine = engine
        self._model = model
        self._mix = mix
        self._ids = ids
        self._draw = random.Random(seed)
        self._number = 0
        self._clients: list[asyncio.Task[None]] = []
        self._error: ErrorInfo | None = None
        self._meter = Meter(slo, time.perf_counter(), time.perf_counter())

    async def set_clients(self, count: int) -> None:
        """From now on so many; those that are too many leave, and take back what they asked."""
        leaving, self._clients = self._clients[count:], self._clients[:count]
        for client in leaving:
            client.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        self._clients += [asyncio.create_task(self._ask_on()) for _ in range(count - len(self._clients))]

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
            raise from_info(self._error) if self._error else WorkerFailed("no request was answered within the window")
        return Sample(slices=tuple(slices))

    async def _ask_on(self) -> None:
        """One client: asks again once it is answered, and a little later after an error.

        It begins in the middle of an answer, as it were: clients that come together would end together, time and again,
        and a window would measure the wave that it happens to see.
        """
        share = 1.0 - self._draw.random()
        while True:
            try:
                await self._engine.serving(self._model)
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
                self._meter.came(asked, last, now, len(delta.token_ids), delta.gaps)
                first, last = first or now, now
                gaps += delta.gaps
            if delta.error is not None:
                raise from_info(delta.error)
        if first is not None:
            self._meter.ended(asked, first, gaps)

    def _request(self, share: float) -> GenerateRequest:
        """The next one, with a prompt that no other begins like. share: of the answer that the mix has for it."""
        prompt_tokens, output_tokens = self._mix.of(self._number)
        said = self._mix.says(self._number)
        self._number += 1
        drawn = self._draw.choices(self._ids, k=prompt_tokens)
        return GenerateRequest(
            prompt_ids=drawn if said is None else [*drawn[:OWN_TOKENS], *said[OWN_TOKENS:]],
            params=SamplingParams(
                temperature=0.0, max_tokens=math.ceil(share * output_tokens), ignore_eos=True, seed=0
            ),
            source=SOURCE,
            client=SOURCE,
            priority=BEHIND_OTHERS,
            timeout_s=0,
            model=self._model,
        )


def _few(slices: Sequence[Slice]) -> bool:
    return sum(len(each.ttft_s) for each in slices) < FEWEST_FIRST_TOKENS
