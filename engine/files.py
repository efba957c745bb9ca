"""Files that are kept from one run to the next."""

from __future__ import annotations

import tempfile
from pathlib import Path


def replace_file(file: Path, content: bytes) -> None:
    """Give a file new content, its folder made where there is none: all of the new or all of the old, whatever happens
    meanwhile. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=file.parent, prefix=f".{file.name}.", delete=False) as stream:
        unfinished = Path(stream.name)
        try:
            stream.write(content)
            stream.flush()
            unfinished.replace(file)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
