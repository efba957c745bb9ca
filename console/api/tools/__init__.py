"""Tools: definitions of clients, formats in which models write calls, and parsing of calls in answers.

A dialect makes a `ToolUse` from its request, passes the definitions to the chat template, the grammar to the engine,
and the answer's text to a reader:

    use = tool_use(model.tokenizer, tools, ToolChoice("auto"), parallel=True)      # raises InvalidRequest
    prompt = await chat_prompt(model, turns, tools=use)
    params = await use.apply_to(params)
    reader = use.reader()                                                          # one for each answer
    pieces = reader.feed(delta.text), reader.finish(); or  text, calls = read_answer(reader, answer.text)
"""

from console.api.tools.calls import (
    AnswerPiece,
    CallArguments,
    CallEnd,
    CallMalformed,
    CallStart,
    CallTruncated,
    JsonObject,
    TextPiece,
    Tool,
    ToolCall,
    ToolChoice,
    arguments_of,
    as_plain_turns,
    convert_call_ids,
    split_calls,
    tool_calls_turn,
    tool_result_turn,
    with_instructions,
    with_tool_names,
    without_null_content,
)
from console.api.tools.formats import DEFAULT, ToolFormat, format_of, has_tools, require_format
from console.api.tools.stream_reader import CallReader, read_answer
from console.api.tools.tool_use import NO_TOOLS, ToolUse, allows_one_call, finish_of, tool_use

__all__ = [
    "DEFAULT",
    "NO_TOOLS",
    "AnswerPiece",
    "CallArguments",
    "CallEnd",
    "CallMalformed",
    "CallReader",
    "CallStart",
    "CallTruncated",
    "JsonObject",
    "TextPiece",
    "Tool",
    "ToolCall",
    "ToolChoice",
    "ToolFormat",
    "ToolUse",
    "allows_one_call",
    "arguments_of",
    "as_plain_turns",
    "convert_call_ids",
    "finish_of",
    "format_of",
    "has_tools",
    "read_answer",
    "require_format",
    "split_calls",
    "tool_calls_turn",
    "tool_result_turn",
    "tool_use",
    "with_instructions",
    "with_tool_names",
    "without_null_content",
]
