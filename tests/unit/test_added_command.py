"""A command is one file: it is listed by --help, runs, and has a section of docs."""

from __future__ import annotations

from pathlib import Path

import pytest

import console.cli
from console.cli.main import main
from tools.docs_pages.commands import page

COMMAND = '''"""`ericllm say-hello NAME`: greet somebody."""

from engine.errors import InvalidRequest


def say_hello(argv, parser):
    parser.description = "Greet somebody."
    parser.add_argument("name", metavar="NAME", help="whom")
    parser.add_argument("--loud", action="store_true", help="in capitals")
    given = parser.parse_args(argv)
    if not given.name.isalpha():
        raise InvalidRequest(f"{given.name} is nobody's name")
    print("Hello,", given.name.upper() if given.loud else given.name)
    return 3
'''


@pytest.fixture(autouse=True)
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file more, and one that is no command."""
    (tmp_path / "say_hello.py").write_text(COMMAND)
    (tmp_path / "helpers.py").write_text('"""Parts of `ericllm say-hello`: no command."""\n')
    monkeypatch.setattr(console.cli, "__path__", [*console.cli.__path__, str(tmp_path)])


def test_it_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    listed = " ".join(capsys.readouterr().out.split())
    assert "'ericllm say-hello': greet somebody" in listed
    assert "helpers" not in listed


def test_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["say-hello", "Ada"]) == 3
    assert capsys.readouterr().out == "Hello, Ada\n"
    assert main(["say-hello", "Ada", "--loud"]) == 3
    assert capsys.readouterr().out == "Hello, ADA\n"


def test_a_flag_that_it_does_not_have_and_a_value_that_it_refuses_are_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["say-hello", "Ada", "--softly"])
    assert capsys.readouterr().err == "ericllm: unrecognized arguments: --softly (see ericllm say-hello --help)\n"
    assert main(["say-hello", "12"]) == 2
    assert capsys.readouterr().err == "ericllm: 12 is nobody's name\n"


def test_it_has_a_section_of_docs_with_its_arguments() -> None:
    assert "| [`ericllm say-hello`](#ericllm-say-hello) | Greet somebody" in page()
    section = page().partition("## `ericllm say-hello`")[2].partition("\n## ")[0]
    assert "| `NAME` | whom |" in section and "| `--loud` | in capitals |" in section
