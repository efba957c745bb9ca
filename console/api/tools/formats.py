"""Formats of tool calls, and which one the loaded model uses, by its chat template."""

from __future__ import annotations

import re
from dataclasses import dataclass

from console.api.tools.call_parsers import JsonCalls, MistralCalls, NamedCalls, Shape, XmlCalls
from engine.errors import InvalidRequest
from engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One format.

    name: display name.  patterns: regular expressions that all match in templates of models with this format.
    bare: True if a call may also be an answer that begins with {, without a marker.
    short_ids: True if ids of calls must be nine letters and digits.
    """

    name: str
    patterns: tuple[str, ...]
    shape: Shape
    bare: bool = False
    short_ids: bool = False

    def matches(self, template: str) -> bool:
        """Return whether a model with this chat template uses this format."""
        return all(re.search(pattern, template) for pattern in self.patterns)


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
"""The first one that matches a template is its format."""

DEFAULT = FORMATS[-1]
"""Format for models whose chat template has no tools: it is described in the system prompt."""

_MARKER = re.compile(r"<[|｜/\w][^<>\s{}]{2,60}>|\[/?[A-Z_]{4,40}\]")
_CALLING = re.compile(r"call|tool|function|action|invoke", re.IGNORECASE)


def format_of(tokenizer: Tokenizer) -> ToolFormat | None:
    """Return the model's format; None where its template has no tools, or an unsupported format."""
    template = tokenizer.tool_template
    if template is None or not template.uses("tools"):
        return None
    return next((supported for supported in FORMATS if supported.matches(template.source)), None)


def has_tools(tokenizer: Tokenizer) -> bool:
    """Return whether the model's chat template has tools."""
    template = tokenizer.tool_template
    return template is not None and template.uses("tools")


def require_format(tokenizer: Tokenizer) -> ToolFormat:
    """Return the model's format, the default one where its chat template has no tools; raises InvalidRequest with the
    reason where there is none."""
    if (tool_format := format_of(tokenizer)) is not None:
        return tool_format
    template = tokenizer.tool_template
    if template is None:
        raise InvalidRequest("tools are not supported: this model has no chat template", param="tools")
    if not template.uses("tools"):
        return DEFAULT
    markers = ", ".join(_markers_in(template.source))
    supported = ", ".join(dict.fromkeys(each.name for each in FORMATS))
    raise InvalidRequest(
        "tools are not supported: this model's chat template writes calls in an unsupported format "
        f"({f'its markers: {markers}' if markers else 'without markers'}); supported are those of {supported}",
        param="tools",
    )


def _markers_in(template: str) -> list[str]:
    """Return a few markers of a template that may belong to calls."""
    tool_format = dict.fromkeys(marker for marker in _MARKER.findall(template) if _CALLING.search(marker))
    return list(tool_format)[:6]
