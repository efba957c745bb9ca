"""Downloading a model from the hub into its cache: only what is needed, with progress, and stopping when asked."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar

import msgspec

from engine.backends.base import LoadProgress
from engine.config import quote_value
from engine.errors import EngineError, LoadCancelled, ModelLoadFailed, ModelNotFound, UnsafeWeights, UnsupportedModel
from engine.models.hub_cache import (
    DEFAULT_REVISION,
    cached_model,
    hub_cache_folder,
    is_commit,
    is_revision,
    is_usable_name,
    part_bytes,
    part_file,
    repo_folder,
)
from engine.models.hub_client import HubClient, HubRefused, StoredFile, explain_hub_error
from engine.models.hub_id import HubId, choose_gguf, gguf_models

# What is to be fetched of a model on the hub: which of its files, how large they are, and what is there already.

MAX_FILES = 2000
"""Of one model: the largest have some 200."""

_WANTED = (".safetensors", ".json", ".jinja")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_GIB, _MIB = 2**30, 2**20


class DownloadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Files to fetch: sizes in bytes by file name. small: to be there before any weights are.  file: the GGUF file that
    is the model, "" where it is the folder."""

    repo_id: str
    commit: str
    small: Mapping[str, int]
    weights: Mapping[str, int]
    file: str = ""

    @property
    def total_bytes(self) -> int:
        """Of all files, those in the cache included."""
        return sum(self.small.values()) + sum(self.weights.values())


def plan_of(hub: HubClient, wanted: HubId) -> DownloadPlan:
    """Return what to fetch of a revision.

    Raises what HubClient, `choose_files` and `choose_gguf` do, and ModelLoadFailed for a list of files that cannot be
    that of a model.
    """
    repo_id, revision = wanted.repo_id, wanted.revision
    listing = hub.listing(repo_id, revision)
    if revision is not None and is_commit(revision) and listing.sha != revision:
        raise ModelLoadFailed(
            f"the hub at {hub.endpoint} answers for commit {revision} of {repo_id} with {listing.sha}", model=repo_id
        )
    sizes = {file.rfilename: file.size or 0 for file in listing.siblings}
    ggufs = gguf_models(sizes)
    if wanted.names_gguf or (ggufs and not _is_folder_model(sizes)):
        chosen = choose_gguf(ggufs, wanted)
        file, small, weights = chosen.name, dict[str, int](), dict(chosen.files)
    else:
        file, (small, weights) = "", choose_files(sizes, repo_id)
    if len(small) + len(weights) > MAX_FILES:
        raise ModelLoadFailed(
            f"{repo_id} has {len(small) + len(weights):,} files; the limit is {MAX_FILES:,}",
            model=repo_id,
        )
    for name in (*small, *weights):
        if not is_usable_name(name):
            raise ModelLoadFailed(f"{repo_id} has a file with a refused name: {quote_value(name)}", model=repo_id)
    return DownloadPlan(repo_id=repo_id, commit=listing.sha, small=small, weights=weights, file=file)


def _is_folder_model(sizes: Mapping[str, int]) -> bool:
    """Return whether the files are those of a model folder, whatever else is among them."""
    return "config.json" in sizes and any(name.endswith(".safetensors") and "/" not in name for name in sizes)


def choose_files(sizes: Mapping[str, int], repo_id: str) -> tuple[dict[str, int], dict[str, int]]:
    """(small files, weights) that a model needs of its repository's files, given and returned as sizes by name.

    Files in subfolders are left out (other formats, other precisions), chat templates excepted, and so are
    weights that are there twice as "consolidated". Raises UnsafeWeights or UnsupportedModel for no model.
    """
    top = {name: size for name, size in sizes.items() if "/" not in name}
    if "config.json" not in top:
        raise UnsupportedModel(f"{repo_id} cannot be loaded: it has no config.json")
    weights = {name: size for name, size in top.items() if name.endswith(".safetensors")}
    if not weights:
        if pickles := [name for name in top if name.endswith(_PICKLES)]:
            raise UnsafeWeights(
                f"{repo_id} has only pickles ({quote_value(pickles[0])}), which can run code when read; choose one with"
                " safetensors",
                file=quote_value(pickles[0]),
            )
        raise UnsupportedModel(f"{repo_id} has no safetensors weights")
    plain = {name: size for name, size in weights.items() if not name.startswith("consolidated")}
    small = {name: size for name, size in top.items() if name.endswith(_WANTED) and name not in weights}
    small |= {name: size for name, size in sizes.items() if name.startswith("additional_chat_templates/")}
    return small, plain or weights


def cached_files(plan: DownloadPlan) -> set[str]:
    """Files that the cache has whole."""
    snapshot = repo_folder(plan.repo_id) / "snapshots" / plan.commit
    return {name for name in (*plan.small, *plan.weights) if (snapshot / name).is_file()}


def cached_bytes(plan: DownloadPlan) -> int:
    """Of what is to be fetched, what the cache has: whole files, and the beginnings of others."""
    whole = cached_files(plan)
    sizes = {**plan.small, **plan.weights}
    parts = sum(part_bytes(plan.repo_id, plan.commit, name) for name in sizes if name not in whole)
    return parts + sum(sizes[name] for name in whole)


def progress_text(plan: DownloadPlan) -> str:
    """ "3.1 of 9.4 GiB are kept, ..." """
    there, total = cached_bytes(plan), plan.total_bytes
    unit, name = (_GIB, "GiB") if total >= _GIB else (_MIB, "MiB")
    return f"{there / unit:.1f} of {total / unit:.1f} {name} are saved; the next download continues there"


# One file from the hub into its cache, going on where an earlier try ended, whatever ended it.
#
# What has come is kept in a file of our own, "<commit>.<name>.part" among the cache's blobs; once it is whole, and its
# content is what the hub's digest says, it becomes the blob that huggingface_hub would have written.

MAX_TRIES = 5
"""In a row without a byte that is new."""

MAX_WAIT_S = 300.0
"""Before a retry, whatever the hub asks for: its own windows are that long."""

_RETRY_S = 1.0
_READ_BYTES = 2**20
_BYTES_PER_GIB = 2**30


class _Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...

    def hexdigest(self) -> str: ...


def fetch_file(
    hub: HubClient,
    repo_id: str,
    commit: str,
    name: str,
    size: int,
    *,
    count: Callable[[int], None],
    pause: Callable[[float], object],
) -> None:
    """Fetch a file and put it into the cache: its content among the blobs, a link to it into the commit's snapshot.

    name: as `hub_plan` lets it through.  size: bytes as the list of files says, 0 where it does not.
    count: hears of every change of how much of the file is there, and ends the download by raising.
    pause: waits before a retry.
    Raises ModelLoadFailed while another process fetches the file, and for content that is not what was announced;
    OSError, and what HubClient raises.
    """
    stored = hub.stored_file(repo_id, commit, name)
    if size and stored.size is not None and stored.size != size:
        raise ModelLoadFailed(
            f"the hub at {hub.endpoint} reports {name} with {size:,} bytes, then with {stored.size:,}",
            model=repo_id,
        )
    size = size or stored.size or 0
    blob = repo_folder(repo_id) / "blobs" / stored.digest
    blob.parent.mkdir(parents=True, exist_ok=True)
    part = part_file(repo_id, commit, name)
    if blob.is_file():
        part.unlink(missing_ok=True)
    else:
        with open(part, "a+b", opener=opener_without_links) as stream:
            _hold(stream, part, name)
            transfer = _FileTransfer(hub, stored, name, size, stream, count)
            try:
                transfer.complete(pause)
            except _Unannounced:
                part.unlink()
                raise
            part.replace(blob)
    _link(repo_folder(repo_id) / "snapshots" / commit / name, blob)


def opener_without_links(path: str, flags: int) -> int:
    """Opener for `open`: what a file is called in a cache that several users share may be another's link to a file
    of ours. Raises OSError for a link."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


class _Unannounced(ModelLoadFailed):
    """The content is not the one that the hub announced, and nothing of it is kept."""


class _FileTransfer:
    """The bytes of one file on their way into `stream`, digested as they come; first those that are in it already."""

    def __init__(
        self,
        hub: HubClient,
        stored: StoredFile,
        name: str,
        size: int,
        stream: BinaryIO,
        count: Callable[[int], None],
    ) -> None:
        self._hub, self._stored, self._name, self._size = hub, stored, name, size
        self._stream, self._count = stream, count
        self._digest = self._new_digest()
        self._have = 0

    def complete(self, pause: Callable[[float], object]) -> None:
        """Fetch what is lacking, and check it; a connection that breaks off is made again."""
        self._digest_present()
        require_space(Path(self._stream.name).parent, self._size - self._have, self._name)
        tries = 0
        while self._have < self._size:
            had = self._have
            error: Exception = ModelLoadFailed(f"{self._name} ends after {had:,} of {self._size:,} bytes")
            wait_s: float | None = _RETRY_S
            try:
                self._receive()
            except Exception as caught:
                error, wait_s = caught, _retry_after_s(caught)
            tries = 1 if self._have > had else tries + 1
            if self._have < self._size:
                if wait_s is None or tries > MAX_TRIES:
                    raise error
                pause(wait_s)
        self._stream.flush()
        if (found := self._digest.hexdigest()) != self._stored.digest:
            raise _Unannounced(
                f"{self._name} is damaged or was changed in transit: its digest is {found}, the hub reports"
                f" {self._stored.digest}; it was deleted",
                file=self._name,
            )

    def _digest_present(self) -> None:
        """Take over what an earlier try left; one that is larger than the file can be is begun again."""
        self._have = self._stream.seek(0, 2)
        if self._have > self._size:
            self._restart()
        self._stream.seek(0)
        while chunk := self._stream.read(_READ_BYTES):
            self._digest.update(chunk)
            self._count(0)

    def _receive(self) -> None:
        with self._hub.content(self._stored.url, self._have) as (continues, chunks):
            if self._have and not continues:
                self._restart()
            for chunk in chunks:
                if self._have + len(chunk) > self._size:
                    raise _Unannounced(
                        f"the hub sends more of {self._name} than the {self._size:,} bytes that it reported",
                        file=self._name,
                    )
                self._count(len(chunk))
                self._stream.write(chunk)
                self._digest.update(chunk)
                self._have += len(chunk)

    def _restart(self) -> None:
        self._stream.truncate(0)
        self._count(-self._have)
        self._digest, self._have = self._new_digest(), 0

    def _new_digest(self) -> _Digest:
        if len(self._stored.digest) == 64:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self._size, usedforsecurity=False)  # as git names its blobs


def require_space(folder: Path, needed: int, what: str) -> None:
    """Raise ModelLoadFailed with the numbers where the disk of `folder` cannot take `needed` bytes."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ModelLoadFailed(
            f"{what} needs {needed / _BYTES_PER_GIB:.1f} GiB more in {folder}, where {free / _BYTES_PER_GIB:.1f} "
            "GiB are free",
            needed_bytes=needed,
            free_bytes=free,
        )


def _retry_after_s(error: Exception) -> float | None:
    """Return how long to wait before another try, None where that is no use."""
    if isinstance(error, HubRefused):
        return None if error.retry_after_s is None else min(error.retry_after_s, MAX_WAIT_S)
    is_transient = any(kind.__name__ == "TransportError" for kind in type(error).__mro__)
    return _RETRY_S if is_transient else None


def _hold(stream: BinaryIO, part: Path, name: str) -> None:
    """Lock the file for this process until it is closed. Who had it before may have completed and moved it
    meanwhile."""
    with suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(stream.fileno()), part.lstat()):
            return
    raise ModelLoadFailed(f"{name} is already being downloaded; try again afterwards")


def _link(pointer: Path, blob: Path) -> None:
    """Have a name in a snapshot stand for a blob, as huggingface_hub does: by a relative link, or by a copy."""
    pointer.parent.mkdir(parents=True, exist_ok=True)
    pointer.unlink(missing_ok=True)
    depth = len(pointer.relative_to(blob.parent.parent).parents) - 1
    try:
        pointer.symlink_to(Path(*[".."] * depth, "blobs", blob.name))
    except FileExistsError:  # another download of this commit was quicker
        pass
    except OSError:  # a file system without links
        shutil.copyfile(blob, pointer)


T = TypeVar("T")

_PARALLEL_FILES = 4
_POLL_S = 0.1
_PATIENCE_S = 0.5


def download(
    wanted: HubId,
    *,
    report: Callable[[LoadProgress], None],
    cancelled: Callable[[], bool],
) -> Path:
    """The snapshot folder of a hub model, or the GGUF file in it, after fetching what the cache lacks of it.

    HF_ENDPOINT, HF_HUB_CACHE, HF_HOME, HF_HUB_OFFLINE and HF_TOKEN are honoured. Weights come last and the branch's
    reference is written at the end, so that an unfinished download is never taken for a model; files that are
    whole are kept and not fetched again, and of weights the next download takes up what has come. Raises
    ModelNotFound, UnsafeWeights, UnsupportedModel, ModelLoadFailed, or LoadCancelled with what is kept.
    """
    repo_id, revision = wanted.repo_id, wanted.revision
    if cancelled():
        raise _cancelled(repo_id)
    _require_names(repo_id, revision)
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return _offline(wanted)
    report(LoadProgress(phase="download", done=0, total=0))
    hub = _open_hub(repo_id)
    try:
        plan = _interruptible(lambda: plan_of(hub, wanted), repo_id, cancelled)
        transfer = _Transfer(hub, plan)
        folder = hub_cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        require_space(folder, plan.total_bytes - transfer.done_bytes, repo_id)
        try:
            for files in (plan.small, plan.weights):
                transfer.fetch(files, report, cancelled)
        except LoadCancelled:
            raise _cancelled(repo_id, progress_text(plan)) from None
        _write_reference(plan, revision or DEFAULT_REVISION)
    except Exception as error:  # the library lets its HTTP client's errors through, whichever that is
        if isinstance(error, EngineError):
            raise
        raise explain_hub_error(error, repo_id, revision, hub.endpoint, withholds_token=hub.withholds_token) from error
    return repo_folder(repo_id) / "snapshots" / plan.commit / plan.file


def _require_names(repo_id: str, revision: str | None) -> None:
    """Raise ModelNotFound for what cannot be a repository or a revision; both name folders of the cache."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # exported lazily

    try:
        validate_repo_id(repo_id)
    except HFValidationError:
        raise ModelNotFound(f"{repo_id} is not a valid hub id", model=repo_id) from None
    if revision is not None and not is_revision(revision):
        raise ModelNotFound(f"{repo_id} has no revision {revision}", model=repo_id)


def _open_hub(repo_id: str) -> HubClient:
    try:
        return HubClient()
    except ValueError as error:
        raise ModelLoadFailed(f"HF_ENDPOINT is not the address of a hub: {error}", model=repo_id) from None


def _interruptible(work: Callable[[], T], repo_id: str, cancelled: Callable[[], bool]) -> T:
    """Return what `work` returns. A hub that does not answer is not waited for once cancelled."""
    future = Future[T]()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="hub listing", daemon=True).start()
    while not wait([future], timeout=_POLL_S).done:
        if cancelled():
            raise _cancelled(repo_id)
    return future.result()


class _Transfer:
    """Fetches files side by side; the calling thread reports and asks whether to go on, the others only count."""

    def __init__(self, hub: HubClient, plan: DownloadPlan) -> None:
        self._hub, self._plan = hub, plan
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._present = cached_files(plan)
        self.done_bytes = cached_bytes(plan)

    def fetch(
        self, files: Mapping[str, int], report: Callable[[LoadProgress], None], cancelled: Callable[[], bool]
    ) -> None:
        """Fetch those of `files` that the cache lacks; raises LoadCancelled, or the first file's error.

        Who still fetches then ends with the next chunk. A hub that sends none is not waited for.
        """
        missing = deque((name, size, Future[None]()) for name, size in files.items() if name not in self._present)
        futures = [future for _, _, future in missing]
        threads = [
            threading.Thread(target=self._work, args=(missing,), name=f"hub {number}", daemon=True)
            for number in range(min(_PARALLEL_FILES, len(missing)))
        ]
        for thread in threads:
            thread.start()
        try:
            self._watch(futures, report, cancelled)
        except BaseException:
            self._stop.set()
            until = time.monotonic() + _PATIENCE_S
            for thread in threads:
                thread.join(max(0.0, until - time.monotonic()))
            raise

    def _work(self, missing: deque[tuple[str, int, Future[None]]]) -> None:
        """Fetch one file after the other until there is none, or everybody is to stop."""
        while not self._stop.is_set():
            try:
                name, size, future = missing.popleft()
            except IndexError:
                return
            try:
                self._fetch_one(name, size)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)

    def _count(self, size: int) -> None:
        with self._lock:
            self.done_bytes += size

    def _watch(
        self, files: Sequence[Future[None]], report: Callable[[LoadProgress], None], cancelled: Callable[[], bool]
    ) -> None:
        pending = set(files)
        while True:
            finished, pending = wait(pending, timeout=_POLL_S, return_when=FIRST_EXCEPTION)
            for file in finished:
                file.result()
            report(LoadProgress(phase="download", done=self.done_bytes, total=self._plan.total_bytes))
            if not pending:
                return
            if cancelled():
                raise _cancelled(self._plan.repo_id)

    def _fetch_one(self, name: str, size: int) -> None:
        """Fetch one file, counting its bytes as they come (a restarted file gives some back), `size` in the end."""
        plan = self._plan
        received = part_bytes(plan.repo_id, plan.commit, name)

        def count(chunk: int) -> None:
            nonlocal received
            if self._stop.is_set():
                raise _cancelled(plan.repo_id)
            received += chunk
            self._count(chunk)

        fetch_file(self._hub, plan.repo_id, plan.commit, name, size, count=count, pause=self._stop.wait)
        self._count(size - received)


def _write_reference(plan: DownloadPlan, revision: str) -> None:
    """Let the cache know which commit a branch or tag stands for."""
    if not is_commit(revision):
        reference = repo_folder(plan.repo_id) / "refs" / revision
        reference.parent.mkdir(parents=True, exist_ok=True)
        with open(reference, "w", encoding="ascii", opener=opener_without_links) as file:
            file.write(plan.commit)


def _offline(wanted: HubId) -> Path:
    path = cached_model(wanted)
    if path is None:
        raise ModelNotFound(
            f"{wanted.name} is not in the hub cache ({hub_cache_folder()}), and HF_HUB_OFFLINE is set",
            model=wanted.repo_id,
        )
    return path


def _cancelled(repo_id: str, progress: str = "nothing was downloaded yet") -> LoadCancelled:
    return LoadCancelled(f"downloading {repo_id} was cancelled; {progress}", model=repo_id)
