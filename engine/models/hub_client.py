"""HubClient: the hub's HTTP interface. What a hub answers is foreign: it is bounded, checked, and then used.

huggingface_hub gives the session (proxies, certificates) and the token. Its own downloads are not used: they name files
after what the server says, and check no content. Measured with version 2.4: a file with one byte changed is taken for
whole, and a compressed answer of 64 KiB is written out as 64 MiB before its size is looked at.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any
from urllib.parse import quote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

import msgspec

from engine.config import quote_value
from engine.errors import EngineError, ModelLoadFailed, ModelNotFound

MAX_LISTING_BYTES = 8 * 2**20
"""Of a repository's list of files, some 300 bytes each: the largest models have a few thousand."""

MAX_LISTING_S = 60.0
"""For a whole list of files; each read has the library's own timeout besides."""

MIN_CHUNK_BYTES = 256
"""Of an answer's chunks on average: each takes some 20 µs of the interpreter, whatever is in it."""

MAX_SMALL_CHUNKS = 10_000
"""Before their average counts: the packets of a slow beginning are small, too."""

MAX_REDIRECTS = 8
"""The hub itself needs two: a repository's new name, and where the file is stored."""

MAX_FILE_BYTES = 2**50
"""More than a file on any disk, and small enough to be added up and shown."""

_LIBRARY = "ericllm"
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_HEADER = re.compile(r"[ -~]+")
_SIZE = re.compile(r"[0-9]{1,18}")
_SECONDS = re.compile(r"(?:^|;\s*t\s*=\s*)([0-9]{1,6})\s*(?:$|;)")
_RETRIED_STATUSES = (408, 429)
_HTTP_LOGGERS = ("httpx", "httpx2", "httpcore", "httpcore2")
"""They log whole addresses. Where a file is stored has the right to fetch it in its query."""

log = logging.getLogger(__name__)


class HubRefused(Exception):
    """The hub answered with an error status. code: its X-Error-Code. retry_after_s: None where a retry is no use."""

    def __init__(self, status: int, code: str, retry_after_s: float | None) -> None:
        super().__init__(f"HTTP {status}")
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s


class ListedFile(msgspec.Struct, frozen=True, gc=False):
    """A file of a repository. size: bytes, None where the hub does not say."""

    rfilename: str
    size: Annotated[int, msgspec.Meta(ge=0, le=MAX_FILE_BYTES)] | None = None


class Listing(msgspec.Struct, frozen=True):
    """A repository at one commit."""

    sha: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{40}\Z")]
    siblings: list[ListedFile] = []


class StoredFile(msgspec.Struct, frozen=True):
    """Where a file is stored. digest: hex SHA-256 of the content, or of the git blob its SHA-1; size: bytes, None where
    the hub does not say."""

    url: str
    digest: str
    size: int | None


class HubClient:
    """Safe from any thread. The token goes to the endpoint alone, and over plain HTTP only within this machine.

    endpoint: the hub's address for messages.  withholds_token: whether there is a token that the endpoint does not get.
    Raises ValueError where HF_ENDPOINT is not an address, ModelLoadFailed where the token cannot be read or is none.
    """

    def __init__(self) -> None:
        os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
        from huggingface_hub import constants
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # exported lazily

        if os.environ["HF_HUB_DISABLE_TELEMETRY"] == "1":  # read at its import, which may have been before
            constants.HF_HUB_DISABLE_TELEMETRY = True
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # the screen belongs to someone else
        for name in _HTTP_LOGGERS:
            logging.getLogger(name).setLevel(logging.WARNING)
        self._url = (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
        self._origin = _origin(self._url)
        self.endpoint = self._url.replace(f"{urlsplit(self._url).netloc.rpartition('@')[0]}@", "", 1)
        self._listing_timeout_s = float(constants.HF_HUB_ETAG_TIMEOUT)
        self._file_timeout_s = float(constants.HF_HUB_DOWNLOAD_TIMEOUT)
        try:
            headers: dict[str, str] = build_hf_headers(library_name=_LIBRARY)
        except (OSError, UnicodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise ModelLoadFailed(f"the hub token in {constants.HF_TOKEN_PATH} cannot be read: {reason}") from None
        self._headers = {**headers, "accept-encoding": "identity"}
        self._authorization = self._headers.pop("authorization", None)
        if self._authorization is not None and _HEADER.fullmatch(self._authorization) is None:
            raise ModelLoadFailed("the hub token (HF_TOKEN) has invalid characters")
        self.withholds_token = self._authorization is not None and not _is_private(self._url)
        if self.withholds_token:
            self._authorization = None
            log.warning("HF_TOKEN is not sent to %s: plain HTTP can be read in transit", self.endpoint)

    def listing(self, repo_id: str, revision: str | None) -> Listing:
        """Return the files of a revision. Raises HubRefused, ModelLoadFailed for an answer that is no list of files,
        and the HTTP library's errors."""
        at = "" if revision is None else f"/revision/{quote(revision, safe='')}"
        with self._answer("GET", f"{self._url}/api/models/{repo_id}{at}?blobs=true") as response:
            body = self._body(response)
        try:
            return msgspec.json.decode(body, type=Listing)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise ModelLoadFailed(
                f"the hub at {self.endpoint} returned no list of files for {repo_id}", model=repo_id
            ) from None

    def stored_file(self, repo_id: str, commit: str, name: str) -> StoredFile:
        """Return where a file is stored. Raises as `listing` does; ModelLoadFailed for a digest that is none."""
        url = f"{self._url}/{repo_id}/resolve/{commit}/{quote(name)}"
        with self._answer("HEAD", url, is_last=lambda answer: "x-linked-etag" in answer.headers) as response:
            headers, url = response.headers, str(response.request.url)
            if response.has_redirect_location:
                url = _redirected(url, headers)
                size = headers.get("x-linked-size", "")
            else:
                size = headers.get("x-linked-size", "") or headers.get("content-length", "")
        digest = headers.get("x-linked-etag") or headers.get("etag", "")
        digest = digest.removeprefix("W/").strip('"')
        if _DIGEST.fullmatch(digest) is None:
            raise ModelLoadFailed(
                f"the hub at {self.endpoint} names no SHA-1 or SHA-256 of {name} as its ETag", model=repo_id
            )
        return StoredFile(url, digest, int(size) if _SIZE.fullmatch(size) else None)

    @contextmanager
    def content(self, url: str, first_byte: int) -> Iterator[tuple[bool, Iterator[bytes]]]:
        """Yield (whether it goes on at `first_byte`, its chunks) of a file; else it begins at its start."""
        with self._answer("GET", url, first_byte=first_byte, is_digested=True) as response:
            self._require_plain(response)
            yield response.status_code == 206, self._chunks(response)

    @contextmanager
    def _answer(
        self,
        method: str,
        url: str,
        *,
        first_byte: int = 0,
        is_digested: bool = False,
        is_last: Callable[[Any], bool] = lambda answer: False,
    ) -> Iterator[Any]:
        """Yield the answer that redirections end at, its body not read yet. is_last: ends them before.

        is_digested: whether what comes is compared with a digest; else none of them leads from HTTPS to plain HTTP.
        """
        from huggingface_hub.utils import get_session  # type: ignore[attr-defined]  # exported lazily

        for _ in range(MAX_REDIRECTS + 1):
            headers = dict(self._headers)
            if self._authorization is not None and _origin(url) == self._origin:
                headers["authorization"] = self._authorization
            if first_byte:
                headers["range"] = f"bytes={first_byte}-"
            timeout_s = self._file_timeout_s if method == "GET" else self._listing_timeout_s
            with get_session().stream(
                method, url, headers=headers, timeout=timeout_s, follow_redirects=False
            ) as response:
                if not response.has_redirect_location or is_last(response):
                    if response.status_code >= 400:
                        raise _refused(response)
                    yield response
                    return
                before, url = url, _redirected(url, response.headers)
            if not is_digested and urlsplit(before).scheme == "https" != urlsplit(url).scheme:
                raise ModelLoadFailed(
                    f"the hub at {self.endpoint} redirects to plain HTTP, which can be changed in transit"
                )
        raise ModelLoadFailed(f"the hub at {self.endpoint} redirects endlessly")

    def _body(self, response: Any) -> bytes:
        """The whole of a short answer."""
        self._require_plain(response)
        body = bytearray()
        until = time.monotonic() + MAX_LISTING_S
        for chunk in self._chunks(response):
            body += chunk
            if len(body) > MAX_LISTING_BYTES:
                raise ModelLoadFailed(
                    f"the hub at {self.endpoint} answers with more than {MAX_LISTING_BYTES / 2**20:.0f} MiB",
                    max_bytes=MAX_LISTING_BYTES,
                )
            if time.monotonic() > until:
                raise ModelLoadFailed(f"the hub at {self.endpoint} takes more than {MAX_LISTING_S:.0f} s to answer")
        return bytes(body)

    def _chunks(self, response: Any) -> Iterator[bytes]:
        """Yield the body as it comes."""
        received = 0
        for count, chunk in enumerate(response.iter_raw()):
            received += len(chunk)
            if count > MAX_SMALL_CHUNKS + received // MIN_CHUNK_BYTES:
                raise ModelLoadFailed(f"the hub at {self.endpoint} answers in pieces of a few bytes")
            yield chunk

    def _require_plain(self, response: Any) -> None:
        """Compressed, a short answer can be of any length."""
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise ModelLoadFailed(f"the hub at {self.endpoint} sends compressed content, which was not requested")


def _refused(response: Any) -> HubRefused:
    status, headers = response.status_code, response.headers
    wait = headers.get("retry-after") or headers.get("ratelimit", "")
    seconds = _SECONDS.search(wait)
    retry_after_s = (float(seconds[1]) if seconds else 1.0) if status in _RETRIED_STATUSES else None
    return HubRefused(status, headers.get("x-error-code", ""), retry_after_s)


def _redirected(url: str, headers: Any) -> str:
    """Return where an answer to `url` redirects. Raises ValueError for what is not an address of a web server."""
    target: str = urljoin(url, headers["location"])
    if urlsplit(target).scheme not in ("http", "https"):
        raise ValueError("it redirects to an invalid address")
    return target


def _origin(url: str) -> tuple[str, str, int]:
    parts = urlsplit(url)
    return parts.scheme, (parts.hostname or "").lower(), parts.port or {"https": 443}.get(parts.scheme, 80)


def _is_private(url: str) -> bool:
    """Return whether no one on the way reads the traffic: TLS, or a server on this machine that no proxy leads to."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        is_here = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_here = host == "localhost" or host.endswith(".localhost")
    is_proxied = not {"http", "all"}.isdisjoint(getproxies()) and not proxy_bypass(host)
    return parts.scheme == "https" or (is_here and not is_proxied)


# What went wrong between this machine and the hub, in one sentence.

_MAX_REASON = 200
"""Characters of another program's words."""


_ERRNO = re.compile(r"\[Errno -?\d+\] ")
_NO_ADDRESS = re.compile(r"\[Errno (-2|-3|-5|8|11001)\] |Name or service not known|nodename nor servname")
"""What a failed look-up of a name says: of glibc, macOS and Windows."""


def explain_hub_error(
    error: Exception, repo_id: str, revision: str | None, endpoint: str, *, withholds_token: bool = False
) -> EngineError:
    """Return the engine's error for one that was raised while fetching a model from the hub at `endpoint`.

    withholds_token: as HubClient has it.
    """
    if isinstance(error, HubRefused):
        token = "; HF_TOKEN was not sent, as it is not an https:// address" if withholds_token else ""
        return _refusal(error, repo_id, revision, endpoint, token)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ModelLoadFailed(f"the disk is full: {repo_id} could not be written to the hub cache", model=repo_id)
    if isinstance(error, OSError) and error.errno == errno.ELOOP:
        return ModelLoadFailed(
            f"{error.filename} is a link in the hub cache, possibly made by another user; remove it", model=repo_id
        )
    if isinstance(error, PermissionError):
        return ModelLoadFailed(f"the hub cache cannot be written: {error.filename}", model=repo_id)
    reason = quote_value((str(error).splitlines() or [type(error).__name__])[0], _MAX_REASON)
    if _NO_ADDRESS.search(reason):
        return ModelLoadFailed(
            f"{repo_id} could not be downloaded: the address of the hub at {endpoint} is unknown; check the network",
            model=repo_id,
        )
    reason = _ERRNO.sub("", reason)
    return ModelLoadFailed(f"{repo_id} could not be downloaded from the hub at {endpoint}: {reason}", model=repo_id)


def _refusal(error: HubRefused, repo_id: str, revision: str | None, endpoint: str, token: str) -> EngineError:
    if error.code == "GatedRepo":
        return ModelLoadFailed(
            f"{repo_id} is gated: accept its licence at {endpoint}/{repo_id} and set HF_TOKEN to that account's"
            f" token{token}",
            model=repo_id,
        )
    if error.code == "RevisionNotFound":
        return ModelNotFound(f"{repo_id} has no revision {revision}", model=repo_id)
    if error.code == "RepoNotFound" or error.status == 401:
        return ModelNotFound(
            f"the hub at {endpoint} has no model {repo_id}, or it is private and HF_TOKEN has no access{token}",
            model=repo_id,
        )
    return ModelLoadFailed(
        f"the hub at {endpoint} answered {error.status} for {repo_id}{token}", model=repo_id, status=error.status
    )
