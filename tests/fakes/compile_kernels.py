"""Compiles the attention kernels as Triton would for a card that need not be here. Run as a program, not interpreted.

Arguments: compute capability (86), head size, query rows, page size, bits of the KV cache, and words: "append" where
new keys are appended, or "varlen" for sequences with any numbers of new tokens, the longest with these query rows;
"apart" for codes whose scales lie apart, those of values of 4 bits where the bits are 6; "bf16" for bfloat16, "window",
"capped" for soft-capped scores. Writes one line of JSON of the kernel that attends: registers of a thread, bytes of
stack for those that are spilled, bytes of shared memory, and instructions of tensor cores.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from engine.backends.common.kv_format import ApartCodes, HeadFormat
from engine.backends.exllamav2.packed_cache import CODE_BITS
from engine.backends.paged_attention import triton_kernels, triton_varlen_kernels
from engine.backends.paged_attention.triton_attention import MAX_SPLITS, MIN_SPLIT_TOKENS, tile_for
from engine.backends.triton_launch import power_of_two
from engine.config import CacheBits
from tools.cuda.coded_kernels import compile_for, read_cubin

POINTERS = dict.fromkeys(("lengths", "block_table", "starts", "items", "merges"), "*i32")
POINTERS |= {"parts": "*fp32", "part_sums": "*fp32"}
HALF = ("q", "k_pages", "v_pages", "out", "k_new", "v_new")
WINDOW = 1024


def compiled(kernel: Any, capability: int, constants: dict[str, Any], half: str, **options: int) -> Any:
    """The kernel with strides as a model has them: multiples of 16."""
    types = POINTERS | dict.fromkeys(HALF, half) | dict.fromkeys(("inner", "outer"), "fp32")
    if constants.get("bits", 16) != 16:
        types |= dict.fromkeys(("k_pages", "v_pages"), "*i8")
    return compile_for(capability, kernel, constants, types, options)


def main(arguments: Sequence[str]) -> None:
    """Compile, and print what was found."""
    capability, head_dim, rows, page_tokens, bits = map(int, arguments[:5])
    words = " ".join(arguments[5:]).split()
    append, half, window = "append" in words, "*bf16" if "bf16" in words else "*fp16", WINDOW * ("window" in words)
    tile = tile_for(rows, head_dim, divmod(capability, 10))
    heads, kv_heads, block_d = 32, 8, power_of_two(head_dim)
    appended = {"k_token": 2 * kv_heads * head_dim, "k_head": head_dim, "k_page": page_tokens * 2 * kv_heads * head_dim}
    appended |= {name.replace("k_", "v_"): value for name, value in appended.items() if name.startswith("k_")}
    apart, v_bits, group = "apart" in words, bits, 0
    if apart:
        form = ApartCodes(head_dim, *CODE_BITS[bits])
        v_bits, group, k_bytes, v_bytes = form.v_bits, form.group, form.head_bytes, head_dim * form.v_bits // 8
        bits = form.bits
    elif bits != 16:
        coded = HeadFormat(head_dim, msgspec.convert(bits, CacheBits), 2)
        group, k_bytes, v_bytes = coded.group, coded.head_bytes, coded.head_bytes
    if bits != 16:
        sizes = {"k": k_bytes, "v": v_bytes}
        appended = {name: value // head_dim * sizes[name[0]] for name, value in appended.items()}
    appended |= {"kv_heads": kv_heads, "head_dim": head_dim, "page_tokens": page_tokens, "block_d": block_d}
    reads = {"window": window, "min_blocks": MIN_SPLIT_TOKENS // tile.block_n, "block_n": tile.block_n}
    attends = {"block_m": tile.block_m, "group": 4, "capped": "capped" in words, "upcast": False, "bits": bits}
    attends |= {"code_group": group}
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    combined = {"head_dim": head_dim, "block_s": MAX_SPLITS, "block_d": block_d}
    if "varlen" in words:
        attends |= {"window": window, "block_n": tile.block_n, "decode_m": 16}
        made = compiled(triton_varlen_kernels.varlen_kernel, capability, appended | attends, half, **options)
        combined |= {"kv_heads": kv_heads, "group": 4, "decode_m": 16, "block_m": tile.block_m}
        compiled(triton_varlen_kernels.varlen_combine_kernel, capability, combined, half)
    else:
        attends |= {"append": append, "block_t": 16 if append else 0, "v_bits": v_bits, "apart": apart}
        made = compiled(triton_kernels.attend_kernel, capability, appended | reads | attends, half, **options)
        compiled(triton_kernels.append_kernel, capability, {**appended, "block_h": 8}, half)
        compiled(triton_kernels.combine_kernel, capability, combined | reads | {"heads": heads}, half)
    registers, stack_bytes, opcodes, _ = read_cubin(made.asm["cubin"])
    found = {"registers": registers, "stack": stack_bytes, "shared": made.metadata.shared}
    print(json.dumps(found | {"tensor_cores": opcodes["HMMA"] + opcodes["HGMMA"]}))


if __name__ == "__main__":
    main(sys.argv[1:])
