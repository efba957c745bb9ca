"""Which backend honours what, what is refused by name, and the page that says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.backends.parameters import BACKENDS, lacking, refuse_lacking
from engine.config import MAX_BANNED_CHARACTERS, MAX_BANNED_STRINGS, PARAMETERS, SamplingParams
from engine.errors import InvalidRequest
from tools.docs_pages.sampling import table

PAGE = Path(__file__).parents[2] / "docs" / "sampling.md"


def test_the_page_shows_the_table() -> None:
    assert table() in PAGE.read_text(), "docs/sampling.md is not what `python -m tools.docs_pages.sampling` prints"


def test_rows_name_nothing_but_parameters_and_backends() -> None:
    assert {row.part_of for row in PARAMETERS.values()} - {""} <= set(PARAMETERS)
    assert {backend for name in PARAMETERS for backend in lacking(name)} <= set(BACKENDS)


def test_no_two_parameters_have_a_name_in_common() -> None:
    names = [name for row in PARAMETERS.values() for name in {row.name, row.http_name, *row.aliases}]
    assert len(names) == len(set(names))


def test_neutral_parameters_are_honoured_by_all() -> None:
    for backend in BACKENDS:
        refuse_lacking(SamplingParams(mirostat_tau=3.0, mirostat_eta=0.2), backend)


@pytest.mark.parametrize(
    ("field", "fields"), [("mirostat", {"mirostat": 2}), ("cfg_scale", {"cfg_scale": 1.5, "negative_prompt_ids": (1,)})]
)
def test_a_parameter_that_the_backend_lacks_is_refused_by_name(field: str, fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields).validate()
    refuse_lacking(params, "exllamav2")
    with pytest.raises(InvalidRequest, match=f"{field} is not supported by the torch backend") as refused:
        refuse_lacking(params, "torch")
    assert refused.value.details["param"] == field


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_a": 1.1}, "top_a"),
        ({"tfs": 0.0}, "tfs"),
        ({"max_temp": 1.0, "min_temp": 1.0}, "max_temp"),
        ({"min_temp": 0.5}, "max_temp"),
        ({"temp_exponent": 0.0}, "temp_exponent"),
        ({"smoothing_factor": -0.1}, "smoothing_factor"),
        ({"xtc_probability": 1.5}, "xtc_probability"),
        ({"xtc_threshold": -0.5}, "xtc_threshold"),
        ({"mirostat": 1}, "mirostat"),
        ({"mirostat_tau": 0.0}, "mirostat_tau"),
        ({"repetition_range": -1}, "repetition_range"),
        ({"dry_multiplier": float("nan")}, "dry_multiplier"),
        ({"dry_base": 0.9}, "dry_base"),
        ({"dry_allowed_length": 0}, "dry_allowed_length"),
        ({"cfg_scale": 2.0}, "cfg_scale"),
        ({"banned_strings": ("",)}, "banned_strings"),
        ({"banned_strings": ("x",) * (MAX_BANNED_STRINGS + 1)}, "banned_strings"),
        ({"banned_strings": ("x" * (MAX_BANNED_CHARACTERS + 1),)}, "banned_strings"),
    ],
    ids=str,
)
def test_what_lies_out_of_range_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest, match=param) as refused:
        SamplingParams(**fields).validate()
    assert refused.value.details["param"] == param


def test_everything_at_once_is_valid_and_crosses_the_channel() -> None:
    params = SamplingParams(
        top_a=0.2,
        tfs=0.9,
        min_temp=0.5,
        max_temp=2.0,
        smoothing_factor=0.3,
        xtc_probability=0.5,
        mirostat=2,
        repetition_range=64,
        repetition_decay=32,
        dry_multiplier=0.8,
        dry_breaker_ids=(1, 2),
        cfg_scale=1.5,
        negative_prompt_ids=(3,),
        banned_strings=("as an AI",),
    ).validate()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
