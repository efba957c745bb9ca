"""Resources of the CUDA kernels of a layer (norms, rotation, gates, experts), compiled for cards that need not be here:
a table in Markdown.

`python -m tools.cuda.layer_kernels [--capability 90] [--kernel gate_up]`. Needs Triton, which brings the
assembler; nothing is run. `--json` prints one line for each kernel.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tools.cuda.coded_kernels import compile_for, read_cubin

CAPABILITIES = (80, 89, 90, 120)

_HALF = ("both", "hidden", "added", "weight", "out", "x", "qkv", "cos", "sin", "pages")
_TYPES = dict.fromkeys(_HALF, "*bf16") | dict.fromkeys(("slots", "weights"), "*i64") | {"epsilon": "fp32"}
_TYPES |= dict.fromkeys(("order", "ends", "chosen"), "*i32") | {"logits": "*bf16"}
_EXPERTS = {"upcast": False, "block_n": 64, "block_k": 64, "block_e": 128}
_HEADS = {"heads": 32, "kv_heads": 8, "head_dim": 128, "rotates": True, "block_h": 8}
_LORA = {"max_rank": 512, "upcast": False, "block_m": 16, "block_r": 16}
VARIANTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "add_norm": ("add_norm_kernel", {"block": 4096}),
    "add_norm, 8192 wide": ("add_norm_kernel", {"block": 8192}),
    "rotate_and_write": ("rotate_and_write_kernel", _HEADS | {"rotated": 128, "norm": "", "block_d": 64, "block_r": 0}),
    "rotate_and_write, normed": (
        "rotate_and_write_kernel",
        _HEADS | {"rotated": 128, "norm": "rms", "block_d": 64, "block_r": 0},
    ),
    "rotate_and_write, in part": (
        "rotate_and_write_kernel",
        _HEADS | {"rotated": 32, "norm": "", "block_d": 16, "block_r": 128},
    ),
    "gate": ("gate_kernel", {"activation": "silu", "block": 1024}),
    "gate, gelu": ("gate_kernel", {"activation": "gelu", "block": 1024}),
    "route": ("route_kernel", {"per_token": 8, "normalised": True, "block_e": 128}),
    "order": ("order_kernel", {"block": 1024}),
    "gate_up to 16": ("gate_up_kernel", _EXPERTS | {"per_token": 8, "activation": "silu", "block_m": 16}),
    "gate_up to 32": ("gate_up_kernel", _EXPERTS | {"per_token": 8, "activation": "silu", "block_m": 32}),
    "gate_up to 64": ("gate_up_kernel", _EXPERTS | {"per_token": 8, "activation": "silu", "block_m": 64}),
    "down to 16": ("down_kernel", _EXPERTS | {"block_m": 16}),
    "down to 32": ("down_kernel", _EXPERTS | {"block_m": 32}),
    "down to 64": ("down_kernel", _EXPERTS | {"block_m": 64}),
    "mix": ("mix_kernel", {"per_token": 8, "block": 512}),
    "LoRA shrink": ("shrink_kernel", _LORA | {"block_k": 128}),
    "LoRA expand": ("expand_kernel", _LORA | {"block_n": 64, "shares": 4}),
}
"""A kernel and its constants, by a name: for an 8B model, and for one that uses 8 of 128 experts."""


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    """Of one compiled kernel. registers: of a thread.  stack_bytes: of a thread, which spilled registers take.
    shared_bytes: of a program.  tensor_cores, wide_loads: instructions of tensor cores, and loads of 16 bytes for a
    thread."""

    kernel: str
    capability: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    tensor_cores: int
    wide_loads: int


def compile_variant(name: str, capability: int) -> Resources:
    """Compile one of VARIANTS, in bfloat16."""
    from engine.backends.torch.cuda import layer_kernels, lora_kernels, moe_kernels

    kernel, constants = VARIANTS[name]
    module = next(each for each in (moe_kernels, layer_kernels, lora_kernels) if hasattr(each, kernel))
    types = dict(_TYPES)
    if kernel in ("mix_kernel", "route_kernel"):
        types["weights"] = "*fp32"
    if module is lora_kernels:
        types |= {"slots": "*i32", "table": "*i64", "sums": "*fp32"}
    options = {"num_warps": 8 if constants.get("block") == 8192 else 1 if kernel == "route_kernel" else 4}
    if "block_m" in constants and module is moe_kernels:
        options = {"num_warps": 4, "num_stages": 3}
    made = compile_for(capability, getattr(module, kernel), constants, types, options)
    registers, stack_bytes, opcodes, _ = read_cubin(made.asm["cubin"], whole=True)
    wide = sum(n for opcode, n in opcodes.items() if opcode.startswith(("LDG", "LDGSTS")) and "128" in opcode)
    return Resources(
        kernel=name,
        capability=capability,
        registers=registers,
        stack_bytes=stack_bytes,
        shared_bytes=made.metadata.shared,
        tensor_cores=sum(n for opcode, n in opcodes.items() if opcode.partition(".")[0] in ("HMMA", "HGMMA")),
        wide_loads=wide,
    )


def table(rows: Sequence[Resources]) -> str:
    """The table, a line for each kernel, with a column for each card."""
    capabilities = sorted({row.capability for row in rows})
    lines = [
        "| kernel | " + " | ".join(f"{each // 10}.{each % 10}" for each in capabilities) + " |",
        "|---|" + "---|" * len(capabilities),
    ]
    found = {(row.kernel, row.capability): row for row in rows}
    for name in dict.fromkeys(row.kernel for row in rows):
        lines.append(f"| {name} | " + " | ".join(_cell(found.get((name, each))) for each in capabilities) + " |")
    return "\n".join(lines)


def _cell(found: Resources | None) -> str:
    if found is None:
        return ""
    spilled = f", **{found.stack_bytes} B stack**" if found.stack_bytes else ""
    return f"{found.registers} / {found.shared_bytes / 1024:.3g} / {found.tensor_cores} / {found.wide_loads}{spilled}"


def main(arguments: Sequence[str]) -> int:
    """Compile all, and print what they take."""
    parser = argparse.ArgumentParser(prog="python -m tools.cuda.layer_kernels", description=__doc__)
    parser.add_argument("--capability", type=int, nargs="*", default=CAPABILITIES, help="such as 90 for sm_90")
    parser.add_argument("--kernel", nargs="*", default=list(VARIANTS), help="names as in the table")
    parser.add_argument("--json", action="store_true", help="one line of JSON for each kernel")
    given = parser.parse_args(arguments)
    found = []
    for name, capability in itertools.product(given.kernel, given.capability):
        found.append(compile_variant(name, capability))
        if given.json:
            print(json.dumps(msgspec.to_builtins(found[-1])), flush=True)
    if not given.json:
        print("Registers of a thread / KiB of shared memory / tensor core instructions / loads of 16 bytes:\n")
        print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
