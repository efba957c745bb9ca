"""The conversations of the chat screen: opened, found, named, deleted, exported and read back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from textual import events
from textual.app import ComposeResult
from textual.containers import Container, Horizontal, Vertical
from textual.widgets import Input, TextArea

from console.chats import ChatSettings, ChatStore, ChatStoreError, OpenChat
from console.chats.export import Kind, export, file_name, from_json, read_into, to_json, to_markdown
from console.link.status import CHAT
from console.tui.screens.base import ConsoleScreen
from console.tui.screens.chat.conversation_list import ChatList, ChatShelf
from console.tui.screens.chat.input import ASKING, ChatInput, ChatLine
from console.tui.screens.chat.pane import Pane
from console.tui.screens.chat.transcript import ChatTranscript
from console.tui.screens.dialogs import ConfirmScreen, LineScreen
from console.tui.screens.save_dialog import save_file, suggested_path
from console.tui.view import View
from engine.errors import EngineError, InvalidRequest

# Conversations that were exported, read back.

MAX_IMPORT_BYTES = 64 * 2**20
"""Of a conversation that is read back."""


def import_from_file(store: ChatStore, path: Path) -> int:
    """Keep what was exported to a JSON file as another conversation; returns its id. Raises InvalidRequest."""
    try:
        file = path.expanduser()
        if file.stat().st_size > MAX_IMPORT_BYTES or not file.is_file():
            raise InvalidRequest(f"{path} is not a file, or larger than {MAX_IMPORT_BYTES // 2**20} MiB")
        data = file.read_bytes()
    except (OSError, ValueError, RuntimeError) as error:  # a name with a NUL, or the home of an unknown user
        raise InvalidRequest(f"Cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    return read_into(store, from_json(data))


# Tokens of the draft: counted off the screen's loop, once typing pauses, one count at a time.

QUIET_S = 0.2


class DraftCounter:
    """panes: those that would answer; of two, the line shows the one with less room."""

    def __init__(self, panes: Callable[[], Sequence[Pane]], box: ChatInput, line: ChatLine) -> None:
        self._panes = panes
        self._box = box
        self._line = line
        self._asked = asyncio.Event()
        self._model: object = None

    def ask(self) -> None:
        """Count again soon."""
        self._asked.set()

    def model_is(self, model: object) -> None:
        """Count again where the model changed."""
        if model != self._model:
            self._model = model
            self.ask()

    async def run(self) -> None:
        """Count whenever asked, until cancelled."""
        while True:
            await self._asked.wait()
            await asyncio.sleep(QUIET_S)
            self._asked.clear()
            await self._count()

    async def _count(self) -> None:
        text, editing = self._box.text.strip(), self._box.editing
        try:
            counts = [(await pane.count(text, editing), pane.branch.settings.max_tokens or 0) for pane in self._panes()]
        except EngineError:
            counts = []
        if not counts:
            self._line.show(None)
            return
        count, max_tokens = min(counts, key=lambda each: each[0].left - each[1])
        self._line.show(count, max_tokens or None)


class ConversationsScreen(ConsoleScreen):
    """Holds one open conversation, in a pane or two; the others wait in the list."""

    def __init__(self) -> None:
        super().__init__()
        self._panes: list[Pane] = []
        self._at = 0
        self._title = ""
        self._problem = ""

    def compose_body(self) -> ComposeResult:
        """Conversations on the left; transcripts, the line and the box on the right."""
        with Horizontal(id="chat"):
            yield ChatShelf()
            with Vertical():
                with Container(id="panes"):
                    yield ChatTranscript()
                yield ChatLine()
                yield ChatInput()

    def on_mount(self) -> None:
        """Open the conversation that changed last."""
        try:
            self._store = ChatStore(self.console.chats)
        except ChatStoreError as error:
            self.notify(f"{error.message} New ones are kept in memory only.", severity="error", markup=False)
            self._store = ChatStore(None)
        self._chat = OpenChat(self._store, None, ChatSettings())
        self._counter = DraftCounter(lambda: self._panes, self.query_one(ChatInput), self.query_one(ChatLine))
        self.run_worker(self._counter.run(), group="count", exit_on_error=False)
        chats = self._store.conversations()
        self.call_later(self._open, chats[0].id if chats else None)
        self.query_one(ChatInput).focus()

    def on_screen_suspend(self) -> None:
        """Another mode's screen comes up: whatever has the focus here, it is the box that gets it back."""
        if self not in self.app.screen_stack:
            self.action_write()

    def check_consume_key(self, key: str, character: str | None) -> bool:
        """A character is typed wherever the focus is: it is never a command of the console."""
        return character is not None and character.isprintable()

    def before_key(self, event: events.Key) -> None:
        """Have what is typed outside a box go into the question's, from the first character on."""
        is_typed = event.is_printable and "+" not in event.key
        if is_typed and not isinstance(self.focused, Input | TextArea) and (box := self.query(ChatInput)):
            self.set_focus(box.first())

    def on_paste(self, event: events.Paste) -> None:
        """Put what is pasted outside a box into the question's."""
        box = self.query_one(ChatInput)
        box.focus()
        box.insert(event.text)

    async def on_unmount(self) -> None:
        """The console closes: what came is kept."""
        await self._halt()
        self._store.close()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Nothing works before a conversation is there."""
        return bool(self._panes) and super().check_action(action, parameters)

    def update_body(self, view: View) -> None:
        """Say who would answer, and in the empty box why none may be asked."""
        self.query_one(ChatInput).placeholder = view.link_status.refusal_of(CHAT, changes=True) or ASKING
        for pane in self._panes:
            pane.title(view.snapshot, named=self._title if len(self._panes) == 1 else "")
        if self._panes:
            status = view.snapshot.status
            self._counter.model_is((view.model_name, status.state, status.spec))
        if self._panes and self._store.problem != self._problem:
            self._problem = self._store.problem
            self.notify(self._problem, severity="error", markup=False, timeout=10)

    # -- conversations -----------------------------------------------------------------------------------------------

    async def _open(self, chat: int | None) -> None:
        """Show a conversation, None is a new one with the settings of the last."""
        await self._halt()
        settings = self._chat.branches[0].settings
        conversation = self._store.conversation(chat) if chat is not None else None
        self._chat = OpenChat(self._store, conversation, settings)
        await self._show_panes()
        if (box := self.query_one(ChatInput)).editing is not None:
            box.ask_otherwise(None)
        self._show_list()

    async def _show_panes(self) -> None:
        """A pane for each branch."""
        branches, room = self._chat.branches, self.query_one("#panes")
        transcripts = list(room.query(ChatTranscript))
        await room.remove_children(transcripts[len(branches) :])
        if len(transcripts) < len(branches):
            transcripts.append(new := ChatTranscript())
            await room.mount(new)
        self.query_one("#chat").set_class(len(branches) > 1, "-split")
        self._panes = [
            Pane(self.console, self._chat, branch, transcript, self._counter.ask)
            for branch, transcript in zip(branches, transcripts, strict=False)
        ]
        self._at = min(self._at, len(self._panes) - 1)
        for pane in self._panes:
            await pane.show()
        self.refresh_bindings()
        self._changed()

    def _show_list(self) -> None:
        shelf = self.query_one(ChatShelf)
        self.query_one(ChatList).show(self._store.conversations(shelf.search), self._chat.id)
        conversation = self._store.conversation(self._chat.id) if self._chat.id is not None else None
        self._title = (conversation.title if conversation is not None else "") or "New conversation"
        self.redraw()

    def _changed(self) -> None:
        """Other turns are shown."""
        questions = [turn.content for turn in self.pane.path if turn.role == "user"]
        self.query_one(ChatInput).last_question = questions[-1] if questions else ""
        self._counter.ask()
        self.offer_keys()

    async def on_chat_list_opened(self, event: ChatList.Opened) -> None:
        """Go to another conversation, to what was looked for in it; an answer under way is stopped and kept."""
        await self._open(event.id)
        if search := self.query_one(ChatShelf).search:
            await self.pane.reveal(search)
        self.action_write()

    def on_chat_list_delete_asked(self, event: ChatList.DeleteAsked) -> None:
        """Ask before a conversation goes."""

        async def delete(yes: bool | None) -> None:
            if not yes:
                return
            if event.id == self._chat.id:
                await self._halt()
            self._store.delete(event.id)
            left = self._store.conversations()
            await self._open(self._chat.id if event.id != self._chat.id else left[0].id if left else None)

        question = ConfirmScreen("Delete this conversation?", event.title, yes="Delete", no="Keep")
        self.app.push_screen(question, delete)

    def on_chat_shelf_searched(self) -> None:
        """Something else is looked for."""
        self._show_list()

    async def action_new(self) -> None:
        """An empty conversation with the settings of this one."""
        await self._open(None)
        self.action_write()

    def action_list(self) -> None:
        """Show the conversations, or put them away."""
        shelf = self.query_one(ChatShelf)
        shown = shelf.display
        shelf.set_class(shown, "-hidden")
        shelf.set_class(not shown, "-shown")
        if shown:
            self.action_write()
        else:
            self.query_one(ChatList).focus()

    def action_write(self) -> None:
        """Back to the box."""
        self.query_one(ChatInput).focus()

    def action_search(self) -> None:
        """Look for conversations by title and text."""
        shelf = self.query_one(ChatShelf)
        shelf.remove_class("-hidden")
        shelf.add_class("-shown")
        shelf.start_search()

    def action_rename(self) -> None:
        """Another title for the open conversation."""
        chat = self._chat.id
        if chat is None:
            self.notify("Nothing to rename yet: send a message first.", severity="warning")
            return

        def rename(title: str | None) -> None:
            if title is not None:
                self._store.rename(chat, title)
                self._show_list()

        self.app.push_screen(LineScreen("Title of this conversation", self._title, accept="Rename"), rename)

    def action_export(self, kind: Kind) -> None:
        """Save the branch shown as Markdown, or all branches as JSON, where the operator says."""
        conversation = self._store.conversation(self._chat.id) if self._chat.id is not None else None
        if conversation is None:
            self.notify("Nothing to export yet: send a message first.", severity="warning")
            return
        if kind == "md":
            content = to_markdown(conversation.title, conversation.settings, self.pane.path).encode()
        else:
            content = to_json(export(conversation, self._chat.tree))
        path = suggested_path(file_name(conversation.title, kind))
        save_file(self.app, "Export the conversation", path, lambda: content, saved="Exported")

    def action_read_back(self) -> None:
        """Ask for a file and open what is in it."""

        async def read(line: str | None) -> None:
            if line is None:
                return
            try:
                chat = import_from_file(self._store, Path(line))
            except EngineError as error:
                self.notify(error.message, severity="error", markup=False)
            else:
                await self._open(chat)

        question = LineScreen("Import a conversation (JSON)", accept="Import", placeholder="path of the JSON file")
        self.app.push_screen(question, read)

    # -- panes -------------------------------------------------------------------------------------------------------

    @property
    def pane(self) -> Pane:
        """The pane that keys are about: the one that had the focus last."""
        return self._panes[self._at]

    async def _halt(self) -> None:
        """Stop the answers under way, and wait until they are kept."""
        for pane in self._panes:
            await pane.halt()
