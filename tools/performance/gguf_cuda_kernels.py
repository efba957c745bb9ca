"""Resources of the CUDA kernels for GGUF weights, compiled for cards that need not be here: a table in Markdown.

`python -m tools.performance.gguf_cuda_kernels [--capability 90] [--format Q4_K] [--rows 1]`. Needs Triton, which
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

CAPABILITIES = (75, 80, 89, 90, 120)
FORMATS = ("Q4_K", "Q6_K", "Q8_0")
ROWS = (16, 64)
_POINTERS = {
    "bias": "*fp16",
    "high": "*i32",
    "ids": "*i64",
    "low": "*u8",
    "minimum": "*fp16",
    "out": "*fp16",
    "scale": "*fp16",
    "x": "*fp16",
}
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+)")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_.]*)")


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    """Of one compiled kernel. registers: of a thread.  stack_bytes: of a thread, which spilled registers take.
    shared_bytes: of a program.  tensor_cores: instructions of tensor cores, of `instructions`."""

    kernel: str
    format: str
    rows: int
    capability: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    tensor_cores: int
    instructions: int


def compile_kernel(kernel: str, name: str, rows: int, capability: int) -> Resources:
    """Compile `kernel` ("multiply" or "decode") for weights in the format `name` and `rows` rows of float16."""
    from engine.backends.torch.cuda import gguf_kernels
    from engine.backends.torch.cuda.gguf_linear import DECODED_ROWS, LAYOUTS, tile_for

    layout, tile = LAYOUTS[name], tile_for(rows)
    constants: dict[str, Any] = {
        "bits": layout.bits,
        "offset": layout.offset,
        "scales": layout.scales,
        "step_groups": layout.step_groups,
    }
    options: dict[str, int] = {}
    if kernel == "multiply":
        constants |= {"has_bias": False, "split": False, "upcast": False}
        constants |= {"block_m": tile.block_m, "block_n": tile.block_n}
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
    else:
        constants |= {"look_up": False, "block_n": DECODED_ROWS}
    function = getattr(gguf_kernels, f"{kernel}_kernel")
    small = "*i8" if layout.scales == "bytes" else "*i32"
    made = compile_for(capability, function, constants, {**_POINTERS, "small": small}, options)
    registers, stack_bytes, opcodes = read_cubin(made.asm["cubin"])
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
    )


def compile_for(
    capability: int, function: Any, constants: Mapping[str, Any], types: Mapping[str, str], options: Mapping[str, int]
) -> Any:
    """Compile a Triton kernel. constants: its constexprs.  types: of other arguments, int32 unless given; all of them
    are multiples of 16 unless the kernel is not specialised for them."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    varying = {function.arg_names[at] if isinstance(at, int) else at for at in function.do_not_specialize}
    signature = {each: "constexpr" if each in constants else types.get(each, "i32") for each in function.arg_names}
    divisible = {
        (at,): [["tt.divisibility", 16]]
        for at, each in enumerate(function.arg_names)
        if each not in constants and each not in varying
    }
    values = {(function.arg_names.index(each),): value for each, value in constants.items()}
    source = ASTSource(function, signature, constexprs=values, attrs=divisible)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(options))


def read_cubin(cubin: bytes, *, whole: bool = False) -> tuple[int, int, Counter[str]]:
    """Return registers, bytes of stack, and how often each instruction is in the code. whole: by its whole name, with
    what follows a dot."""
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
    opcodes = Counter(each if whole else each.partition(".")[0] for each in _INSTRUCTION.findall(code.stdout))
    return int(found[1]), int(found[2]), opcodes


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
        what = f"to {count}" if kernel == "multiply" else ""
        lines.append(f"| {kernel} {name} | {what} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(found: Resources | None) -> str:
    if found is None:
        return ""
    spilled = f", **{found.stack_bytes} B stack**" if found.stack_bytes else ""
    return f"{found.registers} / {found.shared_bytes / 1024:.3g} / {found.tensor_cores}{spilled}"


def main(arguments: Sequence[str]) -> int:
    """Compile all, and print what they take."""
    parser = argparse.ArgumentParser(prog="python -m tools.performance.gguf_cuda_kernels", description=__doc__)
    parser.add_argument("--capability", type=int, nargs="*", default=CAPABILITIES, help="such as 90 for sm_90")
    parser.add_argument("--format", nargs="*", default=FORMATS, help="GGUF formats")
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS, help="rows of x")
    parser.add_argument("--json", action="store_true", help="one line of JSON for each kernel")
    given = parser.parse_args(arguments)
    asked = [("multiply", *each) for each in itertools.product(given.format, given.rows)]
    asked += [("decode", name, 1) for name in given.format]
    found = []
    for (kernel, name, rows), capability in itertools.product(asked, given.capability):
        found.append(compile_kernel(kernel, name, rows, capability))
        if given.json:
            print(json.dumps(msgspec.to_builtins(found[-1])), flush=True)
    if not given.json:
        print("Registers of a thread / KiB of shared memory / instructions of tensor cores:\n")
        print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
