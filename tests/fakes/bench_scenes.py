"""Results of benches, and one under way: numbers that pictures can be taken of."""

from __future__ import annotations

from typing import Any

import msgspec

from console.bench.kinds.grid import Grid
from console.bench.kinds.users import Users
from console.bench.result import BenchProgress, BenchResult, MachineInfo, Row, TargetInfo, Versions
from console.link.benches import BenchReport

MODEL = "NeuralHermes-7B"
_USERS = {1: (1.21, 1.18, 1.30), 2: (1.34, 1.31, 1.52), 4: (1.62, 1.55, 1.71)}
_GRID = {(1, 8): 402.0, (1, 16): 611.0, (2, 8): 790.0, (2, 16): 1148.0}


def users(factor: float = 1.0, **changed: Any) -> BenchResult:
    """Of `bench users`, three repeats. factor: of all response times."""
    rows = tuple(
        Row(
            keys={"users": users},
            values={
                "response_s": [factor * value for value in values],
                "to_one_user": [value / _USERS[1][at] for at, value in enumerate(values)],
                "request_throughput": [users / (factor * value) for value in values],
                "output_throughput": [128 * users / (factor * value) for value in values],
                "mean_ttft_ms": [90.0 * users] * 3,
                "p99_e2el_ms": [1400.0 * factor * value for value in values],
            },
        )
        for users, values in _USERS.items()
    )
    settings = {"num_workers": 2, "max_prompts": 16, "requests": 64, "prompt_tokens": "128", "output_tokens": "128"}
    return _result(Users, rows, settings, **changed)


def grid(**changed: Any) -> BenchResult:
    """Of `bench grid`, one repeat."""
    rows = tuple(
        Row(
            keys={"workers": workers, "max_prompts": prompts},
            values={"output_throughput": [rate], "median_ttft_ms": [310.0], "median_itl_ms": [21.0]},
        )
        for (workers, prompts), rate in _GRID.items()
    )
    return _result(Grid, rows, {"num_workers": 2, "max_prompts": 16, "requests": 128}, **changed)


def _result(plan: type[Users | Grid], measured: tuple[Row, ...], told: dict[str, Any], **changed: Any) -> BenchResult:
    base = BenchResult(
        name=plan.name,
        started="2026-05-29T14:02:11+00:00",
        duration_s=214.0,
        machine=MachineInfo(cpu="AMD EPYC", cores=16, ram_bytes=1 << 36),
        versions=Versions(ericllm="0.1.0", python="3.11.7", torch="2.13.0"),
        target=TargetInfo(kind="engine", model=MODEL, backend="torch", dtype="bfloat16"),
        settings=told,
        seeds=[0],
        keys=plan.keys,
        columns=plan.columns,
        rows=measured,
        published=plan.published,
    )
    return msgspec.structs.replace(base, **changed)


def results() -> dict[int, BenchResult]:
    """What a machine remembers, by number."""
    return {
        1: users(started="2026-05-28T09:15:00+00:00"),
        2: grid(started="2026-05-28T17:40:00+00:00"),
        3: users(0.7, started="2026-05-29T08:05:00+00:00"),
        4: users(started="2026-05-29T11:30:00+00:00", rows=users().rows[:2], complete=False, duration_s=71.0),
    }


def running(rows: int = 2, **changed: Any) -> BenchReport:
    """`bench users` in its second repeat."""
    found = users()
    progress = BenchProgress(
        bench="users",
        doing="users 4",
        repeat=1,
        repeats=3,
        done=621,
        total=1344,
        elapsed_s=98.0,
        left_s=115.0,
        keys=found.keys,
        columns=found.columns,
        rows=found.rows[:rows],
    )
    report = BenchReport(state="running", bench="users", model=MODEL, progress=progress)
    return msgspec.structs.replace(report, **changed)
