"""Snapshots for the Insight screen: hours of work on two GPUs, a processor that nobody measured, nothing yet."""

from __future__ import annotations

import math
from bisect import bisect_left

import msgspec

from engine.backends.base import DraftPosition
from engine.metrics.distributions import LENGTH_BOUNDS
from engine.snapshot import DeviceLimits, DeviceWork, Energy, Goodput, Insight, Lengths, Session, Snapshot, Spread
from tests.fakes import scenes


def once(tokens: int) -> Lengths:
    """One length."""
    counts = [0] * (len(LENGTH_BOUNDS) + 1)
    counts[bisect_left(LENGTH_BOUNDS, tokens)] = 1
    spread = Spread(count=1, mean=tokens, p50=tokens, p90=tokens, p99=tokens, longest=tokens)
    return Lengths(spread=spread, bounds=LENGTH_BOUNDS, counts=tuple(counts))


def lengths(middle: float, count: int, longest: float) -> Lengths:
    """Lengths around 2 ** middle tokens."""
    counts = [round(count / 2.6 * math.exp(-(((power - middle) / 1.5) ** 2))) for power in range(4, 19)]
    spread = Spread(
        count=sum(counts),
        mean=2**middle * 1.2,
        p50=2**middle,
        p90=2 ** (middle + 1.4),
        p99=2 ** (middle + 2.5),
        longest=longest,
    )
    return Lengths(spread=spread, bounds=LENGTH_BOUNDS, counts=tuple(counts))


INSIGHT = Insight(
    session=Session(
        since=scenes.NOW - 8120,
        elapsed_s=8120.0,
        busy_s=4953.0,
        requests=4120,
        output_tokens=2_611_034,
        prompt_tokens=904_220,
        steps=412_004,
        batch=6.34,
    ),
    queue=Spread(count=3951, mean=0.21, p50=0.012, p90=0.71, p99=2.31, longest=5.2),
    prefill=Spread(count=3951, mean=0.092, p50=0.081, p90=0.182, p99=0.412, longest=1.9),
    decode=Spread(count=3951, mean=6.4, p50=5.21, p90=12.8, p99=31.0, longest=64.0),
    prompts=lengths(8.3, 3951, 3421),
    outputs=lengths(9.1, 3951, 6210),
    longest_context_tokens=6904,
    configured_context_tokens=8192,
    finished={"stop": 3702, "length": 249, "cancelled": 139, "timeout": 11, "error": 19},
    goodput=Goodput(slo_ttft_s=0.5, slo_itl_s=0.05, judged=3981, within_slo=3703, per_s=3.24),
    drafts=(
        DraftPosition(drafted=100_212, accepted=82_310),
        DraftPosition(drafted=100_212, accepted=61_022),
        DraftPosition(drafted=100_212, accepted=40_441),
        DraftPosition(drafted=100_010, accepted=22_040),
    ),
    energy=Energy(
        power_w=500.0,
        session_joules=3.1e6,
        busy_joules=2.2e6,
        today_joules=4.46e6,
        rate_per_kwh=0.31,
        currency="EUR",
    ),
    work=(
        DeviceWork(
            device="cuda:0",
            flops_per_s=18.6e12,
            flops_limit_per_s=71.1e12,
            bytes_per_s=642e9,
            bytes_limit_per_s=936.1e9,
        ),
        DeviceWork(
            device="cuda:1",
            flops_per_s=9.1e12,
            flops_limit_per_s=71.1e12,
            bytes_per_s=311e9,
            bytes_limit_per_s=936.1e9,
        ),
    ),
)


def hours_of_work(**changes: object) -> Snapshot:
    """Two GPUs that guess ahead, held to an SLO."""
    return scenes.busy(insight=msgspec.structs.replace(INSIGHT, **changes))


def one_answer(*, limits: DeviceLimits | None = None) -> Snapshot:
    """The demo on a processor, after the first answer: no SLO, no power, and no limits unless they were measured."""
    spent = Spread(count=1, mean=0.31, p50=0.31, p90=0.31, p99=0.31, longest=0.31)
    seen = Insight(
        session=Session(
            since=scenes.NOW - 40, elapsed_s=40.0, busy_s=1.2, requests=1, output_tokens=60, prompt_tokens=21, batch=1.0
        ),
        queue=msgspec.structs.replace(spent, mean=0.0, p50=0.0, p90=0.0, p99=0.0, longest=0.0),
        prefill=spent,
        decode=spent,
        prompts=once(24),
        outputs=once(60),
        longest_context_tokens=84,
        configured_context_tokens=1024,
        finished={"stop": 1},
        energy=Energy(unmetered=1),
        work=(
            DeviceWork(
                device="cpu",
                flops_per_s=1.02e9,
                flops_limit_per_s=limits.flops_16bit_per_s if limits else None,
                bytes_per_s=2.4e9,
                bytes_limit_per_s=limits.bytes_per_s if limits else None,
            ),
        ),
    )
    return scenes.cpu_idle(insight=seen)
