"""Downloading a model from the hub into its cache: only what is needed, with progress, and stopping when asked."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.backends.base import LoadProgress
from engine.errors import EngineError, LoadCancelled, ModelLoadFailed, ModelNotFound
from engine.models.hub_cache import (
    DEFAULT_REVISION,
    hub_cache_folder,
    is_commit,
    is_complete,
    part_bytes,
    repo_folder,
    snapshot_of,
)
from engine.models.hub_errors import explain
from engine.models.hub_files import LIBRARY, fetch_blob
from engine.models.hub_plan import Plan, kept, kept_bytes, plan_of, present

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_PARALLEL_FILES = 4
_POLL_S = 0.1
_PATIENCE_S = 0.5
_CHUNK_BYTES = 2**20  # what progress moves by, and the most that a cancelled file loses
_GIB = 2**30


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
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return _offline(repo_id, revision)
    report(LoadProgress(phase="download", done=0, total=0))
    api = _open_hub()
    try:
        plan = plan_of(api, repo_id, revision)
        transfer = _Transfer(api, plan)
        _require_space(plan, transfer.done_bytes)
        try:
            for files in (plan.small, plan.weights):
                transfer.fetch(files, report, cancelled)
        except LoadCancelled:
            raise _cancelled(repo_id, kept(plan)) from None
        _write_reference(plan, revision or DEFAULT_REVISION)
    except EngineError:
        raise
    except Exception as error:  # the library lets its HTTP client's errors through, whichever that is
        raise explain(error, repo_id, revision, api.endpoint) from error
    return repo_folder(repo_id) / "snapshots" / plan.commit


def _open_hub() -> HfApi:
    """The hub's API; quiet, for the screen belongs to someone else, and over plain HTTP, which can be stopped."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("HF_HUB_DISABLE_XET", "1")
    from huggingface_hub import HfApi, constants

    constants.DOWNLOAD_CHUNK_SIZE = min(constants.DOWNLOAD_CHUNK_SIZE, _CHUNK_BYTES)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    return HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, library_name=LIBRARY)


class _Transfer:
    """Fetches files side by side; the calling thread reports and asks whether to go on, the others only count."""

    def __init__(self, api: HfApi, plan: Plan) -> None:
        self._api, self._plan = api, plan
        self._cache = hub_cache_folder()
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
        from huggingface_hub import hf_hub_download

        received = part_bytes(self._plan.repo_id, self._plan.commit, name)

        def count(chunk: int) -> None:
            nonlocal received
            if self._stop.is_set():
                raise _cancelled(self._plan.repo_id)
            received += chunk
            self._count(chunk)

        bar: Any = _bar_class(count, lambda first: count(first - received))
        if name in self._plan.weights:
            fetch_blob(self._api, self._plan.repo_id, self._plan.commit, name, size, bar)
        hf_hub_download(
            self._plan.repo_id,
            name,
            revision=self._plan.commit,
            cache_dir=self._cache,
            endpoint=self._api.endpoint,
            library_name=LIBRARY,
            tqdm_class=bar,
        )
        self._count(size - received)


def _bar_class(count: Callable[[int], None], begin: Callable[[int], None]) -> type:
    """What the library takes for a progress bar: it shows nothing and hands every chunk's size to `count`, and to
    `begin` how much of the file was there when the hub's answer came."""

    class Bar:
        def __init__(self, *args: object, initial: int = 0, **settings: object) -> None:
            begin(initial)

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def update(self, size: float | None = 1) -> None:
            count(int(size or 0))

        def ignore(self, *args: object, **settings: object) -> None:
            """Looks, and bytes that `update` hears of as well."""

        update_transfer = set_postfix_str = set_transfer_postfix_str = set_description = refresh = close = ignore

    return Bar


def _require_space(plan: Plan, present_bytes: int) -> None:
    """Raise ModelLoadFailed with the numbers where the disk cannot take what is still to come."""
    folder = hub_cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    needed, free = plan.total_bytes - present_bytes, shutil.disk_usage(folder).free
    if needed > free:
        raise ModelLoadFailed(
            f"{plan.repo_id} needs {needed / _GIB:.1f} GiB more in {folder}, where {free / _GIB:.1f} GiB are free",
            needed_bytes=needed,
            free_bytes=free,
        )


def _write_reference(plan: Plan, revision: str) -> None:
    """Let the cache know which commit a branch or tag stands for."""
    if not is_commit(revision):
        reference = repo_folder(plan.repo_id) / "refs" / revision
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(plan.commit, "ascii")


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
