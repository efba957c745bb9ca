"""Colour themes as TOML files, the same for those that come with the console and a user's own.

A file needs `primary` alone; everything else follows from it. Names of the groups become CSS variables:
`[gpu] weights = "..."` is `$gpu-weights`. A file with a mistake is left out and reported, never fatal.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from platformdirs import user_config_path
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, field_validator
from textual.color import Color, ColorParseError
from textual.css.constants import VALID_STYLE_FLAGS
from textual.theme import Theme

from console.settings.values import did_you_mean

DEFAULT_THEME = "ericllm-dark"
FEW_COLOURS_THEME = "ericllm-contrast"
AUTO_THEME = "auto"
"""Not a theme: the default one, or the one for few colours where a terminal has no more than 16."""


def _colour(value: str) -> str:
    try:
        Color.parse(value)
    except ColorParseError as error:
        raise ValueError(f"{value!r} is not a colour") from error
    return value


Colour = Annotated[str, AfterValidator(_colour)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class GpuColours(_Part):
    """Parts of a device's memory, and its utilisation."""

    weights: Colour | None = None
    kv: Colour | None = None
    work: Colour | None = None
    others: Colour | None = None
    free: Colour | None = None
    use: Colour | None = None
    hot: Colour | None = None


class WorkerColours(_Part):
    """States of a worker (and of the model)."""

    busy: Colour | None = None
    idle: Colour | None = None
    loading: Colour | None = None
    draining: Colour | None = None
    failed: Colour | None = None


class RequestColours(_Part):
    """States of a request."""

    queued: Colour | None = None
    prefill: Colour | None = None
    decode: Colour | None = None
    done: Colour | None = None
    failed: Colour | None = None


class GraphColours(_Part):
    """Curves of the graphs; the `spread` ones are for what lies behind the main curve (p95, the queue)."""

    tokens: Colour | None = None
    ttft: Colour | None = None
    ttft_spread: Colour | None = None
    itl: Colour | None = None
    itl_spread: Colour | None = None
    running: Colour | None = None
    queued: Colour | None = None
    kv: Colour | None = None
    mark: Colour | None = None
    axis: Colour | None = None


class ThemeFile(_Part):
    """A theme file. `variables` sets any other CSS variable of Textual's design system."""

    name: str = ""
    dark: bool = True
    primary: Colour
    secondary: Colour | None = None
    accent: Colour | None = None
    foreground: Colour | None = None
    background: Colour | None = None
    surface: Colour | None = None
    panel: Colour | None = None
    boost: Colour | None = None
    success: Colour | None = None
    warning: Colour | None = None
    error: Colour | None = None
    muted: Colour | None = None
    gpu: GpuColours = GpuColours()
    worker: WorkerColours = WorkerColours()
    request: RequestColours = RequestColours()
    graph: GraphColours = GraphColours()
    variables: dict[str, str] = {}

    @field_validator("variables")
    @classmethod
    def _of_the_design_system(cls, values: dict[str, str]) -> dict[str, str]:
        if mistakes := list(_mistaken(values)):
            raise ValueError("; ".join(mistakes))
        return values

    def to_theme(self, name: str) -> Theme:
        """The theme as Textual takes it, called `name` unless the file says otherwise."""
        groups: dict[str, BaseModel] = {
            "gpu": self.gpu,
            "worker": self.worker,
            "request": self.request,
            "graph": self.graph,
        }
        own = {
            f"{group}-{field.replace('_', '-')}": value
            for group, part in groups.items()
            for field, value in part.model_dump(exclude_none=True).items()
        }
        if self.muted is not None:
            own["muted"] = self.muted
        base = self.model_dump(exclude_none=True, exclude={*groups, "variables", "name", "muted"})
        return Theme(name=self.name or name, variables={**self.variables, **own}, **base)


@dataclass(frozen=True, slots=True)
class Themes:
    """Themes of a folder, and a sentence for each file with a mistake."""

    themes: tuple[Theme, ...]
    problems: tuple[str, ...] = ()


# Variables of ours -> what stands in where a theme says nothing: a name of Textual's design system, and how much of
# the background is mixed into it (0..1).
_STAND_INS: Mapping[str, tuple[str, float]] = {
    "muted": ("foreground", 0.45),
    "gpu-weights": ("primary", 0),
    "gpu-kv": ("secondary", 0),
    "gpu-work": ("accent", 0),
    "gpu-others": ("foreground", 0.45),
    "gpu-free": ("panel", 0),
    "gpu-use": ("primary", 0),
    "gpu-hot": ("error", 0),
    "worker-busy": ("success", 0),
    "worker-idle": ("primary", 0),
    "worker-loading": ("warning", 0),
    "worker-draining": ("secondary", 0),
    "worker-failed": ("error", 0),
    "request-queued": ("warning", 0),
    "request-prefill": ("secondary", 0),
    "request-decode": ("success", 0),
    "request-done": ("foreground", 0.45),
    "request-failed": ("error", 0),
    "graph-tokens": ("primary", 0),
    "graph-ttft": ("warning", 0),
    "graph-ttft-spread": ("warning", 0.6),
    "graph-itl": ("secondary", 0),
    "graph-itl-spread": ("secondary", 0.6),
    "graph-running": ("primary", 0),
    "graph-queued": ("warning", 0),
    "graph-kv": ("secondary", 0),
    "graph-mark": ("accent", 0),
    "graph-axis": ("foreground", 0.45),
}


def variable_defaults(theme: Theme) -> dict[str, str]:
    """Every CSS variable of ours, derived from the theme's own palette."""
    palette = theme.to_color_system().generate()
    background = Color.parse(palette["background"])
    return {
        name: Color.parse(palette[source]).blend(background, mixed).css for name, (source, mixed) in _STAND_INS.items()
    }


def builtin_folder() -> Path:
    """Return the folder of the built-in themes: next to the package in the repository, inside it once installed."""
    package = Path(__file__).parents[1]
    inside = package / "themes"
    return inside if inside.is_dir() else package.parent / "themes"


def user_folder() -> Path:
    """Where a user's own themes are looked for."""
    return user_config_path("ericllm") / "themes"


def _mistaken(variables: Mapping[str, str]) -> Iterator[str]:
    """Names that are no variable, and values that none of their kind can have."""
    names = Theme(name="", primary="teal").to_color_system().generate() | dict.fromkeys(_STAND_INS, "")
    for name, value in variables.items():
        if name not in names:
            yield f"{name} is not a variable{did_you_mean(name, names)}"
        elif name.endswith("-style"):
            if not set(value.split()) <= VALID_STYLE_FLAGS:
                yield f"{name}: {value!r} is not a style"
        elif not value.startswith("auto ") and value != "initial":
            try:
                Color.parse(value)
            except ColorParseError:
                yield f"{name}: {value!r} is not a colour"


def load_themes(folders: Iterable[Path]) -> Themes:
    """Every `*.toml` of the folders; a later theme replaces an earlier one of the same name."""
    themes: dict[str, Theme] = {}
    problems: list[str] = []
    for folder in folders:
        for path in sorted(folder.glob("*.toml")):
            try:
                theme = _load_file(path)
            except (OSError, ValueError) as error:
                problems.append(f"{path.name}: {'; '.join(_reasons(error))}")
            else:
                themes[theme.name] = theme
    return Themes(tuple(themes.values()), tuple(problems))


def _load_file(path: Path) -> Theme:
    return ThemeFile.model_validate(tomllib.loads(path.read_text("utf-8"))).to_theme(path.stem)


def _reasons(error: Exception) -> Iterator[str]:
    """Every mistake of a file, each with where it stands."""
    if not isinstance(error, ValidationError):
        yield str(error)
        return
    for found in error.errors(include_url=False):
        *groups, name = map(str, found["loc"])
        where = ".".join((*groups, name))
        if found["type"] == "extra_forbidden":
            owner = ThemeFile.model_fields[groups[0]].annotation if groups else ThemeFile
            fields = owner.model_fields if isinstance(owner, type) and issubclass(owner, BaseModel) else {}
            yield f"{where} is not part of a theme{did_you_mean(name, fields)}"
        elif found["type"] == "missing":
            yield f"{where} is missing"
        else:
            yield f"{where}: {found['msg'].removeprefix('Value error, ').replace('Input should be', 'must be')}"
