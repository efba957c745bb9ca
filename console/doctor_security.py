"""What the doctor says of security: who reaches the API, who else can read keys and files, and what is sent where."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from urllib.parse import urlsplit

from console.addresses import is_loopback
from console.key_warnings import key_warnings
from console.secret_file import exposed
from console.settings import Settings, data_dir, log_dir, state_dir
from console.sources import Sources
from engine.backends.torch.native.build import cache_folder, untrusted
from engine.doctor.report import Finding

_AREA = "Security"
_TLS = "Serve HTTPS: `--tls-cert FILE --tls-key FILE`; or listen on 127.0.0.1 and have a proxy with TLS before it."
_OTHERS = 0o077


def security_findings(settings: Settings, sources: Sources) -> Iterator[Finding]:
    """Yield a row for each thing that these settings, this user's files or the environment may leave open."""
    yield _listening(settings)
    yield _admin(settings)
    yield _keys(settings, sources)
    yield _folders()
    yield _kernel_cache()
    yield _hub()


def _listening(settings: Settings) -> Finding:
    name = "API"
    if is_loopback(settings.host):
        return Finding(_AREA, name, "ok", f"on {settings.host}, for programs of this machine")
    if settings.no_auth:
        advice = "Leave --no-auth out, and make a key: `ericllm api-keys make NAME`."
        return Finding(_AREA, name, "broken", f"--no-auth: whoever reaches {settings.host} needs no key", advice)
    if settings.tls_cert is None:
        value = f"on {settings.host} without TLS: keys and texts can be read on the way"
        return Finding(_AREA, name, "broken", value, _TLS)
    return Finding(_AREA, name, "ok", f"on {settings.host}, with keys and TLS")


def _admin(settings: Settings) -> Finding:
    name = "admin requests"
    if is_loopback(settings.host) or not settings.admin_remote:
        return Finding(_AREA, name, "ok", "from this machine alone")
    if settings.tls_cert is None:
        value = "from other machines, without TLS: whoever reads a key on the way may change everything"
        return Finding(_AREA, name, "broken", value, _TLS)
    return Finding(_AREA, name, "ok", "from other machines, with a key and TLS")


def _keys(settings: Settings, sources: Sources) -> Finding:
    problems = [*key_warnings(settings, sources), *filter(None, [exposed(state_dir() / "keys.json")])]
    if not problems:
        return Finding(_AREA, "keys", "ok", "no other user of this machine can read them")
    value = "other users of this machine can read one"
    return Finding(_AREA, "keys", "broken", value, "".join(f"{problem}. " for problem in problems).rstrip())


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
        advice = f"Remove it, and the next load compiles anew: `rm -r {folder}`."
        return Finding(_AREA, "kernel cache", "broken", f"compiled kernels are not taken from it: {problem}", advice)
    return Finding(_AREA, "kernel cache", "ok", f"nobody else may write into {folder}")


def _hub() -> Finding:
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    address = urlsplit(endpoint)
    host = address.hostname or ""
    if address.scheme != "http" or is_loopback(host):
        return Finding(_AREA, "hub", "ok", f"{address.scheme}://{host}")
    advice = f"Ask it by HTTPS: `export HF_ENDPOINT=https://{host}`."
    withheld = ", and it is not sent HF_TOKEN" if os.environ.get("HF_TOKEN") else ""
    return Finding(
        _AREA, "hub", "broken", f"http://{host} has no TLS: models can be changed on the way{withheld}", advice
    )
