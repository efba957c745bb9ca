"""Requests that tell a story: a busy table with clients and models, an answer that moved, one that was cut."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from engine.errors import ErrorInfo
from engine.requests.history import RequestDetail, RequestText, TokenBatch, WorkerSpan
from engine.snapshot import RequestRow, Snapshot
from tests.fakes import scenes

CLIENTS = ("alice", "bob", "batch-7", "")


def busy(live: int = 17, finished: int = 40) -> Snapshot:
    """The busy dashboard's requests, with who asked when, and for which model."""
    rows = [
        msgspec.structs.replace(
            row,
            order=1000 - index,
            created_at=scenes.NOW - row.age_s - (index * 1.7 if row.state == "finished" else 0.0),
            client=CLIENTS[index % 4],
            model="NeuralHermes-7B" if index % 3 else "",
        )
        for index, row in enumerate(scenes.requests(live, finished))
    ]
    return scenes.busy(requests=tuple(rows))


def moved(**changes: Any) -> RequestDetail:
    """An answer that began on w0, which died, waited, and went on on w1 with a long pause in the middle."""
    row = RequestRow(
        id="chatcmpl-7f3a",
        source="api",
        state="decode",
        worker="w1",
        prompt_tokens=812,
        computed_tokens=812,
        cached_tokens=256,
        output_tokens=204,
        max_tokens=512,
        age_s=6.4,
        queued_s=0.42,
        ttft_s=0.96,
        itl_s=0.0267,
        tokens_per_s=37.5,
        model="NeuralHermes-7B",
        client="alice",
        order=987,
        created_at=scenes.NOW - 6.4,
    )
    first = [_burst(0.96 + 0.014 * index) for index in range(90)]
    second = [_burst(3.4 + 0.02 * index + 0.004 * math.sin(index)) for index in range(60)]
    third = [_burst(5.3 + 0.02 * index) for index in range(54)]
    values: dict[str, Any] = {
        "row": row,
        "adapter": "poet",
        "sampling": {"temperature": 0.7, "top_p": 0.9, "seed": 42, "max_tokens": 512, "stop": "1 string"},
        "stays": (
            WorkerSpan(worker="w0", since_s=0.42, until_s=2.22, lost=True),
            WorkerSpan(worker="w1", since_s=2.6),
        ),
        "bursts": (*first, *second, *third),
    }
    return RequestDetail(**(values | changes))


def failed() -> RequestDetail:
    """It never got a token."""
    row = RequestRow(
        id="chatcmpl-0bad",
        source="api",
        state="finished",
        finish="error",
        prompt_tokens=90,
        age_s=2.5,
        queued_s=2.5,
        max_tokens=64,
        order=12,
        created_at=scenes.NOW - 60,
        error=ErrorInfo(
            code="worker_failed",
            message="the request failed: 3 workers crashed while running it. Last: worker w1 was killed",
        ),
    )
    lost = ((0.3, 0.9), (1.3, 1.9), (2.0, 2.5))
    stays = tuple(
        WorkerSpan(worker=f"w{index}", since_s=since, until_s=until, lost=True)
        for index, (since, until) in enumerate(lost)
    )
    return RequestDetail(row=row, stays=stays, bursts=())


def with_text() -> RequestDetail:
    """One whose text the operator may read."""
    said = RequestText(
        prompt="<s>user\nWhat is [b]max_prompts[/b]?", answer="How many requests a worker works on at once."
    )
    return moved(text=said, texts=True)


def _burst(at: float) -> TokenBatch:
    return TokenBatch(since_s=at, until_s=at, tokens=1)
