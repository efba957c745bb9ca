"""What holds an answer to a grammar, by llguidance: which tokens may come next, however the tokenizer cuts the text.

A grammar is compiled in a thread whose stack is as deep as its definitions refer to one another: the library follows
those by recursion, and where a stack ends it takes the process with it. What nests without them it bounds by itself,
as it does the time and the memory that anything takes.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

import llguidance
import msgspec
from llguidance.gbnf_to_lark import any_to_lark

from engine.config import Grammar
from engine.errors import InvalidRequest

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

T = TypeVar("T")

JSON_WHITESPACE = r"([\x20\x09]|\x0A[\x20\x09]{0,32})"
"""What may stand between the parts of a JSON document: a space, or a line's end and indentation. With more, a model
that is unsure would go on with it for ever."""

LIMITS = llguidance.LLParserLimits(max_lexer_states=50_000, verbose_errors=False)

_JSON: JsonCompileOptions = {"whitespace_pattern": JSON_WHITESPACE}
_KINDS = {
    "json_schema": "a JSON schema that answers can be held to",
    "json_object": "a JSON object",
    "regex": "a regular expression that answers can be held to",
    "choice": "a choice",
    "lark": "a grammar that answers can be held to",
}
_MIN_STACK_BYTES = 2**24
_MAX_STACK_BYTES = 2**29
_BYTES_PER_LEVEL = 3 * 2**12
_BYTES_PER_KEY = 2**9
"""Of stack, more than were measured: for an object or a definition that refers to others, for a key of an object."""

_LONGEST_REASON = 300
_WORD = re.compile(r"\w+")
_DEFINES = re.compile(r"\s*[?!]*\w+[^:\"/]*:")
_BEFORE_COLON = re.compile(r"\s+:")
_starting = threading.Lock()


def check(grammar: Grammar) -> None:
    """Raise InvalidRequest, naming the client's field, for a grammar that nothing can be held to.

    Takes milliseconds for a usual one, a fraction of a second at worst, in which other threads run.
    """
    definition = define(grammar)
    failed, messages = in_deep_thread(
        lambda: llguidance.LLMatcher.validate_grammar_with_warnings(definition, None, limits=LIMITS), grammar
    ).result()
    if failed:
        raise unusable(grammar, messages[0])


def define(grammar: Grammar) -> str:
    """The grammar as llguidance takes it; raises InvalidRequest where it is not even in its own language."""
    matcher = llguidance.LLMatcher
    try:
        match grammar.kind:
            case "json_schema":
                return matcher.grammar_from_json_schema(grammar.source, overrides=_JSON)
            case "json_object":
                return matcher.grammar_from_json_schema('{"type": "object"}', overrides=_JSON)
            case "regex":
                return matcher.grammar_from_regex(grammar.source)
            case "choice":
                choices = json.loads(grammar.source)
                return matcher.grammar_from_lark("start: " + " | ".join(json.dumps(choice) for choice in choices))
            case "lark":
                return matcher.grammar_from_lark(any_to_lark(grammar.source))
    except RecursionError:
        raise unusable(grammar, "it is nested too deeply") from None
    except Exception as error:  # the converter from EBNF raises Exception itself
        raise unusable(grammar, str(error)) from error


def without(grammar: Grammar, banned: Sequence[str]) -> Grammar:
    """A choice without those in which a banned string would come, any other grammar as it is.

    Raises InvalidRequest where none is left.
    """
    if grammar.kind != "choice" or not banned:
        return grammar
    choices, folded = json.loads(grammar.source), [string.casefold() for string in banned]
    left = [choice for choice in choices if not any(string in choice.casefold() for string in folded)]
    if not left:
        raise InvalidRequest(f"every {grammar.param} has one of banned_strings in it", param="banned_strings")
    return msgspec.structs.replace(grammar, source=json.dumps(left)) if len(left) < len(choices) else grammar


def in_deep_thread(work: Callable[[], T], grammar: Grammar) -> Future[T]:
    """What comes of `work`, done in a thread of its own, with the stack that compiling `grammar` may take.

    Raises InvalidRequest where that is more than any grammar gets, or than there is.
    """
    size = stack_bytes(grammar)
    if size > _MAX_STACK_BYTES:
        raise unusable(grammar, "its definitions refer to one another too deeply")
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    with _starting:  # the size is the whole process's
        usual = threading.stack_size(size)
        try:
            threading.Thread(target=run, name="grammar", daemon=True).start()
        except RuntimeError:
            raise unusable(grammar, f"{size >> 20} MiB of stack to compile it cannot be had") from None
        finally:
            threading.stack_size(usual)
    return future


def stack_bytes(grammar: Grammar) -> int:
    """The most stack that compiling a grammar may take, by its structure. Raises InvalidRequest for what is no JSON."""
    levels = keys = 0
    try:
        if grammar.kind == "json_schema":
            levels, keys = _referring_objects(grammar.source)
        elif grammar.kind == "lark":
            levels = _referring_definitions(grammar.source)
    except RecursionError:
        raise unusable(grammar, "it is nested too deeply") from None
    except ValueError as error:
        raise unusable(grammar, str(error)) from error
    return _MIN_STACK_BYTES + _BYTES_PER_LEVEL * levels + _BYTES_PER_KEY * keys


def _referring_objects(schema: str) -> tuple[int, int]:
    """How many objects of a JSON schema hold a reference, at whatever depth, and how many keys it has in all.

    A chain of references passes each of those objects once.
    """
    levels = keys = 0

    def refers(value: object) -> bool:
        return value is True or (isinstance(value, list) and any(map(refers, value)))

    def visit(pairs: list[tuple[str, object]]) -> bool:
        """Whether an object holds a reference, which stands for it in what is around it."""
        nonlocal levels, keys
        found = any("ref" in key.lower() or refers(value) for key, value in pairs)
        levels, keys = levels + found, keys + len(pairs)
        return found

    json.loads(schema, object_pairs_hook=visit)
    return levels, keys


def _referring_definitions(source: str) -> int:
    """How many definitions of a grammar may name another, and how many brackets are on their lines.

    A chain of references passes each once. Words in strings are taken for names, and where a part is in another
    language (JSON, say), every line for one that names something.
    """
    lines = _BEFORE_COLON.sub(":", source).split("\n")
    named = {word for line in lines for word in _WORD.findall(line.rpartition(":")[0])}
    mixed = "%json" in source or "%lark" in source
    levels = 0
    for line in lines:
        defines = _DEFINES.match(line)
        if mixed or not named.isdisjoint(_WORD.findall(line, defines.end() if defines else 0)):
            goes_on = line.lstrip().startswith("|")
            levels += sum(map(line.count, "([{")) + max(line.count(":"), not goes_on)
    return levels


def unusable(grammar: Grammar, why: str) -> InvalidRequest:
    """The error of a grammar that nothing can be held to."""
    return InvalidRequest(f"{grammar.param} is not {_KINDS[grammar.kind]}: {_reason(why)}", param=grammar.param)


def _reason(message: str) -> str:
    """What is wrong, in one line: of a regular expression's parser the last one, of all others the first."""
    lines = message.strip().splitlines() or ["it cannot be read"]
    line = next((line for line in lines if line.startswith("error: ")), lines[0])
    return line.removeprefix("error: ").removeprefix("at 1(8): ")[:_LONGEST_REASON]
