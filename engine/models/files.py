"""Opening and reading the files of a model folder, which anybody may have made: never one from outside of the folder,
nothing that is not a plain file, and no more of it than its reader can afford."""

from __future__ import annotations

import fcntl
import os
import re
import stat
import sys
from io import BufferedReader
from pathlib import Path
from typing import TypeVar

import msgspec

from engine.config import quote_value
from engine.errors import EngineError, UnsupportedModel

MAX_JSON_BYTES = 4 << 20
"""Of a JSON file that is read as a whole. A config.json has some KiB, with a long list of exceptions some hundred."""

MAX_JSON_VALUES = 100_000
"""In such a file. An empty object takes 3 bytes of the file and 64 of memory."""

MAX_FILES = 10_000
"""Files and folders in a model folder. Large models have some hundred weight files."""

_BEFORE_VALUES = (b"[", b"{", b",", b":")
_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_PATH_BYTES = 1024  # macOS's MAXPATHLEN

T = TypeVar("T")


def home_expanded(path: str | Path) -> Path:
    """`path` with "~" as the home folder; as it is where there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def without_links(path: Path) -> Path:
    """Where a path leads, as far as it does: another program may make a link to itself of it at any time."""
    return Path(os.path.realpath(path))


def is_folder(path: Path) -> bool:
    """Return whether there is such a folder; False too where the name is none, or this process may not look."""
    try:
        return path.is_dir()
    except OSError:
        return False


def is_file(path: Path) -> bool:
    """Likewise, a plain file."""
    try:
        return path.is_file()
    except OSError:
        return False


def file_names(folder: Path) -> list[str]:
    """Names of what lies in a model folder, sorted. Raises UnsupportedModel for more than MAX_FILES, OSError."""
    names = []
    with os.scandir(folder) as entries:
        for entry in entries:
            names.append(entry.name)
            if len(names) > MAX_FILES:
                raise UnsupportedModel(f"{folder} is not a model folder: it has more than {MAX_FILES:,} files")
    return sorted(names)


def open_file(file: Path, folder: Path | None = None) -> BufferedReader:
    """Open a file of a model folder, `folder` or the one that it lies in, for reading.

    A link may lead to another file of the folder or to a blob of a hub cache, which is where downloads have
    their files. Checked is the file that was opened, whatever becomes of its path meanwhile. Raises
    UnsupportedModel for a link that leads elsewhere and for what is not a plain file (it is not waited for); OSError,
    FileNotFoundError among them.
    """
    if not stat.S_ISREG(file.stat().st_mode):  # before opening it, which may do something to a device
        raise _not_plain(file)
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    stream = os.fdopen(descriptor, "rb")
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise _not_plain(file)
        if not _may_be_read(_path_of(descriptor), folder or file.parent):
            raise UnsupportedModel(
                f"{quote_value(file.name)} in {file.parent} is a link that leads out of the folder, which is not "
                "followed; put the file itself there",
                file=quote_value(file.name),
            )
    except BaseException:
        stream.close()
        raise
    return stream


def refuse_links(folder: Path) -> None:
    """Raise as `open_file` does for a file of a model folder that is a link out of it: for a folder whose files are
    opened by a library. OSError."""
    for name in file_names(folder):
        file = folder / name
        if file.is_symlink() and file.is_file():
            open_file(file).close()


def read_file(file: Path, max_bytes: int, folder: Path | None = None) -> bytes:
    """The content of a file of a model folder, opened as by `open_file`, of `max_bytes` at most.

    Raises UnsupportedModel, which says what is wrong, or FileNotFoundError.
    """
    try:
        with open_file(file, folder) as stream:
            content = stream.read(max_bytes + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UnsupportedModel(f"{quote_value(file.name)} in {file.parent} cannot be read: {error.strerror}") from error
    if len(content) > max_bytes:
        raise UnsupportedModel(
            f"{quote_value(file.name)} in {file.parent} is larger than {max_bytes / 2**20:g} MiB, the limit for "
            "such a file",
            limit=max_bytes,
        )
    return content


def read_json(file: Path, kind: type[T], *, max_bytes: int = MAX_JSON_BYTES, max_values: int = MAX_JSON_VALUES) -> T:
    """A JSON file of a model folder, decoded as `kind`.

    Raises UnsupportedModel, which says what is wrong, or FileNotFoundError.
    """
    return decode_values(read_file(file, max_bytes), kind, file, max_values)


def read_json_object(file: Path) -> dict[str, object]:
    """The object in a JSON file; {} where there is no such file; UnsupportedModel where it cannot be read."""
    try:
        return read_json(file, dict[str, object])
    except FileNotFoundError:
        return {}


def decode_values(content: bytes, kind: type[T], file: Path, max_values: int = MAX_JSON_VALUES) -> T:
    """JSON decoded as `kind`, of so few values that they take little memory. Raises UnsupportedModel, naming `file`."""
    if sum(map(content.count, _BEFORE_VALUES)) > max_values:
        raise UnsupportedModel(f"{quote_value(file.name)} in {file.parent} holds more than {max_values:,} values")
    refuse_wide_text(content, file)
    return decode_json(content, kind, file)


def refuse_wide_text(content: bytes, file: Path) -> None:
    """Raise UnsupportedModel for JSON of more than MAX_JSON_BYTES with other characters than ASCII's: one of them can
    make a text take four times the memory."""
    if len(content) <= MAX_JSON_BYTES:
        return
    escaped = b"\\" in content and b"\\u" in content  # one byte is looked for ten times as fast as two
    if escaped or not content.isascii():
        raise UnsupportedModel(
            f"{quote_value(file.name)} in {file.parent} is larger than {MAX_JSON_BYTES / 2**20:g} MiB and not pure "
            "ASCII"
        )


def decode_json(content: bytes, kind: type[T], file: Path) -> T:
    """JSON decoded as `kind`, which takes memory for what that names alone. Raises UnsupportedModel, naming `file`."""
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.ValidationError as error:
        wrong = f"has invalid content: {quote_value(str(error), 200)}"
        raise UnsupportedModel(f"{quote_value(file.name)} in {file.parent} {wrong}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        wrong = "nested too deeply" if isinstance(error, RecursionError) else quote_value(str(error), 200)
        raise UnsupportedModel(f"{quote_value(file.name)} in {file.parent} is not valid JSON: {wrong}") from error


def problem_with(folder: Path, error: Exception) -> str:
    """Return an error of a folder that was being read as one sentence, whatever was raised. Its files are anybody's,
    and what they bring about is a problem of that folder alone."""
    if isinstance(error, EngineError):
        return error.message
    reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {quote_value(str(error))}"
    return f"{folder} cannot be read: {reason}"


def _not_plain(file: Path) -> UnsupportedModel:
    return UnsupportedModel(
        f"{quote_value(file.name)} in {file.parent} is not a plain file", file=quote_value(file.name)
    )


def _path_of(descriptor: int) -> Path:
    """Where an open file lies, without links."""
    if sys.platform == "darwin":
        return Path(os.fsdecode(fcntl.fcntl(descriptor, fcntl.F_GETPATH, bytes(_PATH_BYTES)).rstrip(b"\0")))
    return Path(f"/proc/self/fd/{descriptor}").readlink()


def _may_be_read(found: Path, folder: Path) -> bool:
    if found.is_relative_to(without_links(folder)):
        return True
    blobs = found.parent
    return (
        blobs.name == "blobs" and blobs.parent.name.startswith("models--") and _BLOB.fullmatch(found.name) is not None
    )
