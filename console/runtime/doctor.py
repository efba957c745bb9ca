"""`ericllm doctor`: whether the command with these settings could run here, and what to do where it could not."""

from __future__ import annotations

import itertools
import os
import shutil
import stat
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from console.api.http.errors import CannotListen
from console.api.http.key_file import NAME as KEYS
from console.api.http.key_file import KeyFile, KeysUnavailable
from console.api.http.tls import certificate_of
from console.api.settings import ApiSettings
from console.runtime.loading import backend_for, choose_model
from console.runtime.output import say
from console.settings.addresses import is_loopback, unix_path
from console.settings.schema import APP_NAME, Settings, data_dir, log_dir, state_dir
from console.settings.secrets import key_warnings, read_secret, secret_file_warning
from console.settings.sources import Sources
from engine.backends.common.native_build import CannotBuild, build_library, cache_folder, why_untrusted
from engine.backends.common.native_kernels import instruction_set_here
from engine.config import BackendKind
from engine.doctor.examine import examine
from engine.doctor.gather import IMPORT_TIMEOUT_S, gather
from engine.doctor.report import Finding, Report
from engine.errors import BackendUnavailable, EngineError, InvalidRequest
from engine.models.files import home_expanded
from engine.models.inspect import inspect
from engine.models.resolve import resolve_local
from ericllm_main import PACKAGES, owners

# What the doctor says of security: who reaches the API, who else can read keys and files, and what is sent where.

_AREA = "Security"
_TLS = "Serve HTTPS: `--tls-cert FILE --tls-key FILE`; or listen on 127.0.0.1 behind a TLS proxy."
_MAKE_KEY = "`ericllm api-keys make NAME`"
_OTHERS = 0o077


def security_findings(settings: Settings, sources: Sources) -> Iterator[Finding]:
    """Yield a row for each thing that these settings, this user's files or the environment may leave open."""
    yield _listening(settings)
    yield _admin(settings)
    yield _keys(settings, sources)
    yield _changed_by_others(sources.file) or _folders()
    yield _kernel_cache()
    yield _hub()


def _listening(settings: Settings) -> Finding:
    name = "API"
    try:
        certificate_of(ApiSettings(tls_cert=settings.tls_cert, tls_key=settings.tls_key))
    except CannotListen as error:
        return Finding(_AREA, name, "broken", error.message, "Set both files: `--tls-cert FILE --tls-key FILE`.")
    has_key = _has_key(settings)
    if is_loopback(settings.host):
        if has_key:
            return Finding(_AREA, name, "ok", f"on {settings.host}, for local programs with a key")
        who = "the socket's owner and group" if unix_path(settings.host) else "every user of this machine"
        value = f"on {settings.host} without a key: {who} can use it, load models and read the log"
        return Finding(_AREA, name, "ok", value, f"Create a key if others use this machine: {_MAKE_KEY}.")
    if settings.no_auth and not has_key:
        advice = f"Remove --no-auth and create a key: {_MAKE_KEY}."
        return Finding(
            _AREA, name, "broken", f"--no-auth: anyone who can connect to {settings.host} has full access", advice
        )
    if not has_key:
        value = f"disabled: {settings.host} is reachable from the network and no key is set"
        return Finding(_AREA, name, "broken", value, f"Create one: {_MAKE_KEY}.")
    if settings.tls_cert is None:
        value = f"on {settings.host} without TLS: keys and texts can be intercepted"
        return Finding(_AREA, name, "broken", value, _TLS)
    return Finding(_AREA, name, "ok", f"on {settings.host}, with keys and TLS")


def _has_key(settings: Settings) -> bool:
    if settings.api_key is not None or settings.api_key_file is not None:
        return True
    try:
        records = KeyFile(state_dir()).read()
    except KeysUnavailable:  # which has a row of its own
        return True
    return records is not None and bool(records.keys)


def _admin(settings: Settings) -> Finding:
    name = "admin requests"
    if is_loopback(settings.host) or not settings.admin_remote:
        return Finding(_AREA, name, "ok", "from this machine only")
    if settings.tls_cert is None:
        value = "from other machines, without TLS: an intercepted key has full control"
        return Finding(_AREA, name, "broken", value, _TLS)
    return Finding(_AREA, name, "ok", "from other machines, with a key and TLS")


def _keys(settings: Settings, sources: Sources) -> Finding:
    file = settings.api_key_file
    try:
        if file is not None and not _is_pipe(home_expanded(file)):  # what is in it can be read once
            read_secret(file, "--api-key-file")
        KeyFile(state_dir()).read()
    except InvalidRequest as error:
        return Finding(
            _AREA, "keys", "broken", error.message, "Put a key there, or use another file: `--api-key-file FILE`."
        )
    except KeysUnavailable as error:
        advice = f"Fix it, or start with new keys: `mv {state_dir() / KEYS} {state_dir() / KEYS}.old`."
        return Finding(_AREA, "keys", "broken", error.message, advice)
    problems = [*key_warnings(settings, sources), *filter(None, [secret_file_warning(state_dir() / KEYS)])]
    if not problems:
        return Finding(_AREA, "keys", "ok", "not readable by other users of this machine")
    value = "readable by other users of this machine"
    return Finding(_AREA, "keys", "broken", value, "".join(f"{problem}. " for problem in problems).rstrip())


def _is_pipe(file: Path) -> bool:
    try:
        return file.is_fifo()
    except OSError:
        return False


def _changed_by_others(file: Path) -> Finding | None:
    """Return a finding where other users may change config.toml, which sets who is let in; a group may be one's own."""
    for path in (file.parent, file):
        try:
            found = path.stat()
        except OSError:
            continue
        if found.st_uid not in (0, os.geteuid()):
            advice = f"Take ownership: `sudo chown $USER {path}`."
            return Finding(_AREA, "folders", "broken", f"{path} belongs to another user", advice)
        if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
            value = f"other users can change the settings in {path}"
            return Finding(_AREA, "folders", "broken", value, f"Restrict it to your user: `chmod go-w {path}`.")
    return None


def _folders() -> Finding:
    """Those of conversations, logs and results. A start closes what is ours."""
    name = "folders"
    for folder in (data_dir(), state_dir(), log_dir()):
        try:
            found = folder.stat()
        except OSError:
            continue
        if found.st_uid != os.geteuid():
            value, advice = (
                f"{folder} belongs to another user",
                f"Take ownership: `sudo chown -R $USER {folder}`.",
            )
            return Finding(_AREA, name, "broken", value, advice)
        if stat.S_IMODE(found.st_mode) & _OTHERS:
            advice = f"Restrict it, as the next start does: `chmod -R go-rwx {folder}`."
            return Finding(_AREA, name, "broken", f"other users of this machine can read {folder}", advice)
    return Finding(_AREA, name, "ok", "conversations, logs and results are readable only by this user")


def _kernel_cache() -> Finding:
    folder = cache_folder()
    if problem := why_untrusted(folder):
        advice = f"Remove it; the next load compiles again: `rm -r {folder.parent}`."  # which may be another's link
        return Finding(_AREA, "kernel cache", "broken", f"compiled kernels in it are not used: {problem}", advice)
    return Finding(_AREA, "kernel cache", "ok", f"not writable by other users: {folder}")


def _hub() -> Finding:
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    try:
        address = urlsplit(endpoint)
        host, _ = address.hostname or "", address.port
    except ValueError:
        host = ""
    if not host or address.scheme not in ("http", "https"):
        advice = "Set the address: `export HF_ENDPOINT=https://huggingface.co`."
        return Finding(_AREA, "hub", "broken", "HF_ENDPOINT is not the address of a hub", advice)
    if address.scheme == "https" or is_loopback(host):
        return Finding(_AREA, "hub", "ok", f"{address.scheme}://{host}")
    advice = f"Use HTTPS: `export HF_ENDPOINT=https://{host}`."
    withheld = ", and HF_TOKEN is not sent" if os.environ.get("HF_TOKEN") else ""
    return Finding(
        _AREA, "hub", "broken", f"http://{host} has no TLS: models can be changed in transit{withheld}", advice
    )


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
    """Check for another distribution with packages of our names: installing or removing one breaks the other."""
    area, name = "Program", "packages"
    shared = {package: [each for each in owners(package) if each != APP_NAME] for package in PACKAGES}
    others = [f"{package} of {' and '.join(found)}" for package, found in shared.items() if found]
    if not others:
        return Finding(area, name, "ok", f"{' and '.join(PACKAGES)} belong to {APP_NAME} only")
    value = f"this environment also has the package {', '.join(others)}; installing or removing one breaks the other"
    advice = f"Install {APP_NAME} in its own environment, with `pipx` or `uv tool`."
    return Finding(area, name, "broken", value, advice)


def compile_kernels() -> None:
    """Compile what the first load of a model on this CPU would, saying so. Raises BackendUnavailable where that cannot
    be."""
    isa = instruction_set_here()
    if isa is None:
        raise BackendUnavailable("Nothing to compile: the native kernels are off, or not supported by this CPU")
    shown = ""

    def watch(done: int, total: int) -> None:
        nonlocal shown
        if (now := f"compiling the native kernels for {isa}: {done} of {total} files") != shown:
            shown = now
            say(shown)

    try:
        library = build_library(isa, cache_folder(), watch=watch)
    except CannotBuild as error:
        raise BackendUnavailable(f"The native kernels for {isa} cannot be compiled: {error}") from None
    say(f"the native kernels for {isa} are in {library}")


def chosen_backend(settings: Settings) -> BackendKind:
    """--backend, or what the model named asks for; torch for one that is not on this machine yet."""
    if settings.backend != "auto":
        return settings.backend
    path = resolve_local(settings.model, settings.models_dir)
    return "torch" if path is None else inspect(path, partial(backend_for, settings)).backend


def model_finding(settings: Settings, report: Report) -> Finding:
    """Check that the chosen backend can load the model, or return the refusal of a load."""
    if report.lacks[report.backend]:
        return Finding("Model", settings.model, "note", f"not checked: the {report.backend} backend cannot run")
    try:
        choice = choose_model(settings)
    except EngineError as error:
        return Finding("Model", settings.model, "broken", error.message)
    if choice.spec is None:
        return Finding("Model", settings.model, "note", "not on this machine; downloaded at load")
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
