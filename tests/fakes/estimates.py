"""What loads would take, as the engine foretells it: one that fits, one that does not."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.config import DeviceShare
from engine.placement.estimate import DeviceEstimate, Estimate
from engine.placement.plan import Placement
from tests.fakes.scenes import GIB, MIB


def estimate(**changes: Any) -> Estimate:
    """What loading a 7B model on two cards would take: it fits."""
    per_device: dict[str, Any] = {
        "name": "NVIDIA GeForce RTX 3090",
        "kind": "cuda",
        "total_bytes": 24 * GIB,
        "weights_bytes": int(9.4 * GIB),
        "kv_bytes": int(6.1 * GIB),
        "working_bytes": int(1.2 * GIB),
        "others_bytes": int(1.5 * GIB),
        "headroom_bytes": int(0.2 * GIB),
        "free_bytes": int(5.6 * GIB),
        "short_bytes": 0,
    }
    share = DeviceShare(
        device="cuda:0", layers=32, weights_bytes=int(9.4 * GIB), kv_bytes=int(6.1 * GIB), working_bytes=int(1.2 * GIB)
    )
    values: dict[str, Any] = {
        "model": "NeuralHermes-7B",
        "backend": "torch",
        "dtype": "bfloat16",
        "weights": "auto",
        "cache_bits": 16,
        "context_tokens": 8192,
        "workers": 2,
        "max_prompts": 8,
        "weights_bytes": int(9.4 * GIB),
        "kv_token_bytes": 131_072,
        "devices": tuple(DeviceEstimate(id=f"cuda:{index}", **per_device) for index in range(2)),
        "placements": tuple(
            Placement(shares=(msgspec.structs.replace(share, device=f"cuda:{index}"),), kv_tokens=65_536)
            for index in range(2)
        ),
        "fits": True,
        "verdict": "Fits: 2 workers, KV cache for 65,536 tokens each.",
    }
    return Estimate(**(values | changes))


def estimate_that_lacks() -> Estimate:
    """The same on cards that are too full."""
    roomy, full = estimate().devices
    full = msgspec.structs.replace(full, others_bytes=int(9.6 * GIB), free_bytes=0, short_bytes=2310 * MIB)
    verdict = (
        "Does not fit: cuda:1: needed 17,101 MiB (weights 9,626 MiB, KV pages 6,246 MiB, working memory 1,229 MiB) "
        "plus 205 MiB kept free, and 14,996 MiB are free: short by 2,310 MiB."
    )
    return estimate(devices=(roomy, full), fits=False, verdict=verdict)


def estimate_for_eight() -> Estimate:
    """Eight workers on eight cards, the last of which is too full."""
    card, full = estimate_that_lacks().devices
    share = estimate().placements[0].shares[0]
    devices = tuple(msgspec.structs.replace(card, id=f"cuda:{index}") for index in range(7))
    placements = tuple(
        Placement(shares=(msgspec.structs.replace(share, device=f"cuda:{index}"),), kv_tokens=65_536)
        for index in range(7)
    )
    return estimate(
        workers=8,
        devices=(*devices, msgspec.structs.replace(full, id="cuda:7")),
        placements=placements,
        fits=False,
        verdict="Does not fit: cuda:7: needed 17,101 MiB, and 14,996 MiB are free: short by 2,310 MiB.",
    )
