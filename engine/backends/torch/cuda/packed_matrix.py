"""Matrices in the codes of a model folder, GPTQ, AWQ or 8-bit floats, laid out for the CUDA kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor

from engine.backends.checkpoints.fp8 import Fp8Codes
from engine.backends.checkpoints.gptq import GptqLinear
from engine.backends.checkpoints.quantized_weight import PackedSlabs
from engine.backends.common.gguf_codes import FLOAT_FORMATS, Codes
from engine.backends.torch.cuda.coded_linear import (
    TRIAL_INPUTS,
    TRIAL_ROWS,
    CodedMatrix,
    Layout,
    kernels_problem,
)

_GROUP = 32
_STEP_GROUPS = 4
_DTYPES = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}

_E4M3_CAPABILITY = (8, 9)
_CHECKED_VALUES = 2**26
"""Floats that are looked at a time, in memory of their own."""

_MAX_FLOATS = {"F8_E4M3": 0x7E, "F8_E5M2": 0x7B}
"""Bits of the largest finite number, without its sign."""


def packed_layout(codes: Codes, *, converts_e4m3: bool) -> Layout:
    """Return how the kernels take a matrix like `codes`, on a card that converts E4M3 or not."""
    if codes.format in FLOAT_FORMATS:
        floats = "e5m2" if codes.format == "F8_E5M2" else "e4m3" if converts_e4m3 else "e4m3_bits"
        return Layout(8, _GROUP, 0, "floats", _STEP_GROUPS, codes.span, codes.row_span, floats)
    return Layout(4, _GROUP, 0, "zeros", _STEP_GROUPS, codes.span)


def _layout(codes: Codes, device: torch.device) -> Layout:
    return packed_layout(codes, converts_e4m3=_converts_e4m3(device))


def _converts_e4m3(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= _E4M3_CAPABILITY


def packed_matrix(stored: PackedSlabs | Fp8Codes, codes: Codes, device: torch.device) -> CodedMatrix | None:
    """Lay out a weight on `device`; None where it has what headers do not show and the kernels do not take: groups of
    several sizes, or floats that are not finite."""
    return _floats(stored, codes, device) if isinstance(stored, Fp8Codes) else _four_bits(stored, codes, device)


def _floats(stored: Fp8Codes, codes: Codes, device: torch.device) -> CodedMatrix | None:
    low = stored.weight.to(device).view(torch.uint8)
    rows = max(1, _CHECKED_VALUES // codes.inputs)
    if any(bool(((slab & 0x7F) > _MAX_FLOATS[codes.format]).any()) for slab in low.split(rows)):
        return None
    layout = _layout(codes, device)
    scale = (stored.grid().T * layout.scale_factor).contiguous().to(device)
    nothing = torch.empty(0, dtype=torch.int32, device=device)
    # torch multiplies E4M3 alone by itself, with sizes that 16 divides, and scales whole rows, each or all.
    scales_rows = len(scale) == 1 and scale.shape[1] in (1, codes.rows)
    rounds_x = codes.rounds_x and codes.format == "F8_E4M3" and scales_rows and codes.rows % 16 == 0
    matrix = CodedMatrix(layout, codes.rows, codes.inputs, low, nothing, scale, nothing, nothing)
    return replace(matrix, rounds_x=rounds_x)


def _four_bits(stored: PackedSlabs, codes: Codes, device: torch.device) -> CodedMatrix | None:
    order = None
    if isinstance(stored[0], GptqLinear):
        row_groups = stored[0].row_groups()
        order = row_groups.argsort(stable=True)
        if not torch.equal(row_groups[order], torch.arange(codes.inputs) // min(codes.span * _GROUP, codes.inputs)):
            return None
        order = None if torch.equal(order, torch.arange(codes.inputs)) else order.to(device, torch.int32)
    groups = codes.inputs // _GROUP
    spans = -(-groups // codes.span)
    low = torch.empty((codes.rows, -(-groups // 2) * _GROUP), dtype=torch.uint8, device=device)
    scale = torch.empty((spans, codes.rows), dtype=torch.float16, device=device)
    zeros = torch.empty((spans, codes.rows), dtype=torch.uint8, device=device)
    first = 0
    for slab in stored:
        at = slice(first, first + slab.scales.shape[1])
        slab = replace(slab, **{name: getattr(slab, name).to(device) for name in ("qweight", "qzeros", "scales")})
        values = slab.codes() if order is None else slab.codes().index_select(0, order)
        pairs = F.pad(values, (0, 0, 0, groups % 2 * _GROUP)).unflatten(0, (-1, 2, _GROUP))
        low[at] = (pairs[:, 0] | pairs[:, 1] << 4).flatten(0, 1).T
        scale[:, at], zeros[:, at] = slab.scales, slab.zeros()
        first = at.stop
    nothing = torch.empty(0, dtype=torch.int32, device=device)
    return CodedMatrix(_layout(codes, device), codes.rows, codes.inputs, low, nothing, scale, nothing, zeros, order)


# Whether they can be used.

_TRIAL_SCALE = 0.02


def packed_kernels_problem(devices: Sequence[torch.device], dtype: torch.dtype, kind: Codes) -> str:
    """Return why the kernels cannot compute from matrices of that `Codes.kind` on `devices`, as `kernels_problem`."""

    def make(device: torch.device) -> tuple[CodedMatrix, Tensor]:
        return random_matrix(kind._replace(rows=TRIAL_ROWS, inputs=TRIAL_INPUTS), device)

    return kernels_problem(devices, dtype, kind.format, make)


def random_matrix(codes: Codes, device: torch.device, seed: int = 0) -> tuple[CodedMatrix, Tensor]:
    """Return a matrix of any codes, zero points and scales on `device`, and its weights on the CPU, float32."""
    layout, (rows, inputs) = _layout(codes, device), (codes.rows, codes.inputs)
    generator = torch.Generator().manual_seed(seed)
    groups = inputs // _GROUP
    spans, blocks = -(-groups // codes.span), -(-rows // codes.row_span)
    places = torch.arange(inputs) // min(codes.span * _GROUP, inputs)
    scale = _TRIAL_SCALE * (0.5 + torch.rand(spans, blocks, generator=generator))
    zeros = torch.empty(0, dtype=torch.int32)
    if codes.format in FLOAT_FORMATS:
        sizes = torch.randint(_MAX_FLOATS[codes.format] + 1, (rows, inputs), generator=generator)
        low = (sizes | torch.randint(2, (rows, inputs), generator=generator) << 7).to(torch.uint8)
        numbers = low.view(_DTYPES[codes.format]).float()
        stored_scale = scale * layout.scale_factor
    else:
        pairs = torch.randint(256, (rows, -(-groups // 2), _GROUP), dtype=torch.uint8, generator=generator)
        low, zeros = pairs.flatten(1), torch.randint(17, (spans, rows), dtype=torch.uint8, generator=generator)
        stored_scale = scale = scale.half()
        values = torch.stack((pairs & 15, pairs >> 4), dim=2).flatten(1)[:, :inputs]
        numbers = values.float() - zeros.T[:, places].float()
    weight = numbers * scale.float().T[torch.arange(rows) // min(codes.row_span, rows)][:, places]
    nothing = torch.empty(0, dtype=torch.int32, device=device)
    arrays = low.to(device), nothing, stored_scale.to(device), nothing, zeros.to(device)
    return CodedMatrix(layout, rows, inputs, *arrays), weight
