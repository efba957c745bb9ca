"""The Triton kernels of weights in codes compile for cards that are not here: with tensor cores, without spilled
registers, within shared memory."""

from __future__ import annotations

import json

import pytest

from tests.fakes.uninterpreted import Compiles
from tools.cuda.coded_kernels import Resources, table

pytestmark = pytest.mark.long

SHARED_KIB = {80: 163, 89: 99, 90: 227, 120: 99}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("capability", "name", "rows"),
    [(80, "Q6_K", 64), (80, "F8_E4M3", 16), (89, "GPTQ", 16), (90, "Q4_K", 1), (90, "GPTQ", 64), (120, "Q5_0", 32)],
)
def test_the_kernels_compile_for_every_kind_of_card(capability: int, name: str, rows: int, compiles: Compiles) -> None:
    asked = ("--capability", capability, "--format", name, "--rows", rows, "--json")
    multiply, experts, decode = map(json.loads, compiles("tools.cuda.coded_kernels", *asked))
    assert multiply["tensor_cores"] == experts["tensor_cores"] > 0
    assert multiply["stack_bytes"] == decode["stack_bytes"] == 0
    assert experts["stack_bytes"] <= 8  # two registers
    for kernel in (multiply, experts, decode):
        assert kernel["shared_bytes"] <= SHARED_KIB[capability] * 1024


def test_the_table_has_a_column_for_each_card_and_names_what_is_spilled() -> None:
    def found(kernel: str, capability: int, stack_bytes: int = 0) -> Resources:
        return Resources(
            kernel=kernel,
            format="Q4_K",
            rows=32,
            capability=capability,
            registers=128,
            stack_bytes=stack_bytes,
            shared_bytes=24576,
            tensor_cores=64,
            instructions=2000,
        )

    assert table([found("multiply", 80), found("multiply", 120, 40), found("decode", 80)]).splitlines() == [
        "| kernel | rows | 8.0 | 12.0 |",
        "|---|---|---|---|",
        "| multiply Q4_K | to 32 | 128 / 24 / 64 | 128 / 24 / 64, **40 B stack** |",
        "| decode Q4_K |  | 128 / 24 / 64 |  |",
    ]
