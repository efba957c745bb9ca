"""One large file from the hub into its cache, going on where an earlier try ended, whoever ended it.

huggingface_hub throws away what it has of a file when it is stopped. What has come is therefore kept here in a file of
our own, "<commit>.<name>.part" among the cache's blobs; once it is whole it becomes the blob that the library would
have written.
"""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import urlsplit

from engine.errors import ModelLoadFailed
from engine.models.hub_cache import part_file, repo_folder

if TYPE_CHECKING:
    from huggingface_hub import HfApi

LIBRARY = "ericllm"


def fetch_blob(api: HfApi, repo_id: str, commit: str, name: str, size: int, bar: type) -> None:
    """Fetch a file of `size` bytes and put it among the cache's blobs, unless it is there.

    bar: what the library takes for a progress bar; it hears of the bytes that come now, not of those that were there.
    Raises ModelLoadFailed while somebody else fetches the file, and whatever the library raises.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # exported lazily

    url = hf_hub_url(repo_id, name, revision=commit, endpoint=api.endpoint)
    headers: dict[str, Any] = build_hf_headers(library_name=LIBRARY)
    found = get_hf_file_metadata(url, library_name=LIBRARY, endpoint=api.endpoint)
    if urlsplit(found.location).netloc != urlsplit(url).netloc:
        headers.pop("authorization", None)  # the token is for the hub alone, not for where it keeps its files
    blob = repo_folder(repo_id) / "blobs" / (found.etag or f"{commit}.{name}")
    blob.parent.mkdir(parents=True, exist_ok=True)
    part = part_file(repo_id, commit, name)
    if blob.is_file():
        part.unlink(missing_ok=True)
        return
    with part.open("ab") as stream:
        _hold(stream, name)
        _append(stream, found.location, headers, found.size or size, bar)
        part.replace(blob)


def _hold(stream: BinaryIO, name: str) -> None:
    """Until it is closed nobody else writes it."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ModelLoadFailed(f"{name} is being downloaded already; try again when that has ended") from None


def _append(stream: BinaryIO, url: str, headers: dict[str, Any], size: int, bar: type) -> None:
    """What is lacking of the file; one that is larger than it can be is begun anew."""
    from huggingface_hub.file_download import http_get

    have = os.fstat(stream.fileno()).st_size
    if have > size:
        stream.truncate(0)
        have = 0
    http_get(url, stream, resume_size=have, headers=headers, expected_size=size, tqdm_class=bar)
    stream.flush()
