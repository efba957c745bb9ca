"""The form of the options of a load: one line for each value, changed by keys, by typing and by clicks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.content import Content
from textual.geometry import Region
from textual.message import Message
from textual.widget import Widget
from textual.widgets import Static

from console.settings.rows import as_text
from console.tui.keymap import ConsoleBinding
from console.tui.screens.models.load_form import Field, LoadForm
from console.tui.widgets.clickable import clickable
from console.tui.widgets.glyphs import for_terminal

_VALUE = 9


class LoadFormView(Static, can_focus=True):
    """Up and down choose a value, left and right step it, digits set it, backspace leaves it to the program."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "row(-1)", "Up", id="load.up", tooltip="Go to the value above", show=False, system=True),
        Binding("down,j", "row(1)", "Down", id="load.down", tooltip="Go to the value below", show=False, system=True),
        Binding("left,h,minus", "step(-1)", "Less", id="load.less", tooltip="Make the value smaller"),
        Binding("right,l,plus", "step(1)", "More", id="load.more", tooltip="Make the value larger"),
        Binding(
            "equals_sign",
            "step(1)",
            "More",
            id="load.more.unshifted",
            tooltip="Make the value larger",
            key_display="+",
            show=False,
        ),
        Binding(
            "backspace,delete",
            "clear",
            "Default",
            id="load.clear",
            tooltip="Use the default value",
        ),
        *(
            Binding(
                str(digit),
                f"digit({digit})",
                str(digit),
                id=f"load.digit.{digit}",
                tooltip="Type the value",
                key_display="0–9",
                show=False,
                system=True,
            )
            for digit in range(10)
        ),
        Binding("t", "type", "Type", id="load.type", tooltip="Type the value: a list, a folder, a number"),
        Binding("m", "more", "Options", id="load.more_options", tooltip="Show all load options, or the basic ones"),
        ConsoleBinding(
            "enter",
            "screen.load_model(False)",
            "Load",
            id="models.load",
            mutates=True,
            primary=True,
            tooltip="Load the model with these values",
        ),
        ConsoleBinding(
            "b",
            "screen.load_model(True)",
            "Add",
            id="models.beside",
            mutates=True,
            tooltip="Load in addition, with these values",
        ),
    ]
    DEFAULT_CSS = """
    LoadFormView {
        height: auto;
        link-style: none; link-color: $primary; link-background: transparent;
        link-style-hover: bold; link-color-hover: $primary; link-background-hover: $panel;
    }
    """

    @dataclass
    class Changed(Message):
        """A value was changed."""

        form: LoadForm

    @dataclass
    class Typing(Message):
        """A value is to be typed. line: as it is now."""

        view: LoadFormView
        title: str
        line: str

    def __init__(self) -> None:
        super().__init__("", markup=False)
        self._form: LoadForm | None = None
        self._row = 0
        self._digits = ""
        self._shows_all = False

    @property
    def form(self) -> LoadForm | None:
        """The form that is shown."""
        return self._form

    def show(self, form: LoadForm) -> None:
        """Draw it; of the same model, staying on the line that was chosen and at a number that is being typed."""
        if self._form is None or form.entry != self._form.entry:
            self._digits, self._row = "", 0
        self._form = replace(form, shows_all=self._shows_all)
        self._row = min(self._row, len(self._form.fields) - 1)
        self._draw()

    def on_focus(self) -> None:
        """Show which line the keys are for."""
        self._draw()

    def on_blur(self) -> None:
        """Keys go elsewhere."""
        self._digits = ""
        self._draw()

    def action_digit(self, digit: int) -> None:
        """Digits set a number, one after the other."""
        if self._form is not None:
            self._digits = f"{self._digits}{digit}"[-10:]
            self._change(self._form.with_number(self._field(self._form).name, int(self._digits)))

    def action_row(self, by: int) -> None:
        """Another value."""
        if self._form is not None:
            self._digits = ""
            self._row = min(max(0, self._row + by), len(self._form.fields) - 1)
            self._draw()

    def action_step(self, by: int) -> None:
        """The next value."""
        if self._form is not None:
            self._digits = ""
            self._change(self._form.with_step(self._field(self._form).name, by))

    def action_step_row(self, row: int, by: int) -> None:
        """The next value of a line that was clicked."""
        self.focus()
        self._row = row
        self.action_step(by)

    def action_type(self) -> None:
        """Have the value typed in a line of its own."""
        if (form := self._form) is not None:
            field = self._field(form)
            self.post_message(self.Typing(self, field.title, as_text(getattr(form.own, field.name))))

    def enter(self, line: str | None) -> None:
        """Take a value as it was typed; None leaves it."""
        form = self._form
        if form is None or line is None:
            return
        field = self._field(form)
        try:
            self._change(form.with_text(field.name, line))
        except ValueError as error:
            self.notify(f"{line} is not a value of {field.title}: {error}", severity="error", markup=False)

    def action_more(self) -> None:
        """Show every option, or those of most loads."""
        if (form := self._form) is not None:
            self._shows_all = not self._shows_all
            self.show(form)

    def action_clear(self) -> None:
        """One digit less; without any, no value of its own."""
        form = self._form
        if form is None:
            return
        self._digits = self._digits[:-1]
        name = self._field(form).name
        self._change(form.with_number(name, int(self._digits)) if self._digits else form.without(name))

    def _field(self, form: LoadForm) -> Field:
        return form.fields[self._row]

    def _change(self, form: LoadForm) -> None:
        if form != self._form:
            self._form = form
            self.post_message(self.Changed(form))
        self._draw()

    def _draw(self) -> None:
        form = self._form
        if form is None:
            return
        width = max(len(field.title) for field in form.fields) + 1
        lines = [
            _line(form, field, row, width, chosen=self.has_focus and row == self._row)
            for row, field in enumerate(form.fields)
        ]
        self.update(for_terminal(self.app, Content("\n").join(lines)))
        if self.has_focus:
            self.call_after_refresh(self._scroll_to_row)

    def _scroll_to_row(self) -> None:
        """Keep the chosen line in sight."""
        if isinstance(self.parent, Widget):  # not closed meanwhile
            row = Region(0, self.virtual_region.y + self._row, 1, 1)
            self.parent.scroll_to_region(row, animate=False, force=True)


def _line(form: LoadForm, field: Field, row: int, width: int, *, chosen: bool) -> Content:
    value = form.value_text(field.name)
    style = "bold $foreground" if form.is_own(field.name) else "$foreground"
    out_of_range = form.out_of_range(field.name)
    return Content.assemble(
        ("▸ " if chosen else "  ", "$primary"),
        (f"{field.title:<{width}}", "bold $primary" if chosen else "$muted"),
        clickable(" − ", f"step_row({row}, -1)", "bold $primary"),
        (f"{value:>{_VALUE}}", "bold $error" if out_of_range else style),
        clickable(" + ", f"step_row({row}, 1)", "bold $primary"),
        (f"  {out_of_range}", "$error") if out_of_range else (f"  {form.origin(field.name)}", "$primary"),
    )
