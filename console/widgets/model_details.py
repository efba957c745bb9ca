"""What the selected model is, whether it can be loaded here, and what it would take."""

from __future__ import annotations

from collections.abc import Iterator

from textual.content import Content
from textual.widgets import Static

from console.widgets import text
from console.widgets.fit import fit_lines, verdict
from console.widgets.glyphs import fitted
from console.widgets.model_table import kind, parameters
from engine.estimate import Estimate
from engine.models.catalog import ModelEntry

_LABEL_CELLS = 9

Fit = Estimate | str | None
"""What a load would take, why that cannot be told, or None while it is being found out."""


class ModelDetails(Static):
    """A few lines about one model; where it is narrow, whether it fits alone."""

    DEFAULT_CSS = """
    ModelDetails { height: auto; min-height: 8; }
    """

    def __init__(self) -> None:
        super().__init__("", classes="panel", markup=False)
        self.border_title = "Selected"

    def show(self, entry: ModelEntry, fit: Fit, hint: str) -> None:
        """Describe it. hint: what the keys would do."""
        if self.screen.has_class("-narrow"):
            lines = [_brief(entry, fit)]
        else:
            lines = [*_about(entry), *_fit(entry, fit), Content.styled(hint, "$muted")]
        self.update(fitted(self.app, Content("\n").join(lines)))


def _about(entry: ModelEntry) -> Iterator[Content]:
    rows = (
        ("folder", str(entry.path)),
        ("kind", kind(entry)),
        ("size", f"{parameters(entry)} parameters, {text.size(entry.weights_bytes)} of weights"),
        ("context", f"{entry.context_tokens} tokens" if entry.context_tokens else "not said"),
        ("from", entry.origin),
    )
    yield Content.styled(entry.name, "bold $primary")
    yield from (Content.assemble((f"{label:<{_LABEL_CELLS}}", "$muted"), value) for label, value in rows)


def _fit(entry: ModelEntry, fit: Fit) -> Iterator[Content]:
    if entry.problem:
        yield Content.styled(f"✖ {entry.problem}", "$error")
    elif fit is None:
        yield Content.styled("◌ Finding out what it would take …", "$muted")
    elif isinstance(fit, str):
        yield Content.styled(f"✖ {fit}", "$error")
    else:
        yield from fit_lines(fit)


def _brief(entry: ModelEntry, fit: Fit) -> Content:
    """One line."""
    name = Content.styled(f"{text.clip(entry.name, 24)}  ", "bold $primary")
    if isinstance(fit, Estimate) and not entry.problem:
        return name + verdict(fit)
    return name + next(_fit(entry, fit))
