"""Where chat templates run: jinja's sandbox, which keeps them from the machine, with a budget, which keeps them finite.

A model's template is a program of unknown origin, run for every request. Whatever can go on for long or grow is counted
where it happens: each turn of a loop, call, operator, filter and output takes what it makes from the rendering's
budget, before it is made where that can be known. Jinja compiles templates, so the program is rewritten before: loops
go through a filter, `~` and constants become what passes through the same counting, and literals of lists are weighed,
for what contains itself twice, again and again, is small to hold and endless to look at.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jinja2 import TemplateSyntaxError, Undefined, nodes, pass_context
from jinja2.ext import Extension, LoopControlExtension
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from engine.text.template_budget import (
    BudgetedContext,
    TooMuchWork,
    budget_of,
    made_by,
    made_by_filter,
    made_by_method,
)

MAX_SOURCE = 2**20
"""Characters of a template."""

_NARROW = 16
"""Characters between the parts of JSON that need no counting."""

# fmt: off
_FILTERS = frozenset({
    "abs", "attr", "batch", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float",
    "groupby", "indent", "int", "items", "last", "length", "list", "lower", "map", "max", "min", "reject",
    "rejectattr", "replace", "reverse", "round", "safe", "select", "selectattr", "slice", "sort", "string", "sum",
    "title", "trim", "unique", "upper", "wordcount",
})
# fmt: on


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox. Filters that no chat template needs are not there, nor is anything that reads or loads files."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    context_class = BudgetedContext

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=_output,
            extensions=[LoopControlExtension, _GenerationBlock],
            cache_size=0,
        )
        self.globals.pop("lipsum", None)
        self.filters = {name: _counted(name, FILTERS[name]) for name in _FILTERS}
        self.filters |= {_TURNS: _turns, _JOINED: _joined, _BUILT: _built, "join": _join, "tojson": _to_json}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > MAX_SOURCE:
            raise TemplateSyntaxError(f"it is longer than {MAX_SOURCE} characters", 1)
        template = _Rewriter().visit(super()._parse(source, name, filename))
        assert isinstance(template, nodes.Template)
        template.set_environment(self)
        return template

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator that can make much of little."""
        budget = budget_of(context)
        budget.spend(made_by(operator, left, right, budget))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function, a method or a macro."""
        budget = budget_of(context)
        method = getattr(obj, "__wrapped__", obj)
        name, owner = getattr(method, "__name__", ""), getattr(method, "__self__", None)
        args = tuple(list(arg) if name == "join" and isinstance(arg, Iterator) else arg for arg in args)
        budget.spend(made_by_method(owner, name, [*args, *kwargs.values()], budget))
        result = super().call(context, obj, *args, **kwargs)
        budget.weigh(result)
        return result


def _counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of jinja's that spends what it is given and what it makes."""
    passing = getattr(function, "jinja_pass_arg", None)
    wanted = None if passing is None else passing.name

    @pass_context
    def counted(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        value = list(_turns(context, value)) if isinstance(value, Iterator) else value
        budget = budget_of(context)
        budget.spend(made_by_filter(name, value, [*args, *kwargs.values()], budget))
        passed = {None: (), "context": (context,), "eval_context": (context.eval_ctx,)}
        first = passed.get(wanted, (context.environment,))
        made = function(*first, value, *args, **kwargs)
        return _turns(context, made) if isinstance(made, Iterator) else made

    return counted


@pass_context
def _turns(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    """The items of a loop, each of them a step."""
    spend = budget_of(context).spend
    for item in items:
        spend()
        yield item


@pass_context
def _join(context: Context, value: Iterable[Any], d: object = "", attribute: str | int | None = None) -> str:
    """Jinja's filter, which would look up what it joins too late to be weighed."""
    budget, found = budget_of(context), _turns(context, value)
    parts = list(found if attribute is None else FILTERS["map"](context, found, attribute=attribute))
    budget.weigh(parts)
    between = _joined(context, [d])
    budget.spend(len(between) * len(parts))
    return between.join(map(str, parts))


@pass_context
def _joined(context: Context, parts: Sequence[object]) -> str:
    """What `~` makes."""
    for part in parts:
        budget_of(context).weigh(part)
    return "".join(map(str, parts))


@pass_context
def _built(context: Context, value: Any) -> Any:
    """A list, a tuple or a dict that the template wrote down."""
    budget_of(context).weigh(value)
    return value


@pass_context
def _output(context: Context, value: Any) -> Any:
    """What is put out."""
    if isinstance(value, str):
        budget_of(context).spend(len(value))
    elif not isinstance(value, Undefined):
        budget_of(context).weigh(value)
    return value


@pass_context
def _to_json(
    context: Context,
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as a prompt wants it: jinja2's own filter would escape <, > and & for HTML."""
    budget = budget_of(context)
    if isinstance(indent, int) and indent > _NARROW:
        raise TooMuchWork("it indents JSON beyond all use")
    budget.weigh(value)
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    is_narrow = indent is None and all(len(each) <= _NARROW for each in separators or ())
    parts = []
    for part in [encoder.encode(value)] if is_narrow else encoder.iterencode(value):
        budget.spend(len(part))
        parts.append(part)
    return "".join(parts)


_TURNS, _JOINED, _BUILT = " turns", " joined", " built"
"""Names that no template can write."""


class _Rewriter(NodeTransformer):
    """Sends all of a program that can grow through what counts it."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - jinja2's name
        """Each turn is counted. A loop that calls itself could not be."""
        self.generic_visit(node)
        if node.recursive:
            raise TemplateSyntaxError("loops that call themselves are not supported", node.lineno)
        node.iter = nodes.Filter(node.iter, _TURNS, [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        """`~` knows no bounds of its own."""
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), _JOINED)

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:  # noqa: N802
        """Constant text is put out like any other."""
        return nodes.Const(node.data, lineno=node.lineno)

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        """A list may hold what holds it twice."""
        self.generic_visit(node)
        return _filtered(node, _BUILT)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        """As a list."""
        self.generic_visit(node)
        return _filtered(node, _BUILT)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        """As a list, where it is no target of an assignment."""
        self.generic_visit(node)
        return _filtered(node, _BUILT) if node.ctx == "load" else node


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}`: marks an assistant's words for training; here just its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as a set on the class

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """The nodes inside the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
