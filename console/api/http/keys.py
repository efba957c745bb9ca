"""Keys: who may ask over HTTP, and for what. What a key consists of is told once, when it is made, and never kept.

keys.json has scrypt of each (see `key_hash`). That is slow, so a key is put through it once, beside the event loop;
from then on it is known by a digest that is keyed with a secret of this process and never leaves its memory.
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

from console.api.http.key_file import KeyFile, KeyHash, KeyRecords, KeyUsage, StoredKey, digest, hashed, matches, tag
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
    """A key that is valid. kept: as the file has it; used: what it was used for since that was written.

    gate: what its limits let pass.
    """

    kept: StoredKey
    gate: KeyLimiter
    used: KeyUsage = field(default_factory=KeyUsage)

    @property
    def name(self) -> str:
        """What the operator calls it."""
        return self.kept.name

    @property
    def scopes(self) -> tuple[Scope, ...]:
        """What it may do."""
        return self.kept.scopes

    @property
    def reading(self) -> KeyReading:
        """The key as others see it."""
        use = self.kept.use.plus(self.used)
        return KeyReading(
            name=self.name,
            scopes=self.scopes,
            limits=self.kept.limits,
            made_at=self.kept.made_at,
            last_used_at=use.last_at,
            requests=use.requests,
            prompt_tokens=use.prompt_tokens,
            output_tokens=use.output_tokens,
        )


class Keys:
    """The key of the settings and those in a folder's keys.json, which several programs may share.

    Safe from any thread; `find` belongs to one loop.  folder: None keeps what is made in memory.  now: unix time.
    look_s: how soon keys that another program makes or revokes are known here.
    """

    def __init__(
        self,
        folder: Path | None = None,
        settings_key: str | None = None,
        *,
        now: Callable[[], float] = time.time,
        look_s: float = 1.0,
    ) -> None:
        self._file = KeyFile(folder)
        self._now = now
        self._changing = threading.Lock()
        self._lock = threading.Lock()
        self._records = KeyRecords(secret=secrets.token_hex(32))
        self._by_hash: dict[str, Key] = {}
        self._own_secret = secrets.token_hex(32)
        self._proven: dict[bytes, str] = {}
        """Digests of keys that were given and are valid, with their hashes."""
        self._proving = asyncio.Lock()
        self._settings: Key | None = None
        self._settings_digest = b""
        if settings_key is not None:
            self._settings_digest = digest(self._own_secret, settings_key)
            kept = StoredKey(name=SETTINGS_KEY, scopes=ALL, tag="", salt="", hash="")
            self._settings = Key(kept, KeyLimiter(NO_LIMITS, time.monotonic))
        self._look_s = look_s
        self._looked_at = -look_s

    def open(self) -> None:
        """Read the file, and write it anew where it is of an earlier version. Raises KeysUnavailable where it cannot be
        read: else everybody would be let in. Blocking."""
        if (records := self._file.read()) is not None:
            with self._lock:
                self._take(records)
            if self._file.is_old:
                self._change(lambda records: records)

    @property
    def required(self) -> bool:
        """Whether a request needs a key: as soon as there is one."""
        if self._settings is not None:
            return True
        with self._lock:
            self._look()
            return bool(self._by_hash)

    async def find(self, given: str) -> Key | None:
        """The valid key that `given` is, None where it is none."""
        own = digest(self._own_secret, given)
        if self._settings is not None and hmac.compare_digest(own, self._settings_digest):
            return self._settings
        found = self._known(own)
        if found is not None or not self._candidates(given)[1]:
            return found
        async with self._proving:  # scrypt takes memory: one at a time
            found = self._known(own)
            return found if found is not None else await asyncio.to_thread(self._prove, given, own)

    def holds(self, key: Key) -> bool:
        """Whether a key that was found is still valid."""
        if key is self._settings:
            return True
        with self._lock:
            self._look()
            return self._by_hash.get(key.kept.hash) is key

    def note(self, key: Key, *, requests: int = 0, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        """Count what a key is used for now."""
        use = KeyUsage(requests=requests, prompt_tokens=prompt_tokens, output_tokens=output_tokens, last_at=self._now())
        with self._lock:
            key.used = key.used.plus(use)

    def readings(self) -> tuple[KeyReading, ...]:
        """All of them, that of the settings first."""
        with self._lock:
            self._look()
            first = () if self._settings is None else (self._settings,)
            return tuple(key.reading for key in (*first, *self._by_hash.values()))

    def make(self, name: str, scopes: tuple[Scope, ...], limits: KeyLimits = NO_LIMITS) -> NewKey:
        """A new key. Raises InvalidRequest for a name that is taken or is none, or for no scopes; KeysUnavailable where
        it cannot be kept. Blocking."""
        name = name.strip()
        if not _NAME.fullmatch(name):
            raise InvalidRequest(
                "A key's name has 1 to 40 letters, digits, spaces or any of . _ @ -, and begins with a letter or digit",
                param="name",
            )
        wanted = tuple(scope for scope in SCOPES if scope in scopes)
        if not wanted or len(wanted) < len(set(scopes)):
            raise InvalidRequest(f"A key needs one or more of these scopes: {', '.join(SCOPES)}", param="scopes")
        key = PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)

        def added(records: KeyRecords) -> KeyRecords:
            if name == SETTINGS_KEY or any(kept.name == name for kept in records.keys):
                raise InvalidRequest(f"There is a key called {name} already; choose another name", param="name")
            parts = hashed(records.secret, key)._asdict()
            kept = StoredKey(name=name, scopes=wanted, limits=limits, made_at=self._now(), **parts)
            return replace(records, keys=(*records.keys, kept))

        self._change(added)
        return NewKey(name=name, scopes=wanted, key=key)

    def revoke(self, name: str) -> None:
        """Refuse a key from now on. Raises InvalidRequest where there is none of that name, or it is the settings';
        KeysUnavailable where that cannot be kept. Blocking."""
        if name == SETTINGS_KEY:
            raise InvalidRequest("That key comes from --api-key: change it there, and start again", param="name")

        def without(records: KeyRecords) -> KeyRecords:
            left = tuple(kept for kept in records.keys if kept.name != name)
            if len(left) == len(records.keys):
                raise InvalidRequest(f"There is no key called {name}", param="name")
            return replace(records, keys=left)

        self._change(without)

    def save(self) -> None:
        """Write down what keys were used for since the last time. Raises KeysUnavailable where it cannot. Blocking."""
        with self._lock:
            unsaved = any(key.used.last_at for key in self._by_hash.values())
        if unsaved:
            self._change(lambda records: records)

    def _change(self, change: Callable[[KeyRecords], KeyRecords]) -> None:
        """Change what the file has now, and know it so. The memory is not locked while the disk works."""
        with self._changing, self._file.locked():
            found = self._file.read()
            with self._lock:
                used = {kept: key.used for kept, key in self._by_hash.items()}
                known = self._records
            records = change(found if found is not None else known)
            records = replace(records, keys=tuple(_counted(kept, used) for kept in records.keys))
            self._file.write(records)
            with self._lock:
                self._take(records)
                for key in self._by_hash.values():
                    key.used = key.used.minus(used.get(key.kept.hash))

    def _candidates(self, given: str) -> tuple[bytes, list[KeyHash]]:
        """The digest by which the file's keys are found, and those that have such a one."""
        with self._lock:
            self._look()
            digested = digest(self._records.secret, given)
            return digested, [key.kept.hashed for key in self._by_hash.values() if key.kept.tag == tag(digested)]

    def _prove(self, given: str, own: bytes) -> Key | None:
        """The valid key that `given` is, known from then on. Blocking: scrypt is slow."""
        digested, candidates = self._candidates(given)
        proven = next((kept for kept in candidates if matches(kept, digested)), None)
        if proven is None:
            return None
        with self._lock:
            if proven.hash in self._by_hash:
                self._proven[own] = proven.hash
            return self._by_hash.get(proven.hash)

    def _known(self, own: bytes) -> Key | None:
        """The key that was proven to be this one and is still valid."""
        with self._lock:
            self._look()
            return self._by_hash.get(self._proven.get(own, ""))

    # -- under the lock ---------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Take what another program wrote, now and then; where that cannot be read, what is known stays."""
        now = time.monotonic()
        if now - self._looked_at >= self._look_s:
            self._looked_at = now
            if (records := self._file.read_if_changed()) is not None:
                self._take(records)

    def _take(self, records: KeyRecords) -> None:
        """Know these keys and no others; those that were known stay the same objects, which requests under way hold."""
        before, self._by_hash, self._records = self._by_hash, {}, records
        for kept in records.keys:
            key = before.get(kept.hash) or Key(kept, KeyLimiter(kept.limits, time.monotonic))
            key.kept = kept
            self._by_hash[kept.hash] = key
        self._proven = {own: proven for own, proven in self._proven.items() if proven in self._by_hash}


def _counted(kept: StoredKey, used: Mapping[str, KeyUsage]) -> StoredKey:
    more = used.get(kept.hash)
    return kept if more is None else replace(kept, use=kept.use.plus(more))
