"""Flags that the documents name are there."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.docs.test_documents import DOCUMENTS, ROOT, names, tokens
from tools.docs_pages.commands import parsers

FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
COMMAND = re.compile(r"ericllm(?=$| )[^#|&;\n]*")
SCRIPTS = ("engine", "tests", "tools")
OTHERS: Mapping[str, frozenset[str]] = {
    "apt-get": frozenset({"--no-install-recommends"}),
    "lm_eval": frozenset({"--model-args", "--tasks"}),
    "mypy": frozenset({"--strict"}),
    "pip": frozenset({"--dest", "--extra-index-url", "--index-url", "--no-cache-dir", "--no-deps"}),
    "pipx": frozenset({"--pip-args"}),
    "podman": frozenset({"--init", "--stop-timeout"}),
    "useradd": frozenset({"--system"}),
    "systemctl": frozenset({"--now"}),
    "pytest": frozenset({"--snapshot-update"}),
    "ray": frozenset(
        {
            "--address",
            "--generate",
            "--head",
            "--include-dashboard",
            "--node-ip-address",
            "--node-manager-port",
            "--node-name",
            "--object-manager-port",
        }
    ),
    "uv": frozenset({"--python", "--torch-backend"}),
}
"""Flags of other programs that the documents name."""


@functools.cache
def ours() -> Mapping[str, frozenset[str]]:
    """The flags of each command, as they are written with dashes."""
    return {
        parser.prog: frozenset(name for each in parser._actions for name in each.option_strings) for parser in parsers()
    }


@functools.cache
def of_scripts() -> frozenset[str]:
    """Flags of what is run out of the checkout: benchmarks, and checks beside the tests."""
    found = set()
    for folder in SCRIPTS:
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
                    flags = {str(each.value) for each in node.args if isinstance(each, ast.Constant)}
                    actions = {getattr(each.value, "attr", "") for each in node.keywords if each.arg == "action"}
                    has_opposites = "BooleanOptionalAction" in actions
                    found |= flags | ({f"--no-{flag[2:]}" for flag in flags} if has_opposites else set())
    return frozenset(found)


def code(file: Path) -> Iterator[str]:
    """Lines of code of a document, also within its sentences; drawings are none."""
    for token in tokens(file):
        if token.type in ("fence", "code_block", "code_inline"):
            yield from (line for line in token.content.splitlines() if "-->" not in line)


def flags_in(text: str) -> set[str]:
    """The flags that a line names, with dashes."""
    return {f"--{flag[2:].replace('_', '-')}" for flag in FLAG.findall(text)} - {"--no-NAME"}


@pytest.mark.parametrize("file", DOCUMENTS, ids=names)
def test_every_flag_that_a_document_names_is_there(file: Path) -> None:
    known = of_scripts().union(*ours().values(), *OTHERS.values())
    assert set().union(*map(flags_in, code(file))) - known == set()


@pytest.mark.parametrize("file", DOCUMENTS, ids=names)
def test_every_command_that_a_document_shows_takes_the_flags_it_is_shown_with(file: Path) -> None:
    for line in code(file):
        for command in COMMAND.findall(line):
            words = command.split()
            progs = (" ".join(words[:length]) for length in (3, 2, 1))
            prog = next(prog for prog in progs if prog in ours())
            assert flags_in(command) <= ours()[prog], command


def test_a_flag_that_is_not_there_is_found(tmp_path: Path) -> None:
    file = tmp_path / "a.md"
    file.write_text("Try `--no_such`, or\n\n    ericllm top --max_prompts 3   # --not-this\n    a --x--> b\n")
    found = set().union(*map(flags_in, code(file)))
    assert found == {"--no-such", "--max-prompts", "--not-this"}
    (command,) = (command for line in code(file) for command in COMMAND.findall(line))
    assert flags_in(command) - ours()["ericllm top"] == {"--max-prompts"}
