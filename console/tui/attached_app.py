"""AttachedApp: the console on instances elsewhere. Each has screens of its own, so what goes on in one goes on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from textual.binding import Binding

from console.link.protocol import EngineLink
from console.link.status import link_status
from console.tui import modes
from console.tui.app import EricApp
from console.tui.screens.attach.instances import InstanceReading, InstanceRow
from console.tui.screens.base import ConsoleRow
from console.tui.view import View
from console.tuning.knobs import Knobs


@dataclass(slots=True)
class _Place:
    """Screen and model in view of an instance, to come back to."""

    mode: str
    model_key: str = ""


class AttachedApp(EricApp):
    """links: one for each instance, the first in view."""

    BINDINGS: ClassVar[list[Binding]] = [
        Binding(
            "I", "app.next_instance", "Instance", id="instance.next", tooltip="Go to the next instance", key_display="I"
        ),
        Binding("f9,L", "app.instances", "Instances", id="instance.list", tooltip="List the instances", show=False),
    ]

    def __init__(self, links: Sequence[EngineLink], **options: Any) -> None:
        self.links = tuple(links)
        self.readings: tuple[InstanceReading, ...] = ()
        self._at = 0
        super().__init__(self.links[0], **options)
        self._places = [_Place(_own(self.DEFAULT_MODE, number)) for number in range(len(self.links))]
        for number in range(1, len(self.links)):
            for mode in modes.MODES:
                self.add_mode(_own(mode.name, number), mode.factory)

    def read_view(self, model_key: str | None = None) -> View:
        """Read the instance in view, and the other ones for the row and the list of instances."""
        view = super().read_view(model_key)
        self.readings = tuple(
            InstanceReading(view.link_status, view.published, in_view=True)
            if number == self._at
            else InstanceReading(link_status(link), link.snapshot(), in_view=False)
            for number, link in enumerate(self.links)
        )
        return view

    def own_mode(self, mode: str) -> str:
        """The mode that shows that screen of the instance in view."""
        return _own(mode, self._at)

    def extra_rows(self) -> Iterable[ConsoleRow]:
        """The instances, where there are several."""
        return (InstanceRow(self),) if len(self.links) > 1 else ()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Another instance can be brought into view where there is one."""
        if action in ("next_instance", "instances"):
            return len(self.links) > 1
        return super().check_action(action, parameters)

    def action_next_instance(self) -> None:
        """Round and round."""
        self.action_view((self._at + 1) % len(self.links))

    def action_instances(self) -> None:
        """All of them, to choose one."""
        from console.tui.screens.attach.instances import InstancesScreen

        if not isinstance(self.screen, InstancesScreen):
            self.push_screen(InstancesScreen())

    def action_view(self, number: int) -> None:
        """Bring an instance into view, as it was left."""
        if number == self._at or not 0 <= number < len(self.links):
            return
        self._places[self._at] = _Place(self.current_mode, self.view.model_key)
        self._at, self.link = number, self.links[number]
        place = self._places[number]
        self._knobs = Knobs()
        self.read_view(place.model_key)
        self.switch_mode(place.mode)
        self.call_after_refresh(self.refresh_screen)


def _own(mode: str, number: int) -> str:
    """The first instance has the plain names."""
    return mode if number == 0 else f"{mode}@{number}"
