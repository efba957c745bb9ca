"""How the loaded model writes tool calls, found out from its own chat template: the one table of formats."""

from __future__ import annotations

import re
from dataclasses import dataclass

from console.api.tools.call_parsers import JsonCalls, MistralCalls, NamedCalls, Shape, XmlCalls
from engine.errors import InvalidRequest
from engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One format.

    name: for people.  signs: regular expressions that a template has all of where its model writes calls so.
    bare: a call may also be an answer that begins with { and needs no marker.
    short_ids: ids of calls are nine letters and digits, and templates refuse any other.
    example: what a call looks like.
    """

    name: str
    signs: tuple[str, ...]
    shape: Shape
    bare: bool = False
    short_ids: bool = False

    def marks(self, template: str) -> bool:
        """Whether `template` is one of a model that writes calls so."""
        return all(re.search(sign, template) for sign in self.signs)


_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")

FORMATS: tuple[ToolFormat, ...] = (
    ToolFormat("Qwen3-Coder", ("<tool_call>", "<function=", "<parameter="), XmlCalls()),
    ToolFormat(
        "Kimi K2",
        (r"<\|tool_calls_section_begin\|>",),
        NamedCalls(
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            numbered=True,
        ),
    ),
    ToolFormat(
        "DeepSeek V3",
        ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "```json"),
        NamedCalls(
            "<｜tool▁call▁begin｜>", "\n", "<｜tool▁call▁end｜>", _DEEPSEEK, "function<｜tool▁sep｜>", fenced=True
        ),
    ),
    ToolFormat(
        "DeepSeek V3.1",
        ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
        NamedCalls("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", _DEEPSEEK),
    ),
    ToolFormat("Mistral", (r"\[TOOL_CALLS\]", r"\[ARGS\]"), MistralCalls(named=True), short_ids=True),
    ToolFormat("Mistral", (r"\[TOOL_CALLS\]",), MistralCalls(), short_ids=True),
    ToolFormat("Nemotron", ("<TOOLCALL>",), JsonCalls("<TOOLCALL>", "</TOOLCALL>", array=True)),
    ToolFormat("Phi-4", (r"<\|/tool_call\|>",), JsonCalls("<|tool_call|>", "<|/tool_call|>", array=True)),
    ToolFormat("Granite", (r"<\|tool_call\|>",), JsonCalls("<|tool_call|>", array=True)),
    ToolFormat(
        "Command R7B",
        (r"<\|START_ACTION\|>",),
        JsonCalls("<|START_ACTION|>", "<|END_ACTION|>", True, "tool_name", "parameters"),
    ),
    ToolFormat(
        "Llama 3",
        (r"<\|(start_header_id|header_start)\|>", r'"parameters\\?": '),
        JsonCalls("<|python_tag|>", arguments="parameters"),
        bare=True,
    ),
    ToolFormat("Jamba", ("<tool_calls>", "</tool_calls>"), JsonCalls("<tool_calls>", "</tool_calls>", array=True)),
    ToolFormat("Hermes", ("<tool_call>", "</tool_call>", r'"name\\?": '), JsonCalls("<tool_call>", "</tool_call>")),
)
"""The first whose signs a template has is its format."""

_MARKER = re.compile(r"<[|｜/\w][^<>\s{}]{2,60}>|\[/?[A-Z_]{4,40}\]")
_CALLING = re.compile(r"call|tool|function|action|invoke", re.IGNORECASE)


def format_of(tokenizer: Tokenizer) -> ToolFormat | None:
    """How the model writes calls; None where its template knows no tools, or writes calls as no format here does."""
    template = tokenizer.tool_template
    if template is None or not template.uses("tools"):
        return None
    return next((known for known in FORMATS if known.marks(template.source)), None)


def known_format(tokenizer: Tokenizer) -> ToolFormat:
    """Likewise; raises InvalidRequest, saying which of the two it is, in place of None."""
    if (found := format_of(tokenizer)) is not None:
        return found
    template = tokenizer.tool_template
    if template is None or not template.uses("tools"):
        raise InvalidRequest("tools are not supported: this model's chat template knows none", param="tools")
    markers = ", ".join(_markers_in(template.source))
    known = ", ".join(dict.fromkeys(each.name for each in FORMATS))
    raise InvalidRequest(
        "tools are not supported: this model's chat template writes calls in a format that is not known here "
        f"({f'its markers: {markers}' if markers else 'without markers'}); known are those of {known}",
        param="tools",
    )


def _markers_in(template: str) -> list[str]:
    """What may mark calls there, a few of them."""
    found = dict.fromkeys(marker for marker in _MARKER.findall(template) if _CALLING.search(marker))
    return list(found)[:6]
