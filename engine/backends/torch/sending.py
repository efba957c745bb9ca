"""Small tensors that the host makes for the sampler, on their way to where the logits are."""

from __future__ import annotations

import torch
from torch import Tensor


def sent(values: Tensor, device: torch.device) -> Tensor:
    """`values`, which are in no pinned memory, on `device`: the driver has taken them when this returns, so that they
    may be changed, and nothing waits for the work that the device has before them."""
    return values.to(device, non_blocking=True)
