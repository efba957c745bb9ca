"""OpenChat: one conversation as it is worked on. Every change is in the store before a screen shows it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import msgspec

from console.chats.records import ChatSettings, Conversation, SecondBranch, Tree, Turn, TurnNote
from console.chats.store import ChatStore
from console.link.chat import ChatDelta, ChatMessage
from engine.errors import ContextLengthExceeded, EngineError, InvalidRequest


@dataclass(eq=False)
class Branch:
    """One way through a conversation's tree, and how it asks. leaf: its last turn, None while it has none."""

    settings: ChatSettings
    leaf: int | None = None


class OpenChat:
    """saved: None is a new conversation, which is in the store from its first question on.

    branches: one, or two side by side that are asked the same.
    """

    def __init__(self, store: ChatStore, saved: Conversation | None, settings: ChatSettings) -> None:
        self._store = store
        self.id = saved.id if saved is not None else None
        self.tree = store.tree(saved.id) if saved is not None else Tree()
        first = Branch(saved.settings, self._existing(saved.leaf)) if saved is not None else Branch(settings)
        self.branches = [first]
        if saved is not None and saved.beside is not None:
            self.branches.append(Branch(saved.beside.settings, self._existing(saved.beside.leaf)))

    def path(self, branch: Branch) -> Sequence[Turn]:
        """The turns of a branch, oldest first."""
        return self.tree.path(branch.leaf)

    def messages(self, branch: Branch, before: Turn | None = None) -> list[ChatMessage]:
        """The messages that a model is sent of a branch, or of what comes before a turn. A question whose answer failed
        before its first word is left out with it: it would make the next one fail too."""
        prompt = branch.settings.system_prompt
        system = [ChatMessage(role="system", content=prompt)] if prompt else []
        sent: list[Turn] = []
        for turn in self.path(branch) if before is None else self.tree.path(before.parent):
            if turn.failed:
                sent.pop()
            else:
                sent.append(turn)
        return system + [ChatMessage(role=turn.role, content=turn.content, thinking=turn.thinking) for turn in sent]

    # -- questions ---------------------------------------------------------------------------------------------------

    def ask(self, text: str) -> None:
        """Put a question to every branch; it is one turn where they have not parted yet."""
        if self.id is None:
            self.id = self._store.create(self.branches[0].settings)
        asked: dict[int | None, Turn] = {}
        for branch in self.branches:
            if branch.leaf not in asked:
                asked[branch.leaf] = self._add_question(branch.leaf, text)
            branch.leaf = asked[branch.leaf].id
        self._show()

    def edit(self, question: Turn, text: str) -> list[Branch]:
        """Ask otherwise, as a sibling of `question`: in each of the branches that asked it.

        Returns those; what was said before stays where it is.
        """
        changed = [branch for branch in self.branches if self._place(branch, question) is not None]
        asked: dict[int | None, Turn] = {}
        for branch in changed:
            parent = self.path(branch)[self._place(branch, question) or 0].parent
            if parent not in asked:
                asked[parent] = self._add_question(parent, text)
            branch.leaf = asked[parent].id
        self._show()
        return changed

    def _place(self, branch: Branch, question: Turn) -> int | None:
        """Where in a branch the question was asked: as the same turn, or in the same words at the same place."""
        depth = len(self.tree.path(question.id)) - 1
        path = self.path(branch)
        if depth >= len(path) or (path[depth].role, path[depth].content) != (question.role, question.content):
            return None
        return depth

    def _add_question(self, parent: int | None, text: str) -> Turn:
        assert self.id is not None
        turn = self._store.add(self.id, parent, "user", text)
        self.tree.put(turn)
        return turn

    # -- answers -----------------------------------------------------------------------------------------------------

    def again(self, branch: Branch, turn_id: int | None = None) -> bool:
        """Go back before an answer (the last one, unless given), for another one; False where nothing was asked."""
        path = self.path(branch)
        if turn_id is not None and any(turn.id == turn_id for turn in path):
            path = self.tree.path(turn_id)
        if path and path[-1].role == "assistant":
            *path, answer = path
            if answer.failed and self.tree.beneath(answer.id) == [answer.id]:
                self.delete(answer)
        if not path:
            return False
        branch.leaf = path[-1].id
        return True

    def begin_answer(self, branch: Branch, model: str) -> Turn:
        """An empty answer after the last turn of a branch."""
        assert self.id is not None
        note = TurnNote(model=model)
        turn = self._store.add(self.id, branch.leaf, "assistant", "", note=note, unfinished=True)
        self._appear(branch, turn)
        return turn

    def resume_answer(self, branch: Branch) -> Turn | None:
        """The last answer of a branch, or its thinking, to be continued; None where there is none with words in it.

        Blanks at its end go: the model sees none of them, and says its own.
        """
        turn = self.tree.get(branch.leaf)
        if turn is None or turn.role != "assistant" or not (turn.content.strip() or turn.thinking.strip()):
            return None
        resumed = msgspec.structs.replace(
            turn, content=turn.content.rstrip(), thinking=turn.thinking.rstrip(), unfinished=True
        )
        self.keep(resumed)
        return resumed

    def keep(self, turn: Turn) -> None:
        """Write down how far an answer has come."""
        self.tree.put(turn)
        self._store.keep(turn)

    def delete(self, turn: Turn) -> None:
        """Forget a turn and all that follows it, in all branches. Where it was shown, its newest sibling
        is, or else what comes before it."""
        removed = self.tree.beneath(turn.id)
        self._store.remove(removed)
        for each in reversed(removed):
            self.tree.remove(each)
        for branch in self.branches:
            if branch.leaf in removed:
                branch.leaf = self.tree.tip(turn.parent)
        self._show()

    def _appear(self, branch: Branch, turn: Turn) -> None:
        self.tree.put(turn)
        branch.leaf = turn.id
        self._show()

    # -- branches ----------------------------------------------------------------------------------------------------

    def step(self, branch: Branch, turn_id: int, by: int) -> bool:
        """Show the branch before (-1) or after (1) that of a turn; False where there is none."""
        siblings = self.tree.siblings(turn_id)
        at = siblings.index(turn_id) + by
        if not 0 <= at < len(siblings):
            return False
        branch.leaf = self.tree.tip(siblings[at])
        self._show()
        return True

    def find(self, text: str) -> Turn | None:
        """The first turn with `text` in it: of the branch shown, else of any."""
        wanted = text.casefold()
        turns = (*self.path(self.branches[0]), *self.tree.all())
        return next((turn for turn in turns if wanted in turn.content.casefold()), None)

    def reveal(self, branch: Branch, turn: Turn) -> None:
        """Show a branch that a turn is in."""
        if all(each.id != turn.id for each in self.path(branch)):
            branch.leaf = self.tree.tip(turn.id)
            self._show()

    def set_settings(self, branch: Branch, settings: ChatSettings) -> None:
        """Let a branch ask differently from now on."""
        branch.settings = settings
        if self.id is not None and branch is self.branches[0]:
            self._store.set_settings(self.id, settings)
        self._show()

    def split(self) -> Branch:
        """Ask in two ways side by side from here on."""
        first = self.branches[0]
        self.branches.append(Branch(first.settings, first.leaf))
        self._show()
        return self.branches[1]

    def join(self, keep: Branch) -> None:
        """Go on with one of the two alone; the turns of the other stay as a branch."""
        self.branches = [keep]
        self.set_settings(keep, keep.settings)

    def _show(self) -> None:
        """Keep what is shown."""
        if self.id is None:
            return
        first, *others = self.branches
        second = SecondBranch(settings=others[0].settings, leaf=others[0].leaf) if others else None
        self._store.show(self.id, first.leaf, second)

    def _existing(self, leaf: int | None) -> int | None:
        return leaf if self.tree.get(leaf) is not None else self.tree.tip(None)


# An answer on its way from a model into a conversation: shown as it comes, kept once a second and at its end.

SAVE_INTERVAL_S = 1.0
log = logging.getLogger(__name__)


class AnswerStream:
    """turn: the answer as far as it came, its note with a sentence where it failed.

    keep: writes the answer down; show: takes it each time there is more of it.
    is_too_long: True if the model's context is too small for the question.
    is_refused: True if its thinking was to be continued and cannot be; the answer is as it was then.
    """

    def __init__(
        self,
        turn: Turn,
        keep: Callable[[Turn], None],
        show: Callable[[Turn], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.turn = turn
        self.is_refused = False
        self.is_too_long = False
        self._clock = clock
        self._thinking_since: float | None = None
        self._keep = keep
        self._show = show
        self._before = turn
        self._new = asyncio.Event()

    async def run(self, deltas: AsyncIterator[ChatDelta]) -> None:
        """Take all of it; what came is kept when this is cancelled, and when the model fails, too."""
        finish, problem = "cancelled", ""
        before = self._before
        keeper = asyncio.create_task(self._keep_up())
        try:
            async with contextlib.aclosing(deltas) as stream:  # type: ignore[type-var]
                async for delta in stream:
                    self._take(delta)
                    finish = delta.finish or finish
        except EngineError as error:
            finish, problem = "error", error.message
            self.is_too_long = isinstance(error, ContextLengthExceeded)
            if isinstance(error, InvalidRequest) and before.is_thinking and self.turn is before:
                finish, problem, self.is_refused = before.note.finish, before.note.problem, True
        except Exception:
            log.exception("an answer failed")
            finish, problem = "error", "The answer failed unexpectedly; see the log."
        finally:
            keeper.cancel()
            note = msgspec.structs.replace(self.turn.note, finish=finish, problem=problem)
            self.turn = msgspec.structs.replace(self.turn, note=note, unfinished=False)
            self._keep(self.turn)

    def _take(self, delta: ChatDelta) -> None:
        before = self._before.note
        note = TurnNote(
            model=before.model,
            output_tokens=before.output_tokens + delta.output_tokens,
            tokens_per_s=delta.tokens_per_s if delta.tokens_per_s is not None else before.tokens_per_s,
            ttft_s=delta.ttft_s,
            thinking_s=self._thinking_s(delta),
        )
        self.turn = msgspec.structs.replace(
            self.turn, content=self.turn.content + delta.text, thinking=self.turn.thinking + delta.thinking, note=note
        )
        self._new.set()
        self._show(self.turn)

    def _thinking_s(self, delta: ChatDelta) -> float:
        """Return how long the thinking took, up to this delta; it ends with the first words of the answer."""
        if delta.thinking and self._thinking_since is None:
            self._thinking_since = self._clock()
        if self._thinking_since is None or self.turn.content:
            return self.turn.note.thinking_s
        return self._before.note.thinking_s + self._clock() - self._thinking_since

    async def _keep_up(self) -> None:
        """The first words at once, then once a second for as long as there are new ones."""
        while True:
            await self._new.wait()
            self._new.clear()
            self._keep(self.turn)
            await asyncio.sleep(SAVE_INTERVAL_S)
