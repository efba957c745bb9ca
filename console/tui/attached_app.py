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
from console.tui.screens.attach.instances import InstanceReading, InstanceRow, instance_state
from console.tui.screens.base import ConsoleRow
from console.tuning.knobs import Knobs


@dataclass(slots=True)
class _View:
    """Where an instance was left: the screen, and the model in view."""

    mode: str
    key: str = ""


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
        self._at = 0
        super().__init__(self.links[0], **options)
        self._views = [_View(_own(self.DEFAULT_MODE, number)) for number in range(len(self.links))]
        for number in range(1, len(self.links)):
            for mode in modes.MODES:
                self.add_mode(_own(mode.name, number), mode.factory)

    def readings(self) -> Sequence[InstanceReading]:
        """How each instance is."""
        found = []
        for number, link in enumerate(self.links):
            standing = link_status(link)
            state = instance_state(standing, link.snapshot())
            found.append(InstanceReading(standing.name, state, number == self._at))
        return found

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
        self._views[self._at] = _View(self.current_mode, self.viewed_key)
        self._at, self.link = number, self.links[number]
        self.viewed_key, self._knobs = self._views[number].key, Knobs()
        self.switch_mode(self._views[number].mode)
        self.call_after_refresh(self.refresh_screen)


def _own(mode: str, number: int) -> str:
    """The first instance has the plain names."""
    return mode if number == 0 else f"{mode}@{number}"
