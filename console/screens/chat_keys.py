"""The keys of the chat screen. A letter is always typed, so every action has a key with ctrl or alt, which works in the
box and outside it."""

from __future__ import annotations

from textual.binding import Binding, BindingType


def _key(keys: str, action: str, title: str, name: str, tooltip: str, *, show: bool = False) -> Binding:
    """A key that goes before the box: it would take ctrl+y for its own, and alt+e for an e."""
    return Binding(keys, action, title, id=f"chat.{name}", tooltip=tooltip, show=show, priority=True)


BINDINGS: list[BindingType] = [
    _key("escape", "stop", "Stop", "stop", "Stop the answers; else leave the box, or go back to it", show=True),
    _key("ctrl+r,alt+r", "again", "Again", "again", "Another answer to the last question, as a branch", show=True),
    _key("ctrl+t,alt+c", "go_on", "Continue", "continue", "Let the model go on with its last answer", show=True),
    _key("alt+e", "edit", "Edit", "edit", "Edit a question and ask it again, as a branch", show=True),
    _key("ctrl+y,alt+y", "copy", "Copy", "copy", "Copy a message, the last answer by itself", show=True),
    _key("alt+x", "copy_code", "Code", "code", "Copy a code block; again for the one before"),
    _key("alt+d", "delete", "Delete", "turn.delete", "Delete a turn, the last question by itself, and what follows it"),
    _key("alt+left,alt+o", "branch(-1)", "‹", "back", "Show the branch before"),
    _key("alt+right,alt+n", "branch(1)", "›", "on", "Show the branch after"),
    _key("alt+k", "move(-1)", "Up", "up", "Select the turn before"),
    _key("alt+j", "move(1)", "Down", "down", "Select the turn after"),
    _key("ctrl+n,alt+a", "new", "New", "new", "Start a new conversation", show=True),
    _key("ctrl+o,alt+g", "list", "List", "list", "Show or hide the conversations", show=True),
    _key("ctrl+f", "search", "Search", "search", "Search all conversations"),
    _key("alt+t", "rename", "Rename", "rename", "Give the conversation another title"),
    _key("ctrl+s,alt+s", "settings", "Settings", "settings", "Model, system prompt and sampling", show=True),
    _key("alt+p", "presets", "Presets", "presets", "Choose a system prompt and sampling"),
    _key("alt+v", "split", "Split", "split", "Ask two models or settings side by side, or one again", show=True),
    _key("alt+w", "export('md')", "Export", "export", "Write the branch to a Markdown file"),
    _key("alt+shift+w", "export('json')", "JSON", "export.json", "Write all branches to a JSON file"),
    _key("alt+shift+r", "read_back", "Import", "import", "Read an exported JSON file"),
    _key("alt+h", "app.help", "Help", "help", "Show the keys and what the numbers mean", show=True),
]
