"""Files of other users, whoever runs the tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

OTHER = 4242


def belongs_to_another(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a file, a folder or a link belong to a user who is neither root nor the one that runs from now on."""
    if os.geteuid() == 0:
        os.chown(path, OTHER, -1, follow_symlinks=False)
    owner = path.lstat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
