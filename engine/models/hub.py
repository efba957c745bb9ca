"""Downloading a model from the hub into its cache: only what is needed, with progress, and stopping when asked."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from pathlib import Path
from typing import TypeVar

from engine.backends.base import LoadProgress
from engine.errors import EngineError, LoadCancelled, ModelLoadFailed, ModelNotFound
from engine.models.hub_cache import (
    DEFAULT_REVISION,
    hub_cache_folder,
    is_commit,
    is_complete,
    is_revision,
    part_bytes,
    repo_folder,
    snapshot_of,
)
from engine.models.hub_client import HubClient
from engine.models.hub_errors import explain
from engine.models.hub_files import fetch_file, opener_without_links, require_space
from engine.models.hub_plan import Plan, kept, kept_bytes, plan_of, present

T = TypeVar("T")

_PARALLEL_FILES = 4
_POLL_S = 0.1
_PATIENCE_S = 0.5


def download(
    repo_id: str,
    revision: str | None,
    *,
    report: Callable[[LoadProgress], None],
    cancelled: Callable[[], bool],
) -> Path:
    """The snapshot folder of a hub model after fetching what the cache lacks of it.

    HF_ENDPOINT, HF_HUB_CACHE, HF_HOME, HF_HUB_OFFLINE and HF_TOKEN are honoured. Weights come last and the branch's
    reference is written at the end, so that an unfinished download is never taken for a model; files that are
    whole are kept and not fetched again, and of weights the next download takes up what has come. Raises
    ModelNotFound, UnsafeWeights, UnsupportedModel, ModelLoadFailed, or LoadCancelled with what is kept.
    """
    if cancelled():
        raise _cancelled(repo_id)
    _require_names(repo_id, revision)
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return _offline(repo_id, revision)
    report(LoadProgress(phase="download", done=0, total=0))
    hub = _open_hub(repo_id)
    try:
        plan = _interruptible(lambda: plan_of(hub, repo_id, revision), repo_id, cancelled)
        transfer = _Transfer(hub, plan)
        folder = hub_cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        require_space(folder, plan.total_bytes - transfer.done_bytes, repo_id)
        try:
            for files in (plan.small, plan.weights):
                transfer.fetch(files, report, cancelled)
        except LoadCancelled:
            raise _cancelled(repo_id, kept(plan)) from None
        _write_reference(plan, revision or DEFAULT_REVISION)
    except Exception as error:  # the library lets its HTTP client's errors through, whichever that is
        if isinstance(error, EngineError):
            raise
        raise explain(error, repo_id, revision, hub.endpoint, withholds_token=hub.withholds_token) from error
    return repo_folder(repo_id) / "snapshots" / plan.commit


def _require_names(repo_id: str, revision: str | None) -> None:
    """Raise ModelNotFound for what cannot be a repository or a revision; both name folders of the cache."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # exported lazily

    try:
        validate_repo_id(repo_id)
    except HFValidationError:
        raise ModelNotFound(f"{repo_id} is no valid hub id", model=repo_id) from None
    if revision is not None and not is_revision(revision):
        raise ModelNotFound(f"{repo_id} has no revision {revision}", model=repo_id)


def _open_hub(repo_id: str) -> HubClient:
    try:
        return HubClient()
    except ValueError as error:
        raise ModelLoadFailed(f"HF_ENDPOINT is no address of a hub: {error}", model=repo_id) from None


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

    def __init__(self, hub: HubClient, plan: Plan) -> None:
        self._hub, self._plan = hub, plan
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._present = present(plan)
        self.done_bytes = kept_bytes(plan)

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


def _write_reference(plan: Plan, revision: str) -> None:
    """Let the cache know which commit a branch or tag stands for."""
    if not is_commit(revision):
        reference = repo_folder(plan.repo_id) / "refs" / revision
        reference.parent.mkdir(parents=True, exist_ok=True)
        with open(reference, "w", encoding="ascii", opener=opener_without_links) as file:
            file.write(plan.commit)


def _offline(repo_id: str, revision: str | None) -> Path:
    snapshot = snapshot_of(repo_folder(repo_id), revision)
    if snapshot is None or not is_complete(snapshot):
        raise ModelNotFound(
            f"{repo_id} is not in the hub cache ({hub_cache_folder()}), and HF_HUB_OFFLINE forbids fetching it",
            model=repo_id,
        )
    return snapshot


def _cancelled(repo_id: str, kept: str = "nothing had come yet") -> LoadCancelled:
    return LoadCancelled(f"downloading {repo_id} was cancelled; {kept}", model=repo_id)
