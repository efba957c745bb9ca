"""What the doctor says of security: who reaches the API, who else can read keys and files, and what is sent where."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from console.addresses import is_loopback, unix_path
from console.api.certificates import certificate_of
from console.api.errors import CannotListen
from console.api.key_file import NAME as KEYS
from console.api.key_file import KeyFile, KeysUnavailable
from console.api.settings import ApiSettings
from console.key_warnings import key_warnings
from console.secret_file import exposed, read_secret
from console.settings import Settings, data_dir, log_dir, state_dir
from console.sources import Sources
from engine.backends.torch.native.build import cache_folder, untrusted
from engine.doctor.report import Finding
from engine.errors import InvalidRequest
from engine.models.files import home_expanded

_AREA = "Security"
_TLS = "Serve HTTPS: `--tls-cert FILE --tls-key FILE`; or listen on 127.0.0.1 and have a proxy with TLS before it."
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
        return Finding(_AREA, name, "broken", error.message, "Name both files: `--tls-cert FILE --tls-key FILE`.")
    has_key = _has_key(settings)
    if is_loopback(settings.host):
        if has_key:
            return Finding(_AREA, name, "ok", f"on {settings.host}, for programs of this machine that have a key")
        who = "the socket's owner and group" if unix_path(settings.host) else "every user of this machine"
        value = f"on {settings.host} without a key: {who} may ask, load models and read the log"
        return Finding(_AREA, name, "ok", value, f"Make a key where that is more than you: {_MAKE_KEY}.")
    if settings.no_auth and not has_key:
        advice = f"Leave --no-auth out, and make a key: {_MAKE_KEY}."
        return Finding(_AREA, name, "broken", f"--no-auth: whoever reaches {settings.host} needs no key", advice)
    if not has_key:
        value = f"not to be had on {settings.host} without a key: everybody who reaches it could ask"
        return Finding(_AREA, name, "broken", value, f"Make one: {_MAKE_KEY}.")
    if settings.tls_cert is None:
        value = f"on {settings.host} without TLS: keys and texts can be read on the way"
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
        return Finding(_AREA, name, "ok", "from this machine alone")
    if settings.tls_cert is None:
        value = "from other machines, without TLS: whoever reads a key on the way may change everything"
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
            _AREA, "keys", "broken", error.message, "Put a key there, or name another: `--api-key-file FILE`."
        )
    except KeysUnavailable as error:
        advice = f"Mend it, or make its keys anew: `mv {state_dir() / KEYS} {state_dir() / KEYS}.old`."
        return Finding(_AREA, "keys", "broken", error.message, advice)
    problems = [*key_warnings(settings, sources), *filter(None, [exposed(state_dir() / KEYS)])]
    if not problems:
        return Finding(_AREA, "keys", "ok", "no other user of this machine can read them")
    value = "other users of this machine can read one"
    return Finding(_AREA, "keys", "broken", value, "".join(f"{problem}. " for problem in problems).rstrip())


def _is_pipe(file: Path) -> bool:
    try:
        return file.is_fifo()
    except OSError:
        return False


def _changed_by_others(file: Path) -> Finding | None:
    """What is wrong where other users may change config.toml, which says who is let in; a group may be one's own."""
    for path in (file.parent, file):
        try:
            found = path.stat()
        except OSError:
            continue
        if found.st_uid not in (0, os.geteuid()):
            advice = f"Have one of your own: `sudo chown $USER {path}`."
            return Finding(_AREA, "folders", "broken", f"{path} belongs to another user", advice)
        if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
            value = f"other users may change the settings in {path}"
            return Finding(_AREA, "folders", "broken", value, f"Keep it to yourself: `chmod go-w {path}`.")
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
                f"Have one of your own: `sudo chown -R $USER {folder}`.",
            )
            return Finding(_AREA, name, "broken", value, advice)
        if stat.S_IMODE(found.st_mode) & _OTHERS:
            advice = f"Close it, as the next start does: `chmod -R go-rwx {folder}`."
            return Finding(_AREA, name, "broken", f"other users of this machine may look into {folder}", advice)
    return Finding(_AREA, name, "ok", "conversations, logs and results are this user's alone")


def _kernel_cache() -> Finding:
    folder = cache_folder()
    if problem := untrusted(folder):
        advice = f"Remove it, and the next load compiles anew: `rm -r {folder.parent}`."  # which may be another's link
        return Finding(_AREA, "kernel cache", "broken", f"compiled kernels are not taken from it: {problem}", advice)
    return Finding(_AREA, "kernel cache", "ok", f"nobody else may write into {folder}")


def _hub() -> Finding:
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    try:
        address = urlsplit(endpoint)
        host, _ = address.hostname or "", address.port
    except ValueError:
        host = ""
    if not host or address.scheme not in ("http", "https"):
        advice = "Write it as the hub's own: `export HF_ENDPOINT=https://huggingface.co`."
        return Finding(_AREA, "hub", "broken", "HF_ENDPOINT is no address of a hub", advice)
    if address.scheme == "https" or is_loopback(host):
        return Finding(_AREA, "hub", "ok", f"{address.scheme}://{host}")
    advice = f"Ask it by HTTPS: `export HF_ENDPOINT=https://{host}`."
    withheld = ", and it is not sent HF_TOKEN" if os.environ.get("HF_TOKEN") else ""
    return Finding(
        _AREA, "hub", "broken", f"http://{host} has no TLS: models can be changed on the way{withheld}", advice
    )
