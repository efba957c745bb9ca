"""What a load took of each GPU. Pure: integers in and out."""

from __future__ import annotations

from collections.abc import Mapping

from engine.config import DeviceShare


def device_shares(
    taken_bytes: Mapping[int, int], layers: Mapping[int, int], kv_bytes: Mapping[int, int], weights_bytes: int
) -> tuple[DeviceShare, ...]:
    """The shares of the GPUs that `taken_bytes` names, which is what each has less of since the load began.

    layers, kv_bytes: of the main model, and of all caches, by GPU.  weights_bytes: of all GPUs together; they are
    shared out by layers, as the library does not say, and what else was taken is working memory. So the sum of a share
    is measured, and for a model on one GPU each of its parts is exact.
    """
    all_layers = sum(layers.values()) or 1
    shares = []
    for number, taken in sorted(taken_bytes.items()):
        weights, kv = weights_bytes * layers.get(number, 0) // all_layers, kv_bytes.get(number, 0)
        shares.append(
            DeviceShare(
                device=f"cuda:{number}",
                layers=layers.get(number, 0),
                weights_bytes=weights,
                kv_bytes=kv,
                working_bytes=max(0, taken - weights - kv),
            )
        )
    return tuple(shares)
