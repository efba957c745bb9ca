"""What holds an answer to a grammar, by llguidance: which tokens may come next, however the tokenizer cuts the text.

A grammar is compiled in a thread whose stack is as deep as its source can nest: the library compiles by recursion, and
where a stack ends it takes the process with it. Its own limits bound the time and the memory that anything takes.
"""

from __future__ import annotations

import json
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
_LEAST_STACK_BYTES = 2**24
_STACK_BYTES_PER_BYTE = 2**12
_LONGEST_REASON = 300
_starting = threading.Lock()


def check(grammar: Grammar) -> None:
    """Raise InvalidRequest, naming the client's field, for a grammar that nothing can be held to.

    Takes milliseconds for a usual one, a fraction of a second at worst, in which other threads run.
    """
    definition = define(grammar)
    failed, messages = in_deep_thread(
        lambda: llguidance.LLMatcher.validate_grammar_with_warnings(definition, None, limits=LIMITS), definition
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


def in_deep_thread(work: Callable[[], T], source: str) -> Future[T]:
    """What comes of `work`, done in a thread of its own, with a stack for whatever nests in `source`."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    with _starting:  # the size is the whole process's
        usual = threading.stack_size(_LEAST_STACK_BYTES + _STACK_BYTES_PER_BYTE * len(source))
        try:
            threading.Thread(target=run, name="grammar", daemon=True).start()
        finally:
            threading.stack_size(usual)
    return future


def unusable(grammar: Grammar, why: str) -> InvalidRequest:
    """The error of a grammar that nothing can be held to."""
    return InvalidRequest(f"{grammar.param} is not {_KINDS[grammar.kind]}: {_reason(why)}", param=grammar.param)


def _reason(message: str) -> str:
    """What is wrong, in one line: of a regular expression's parser the last one, of all others the first."""
    lines = message.strip().splitlines() or ["it cannot be read"]
    line = next((line for line in lines if line.startswith("error: ")), lines[0])
    return line.removeprefix("error: ").removeprefix("at 1(8): ")[:_LONGEST_REASON]
