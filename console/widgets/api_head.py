"""The head of the API screen: where it listens, how much it is asked, and a line that asks it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from textual.content import Content
from textual.style import Style
from textual.widget import Widget

from console.addresses import is_loopback
from console.link import ApiStatus
from console.links.api import ApiReport
from console.widgets import text
from console.widgets.glyphs import fitted, is_ascii
from console.widgets.plot import draw

_CURVE_CELLS = 30
_GAP = "   "


@dataclass(frozen=True, slots=True)
class _View:
    status: ApiStatus
    report: ApiReport
    curl: str


class ApiHead(Widget):
    """Three lines."""

    DEFAULT_CSS = """
    ApiHead {
        height: 5; width: 1fr; text-wrap: nowrap; text-overflow: ellipsis;
        link-style: none; link-color: $accent; link-background: transparent;
        link-style-hover: bold; link-color-hover: $primary; link-background-hover: $panel;
    }
    .-short ApiHead, .-narrow ApiHead { height: 4; }
    """

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id, classes="panel")
        self.border_title = "API"
        self._view: _View | None = None

    def show(self, status: ApiStatus, report: ApiReport, curl: str) -> None:
        """Draw anew, where anything changed."""
        before, self._view = self.render(), _View(status, report, curl)
        if not self.render().is_same(before):
            self.refresh()

    def render(self) -> Content:
        """Where, how much, how to ask."""
        if self._view is None:
            return Content("")
        status, report = self._view.status, self._view.report
        width = self.content_size.width
        lines = (
            place_line(status, width),
            traffic_line(report, width, ascii_only=is_ascii(self.app)),
            curl_row(self._view.curl),
        )
        return fitted(self.app, Content("\n").join(lines))


def place_line(status: ApiStatus, width: int) -> Content:
    """Whether it listens, where, and who may come."""
    if status.error is not None and not status.running:
        state = Content.styled(f"✖ off: {status.error.message}", "$worker-failed")
    elif status.stopping:
        state = Content.styled("◒ stopping", "$warning")
    elif status.running:
        state = Content.styled("● on", "$worker-busy")
    else:
        state = Content.styled("○ off", "$muted")
    address = Content.styled(status.url, "bold $foreground" if status.running else "$muted")
    users = f"{text.plural(status.clients, 'client')}, {text.plural(status.connections, 'connection')}"
    used = (Content.styled(users, "$muted"),) if status.running else ()
    parts = [state, _link(address, "screen.address"), _who(status), *used]
    return _as_fits(parts, width)


def _who(status: ApiStatus) -> Content:
    if status.key_required:
        return Content.styled("✓ a key is needed", "$success")
    if is_loopback(status.host):
        return Content.styled("no key is needed on this machine", "$muted")
    return Content.styled("✖ open to other machines without a key", "bold $error")


def traffic_line(report: ApiReport, width: int, *, ascii_only: bool) -> Content:
    """What is under way, how often it is asked, what fails."""
    failures = report.failures_per_min
    return _as_fits(
        [
            Content.assemble((str(report.under_way), "bold"), " under way"),
            Content.assemble(
                (f"{report.requests_per_min:,}", "bold"),
                " requests/min ",
                _curve(report.per_second, ascii_only=ascii_only),
            ),
            Content.styled(f"{failures:,} failed/min", "$warning" if failures else "$muted"),
            Content.styled(f"{report.requests:,} so far", "$muted"),
        ],
        width,
    )


def curl_row(curl: str) -> Content:
    """The line, cut where it is too long: what is copied is all of it."""
    if not curl:
        return Content.styled("No dialect is on: clients get a 404. d switches one on.", "$warning")
    return Content.assemble(_link(Content.styled("c copies ", "$accent"), "screen.copy"), (curl, "$muted"))


def _curve(per_second: tuple[int, ...], *, ascii_only: bool) -> Content:
    """The last minute, two seconds to a cell."""
    pairs = [float(sum(per_second[at : at + 2])) for at in range(0, len(per_second), 2)][-_CURVE_CELLS:]
    if not pairs:
        return Content("")
    cells = draw(pairs, (), max(1.0, *pairs), 1, ascii_only=ascii_only)[0]
    runs = groupby(cells, lambda each: each.ink)
    parts = [("".join(each.char for each in run), "$graph-tokens" if ink else "") for ink, run in runs]
    return Content.assemble(*parts)


def _as_fits(parts: Sequence[Content], width: int) -> Content:
    """The first of them and as many more as `width` has room for; the first is cut where it must be."""
    line, *more = parts
    for part in more:
        if (longer := Content.assemble(line, _GAP, part)).cell_length > width:
            break
        line = longer
    return line


def _link(content: Content, action: str) -> Content:
    return content.stylize(Style.from_meta({"@click": action}))
