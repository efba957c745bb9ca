"""Two models compared: files, load and fit, with a sign and a word at everything that differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical

from console import text
from console.link.protocol import ModelsLink
from console.settings.load_options import NO_OPTIONS
from console.tui.screens.base import Dialog
from console.tui.screens.models.load_form import LoadForm
from console.tui.screens.models.panel import Edits, load_target, missing_memory
from console.tui.screens.models.table import family, quantization
from console.tui.widgets.table import Column, Row, Table, cell
from engine.errors import EngineError
from engine.models.catalog import ModelEntry
from engine.placement.estimate import DeviceEstimate, Estimate

# Two models side by side, line by line, with what differs between them. Pure.

_NOT_KNOWN = "–"


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two. fit: the estimate of its load, why there is none ("" where none may be asked for), or None while
    it is computed."""

    form: LoadForm
    fit: Estimate | str | None

    @property
    def entry(self) -> ModelEntry:
        """The model."""
        return self.form.entry


@dataclass(frozen=True, slots=True)
class Line:
    """One line. difference: "" where both are the same or one is not known, else "differs" or by how much."""

    label: str
    left: str
    right: str
    difference: str = ""


def compare(left: Side, right: Side) -> tuple[Line, ...]:
    """Files first, then the values of the forms, then what each would take of every device."""
    return (*_files(left.entry, right.entry), *_values(left.form, right.form), *_fits(left.fit, right.fit))


def _files(left: ModelEntry, right: ModelEntry) -> Iterator[Line]:
    yield _words("architecture", family(left), family(right))
    yield _words("quantised", quantization(left), quantization(right))
    yield _numbers("bits per weight", left.bits_per_weight or 0, right.bits_per_weight or 0, text.bits_per_weight)
    yield _numbers("parameters", left.parameters, right.parameters, text.count)
    yield _numbers("weights", left.weights_bytes, right.weights_bytes, text.size)
    yield _numbers("context", left.context_tokens, right.context_tokens, lambda tokens: f"{tokens:,.0f}")
    yield _words("chat template", left.chat_template or "none", right.chat_template or "none")
    yield _words("backend", left.backend, right.backend)
    yield _words("from", left.origin, right.origin)
    if left.problem or right.problem:
        yield _words("problem", left.problem or "none", right.problem or "none")


def _values(left: LoadForm, right: LoadForm) -> Iterator[Line]:
    for field in left.fields:
        if field in right.fields:
            yield _words(f"load: {field.title}", _value(left, field.name), _value(right, field.name))


def _value(form: LoadForm, name: str) -> str:
    return form.value_text(name)


def _fits(left: Estimate | str | None, right: Estimate | str | None) -> Iterator[Line]:
    yield _words("fit", _verdict(left), _verdict(right), is_known=left not in (None, "") and right not in (None, ""))
    first, second = (fit if isinstance(fit, Estimate) else None for fit in (left, right))
    if first is None and second is None:
        return
    yield _both("weights per worker", *(None if fit is None else fit.weights_bytes for fit in (first, second)))
    yield _both("KV per token", *(None if fit is None else fit.kv_token_bytes for fit in (first, second)))
    devices = {_key(device): device for fit in (first, second) if fit is not None for device in fit.devices}
    for key in devices:
        yield from _device(text.device_label(devices[key]), _of(first, key), _of(second, key))


def _device(name: str, left: DeviceEstimate | None, right: DeviceEstimate | None) -> Iterator[Line]:
    """Return what all workers take of it, and what is left or missing then."""
    used = [None if each is None else each.weights_bytes + each.kv_bytes + each.working_bytes for each in (left, right)]
    if not any(used) and not any(each is not None and each.short_bytes for each in (left, right)):
        return
    yield _both(f"{name} needs", *used)
    after = [_NOT_KNOWN if each is None else _left(each) for each in (left, right)]
    yield _words(f"{name} left", *after, is_known=_NOT_KNOWN not in after)


def _left(device: DeviceEstimate) -> str:
    return f"✖ lacks {missing_memory(device)}" if device.short_bytes else f"✓ {text.size(device.free_bytes)}"


def _verdict(fit: Estimate | str | None) -> str:
    if fit is None:
        return "◌ …"
    if isinstance(fit, str):
        return f"✖ {fit}" if fit else _NOT_KNOWN
    return "✓ fits" if fit.can_load else "✖ cannot be loaded" if fit.problem else "✖ does not fit"


def _words(label: str, left: str, right: str, *, is_known: bool = True) -> Line:
    return Line(label, left, right, "differs" if is_known and left != right else "")


def _both(label: str, left: int | None, right: int | None) -> Line:
    return _numbers(label, left or 0, right or 0, text.size)


def _numbers(label: str, left: float, right: float, say: Callable[[float], str]) -> Line:
    """Numbers, 0 being "not known", and how many times the larger one is the other."""
    words = [say(number) if number else _NOT_KNOWN for number in (left, right)]
    if not left or not right or left == right:
        return Line(label, words[0], words[1])
    times = max(left, right) / min(left, right)
    return Line(label, words[0], words[1], f"differs, × {times:.2f}" if times < 10 else f"differs, × {times:,.0f}")


def _key(device: DeviceEstimate) -> tuple[str, str]:
    return device.node, device.id


def _of(fit: Estimate | None, key: tuple[str, str]) -> DeviceEstimate | None:
    return next((device for device in fit.devices if _key(device) == key), None) if fit is not None else None


_NAME = 24


class CompareScreen(Dialog[None]):
    """entries: the two.  edits: what was changed in their forms."""

    AUTO_FOCUS = "Table"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("d", "only", "Differences", id="compare.only", tooltip="Show only differences, then all"),
        Binding(
            "escape,v,q", "dismiss", "Close", id="compare.close", tooltip="Close the comparison", key_display="esc"
        ),
    ]

    def __init__(self, models: ModelsLink, entries: tuple[ModelEntry, ModelEntry], edits: Edits) -> None:
        super().__init__()
        self._models = models
        self._edits = edits
        defaults = models.defaults()
        self._sides = [
            Side(LoadForm(entry, edits.get(load_target(entry), NO_OPTIONS), defaults), None) for entry in entries
        ]
        self._only = False

    def compose(self) -> ComposeResult:
        """One table."""
        names = [text.clip(side.entry.name, _NAME) for side in self._sides]
        columns = (
            Column("", 18),
            Column(names[0], 16, grow=30),
            Column(names[1], 16, grow=30),
            Column("≠", 17),
        )
        with Vertical(classes="dialog compare") as page:
            page.border_title = "Two models"
            yield Table(columns, empty="Nothing differs.")

    def on_mount(self) -> None:
        """Show the files and forms at once, then the estimates of their loads."""
        self._show()
        for at in range(len(self._sides)):
            self.run_worker(self._price(at), group=f"price {at}", exit_on_error=False)

    async def _price(self, at: int) -> None:
        form = self._sides[at].form
        name = load_target(form.entry)
        try:
            own = self._edits[name] if name in self._edits else await self._models.remembered(name)
            form = LoadForm(form.entry, own, form.defaults)
            refused = self.console.view.link_status.refusal_of("models.estimate")
            fit = form.entry.problem or ("" if refused else await self._models.estimate(name, own))
        except EngineError as error:
            fit = error.message
        self._sides[at] = Side(form, fit)
        self._show()

    def action_only(self) -> None:
        """Only what differs."""
        self._only = not self._only
        self._show()

    def _show(self) -> None:
        lines = compare(self._sides[0], self._sides[1])
        self.query_one(Table).show(_rows([line for line in lines if line.difference or not self._only]))


def _rows(lines: Sequence[Line]) -> list[Row]:
    return [_row(line) for line in lines]


def _row(line: Line) -> Row:
    style = "bold $warning" if line.difference else ""
    verdict = cell(f"≠ {line.difference}", "bold $warning") if line.difference else cell("= same", "$muted")
    return Row(line.label, (cell(line.label, "$muted"), cell(line.left, style), cell(line.right, style), verdict))
