"""TLS: the server's certificate, reloaded when its file changes."""

from __future__ import annotations

import ssl
from pathlib import Path

from console.api.http.errors import CannotListen
from console.api.settings import ApiSettings
from engine.models.files import home_expanded, is_file

_REASONS = {
    "MISMATCH": "certificate and key do not match",
    "KEY_TOO_SMALL": "the key is too short; use 2,048 bits or more",
    "MD_TOO_WEAK": "the digest of the certificate is too weak",
}
_NO_PEM = "not a certificate and key in PEM format"


class Certificate:
    """A certificate (with its chain) and its key, both PEM files. Raises CannotListen where they are not valid."""

    def __init__(self, cert: Path, key: Path) -> None:
        self._files = home_expanded(cert), home_expanded(key)
        self._stamp = self._file_stamps()
        self.context = self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2

    def renew(self) -> bool:
        """Load a renewed certificate for new connections; return whether there is one. Raises CannotListen where the
        files are not valid: the old one stays in use."""
        stamp = self._file_stamps()
        if stamp == self._stamp:
            return False
        self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))  # half a renewal must not spoil the one in use
        self._load(self.context)
        self._stamp = stamp
        return True

    def _load(self, context: ssl.SSLContext) -> ssl.SSLContext:
        cert, key = self._files
        try:
            context.load_cert_chain(cert, key, password=_refuse)
        except _Encrypted:
            raise CannotListen(f"The key in {key} is encrypted: --tls-key needs an unencrypted key") from None
        except ssl.SSLError as error:
            reason = next((words for sign, words in _REASONS.items() if sign in str(error)), _NO_PEM)
            raise CannotListen(f"TLS cannot use {cert} and {key}: {reason}") from None
        except OSError as error:
            missing = next((str(file) for file in self._files if not is_file(file)), f"{cert} or {key}")
            raise CannotListen(f"TLS is not available: {missing} cannot be read: {error.strerror}") from None
        return context

    def _file_stamps(self) -> tuple[int, ...]:
        try:
            return tuple(part for file in self._files for part in (file.stat().st_mtime_ns, file.stat().st_size))
        except OSError:
            return ()


def certificate_of(settings: ApiSettings) -> Certificate | None:
    """Return the certificate of the settings, None for plain HTTP. Raises CannotListen."""
    cert, key = settings.tls_cert, settings.tls_key
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        missing = "--tls-cert" if cert is None else "--tls-key"
        raise CannotListen(f"TLS needs a certificate and its key: {missing} is missing")
    return Certificate(cert, key)


class _Encrypted(Exception):
    """The key asks for a password."""


def _refuse() -> str:
    """OpenSSL would ask at the terminal."""
    raise _Encrypted
