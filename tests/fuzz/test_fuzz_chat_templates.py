"""Chat templates of any kind, over messages of any kind: a text or a sentence, soon, and the loop turns meanwhile."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest

from engine.errors import InvalidRequest
from engine.text.chat_template import ChatTemplate, TemplateLimits
from tests.fakes.bounds import outcome

pytestmark = pytest.mark.long

PUBLISHED = sorted((Path(__file__).parents[1] / "data" / "chat_templates").glob("*.jinja"))
LIMITS = TemplateLimits(cpu_s=0.2)
MAX_SLICE_S = 0.1
"""What one turn of the loop may take of the processor."""

_VALUES = (
    "messages",
    "messages[0]",
    "m",
    "n.x",
    "'x'",
    "7",
    "0",
    "-1",
    "none",
    "[]",
    "{}",
    "tools",
    "loop",
    "self",
    "m.content",
)
_FILTERS = (
    "batch(2)",
    "list",
    "tojson",
    "join(n.x)",
    "replace('x', n.x)",
    "length",
    "string",
    "sort",
    "reverse",
    "unique",
    "sum",
    "map('upper')",
    "selectattr('role')",
    "groupby('role')",
    "center(9**9)",
    "indent(9**9)",
    "int",
    "round(99)",
    "slice(9)",
    "attr('__class__')",
    "format(n.x)",
    "wordwrap(1)",
    "urlize",
    "xmlattr",
    "pprint",
    "random",
    "dictsort",
    "items",
    "last",
)
_OPERATORS = (
    "+",
    "*",
    "~",
    "%",
    "//",
    "**",
    "-",
    "in",
    "==",
    "<",
    "and",
    "or",
    "is sameas",
)
_CALLS = (
    "range(9**5)",
    "n.x.join(n.x)",
    "'%s%s' % (n.x, n.x)",
    "'{0}{0}'.format(n.x)",
    "dict(a=n.x)",
    "cycler(n.x).next()",
    "namespace(y=n.x).y",
    "joiner(n.x)()",
    "lipsum(n=99)",
    "strftime_now('%c' * 9**5)",
    "raise_exception(n.x)",
    "f(n.x)",
    "n.x.__class__",
    "m.update(a=1)",
    "('x' * 9**7)[1:]",
    "n.x[1:]",
    "n.x.split(n.x)",
    "n.x.encode()",
)


def expression(random: Random, depth: int = 3) -> str:
    """Any, of things that templates have at hand."""
    kind = random.randrange(5) if depth else 0
    if kind == 0:
        return random.choice((*_VALUES, *_CALLS))
    inner = expression(random, depth - 1)
    if kind == 1:
        return f"({inner})|{random.choice(_FILTERS)}"
    if kind == 2:
        return f"({inner}) {random.choice(_OPERATORS)} ({expression(random, depth - 1)})"
    if kind == 3:
        return f"[{inner}, {expression(random, depth - 1)}]"
    return f"{{'a': {inner}, 'b': {expression(random, depth - 1)}}}"


def statement(random: Random, depth: int = 4) -> str:
    """Any, with statements in it."""
    body = "".join(statement(random, depth - 1) for _ in range(random.randrange(1, 3))) if depth else ""
    value = expression(random)
    return random.choice(
        (
            f"{{{{ {value} }}}}",
            f"{{% set n.x = {value} %}}{body}",
            f"{{% for i in range({random.choice((3, 60, 99999))}) %}}{body}{{% set n.x = {value} %}}{{% endfor %}}",
            f"{{% for m in messages %}}{body}{{{{ {value} }}}}{{% endfor %}}",
            f"{{% if {value} %}}{body}{{% else %}}x{{% endif %}}",
            f"{{% macro f(a) %}}{body}{{{{ f(a) }}}}{{% endmacro %}}{{{{ f({value}) }}}}",
            f"{{% set t %}}{body}{{% endset %}}{{{{ t }}}}",
            f"{{% include {value} %}}",
        )
    )


def program(random: Random) -> str:
    """A program of our own, or a published one with something torn out, doubled or put in."""
    if random.random() < 0.6:
        return "{% set n = namespace(x='ab') %}" + "".join(statement(random) for _ in range(3))
    source = random.choice(PUBLISHED).read_text()
    start = random.randrange(len(source))
    stop = min(len(source), start + random.choice((1, 20, 400)))
    middle = random.choice(("", source[start:stop] * 2, f"{{{{ {expression(random)} }}}}", "{%", "\x1b]52;c;x\x07"))
    return source[:start] + middle + source[stop:]


def messages(random: Random) -> list[dict[str, Any]]:
    """As the API hands them over."""
    roles = ("system", "user", "assistant", "tool")
    texts = ("", "hello", "{{ messages }}", "é\ud800\x1b[31m", "x" * 100_000, "\u202e", None)
    said: list[dict[str, Any]] = [
        {"role": random.choice(roles), "content": random.choice(texts)} for _ in range(random.choice((1, 3, 300)))
    ]
    function = {"name": "f", "arguments": {"a": [1, None, {"b": "c"}]}}
    said[-1] |= random.choice(({}, {"tool_calls": [{"id": "c", "type": "function", "function": function}]}))
    return said


async def rendered(source: str, said: list[dict[str, Any]]) -> str:
    """What a template makes, while the loop turns."""
    rendering = asyncio.ensure_future(ChatTemplate(source, {"bos_token": "<s>"}, LIMITS).render(said))
    while not rendering.done():
        began_s = time.thread_time()
        await asyncio.sleep(0.001)
        assert time.thread_time() - began_s < MAX_SLICE_S
    return await rendering


@pytest.mark.parametrize("seed", range(50))
def test_any_template_makes_a_text_or_a_sentence_within_bounds(seed: int) -> None:
    random = Random(seed)
    source, said = program(random), messages(random)
    outcome(lambda: asyncio.run(rendered(source, said)), len(source) + len(str(said)), InvalidRequest)
