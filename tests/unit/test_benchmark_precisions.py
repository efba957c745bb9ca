"""What engines are said to multiply, and the footnote where that is not what a row is named by."""

from __future__ import annotations

import msgspec
import pytest

from tools.benchmarks.engines import ROWS
from tools.benchmarks.machine import Machine
from tools.benchmarks.protocol import precision_of_dtype, precision_of_openvino
from tools.benchmarks.report import markdown, precisions, rates_table
from tools.benchmarks.results import Cell, Results, Round
from tools.benchmarks.runners.ours import precision_of


@pytest.fixture
def results() -> Results:
    return Results(
        machine=Machine("CPU", ("avx2",), 2, 8 << 30, "Linux", "3.11"),
        date="2030-01-02",
        commands=("python -m tools.benchmarks",),
        minutes=3.2,
        cells=tuple(
            Cell("135m", key, 1, 128, (Round(50.0),)) for key in ("ours", "ours-torch", "openvino", "llamacpp-q4")
        ),
        precisions={"ours": "bf16", "ours-torch": "f32", "openvino": "f32", "llamacpp-q4": "int8"},
    )


def test_a_row_that_computes_in_another_precision_than_its_name_has_a_footnote(results: Results) -> None:
    footnote = (
        "† Computed in another precision than the row is named by: EricLLM Console, without kernels, bf16, in f32; "
        "OpenVINO GenAI, bf16, in f32, from weights stored as fp16."
    )
    assert precisions(results, "135m") == footnote
    table = rates_table(results, "135m", [1])
    assert "| OpenVINO GenAI | bf16 † | 50.0" in table
    assert "| EricLLM Console, in process | bf16 | 50.0" in table
    assert f"{table}\n\n{footnote}\n\n" in markdown(results)


def test_rows_that_compute_as_they_are_named_have_no_footnote(results: Results) -> None:
    named = msgspec.structs.replace(results, precisions={row.key: row.precision for row in ROWS})
    assert precisions(named, "135m") == ""
    assert "†" not in markdown(named)
    assert precisions(results, "0.5b") == ""


def test_results_of_before_precisions_were_kept_have_no_footnote(results: Results) -> None:
    assert "†" not in markdown(msgspec.structs.replace(results, precisions={}))


def test_a_part_of_a_run_keeps_the_precisions_of_its_rows(results: Results) -> None:
    assert results.of({"openvino"}).precisions == {"openvino": "f32"}


@pytest.mark.parametrize(
    ("weights", "inference", "cpu", "multiplied"),
    [
        ("fp16", "f32", "avx512f avx512_vnni", "f32"),
        ("fp16", "bf16", "avx512_vnni avx512_bf16", "bf16"),
        ("int8", "f32", "avx512f avx512_vnni", "int8"),
        ("int8", "f32", "avx2", "f32"),
        ("int8", "bf16", "avx512_vnni avx512_bf16", "bf16"),
    ],
)
def test_openvino_multiplies_in_8_bits_only_beside_float32_and_vnni(
    weights: str, inference: str, cpu: str, multiplied: str
) -> None:
    assert precision_of_openvino(weights, inference, f"flags\t: {cpu}\n") == multiplied


def test_types_are_told_as_the_table_names_them() -> None:
    assert [precision_of_dtype(name) for name in ("torch.bfloat16", "float32", "float64")] == ["bf16", "f32", "float64"]
    assert precision_of("native avx512-vnni int4", "bfloat16") == "int8"
    assert precision_of("onednn", "float32") == "f32"
