"""Chat: ask the loaded model, read its answer as it comes, keep the conversation."""

from __future__ import annotations

import contextlib
from typing import ClassVar

import msgspec
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.worker import Worker

from console.chats import ChatSettings, ChatStore, ChatStoreError, Turn, TurnNote
from console.link import ApiStatus
from console.links.conversation import ChatDelta, ChatMessage
from console.screens.base import ConsoleScreen
from console.screens.chat_settings import ChatSettingsScreen, sampling
from console.screens.confirm import ConfirmScreen
from console.widgets.chat_input import ChatInput
from console.widgets.chat_list import ChatList
from console.widgets.chat_transcript import ChatTranscript
from console.widgets.chat_turn import Answer
from engine.errors import EngineError
from engine.snapshot import Snapshot

NO_MODEL = "No model is loaded. Press F2 to choose one; your question stays here."
HINT = "Ask the model something. Its answer streams here, with its speed beneath."
ANSWERING = ("ready", "idle")  # an idle model loads first


class ChatScreen(ConsoleScreen):
    """One conversation at a time; the others wait in the list."""

    MODE = "chat"
    AUTO_FOCUS = "ChatInput"

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "stop", "Stop", id="chat.stop", tooltip="Stop the answer; else leave the box", priority=True),
        Binding("ctrl+r", "again", "Again", id="chat.again", tooltip="Answer the last question again", priority=True),
        Binding("ctrl+n", "new", "New", id="chat.new", tooltip="Start a new conversation", priority=True),
        Binding("ctrl+s", "settings", "Settings", id="chat.settings", tooltip="System prompt and sampling"),
        Binding("ctrl+o", "list", "Conversations", id="chat.list", tooltip="Show or hide the conversations"),
        Binding("ctrl+y", "copy", "Copy", id="chat.copy", tooltip="Copy the last answer", priority=True),
        Binding("i", "write", "Write", id="chat.write", tooltip="Back to the box", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._chat: int | None = None
        self._settings = ChatSettings()
        self._turns: list[Turn] = []
        self._answering: Worker[None] | None = None

    def compose_body(self) -> ComposeResult:
        """Conversations on the left, the transcript and the box on the right."""
        with Horizontal(id="chat"):
            yield ChatList()
            with Vertical():
                yield ChatTranscript()
                yield ChatInput()

    def on_mount(self) -> None:
        """Open the conversation that changed last."""
        try:
            self._store = ChatStore(self.console.chats)
        except ChatStoreError as error:
            self.notify(f"{error.message}. New ones are kept in memory.", severity="error", markup=False)
            self._store = ChatStore(None)
        chats = self._store.conversations()
        self.call_later(self._open, chats[0].id if chats else None)
        self.query_one(ChatInput).focus()

    def on_unmount(self) -> None:
        """The console closes."""
        self._store.close()

    def update_body(self, snapshot: Snapshot, api: ApiStatus) -> None:
        """Say who would answer."""
        spec = snapshot.status.spec
        ready = snapshot.status.state in ANSWERING and spec is not None
        self.query_one(ChatTranscript).border_subtitle = spec.name if ready and spec else "no model"

    # -- conversations -----------------------------------------------------------------------------------------------

    async def _open(self, chat: int | None) -> None:
        kept = next((kept for kept in self._store.conversations() if kept.id == chat), None)
        self._chat = kept.id if kept else None
        if kept:
            self._settings = kept.settings
        self._turns = list(self._store.turns(kept.id)) if kept else []
        await self.query_one(ChatTranscript).show(self._turns, hint=HINT)
        questions = [turn.content for turn in self._turns if turn.role == "user"]
        self.query_one(ChatInput).last_question = questions[-1] if questions else ""
        self._show_list()

    def _show_list(self) -> None:
        chats = self._store.conversations()
        self.query_one(ChatList).show(chats, self._chat)
        title = next((kept.title for kept in chats if kept.id == self._chat), "")
        self.query_one(ChatTranscript).border_title = title or "New conversation"

    async def on_chat_list_opened(self, event: ChatList.Opened) -> None:
        """Go to another conversation; an answer under way is stopped and kept as far as it came."""
        await self._halt()
        await self._open(event.id)
        self.query_one(ChatInput).focus()

    def on_chat_list_delete_asked(self, event: ChatList.DeleteAsked) -> None:
        """Ask before a conversation goes."""

        async def delete(yes: bool | None) -> None:
            if not yes:
                return
            if event.id == self._chat:
                await self._halt()
            self._store.delete(event.id)
            left = self._store.conversations()
            await self._open(self._chat if event.id != self._chat else left[0].id if left else None)

        question = ConfirmScreen("Delete this conversation?", event.title, yes="Delete", no="Keep")
        self.app.push_screen(question, delete)

    async def action_new(self) -> None:
        """An empty conversation with the settings of this one."""
        await self._halt()
        await self._open(None)
        self.query_one(ChatInput).focus()

    def action_list(self) -> None:
        """Show the conversations, or put them away."""
        chats = self.query_one(ChatList)
        chats.toggle_class("-shown" if self.app.has_class("-narrow") or self.has_class("-narrow") else "-hidden")
        if chats.display:
            chats.focus()
        else:
            self.query_one(ChatInput).focus()

    def action_settings(self) -> None:
        """Edit how this conversation asks."""

        def use(settings: ChatSettings | None) -> None:
            if settings is not None:
                self._settings = settings
                if self._chat is not None:
                    self._store.set_settings(self._chat, settings)

        self.app.push_screen(
            ChatSettingsScreen(self._settings, self.link.sampling_defaults(self.console.viewed_model)), use
        )

    # -- asking ------------------------------------------------------------------------------------------------------

    async def on_chat_input_submitted(self, event: ChatInput.Submitted) -> None:
        """Send a question, if there is who could answer it."""
        if self.console.snapshot().status.state not in ANSWERING:
            self.notify(NO_MODEL, severity="warning", markup=False)
            return
        await self._halt()
        box = self.query_one(ChatInput)
        box.text, box.last_question = "", event.text
        if self._chat is None:
            self._chat = self._store.create(self._settings)
        self._keep(Turn(role="user", content=event.text))
        self._show_list()
        await self.query_one(ChatTranscript).add_question(event.text)
        await self._answer()

    async def action_again(self) -> None:
        """Drop the last answer and ask for another."""
        await self._halt()
        if self._chat is None or not self._turns:
            self.notify("There is no question to answer again.", severity="warning")
            return
        if self._turns[-1].role == "assistant":
            self._store.drop_last_answer(self._chat)
            self._turns.pop()
        await self.query_one(ChatTranscript).drop_last_answer()
        await self._answer()

    async def action_stop(self) -> None:
        """Stop the answer under way; with none, leave the box so that single keys work."""
        if self._answering is not None:
            await self._halt()
        elif isinstance(self.focused, ChatInput):
            self.query_one(ChatTranscript).focus()
        else:
            self.action_write()

    def action_write(self) -> None:
        """Back to the box."""
        self.query_one(ChatInput).focus()

    def action_copy(self) -> None:
        """Copy the last answer as it was written, not as it is wrapped."""
        answers = [turn.content for turn in self._turns if turn.role == "assistant"]
        if answers:
            self.app.copy_to_clipboard(answers[-1])
            self.notify("Copied the last answer.")

    def _keep(self, turn: Turn) -> None:
        self._turns.append(turn)
        if self._chat is not None:
            self._store.append(self._chat, turn)

    async def _answer(self) -> None:
        answer = await self.query_one(ChatTranscript).add_answer()
        self._answering = self.run_worker(self._converse(answer), group="answer", exclusive=True, exit_on_error=False)

    async def _halt(self) -> None:
        """Stop the answer under way and wait until it is kept."""
        worker, self._answering = self._answering, None
        if worker is not None and worker.is_running:
            worker.cancel()
            with contextlib.suppress(Exception):
                await worker.wait()

    async def _converse(self, answer: Answer) -> None:
        spec = self.console.snapshot().status.spec
        note = TurnNote(model=spec.name if spec else "")
        finish, problem = "cancelled", ""
        try:
            params = sampling(self._settings, self.link.sampling_defaults(self.console.viewed_model))
            stream = self.link.conversation.chat(self._messages(), params, self.console.viewed_model)
            async with contextlib.aclosing(stream) as deltas:  # type: ignore[type-var]
                async for delta in deltas:
                    note = _note(note, delta)
                    answer.grow(delta.text, note)
                    finish = delta.finish or finish
        except EngineError as error:
            finish, problem = "error", error.message
        finally:
            self._finish(answer, msgspec.structs.replace(note, finish=finish), problem)

    def _finish(self, answer: Answer, note: TurnNote, problem: str) -> None:
        """Keep what came; it runs to its end even when the answer was stopped."""
        self._answering = None
        if answer.content_text:
            self._keep(Turn(role="assistant", content=answer.content_text, note=note))
        self.call_later(answer.finish, note, problem)

    def _messages(self) -> list[ChatMessage]:
        system = [ChatMessage(role="system", content=self._settings.system_prompt)]
        said = [ChatMessage(role=turn.role, content=turn.content) for turn in self._turns]
        return (system if self._settings.system_prompt else []) + said


def _note(note: TurnNote, delta: ChatDelta) -> TurnNote:
    return TurnNote(
        model=note.model, output_tokens=delta.output_tokens, tokens_per_s=delta.tokens_per_s, ttft_s=delta.ttft_s
    )
