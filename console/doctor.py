"""`ericllm doctor`: whether the command with these settings could run here, and what to do where it could not."""

from __future__ import annotations

import itertools
import shutil
import textwrap
from collections.abc import Callable, Iterator
from functools import partial

import msgspec

from console.doctor_security import security_findings
from console.loading import backend_for, choose_model
from console.output import say
from console.settings import APP_NAME, Settings
from console.sources import Sources
from engine.backends.torch.native.available import instruction_set_here
from engine.backends.torch.native.build import CannotBuild, build_library, cache_folder
from engine.config import BackendKind
from engine.doctor.examine import examine
from engine.doctor.gather import IMPORT_TIMEOUT_S, gather
from engine.doctor.report import Finding, Report
from engine.errors import BackendUnavailable, EngineError
from engine.models.inspect import inspect
from engine.models.resolve import resolve_local
from ericllm_main import PACKAGES, owners

WIDEST = 110
NARROWEST = 50
_STATE = 9
_NAME = 16
_GLUE = "\N{NO-BREAK SPACE}"


def diagnose(
    settings: Settings,
    sources: Sources,
    *,
    timeout_s: float = IMPORT_TIMEOUT_S,
    cancelled: Callable[[], bool] = lambda: False,
) -> Report:
    """Examine this machine for what `settings` ask for: their backend, their model, their safety. Blocks for seconds.

    sources: what the settings were made from.
    """
    facts = gather(attention=settings.attention, timeout_s=timeout_s, cancelled=cancelled)
    report = examine(facts, chosen_backend(settings))
    finding = model_finding(settings, report)
    refusal = finding.value if finding.state == "broken" else ""
    findings = (_program(), *report.findings, *security_findings(settings, sources), finding)
    return msgspec.structs.replace(report, findings=findings, refusal=refusal)


def _program() -> Finding:
    """Whether another distribution has packages of our names: what is installed or removed last breaks the other."""
    area, name = "Program", "packages"
    shared = {package: [each for each in owners(package) if each != APP_NAME] for package in PACKAGES}
    others = [f"{package} of {' and '.join(found)}" for package, found in shared.items() if found]
    if not others:
        return Finding(area, name, "ok", f"{' and '.join(PACKAGES)} are {APP_NAME}'s alone")
    value = f"here is also the package {', '.join(others)}; whichever is installed or removed next breaks the other"
    advice = f"Install {APP_NAME} in an environment of its own: `pipx` and `uv tool` make one."
    return Finding(area, name, "broken", value, advice)


def compile_kernels() -> None:
    """Compile what the first load of a model on this CPU would, saying so. Raises BackendUnavailable where that cannot
    be."""
    isa = instruction_set_here()
    if isa is None:
        raise BackendUnavailable("There is nothing to compile: the native kernels are off, or do not run on this CPU")
    said = ""

    def watch(done: int, total: int) -> None:
        nonlocal said
        if (now := f"compiling the native kernels for {isa}: {done} of {total} files") != said:
            said = now
            say(said)

    try:
        library = build_library(isa, cache_folder(), watch=watch)
    except CannotBuild as error:
        raise BackendUnavailable(f"The native kernels for {isa} cannot be made: {error}") from None
    say(f"the native kernels for {isa} are in {library}")


def chosen_backend(settings: Settings) -> BackendKind:
    """--backend, or what the model named asks for; torch for one that is not on this machine yet."""
    if settings.backend != "auto":
        return settings.backend
    path = resolve_local(settings.model, settings.models_dir)
    return "torch" if path is None else inspect(path, partial(backend_for, settings)).backend


def model_finding(settings: Settings, report: Report) -> Finding:
    """Whether the chosen backend can load the model named, or the refusal that a load would end in."""
    if report.lacks[report.backend]:
        return Finding("Model", settings.model, "note", f"not looked at: the {report.backend} backend cannot run")
    try:
        choice = choose_model(settings)
    except EngineError as error:
        return Finding("Model", settings.model, "broken", error.message)
    if choice.spec is None:
        return Finding("Model", settings.model, "note", "not on this machine: it is downloaded when it is loaded")
    return Finding("Model", settings.model, "ok", f"the {report.backend} backend can load it")


def as_text(report: Report, width: int | None = None) -> str:
    """A table for a terminal of `width` columns, or for a file; nothing but plain characters."""
    columns = shutil.get_terminal_size((WIDEST, 24)).columns if width is None else width
    wide = max(NARROWEST, min(WIDEST, columns))
    lines: list[str] = []
    for area, findings in itertools.groupby(report.findings, key=lambda finding: finding.area):
        lines.append(area)
        for finding in findings:
            lines.extend(_lines(finding, wide))
        lines.append("")
    return "\n".join([*lines, *textwrap.wrap(report.verdict, wide)])


def as_json(report: Report) -> str:
    """The report for programs, with its verdict."""
    value = {"can_run": report.can_run, "verdict": report.verdict, **msgspec.to_builtins(report)}
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def _lines(finding: Finding, width: int) -> Iterator[str]:
    """State, name and value, with the advice beneath the value; a command is never broken at a dash."""
    margin = " " * (2 + _STATE + _NAME)
    head = f"  {finding.state:<{_STATE}}{finding.name:<{_NAME - 1}} "
    for text, first in ((finding.value, head), (finding.advice, margin)):
        for line in textwrap.wrap(
            whole_commands(text),
            width,
            initial_indent=first,
            subsequent_indent=margin,
            break_on_hyphens=False,
            break_long_words=False,
        ):
            yield line.replace(_GLUE, " ")


def whole_commands(text: str) -> str:
    """`text` with its commands (between backticks) glued together, so that none is broken and all can be copied."""
    parts = text.split("`")
    return "`".join(part.replace(" ", _GLUE) if index % 2 else part for index, part in enumerate(parts))
