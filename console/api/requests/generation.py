"""Generation: every engine request behind one HTTP request. All of them are submitted, or none."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from statistics import fmean

import msgspec
from aiohttp import web

from console.api.http.errors import RequestCancelled, json_response
from console.api.http.observability import EngineWork
from console.api.requests.prompts import Prompt
from console.api.requests.served_model import ServedModel
from engine.backends.base import FinishReason, TokenLogprob
from engine.config import SamplingParams
from engine.engine import Engine, GenerateRequest, RequestStream, StreamDelta
from engine.errors import EngineError, WorkerFailed, from_info
from engine.metrics.meter import Choices
from engine.requests.causes import Cause, Why
from engine.snapshot import RequestRow

StoppedBy = str | int | None
"""A stop string, or the id of a stop token, that ended an answer; None where neither did."""

MANY_LOGPROBS = 1024
"""Log-probabilities of more tokens are formatted in a thread."""

_PACKED_BYTES = 8
"""Less than one log-probability of a prompt takes."""

MAX_BLOCKING_S = 0.005
"""Max time of submitting or cancelling answers of one request before other work gets its turn."""

_SEEDS = 2**64


@dataclass(slots=True)
class GeneratedAnswer:
    """One whole choice, the sum of its deltas. prompt_logprobs: packed, as in StreamDelta."""

    text: str = ""
    thinking: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: FinishReason | None = None
    stop_reason: StoppedBy = None
    prompt_logprobs: bytes = b""
    vector: bytes = b""

    @property
    def likelihood(self) -> float:
        """Mean log-probability per token, minus infinity without any."""
        return fmean(record.logprob for record in self.logprobs) if self.logprobs else -math.inf


@dataclass(slots=True)
class TokenUsage:
    """Tokens that a generation used so far. prompt: each prompt counts once, whatever its number of answers.
    thinking: those of output that are thinking."""

    prompt: int = 0
    cached: int = 0
    output: int = 0
    thinking: int = 0


class TimeSpent(msgspec.Struct, frozen=True):
    """Causes of the time of the answer that took longest; they add up to total_ms."""

    total_ms: float
    causes_ms: dict[Cause, float]


WhyField = TimeSpent | msgspec.UnsetType
"""In an answer, at the end of a stream; absent where it was not requested."""


class Generation:
    """`n` answers to each prompt, in the order prompt 0 answer 0, prompt 0 answer 1, ...

    Who submits it cancels it in the end, which ends whatever has not ended: a client that goes away at any moment
    leaves nothing running.
    client, key_name, address, program, tenant, cache_salt, priority, arrived, embed: as in GenerateRequest.
    why: the causes of its time are requested.  reports_prompt: its deltas report how far the prompts are computed.
    unloads: as in ServedModel.
    """

    def __init__(
        self,
        engine: Engine,
        request_id: str,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        n: int = 1,
        *,
        model: ServedModel,
        client: str = "",
        key_name: str = "",
        address: str = "",
        program: str = "",
        tenant: str = "",
        cache_salt: str = "",
        priority: int = 0,
        arrived: float | None = None,
        embed: bool = False,
        why: bool = False,
        reports_prompt: bool = False,
    ) -> None:
        self._engine = engine
        self.unloads = model.unloads
        movable = not _has_token_ids(params)
        single = len(prompts) * n == 1
        groups = [Choices(n) if n > 1 else None for _ in prompts]
        self._requests = [
            GenerateRequest(
                id=request_id if single else id_of_choice(request_id, i * n + choice),
                prompt_ids=prompt.ids,
                params=params_of_choice(params, choice),
                priority=priority,
                model=model.requested_name,
                key=model.key,
                adapter=model.adapter,
                client=client,
                key_name=key_name,
                address=address,
                program=program,
                tenant=tenant,
                cache_salt=cache_salt,
                shared_tokens=prompt.shared_tokens,
                encode=prompt.encode if movable else None,
                choices=groups[i],
                continues=prompt.continues,
                embed=embed,
                reports_prompt=reports_prompt,
                arrived=arrived,
                waited=model.waited,
            )
            for i, prompt in enumerate(prompts)
            for choice in range(n)
        ]
        self._n = n
        self._id = request_id
        self._model = model.name
        self._params = params
        self._eos_ids = frozenset(() if params.ignore_eos else model.tokenizer.eos_token_ids)
        self._cancel_reason: EngineError | None = None
        self._streams: list[RequestStream] = []
        self._wants_why = why
        self._read: list[int] = []
        self._output_tokens = [0] * len(self._requests)
        self._cached_tokens = [0] * len(self._requests)
        self._thinking_tokens = [0] * len(self._requests)

    async def submit(self) -> None:
        """Submit them all; hundreds of them give way to what else there is every few milliseconds.

        Raises what Engine.submit raises, and the reason where it was cancelled meanwhile; none is under way then.
        """
        requests, self._requests = self._requests, []  # the engine has them from here on
        clock = asyncio.get_running_loop().time
        until = clock() + MAX_BLOCKING_S
        try:
            for request in requests:
                if clock() > until:
                    await asyncio.sleep(0)
                    until = clock() + MAX_BLOCKING_S
                if self._cancel_reason is not None:
                    raise self._cancel_reason
                self._streams.append(self._engine.submit(request))
        except BaseException:
            self.cancel()
            raise

    def cancel(self, reason: EngineError | None = None) -> None:
        """End every answer under way; its reader gets `reason`, or RequestCancelled."""
        self._cancel_reason = reason or self._cancel_reason
        self._cancel_some(deque(self._streams))

    def _cancel_some(self, streams: deque[RequestStream]) -> None:
        """Cancel some streams, and the rest in later turns of the loop."""
        loop = asyncio.get_running_loop()
        until = loop.time() + MAX_BLOCKING_S
        while streams and loop.time() < until:
            streams.popleft().cancel()
        if streams:
            loop.call_soon(self._cancel_some, streams)

    @property
    def size(self) -> int:
        """Number of answers."""
        return len(self._output_tokens)

    @property
    def first_row(self) -> RequestRow | None:
        """The first answer's row in the request table now, until it has ended."""
        return None if self._streams[0].finished else self._engine.request_row(self._streams[0].request_id)

    @property
    def tokens(self) -> TokenUsage:
        """Tokens used so far."""
        return TokenUsage(
            prompt=sum(stream.prompt_tokens for stream in self._streams[:: self._n]),
            cached=sum(self._cached_tokens[:: self._n]),
            output=sum(self._output_tokens),
            thinking=sum(self._thinking_tokens),
        )

    @property
    def why(self) -> WhyField:
        """The causes of the time of the answer that took longest, once all are read; UNSET where not requested."""
        if not self._wants_why or len(self._read) < self.size:
            return msgspec.UNSET
        found = [stream.ledger.why(0.0) for stream in self._streams if stream.ledger is not None]
        longest = max(found, key=lambda why: why.total_s, default=Why())
        causes = {cause: round(spent * 1000, 3) for cause, spent in longest.causes.items()}
        return TimeSpent(round(longest.total_s * 1000, 3), causes)

    @property
    def work(self) -> EngineWork:
        """The engine's work of the answers that have ended."""
        ended = [stream for stream in self._streams if stream.row is not None]
        return EngineWork(
            id=self._id,
            model=self._model,
            params=self._params,
            choices=self._n,
            rows=tuple(stream.row for stream in ended if stream.row is not None),
            stays=tuple(stream.stays for stream in ended),
        )

    async def deltas(self) -> AsyncGenerator[tuple[int, StreamDelta], None]:
        """(choice, delta) as they come; raises EngineError once any answer has failed or was cancelled, or ran out of
        time where none has a token yet."""
        async with aclosing(self._merge_streams()) as merged:
            async for choice, delta in merged:
                self._output_tokens[choice] = delta.output_tokens
                self._cached_tokens[choice] = delta.cached_tokens
                self._thinking_tokens[choice] = delta.thinking_tokens
                if delta.finish is not None:
                    self._read.append(choice)
                if (failure := self._failure(delta)) is None:
                    yield choice, delta
                    continue
                if delta.text or delta.thinking or delta.token_ids:
                    yield choice, msgspec.structs.replace(delta, finish=None, error=None)
                raise failure

    async def answers(self) -> list[GeneratedAnswer]:
        """Return all whole answers; raises EngineError as `deltas` does."""
        answers = [GeneratedAnswer() for _ in self._streams]
        pieces: list[list[str]] = [[] for _ in self._streams]
        async with aclosing(self.deltas()) as deltas:
            async for choice, delta in deltas:
                pieces[choice].append(delta.text)
                answers[choice].thinking += delta.thinking
                answers[choice].token_ids += delta.token_ids
                answers[choice].logprobs.extend(delta.logprobs)
                answers[choice].finish = delta.finish
                answers[choice].stop_reason = self.stop_reason(delta)
                answers[choice].prompt_logprobs = delta.prompt_logprobs or answers[choice].prompt_logprobs
                answers[choice].vector = delta.vector
        for answer, texts in zip(answers, pieces, strict=True):
            answer.text = "".join(texts)
        return answers

    def read_to_end(self) -> None:
        """Charge the client for the time until now: it has taken the end of the stream."""
        if self._read:
            self._streams[self._read[-1]].read_to_end()

    def stop_reason(self, delta: StreamDelta) -> StoppedBy:
        """Return the stop string or token that ended the answer with this delta."""
        if delta.finish != "stop" or delta.stop:
            return delta.stop or None
        last = delta.token_ids[-1] if delta.token_ids else None
        return last if last in self._params.stop_token_ids and last not in self._eos_ids else None

    def _failure(self, delta: StreamDelta) -> EngineError | None:
        """Return the error for the reader of an answer that did not end by itself."""
        match delta.finish:
            case "cancelled":
                return self._cancel_reason or RequestCancelled(
                    "The request was cancelled by the operator of this server"
                )
            case "timeout" if delta.error is not None and not any(self._output_tokens):
                return from_info(delta.error)
            case "error":
                unknown = WorkerFailed("The request failed for an unknown reason")
                return from_info(delta.error) if delta.error is not None else unknown
            case _:
                return None

    async def _merge_streams(self) -> AsyncGenerator[tuple[int, StreamDelta], None]:
        if len(self._streams) == 1:
            async for delta in self._streams[0]:
                yield 0, delta
            return
        waiting = {_next_delta(stream): choice for choice, stream in enumerate(self._streams)}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=waiting.__getitem__):
                    choice, delta = waiting.pop(task), task.result()
                    yield choice, delta
                    if delta.finish is None:
                        waiting[_next_delta(self._streams[choice])] = choice
        finally:
            for task in waiting:
                task.cancel()


async def respond(answers: Sequence[GeneratedAnswer], shape: Callable[[], object], model: ServedModel) -> web.Response:
    """Return the response that `shape` makes of answers, made in a thread where it has many log-probabilities."""
    logprobs = sum(len(answer.prompt_logprobs) // _PACKED_BYTES + len(answer.logprobs) for answer in answers)
    many = logprobs > MANY_LOGPROBS
    return await model.offload(lambda: json_response(shape())) if many else json_response(shape())


def best_of_each(answers: Sequence[GeneratedAnswer], generated: int, returned: int) -> list[GeneratedAnswer]:
    """Return the `returned` likeliest of every `generated` answers, which are those to one prompt, best first."""
    if generated == returned:
        return list(answers)
    return [
        answer
        for first in range(0, len(answers), generated)
        for answer in sorted(answers[first : first + generated], key=lambda answer: -answer.likelihood)[:returned]
    ]


def id_of_choice(answer_id: str, choice: int) -> str:
    """Return the id of one of several requests of an answer, counted from 0."""
    return f"{answer_id}-{choice}"


def _next_delta(stream: RequestStream) -> asyncio.Future[StreamDelta]:
    return asyncio.ensure_future(stream.__anext__())


def params_of_choice(params: SamplingParams, choice: int) -> SamplingParams:
    """Return the parameters of one answer: those to one prompt differ by their seed, which wraps around at 64 bits."""
    if params.seed is None or choice == 0:
        return params
    seed = (params.seed + choice + _SEEDS // 2) % _SEEDS - _SEEDS // 2
    return msgspec.structs.replace(params, seed=seed)


def _has_token_ids(params: SamplingParams) -> bool:
    """Return whether parameters name token ids, or ask for some, so that they mean nothing to another model."""
    return params.prompt_logprobs is not None or bool(
        params.logit_bias
        or params.stop_token_ids
        or params.dry_breaker_ids
        or params.negative_prompt_ids
        or params.shown_token_ids
    )
