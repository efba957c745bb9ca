"""Pane: one branch of the open conversation in one transcript, and the answer that is on its way there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from textual.content import Content
from textual.worker import Worker

from console.chats import Branch, OpenChat, Turn
from console.chats.conversation import AnswerStream
from console.chats.presets import describe_settings
from console.link.chat import ChatMessage, DraftCount
from console.tui.screens.base import AppScreen
from console.tui.screens.chat.settings import sampling
from console.tui.screens.chat.transcript import ChatTranscript
from console.tui.screens.chat.turn import BranchPosition
from console.tui.widgets.glyphs import for_terminal
from engine.config import SamplingParams
from engine.snapshot import Snapshot

if TYPE_CHECKING:
    from console.tui.app import EricApp

ANSWERING = ("ready", "idle")  # an idle model loads first
HINT = "Send a message to start. Each answer shows its speed below."


class Pane:
    """Everything raises EngineError with one sentence. ended: called when an answer is there, or as far as it comes."""

    def __init__(
        self,
        console: EricApp,
        chat: OpenChat,
        branch: Branch,
        transcript: ChatTranscript,
        ended: Callable[[], None],
    ) -> None:
        self._console = console
        self.chat = chat
        self.branch = branch
        self.transcript = transcript
        self._ended = ended
        self._titles = ("", "")
        self._worker: Worker[None] | None = None

    @property
    def model(self) -> str:
        """The name that is asked; "" is the engine's first model."""
        return self.branch.settings.model or self._console.view.model_name

    @property
    def path(self) -> Sequence[Turn]:
        """The turns shown."""
        return self.chat.path(self.branch)

    @property
    def answering(self) -> bool:
        """True while an answer is under way."""
        return self._worker is not None and self._worker.is_running

    async def show(self) -> None:
        """Show the branch, its end first of all."""
        await self.transcript.show(self.path, self._place, hint=HINT)

    def title(self, snapshot: Snapshot, *, named: str) -> None:
        """Show which model would answer. named: the conversation; "" next to another pane, where the settings are shown
        instead."""
        spec = snapshot.status.spec
        ready = snapshot.status.state in ANSWERING and spec is not None
        model = self.branch.settings.model or (spec.name if spec is not None and ready else self._no_model)
        titles = (named, model) if named else (f"{model} · {describe_settings(self.branch.settings)}", "")
        if titles != self._titles:
            self._titles = titles
            shown = [for_terminal(self.transcript.app, Content(title)) for title in titles]
            self.transcript.border_title, self.transcript.border_subtitle = shown

    @property
    def _no_model(self) -> str:
        return self._console.view.link_status.starting_text or "no model"

    def turn(self, role: str) -> Turn | None:
        """The selected turn where it is of that role, else the last one that is."""
        selected = self.chat.tree.get(self.transcript.selected)
        if selected is not None and selected.role == role:
            return selected
        return next((turn for turn in reversed(self.path) if turn.role == role), None)

    def _place(self, turn: Turn) -> BranchPosition:
        if self.chat.tree.get(turn.id) is None:
            return BranchPosition()
        siblings = self.chat.tree.siblings(turn.id)
        return BranchPosition(siblings.index(turn.id) + 1, len(siblings))

    # -- answers -----------------------------------------------------------------------------------------------------

    async def answer(self, too_long: Callable[[], None] = lambda: None) -> None:
        """Let the model answer the last question. too_long: called where it is refused for its length."""
        params, messages = self._params(), self.chat.messages(self.branch)
        spec = self._console.view.snapshot.status.spec
        turn = self.chat.begin_answer(self.branch, self.model or (spec.name if spec is not None else ""))
        await self.show()
        self._start(turn, messages, params, continues=False, too_long=too_long)

    async def go_on(self) -> bool:
        """Let the model go on with its last answer, or answer again where its thinking cannot be continued; False
        where there is none."""
        params = self._params()
        turn = self.chat.resume_answer(self.branch)
        if turn is None:
            return False
        await self.show()
        widget = self.transcript.answer(turn.id)
        if widget is not None:
            widget.resume(turn)
        self._start(turn, self.chat.messages(self.branch), params, continues=True)
        return True

    async def again(self) -> bool:
        """Another answer to the question before the selected answer, or the last one; False where nothing was asked."""
        selected = self.chat.tree.get(self.transcript.selected)
        if not self.chat.again(self.branch, selected.id if selected is not None else None):
            return False
        await self.answer()
        return True

    async def branch_by(self, by: int, turn_id: int | None = None) -> bool:
        """Show the previous or the next branch of a turn: the given one, the selected one, or the last that has any."""
        at = turn_id or self.transcript.selected
        if at is None or len(self.chat.tree.siblings(at)) < 2:
            forks = (turn.id for turn in reversed(self.path) if len(self.chat.tree.siblings(turn.id)) > 1)
            at = next(forks, None)
        if at is None or not self.chat.step(self.branch, at, by):
            return False
        selected = self.transcript.selected is not None
        siblings = self.chat.tree.siblings(at)
        shown = siblings[siblings.index(at) + by]
        await self.show()
        self.transcript.select(shown if selected else None)
        await self.transcript.go_to(shown)
        return True

    async def reveal(self, text: str) -> None:
        """Show the first turn with `text` in it, whatever branch it is in."""
        found = self.chat.find(text)
        if found is not None:
            self.chat.reveal(self.branch, found)
            await self.show()
            self.transcript.select(found.id)
            await self.transcript.go_to(found.id)

    async def halt(self) -> None:
        """Stop the answer under way and wait until it is kept."""
        worker, self._worker = self._worker, None
        if worker is not None and worker.is_running:
            worker.cancel()
            with contextlib.suppress(Exception):
                await worker.wait()

    async def count(self, draft: str, before: Turn | None = None) -> DraftCount:
        """Count the tokens of asking `draft`; before: in place of that question."""
        messages = self.chat.messages(self.branch, before)
        return await self._console.link.conversation.count_tokens(messages, draft, self.model)

    def _params(self) -> SamplingParams:
        return sampling(self.branch.settings, self._console.link.sampling_defaults(self.model))

    def _start(
        self,
        turn: Turn,
        messages: list[ChatMessage],
        params: SamplingParams,
        *,
        continues: bool,
        too_long: Callable[[], None] = lambda: None,
    ) -> None:
        answering = AnswerStream(turn, self.chat.keep, self._grow)
        deltas = self._console.link.conversation.chat(
            messages,
            params,
            self.model,
            continue_answer=continues,
            enable_thinking=self.branch.settings.enable_thinking,
        )

        async def run() -> None:
            try:
                await answering.run(deltas)
            finally:
                self._finish(answering)
                self.transcript.call_later(self._refresh_keys)
            if answering.is_too_long:
                too_long()
            if answering.is_refused and self.chat.again(self.branch, turn.id):
                await self.answer()

        self._worker = self.transcript.run_worker(run(), group="answer", exclusive=True, exit_on_error=False)
        self._refresh_keys()

    def _refresh_keys(self) -> None:
        """Stop is offered while an answer is under way."""
        if isinstance(screen := self.transcript.screen, AppScreen):
            screen.offer_keys()

    def _grow(self, turn: Turn) -> None:
        self.chat.tree.put(turn)
        if (widget := self.transcript.answer(turn.id)) is not None:
            widget.grow(turn)

    def _finish(self, answering: AnswerStream) -> None:
        """Keep what came; it runs to its end even when the answer was stopped."""
        turn = answering.turn
        if not (turn.content or turn.thinking or turn.failed):
            self.chat.delete(turn)
        self.transcript.replace(turn)
        if (widget := self.transcript.answer(turn.id)) is not None:
            self.transcript.call_later(widget.finish, turn)
            self.transcript.call_later(self.transcript.remark)
        self._ended()
