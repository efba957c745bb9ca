"""View: everything that one frame of the console shows, read once; and the model in view, of several in the engine."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from console.link.protocol import ApiStatus, EngineLink
from console.link.status import LinkStatus, link_status
from console.tui.keymap import ConsoleBinding
from engine.snapshot import ModelReading, Snapshot, WorkerReading


@dataclass(frozen=True, slots=True)
class View:
    """The input of one frame. The app reads it and passes it down; nothing else reads the link's snapshot.

    published: the snapshot as the engine published it.
    snapshot: the same with the state and the knobs of the model in view.
    model_key: key of the model that the operator chose, "" for none.
    """

    published: Snapshot
    snapshot: Snapshot
    api: ApiStatus
    link_status: LinkStatus
    model_key: str = ""

    @classmethod
    def read(cls, link: EngineLink, model_key: str = "") -> View:
        """Read the link: its snapshot exactly once."""
        published = link.snapshot()
        return cls(published, in_view(published, model_key), link.api_status(), link_status(link), model_key)

    @property
    def model(self) -> ModelReading | None:
        """The model in view; None where there is none."""
        return model_in_view(self.published, self.model_key)

    @property
    def model_name(self) -> str:
        """Name of the model in view where there are several; "" means the only one, or the engine's first."""
        model = self.model
        return model.name if model is not None and len(self.published.models) > 1 else ""

    def refusal(self, binding: ConsoleBinding) -> str:
        """Return why the link refuses what a binding does; "" where it does not."""
        return self.link_status.refusal_of(binding.call, changes=binding.mutates)

    @property
    def is_read_only(self) -> bool:
        """True if the link refuses every command."""
        return self.link_status.read_only


def model_in_view(snapshot: Snapshot, key: str) -> ModelReading | None:
    """The model of that key, else the first one; None where there is none."""
    chosen = next((model for model in snapshot.models if model.key == key), None)
    return chosen or default_model(snapshot)


def default_model(snapshot: Snapshot) -> ModelReading | None:
    """The model that requests without a name go to; None where there is none."""
    same = (model for model in snapshot.models if model.status == snapshot.status)
    return next(same, next(iter(snapshot.models), None))


def in_view(snapshot: Snapshot, key: str) -> Snapshot:
    """`snapshot` with the state and the knobs of the model of that key; as it is where there is no such model."""
    model = next((model for model in snapshot.models if model.key == key), None)
    if model is None:
        return snapshot
    return msgspec.structs.replace(
        snapshot,
        status=model.status,
        target_workers=model.target_workers,
        max_prompts=model.max_prompts,
        step_tokens=model.step_tokens,
        threads=model.threads,
        idle_unload_s=model.idle_unload_s,
    )


def next_model_key(snapshot: Snapshot, key: str) -> str:
    """The key of the model that comes after that one, round and round; "" where there is none."""
    keys = [model.key for model in snapshot.models]
    now = model_in_view(snapshot, key)
    return keys[(keys.index(now.key) + 1) % len(keys)] if now is not None else ""


def workers_of(snapshot: Snapshot) -> tuple[WorkerReading, ...]:
    """Return the workers of the model that `snapshot.status` describes."""
    spec = snapshot.status.spec
    return tuple(worker for worker in snapshot.workers if spec is None or worker.model in ("", spec.name))


def oldest_queued_s(snapshot: Snapshot) -> float | None:
    """Return how long the oldest queued request has waited; None where none is queued."""
    return max((row.queued_s for row in snapshot.requests if row.state == "queued"), default=None)


def num_waiting(snapshot: Snapshot) -> int:
    """Return how many requests wait until a model is loaded: they run and queue nowhere yet."""
    return sum(model.waiting for model in snapshot.models)


def prompts_limit(snapshot: Snapshot) -> int:
    """Return the lowest limit that memory sets to max prompts on any worker; 0 where there is room for all of them."""
    limits = [worker.stats.prompts_limit for worker in workers_of(snapshot) if worker.stats.prompts_limit]
    found = min(limits, default=0)
    return found if found < snapshot.max_prompts else 0


def workers_now(snapshot: Snapshot) -> int:
    """How many workers there are while some come or go: those on their first start do not count yet."""
    if snapshot.status.state not in ("ready", "draining"):
        return snapshot.target_workers
    found = workers_of(snapshot)
    coming = sum(worker.state in ("starting", "loading") and not worker.restarts for worker in found)
    return len(found) - coming
