"""The words that `make lint` looks for: each kind is found, and ordinary code is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.lint_words import findings, findings_in_document, findings_in_page, main


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("told = 1", "told"),
        ("def tells(): ...", "tells"),
        ("class Pages:\n    def __init__(self) -> None:\n        self._held = 1", "_held"),
        ("def count(said: str) -> int: ...", "said"),
        ("tokens_told = 1", "tokens_told"),
        ("class ErrorTelling: ...", "ErrorTelling"),
        ("_MOST_BYTES = 1", "_MOST_BYTES"),
        ("LONGEST_LINE = 1", "LONGEST_LINE"),
        ("# whoever reads it", "whoever"),
        ('"The engine was told so."', "told"),
        ('f"Load {model} anew"', "anew"),
        ('f"{count} requests, 300 tokens at most"', "300 tokens at most"),
        ('f"steps of {tokens} tokens at most"', "{} tokens at most"),
        ('f"{size} MiB a worker"', "MiB a worker"),
        ('print("4 requests are under way")', "under way"),
        ('print(f"{over} too "\n"many")', "too many"),
        ('def pages():\n    """What is left."""', '"What ..."'),
        ('class Worker:\n    """Whether it runs."""', '"Whether ..."'),
        ('"""What this file is."""', '"What ..."'),
    ],
)
def test_a_word_that_has_a_better_one_is_found_with_its_line(source: str, word: str) -> None:
    found = findings(f"\n{source}\n") if not source.startswith('"""') else findings(source)
    assert word in [each.word for each in found]
    assert all(each.line > 1 or source.startswith('"""') for each in found)
    assert all(each.better for each in found)


@pytest.mark.parametrize(
    "source",
    [
        '"""Pages of the KV cache."""\n\nMAX_PAGES = 3',
        'def is_free(page: int) -> bool:\n    """Return whether a page is free."""',
        "untold_pages, foretell, keptness = 1, 2, 3",
        "almost_done = at_most = 1",
        '"at most once"',
        '"""Requests that are under way."""',
        'key = "asked"',
    ],
)
def test_ordinary_words_are_left_alone(source: str) -> None:
    assert findings(source) == []


def test_a_document_is_read_without_its_code() -> None:
    text = "# Keys\n\nAll are `told` here.\n\n```sh\nsay anew\n```\n\n| whoever | reads |\n"
    assert [(each.line, each.word) for each in findings_in_document(text)] == [(9, "whoever")]


@pytest.mark.parametrize(
    "line", ['<p class="said">Nobody is here</p>', 'say("Nobody is here"); // told', "say(`Nobody is ${here}`)"]
)
def test_a_page_is_read_without_its_code(line: str) -> None:
    assert findings_in_page(f"told(nobody)\n{line}")[0].word == "Nobody"


def test_files_with_words_are_named_and_end_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "good.py").write_text('"""A queue."""\n')
    assert main([str(tmp_path)]) == 0
    (tmp_path / "bad.py").write_text('"""A queue."""\n\ntold = 1\n')
    assert main([str(tmp_path)]) == 1
    (tmp_path / "page.md").write_text("Nobody.\n")
    assert main([str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert f"{tmp_path}/bad.py:3: told" in shown
    assert f"{tmp_path}/page.md:1: Nobody" in shown
