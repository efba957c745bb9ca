"""A setting is one row: flag, variable, key of config.toml, lines on the screens, docs, option of a load, refusal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.tiny_models import make_tiny_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("plugin")
    make_tiny_model(folder / "models" / "tiny")
    command = [sys.executable, "-m", "tests.integration.added_setting", str(folder)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def test_it_is_a_flag_a_variable_and_a_key_of_config_toml(report: dict[str, Any]) -> None:
    assert "--greetings N" in report["help"] and "--farewell WORD" in report["help"]
    assert [report[source] for source in ("flag", "variable", "file")] == [2, 4, 5]
    assert "# Greetings to a client." in report["sample"] and "# greetings = 3" in report["sample"]
    assert "Greetings 10: max 9" in report["out of range"]


def test_it_is_a_line_of_the_settings_screen_that_can_be_saved(report: dict[str, Any]) -> None:
    assert report["saved"] == ["7", "greetings = 7"]
    assert any("7" in row for row in report["line"])


def test_it_is_a_section_of_the_docs(report: dict[str, Any]) -> None:
    assert "### `--greetings N`\n\nGreetings to a client. Not set by default. Min 1, max 9." in report["page"]


def test_it_is_a_line_of_the_load_form(report: dict[str, Any]) -> None:
    assert report["options"] == {"greetings": 1, "farewell": "later"}
    assert report["form"] == {"model": "demo", "greetings": 6}


def test_it_is_an_option_of_a_load_over_http_within_its_bounds(report: dict[str, Any]) -> None:
    http = report["http"]
    assert http["loaded"] == "ready"
    assert http["remembered"]["greetings"] == 8
    status, answer = http["out of range"]
    assert (status, answer["error"]["param"]) == (400, "greetings")


def test_a_worker_gets_only_what_its_specification_has_a_field_for(report: dict[str, Any]) -> None:
    assert report["same spec"]


def test_a_backend_that_does_not_know_it_refuses_it(report: dict[str, Any]) -> None:
    status, answer = report["http"]["unsupported"]
    assert (status, answer["error"]["message"]) == (
        400,
        "--farewell requires --backend exllamav2",
    )


def test_one_that_comes_after_the_options_of_a_load_is_refused(report: dict[str, Any]) -> None:
    assert report["too late"] == "add the setting later before console.settings.load_options is imported"
