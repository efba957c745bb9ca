"""Tools: definitions of clients, formats in which models write calls, and parsing of calls in answers.

A dialect makes a `ToolUse` from its request, passes the definitions to the chat template, the grammar to the engine,
and the answer's text to a reader:

    use = tool_use(model.tokenizer, tools, ToolChoice("auto"), parallel=True)      # raises InvalidRequest
    prompt = await chat_prompt(model, turns, tools=use.definitions)
    params = use.applied(params)
    reader = use.reader()                                                          # one for each answer
    pieces = reader.feed(delta.text), reader.finish(); or  text, calls = whole(reader, answer.text)
"""

from console.api.tools.calls import (
    CallArguments,
    CallBegan,
    CallBroken,
    CallCut,
    CallEnded,
    JsonObject,
    Piece,
    Said,
    Tool,
    ToolCall,
    ToolChoice,
    arguments_of,
    calling_turn,
    fitting,
    named,
    result_turn,
    spoken,
)
from console.api.tools.formats import ToolFormat, format_of, require_format
from console.api.tools.stream_reader import CallReader, whole
from console.api.tools.tool_use import NO_TOOLS, ToolUse, finish_of, tool_use

__all__ = [
    "NO_TOOLS",
    "CallArguments",
    "CallBegan",
    "CallBroken",
    "CallCut",
    "CallEnded",
    "CallReader",
    "JsonObject",
    "Piece",
    "Said",
    "Tool",
    "ToolCall",
    "ToolChoice",
    "ToolFormat",
    "ToolUse",
    "arguments_of",
    "calling_turn",
    "finish_of",
    "fitting",
    "format_of",
    "named",
    "require_format",
    "result_turn",
    "spoken",
    "tool_use",
    "whole",
]
