"""Words that no name, docstring, comment, text or document may have: `python -m tools.lint_words [PATH ...]`.

Prints each with its place and the field's word, and ends with 1 if there are any. The lists are short on purpose: they
keep out words that were in use here and that a reader has to guess at.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOMS = ("engine", "console", "tools", "docs", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")

WHOLE_NAMES = {
    **dict.fromkeys(("told", "tell", "tells", "telling", "said", "says"), "text, sentence, answer, report"),
    **dict.fromkeys(("held", "taken", "lent", "lend", "kept"), "what it is: reserved, used, view, saved"),
    **dict.fromkeys(("came", "gone", "went", "known", "met"), "what it is: received, removed, by_name, reached"),
    **dict.fromkeys(("wear", "worn"), "apply, applied"),
}
"""Names that say nothing, underscores in front aside."""

NAME_PARTS = {
    **dict.fromkeys(("told", "tells", "telling"), "format, describe, report"),
    **dict.fromkeys(("anew", "whoever", "nobody", "somebody"), "again, any, none"),
    **dict.fromkeys(("upkeep", "habit", "habits", "naps", "vitals", "worn"), "budget, preferences, idle, heartbeat"),
}
"""Parts of names: words between underscores and capitals."""

NAME_STARTS = {"MOST_": "MAX_", "LEAST_": "MIN_", "LONGEST_": "MAX_"}
"""Beginnings of constants, underscores in front aside."""

PHRASES = {
    r"told|tells?|telling": "say, show, report, distinguish",
    r"anew": "again",
    r"(?-i:[Bb]eside (?=[a-z]))": "next to, with, in addition",
    r"whoever|nobody|somebody": "the client, a user, no one; name who",
    r"so many": "a number, n, as many",
    r"(?:\d[\d,.]*|\{\}) (?:\w+ ){0,2}at most": "max N",
}
"""In comments, docstrings, texts, documents and pages. {} is a value in an f-string."""

SHOWN = {
    r"(?<!best )so far": "current, partial, total",
    r"under way|goes? on|as it was before": "running, active; continue; restored",
    r"likewise|as set|keep it so": "same format, default, leave empty",
    r"too many": "N over, more than N",
    r"at most(?=[,;.:]|$)": "max N, up to N",
    r"asks|asked|asking": "sends, requested, requires",
    r"guess(?:es|ed|ing)?": "draft tokens, estimate",
    r"turned|turning": "changed, tuned, rotated",
    r"cannot be had|cannot be honoured": "not available, not supported",
    r"(?-i:It (?:fits|does not fit))|it (?:may|knows|must be a duration)": "Fits, Scopes, supported, not a duration",
    r"(?:[KMG]iB|\{\}) a (?:worker|page|weight|token)": "per worker, per page, per weight",
    r"(?:requests|tokens|requests/s) a second": "per second, /s",
    r"kept as|in full|where you are|by a word|as the model suggests": "saved as, full, here, filter, defaults",
    r"good/s|\{\} windows": "goodput/s, runs",
}
"""In what people read: strings of several words that are no docstrings, and texts of pages."""

OPENINGS = {r"What ": "a noun phrase or an imperative", r"Whether ": "Return whether, or True if"}
"""First words of a docstring of a module, class or function."""

_NAME_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_PAGE_TEXT = re.compile(r"""//.*|"[^"]* [^"]*"|`[^`]* [^`]*`|>[^<>]*<""")
_CODE = re.compile(r"^ *```.*?^ *```|`[^`]*`", re.MULTILINE | re.DOTALL)


_Phrases = list[tuple[re.Pattern[str], str]]


def _compiled(phrases: Mapping[str, str]) -> _Phrases:
    return [(re.compile(rf"(?<!\w)(?:{phrase})(?!\w)", re.IGNORECASE), better) for phrase, better in phrases.items()]


_PHRASES = _compiled(PHRASES)
_SHOWN = _compiled(PHRASES | SHOWN)


@dataclass(frozen=True, order=True)
class Finding:
    """A word at a line, counted from 1."""

    line: int
    word: str
    better: str


def findings(source: str) -> list[Finding]:
    """Return the words in a Python source that have a better one."""
    tree = ast.parse(source)
    found = {finding for line, name in _names(tree) for finding in _in_name(line, name)}
    found.update(finding for line, text in _comments(source) for finding in _in_text(line, text, _PHRASES))
    docstrings = {id(node) for node in _docstrings(tree)}
    for node, text in _strings(tree):
        phrases = _SHOWN if " " in text and id(node) not in docstrings else _PHRASES
        found.update(
            finding for at, line in enumerate(text.split("\n")) for finding in _in_text(node.lineno + at, line, phrases)
        )
    return sorted(found | set(_openings(tree)))


def findings_in_document(text: str) -> list[Finding]:
    """Return the words in a Markdown document that have a better one; code is left out."""
    prose = _CODE.sub(lambda code: re.sub(r"[^\n]", " ", code.group()), text)
    return _in_lines(prose, _PHRASES)


def findings_in_page(text: str) -> list[Finding]:
    """Return the words in an HTML or JavaScript file that have a better one; code is left out."""
    return _in_lines("\n".join(" ".join(_PAGE_TEXT.findall(line)) for line in text.splitlines()), _SHOWN)


def _names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The names that the source gives: of functions, classes, arguments, variables and attributes."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr


def _in_name(line: int, name: str) -> Iterator[Finding]:
    bare = name.strip("_")
    if bare in WHOLE_NAMES:
        yield Finding(line, name, WHOLE_NAMES[bare])
        return
    for start, better in NAME_STARTS.items():
        if bare.startswith(start):
            yield Finding(line, name, better)
    for part in _NAME_PART.findall(name):
        if part.lower() in NAME_PARTS:
            yield Finding(line, name, NAME_PARTS[part.lower()])


def _comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def _docstrings(tree: ast.AST) -> Iterator[ast.expr]:
    """Strings that are statements."""
    return (node.value for node in ast.walk(tree) if isinstance(node, ast.Expr))


def _strings(tree: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """Strings, joined where they are written in parts; {} stands for each value."""
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)):
                yield node, text
            case ast.JoinedStr():
                yield node, "".join(str(each.value) if isinstance(each, ast.Constant) else "{}" for each in node.values)


def _in_lines(text: str, phrases: _Phrases) -> list[Finding]:
    lines = enumerate(text.splitlines(), 1)
    return sorted({finding for at, line in lines for finding in _in_text(at, line, phrases)})


def _in_text(line: int, text: str, phrases: _Phrases) -> Iterator[Finding]:
    for phrase, better in phrases:
        for match in phrase.finditer(text):
            yield Finding(line, match.group(), better)


def _openings(tree: ast.AST) -> Iterator[Finding]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node, clean=False) or ""
        for opening, better in OPENINGS.items():
            if text.startswith(opening):
                yield Finding(node.body[0].lineno, f'"{opening}..."', better)


_FINDERS = {".py": findings, ".md": findings_in_document, ".js": findings_in_page, ".html": findings_in_page}


def main(arguments: list[str]) -> int:
    """Look at the files of the paths, by default of the product, its tools and its documents."""
    files = sorted(
        file
        for path in map(Path, arguments or ROOMS)
        for file in ([path] if path.is_file() else path.rglob("*.*"))
        if file.suffix in _FINDERS and file.resolve() != Path(__file__).resolve()
    )
    count = 0
    for file in files:
        for finding in _FINDERS[file.suffix](file.read_text()):
            count += 1
            print(f"{file}:{finding.line}: {finding.word}  ({finding.better})")
    print(f"{count} words in {len(files)} files", file=sys.stderr)
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
