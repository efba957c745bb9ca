"""Who asks during the chaos: clients whose every answer is known beforehand, token by token."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass, field

from engine.config import SamplingParams
from engine.engine import Engine, GenerateRequest, RequestStream

_CANCELLED_OF = 12
"""One request in so many is cancelled on its way."""


@dataclass(slots=True)
class Answer:
    """What came of a request."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: int = 0
    finish: str = ""
    error: str = ""


@dataclass(slots=True)
class Tally:
    """The books. wrong: one line for each answer that was not the undisturbed one."""

    ends: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)


def assortment(count: int, *, longest: int) -> list[GenerateRequest]:
    """Different requests: greedy and seeded, short and long, with log-probabilities, stop and banned strings."""
    rng = random.Random(7)
    kinds: list[dict[str, object]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_p": 0.95},
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 1.2, "stop": ("qu", "zz", "the")},
        {"temperature": 0.0, "banned_strings": ("ee", "st", "a")},
        {"temperature": 0.8, "logprobs": 0, "banned_strings": ("o",), "stop": ("xy",)},
    ]
    return [
        GenerateRequest(
            prompt_ids=list(f"{number:03d} {'x' * rng.randrange(60)}".encode()),
            params=SamplingParams(
                **kinds[number % len(kinds)],  # type: ignore[arg-type]
                seed=number,
                max_tokens=rng.randrange(1, longest),
                ignore_eos=True,
            ),
        )
        for number in range(count)
    ]


async def undisturbed(engine: Engine, requests: list[GenerateRequest]) -> list[Answer]:
    """Each answer when nothing goes wrong."""
    streams = [engine.submit(request) for request in requests]
    return [await _read(stream) for stream in streams]


async def client(
    engine: Engine, requests: list[GenerateRequest], answers: list[Answer], tally: Tally, *, until: float, seed: int
) -> None:
    """Ask one after the other until that time (of time.monotonic), and read the last to its end."""
    rng = random.Random(seed)
    while time.monotonic() < until:
        number = rng.randrange(len(requests))
        cancel_at = rng.randrange(1, 50) if rng.randrange(_CANCELLED_OF) == 0 else None
        await ask(engine, requests[number], answers[number], tally, cancel_at=cancel_at)


async def ask(
    engine: Engine, request: GenerateRequest, expected: Answer, tally: Tally, *, cancel_at: int | None
) -> None:
    """One request, compared with what is expected of it at every delta."""
    stream = engine.submit(request)
    answer = await _read(stream, cancel_at)
    tally.ends[answer.finish] += 1
    tally.tokens += len(answer.token_ids)
    whole = answer.finish != "cancelled"
    same_start = (
        answer.token_ids == expected.token_ids[: len(answer.token_ids)]
        and answer.text == expected.text[: len(answer.text)]
        and answer.logprobs == (len(answer.token_ids) if request.params.logprobs is not None else 0)
    )
    if not same_start or (whole and answer != expected):
        tally.wrong.append(_difference(request, expected, answer))


async def _read(stream: RequestStream, cancel_at: int | None = None) -> Answer:
    answer = Answer()
    async for delta in stream:
        answer.token_ids += delta.token_ids
        answer.text += delta.text
        answer.logprobs += len(delta.logprobs)
        answer.finish = delta.finish or ""
        answer.error = delta.error.message if delta.error is not None else ""
        assert delta.output_tokens == len(answer.token_ids)
        if cancel_at is not None and len(answer.token_ids) >= cancel_at:
            stream.cancel()
    return answer


def _difference(request: GenerateRequest, expected: Answer, answer: Answer) -> str:
    pairs = enumerate(zip(expected.token_ids, answer.token_ids, strict=False))
    shorter = min(len(expected.token_ids), len(answer.token_ids))
    first = next((place for place, (want, got) in pairs if want != got), shorter)
    return (
        f"{bytes(request.prompt_ids).decode()!r}: {answer.finish} {answer.error} after {len(answer.token_ids)} of "
        f"{len(expected.token_ids)} tokens ({expected.finish}); the first {first} are right; {request.params}"
    )
