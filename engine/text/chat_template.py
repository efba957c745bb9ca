"""Chat templates: Jinja programs that come with a model and turn messages into its prompt text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import InvalidRequest


class ChatTemplate:
    """One template, compiled at first use, in a sandbox: a model's template is a program of unknown origin.

    variables: what the template may use besides the messages, bos_token and eos_token among them.
    """

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        self.source = source
        self._variables = dict(variables)

    def uses(self, variable: str) -> bool:
        """Whether it looks at a variable that it is given; not so for a source that is no template."""
        return variable in self._used

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        **kwargs: object,
    ) -> str:
        """The prompt text of `messages`; raises InvalidRequest with the template's own complaint."""
        variables = self._variables | {
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "tools": list(tools) if tools else None,
            "documents": None,
        }
        try:
            return self._template.render(variables | kwargs)
        except InvalidRequest:
            raise
        except Exception as error:  # a template is a program: whatever it trips over is the request's or its own fault
            reason = f"{type(error).__name__}: {error}" if not isinstance(error, TemplateError) else str(error)
            raise InvalidRequest(
                f"the model's chat template cannot render these messages: {reason}", param="messages"
            ) from error

    @cached_property
    def _template(self) -> Template:
        return _environment().from_string(self.source)

    @cached_property
    def _used(self) -> frozenset[str]:
        try:
            return frozenset(find_undeclared_variables(_environment().parse(self.source)))
        except TemplateError:
            return frozenset()


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}`: marks an assistant's words for training; here just its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as a set on the class

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """The nodes inside the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _GenerationBlock]
    )
    functions: dict[str, Callable[..., object]] = {"raise_exception": _raise, "strftime_now": _strftime_now}
    environment.globals.update(functions)
    environment.filters["tojson"] = _to_json
    return environment


def _raise(message: str) -> NoReturn:
    raise InvalidRequest(f"the model's chat template refuses these messages: {message}", param="messages")


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as a prompt wants it: jinja2's own filter would escape <, > and & for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
