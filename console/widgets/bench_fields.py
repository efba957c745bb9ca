"""The settings of a bench: a line for each, with what it means."""

from __future__ import annotations

from collections.abc import Sequence

from textual.app import ComposeResult
from textual.containers import Grid
from textual.content import Content
from textual.widgets import Input, Label

from console.bench.draft import TRACE, BenchDraft
from console.links.benches import BenchField, BenchForm
from console.widgets.glyphs import fitted

MOST_FIELDS = 8
_LONG = (TRACE,)
"""Settings that name files."""


class BenchFields(Grid):
    """What is typed goes into the draft at once. without: settings that are not offered."""

    def __init__(self, draft: BenchDraft, without: Sequence[str] = ()) -> None:
        super().__init__()
        self._draft = draft
        self._without = without
        self._form: BenchForm | None = None

    def compose(self) -> ComposeResult:
        """As many lines as any bench has settings."""
        for at in range(MOST_FIELDS):
            yield Label("", id=f"title-{at}", markup=False)
            yield Input(id=f"field-{at}", compact=True, select_on_focus=True)
            yield Label("", id=f"hint-{at}", classes="hint", markup=False)

    @property
    def _fields(self) -> Sequence[BenchField]:
        fields = self._form.fields if self._form is not None else ()
        return [field for field in fields if field.name not in self._without]

    def show(self, form: BenchForm | None) -> None:
        """The settings of a bench, as they are in the draft."""
        self._form = form
        fields = self._fields
        for at in range(MOST_FIELDS):
            field = fields[at] if at < len(fields) else None
            for name in ("title", "field", "hint"):
                self.query_one(f"#{name}-{at}").display = field is not None
            if form is not None and field is not None:
                self._fill(self._box(at), self._draft.value(form, field))
                self._explain(at, field)

    def _explain(self, at: int, field: BenchField) -> None:
        """Its hint behind it; in it, where what is typed may be long."""
        self.query_one(f"#title-{at}", Label).update(field.title)
        hint, box, long = self.query_one(f"#hint-{at}", Label), self._box(at), field.name in _LONG
        hint.display = not long
        hint.update(fitted(self.app, Content(field.hint)))
        box.placeholder = field.hint if long else "none"
        box.set_class(long, "-long")

    def go_to(self, setting: str) -> bool:
        """To the one that is wrong; whether there is such a one."""
        for at, field in enumerate(self._fields):
            if field.name == setting:
                self._box(at).add_class("-wrong").focus()
                return True
        return False

    def on_input_changed(self, event: Input.Changed) -> None:
        """Kept; other settings may follow it."""
        event.stop()
        event.input.remove_class("-wrong")
        fields, at = self._fields, int((event.input.id or "-0").rpartition("-")[2])
        if self._form is None or at >= len(fields):
            return
        self._draft.type(self._form, fields[at], event.value)
        for other, field in enumerate(fields):
            if other != at:
                self._fill(self._box(other), self._draft.value(self._form, field))

    def _box(self, at: int) -> Input:
        return self.query_one(f"#field-{at}", Input)

    def _fill(self, box: Input, text: str) -> None:
        if box.value == text:
            return
        with box.prevent(Input.Changed):
            box.value = text
        box.remove_class("-wrong")
        if box.has_focus:
            box.action_select_all()
