"""The keys of the chat screen. Letters work once the box was left with escape; in it they are typed."""

from __future__ import annotations

from textual.binding import Binding, BindingType

BINDINGS: list[BindingType] = [
    Binding("escape", "stop", "Stop", id="chat.stop", tooltip="Stop the answers; else leave the box", priority=True),
    Binding("ctrl+r,r", "again", "Again", id="chat.again", tooltip="Another answer to the last question, as a branch"),
    Binding("ctrl+t,c", "go_on", "Continue", id="chat.continue", tooltip="Let the model go on with its last answer"),
    Binding("e", "edit", "Edit", id="chat.edit", tooltip="Edit a question and ask it again, as a branch"),
    Binding(
        "ctrl+y", "copy", "Copy", id="chat.copy", tooltip="Copy a message, the last answer by itself", priority=True
    ),
    Binding("y", "copy", "Copy", id="chat.copy.plain", tooltip="Copy a message, the last answer by itself", show=False),
    Binding(
        "b", "copy_code", "Code", id="chat.code", tooltip="Copy a code block; again for the one before", show=False
    ),
    Binding("less_than_sign", "branch(-1)", "‹", id="chat.back", tooltip="Show the branch before", show=False),
    Binding("greater_than_sign", "branch(1)", "›", id="chat.on", tooltip="Show the branch after", show=False),
    Binding("k", "move(-1)", "Up", id="chat.up", tooltip="Select the turn before", show=False),
    Binding("j", "move(1)", "Down", id="chat.down", tooltip="Select the turn after", show=False),
    Binding("ctrl+n,N", "new", "New", id="chat.new", tooltip="Start a new conversation"),
    Binding("ctrl+o,o", "list", "List", id="chat.list", tooltip="Show or hide the conversations"),
    Binding("slash", "search", "Search", id="chat.search", tooltip="Search all conversations", show=False),
    Binding("t", "rename", "Rename", id="chat.rename", tooltip="Give the conversation another title", show=False),
    Binding("ctrl+s,s", "settings", "Settings", id="chat.settings", tooltip="Model, system prompt and sampling"),
    Binding("p", "presets", "Presets", id="chat.presets", tooltip="Choose a system prompt and sampling", show=False),
    Binding("v", "split", "Split", id="chat.split", tooltip="Ask two models or settings side by side, or one again"),
    Binding("w", "export('md')", "Export", id="chat.export", tooltip="Write the branch to a Markdown file", show=False),
    Binding("W", "export('json')", "JSON", id="chat.export.json", tooltip="Write all to a JSON file", show=False),
    Binding("R", "read_back", "Import", id="chat.import", tooltip="Read an exported JSON file", show=False),
    Binding("i", "write", "Write", id="chat.write", tooltip="Back to the box", show=False),
]
