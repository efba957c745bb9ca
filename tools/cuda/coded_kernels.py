"""Resources of the CUDA kernels for weights in codes, compiled for cards that need not be here: a table in Markdown.

`python -m tools.cuda.coded_kernels [--capability 90] [--format Q4_K] [--rows 1]`. Needs Triton, which
brings the assembler; nothing is run. `--json` prints one line for each kernel.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from engine.backends.common.gguf_codes import FLOAT_FORMATS, FOUR_BIT_FORMATS, Codes

CAPABILITIES = (75, 80, 89, 90, 120)
FORMATS = ("Q4_K", "Q6_K", "Q8_0", "GPTQ", "F8_E4M3")
ROWS = (16, 64, 256)
KERNELS = ("multiply", "multiply_experts", "decode")
_POINTERS = {
    "high": "*i32",
    "ids": "*i64",
    "addresses": "*i64",
    "order": "*i32",
    "ends": "*i32",
    "low": "*u8",
    "minimum": "*fp16",
    "scale": "*fp16",
}
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+)")
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_.]*)")
_BRANCH = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\d+\s+)?BRA(?:\.U)?\s[^;]*?0x([0-9a-f]+)")


_PACKED = {
    **{name: Codes(name, 0, 0, span=4) for name in FOUR_BIT_FORMATS},
    **{name: Codes(name, 0, 0, span=4, row_span=128) for name in FLOAT_FORMATS},
}


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    """Of one compiled kernel. registers: of a thread.  stack_bytes: of a thread, which spilled registers take.
    shared_bytes: of a program.  tensor_cores: instructions of them, of `instructions`.  per_weight: instructions
    of the loop over the inputs for each weight; 0 where there is none."""

    kernel: str
    format: str
    rows: int
    capability: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    tensor_cores: int
    instructions: int
    per_weight: float = 0.0


def compile_kernel(kernel: str, name: str, rows: int, capability: int, half: str = "*fp16") -> Resources:
    """Compile one of KERNELS for weights in the format `name` and `rows` rows of float16, or of bfloat16, "*bf16"."""
    from engine.backends.torch.cuda import coded_kernels
    from engine.backends.torch.cuda.coded_linear import DECODED_ROWS, tile_for
    from engine.backends.torch.cuda.gguf_matrix import LAYOUTS
    from engine.backends.torch.cuda.packed_matrix import packed_layout

    layout = LAYOUTS[name] if name in LAYOUTS else packed_layout(_PACKED[name], converts_e4m3=capability >= 89)
    tile = tile_for(rows)
    constants: dict[str, Any] = layout.constants
    options: dict[str, int] = {}
    if kernel != "decode":
        constants |= {"upcast": False, "block_m": tile.block_m, "block_n": tile.block_n}
        if kernel == "multiply":
            constants |= {"has_bias": False, "split": False}
        else:
            constants |= {"parts": 2, "ordered": False, "divisor": 8, "block_e": 128}
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
    else:
        constants |= {"look_up": False, "block_n": DECODED_ROWS}
    function = getattr(coded_kernels, f"{kernel}_kernel")
    small = {"bytes": "*i8", "zeros": "*u8"}.get(layout.scales, "*i32")
    pointers = _POINTERS | {"small": small, "x": half, "out": half, "bias": half}
    if layout.scales == "floats":
        pointers["scale"] = "*fp32"
    made = compile_for(capability, function, constants, pointers, options)
    registers, stack_bytes, opcodes, loop = read_cubin(made.asm["cubin"])
    weights = tile.block_n * layout.step_groups * layout.group // (32 * tile.warps)  # of a thread, in a step
    return Resources(
        kernel=kernel,
        format=name,
        rows=rows,
        capability=capability,
        registers=registers,
        stack_bytes=stack_bytes,
        shared_bytes=made.metadata.shared,
        tensor_cores=sum(count for opcode, count in opcodes.items() if opcode in ("HMMA", "HGMMA")),
        instructions=opcodes.total(),
        per_weight=round(loop / weights, 1) if kernel != "decode" else 0.0,
    )


def compile_for(
    capability: int, function: Any, constants: Mapping[str, Any], types: Mapping[str, str], options: Mapping[str, int]
) -> Any:
    """Compile a Triton kernel. constants: its constexprs.  types: of other arguments, int32 unless given; all of them
    but floats are multiples of 16 unless the kernel is not specialised for them."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    varying = {function.arg_names[at] if isinstance(at, int) else at for at in function.do_not_specialize}
    signature = {each: "constexpr" if each in constants else types.get(each, "i32") for each in function.arg_names}
    divisible = {
        (at,): [["tt.divisibility", 16]]
        for at, each in enumerate(function.arg_names)
        if each not in constants and each not in varying and signature[each] != "fp32"
    }
    values = {(function.arg_names.index(each),): value for each, value in constants.items()}
    source = ASTSource(function, signature, constexprs=values, attrs=divisible)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(options))


def read_cubin(cubin: bytes, *, whole: bool = False) -> tuple[int, int, Counter[str], int]:
    """Return registers, bytes of stack, how often each instruction is in the code, and the instructions of its longest
    loop. whole: by its whole name, with what follows a dot."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = (
            subprocess.run([str(tools / "cuobjdump"), flag, file.name], capture_output=True, text=True, check=True)
            for flag in ("-res-usage", "-sass")
        )
    found = _RESOURCES.search(usage.stdout)
    assert found is not None, "cuobjdump names the resources"
    opcodes = Counter(each if whole else each.partition(".")[0] for _, each in _INSTRUCTION.findall(code.stdout))
    places = [int(place, 16) for place, _ in _INSTRUCTION.findall(code.stdout)]
    loops = ((int(place, 16), int(target, 16)) for place, target in _BRANCH.findall(code.stdout))
    loop = max((sum(target <= each <= place for each in places) for place, target in loops), default=0)
    return int(found[1]), int(found[2]), opcodes, loop


def table(rows: Sequence[Resources]) -> str:
    """The table, a line for each kernel, format and number of rows, with a column for each card."""
    capabilities = sorted({row.capability for row in rows})
    lines = [
        "| kernel | rows | " + " | ".join(f"{each // 10}.{each % 10}" for each in capabilities) + " |",
        "|---|---|" + "---|" * len(capabilities),
    ]
    by_kernel: dict[tuple[str, str, int], dict[int, Resources]] = {}
    for row in rows:
        by_kernel.setdefault((row.kernel, row.format, row.rows), {})[row.capability] = row
    for (kernel, name, count), found in by_kernel.items():
        cells = (_cell(found.get(each)) for each in capabilities)
        what = f"to {count}" if kernel != "decode" else ""
        lines.append(f"| {kernel} {name} | {what} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(found: Resources | None) -> str:
    if found is None:
        return ""
    spilled = f", **{found.stack_bytes} B stack**" if found.stack_bytes else ""
    loop = f" / {found.per_weight:.3g}" if found.per_weight else ""
    return f"{found.registers} / {found.shared_bytes / 1024:.3g} / {found.tensor_cores}{loop}{spilled}"


def main(arguments: Sequence[str]) -> int:
    """Compile all, and print what they take."""
    parser = argparse.ArgumentParser(prog="python -m tools.cuda.coded_kernels", description=__doc__)
    parser.add_argument("--capability", type=int, nargs="*", default=CAPABILITIES, help="such as 90 for sm_90")
    parser.add_argument(
        "--format",
        nargs="*",
        default=FORMATS,
        help="GGUF formats, GPTQ and AWQ with groups of 128, F8_E4M3 and F8_E5M2 with blocks of 128 x 128",
    )
    parser.add_argument("--half", default="fp16", choices=("fp16", "bf16"), help="dtype of x")
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS, help="rows of x, or of one expert")
    parser.add_argument("--kernel", nargs="*", default=KERNELS, choices=KERNELS)
    parser.add_argument("--json", action="store_true", help="one line of JSON for each kernel")
    given = parser.parse_args(arguments)
    asked = [
        (kernel, name, rows)
        for kernel in given.kernel
        for name, rows in itertools.product(given.format, given.rows if kernel != "decode" else (1,))
    ]
    found = []
    for (kernel, name, rows), capability in itertools.product(asked, given.capability):
        found.append(compile_kernel(kernel, name, rows, capability, f"*{given.half}"))
        if given.json:
            print(json.dumps(msgspec.to_builtins(found[-1])), flush=True)
    if not given.json:
        print(
            "Registers of a thread / KiB of shared memory / instructions of tensor cores / instructions per weight:\n"
        )
        print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
