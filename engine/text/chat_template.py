"""Chat templates: Jinja programs that come with a model and turn messages into its prompt text."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import NoReturn

from jinja2 import Template, TemplateError
from jinja2.meta import find_undeclared_variables

from engine.errors import InvalidRequest
from engine.text.template_budget import TooMuchWork
from engine.text.template_sandbox import TemplateEnvironment

QUICK_S = 0.02
"""What an event loop may wait for a rendering of a usual conversation; of a long one, for each `_USUAL` messages."""

_USUAL = 100


class ChatTemplate:
    """One template, compiled at first use, in a sandbox: a model's template is a program of unknown origin.

    variables: what the template may use besides the messages, bos_token and eos_token among them.
    is_quick: no rendering took so long that an event loop should not wait for it.
    """

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        self.source = source
        self.is_quick = True
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
            return self._timed(variables | kwargs, QUICK_S * max(1.0, len(messages) / _USUAL))
        except InvalidRequest:
            raise
        except TooMuchWork as error:
            raise InvalidRequest(
                f"the model's chat template cannot be used for these messages: {error}", param="messages"
            ) from None
        except Exception as error:  # a template is a program: whatever it trips over is the request's or its own fault
            reason = f"{type(error).__name__}: {error}" if not isinstance(error, TemplateError) else str(error)
            raise InvalidRequest(
                f"the model's chat template cannot render these messages: {reason}", param="messages"
            ) from error

    def _timed(self, variables: Mapping[str, object], quick_s: float) -> str:
        template, began = self._template, time.thread_time()
        try:
            return template.render(variables)
        finally:
            self.is_quick = self.is_quick and time.thread_time() - began < quick_s

    @cached_property
    def _template(self) -> Template:
        return _environment().from_string(self.source)

    @cached_property
    def _used(self) -> frozenset[str]:
        try:
            return frozenset(find_undeclared_variables(_environment().parse(self.source)))
        except TemplateError:
            return frozenset()


def _environment() -> TemplateEnvironment:
    environment = TemplateEnvironment()
    functions: dict[str, Callable[..., object]] = {"raise_exception": _raise, "strftime_now": _strftime_now}
    environment.globals.update(functions)
    return environment


def _raise(message: str) -> NoReturn:
    raise InvalidRequest(f"the model's chat template refuses these messages: {message}", param="messages")


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
