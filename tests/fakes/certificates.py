"""Self-signed certificates for localhost, made by openssl."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Pair:
    """cert, key: PEM files."""

    cert: Path
    key: Path


def self_signed(folder: Path, name: str = "server", *, password: str = "", curve: str = "prime256v1") -> Pair:
    """A certificate of localhost and 127.0.0.1 that is its own authority. password: what its key is encrypted with."""
    openssl = shutil.which("openssl")
    assert openssl is not None, "openssl is needed: apt-get install openssl"
    pair = Pair(folder / f"{name}.pem", folder / f"{name}.key")
    closed = ["-passout", f"pass:{password}"] if password else ["-nodes"]
    subprocess.run(
        [
            *(openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", f"ec_paramgen_curve:{curve}", *closed),
            *("-keyout", pair.key, "-out", pair.cert, "-days", "2", "-subj", f"/CN={name}"),
            *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    return pair
