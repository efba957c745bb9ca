"""How much of the machine a rate uses: arithmetic and bytes that a generated token takes in a closed loop."""

from __future__ import annotations

import math
from typing import NamedTuple

from engine.snapshot import DeviceLimits
from tools.benchmarks.protocol import OUTPUT_TOKENS
from tools.synthetic_models import synthetic_config, tensor_shapes

_KV_BYTES = 2


class Share(NamedTuple):
    """Of a limit: "arithmetic" or "bandwidth"."""

    share: float
    limit: str


def linear_flops(shape: str, tokens: int) -> float:
    """Operations of the linear layers for a prompt of `tokens` tokens; the output head sees the last alone."""
    inner, head = _weights(shape)
    return 2.0 * (inner * tokens + head)


def share_of_limits(
    shape: str, bits: int, clients: int, prompt_tokens: int, rate: float, limits: DeviceLimits
) -> Share:
    """The larger of two shares, at `rate` generated tokens per second: of the peak of products (that of 16 bits, of
    which there is no other measurement for fewer), and of the rate at which memory is read.

    A token takes the linear layers, the head and attention over what stands before it, and its share of the same for
    the prompt; it reads its share of the weights, once for each step of all clients, and its own keys and values.
    Weights that stay in a cache are counted as read.
    """
    config = synthetic_config(shape)
    heads, kv_heads, layers = (
        int(str(config[key])) for key in ("num_attention_heads", "num_key_value_heads", "num_hidden_layers")
    )
    head_dim = int(str(config["hidden_size"])) // heads
    inner, head = _weights(shape)
    context = prompt_tokens + OUTPUT_TOKENS / 2
    attention = 4.0 * layers * heads * head_dim
    prompt_flops = linear_flops(shape, prompt_tokens) + attention * prompt_tokens**2 / 2
    flops = 2.0 * (inner + head) + attention * context + prompt_flops / OUTPUT_TOKENS
    read = (inner + head) * bits / 8 / clients + 2.0 * layers * kv_heads * head_dim * _KV_BYTES * context
    peak = (limits.flops_32bit_per_s if bits == 32 else limits.flops_16bit_per_s) or math.inf
    shares = (
        Share(rate * flops / peak, "arithmetic"),
        Share(rate * read / (limits.bytes_per_s or math.inf), "bandwidth"),
    )
    return max(shares, key=lambda each: each.share)


def _weights(shape: str) -> tuple[int, int]:
    """Weights of the layers' matrices, and those of the output head."""
    sizes = tensor_shapes(synthetic_config(shape))
    inner = sum(
        rows * columns for name, (rows, *rest) in sizes.items() if ".layers." in name and rest for columns in rest
    )
    head_rows, hidden = sizes["model.embed_tokens.weight"]
    return inner, head_rows * hidden
