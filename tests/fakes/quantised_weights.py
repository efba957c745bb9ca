"""What quantised products must give, in torch: weights and rows as they are rounded."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.backends.common.packed_weights import GROUP_INPUTS
from engine.backends.torch.native.layer import NativeLinear, bits_of

CODES = torch.tensor([-108, -84, -67, -52, -39, -26, -14, -3, 10, 22, 35, 49, 63, 80, 101, 127]).float()


def weight_of(layer: NativeLinear) -> Tensor:
    """The weight [out, in] that `layer` multiplies by, in float32."""
    form, bits = layer.format, bits_of(layer.format)
    assert bits is not None
    group, half = GROUP_INPUTS[bits], -(-form.outputs // 2 // 16) * 16
    groups = -(-form.inputs // group)
    blocks = 2 * half // 16 if form.interleaved else -(-form.outputs // 16)
    split = blocks * groups * 16 * group * bits // 8
    scales = layer.weight[split:].view(torch.bfloat16).view(blocks, groups, 16).float()
    if bits == 8:
        codes = layer.weight[:split].view(blocks, groups, group // 4, 16, 4).float() - 128
    else:
        both = layer.weight[:split].view(blocks, groups, group // 8, 16, 4)
        codes = CODES[torch.stack((both & 15, both >> 4), dim=3).long()].view(blocks, groups, group // 4, 16, 4)
    values = codes.permute(0, 3, 1, 2, 4).reshape(blocks, 16, groups, group) * scales.permute(0, 2, 1).unsqueeze(-1)
    rows = values.reshape(blocks, 16, groups * group)[:, :, : form.inputs]
    if not form.interleaved:
        return rows.reshape(blocks * 16, form.inputs)[: form.outputs]
    parts = (rows[start::2].reshape(half, form.inputs)[: form.outputs // 2] for start in (0, 1))
    return torch.cat(tuple(parts))


def rounded(x: Tensor, group: int) -> Tensor:
    """Rows [rows, in] as products read them: each group as whole numbers up to 127 times a scale; in float64."""
    rows, inputs = x.shape
    padded = torch.zeros(rows, -(-inputs // group) * group)
    padded[:, :inputs] = x.float()
    groups = padded.view(rows, padded.shape[1] // group, group)
    largest = groups.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest > 0, torch.full_like(largest, 127.0) / largest, 0.0)
    codes = (groups * inverse).round().double()
    return (codes * (largest / 127.0).double()).flatten(1)[:, :inputs]
