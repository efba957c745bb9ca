"""LayerOps: what a layer computes between its products, in few launches of Triton kernels.

Every result is what the plain operations of `model/` compute, rounded where those round. Nothing waits for the device,
so all of it can be recorded as CUDA graphs. Not yet run on a GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from engine.backends.common.model_config import Activation
from engine.backends.torch.model.rope import rotate_
from engine.backends.triton_launch import (
    Kernels,
    cdiv,
    claim_triton_cache,
    is_interpreted,
    kernels_problem,
    power_of_two,
)

MAX_NORM_WIDTH = 16384
"""Numbers of a row that one program norms."""

DTYPES = (torch.float16, torch.bfloat16)

_GATE_BLOCK = 1024
_HEADS_AT_ONCE = 8


class HeadNormWeight(NamedTuple):
    """Norm per head. kind: "rms", which rounds before the weight too, or "rms_plus_one".  weight: [heads + kv_heads,
    head_dim]."""

    kind: str
    weight: Tensor
    epsilon: float


class LayerOps:
    """The Triton kernels on `device`, for tensors of DTYPES; a CPU where they are interpreted."""

    def __init__(self, device: torch.device) -> None:
        """Import them. Raises ImportError without Triton, OSError where what it compiles cannot be kept from other
        users."""
        claim_triton_cache()
        self._layer: Final[ModuleType] = importlib.import_module("engine.backends.torch.cuda.layer_kernels")
        self.moe: Final[ModuleType] = importlib.import_module("engine.backends.torch.cuda.moe_kernels")
        self.kernels: Final = Kernels(device)
        self.interpreted: Final = is_interpreted(self._layer.gate_kernel)
        self.device: Final = device

    def activate_gate(self, both: Tensor, activation: Activation) -> Tensor:
        """Return activation(gate) * up [rows, inner] of `both` [rows, 2 * inner], gate first; dense."""
        rows, inner = both.shape[0], both.shape[1] // 2
        out = torch.empty((rows, inner), dtype=both.dtype, device=both.device)
        if rows:
            key = ("gate", inner, both.dtype, activation)
            kernel = self.kernels.get(key) or self.kernels.add(
                key,
                self._layer.gate_kernel,
                (both, out),
                numbers=(inner,),
                constants={"activation": activation, "block": _GATE_BLOCK},
            )
            kernel((rows, cdiv(inner, _GATE_BLOCK)), both, out)
        return out

    def add_norm(self, hidden: Tensor, added: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Add `added` to `hidden` [rows, width <= MAX_NORM_WIDTH] in place, and return the RMS norm of the sum times
        `weight` [width]; all dense."""
        rows, width = hidden.shape
        out = torch.empty_like(hidden)
        if rows:
            key = ("add_norm", width, epsilon, hidden.dtype, weight.dtype)
            kernel = self.kernels.get(key) or self.kernels.add(
                key,
                self._layer.add_norm_kernel,
                (hidden, added, weight, out),
                numbers=(width, epsilon),
                constants={"block": power_of_two(width), "num_warps": 4 if width <= 4096 else 8},
            )
            kernel((rows, 1), hidden, added, weight, out)
        return out

    def rotate_and_write(
        self,
        qkv: Tensor,
        heads: int,
        norm: HeadNormWeight | None,
        angles: tuple[Tensor, Tensor] | None,
        pages: Tensor,
        slots: Tensor,
    ) -> None:
        """Norm and rotate the queries of `qkv` [rows, heads + 2 * kv_heads, head_dim] in place, and write its keys,
        normed and rotated, and its values to `slots` [rows] of `pages` [pages, page_tokens, 2 * kv_heads, head_dim];
        all dense. Its own keys and values stay as they are."""
        rows, all_heads, head_dim = qkv.shape
        if not rows:
            return
        cos, sin = angles if angles is not None else (qkv, qkv)
        rotated = cos.shape[-1] if angles is not None else head_dim
        weight, kind, epsilon = (norm.weight, norm.kind, norm.epsilon) if norm is not None else (qkv, "", 0.0)
        tensors = qkv, cos, sin, weight, slots, pages
        key = ("rotate", all_heads, heads, head_dim, rotated, angles is None, kind, epsilon, qkv.dtype, weight.dtype)
        kernel = self.kernels.get(key) or self.kernels.add(
            key,
            self._layer.rotate_and_write_kernel,
            tensors,
            numbers=(epsilon,),
            constants={
                "heads": heads,
                "kv_heads": (all_heads - heads) // 2,
                "head_dim": head_dim,
                "rotated": rotated,
                "rotates": angles is not None,
                "norm": kind,
                "block_h": _HEADS_AT_ONCE,
                "block_d": power_of_two(rotated // 2),
                "block_r": power_of_two(head_dim - rotated) if rotated < head_dim else 0,
                "num_warps": 4,
            },
        )
        kernel((rows, cdiv(all_heads, _HEADS_AT_ONCE)), *tensors)


# Whether they can be used.

_TRIAL_WIDTH = 128
_TOLERANCE = 0.03
"""Of the largest number: a few roundings to bfloat16, which Triton's interpreter cuts off."""


def layer_ops_problem(
    devices: Sequence[torch.device],
    dtype: torch.dtype,
    activation: Activation,
    head_norm: str = "",
    rotary_fraction: float = 1.0,
) -> str:
    """Return why the kernels cannot compute in `dtype` on `devices`, as a clause; "" where they can.

    They are compiled and tried there on small tensors. head_norm: kind of a model's norm per head, see
    `HeadNormWeight`; "" for none.  rotary_fraction: of each head. Raises where a device is lost.
    """
    if dtype not in DTYPES:
        return f"they do not compute in {str(dtype).removeprefix('torch.')}"
    return kernels_problem(
        devices, "they", lambda device: _trial(LayerOps(device), dtype, activation, head_norm, rotary_fraction)
    )


def _trial(ops: LayerOps, dtype: torch.dtype, activation: Activation, head_norm: str, rotary_fraction: float) -> str:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    rows, width, heads, kv_heads, size = 3, _TRIAL_WIDTH, 4, 2, 64
    both, hidden, added, weight = random(rows, 2 * width), random(rows, width), random(rows, width), random(width)
    if differ(ops.activate_gate(both.to(ops.device), activation), gated(both.float(), activation)):
        return "gates differ from torch's"
    expected, total = hidden.float() + added.float(), hidden.to(ops.device)
    normed = ops.add_norm(total, added.to(ops.device), weight.to(ops.device), 1e-6)
    if differ(total, expected) or differ(normed, F.rms_norm(expected, (width,), weight.float(), 1e-6)):
        return "norms differ from torch's"
    half = max(1, int(size * rotary_fraction) // 2)
    qkv, cos, sin = random(rows, heads + 2 * kv_heads, size), random(rows, 1, half), random(rows, 1, half)
    cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    norm, turned = None, qkv.float()
    if head_norm:
        of_heads = random(heads + kv_heads, size)
        of_heads = of_heads if head_norm == "rms" else of_heads.float()
        norm = HeadNormWeight(head_norm, of_heads.to(ops.device), 1e-6)
        turned[:, : heads + kv_heads] = F.rms_norm(turned[:, : heads + kv_heads], (size,), eps=1e-6) * of_heads.float()
    rotate_(turned[:, : heads + kv_heads], cos.float(), sin.float())
    found, pages = qkv.to(ops.device), torch.zeros(1, rows, 2 * kv_heads, size, dtype=dtype, device=ops.device)
    angles = (cos.to(ops.device), sin.to(ops.device))
    ops.rotate_and_write(found, heads, norm, angles, pages, torch.arange(rows, device=ops.device))
    if differ(found[:, :heads], turned[:, :heads]) or differ(pages[0], turned[:, heads:]):
        return "rotated heads differ from torch's"
    return ""


def gated(both: Tensor, activation: Activation) -> Tensor:
    """Return activation(gate) * up of float32 `both`, by torch."""
    gate, up = both.chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up


def differ(found: Tensor, expected: Tensor) -> bool:
    """Return whether results are not those expected, float32 on the CPU, but for a few roundings."""
    error = (found.float().cpu() - expected).abs().max()
    return not float(error) <= _TOLERANCE * float(expected.abs().max())  # also where it is NaN
