"""The Triton kernels of a layer compile for cards that are not here: without spilled registers, within shared memory,
experts and LoRA updates on tensor cores from weights that are loaded 16 bytes at a time."""

from __future__ import annotations

import json

import pytest

from tests.fakes.uninterpreted import Compiles
from tools.cuda.layer_kernels import VARIANTS, Resources, table

pytestmark = pytest.mark.long

SHARED_KIB = {80: 163, 89: 99, 90: 227, 120: 99}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("capability", SHARED_KIB)
def test_the_kernels_compile_for_every_kind_of_card(capability: int, compiles: Compiles) -> None:
    found = list(map(json.loads, compiles("tools.cuda.layer_kernels", "--capability", capability, "--json")))
    assert [each["kernel"] for each in found] == list(VARIANTS)
    for each in found:
        assert each["stack_bytes"] == 0
        assert each["shared_bytes"] <= SHARED_KIB[capability] * 1024
        multiplies = each["kernel"].startswith(("gate_up", "down", "LoRA"))
        assert (each["tensor_cores"] > 0) == multiplies
        assert each["wide_loads"] > 0 or not multiplies


def test_the_table_has_a_column_for_each_card_and_names_what_is_spilled() -> None:
    def found(kernel: str, capability: int, stack_bytes: int = 0) -> Resources:
        return Resources(
            kernel=kernel,
            capability=capability,
            registers=78,
            stack_bytes=stack_bytes,
            shared_bytes=36864,
            tensor_cores=16,
            wide_loads=27,
        )

    assert table([found("mix", 80), found("mix", 120, 40), found("gate", 120)]).splitlines() == [
        "| kernel | 8.0 | 12.0 |",
        "|---|---|---|",
        "| mix | 78 / 36 / 16 / 27 | 78 / 36 / 16 / 27, **40 B stack** |",
        "| gate |  | 78 / 36 / 16 / 27 |",
    ]
