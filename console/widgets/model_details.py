"""What the selected model is, and whether it can be loaded here."""

from __future__ import annotations

from textual.content import Content
from textual.widgets import Static

from console.widgets import text
from console.widgets.model_table import kind, parameters
from engine.models.catalog import ModelEntry

_LABEL_CELLS = 9


class ModelDetails(Static):
    """A few lines about one model."""

    DEFAULT_CSS = """
    ModelDetails { height: auto; min-height: 8; }
    """

    def __init__(self) -> None:
        super().__init__("", classes="panel", markup=False)
        self.border_title = "Selected"

    def show(self, entry: ModelEntry) -> None:
        """Describe it."""
        rows = [
            ("folder", str(entry.path)),
            ("kind", kind(entry)),
            ("size", f"{parameters(entry)} parameters, {text.size(entry.weights_bytes)} of weights"),
            ("context", f"{entry.context_tokens} tokens" if entry.context_tokens else "not said"),
            ("from", entry.origin),
        ]
        lines = [Content.styled(entry.name, "bold $primary")]
        lines += [Content.assemble((f"{label:<{_LABEL_CELLS}}", "$muted"), value) for label, value in rows]
        if entry.problem:
            lines.append(Content.styled(f"✖ {entry.problem}", "$error"))
        else:
            lines.append(Content.styled("Enter loads it", "$muted"))
        self.update(Content("\n").join(lines))
