"""Launches kernels directly and by Triton itself, over a stub of the driver, and prints what the driver got: those of
paged attention, or with the argument "layers" those of layers, of weights in codes, and of experts.

Run as a program, not interpreted. One line of JSON: under "direct" and "ordinary" each launch as its kernel, its grid
and its arguments, addresses as names; "unaligned": kernels that Triton compiled for tensors that start elsewhere.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.backends.paged_attention import triton_kernels
from engine.backends.paged_attention.triton_attention import TritonAttention
from engine.backends.torch.cuda import layer_kernels
from engine.backends.torch.cuda.coded_linear import CodedKernels
from engine.backends.torch.cuda.layer_ops import LayerOps
from engine.backends.triton_launch import launches_directly
from tests.fakes.paged import Call, Case, VarlenCall
from tests.fakes.triton_driver import Driver, Launch, activate
from tools.cuda import layer_host

POINTER, NUMBER = (8,), (4,)
POINTERS = {"append_kernel": 6, "attend_kernel": 10, "combine_kernel": 4}
NUMBERS = {"append_kernel": 4, "attend_kernel": 9, "combine_kernel": 3}
POINTERS |= {"varlen_kernel": 10, "varlen_combine_kernel": 5}
NUMBERS |= {"varlen_kernel": 4, "varlen_combine_kernel": 0}
VARLEN = VarlenCall(Case("a chunk and a long decode", (1500, 7), heads=2, kv_heads=1), (1, 90), torch.float16)
CASES = (
    Case("decode, one part", (3, 40)),
    Case("decode in parts", (1500,), heads=2, kv_heads=1, page_tokens=256, softcap=30.0, window=900),
    Case("decode over keys in place", (3, 1500), heads=2, kv_heads=1, page_tokens=256, given=False),
    Case("chunk of many rows", (30, 30), q_len=90),
)


def tensors_of(case: Case) -> dict[str, Tensor | None]:
    """Return the tensors of a call, by the names of its arguments."""
    call = Call(case, torch.float16)
    pages, new = call.pool.chunk(2, dim=2), call.new.chunk(2, dim=2)
    lengths = torch.tensor(case.lengths, dtype=torch.int32) + (0 if case.given else case.q_len)
    found: dict[str, Tensor | None] = {"q": call.q, "lengths": lengths, "block_table": call.table}
    found |= {"k_pages": pages[0], "v_pages": pages[1]}
    found |= {"k_new": new[0] if case.given else None, "v_new": new[1] if case.given else None}
    return found


def named(launches: Sequence[Launch], tensors: Mapping[str, Tensor | None]) -> list[Any]:
    """Return the launches with names for addresses; those of results and scratch are numbered as they come."""
    names = {tensor.data_ptr(): name for name, tensor in tensors.items() if tensor is not None}
    found = []
    for launch in launches:
        count = POINTERS[launch.kernel]
        addresses = [names.setdefault(each, f"new {len(names)}") for each in launch.arguments[:count]]
        found.append([launch.kernel, launch.grid, addresses, launch.arguments[count:]])
    return found


def call(attention: TritonAttention, driver: Driver, case: Case, tensors: Mapping[str, Any]) -> list[Any]:
    """Call it, and return the launches."""
    before = driver.launches
    attention(**tensors, scale=case.head_dim**-0.5, window=case.window, softcap=case.softcap)
    return named(driver.last(driver.launches - before), tensors)


LAYER_SIZES = {
    "gate_kernel": POINTER * 2 + NUMBER,
    "add_norm_kernel": POINTER * 4 + NUMBER * 2,
    "rotate_and_write_kernel": POINTER * 6 + NUMBER,
    "route_kernel": POINTER * 3 + NUMBER,
    "order_kernel": POINTER * 3 + NUMBER,
    "gate_up_kernel": POINTER * 5 + NUMBER * 3,
    "down_kernel": POINTER * 5 + NUMBER * 3,
    "mix_kernel": POINTER * 3 + NUMBER,
    "multiply_kernel": POINTER * 8 + NUMBER * 7,
    "combine_kernel": POINTER * 3 + NUMBER * 4,
    "decode_kernel": POINTER * 7 + NUMBER * 6,
    "multiply_experts_kernel": POINTER * 5 + NUMBER * 6,
}


def layer_launches(driver: Driver, *, direct: bool) -> list[Any]:
    """Return the launches of layers, of weights in codes and of experts, without the addresses of what they make."""
    ops, kernels = LayerOps(layer_host.CPU), CodedKernels(layer_host.CPU)
    calls = layer_host.layer_calls(ops, 5) | layer_host.coded_calls(kernels, 5)
    for name, grouped in layer_host.mixtures(ops, kernels).items():
        calls[name] = layer_host.mixture_call(grouped, 5)
    found = []
    for call in calls.values():
        before = driver.launches
        call()
        if not direct:
            for kernel in (*ops.kernels.all, *kernels.kernels.all):
                kernel._run = None
            before = driver.launches
            call()
        for launch in driver.last(driver.launches - before):
            count = LAYER_SIZES[launch.kernel].count(8)
            found.append([launch.kernel, launch.grid, launch.arguments[count:]])
    return found


def main() -> None:
    """Launch all cases both ways."""
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        if "layers" in sys.argv[1:]:
            driver = activate(Path(folder), sizes=LAYER_SIZES)
            direct, ordinary = (layer_launches(driver, direct=direct) for direct in (True, False))
            found = {"is_direct": launches_directly(layer_kernels.gate_kernel), "direct": direct, "ordinary": ordinary}
        else:
            found = attention_launches(Path(folder))
        print(json.dumps(found))


def attention_launches(folder: Path) -> dict[str, Any]:
    """Launch all cases of attention both ways."""
    sizes = {name: POINTER * POINTERS[name] + NUMBER * NUMBERS[name] for name in POINTERS}
    direct, ordinary = [], []
    driver = activate(folder, sizes=sizes)
    for case in CASES:
        tensors, attention = tensors_of(case), TritonAttention()
        direct.append(call(attention, driver, case, tensors))
        for kernel in attention._variants.values():
            kernel._run = None
        ordinary.append(call(attention, driver, case, tensors))
    attention = TritonAttention()
    for found in (direct, ordinary):
        before = driver.launches
        VARLEN.run(attention)
        names = {"q": VARLEN.q, "block_table": VARLEN.table}
        found.append(named(driver.last(driver.launches - before), names | VARLEN.pages()))
        for kernel in attention._variants.values():
            kernel._run = None
    kernels = triton_kernels.attend_kernel.device_caches[0][0]
    tensors, attention = tensors_of(CASES[2]), TritonAttention()
    q = tensors["q"]
    assert q is not None
    tensors["q"] = q.contiguous()
    call(attention, driver, CASES[2], tensors)
    before = len(kernels)
    tensors["q"] = torch.cat((q.new_zeros(1), q.flatten()))[1:].view(q.shape)
    call(attention, driver, CASES[2], tensors)
    is_direct = launches_directly(triton_kernels.attend_kernel)
    return {"is_direct": is_direct, "direct": direct, "ordinary": ordinary, "unaligned": len(kernels) - before}


if __name__ == "__main__":
    main()
