"""The process that renders chat templates: `python -P -m engine.text.template_sandbox`, started by `ChatTemplate`.

A model's template is a program of unknown origin, run for every request. Jinja's sandbox keeps it from Python's inside;
the process keeps it from the machine: no file or socket can be opened in it, and the kernel, which needs no help of a
busy interpreter, limits each job's processor time and memory.
"""

from __future__ import annotations

import json
import marshal
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.system.child_process import ignore_stop_signals
from engine.text.template_protocol import LENGTH, OUT_OF_MEMORY, Answer

_BYTES_FOR_EACH = 32
"""Memory for each byte of a job: its text may take four a character, and is there several times until it is written."""

_MAX_SENTENCE = 2000


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The environment that templates of models are written for, as in transformers; nothing loads files."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _GenerationBlock])
        self.filters["tojson"] = _to_json
        functions: dict[str, Callable[..., object]] = {"raise_exception": _raise, "strftime_now": _strftime_now}
        self.globals.update(functions)

    def handle_exception(self, source: str | None = None) -> NoReturn:
        """Raise what is being handled as it is: jinja2 would read files to name the template's lines in a traceback."""
        error = sys.exception()
        assert error is not None
        raise error


class TemplateRefusal(Exception):
    """The template's own complaint about the messages."""


def _raise(message: object) -> NoReturn:
    raise TemplateRefusal(str(message))


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


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}`: marks an assistant's words for training; here just its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as a set on the class

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """The nodes inside the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class CallArguments(dict[str, Any]):
    """A tool call's arguments. Most templates take an object; where one puts texts together, it is its JSON."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, other: str) -> str:
        return str(self) + other

    def __radd__(self, other: str) -> str:
        return other + str(self)


class Renderer:
    """One template, compiled by the first job."""

    def __init__(self) -> None:
        self._template: Template | None = None

    def answer(self, job: Sequence[Any]) -> tuple[Answer, str]:
        """Compile ("compile", source) or render ("render", variables)."""
        try:
            match job:
                case "compile", str(source):
                    self._template = TemplateEnvironment().from_string(source)
                    return Answer.DONE, ""
                case "render", dict(variables) if self._template is not None:
                    _wrap_arguments(variables["messages"])
                    return Answer.DONE, self._template.render(variables)
            raise ValueError("no such job")
        except TemplateRefusal as refusal:
            return Answer.REFUSED, str(refusal)[:_MAX_SENTENCE]
        except RecursionError:
            return Answer.FAILED, "it recurses endlessly, or is nested too deeply"
        except MemoryError:
            raise
        except Exception as error:  # a template is a program: whatever it trips over is the request's or its own fault
            match error:
                case TemplateSyntaxError():
                    reason = f"{error.message} (line {error.lineno})"
                case TemplateError():
                    reason = str(error)
                case _:
                    reason = f"{type(error).__name__}: {error}"
            return Answer.FAILED, reason[:_MAX_SENTENCE]


def _wrap_arguments(messages: Sequence[dict[str, Any]]) -> None:
    for message in messages:
        for call in message.get("tool_calls") or ():
            function = call["function"]
            if isinstance(function["arguments"], dict):
                function["arguments"] = CallArguments(function["arguments"])


def main(cpu_s: float, memory_bytes: int) -> None:
    """Serve jobs until stdin ends. A job that takes more than `cpu_s` of processor time, or `memory_bytes` besides what
    its own size explains, ends the process."""
    ignore_stop_signals()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, whatever it is doing
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})  # the parent may have had it blocked
    _read_ahead()
    own_bytes, [_, max_possible] = _address_space_bytes(), resource.getrlimit(resource.RLIMIT_AS)
    for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
        resource.setrlimit(limit, (0, 0))
    jobs, answers, renderer = sys.stdin.buffer, sys.stdout.buffer, Renderer()
    while len(head := jobs.read(LENGTH.size)) == LENGTH.size:
        [length] = LENGTH.unpack(head)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        if own_bytes:
            max_bytes = own_bytes + memory_bytes + _BYTES_FOR_EACH * length
            if max_possible != resource.RLIM_INFINITY:
                max_bytes = min(max_bytes, max_possible)
            resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_possible))
        try:
            kind, text = renderer.answer(marshal.loads(jobs.read(length)))
            encoded = text.encode("utf-8", "surrogatepass")
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        signal.setitimer(signal.ITIMER_PROF, 0)  # before the answer: it must not end what is asked next
        for part in (LENGTH.pack(1 + len(encoded)), bytes((kind,)), encoded):
            answers.write(part)
        answers.flush()


def _read_ahead() -> None:
    """Have Python read what it reads at first use: codecs, time zones, modules."""
    environment = TemplateEnvironment()
    for use in (
        '"\\N{BULLET}"',
        'strftime_now("%c %Z")',
        "lipsum()",
        *(f"'a b'|{name}" for name in environment.filters),
    ):
        with suppress(Exception):
            environment.from_string(f"{{{{ {use} }}}}").render()


def _address_space_bytes() -> int:
    """Return the bytes that this process has mapped; 0 where the system does not report it (and has no limit for
    it)."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
