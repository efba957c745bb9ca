"""A sampler is one file: its parameter is a field of requests, a row of the chat's form and of the documentation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.tiny_models import make_tiny_model

ROOT = Path(__file__).parents[2]
SAMPLER = '''"""Top-n-sigma: the tokens within a number of standard deviations of the best logit (Tang et al. 2024)."""

from engine.samplers import Parameter, Sampler


def top_n_sigma(logits, nsigma):
    least = logits.amax(dim=-1, keepdim=True) - nsigma * logits.std(dim=-1, keepdim=True)
    return logits.masked_fill(logits < least, -float("inf"))


ROW = Parameter(
    "standard deviations below the best logit; 0 is off",
    0.0,
    100.0,
    name="nsigma",
    neutral=0.0,
    label="n-sigma",
    aliases=("top_n_sigma",),
)
SAMPLER = Sampler((ROW,), top_n_sigma)
'''


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("samplers")
    (folder / "top_n_sigma.py").write_text(SAMPLER)
    model = make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    command = [sys.executable, "-m", "tests.integration.added_sampler", str(folder), str(model)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def test_it_changes_the_tokens_by_its_name_and_by_its_alias(report: dict[str, Any]) -> None:
    assert report["narrow"] == report["by_alias"] == report["greedy"] != report["drawn"]
    assert report["half"] not in (report["greedy"], report["drawn"])


def test_its_neutral_value_changes_nothing(report: dict[str, Any]) -> None:
    assert report["neutral"] == report["drawn"]


def test_it_has_its_place_in_an_order_of_samplers(report: dict[str, Any]) -> None:
    assert report["half_ordered"] == report["half"]


def test_every_dialect_refuses_a_value_out_of_range(report: dict[str, Any]) -> None:
    for path, (status, text) in report["refusals"].items():
        assert status == 400, path
        assert "must be between 0.0 and 100.0" in text, path


def test_it_is_a_row_of_the_chats_form(report: dict[str, Any]) -> None:
    assert report["form"] == 1.5


def test_it_is_a_line_of_the_documentation(report: dict[str, Any]) -> None:
    meaning = "standard deviations below the best logit; 0 is off."
    assert f"| `nsigma` | `top_n_sigma` | number, 0 to 100 | `0.0` | {meaning} |" in report["documentation"]
    refused = "no: its library has no such sampler"
    assert f"| `nsigma` | `0.0` | 0 to 100 | yes | {refused} | yes |" in report["documentation"]
    assert not any("| `0` |" in line for line in report["documentation"])


def test_a_backend_that_lacks_it_refuses_it_by_name(report: dict[str, Any]) -> None:
    assert report["torch"] == ""
    assert report["exllamav2"] == ("nsigma is not supported by the exllamav2 backend: its library has no such sampler")
