"""Reading a model folder's JSON files."""

from __future__ import annotations

from pathlib import Path

import msgspec

from engine.errors import UnsupportedModel


def home_expanded(path: str | Path) -> Path:
    """`path` with "~" as the home folder; as it is where there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def read_json_object(path: Path) -> dict[str, object]:
    """The object in a JSON file; {} where there is no such file; UnsupportedModel where it cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, object])
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UnsupportedModel(f"{path.name} in {path.parent} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnsupportedModel(f"{path.name} in {path.parent} is not valid JSON: {error}") from error
