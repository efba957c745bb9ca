"""The documents: links lead somewhere, commands that are marked run, pages that programs make are as they make them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from tests.fakes.kernel_cache import share_kernels
from tools.docs_pages import commands as commands_page
from tools.docs_pages import endpoints, settings

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    file
    for file in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("engine/**/*.md"))
    if not any(part.startswith(".") for part in file.relative_to(ROOT).parts)
)
RUNNABLE = "sh run"
TIME_LIMIT_S = 280
_NOT_IN_ANCHORS = re.compile(r"[^\w\- ]")


def names(file: Path) -> str:
    """A document's name for a test."""
    return str(file.relative_to(ROOT))


def tokens(file: Path) -> Iterator[Token]:
    """All of a document's tokens, those inside of lines too."""
    for token in MarkdownIt("commonmark").enable("table").parse(file.read_text(encoding="utf-8")):
        yield token
        yield from token.children or ()


def anchors(file: Path) -> set[str]:
    """What links into a document may end in, as forges make it of its headings."""
    found: set[str] = set()
    inside = False
    for token in MarkdownIt("commonmark").enable("table").parse(file.read_text(encoding="utf-8")):
        if inside and token.children is not None:
            text = "".join(child.content for child in token.children).lower()
            found.add(_NOT_IN_ANCHORS.sub("", text).replace(" ", "-"))
        inside = token.type == "heading_open"
    return found


def links(file: Path) -> list[str]:
    """Where a document's links and pictures lead, within the project."""
    found = [str(token.attrGet("href") or token.attrGet("src") or "") for token in tokens(file)]
    return [link for link in found if link and not re.match(r"[a-z]+:", link)]


@pytest.mark.parametrize("file", DOCUMENTS, ids=names)
def test_every_link_leads_somewhere(file: Path) -> None:
    for link in links(file):
        path, _, anchor = link.partition("#")
        target = (file.parent / path).resolve() if path else file
        assert target.exists(), f"{link} leads nowhere"
        if anchor:
            assert anchor in anchors(target), f"{link}: {target.name} has no such heading"


def test_links_are_found_and_anchors_are_made_as_forges_make_them(tmp_path: Path) -> None:
    file = tmp_path / "a.md"
    file.write_text("# One `two` & three_four\n\n[a](b.md#c) ![d](e.png) <https://f.g> | [h](#i)\n")
    assert links(file) == ["b.md#c", "e.png", "#i"]
    assert anchors(file) == {"one-two--three_four"}


def runnable() -> Iterator[tuple[str, str]]:
    """Every block that is marked, with where it stands."""
    for file in DOCUMENTS:
        for token in tokens(file):
            if token.type == "fence" and token.info.strip() == RUNNABLE and token.map is not None:
                yield f"{names(file)}:{token.map[0] + 1}", token.content


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("place", "commands"), [pytest.param(*each, id=each[0]) for each in runnable()])
def test_commands_that_are_marked_run(place: str, commands: str, tmp_path: Path) -> None:
    share_kernels(tmp_path / ".cache")
    environ = {**os.environ, "HOME": str(tmp_path), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environ = {name: value for name, value in environ.items() if not name.startswith(("XDG_", "ERICLLM_"))}

    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=tmp_path,
        env=environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
        check=False,
    )

    assert done.returncode == 0, f"{place}:\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize(
    ("made", "file", "program"),
    [
        (settings.page, "docs/settings.md", "tools.docs_pages.settings"),
        (commands_page.page, "docs/commands.md", "tools.docs_pages.commands"),
        (endpoints.page, "docs/api/endpoints.md", "tools.docs_pages.endpoints"),
    ],
)
def test_a_page_that_a_program_makes_is_as_it_makes_it(made: object, file: str, program: str) -> None:
    assert callable(made)
    renew = f"renew it: python -m {program} > {file}"
    assert (ROOT / file).read_text(encoding="utf-8") == f"{made()}\n", renew
