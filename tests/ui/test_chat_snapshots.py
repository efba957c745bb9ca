"""The chat as a person sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import TextArea

from console.chats import ChatSettings
from console.tui.screens.chat.settings import ChatSettingsScreen
from tests.fakes import fleet_scenes
from tests.fakes.link import FakeLink
from tests.ui.chatting import answers, asked, console, ended, fill, opened
from tests.ui.seen import screen_text, shows, until

pytestmark = pytest.mark.long

ANSWER = """A worker computes its requests **in one batch**. More prompts in it means more tokens per second, \
because the weights are read once for all of them.

* `max_prompts` is how many requests a worker takes at a time
* each waits a little longer for its next token

```python
def step(batch: list[Sequence]) -> None:
    logits = model(batch)
    for sequence in batch:
        sequence.append(sample(logits))
```
"""
OTHERS = ("Which GPU has room for a 13B model?", "Explain paged attention", "Haiku about a KV cache that ran over")


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.db"
    question = "Why does a bigger batch give more tokens per second?"
    fill(path, question, f"Because. | {ANSWER}", others=OTHERS, settings=ChatSettings(temperature=0.3))
    return path


@pytest.fixture(autouse=True)
def no_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TextArea, "cursor_blink", False)


async def drafting(pilot: Pilot[None]) -> None:
    await opened(pilot)
    await until(pilot, lambda: bool(answers(pilot)))
    await pilot.press(*"And what does it cost?")
    await until(pilot, lambda: "+ 5 of 8,192" in screen_text(pilot.app))


async def side_by_side(pilot: Pilot[None]) -> None:
    await opened(pilot)
    await pilot.press("ctrl+n", "alt+v")
    await until(pilot, lambda: isinstance(pilot.app.screen, ChatSettingsScreen))
    await pilot.press("ctrl+s")
    await until(pilot, lambda: not isinstance(pilot.app.screen, ChatSettingsScreen))
    await asked(pilot, "Why does a bigger batch give more tokens per second?")
    await until(pilot, lambda: ended(pilot) and len(answers(pilot, 1)) == 1)
    await until(pilot, lambda: screen_text(pilot.app).count("sequence.append") == 2)
    await until(pilot, lambda: "86 of 8,192" in screen_text(pilot.app))
    await pilot.pause()


async def settings(pilot: Pilot[None]) -> None:
    await opened(pilot)
    await until(pilot, lambda: " of 8,192 tokens" in screen_text(pilot.app))
    await pilot.press("ctrl+s")
    await until(pilot, lambda: isinstance(pilot.app.screen, ChatSettingsScreen))


async def presets(pilot: Pilot[None]) -> None:
    await opened(pilot)
    await until(pilot, lambda: " of 8,192 tokens" in screen_text(pilot.app))
    await pilot.press("alt+p")
    await until(pilot, lambda: "Inventive" in screen_text(pilot.app))


QUESTION = "▌ Why does a bigger batch give more tokens per second?"


def test_a_conversation_looks_right(snap_compare: Any, chats: Path) -> None:
    assert snap_compare(console(FakeLink(), chats), terminal_size=(120, 40), run_before=drafting)


@pytest.mark.parametrize("size", [(80, 24), (100, 30)])
def test_a_conversation_fits_a_small_terminal(chats: Path, size: tuple[int, int]) -> None:
    answer = (
        QUESTION,
        "A worker computes its requests",
        "• max_prompts is",
        "def step(",
        "sequence.append(",
        "45 tok/s",
        "[copy]",
    )
    box = "86 + 5 of 8,192 tokens", "presets", "And what does it cost?", "⏎ Send", "^p palette"
    assert shows(console(FakeLink(), chats), *answer, *box, terminal_size=size, run_before=drafting)


def test_two_answers_side_by_side_look_right(snap_compare: Any, chats: Path) -> None:
    app = console(FakeLink(answer=ANSWER), chats)
    assert snap_compare(app, terminal_size=(80, 24), run_before=side_by_side)


def test_the_settings_of_a_chat_fit_a_small_terminal(chats: Path) -> None:
    app = console(FakeLink(fleet_scenes.two_models()), chats)
    fields = "Chat settings", "Model", "System prompt", "Temperature", "0.3", "top_p", "Use (ctrl+s)"
    assert shows(app, *fields, terminal_size=(80, 24), run_before=settings)


def test_the_presets_of_a_chat_fit_a_small_terminal(chats: Path) -> None:
    app = console(FakeLink(fleet_scenes.two_models()), chats)
    names = (
        "Presets",
        "Model defaults",
        "Exact",
        "Careful",
        "Balanced",
        "Inventive",
        "min_p 0.05",
        "Brief",
        "Code",
        "⏎ Use",
    )
    assert shows(app, *names, terminal_size=(80, 24), run_before=presets)
