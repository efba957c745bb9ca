"""Presets that come with the program: ways to ask that most models answer well."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from console.chats.records import ChatSettings, Preset
from engine.config import PARAMETERS

BUILTIN: tuple[Preset, ...] = (
    Preset(name="Model defaults", settings=ChatSettings(), builtin=True),
    Preset(name="Exact", settings=ChatSettings(temperature=0.0), builtin=True),
    Preset(name="Careful", settings=ChatSettings(temperature=0.3, top_p=0.9), builtin=True),
    Preset(name="Balanced", settings=ChatSettings(temperature=0.7, top_p=0.95), builtin=True),
    Preset(name="Inventive", settings=ChatSettings(temperature=1.1, min_p=0.05), builtin=True),
    Preset(
        name="Brief",
        settings=ChatSettings(
            system_prompt="Answer in as few words as are needed to be right and clear.", temperature=0.3, max_tokens=300
        ),
        builtin=True,
    ),
    Preset(
        name="Code",
        settings=ChatSettings(
            system_prompt="You write correct, simple code. Give the code first, then a short explanation.",
            temperature=0.2,
            top_p=0.9,
        ),
        builtin=True,
    ),
)


def all_presets(saved: Sequence[Preset]) -> list[Preset]:
    """The saved ones, then the built-in ones; a saved one hides a built-in one of its name."""
    names = {preset.name for preset in saved}
    return [*saved, *(preset for preset in BUILTIN if preset.name not in names)]


def apply_preset(preset: Preset, settings: ChatSettings) -> ChatSettings:
    """`settings` with the sampling of a preset; its system prompt and model too, where it has them."""
    return msgspec.structs.replace(
        preset.settings,
        model=preset.settings.model or settings.model,
        system_prompt=preset.settings.system_prompt or settings.system_prompt,
    )


def describe_settings(settings: ChatSettings) -> str:
    """Settings in a line: "temperature 0.3 · top_p 0.9"; "model defaults" where they leave all to it."""
    parts = [
        f"max {value:g} tokens" if name == "max_tokens" else f"{name} {value:g}"
        for name in settings.__struct_fields__
        if name in PARAMETERS and (value := getattr(settings, name)) is not None
    ]
    if settings.enable_thinking is not None:
        parts.append(f"thinking {'on' if settings.enable_thinking else 'off'}")
    if settings.system_prompt:
        parts.append("system prompt")
    return " · ".join(parts) or "model defaults"
