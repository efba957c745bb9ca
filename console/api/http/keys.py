"""API keys: who may use the HTTP API, and for what. A key itself is shown once, when it is made, and never stored.

keys.json has scrypt hashes (see `key_file`). That is slow, so a presented key is verified once, in a thread; from then
on it is found by an HMAC with a secret of this process that never leaves its memory.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from console.api.http.key_file import KeyFile, KeyHash, KeyRecords, KeyUsage, StoredKey, digest, hash_key, matches, tag
from console.api.http.limits import KeyLimiter
from console.api.http.scopes import ALL, SCOPES
from console.link.api import NO_LIMITS, SETTINGS_KEY, KeyLimits, KeyReading, NewKey, Scope
from engine.errors import InvalidRequest

PREFIX = "eric_"
_RANDOM_BYTES = 24
"""32 url-safe characters."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._@-]{0,39}")


@dataclass(slots=True)
class Key:
    """A valid key. stored: its record in the file.  unsaved_usage: since that was written.  limiter: enforces its
    limits."""

    stored: StoredKey
    limiter: KeyLimiter
    unsaved_usage: KeyUsage = field(default_factory=KeyUsage)

    @property
    def name(self) -> str:
        """Name that the operator gave it."""
        return self.stored.name

    @property
    def scopes(self) -> tuple[Scope, ...]:
        """Its permissions."""
        return self.stored.scopes

    @property
    def reading(self) -> KeyReading:
        """Public view of the key and its usage."""
        use = self.stored.use.plus(self.unsaved_usage)
        return KeyReading(
            name=self.name,
            scopes=self.scopes,
            limits=self.stored.limits,
            made_at=self.stored.made_at,
            last_used_at=use.last_at,
            requests=use.requests,
            prompt_tokens=use.prompt_tokens,
            output_tokens=use.output_tokens,
        )


class Keys:
    """The key of the settings and those in a folder's keys.json, which several programs may share.

    Thread-safe; `find` belongs to one event loop.  folder: None keeps new keys in memory.  now: unix time.
    reload_s: how soon changes by another program are seen.
    """

    def __init__(
        self,
        folder: Path | None = None,
        settings_key: str | None = None,
        *,
        now: Callable[[], float] = time.time,
        reload_s: float = 1.0,
    ) -> None:
        self._file = KeyFile(folder)
        self._now = now
        self._file_lock = threading.Lock()
        self._lock = threading.Lock()
        self._records = KeyRecords(secret=secrets.token_hex(32))
        self._by_hash: dict[str, Key] = {}
        self._own_secret = secrets.token_hex(32)
        self._proven: dict[bytes, str] = {}
        """Hashes of verified keys, by their digest with `_own_secret`."""
        self._proving = asyncio.Lock()
        self._settings: Key | None = None
        self._settings_digest = b""
        if settings_key is not None:
            self._settings_digest = digest(self._own_secret, settings_key)
            stored = StoredKey(name=SETTINGS_KEY, scopes=ALL, tag="", salt="", hash="")
            self._settings = Key(stored, KeyLimiter(NO_LIMITS, time.monotonic))
        self._reload_s = reload_s
        self._reloaded_at = -reload_s

    def open(self) -> None:
        """Read the file, and upgrade it from an earlier version. Raises KeysUnavailable where it cannot be read: the
        server would be open to all otherwise. Blocking."""
        if (records := self._file.read()) is not None:
            with self._lock:
                self._replace(records)
            if self._file.is_old:
                self._change(lambda records: records)

    @property
    def required(self) -> bool:
        """True if a request needs a key: as soon as there is one."""
        if self._settings is not None:
            return True
        with self._lock:
            self._reload_if_due()
            return bool(self._by_hash)

    async def find(self, presented: str) -> Key | None:
        """Return the valid key that `presented` is, None if invalid."""
        own = digest(self._own_secret, presented)
        if self._settings is not None and hmac.compare_digest(own, self._settings_digest):
            return self._settings
        found = self._proven_key(own)
        if found is not None or not self._candidates(presented)[1]:
            return found
        async with self._proving:  # scrypt takes memory: one at a time
            found = self._proven_key(own)
            return found if found is not None else await asyncio.to_thread(self._prove, presented, own)

    def is_valid(self, key: Key) -> bool:
        """Return whether a key that was found is still valid."""
        if key is self._settings:
            return True
        with self._lock:
            self._reload_if_due()
            return self._by_hash.get(key.stored.hash) is key

    def record_usage(self, key: Key, *, requests: int = 0, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        """Add to the usage of a key."""
        use = KeyUsage(requests=requests, prompt_tokens=prompt_tokens, output_tokens=output_tokens, last_at=self._now())
        with self._lock:
            key.unsaved_usage = key.unsaved_usage.plus(use)

    def readings(self) -> tuple[KeyReading, ...]:
        """Return all keys, that of the settings first."""
        with self._lock:
            self._reload_if_due()
            first = () if self._settings is None else (self._settings,)
            return tuple(key.reading for key in (*first, *self._by_hash.values()))

    def make(self, name: str, scopes: tuple[Scope, ...], limits: KeyLimits = NO_LIMITS) -> NewKey:
        """Create a key. Raises InvalidRequest for a bad or existing name, or bad scopes; KeysUnavailable where it
        cannot be stored. Blocking."""
        name = name.strip()
        if not _NAME.fullmatch(name):
            raise InvalidRequest(
                "A key name has 1 to 40 letters, digits, spaces or . _ @ -, and starts with a letter or digit",
                param="name",
            )
        wanted = tuple(scope for scope in SCOPES if scope in scopes)
        if not wanted or len(wanted) < len(set(scopes)):
            raise InvalidRequest(f"A key needs at least one scope: {', '.join(SCOPES)}", param="scopes")
        key = PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)

        def with_key(records: KeyRecords) -> KeyRecords:
            if name == SETTINGS_KEY or any(stored.name == name for stored in records.keys):
                raise InvalidRequest(f"A key {name} already exists; choose another name", param="name")
            parts = hash_key(records.secret, key)._asdict()
            stored = StoredKey(name=name, scopes=wanted, limits=limits, made_at=self._now(), **parts)
            return replace(records, keys=(*records.keys, stored))

        self._change(with_key)
        return NewKey(name=name, scopes=wanted, key=key)

    def revoke(self, name: str) -> None:
        """Revoke a key. Raises InvalidRequest for an unknown name or that of the settings' key; KeysUnavailable where
        that cannot be stored. Blocking."""
        if name == SETTINGS_KEY:
            raise InvalidRequest("That key comes from --api-key: change it there and restart", param="name")

        def without_key(records: KeyRecords) -> KeyRecords:
            remaining = tuple(stored for stored in records.keys if stored.name != name)
            if len(remaining) == len(records.keys):
                raise InvalidRequest(f"There is no key {name}", param="name")
            return replace(records, keys=remaining)

        self._change(without_key)

    def save(self) -> None:
        """Write the usage since the last time to the file. Raises KeysUnavailable. Blocking."""
        with self._lock:
            unsaved = any(key.unsaved_usage.last_at for key in self._by_hash.values())
        if unsaved:
            self._change(lambda records: records)

    def _change(self, change: Callable[[KeyRecords], KeyRecords]) -> None:
        """Apply a change to the file's current contents, and load them. The memory is not locked while the disk
        works."""
        with self._file_lock, self._file.lock():
            found = self._file.read()
            with self._lock:
                saved = {stored: key.unsaved_usage for stored, key in self._by_hash.items()}
                current = self._records
            records = change(found if found is not None else current)
            records = replace(records, keys=tuple(_with_usage(stored, saved) for stored in records.keys))
            self._file.write(records)
            with self._lock:
                self._replace(records)
                for key in self._by_hash.values():
                    key.unsaved_usage = key.unsaved_usage.minus(saved.get(key.stored.hash))

    def _candidates(self, presented: str) -> tuple[bytes, list[KeyHash]]:
        """Return the digest of a presented key, and the hashes of the stored keys with its tag."""
        with self._lock:
            self._reload_if_due()
            key_digest = digest(self._records.secret, presented)
            return key_digest, [
                key.stored.key_hash for key in self._by_hash.values() if key.stored.tag == tag(key_digest)
            ]

    def _prove(self, presented: str, own: bytes) -> Key | None:
        """Verify a presented key and remember it; None if invalid. Blocking: scrypt is slow."""
        key_digest, candidates = self._candidates(presented)
        proven = next((stored for stored in candidates if matches(stored, key_digest)), None)
        if proven is None:
            return None
        with self._lock:
            if proven.hash in self._by_hash:
                self._proven[own] = proven.hash
            return self._by_hash.get(proven.hash)

    def _proven_key(self, own: bytes) -> Key | None:
        """Return the verified key of that digest if it is still valid."""
        with self._lock:
            self._reload_if_due()
            return self._by_hash.get(self._proven.get(own, ""))

    # -- under the lock ---------------------------------------------------------------------------------------------

    def _reload_if_due(self) -> None:
        """Load changes by another program, every `reload_s`; where the file cannot be read, the loaded keys stay."""
        now = time.monotonic()
        if now - self._reloaded_at >= self._reload_s:
            self._reloaded_at = now
            if (records := self._file.read_if_changed()) is not None:
                self._replace(records)

    def _replace(self, records: KeyRecords) -> None:
        """Replace the loaded keys. Those that stay are the same objects, to which requests under way refer."""
        before, self._by_hash, self._records = self._by_hash, {}, records
        for stored in records.keys:
            key = before.get(stored.hash) or Key(stored, KeyLimiter(stored.limits, time.monotonic))
            key.stored = stored
            self._by_hash[stored.hash] = key
        self._proven = {own: proven for own, proven in self._proven.items() if proven in self._by_hash}


def _with_usage(stored: StoredKey, usage: Mapping[str, KeyUsage]) -> StoredKey:
    more = usage.get(stored.hash)
    return stored if more is None else replace(stored, use=stored.use.plus(more))
