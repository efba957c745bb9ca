"""Actions on the request under the cursor, on each screen with a table of requests."""

from __future__ import annotations

from typing import ClassVar

import msgspec
from textual.binding import Binding, BindingType
from textual.dom import DOMNode

from console.settings.addresses import reachable
from console.tui.keymap import ConsoleBinding
from console.tui.screens.api.screen import KEY_VARIABLE, curl_command, curl_line
from console.tui.screens.base import ConsoleScreen
from console.tui.screens.requests.detail import RequestScreen
from console.tui.screens.requests.groups import client_of
from console.tui.view import View
from engine.config.sampling import PARAMETERS
from engine.errors import EngineError
from engine.requests.history import RequestDetail
from engine.snapshot import RequestRow

_PLACEHOLDER = "YOUR PROMPT"
_PATH = "/v1/completions"


class RequestActions(ConsoleScreen):
    """The keys of a request's row. Subclasses give `chosen_request`, `show_client` and `opens_request`."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ConsoleBinding(
            "x,delete",
            "cancel",
            "Cancel",
            id="request.cancel",
            mutates=True,
            tooltip="Cancel the selected request",
            key_display="x",
        ),
        Binding(
            "c",
            "copy_curl",
            "Copy curl",
            id="request.copy_curl",
            tooltip="Copy the request as a curl command",
            show=False,
        ),
        Binding("y", "copy_id", "Copy id", id="request.copy_id", tooltip="Copy the id of the request", show=False),
        Binding(
            "f",
            "filter_client",
            "This client",
            id="request.client",
            tooltip="Show only the requests of this client",
            show=False,
        ),
    ]

    def key_states(self, view: View) -> dict[str, bool | str]:
        """Offer what is done with a request where one is selected, and cancelling while it is live."""
        is_chosen = self.chosen_request is not None
        return super().key_states(view) | {
            "request.cancel": self.can_cancel,
            "request.copy_id": is_chosen,
            "request.client": is_chosen,
        }

    def offers(self, node: DOMNode, binding: Binding) -> bool:
        """Return whether the footer has it; a request is opened where the other end gives its details."""
        is_open = binding.id == "row.open" and self.opens_request(node)
        return not (is_open and self._detail_refusal) and super().offers(node, binding)

    @property
    def _detail_refusal(self) -> str:
        """Why the other end gives no details of a request; "" where it does."""
        return self.console.view.link_status.refusal_of("requests.detail")

    def opens_request(self, node: DOMNode) -> bool:
        """Return whether that is a table whose Enter opens a request."""
        raise NotImplementedError

    def open_request(self, row: RequestRow) -> None:
        """Show a request closely, or say why that is refused."""
        if refusal := self._detail_refusal:
            self.notify(refusal, severity="warning", markup=False)
        else:
            self.app.push_screen(RequestScreen(row))

    def on_table_moved(self) -> None:
        """Offer the keys of another row."""
        self.offer_keys()

    @property
    def can_cancel(self) -> bool:
        """True if `x` has something to cancel."""
        return (row := self.chosen_request) is not None and row.state != "finished"

    @property
    def chosen_request(self) -> RequestRow | None:
        """The request under the cursor."""
        raise NotImplementedError

    def show_client(self, client: str) -> None:
        """Show only the requests of that client."""
        raise NotImplementedError

    def action_cancel(self) -> None:
        """Cancel the request under the cursor."""
        self.cancel_request(self.chosen_request)

    def action_copy_id(self) -> None:
        """Copy its id."""
        if (row := self._chosen()) is not None:
            self.app.copy_to_clipboard(row.id)
            self.notify(f"Copied {row.id}", markup=False)

    def action_filter_client(self) -> None:
        """Show only the requests of its client."""
        if (row := self._chosen()) is None:
            return
        if client := client_of(row):
            self.show_client(client)
        else:
            self.notify("This request has no client.", severity="warning")

    def action_copy_curl(self) -> None:
        """Copy it as a curl command; where no request is chosen, or the dialect that takes it is off, a command that
        sends a sample one."""
        row = self.chosen_request
        if row is not None and not self._is_off(_PATH):
            self.run_worker(self._copy_curl(row), group="curl", exclusive=True, exit_on_error=False)
        elif line := self.example_curl(self.console.view):
            off = "" if row is None else f": the dialect with {_PATH} is off"
            self._copied(line, f"Copied a curl command for a {'sample ' if off else ''}request{off}")
        else:
            self.notify("All dialects are off. Switch one on first (d on the API screen).", severity="warning")

    def _is_off(self, path: str) -> bool:
        """Return whether no dialect with that path is on; False where dialects are not known, as in a recording."""
        states = [dialect.on for dialect in self.link.api.report().dialects if path in dialect.routes]
        return bool(states) and not any(states)

    async def _copy_curl(self, row: RequestRow) -> None:
        try:
            detail = await self.link.requests.detail(row.id, row.order)
        except EngineError:  # forgotten by now: its row has something all the same
            detail = RequestDetail(row=row)
        api = self.console.view.api
        has_prompt = detail.text is not None and not detail.text.cut
        line = curl_command(_base(self.console.view), _PATH, curl_body(detail), with_key=api.key_required)
        self._copied(line, f"Copied {row.id} as a curl command{'' if has_prompt else '; insert your prompt'}")

    def example_curl(self, view: View) -> str:
        """Return a command that sends a request to the model in view; "" where no dialect is on."""
        spec = view.snapshot.status.spec
        return curl_line(
            _base(view),
            spec.name if spec is not None else "",
            dialects=self.link.api.report().dialects,
            with_key=view.api.key_required,
        )

    def _copied(self, line: str, done: str) -> None:
        self.app.copy_to_clipboard(line)
        key = f"; key from ${KEY_VARIABLE}" if self.console.view.api.key_required else ""
        self.notify(f"{done}{key}", markup=False)

    def _chosen(self) -> RequestRow | None:
        if (row := self.chosen_request) is None:
            self.notify("Select a request first.", severity="warning")
        return row


def _base(view: View) -> str:
    """The API's URL for a client on this machine."""
    return msgspec.structs.replace(view.api, host=reachable(view.api.host)).url


def curl_body(detail: RequestDetail) -> dict[str, object]:
    """Return a completion request with the model, the prompt and the parameters of a request, as far as they are kept:
    of lists and texts only the number is."""
    row, text = detail.row, detail.text
    prompt = text.prompt if text is not None and not text.cut else _PLACEHOLDER
    body: dict[str, object] = {"model": row.model} if row.model else {}
    body["prompt"] = prompt
    if row.max_tokens:
        body["max_tokens"] = row.max_tokens
    for name, value in detail.sampling.items():
        if not isinstance(value, str):
            parameter = PARAMETERS.get(name)
            body[parameter.http_name if parameter is not None else name] = value
    return body
