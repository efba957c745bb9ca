"""`ericllm api-keys`: what it prints, and what a running server sees of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from console.api.http.keys import Keys
from console.cli.main import main
from console.link.api import KeyLimits


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the keys are."""
    monkeypatch.setattr("console.cli.api_keys.state_dir", lambda: tmp_path)
    return tmp_path


async def test_a_key_is_printed_alone_on_stdout_and_is_valid(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    order = [
        "make",
        "ci",
        "--scope",
        "use",
        "--scope",
        "watch",
        "--rate",
        "60",
        "--tokens",
        "9000",
        "--concurrent",
        "2",
    ]
    assert main(["api-keys", *order]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("eric_")
    assert said.out.strip() not in said.err
    keys = Keys(state)
    keys.open()
    found = await keys.find(said.out.strip())
    assert found is not None
    assert (found.name, found.scopes) == ("ci", ("use", "watch"))
    assert found.stored.limits == KeyLimits(requests_per_min=60, tokens_per_min=9000, concurrent=2)


def test_keys_are_listed_without_what_they_consist_of(capsys: pytest.CaptureFixture[str]) -> None:
    main(["api-keys", "make", "ci", "--concurrent", "2"])
    key = capsys.readouterr().out.strip()
    main(["api-keys", "list"])
    line = capsys.readouterr().out
    assert line.startswith("ci, use models, 2 concurrent, created 20")
    assert key not in line
    main(["api-keys", "list", "--json"])
    (reading,) = json.loads(capsys.readouterr().out)
    assert (reading["name"], reading["limits"]["concurrent"]) == ("ci", 2)


def test_a_revoked_key_is_gone(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["api-keys", "make", "ci"])
    assert main(["api-keys", "revoke", "ci"]) == 0
    capsys.readouterr()
    main(["api-keys", "list"])
    assert capsys.readouterr().out == "No keys.\n"


@pytest.mark.parametrize(
    ("order", "sentence"),
    [
        (["revoke", "ci"], "There is no key ci"),
        (["make", "-"], "A key name has 1 to 40 letters"),
        (["make", "ci", "--rate", "0"], "0 is not a number from 1 to"),
        (["make", "ci", "--scope", "root"], "invalid choice: 'root'"),
        ([], "required: make | list | revoke"),
    ],
)
def test_a_wrong_order_is_one_sentence(order: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["api-keys", *order])
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else -1
    assert code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert sentence in line
