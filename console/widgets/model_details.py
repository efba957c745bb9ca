"""What the selected model is; and what a load of it would take of each device."""

from __future__ import annotations

from collections.abc import Iterator

from textual.content import Content
from textual.widgets import Static

from console.widgets import text
from console.widgets.fit import fit_lines, verdict
from console.widgets.glyphs import fitted, is_ascii
from console.widgets.model_table import family, parameters, quantised
from engine.estimate import Estimate
from engine.models.catalog import HUB_CACHE, ModelEntry

_LABEL_CELLS = 9

Fit = Estimate | str | None
"""What a load would take, why that cannot be told, or None while it is being found out."""


class ModelDetails(Static):
    """A few lines about one model."""

    DEFAULT_CSS = """
    ModelDetails { height: auto; }
    """

    def __init__(self) -> None:
        super().__init__("", markup=False)
        self._entry: ModelEntry | None = None

    def show(self, entry: ModelEntry) -> None:
        """Describe it."""
        self._entry = entry
        self._draw()

    def on_resize(self) -> None:
        """Less is said where there is less room."""
        self._draw()

    def _draw(self) -> None:
        if self._entry is None:
            return
        lines = list(_about(self._entry))
        if self.screen.has_class("-medium"):  # where the table above has room for the rest
            lines = [Content.assemble(lines[0], ("  " + _folder(self._entry), "$muted"))]
        self.update(fitted(self.app, Content("\n").join(lines)))


class FitPreview(Static):
    """Verdict and devices."""

    DEFAULT_CSS = """
    FitPreview { height: auto; }
    """

    def __init__(self) -> None:
        super().__init__("", markup=False)
        self._shown: tuple[ModelEntry, Fit, bool] | None = None

    def show(self, entry: ModelEntry, fit: Fit, *, stale: bool) -> None:
        """stale: it was of other values, and is being found out anew."""
        self._shown = entry, fit, stale
        self._draw()

    def on_resize(self) -> None:
        """Bars take the room there is."""
        self._draw()

    def _draw(self) -> None:
        if self._shown is None:
            return
        entry, fit, stale = self._shown
        lines = list(_fit(entry, fit, self.content_size.width, ascii_only=is_ascii(self.app)))
        if stale and isinstance(fit, Estimate):
            lines = [_WAITING, Content.styled(Content("\n").join(lines[1:]).plain, "$muted")]
        self.update(fitted(self.app, Content("\n").join(lines)))


_WAITING = Content.styled("◌ Finding out what it would take …", "$muted")


def brief(entry: ModelEntry, fit: Fit) -> Content:
    """The name, and whether it fits, for one line."""
    name = Content.styled(f"{text.clip(entry.name, 24)}  ", "bold $primary")
    if isinstance(fit, Estimate) and not entry.problem:
        return name + verdict(fit)
    return name + next(_fit(entry, fit))


def _about(entry: ModelEntry) -> Iterator[Content]:
    bits = entry.bits_per_weight
    each = f", {bits:.2f} bits a weight" if bits is not None else ""
    context = f"{entry.context_tokens:,} tokens" if entry.context_tokens else "not said"
    rows = [("kind", f"{family(entry)}, {quantised(entry)}{each}")]
    if entry.weights_bytes or not entry.problem:
        rows.append(("size", f"{parameters(entry)} parameters, {text.size(entry.weights_bytes)} of weights"))
    if entry.context_tokens or not entry.problem:
        rows.append(("context", f"{context} · chat template: {entry.chat_template or 'none'}"))
    rows.append(("folder", _folder(entry)))
    yield Content.styled(entry.name, "bold $primary")
    yield from (Content.assemble((f"{label:<{_LABEL_CELLS}}", "$muted"), value) for label, value in rows)


def _folder(entry: ModelEntry) -> str:
    """Where it lies; of the hub cache no more than which commit it is of."""
    if entry.origin == HUB_CACHE:
        return f"{HUB_CACHE}, commit {entry.path.name[:8]}"
    return str(entry.path) if entry.origin in str(entry.path) else f"{entry.path} ({entry.origin})"


def _fit(entry: ModelEntry, fit: Fit, width: int = 0, *, ascii_only: bool = False) -> Iterator[Content]:
    if entry.unfinished:
        yield Content.styled(f"◔ Its download stopped with {text.size(entry.kept_bytes)}.", "$warning")
    elif entry.problem:
        yield Content.styled(f"✖ {entry.problem}", "$error")
    elif fit is None:
        yield _WAITING
    elif isinstance(fit, str):
        yield Content.styled(f"✖ {fit}", "$error")
    else:
        yield from fit_lines(fit, width, ascii_only=ascii_only)
