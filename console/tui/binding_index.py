"""Every binding of the console, wherever it is declared, and which of them can meet on one screen."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

from textual.actions import parse
from textual.binding import Binding
from textual.dom import DOMNode
from textual.screen import ModalScreen, Screen

from console.tui import keymap
from console.tui.keymap import ConsoleBinding


@cache
def bindings_with_calls(owner: type[DOMNode]) -> Mapping[str, ConsoleBinding]:
    """Return by ids the bindings of a class, inherited ones too, that the other end may refuse.

    They are read from where they are declared: of an active binding, Textual has a copy without fields of ours.
    """
    declared = reversed(list(_declared(owner)))
    return {each.id: each for each in declared if (each.mutates or each.call) and each.id}


@cache
def actions_with_calls(owner: type[DOMNode]) -> Mapping[tuple[str, str], ConsoleBinding]:
    """Return them by their actions: "app", "screen" or "" for the class itself, and the name."""
    return {parse(each.action)[:2]: each for each in bindings_with_calls(owner).values()}


@cache
def primary_ids(owner: type[DOMNode]) -> frozenset[str]:
    """Return the ids of the bindings of a class, inherited ones too, that are the main thing to do there."""
    return frozenset(each.id for each in _declared(owner) if each.primary and each.id)


def _declared(owner: type[DOMNode]) -> Iterator[ConsoleBinding]:
    for base in owner.__mro__:
        yield from (each for each in base.__dict__.get("BINDINGS", ()) if isinstance(each, ConsoleBinding))


@dataclass(frozen=True, slots=True)
class DeclaredBinding:
    """One binding. keys: by Textual's names.  owner: the class that declares it, None for the whole console."""

    id: str
    keys: tuple[str, ...]
    action: str
    tooltip: str
    owner: type[DOMNode] | None
    system: bool = False


@cache
def all_bindings() -> tuple[DeclaredBinding, ...]:
    """Those of the whole console first, then by module; imports every screen and widget."""
    found = list(_of(keymap.BINDINGS, None))
    for owner in binding_owners():
        found += _of(owner.__dict__["BINDINGS"], owner)
    return tuple(found)


@cache
def binding_owners() -> tuple[type[DOMNode], ...]:
    """Every screen and widget of ours with bindings of its own, and the apps for other instances and recordings."""
    apps = (import_module("console.tui.attached_app"), import_module("console.tui.replay_app"))
    return tuple(
        each
        for module in (*apps, *_modules("console.tui.screens", "console.tui.widgets"))
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, DOMNode) and each.__module__ == module.__name__
        if each.__dict__.get("BINDINGS")
    )


def can_conflict(one: type[DOMNode] | None, other: type[DOMNode] | None) -> bool:
    """Return whether a key can trigger the bindings of both owners: in one place, or in a place and one around it."""
    if one is other:
        return True
    if one is None or other is None:
        inner = other if one is None else one
        return inner is not None and not _only_in_dialogs(inner)
    if issubclass(one, other) or issubclass(other, one):
        return True
    outer, inner = (one, other) if issubclass(one, Screen) else (other, one)
    return issubclass(outer, Screen) and not issubclass(inner, Screen) and inner in _within(outer)


def _of(bindings: Any, owner: type[DOMNode] | None) -> Iterator[DeclaredBinding]:
    """Declared bindings, those that share an id and an action as one."""
    merged: dict[tuple[str, str], DeclaredBinding] = {}
    for binding in Binding.make_bindings(bindings):
        key = binding.id or "", binding.action
        before = merged[key].keys if key in merged else ()
        keys = (*before, binding.key)
        merged[key] = DeclaredBinding(binding.id or "", keys, binding.action, binding.tooltip, owner, binding.system)
    yield from merged.values()


def _modules(*packages: str) -> Iterator[ModuleType]:
    for package in map(import_module, packages):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            yield import_module(found.name)


def _only_in_dialogs(owner: type[DOMNode]) -> bool:
    if issubclass(owner, Screen):
        return issubclass(owner, ModalScreen)
    screens = [each for each in binding_owners() if issubclass(each, Screen) and owner in _within(each)]
    return bool(screens) and all(issubclass(screen, ModalScreen) for screen in screens)


@cache
def _within(screen: type[DOMNode]) -> frozenset[type[DOMNode]]:
    """The widgets that a screen may show: those that its modules import, and those that these import in turn."""
    waiting = [base.__module__ for base in screen.__mro__ if base.__module__.startswith("console.")]
    seen: set[str] = set()
    found: set[type[DOMNode]] = set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for each in vars(import_module(name)).values():
            if not isinstance(each, type) or not issubclass(each, DOMNode) or issubclass(each, Screen):
                continue
            if each.__module__.startswith("console.tui."):
                found.add(each)
                waiting.append(each.__module__)
    return frozenset(found)
