"""How fast this CPU multiplies by weights, with each set of kernels that it can run and with torch.

    python -m tools.performance.products [--threads N] [--rows 1 8 32] [--repeats 15]

Prints G multiply-adds a second, the best of the repeats, which take turns. Weights are those of the 135M and 0.5B
shapes; torch's are float32.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from engine.backends.torch.native.layer import NativeLinear, quantise_linear
from tests.fakes.native_libraries import MACHINE_SETS, native_set

SHAPES = ((3072, 576), (576, 1536), (49152, 576), (1024, 4864))


def main() -> None:
    """Print a table for each shape."""
    parser = argparse.ArgumentParser(description="G multiply-adds a second of products, by kernels and rows.")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 12, 32, 128, 512])
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for outputs, inputs in SHAPES:
        print(f"\n{outputs} x {inputs}, {options.threads} threads\n")
        print("| | " + " | ".join(map(str, options.rows)) + " |")
        print("|---" * (len(options.rows) + 1) + "|")
        columns = [_rates(torch.randn(outputs, inputs), rows, options.repeats) for rows in options.rows]
        for name in columns[0]:
            print(f"| {name} | " + " | ".join(f"{column[name]:.0f}" for column in columns) + " |", flush=True)


def _rates(weight: Tensor, rows: int, repeats: int) -> dict[str, float]:
    """G multiply-adds a second by kernel, by number of rows of x."""
    x = torch.randn(rows, weight.shape[1])
    products = dict(_products(weight, x))
    least_s = dict.fromkeys(products, float("inf"))
    for _ in range(repeats + 1):  # the first warms up
        for name, product in products.items():
            began_s = time.perf_counter()
            product()
            least_s[name] = min(least_s[name], time.perf_counter() - began_s)
    return {name: rows * weight.numel() / taken_s / 1e9 for name, taken_s in least_s.items()}


def _products(weight: Tensor, x: Tensor) -> list[tuple[str, Callable[[], Tensor]]]:
    found: list[tuple[str, Callable[[], Tensor]]] = []
    for isa in MACHINE_SETS:
        library, short = native_set(isa), weight.bfloat16()
        layers = {
            "bfloat16": NativeLinear.pack(library, short, None),
            "float32": NativeLinear.pack(library, weight, None),
            "int8": quantise_linear(library, short, None, 8),
            "int4": quantise_linear(library, short, None, 4),
        }
        for kind, layer in layers.items():
            given = x.to(layer.dtype)
            found.append((f"{isa}, {kind}", lambda layer=layer, given=given: layer(given)))  # type: ignore[misc]
    found.append(("torch, float32", lambda: torch.nn.functional.linear(x, weight)))
    return found


if __name__ == "__main__":
    main()
