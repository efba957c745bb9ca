"""LayerOps: what a layer computes between its products, and its experts, in few launches of Triton kernels.

Every result is what the plain operations of `model/` compute, rounded where those round. Nothing waits for the device,
so all of it can be recorded as CUDA graphs. Not yet run on a GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from engine.backends.common.families.experts import Experts
from engine.backends.common.gguf_codes import CODES_CAPABILITY, triton_problem
from engine.backends.common.model_config import Activation
from engine.backends.paged_attention.interface import claim_triton_cache
from engine.backends.torch.model.rope import rotate_
from engine.backends.torch_device import is_device_lost

MAX_NORM_WIDTH = 16384
"""Numbers of a row that one program norms."""

DTYPES = (torch.float16, torch.bfloat16)

_GATE_BLOCK = 1024
_MIX_BLOCK = 512
_ORDER_BLOCK = 1024
_HEADS_AT_ONCE = 8


class HeadNormWeight(NamedTuple):
    """Norm per head. kind: "rms", which rounds before the weight too, or "rms_plus_one".  weight: [heads + kv_heads,
    head_dim]."""

    kind: str
    weight: Tensor
    epsilon: float


class Tile(NamedTuple):
    """One program's share of the products of experts, and how Triton is to compile it."""

    block_m: int
    block_n: int = 64
    block_k: int = 64
    warps: int = 4
    stages: int = 3


def tile_for(assignments: int, experts: int) -> Tile:
    """Return the sizes: blocks about as long as an expert's share of the assignments."""
    return Tile(next((size for size in (16, 32) if size * experts >= assignments), 64))


def max_blocks(assignments: int, experts: int, block_m: int) -> int:
    """Return the most blocks that sorted assignments can have, however they fall to the experts."""
    used = min(assignments, experts)
    return used + (assignments - used) // block_m


class LayerOps:
    """The Triton kernels on `device`, for tensors of DTYPES; a CPU where they are interpreted."""

    def __init__(self, device: torch.device) -> None:
        """Import them. Raises ImportError without Triton, OSError where what it compiles cannot be kept from other
        users."""
        claim_triton_cache()
        self._layer: Final[ModuleType] = importlib.import_module("engine.backends.torch.cuda.layer_kernels")
        self._moe: Final[ModuleType] = importlib.import_module("engine.backends.torch.cuda.moe_kernels")
        self.device: Final = device

    def activate_gate(self, both: Tensor, activation: Activation) -> Tensor:
        """Return activation(gate) * up [rows, inner] of `both` [rows, 2 * inner], gate first; dense."""
        rows, inner = both.shape[0], both.shape[1] // 2
        out = torch.empty((rows, inner), dtype=both.dtype, device=both.device)
        if rows:
            with torch.cuda.device_of(both):
                self._layer.gate_kernel[(rows, _parts(inner, _GATE_BLOCK))](
                    both, out, inner, activation=activation, block=_GATE_BLOCK
                )
        return out

    def add_norm(self, hidden: Tensor, added: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Add `added` to `hidden` [rows, width <= MAX_NORM_WIDTH] in place, and return the RMS norm of the sum times
        `weight` [width]; all dense."""
        rows, width = hidden.shape
        out = torch.empty_like(hidden)
        if rows:
            block = _power_of_two(width)
            with torch.cuda.device_of(hidden):
                self._layer.add_norm_kernel[(rows,)](
                    hidden, added, weight, out, width, epsilon, block=block, num_warps=4 if block <= 4096 else 8
                )
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
        with torch.cuda.device_of(qkv):
            self._layer.rotate_and_write_kernel[(rows, _parts(all_heads, _HEADS_AT_ONCE))](
                qkv,
                cos,
                sin,
                norm.weight if norm is not None else qkv,
                slots,
                pages,
                norm.epsilon if norm is not None else 0.0,
                heads=heads,
                kv_heads=(all_heads - heads) // 2,
                head_dim=head_dim,
                rotated=rotated,
                rotates=angles is not None,
                norm=norm.kind if norm is not None else "",
                block_h=_HEADS_AT_ONCE,
                block_d=_power_of_two(rotated // 2),
                block_r=_power_of_two(head_dim - rotated) if rotated < head_dim else 0,
                num_warps=4,
            )


class GroupedExperts:
    """The experts of a layer, all computed by five launches: down(activation(gate(x)) * up(x)) of each.

    gate_ups: [2 * inner, hidden] of each expert, the gate's rows first.  downs: [hidden, inner]; all dense, of one of
    DTYPES. They are read where they are, at addresses that recorded graphs keep.
    """

    def __init__(
        self, ops: LayerOps, gate_ups: Sequence[Tensor], downs: Sequence[Tensor], activation: Activation
    ) -> None:
        self._ops: Final = ops
        self._weights: Final = (tuple(gate_ups), tuple(downs))
        self._activation: Final = activation
        self._hidden, self._inner = downs[0].shape
        self._gate_ups, self._downs = (
            torch.tensor([each.data_ptr() for each in weights], dtype=torch.int64).to(ops.device)
            for weights in self._weights
        )
        self._count: Final = len(downs)

    def route(self, logits: Tensor, per_token: int, *, normalised: bool) -> tuple[Tensor, Tensor]:
        """Return the experts int32 [rows, per_token] with the highest softmax of the router's `logits` [rows, experts],
        dense, ascending, and their shares in float32. normalised: those add up to 1."""
        rows, experts = logits.shape
        chosen = torch.empty((rows, per_token), dtype=torch.int32, device=logits.device)
        weights = torch.empty((rows, per_token), dtype=torch.float32, device=logits.device)
        block_e = _power_of_two(experts)
        with torch.cuda.device_of(logits):
            self._ops._moe.route_kernel[(rows,)](
                *(logits, chosen, weights, experts),
                per_token=per_token,
                normalised=normalised,
                block_e=block_e,
                num_warps=1 if block_e <= 256 else 4,
            )
        return chosen, weights

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the sum of the experts `chosen` int32 [rows, per_token] for x [rows, hidden] by float32 `weights`
        [rows, per_token], added up in that order in float32; all dense."""
        rows, per_token = chosen.shape
        assignments, experts = rows * per_token, self._count
        order = torch.empty(assignments, dtype=torch.int32, device=x.device)
        ends = torch.empty(experts, dtype=torch.int32, device=x.device)
        tile = tile_for(assignments, experts)
        blocks = max_blocks(assignments, experts, tile.block_m)
        gated = torch.empty((assignments, self._inner), dtype=x.dtype, device=x.device)
        outputs = torch.empty((assignments, self._hidden), dtype=x.dtype, device=x.device)
        mixed = torch.empty_like(x)
        constants = {
            "upcast": x.dtype == torch.bfloat16 and x.device.type != "cuda",
            "block_m": tile.block_m,
            "block_n": tile.block_n,
            "block_k": tile.block_k,
            "block_e": _power_of_two(experts),
            "num_warps": tile.warps,
            "num_stages": tile.stages,
        }
        with torch.cuda.device_of(x):
            self._ops._moe.order_kernel[(experts,)](chosen, order, ends, assignments, block=_ORDER_BLOCK)
            self._ops._moe.gate_up_kernel[(_parts(self._inner, tile.block_n), blocks)](
                *(x, gated, self._gate_ups, order, ends, experts, self._inner, self._hidden),
                per_token=per_token,
                activation=self._activation,
                **constants,
            )
            self._ops._moe.down_kernel[(_parts(self._hidden, tile.block_n), blocks)](
                *(gated, outputs, self._downs, order, ends, experts, self._hidden, self._inner), **constants
            )
            self._ops._moe.mix_kernel[(rows, _parts(self._hidden, _MIX_BLOCK))](
                outputs, weights, mixed, self._hidden, per_token=per_token, block=_MIX_BLOCK
            )
        return mixed


def _parts(size: int, block: int) -> int:
    return -(-size // block)


def _power_of_two(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


# Whether they can be used.

_TRIAL_HIDDEN, _TRIAL_INNER = 128, 80
_TOLERANCE = 0.03
"""Of the largest number: a few roundings to bfloat16, which Triton's interpreter cuts off."""


def layer_ops_problem(
    devices: Sequence[torch.device], dtype: torch.dtype, activation: Activation, experts: Experts | None = None
) -> str:
    """Return why the kernels cannot compute in `dtype` on `devices`, as a clause; "" where they can.

    They are compiled and tried there on small tensors: what a missing compiler or an unsupported GPU would break; those
    of `experts` in every variant that a step can need. Raises where a device is lost.
    """
    if dtype not in DTYPES:
        return f"they do not compute in {str(dtype).removeprefix('torch.')}"
    if problem := triton_problem():
        return problem
    for device in devices:
        if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < CODES_CAPABILITY:
            return "Triton needs compute capability 8.0, not {}.{}".format(*found)
    for device in devices:
        try:
            if problem := _trial(LayerOps(device), dtype, activation, experts):
                return f"{problem} on {device}"
        except Exception as error:  # whatever a compiler, a driver or a library raises
            if is_device_lost(error):
                raise
            text = (str(error) or repr(error)).strip().splitlines()[0]
            return f"they fail on {device}: {type(error).__name__}: {text[:200]}"
    return ""


def _trial(ops: LayerOps, dtype: torch.dtype, activation: Activation, experts: Experts | None) -> str:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    rows, width, heads, kv_heads, size = 3, _TRIAL_HIDDEN, 4, 2, 64
    both, hidden, added, weight = random(rows, 2 * width), random(rows, width), random(rows, width), random(width)
    if _differ(ops.activate_gate(both.to(ops.device), activation), _gated(both.float(), activation)):
        return "gates differ from torch's"
    expected, total = hidden.float() + added.float(), hidden.to(ops.device)
    normed = ops.add_norm(total, added.to(ops.device), weight.to(ops.device), 1e-6)
    if _differ(total, expected) or _differ(normed, F.rms_norm(expected, (width,), weight.float(), 1e-6)):
        return "norms differ from torch's"
    qkv, cos, sin = random(rows, heads + 2 * kv_heads, size), random(rows, 1, size // 2), random(rows, 1, size // 2)
    cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    turned = qkv.float()
    rotate_(turned[:, : heads + kv_heads], cos.float(), sin.float())
    found, pages = qkv.to(ops.device), torch.zeros(1, rows, 2 * kv_heads, size, dtype=dtype, device=ops.device)
    angles = (cos.to(ops.device), sin.to(ops.device))
    ops.rotate_and_write(found, heads, None, angles, pages, torch.arange(rows, device=ops.device))
    if _differ(found[:, :heads], turned[:, :heads]) or _differ(pages[0], turned[:, heads:]):
        return "rotated heads differ from torch's"
    return "" if experts is None else _trial_of_experts(ops, random, activation, experts.count, experts.per_token)


def _trial_of_experts(
    ops: LayerOps, random: Callable[..., Tensor], activation: Activation, experts: int, per_token: int
) -> str:
    """Try each tile."""
    width, inner = _TRIAL_HIDDEN, _TRIAL_INNER
    gate_ups, downs = [random(2 * inner, width) for _ in range(experts)], [random(width, inner) for _ in range(experts)]
    grouped = GroupedExperts(
        ops, [each.to(ops.device) for each in gate_ups], [each.to(ops.device) for each in downs], activation
    )
    for rows in (1, 24 * experts // per_token + 1, 40 * experts // per_token + 1):
        x = random(rows, width)
        logits = torch.stack([torch.arange(experts).roll(row) for row in range(rows)]).to(x.dtype) / 8
        shares = torch.softmax(logits.float(), dim=-1)
        weights, order = shares.topk(per_token, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        found, found_weights = grouped.route(logits.to(ops.device), per_token, normalised=True)
        if not torch.equal(found.cpu().long(), order.sort().values) or _differ(
            found_weights, weights.gather(-1, order.argsort())
        ):
            return "routing differs from torch's"
        expected = torch.zeros(rows, width)
        for expert in range(experts):
            share = (weights * (order == expert)).sum(dim=-1, keepdim=True)
            expected += share * (_gated(x.float() @ gate_ups[expert].float().T, activation) @ downs[expert].float().T)
        if _differ(grouped(x.to(ops.device), found, found_weights), expected):
            return "products of experts differ from torch's"
    return ""


def _gated(both: Tensor, activation: Activation) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up


def _differ(found: Tensor, expected: Tensor) -> bool:
    error = (found.float().cpu() - expected).abs().max()
    return not float(error) <= _TOLERANCE * float(expected.abs().max())  # also where it is NaN
