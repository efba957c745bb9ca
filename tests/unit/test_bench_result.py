"""Results of benches: what a file keeps, and what is read off the repeats."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from console.bench.result import (
    SCHEMA_VERSION,
    BenchResult,
    Column,
    Published,
    Row,
    Sample,
    TargetInfo,
    encode_result,
    merge_rows,
    read_result,
    write_file,
)
from console.bench.run import these_versions, this_machine
from console.bench.workload import read_trace
from engine.errors import InvalidRequest
from engine.simulation.step_costs import MeasuredModel

RESULT = BenchResult(
    name="users",
    started="2026-01-02T03:04:05+00:00",
    duration_s=12.5,
    machine=this_machine(),
    versions=these_versions(),
    target=TargetInfo(kind="engine", model="demo"),
    settings={"users": [1, 2], "quick": True, "note": None},
    seeds=[0],
    keys=(Column(name="users", title="users"),),
    columns=(Column(name="mean_e2el_ms", title="response", unit="ms", better="lower"),),
    rows=(
        Row(keys={"users": 1}, values={"mean_e2el_ms": [10.0, None, 14.0]}),
        Row(keys={"users": 2}, values={"mean_e2el_ms": [None]}),
    ),
    published=(Published(who="vLLM", device="A100", source="a study", values={"mean_e2el_ms": 5.0}),),
    notes=("Lengths were not forced.",),
    samples=(Sample(row=0, repeat=0, sent_s=0.0, end_s=1.0, prompt_tokens=3, output_tokens=2, token_s=[0.5, 1.0]),),
)


def test_a_result_comes_back_from_its_file_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "made" / "result.json"
    write_file(file, encode_result(RESULT), "json")
    assert read_result(file) == RESULT


def test_middle_and_spread_are_of_the_repeats_that_have_a_number() -> None:
    row, empty = RESULT.rows
    assert row.median("mean_e2el_ms") == 12.0
    assert row.spread("mean_e2el_ms") == (10.0, 14.0)
    assert (empty.median("mean_e2el_ms"), empty.spread("mean_e2el_ms")) == (None, None)
    assert row.median("something else") is None
    assert RESULT.repeats == 3


def test_repeats_of_a_row_are_put_together_in_order() -> None:
    rows = [
        Row(keys={"users": 1}, values={"a": [1.0]}),
        Row(keys={"users": 2}, values={"a": [2.0]}),
        Row(keys={"users": 1}, values={"a": [3.0], "b": [4.0]}),
    ]
    assert merge_rows(rows) == (
        Row(keys={"users": 1}, values={"a": [1.0, 3.0], "b": [4.0]}),
        Row(keys={"users": 2}, values={"a": [2.0]}),
    )


DEEP = (b'{"x":' * 100_000, b'[{"conversations":' * 100_000)


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[1", b"\xff\xfe", b'{"name": 3}', b'{"name":"\xff"}', *DEEP], ids=len
)
def test_a_file_that_is_no_result_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "odd.json"
    file.write_bytes(content)
    with pytest.raises(InvalidRequest, match=r"odd\.json is not a bench result"):
        read_result(file)
    with pytest.raises(InvalidRequest, match=r"odd\.json is not a trace"):
        read_trace(file)
    with pytest.raises(InvalidRequest, match=r"odd\.json holds no step costs"):
        MeasuredModel.read(file)


def test_a_file_of_a_newer_version_is_refused_with_both_numbers(tmp_path: Path) -> None:
    file = tmp_path / "new.json"
    file.write_bytes(encode_result(msgspec.structs.replace(RESULT, schema_version=SCHEMA_VERSION + 1)))
    with pytest.raises(InvalidRequest, match=f"schema {SCHEMA_VERSION + 1}; this one reads up to {SCHEMA_VERSION}"):
        read_result(file)


def test_files_that_cannot_be_read_or_written_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="none cannot be read"):
        read_result(tmp_path / "none")
    with pytest.raises(InvalidRequest, match="cannot be written"):
        write_file(tmp_path, encode_result(RESULT), "json")


def test_the_machine_says_what_it_is() -> None:
    machine, versions = this_machine(), these_versions()
    assert machine.cpu and machine.cores >= 1 and machine.ram_bytes > 0
    assert versions.python and versions.ericllm
