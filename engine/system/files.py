"""Files that are kept from one run to the next: for their owner alone, and never trusted where others could write."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

_OWN_FOLDER, _OWN_FILE = 0o700, 0o600
_OF_OTHERS = 0o077
_WRITE_OF_OTHERS = 0o022


def replace_file(file: Path, content: bytes, *, keep_mode: bool = False) -> None:
    """Give a file new content, its folder made where there is none: all of the new or all of the old, whatever happens
    meanwhile. A link stays a link to the file that it names. Raises OSError.

    The file is its owner's alone then. keep_mode: one that is there keeps its mode.
    """
    file = file.resolve()
    make_private_folder(file.parent)
    with tempfile.NamedTemporaryFile(dir=file.parent, prefix=f".{file.name}.", delete=False) as stream:
        unfinished = Path(stream.name)
        try:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
            if keep_mode:
                with suppress(FileNotFoundError):
                    unfinished.chmod(stat.S_IMODE(file.stat().st_mode))
            unfinished.replace(file)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise


def make_private_folder(folder: Path) -> None:
    """Make a folder, and those above it that are missing, for their owner alone; one that is there stays as it is.

    Raises OSError.
    """
    for each in (*reversed(folder.parents), folder):
        each.mkdir(mode=_OWN_FOLDER, exist_ok=True)


def private_opener(path: str, flags: int) -> int:
    """Opener for `open`: a file that it makes is its owner's alone. One that is there keeps its mode."""
    return os.open(path, flags | os.O_CLOEXEC, _OWN_FILE)


def make_private_file(file: Path) -> None:
    """Make an empty file for its owner alone where there is none, for a library that opens it by its name.

    SQLite gives the files that it puts next to a database the mode of the database. Raises OSError.
    """
    with suppress(FileExistsError):
        os.close(private_opener(str(file), os.O_CREAT | os.O_EXCL | os.O_WRONLY))


def tighten_folder(folder: Path) -> None:
    """Take a folder of ours, and all that lies in it, from everybody but its owner: an earlier version made it with the
    rights of any file. What belongs to others, and links, stay as they are; so does what cannot be changed."""
    for parent, _, names in os.walk(folder.resolve()):
        for path in (Path(parent), *(Path(parent, name) for name in names)):
            _tighten(path)


def claim_folder(folder: Path, levels: int) -> None:
    """Have a folder of a cache that no other user can write into, nor into the `levels` folders above it.

    They are made where they are missing. Where others could write into `folder` until now, its content is not trusted
    and removed, unless it is a link: what that leads to may be anything. Raises OSError, also where one of them belongs
    to another user.
    """
    make_private_folder(folder)
    for each in reversed((folder, *folder.parents[:levels])):
        if not (problem := distrust(each)):
            continue
        if each == folder and folder.is_symlink():
            raise PermissionError(problem)
        each.chmod(stat.S_IMODE(each.stat().st_mode) & ~_WRITE_OF_OTHERS)
        if problem := distrust(each):  # it is not ours, or on a file system without modes
            raise PermissionError(problem)
        if each == folder:
            _empty(folder)


def distrust(path: Path) -> str:
    """Return why what is at `path` may be another user's doing, as a clause; "" where only we and root could write it.

    A link of another user may lead to a folder of ours, with libraries that came with a model, say. Raises OSError
    where it is not there.
    """
    found = path.stat()
    if not (_is_ours(found) and _is_ours(path.lstat())):
        return f"{path} belongs to another user"
    return f"other users may write into {path}" if found.st_mode & _WRITE_OF_OTHERS else ""


def is_readable_by_others(file: Path) -> bool:
    """Return whether the mode of a file lets everybody read it, or its group where it is ours: where it is not, we are
    let in as one of that group ourselves. False where it is not there."""
    try:
        found = file.stat()
    except OSError:
        return False
    return bool(found.st_mode & (0o044 if found.st_uid == os.geteuid() else 0o004))


def _is_ours(found: os.stat_result) -> bool:
    return found.st_uid in (0, os.geteuid())


def _tighten(path: Path) -> None:
    with suppress(OSError):
        found = path.lstat()
        is_plain = stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)
        if is_plain and found.st_uid == os.geteuid() and found.st_mode & _OF_OTHERS:
            path.chmod(stat.S_IMODE(found.st_mode) & ~_OF_OTHERS)


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
