"""A section of a Markdown page that a program writes, between two comments that name it."""

from __future__ import annotations

from pathlib import Path


def with_section(page: str, name: str, text: str) -> str:
    """`page` with that section replaced, or put at its end. Raises ValueError where one of its marks is missing."""
    begin, end = f"<!-- {name}: begin, written by make {name} -->", f"<!-- {name}: end -->"
    section = f"{begin}\n{text.strip()}\n{end}"
    if begin not in page and end not in page:
        return f"{page.rstrip()}\n\n{section}\n"
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f'the page has one mark of "{name}" without the other')
    return f"{before}{section}{after}"


def write_section(path: Path, name: str, text: str) -> None:
    """Replace it in a file."""
    page = path.read_text(encoding="utf-8") if path.is_file() else ""
    path.write_text(with_section(page, name, text), encoding="utf-8")
