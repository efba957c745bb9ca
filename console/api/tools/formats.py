"""Formats of tool calls, and which one the loaded model uses, by its chat template."""

from __future__ import annotations

import re
from dataclasses import dataclass

from console.api.tools.call_parsers import JsonCalls, KeyedCalls, MistralCalls, NamedCalls, Shape
from console.api.tools.harmony_calls import HarmonyCalls
from console.api.tools.parameter_parsers import GemmaCalls, KeyValueCalls, PythonCalls, XmlCalls
from engine.errors import InvalidRequest
from engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One format.

    name: display name.  patterns: regular expressions that all match in templates of models with this format.
    bare: the character that an answer without a marker begins with if it is a call; "" where calls have a marker.
    short_ids: True if ids of calls must be nine letters and digits.
    one_per_turn: True if templates render only the first call of a message.
    """

    name: str
    patterns: tuple[str, ...]
    shape: Shape
    bare: str = ""
    short_ids: bool = False
    one_per_turn: bool = False

    def matches(self, template: str) -> bool:
        """Return whether a model with this chat template uses this format."""
        return all(re.search(pattern, template) for pattern in self.patterns)


_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")


def _dsml(section: str) -> XmlCalls:
    """Return the shape of DeepSeek's DSML, whose sections have a name of their own in each version."""
    return XmlCalls(
        (f"<｜DSML｜{section}>", f"</｜DSML｜{section}>"),
        ('<｜DSML｜invoke name="', "</｜DSML｜invoke>"),
        ('<｜DSML｜parameter name="', "</｜DSML｜parameter>"),
        quoted=True,
        typed=True,
        several=True,
        control=("｜DSML｜",),
    )


FORMATS: tuple[ToolFormat, ...] = (
    ToolFormat("GPT-OSS", (r"<\|channel\|>commentary", r"functions\."), HarmonyCalls(), one_per_turn=True),
    ToolFormat(
        "Seed-OSS",
        ("<seed:tool_call>", "<function="),
        XmlCalls(("<seed:tool_call>", "</seed:tool_call>")),
    ),
    ToolFormat(
        "MiniMax-M2",
        ("<minimax:tool_call>", '<invoke name="'),
        XmlCalls(
            ("<minimax:tool_call>", "</minimax:tool_call>"),
            ('<invoke name="', "</invoke>"),
            ('<parameter name="', "</parameter>"),
            quoted=True,
            several=True,
        ),
    ),
    ToolFormat("DeepSeek V3.2", ("｜DSML｜", "function_calls>"), _dsml("function_calls")),
    ToolFormat("DeepSeek V4", ("｜DSML｜", "tool_calls>"), _dsml("tool_calls")),
    ToolFormat("Qwen3-Coder", ("<tool_call>", "<function=", "<parameter="), XmlCalls(line="\n")),
    ToolFormat("GLM-4.7", ("<tool_call>", r"\}<arg_key>", "<arg_value>"), KeyValueCalls("")),
    ToolFormat("GLM-4.5", ("<tool_call>", "<arg_key>", "<arg_value>"), KeyValueCalls()),
    ToolFormat(
        "Gemma 4", (r"<\|tool_call>call:", r"<tool_call\|>"), GemmaCalls("<|tool_call>", "<tool_call|>", '<|"|>')
    ),
    ToolFormat(
        "FunctionGemma",
        ("<start_function_call>", "<escape>"),
        GemmaCalls("<start_function_call>", "<end_function_call>", "<escape>"),
    ),
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
    ToolFormat("Apertus", (r"<\|tools_prefix\|>",), KeyedCalls("<|tools_prefix|>", "<|tools_suffix|>")),
    ToolFormat("LFM2", (r"<\|tool_(call|list)_start\|>",), PythonCalls("<|tool_call_start|>", "<|tool_call_end|>")),
    ToolFormat("GigaChat 3.1", (r"<\|function_call\|>",), JsonCalls("<|function_call|>"), one_per_turn=True),
    ToolFormat(
        "InternLM2", (r"<\|action_start\|>", r"<\|plugin\|>"), JsonCalls("<|action_start|><|plugin|>", "<|action_end|>")
    ),
    ToolFormat("Phi-4", (r"<\|/tool_call\|>",), JsonCalls("<|tool_call|>", "<|/tool_call|>", array=True)),
    ToolFormat("Granite", (r"<\|tool_call\|>",), JsonCalls("<|tool_call|>", array=True)),
    ToolFormat("Granite 20B", ("<function_call> ",), JsonCalls("<function_call>")),
    ToolFormat(
        "Command R7B",
        (r"<\|START_ACTION\|>",),
        JsonCalls("<|START_ACTION|>", "<|END_ACTION|>", True, "tool_name", "parameters"),
    ),
    ToolFormat(
        "Llama 3",
        (r"<\|(start_header_id|header_start)\|>", r'"parameters\\?": '),
        JsonCalls("<|python_tag|>", arguments="parameters"),
        bare="{",
    ),
    ToolFormat("Functionary", ("<function=", "</function>"), NamedCalls("<function=", ">", "</function>")),
    ToolFormat(
        "OLMo 3",
        ("<function_calls>", "</function_calls>"),
        PythonCalls("<function_calls>", "</function_calls>", brackets=False),
    ),
    ToolFormat("xLAM", (r'\[\{"name": "tool_call_name"',), JsonCalls("", array=True), bare="["),
    ToolFormat("Python", (r"\[func_name1\(",), PythonCalls(), bare="["),
    ToolFormat("MiniMax-M1", ("<tool_calls>", "<beginning_of_sentence>"), JsonCalls("<tool_calls>", "</tool_calls>")),
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
