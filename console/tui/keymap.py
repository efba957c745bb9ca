"""The keys that work on every screen: they move about and quit, and change nothing. Each binding has an id (to be
remapped by) and a tooltip (its palette entry).

A screen adds its own in the same way; `console.tui.commands` and the help screen read them from where they are.
Those that several screens share are here too.
"""

from __future__ import annotations

from dataclasses import dataclass

from textual.binding import Binding

from console.tui.modes import MODES


@dataclass(frozen=True)
class ConsoleBinding(Binding):
    """A binding with what its key means to the console.

    mutates: it changes the engine, so a read-only console leaves it out.
    call: the call of `console.link.rpc` that it makes, left out where the other end refuses that; "" for those that
    mutate, and for those that a console does by itself.
    primary: the main thing to do where it is declared, so the footer begins with it.
    """

    mutates: bool = False
    primary: bool = False
    call: str = ""


WORKERS = Binding.Group("Workers", compact=True)
PROMPTS = Binding.Group("Max prompts", compact=True)
API_SWITCH = ConsoleBinding(
    "a", "app.toggle_api", "API", id="api.toggle", mutates=True, tooltip="Switch the HTTP API on or off"
)
KNOBS: tuple[ConsoleBinding, ...] = (
    ConsoleBinding(
        "left_square_bracket",
        "app.step('num_workers', -1)",
        "Workers −",
        id="workers.fewer",
        mutates=True,
        tooltip="Remove a worker",
        group=WORKERS,
    ),
    ConsoleBinding(
        "right_square_bracket",
        "app.step('num_workers', 1)",
        "Workers +",
        id="workers.more",
        mutates=True,
        tooltip="Add a worker",
        group=WORKERS,
    ),
    ConsoleBinding(
        "minus",
        "app.step('max_prompts', -1)",
        "Max prompts −",
        id="prompts.fewer",
        mutates=True,
        tooltip="Lower max prompts by one",
        group=PROMPTS,
    ),
    ConsoleBinding(
        "plus,equals_sign",
        "app.step('max_prompts', 1)",
        "Max prompts +",
        id="prompts.more",
        mutates=True,
        tooltip="Raise max prompts by one",
        key_display="+",
        group=PROMPTS,
    ),
)
KNOB_IDS = tuple(each.id for each in KNOBS if each.id)
DRAIN = ConsoleBinding(
    "D",
    "app.toggle_drain",
    "Drain",
    id="drain.toggle",
    mutates=True,
    tooltip="Drain or resume: refuse new requests and finish running ones",
    show=False,
)
HELP = Binding(
    "question_mark", "app.help", "Help", id="help", tooltip="Show the keys and what the numbers mean", key_display="?"
)
READOUT: tuple[Binding, ...] = (
    Binding(
        "left_parenthesis",
        "readout(-1)",
        "Earlier",
        id="graphs.earlier",
        tooltip="Move the graph cursor back",
        key_display="(",
        show=False,
    ),
    Binding(
        "right_parenthesis",
        "readout(1)",
        "Later",
        id="graphs.later",
        tooltip="Move the graph cursor forward",
        key_display=")",
        show=False,
    ),
)
ALERTS = Binding("A", "app.alerts", "Alerts", id="alerts", tooltip="Show recent alerts", show=False)

BINDINGS: list[Binding] = [
    *(
        Binding(
            mode.digit,
            f"app.open('{mode.name}')",
            mode.title,
            id=f"open.{mode.name}",
            tooltip=f"Go to {mode.title}",
            show=False,
        )
        for mode in MODES
    ),
    *(
        Binding(
            f"f{mode.digit}",
            f"app.open('{mode.name}')",
            mode.title,
            id=f"open.{mode.name}.always",
            tooltip=f"Go to {mode.title}",
            show=False,
            priority=True,
        )
        for mode in MODES
    ),
    HELP,
    ALERTS,
    Binding("q", "app.quit", "Quit", id="quit", tooltip="Quit the console"),
    Binding(
        "m",
        "app.next_model",
        "Model",
        id="model.next",
        tooltip="Switch to the next loaded model",
    ),
    Binding("ctrl+q", "app.quit", "Quit", id="quit.always", tooltip="Quit the console", show=False, priority=True),
    Binding(
        "ctrl+c", "app.help_quit", "How to quit", id="quit.how", tooltip="Show how to quit", show=False, system=True
    ),
]
