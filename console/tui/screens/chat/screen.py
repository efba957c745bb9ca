"""Chat: ask a model, or two side by side; read, branch, stop, go on, copy."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.widget import Widget
from textual.widgets import TextArea

from console.chats import ChatSettings, Preset, Turn
from console.chats.export import code_blocks, may_have_code
from console.chats.presets import apply_preset, describe_settings
from console.link.status import CHAT
from console.text import clip, plural
from console.tui.clipboard import copy
from console.tui.keymap import ConsoleBinding
from console.tui.screens.chat.conversation_list import ChatShelf
from console.tui.screens.chat.conversations import ConversationsScreen
from console.tui.screens.chat.input import ChatInput
from console.tui.screens.chat.pane import ANSWERING, Pane
from console.tui.screens.chat.prose import Prose
from console.tui.screens.chat.settings import ChatSettingsScreen, PresetsScreen
from console.tui.screens.chat.turn import Foot
from console.tui.screens.dialogs import ConfirmScreen
from console.tui.view import View
from engine.errors import EngineError
from engine.snapshot import Snapshot

# The keys of the chat screen. A letter is always typed, so every action has a key with ctrl or alt, which works in
# the box and outside it.


def _key(
    keys: str, action: str, title: str, name: str, tooltip: str, *, show: bool = False, asks: bool = False
) -> Binding:
    """Return a key with priority over the input box, which would take ctrl+y for its own, and alt+e for an e. asks: it
    asks the model."""
    return ConsoleBinding(
        keys,
        action,
        title,
        id=f"chat.{name}",
        tooltip=tooltip,
        show=show,
        priority=True,
        mutates=asks,
        call=CHAT if asks else "",
    )


CHAT_BINDINGS: list[BindingType] = [
    _key("escape", "stop", "Stop", "stop", "Stop the answers; else leave or enter the box", show=True),
    _key(
        "ctrl+r,alt+r",
        "again",
        "Regenerate",
        "again",
        "Regenerate the last answer, as a branch",
        show=True,
        asks=True,
    ),
    _key("ctrl+t,alt+c", "go_on", "Continue", "continue", "Continue the last answer", show=True, asks=True),
    _key("alt+e", "edit", "Edit", "edit", "Edit a question and resend it, as a branch", show=True),
    _key("ctrl+y,alt+y", "copy", "Copy", "copy", "Copy the selected message, or the last answer", show=True),
    _key("alt+x", "copy_code", "Code", "code", "Copy a code block; again for the previous one"),
    _key(
        "alt+u",
        "thinking",
        "Thinking",
        "thinking",
        "Show or hide the thinking of the selected or last answer",
        show=True,
    ),
    _key(
        "alt+d",
        "delete",
        "Delete",
        "turn.delete",
        "Delete a turn, or the last question, and all that follows",
    ),
    _key("alt+left,alt+o", "branch(-1)", "‹", "back", "Show the previous branch"),
    _key("alt+right,alt+n", "branch(1)", "›", "on", "Show the next branch"),
    _key("alt+k", "move(-1)", "Up", "up", "Select the previous turn"),
    _key("alt+j", "move(1)", "Down", "down", "Select the next turn"),
    _key("ctrl+n,alt+a", "new", "New", "new", "Start a new conversation", show=True),
    _key("ctrl+o,alt+g", "list", "List", "list", "Show or hide the conversations", show=True),
    _key("ctrl+f", "search", "Search", "search", "Search all conversations"),
    _key("alt+t", "rename", "Rename", "rename", "Rename the conversation"),
    _key("ctrl+s,alt+s", "settings", "Settings", "settings", "Model, system prompt and sampling", show=True),
    _key("alt+p", "presets", "Presets", "presets", "Choose a system prompt and sampling"),
    _key("alt+v", "split", "Split", "split", "Compare two models or settings side by side", show=True),
    _key("alt+w", "export('md')", "Export", "export", "Write the branch to a Markdown file"),
    _key("alt+shift+w", "export('json')", "JSON", "export.json", "Write all branches to a JSON file"),
    _key("alt+shift+r", "read_back", "Import", "import", "Read an exported JSON file"),
    _key("alt+h", "app.help", "Help", "help", "Show the keys and what the numbers mean", show=True),
]


NO_MODEL = "No model loaded. Press F2 to choose one; your question is kept."
KEPT = "Your question is kept."
NOTHING_ASKED = "No question to regenerate."
NOTHING_SAID = "No answer to continue."
NO_THINKING = "No thinking before this answer."
NO_BRANCH = "No more branches. Ctrl+R regenerates, Alt+E edits."
NOTHING_TO_DELETE = "No turn to delete."
TOO_LONG = "Too long for the terminal clipboard. Alt+W exports the conversation."
TOO_LONG_TO_SEND = "Too long: {:,} tokens, limit {:,}."
SHORTEN = "Shorten the question; it is kept in the box."
SHORTEN_OR_DELETE = "Shorten the question, delete turns (alt+d) or start a new conversation (ctrl+n)."
_QUOTED = 60
"""Characters of a turn in the question whether to delete it."""
COUNT_PATIENCE_S = 2.0
"""How long a question waits to be counted before it is sent."""


def _drains(view: View) -> bool:
    """Return whether questions are refused, as new requests are."""
    return view.published.draining_since is not None


class ChatScreen(ConversationsScreen):
    """Asks; the conversations themselves are in the base class."""

    MODE = "chat"
    AUTO_FOCUS = "ChatInput"
    BINDINGS: ClassVar[list[BindingType]] = CHAT_BINDINGS

    def __init__(self) -> None:
        super().__init__()
        self._copied: tuple[int, int] = (0, 0)
        """The answer whose code was copied last, and the number of that block."""
        self._sending = asyncio.Lock()

    def key_states(self, view: View) -> dict[str, bool | str]:
        """Offer what has a model, a question, an answer or a kept conversation to work on."""
        if not self._panes:
            return super().key_states(view)
        ready, path = view.snapshot.status.state in ANSWERING and not _drains(view), self.pane.path
        answering = any(pane.answering for pane in self._panes)
        asked = any(turn.role == "user" for turn in path)
        answer = self.pane.turn("assistant")
        answered = bool(path) and path[-1].role == "assistant" and bool(path[-1].content or path[-1].thinking)
        states: dict[str, bool | str] = dict.fromkeys(("chat.up", "chat.down", "chat.turn.delete"), bool(path))
        states |= dict.fromkeys(("chat.rename", "chat.export", "chat.export.json"), self._chat.id is not None)
        return (
            super().key_states(view)
            | states
            | {
                "chat.send": ready,
                "chat.stop": answering,
                "chat.again": ready and asked,
                "chat.continue": ready and answered and not answering,
                "chat.edit": asked,
                "chat.copy": answer is not None or self.pane.transcript.selected is not None,
                "chat.thinking": answer is not None and bool(answer.thinking),
                "chat.code": answer is not None and may_have_code(answer.content),
            }
        )

    def _ready(self) -> bool:
        """Return whether a model can answer; notify where none can."""
        if not self._panes:
            return False
        if _drains(self.console.view):
            self.notify(f"Draining: new requests are refused. {KEPT}", severity="warning")
            return False
        if self.console.view.snapshot.status.state in ANSWERING:
            return True
        starting = self.console.view.link_status.starting_text
        self.notify(f"{starting} {KEPT}" if starting else NO_MODEL, severity="warning", markup=False)
        return False

    # -- asking ------------------------------------------------------------------------------------------------------

    def on_chat_input_submitted(self, event: ChatInput.Submitted) -> None:
        """Send a question to every pane, after those before it; without a model it goes back into the box."""
        if self._ready():
            self.run_worker(self._send(event), group="send", exit_on_error=False)
        else:
            self.query_one(ChatInput).put_back(event)

    async def _send(self, event: ChatInput.Submitted) -> None:
        async with self._sending:
            if await self._too_long(event) or not await self._ask(event):
                self.query_one(ChatInput).put_back(event)

    async def _ask(self, event: ChatInput.Submitted) -> bool:
        """Return whether the question is in the conversation."""
        await self._halt()
        try:
            if event.editing is not None:
                asked = self._chat.edit(event.editing, event.text.strip())
            else:
                self._chat.ask(event.text.strip())
                asked = self._chat.branches
        except EngineError as error:
            self.notify(error.message, severity="error", markup=False)
            return False
        self._show_list()
        for pane in self._panes:
            pane.transcript.select(None)
            if pane.branch in asked:
                await self._try(pane.answer(too_long=lambda: self._keep_draft(event)))
        self._changed()
        return True

    def _keep_draft(self, event: ChatInput.Submitted) -> None:
        """Put a question back that the engine refused for its length; of two panes, one is enough."""
        box = self.query_one(ChatInput)
        if not box.text.startswith(event.text):
            box.put_back(event)

    async def _too_long(self, event: ChatInput.Submitted) -> bool:
        """Return whether a pane's context is too small, and notify. A draft that is not counted in time is sent, and
        comes back into the box where the engine refuses it."""
        try:
            async with asyncio.timeout(COUNT_PATIENCE_S):
                counts = [await pane.count(event.text.strip(), event.editing) for pane in self._panes]
        except (EngineError, TimeoutError):
            return False
        least = min(counts, key=lambda count: count.left)
        if not least.context or least.left > 0:
            return False
        words = TOO_LONG_TO_SEND.format(least.history + least.draft, least.context)
        way_out = SHORTEN if least.draft >= least.context else SHORTEN_OR_DELETE
        self.notify(f"{words} {way_out}", severity="error", timeout=10)
        return True

    async def _try(self, work: Coroutine[Any, Any, object]) -> object:
        """Run a command of a pane; notify why it failed."""
        try:
            return await work
        except EngineError as error:
            self.notify(error.message, severity="error", markup=False)
            return True

    async def action_again(self) -> None:
        """Ask for another answer, as a branch."""
        if self._ready():
            await self.pane.halt()
            if not await self._try(self.pane.again()):
                self.notify(NOTHING_ASKED, severity="warning")

    async def action_go_on(self) -> None:
        """Let the model go on with its last answer."""
        if self._ready() and not self.pane.answering and not await self._try(self.pane.go_on()):
            self.notify(NOTHING_SAID, severity="warning")

    def action_edit(self) -> None:
        """Bring the selected question, or the last one, into the box."""
        question = self.pane.turn("user")
        if question is None:
            self.notify(NOTHING_ASKED, severity="warning")
            return
        box = self.query_one(ChatInput)
        box.ask_otherwise(question)
        box.focus()

    def action_delete(self) -> None:
        """Delete the selected turn, or the last question, with all that follows it; ask first."""
        turn = self._chat.tree.get(self.pane.transcript.selected) or self.pane.turn("user")
        if turn is None:
            self.notify(NOTHING_TO_DELETE, severity="warning")
            return
        after = len(self._chat.tree.beneath(turn.id)) - 1
        kind = "question" if turn.role == "user" else "answer"
        follows = f"Also deletes {plural(after, 'following turn')}, in all branches.\n" if after else ""
        words = clip(" ".join((turn.content or turn.thinking).split()) or turn.note.problem, _QUOTED)
        question = ConfirmScreen(f"Delete this {kind}?", f"{words}\n{follows}", yes="Delete", no="Keep")

        async def delete(sure: bool | None) -> None:
            if sure:
                await self._delete(turn)

        self.app.push_screen(question, delete)

    async def _delete(self, turn: Turn) -> None:
        await self._halt()
        if self._chat.tree.get(turn.id) is not None:  # it was an answer under way, of which nothing had come
            self._chat.delete(turn)
        for pane in self._panes:
            await pane.show()
        self._changed()

    async def action_stop(self) -> None:
        """Stop the answers under way; else leave the editing of a question; else leave the box, or go back to it."""
        box, shelf = self.query_one(ChatInput), self.query_one(ChatShelf)
        if any(pane.answering for pane in self._panes):
            await self._halt()
        elif box.editing is not None:
            box.ask_otherwise(None)
        elif shelf.searching:
            shelf.end_search()
            self.action_write()
        elif box.has_focus:
            self.pane.transcript.focus()
        else:
            self.action_write()

    async def action_branch(self, by: int) -> None:
        """Show the previous branch or after."""
        await self.pane.halt()
        if not await self.pane.branch_by(by):
            self.notify(NO_BRANCH, severity="warning")
        self._changed()

    async def action_move(self, by: int) -> None:
        """Select the previous turn or after."""
        await self.pane.transcript.move(by)

    async def on_foot_pressed(self, event: Foot.Pressed) -> None:
        """An action beneath a turn was clicked."""
        self._look_at(event.foot)
        if event.action in ("back", "on"):
            await self.pane.halt()
            await self.pane.branch_by(-1 if event.action == "back" else 1, event.turn_id)
            self._changed()
            return
        self.pane.transcript.select(event.turn_id)
        await self.run_action(event.action)

    def on_descendant_focus(self, event: events.DescendantFocus) -> None:
        """Keys are about the pane that has the focus."""
        self._look_at(event.widget)

    def _look_at(self, widget: Widget) -> None:
        for at, pane in enumerate(self._panes):
            if pane.transcript in widget.ancestors_with_self:
                self._at = at

    def on_text_area_changed(self, event: TextArea.Changed) -> None:
        """Count the draft again."""
        self._counter.ask()

    # -- how it asks -------------------------------------------------------------------------------------------------

    def action_settings(self) -> None:
        """Edit how this pane asks."""
        pane = self.pane

        def use(settings: ChatSettings | None) -> None:
            if settings is not None:
                self._use(pane, settings)

        side = ("left", "right")[self._at] if len(self._panes) > 1 else ""
        self.app.push_screen(
            ChatSettingsScreen(
                pane.branch.settings,
                self.link.sampling_defaults(pane.model),
                models=_models(self.console.view.published),
                store=self._store,
                title=f"Chat settings of the {side} side" if side else "Chat settings",
            ),
            use,
        )

    def action_presets(self) -> None:
        """Choose how this pane asks."""
        pane = self.pane

        def use(preset: Preset | None) -> None:
            if preset is not None:
                self._use(pane, apply_preset(preset, pane.branch.settings))
                self.notify(f"{preset.name}: {describe_settings(pane.branch.settings)}", markup=False)

        self.app.push_screen(PresetsScreen(self._store, pane.branch.settings), use)

    def _use(self, pane: Pane, settings: ChatSettings) -> None:
        self._chat.set_settings(pane.branch, settings)
        self._counter.ask()
        self.redraw()

    async def action_split(self) -> None:
        """Ask two models or settings side by side; or go on with the pane in focus alone."""
        await self._halt()
        if len(self._panes) > 1:
            self._chat.join(self.pane.branch)
            await self._show_panes()
        else:
            self._chat.split()
            await self._show_panes()
            self._at = 1
            self.action_settings()
        self._show_list()

    # -- reading -----------------------------------------------------------------------------------------------------

    async def action_thinking(self) -> None:
        """Show or hide what the model thought before the selected or last answer."""
        turn = self.pane.turn("assistant")
        if turn is None or not turn.thinking:
            self.notify(NO_THINKING, severity="warning")
        else:
            await self.pane.transcript.toggle_thinking(turn.id)

    # -- copying -----------------------------------------------------------------------------------------------------

    async def action_copy(self) -> None:
        """Copy the selected turn, or the last answer, as it was written, not as it is wrapped."""
        selected = self._chat.tree.get(self.pane.transcript.selected)
        turn = selected or self.pane.turn("assistant")
        if turn is not None:
            await self._copy(turn.content, "the question" if turn.role == "user" else "the answer")

    async def action_copy_code(self) -> None:
        """Copy the last code block of the selected or last answer; again: the block before."""
        turn = self.pane.turn("assistant")
        blocks = code_blocks(turn.content) if turn is not None else []
        if turn is None or not blocks:
            self.notify("No code block in this answer.", severity="warning")
            return
        number = self._copied[1] - 1 if self._copied[0] == turn.id else 0
        number = number if 0 < number <= len(blocks) else len(blocks)
        self._copied = turn.id, number
        lines = plural(len(blocks[number - 1].splitlines()), "line")
        await self._copy(blocks[number - 1], f"code block {number} of {len(blocks)}, {lines}")

    async def on_prose_link_pressed(self, event: Prose.LinkPressed) -> None:
        """Over ssh there is no browser to open one in."""
        event.stop()
        await self._copy(event.href, "the link")

    async def _copy(self, text: str, what: str) -> None:
        if await copy(self.app, text):
            self.notify(f"Copied {what}.")
        else:
            self.notify(TOO_LONG, severity="warning")


def _models(snapshot: Snapshot) -> list[str]:
    """The names that can be asked: models, and their adapters."""
    adapters = (adapter.name for model in snapshot.models for adapter in model.adapters)
    spec = snapshot.status.spec
    names = [model.name for model in snapshot.models] or ([spec.name] if spec is not None else [])
    return list(dict.fromkeys([*names, *adapters]))
